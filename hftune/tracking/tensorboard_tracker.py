"""One run in TensorBoard's files, in the output folder, through Accelerate's tracker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from accelerate.tracking import TensorBoardTracker

from hftune.config.recipe import flat
from hftune.tracking.backend import EarlierRun, Status, TrackerBackend


class TensorBoardRun(TrackerBackend):
    """Event files in the folder tensorboard."""

    def start(self, config: Mapping[str, Any], earlier: EarlierRun) -> None:
        purge = {"purge_step": earlier.step + 1} if earlier.step else {}
        folder = Path(self.recipe.output_dir) / "tensorboard"
        self._tracker = TensorBoardTracker(self.recipe.track.project, folder, **purge)
        self._tracker.start()
        self._tracker.store_init_configuration({name: str(value) for name, value in flat(config).items()})
        if self.recipe.track.notes:
            self._tracker.log({"notes": self.recipe.track.notes}, step=earlier.step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._tracker.log(dict(values), step=step)

    def log_table(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write the rows as text in Markdown, which TensorBoard renders."""
        lines = [[*map(cell, rows[0])], ["---"] * len(rows[0]), *([cell(value) for value in row.values()] for row in rows)]
        self._tracker.log({name: "\n".join(f"| {' | '.join(line)} |" for line in lines)}, step=step)

    def log_images(self, step: int, name: str, images: Sequence[np.ndarray], captions: Sequence[str]) -> None:
        """Write each image under a name of its own, so that one sees a sample change over the steps; captions as a table."""
        names = [f"{name}/{index}" for index in range(len(images))]
        for key, image_HWC in zip(names, images, strict=True):
            self._tracker.log_images({key: image_HWC[None]}, step=step, dataformats="NHWC")
        self.log_table(step, name, [{"image": key, "caption": text} for key, text in zip(names, captions, strict=True)])

    def finish(self, status: Status) -> None:
        self._tracker.finish()


def cell(value: Any) -> str:
    """Format a value so that it stays within its cell of a Markdown table, and a float so that the table stays narrow."""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return " ".join(text.replace("|", "\\|").split())

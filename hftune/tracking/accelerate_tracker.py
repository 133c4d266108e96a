"""The trackers that Accelerate knows by name, all through its own classes: numbers, the best value, configuration, images.

None but TensorBoard can drop what a killed run had sent, so a resumed run begins a new one, which gets the earlier lines of
metrics.jsonl first.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from PIL import Image

from hftune.config.recipe import Recipe, flat
from hftune.tracking.backend import EarlierRun, Status, TrackerBackend
from hftune.tracking.console import is_number


class AccelerateRun(TrackerBackend):
    """A run at the tracker ``kind``, one of the names of ``accelerate.Accelerator(log_with=...)``."""

    kind: ClassVar[str]

    def start(self, config: Mapping[str, Any], earlier: EarlierRun) -> None:
        own = options(self.kind, self.recipe, earlier)
        self._tracker = LOGGER_TYPE_TO_CLASS[self.kind](**{"run_name": self.recipe.track.project, **own})
        self._tracker.start()
        self._tracker.store_init_configuration({name: str(value) for name, value in flat(config).items()})
        for line in earlier.lines:
            self.log(line["step"], {name: value for name, value in line.items() if name != "step" and is_number(value)})

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if self.kind == "clearml":  # Accelerate tells its series train and eval apart by the words train_ and eval_
            values = {name.replace("/", "_", 1): value for name, value in values.items()}
        self._tracker.log(dict(values), step=step)

    def log_images(self, step: int, name: str, images: Sequence[np.ndarray], captions: Sequence[str]) -> None:
        """Record images where Accelerate has a way to, each in the form that it asks for."""
        for index, (image_HWC, text) in enumerate(zip(images, captions, strict=True)):
            image = Image.fromarray(image_HWC)
            form = {"aim": (image, text), "clearml": image_HWC, "swanlab": [image]}.get(self.kind)
            if form is not None:
                key = f"{name}/{index}"
                self._tracker.log_images({key.replace("/", "_", 1) if self.kind == "clearml" else key: form}, step=step)

    def finish(self, status: Status) -> None:
        self._tracker.finish()


class TensorBoardRun(AccelerateRun):
    """Event files in the folder tensorboard, of which a resumed run drops the later steps."""

    kind = "tensorboard"

    def start(self, config: Mapping[str, Any], earlier: EarlierRun) -> None:
        super().start(config, EarlierRun(earlier.step))  # the files have the earlier lines
        if self.recipe.track.notes:
            self._tracker.log({"notes": self.recipe.track.notes}, step=earlier.step)

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


def cell(value: Any) -> str:
    """Format a value so that it stays within its cell of a Markdown table, and a float so that the table stays narrow."""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return " ".join(text.replace("|", "\\|").split())


def options(kind: str, recipe: Recipe, earlier: EarlierRun) -> dict[str, Any]:
    """Return keyword arguments of a tracker's class at Accelerate, which passes most of them on to the package."""
    track, folder = recipe.track, recipe.folder
    name = track.run_name or recipe.recipe
    match kind:
        case "tensorboard":
            return {"logging_dir": folder / "tensorboard", **({"purge_step": earlier.step + 1} if earlier.step else {})}
        case "trackio":
            return {"name": name, "group": track.group}
        case "swanlab":
            asked = {"group": track.group, "tags": track.tags, "description": track.notes}
            logs = os.environ.get("SWANLAB_LOG_DIR") or str(folder / "swanlog")
            return {"name": name, "log_dir": logs, **{key: value for key, value in asked.items() if value}}
        case "comet_ml":
            from comet_ml import ExperimentConfig

            return {"experiment_config": ExperimentConfig(name=name, tags=list(track.tags))}
        case "aim":
            return {"run_name": name, "logging_dir": None, "experiment": track.project}
        case "clearml":
            # Without these two, ClearML would replace the task of an earlier run, and upload whatever torch saves.
            own = {"reuse_last_task_id": False, "auto_connect_frameworks": False}
            return {"task_name": os.environ.get("CLEARML_TASK", name), "tags": list(track.tags), **own}
        case _:
            return {"dir": str(folder / "dvclive")}

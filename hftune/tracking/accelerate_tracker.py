"""Trackers that Accelerate knows by name, each a small class that says what its package calls things.

All of them get the numbers and the configuration; tables and images where the package has them. None of them can drop what a
killed run had sent, so a resumed run begins a new one, which gets the earlier lines of metrics.jsonl first.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from PIL import Image

from hftune.config.recipe import flat
from hftune.tracking.backend import EarlierRun, TrackerBackend
from hftune.tracking.console import is_number


class AccelerateRun(TrackerBackend):
    """A run at the tracker ``kind``, one of the names of ``accelerate.Accelerator(log_with=...)``."""

    kind: ClassVar[str]

    def options(self) -> dict[str, Any]:
        """Return keyword arguments of the tracker's class at Accelerate, which passes most of them on to the package."""
        return {}

    @property
    def name(self) -> str:
        """The name of this run, which dashboards show."""
        return self.recipe.track.run_name or self.recipe.recipe

    def start(self, config: Mapping[str, Any], earlier: EarlierRun) -> None:
        self._tracker = LOGGER_TYPE_TO_CLASS[self.kind](**{"run_name": self.recipe.track.project, **self.options()})
        self._tracker.start()
        self._tracker.store_init_configuration({name: str(value) for name, value in flat(config).items()})
        for line in earlier.lines:
            self.log(line["step"], {name: value for name, value in line.items() if name != "step" and is_number(value)})

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._tracker.log(dict(values), step=step)

    def log_best(self, step: int, metric: str, value: float) -> None:
        """Record value and step as numbers at that step, each of them once."""
        if step != getattr(self, "_best_step", None):
            self._best_step = step
            self.log(step, {"best/value": value, "best/step": step})

    def close(self) -> None:
        self._tracker.finish()


class TrackioRun(AccelerateRun):
    """A run at Trackio, which keeps it in a database on this machine, or in a Space."""

    kind = "trackio"

    def options(self) -> dict[str, Any]:
        return {"name": self.name, "group": self.recipe.track.group}

    def log_table(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        from trackio import Table

        self._tracker.log({name: Table(columns=list(rows[0]), data=[[*row.values()] for row in rows])}, step=step)

    def log_images(self, step: int, name: str, images: Sequence[np.ndarray], captions: Sequence[str]) -> None:
        import trackio

        pairs = zip(images, captions, strict=True)
        self._tracker.log(
            {f"{name}/{index}": trackio.Image(image_HWC, text) for index, (image_HWC, text) in enumerate(pairs)}, step=step
        )

    def alert(self, title: str, text: str, level: str) -> None:
        import trackio

        self._tracker.tracker.alert(title, text, trackio.AlertLevel({"warning": "warn"}.get(level, level)))


class SwanLabRun(AccelerateRun):
    """A run at SwanLab; SWANLAB_MODE=local or offline needs no account."""

    kind = "swanlab"

    def options(self) -> dict[str, Any]:
        track = self.recipe.track
        asked = {"group": track.group, "tags": track.tags, "description": track.notes}
        folder = os.environ.get("SWANLAB_LOG_DIR") or str(Path(self.recipe.output_dir) / "swanlog")
        return {"name": self.name, "log_dir": folder, **{name: value for name, value in asked.items() if value}}

    def log_images(self, step: int, name: str, images: Sequence[np.ndarray], captions: Sequence[str]) -> None:
        from swanlab import Image as SwanLabImage

        pairs = zip(images, captions, strict=True)
        self._tracker.log({name: [SwanLabImage(image_HWC, caption=text) for image_HWC, text in pairs]}, step=step)


class CometRun(AccelerateRun):
    """A run at Comet, whose key is in COMET_API_KEY or in its own configuration file."""

    kind = "comet_ml"

    def options(self) -> dict[str, Any]:
        from comet_ml import ExperimentConfig

        return {"experiment_config": ExperimentConfig(name=self.name, tags=list(self.recipe.track.tags))}


class AimRun(AccelerateRun):
    """A run in Aim's repository: the .aim folder of the current folder or of one above it."""

    kind = "aim"

    def options(self) -> dict[str, Any]:
        return {"run_name": self.name, "logging_dir": None, "experiment": self.recipe.track.project}

    def log_images(self, step: int, name: str, images: Sequence[np.ndarray], captions: Sequence[str]) -> None:
        for index, (image_HWC, text) in enumerate(zip(images, captions, strict=True)):
            self._tracker.log_images({f"{name}/{index}": (Image.fromarray(image_HWC), text)}, step=step)


class ClearMLRun(AccelerateRun):
    """A task at ClearML."""

    kind = "clearml"

    def options(self) -> dict[str, Any]:
        # Without these two, ClearML would replace the task of an earlier run, and upload whatever torch saves.
        own = {"reuse_last_task_id": False, "auto_connect_frameworks": False}
        return {"task_name": os.environ.get("CLEARML_TASK", self.name), "tags": list(self.recipe.track.tags), **own}

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record numbers. Accelerate tells ClearML's series train and eval apart by the words train_ and eval_."""
        self._tracker.log({name.replace("/", "_", 1): value for name, value in values.items()}, step=step)

    def log_table(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        data = [[*row.values()] for row in rows]
        self._tracker.log_table(name.replace("/", "_", 1), columns=list(rows[0]), data=data, step=step)

    def log_images(self, step: int, name: str, images: Sequence[np.ndarray], captions: Sequence[str]) -> None:
        for index, image_HWC in enumerate(images):
            self._tracker.log_images({f"{name}/{index}".replace("/", "_", 1): image_HWC}, step=step)


class DVCLiveRun(AccelerateRun):
    """Files of DVCLive in the output folder, for DVC's own commands."""

    kind = "dvclive"

    def options(self) -> dict[str, Any]:
        return {"dir": str(Path(self.recipe.output_dir) / "dvclive")}

"""The trackers that Accelerate knows by name, all through its own classes: numbers, the best value, configuration, images.

None of them can drop what a killed run had sent, so a resumed run begins a new one, which gets the earlier lines of
metrics.jsonl first.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
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
        own = options(self.kind, self.recipe)
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


def accelerate_run(kind: str) -> type[AccelerateRun]:
    """Return the class of a tracker that Accelerate knows."""
    return type(f"AccelerateRun_{kind}", (AccelerateRun,), {"kind": kind})


def options(kind: str, recipe: Recipe) -> dict[str, Any]:
    """Return keyword arguments of a tracker's class at Accelerate, which passes most of them on to the package."""
    track, folder = recipe.track, Path(recipe.output_dir)
    name = track.run_name or recipe.recipe
    match kind:
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

"""Writes what an evaluation leaves in the output folder: predictions and images of samples. Knows no model.

Shape suffixes: H and W height and width, C channels (red, green, blue).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from hftune.atomic import atomic_path, explain_write_errors
from hftune.callbacks import Callback, EvaluationDone
from hftune.checkpoints.run_folder import OUT_OF_FOLD, SAMPLE_IMAGES, predictions_file
from hftune.task import Task
from hftune.tracking.jsonl import write_rows

GAP = 4
"""White pixels between two images."""


class Predictions(Callback):
    """Writes the predictions of the last evaluation, those of the best one for ``hftune folds``, and images.

    Args:
        tick: called now and then, as a sign that the process is making progress.
    """

    must_not_fail = True

    def __init__(self, folder: Path, task: Task, tick: Callable[[], None]):
        self.folder, self.task, self.tick = folder, task, tick

    def on_evaluation(self, evaluation: EvaluationDone) -> None:
        if evaluation.split == "test":
            return
        write_rows(self.folder / predictions_file(evaluation.split), evaluation.rows, self.tick)
        if evaluation.is_best and (numbers := self.task.fold_rows) is not None:
            numbered = [{"row": number, **row} for number, row in zip(numbers, evaluation.rows, strict=True)]
            write_rows(self.folder / OUT_OF_FOLD, numbered, self.tick)
        if evaluation.images:
            folder = self.folder / SAMPLE_IMAGES / f"step_{evaluation.step:08d}"
            shutil.rmtree(folder, ignore_errors=True)  # of this step before an interruption
            write_image(folder.with_suffix(".png"), grid(evaluation.images))
            for index, image_HWC in enumerate(evaluation.images):
                write_image(folder / f"{index}.png", image_HWC)


def grid(images: Sequence[np.ndarray]) -> np.ndarray:
    """Set images (H, W, C) uint8, of several sizes, one below the other, on white."""
    width = max(image_HWC.shape[1] for image_HWC in images)
    height = sum(image_HWC.shape[0] for image_HWC in images) + GAP * (len(images) - 1)
    canvas_HWC, top = np.full((height, width, 3), 255, np.uint8), 0
    for image_HWC in images:
        canvas_HWC[top : top + image_HWC.shape[0], : image_HWC.shape[1]] = image_HWC
        top += image_HWC.shape[0] + GAP
    return canvas_HWC


def write_image(path: Path, pixels_HWC: np.ndarray) -> None:
    """Write a PNG atomically, and create its folder if there is none, or raise TrainingError."""
    with explain_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(path) as temporary:
            Image.fromarray(pixels_HWC).save(temporary, format="PNG")

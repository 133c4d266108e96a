"""Writes what an evaluation leaves in the output folder: predictions and images of samples. Knows no model."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from hftune.callbacks import Callback, EvaluationDone
from hftune.checkpoints.run_folder import OUT_OF_FOLD, SAMPLE_IMAGES
from hftune.task import Task
from hftune.tracking.image_grid import grid, write_image
from hftune.tracking.jsonl import write_rows


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
        write_rows(self.folder / "predictions.jsonl", evaluation.rows, self.tick)
        if evaluation.is_best and (numbers := self.task.fold_rows) is not None:
            numbered = [{"row": number, **row} for number, row in zip(numbers, evaluation.rows, strict=True)]
            write_rows(self.folder / OUT_OF_FOLD, numbered, self.tick)
        if evaluation.images:
            folder = self.folder / SAMPLE_IMAGES / f"step_{evaluation.step:08d}"
            shutil.rmtree(folder, ignore_errors=True)  # of this step before an interruption
            write_image(folder.with_suffix(".png"), grid(evaluation.images))
            for index, image_HWC in enumerate(evaluation.images):
                write_image(folder / f"{index}.png", image_HWC)

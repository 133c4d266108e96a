"""Training samples, varied anew in each epoch. Knows no process: what is drawn hangs on seed, epoch and sample alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hftune.task import Task


def augmented(dataset: Any, task: Task, seed: int, epoch: int) -> Any:
    """Return the training data of one epoch, as the task varies them; the data set itself where it varies nothing."""
    return Augmented(dataset, task, seed, epoch) if task.augments else dataset


class Augmented:
    """A data set whose samples go through ``task.augment`` whenever they are loaded.

    The draws do not depend on the number of processes, the micro-batches, the loader's workers or an interruption.
    """

    def __init__(self, dataset: Any, task: Task, seed: int, epoch: int):
        self.dataset, self.task, self.key = dataset, task, (seed, epoch)
        # RandomState for its stream, which is frozen for good (see BatchPlan). One for all samples, seeded anew for each: to
        # make one takes 20 times as long.
        self._draw = np.random.RandomState(0)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, sample: int) -> Any:
        return self._augment(self.dataset[sample], sample)

    def __getitems__(self, samples: Sequence[int]) -> list:
        """Return several samples; ``datasets`` reads them in one go, which is faster."""
        together = getattr(self.dataset, "__getitems__", None)
        examples = together(samples) if together else [self.dataset[sample] for sample in samples]
        return [self._augment(example, sample) for example, sample in zip(examples, samples, strict=True)]

    def _augment(self, example: Any, sample: int) -> Any:
        self._draw.seed([*self.key, sample])
        return self.task.augment(example, self._draw)

"""Augmentation of training samples, different in each epoch. Random numbers depend on seed, epoch and sample only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hftune.task import Task


def augmented(dataset: Any, task: Task, seed: int, epoch: int) -> Any:
    """Return the training data of an epoch, augmented by the task; the data set itself if the task does not augment."""
    return Augmented(dataset, task, seed, epoch) if task.augments else dataset


class Augmented:
    """A data set whose samples pass through ``task.augment`` when they are loaded.

    The result does not depend on the number of processes, the micro-batches, the loader's workers or interruptions.
    """

    def __init__(self, dataset: Any, task: Task, seed: int, epoch: int):
        self.dataset, self.task, self.seed = dataset, task, seed
        self.epoch = epoch
        """May be changed: a loader's workers keep their copy of this data set for all epochs."""
        # RandomState, because numpy guarantees its stream (see BatchPlan). A single one, reseeded for each sample: creating one
        # takes 20 times as long.
        self._rng = np.random.RandomState(0)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, sample: int) -> Any:
        return self._augment(self.dataset[sample], sample)

    def __getitems__(self, samples: Sequence[int]) -> list:
        """Return several samples at once, which is faster with ``datasets``."""
        get_many = getattr(self.dataset, "__getitems__", None)
        examples = get_many(samples) if get_many else [self.dataset[sample] for sample in samples]
        return [self._augment(example, sample) for example, sample in zip(examples, samples, strict=True)]

    def _augment(self, example: Any, sample: int) -> Any:
        self._rng.seed([self.seed, self.epoch, sample])
        return self.task.augment(example, self._rng)

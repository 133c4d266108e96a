"""Steps in which some samples add nothing to the loss, and yet stay in the forward pass. Independent of runs and files.

Taken out of their micro-batch, they would shift the dropout of their neighbours, and perhaps the padding: every other number
would change a little, too, and nobody could tell what the samples themselves have done.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hftune.replay.samples import cut_row, sample_losses
from hftune.strategies.base import StepBatch
from hftune.strategies.data_parallel import DataParallel
from hftune.task import BatchLossTask


class LeavingOut(DataParallel):
    """DataParallel with rows of the training data whose losses count as 0, and whose items do not count.

    Only it can leave rows out: under other strategies, processes do not compute whole micro-batches.
    """

    left_out: frozenset[int] = frozenset()

    def counts(self, batch: StepBatch) -> list[float]:
        _, *rest = counts = super().counts(batch)
        if not self._concerns(batch):
            return counts
        num_items = 0.0
        for micro_batch, weight, loaded in zip(batch.mine, batch.weights, batch.batches, strict=True):
            target, samples = self.task.target(loaded), micro_batch.samples.tolist()
            kept = (place for place, sample in enumerate(samples) if sample not in self.left_out)
            num_items += weight * sum(float(self.task.num_items(cut_row(target, place, len(samples)))) for place in kept)
        return [num_items, *rest]

    def _loss_of(self, batch: StepBatch, seed: int, step: int) -> Callable[[int, Any, Any], Tensor]:
        if not self._concerns(batch):
            return super()._loss_of(batch, seed, step)
        task = self.task
        if isinstance(task, BatchLossTask):
            samples = [sample for micro_batch in batch.plan for sample in micro_batch.samples.tolist()]
            self.task = copy.copy(task)  # the samples stay there for the others to be compared with
            self.task.batch_losses = lambda *rows: self._masked(task.batch_losses(*rows), samples)  # type: ignore[method-assign]
            try:
                return super()._loss_of(batch, seed, step)
            finally:
                self.task = task

        def loss(index: int, outputs: Any, target: Any) -> Tensor:
            samples = batch.mine[index].samples.tolist()
            return self._masked(torch.stack(sample_losses(task, outputs, target, len(samples))), samples).sum()

        return loss

    def _masked(self, losses_B: Tensor, samples: list[int]) -> Tensor:
        is_kept_B = torch.tensor([sample not in self.left_out for sample in samples], device=losses_B.device)
        return losses_B.where(is_kept_B, torch.zeros_like(losses_B))

    def _concerns(self, batch: StepBatch) -> bool:
        return any(sample in self.left_out for micro_batch in batch.plan for sample in micro_batch.samples.tolist())

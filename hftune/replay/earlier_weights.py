"""The batch of a step at the weights of earlier steps, by which ``verdict`` tells whether batch or update is to blame."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hftune.replay.samples import compared_losses, leaving_no_trace, whole_model
from hftune.replay.verdict import EARLIER
from hftune.strategies.base import StepBatch, StepReport
from hftune.task import BatchLossTask

if TYPE_CHECKING:
    from hftune.batch_plan import BatchPlan
    from hftune.replay.engine import Replayer


class EarlierWeights:
    """Computes the batch of one step at the weights of the steps before it, under its own dropout. A look for a replay.

    What belongs to the step alone, its samples and its dropout, stays the same; what differs are the weights.
    """

    def __init__(self, step: int):
        self.step = step
        self.losses: dict[int, float] = {}
        """Mean loss of the batch, by the step after which the weights were those. The last is what the step itself gave."""
        self._loaded: tuple[BatchPlan, StepBatch] | None = None

    def look(self, replayer: Replayer, batch: StepBatch, report: StepReport) -> None:
        """Note the loss at the present weights, which are those after the step before. Collective."""
        if replayer.step == self.step:
            self.losses[self.step - 1] = report.loss
        elif self.step - EARLIER <= replayer.step < self.step:
            self.losses[replayer.step - 1] = batch_loss(replayer, self._batch(replayer), self.step)

    def _batch(self, replayer: Replayer) -> StepBatch:
        plan = replayer.plan
        if (
            self._loaded is None or self._loaded[0] is not plan
        ):  # a run may have been resumed with other micro-batches in between
            self._loaded = plan, replayer.batch_of(self.step)
        return self._loaded[1]


def batch_loss(replayer: Replayer, batch: StepBatch, step: int) -> float:
    """Return the mean loss of a batch at the present weights, with the dropout of its own step. Leaves no trace. Collective."""
    strategy, task = whole_model(replayer), replayer.task
    own = torch.zeros(2, dtype=strategy.exact, device=strategy.device)
    own[1] = batch.counts[0]
    with leaving_no_trace(strategy.sharding.model), torch.no_grad():
        if isinstance(task, BatchLossTask):
            losses_B, _ = compared_losses(replayer, task, batch, step)
            own[0] = losses_B.sum() if strategy.is_main else 0.0
        else:
            for index, weight in enumerate(batch.weights):
                if weight:
                    outputs, inputs = strategy.compute_again(batch, index, replayer.recipe.seed, step - 1)
                    own[0] += task.loss(outputs, task.target(inputs))
    loss, items = strategy.sum(own).tolist()
    return loss / items

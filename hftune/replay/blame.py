"""Whether a step's loss is due to its batch, or to an update of the weights before it: the batch at earlier weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import torch

from hftune.replay.samples import compared_losses, leaving_no_trace, whole_model
from hftune.strategies.base import StepBatch, StepReport
from hftune.task import BatchLossTask

if TYPE_CHECKING:
    from hftune.replay.engine import Replayer

EARLIER = 4
"""Steps before the one in question whose weights the batch is tried at."""
BEFORE = 20
"""Steps before it whose losses say what was usual."""
NOTHING = 0.05
"""Part of a loss that says nothing: batches differ, and so does dropout."""


class EarlierWeights:
    """Computes the batch of one step at the weights of the steps before it, under its own dropout. A look for a replay.

    What belongs to the step alone, its samples and its dropout, stays the same; what differs are the weights.
    """

    def __init__(self, step: int):
        self.step = step
        self.losses: dict[int, float] = {}
        """Mean loss of the batch, by the step after which the weights were those. The last is what the step itself gave."""
        self._loaded: tuple[int, StepBatch] | None = None

    def look(self, replayer: Replayer, batch: StepBatch, report: StepReport) -> None:
        """Note the loss at the present weights, which are those after the step before. Collective."""
        if replayer.step == self.step:
            self.losses[self.step - 1] = report.loss
        elif self.step - EARLIER <= replayer.step < self.step:
            self.losses[replayer.step - 1] = batch_loss(replayer, self._batch(replayer), self.step)

    def _batch(self, replayer: Replayer) -> StepBatch:
        plan = id(replayer.plan)
        if self._loaded is None or self._loaded[0] != plan:  # a run may have been resumed with other micro-batches in between
            self._loaded = plan, replayer.batch_of(self.step)
        return self._loaded[1]


def batch_loss(replayer: Replayer, batch: StepBatch, step: int) -> float:
    """Return the mean loss of a batch at the present weights, with the dropout of its own step. Leaves no trace. Collective."""
    strategy, task = whole_model(replayer), replayer.task
    own = torch.zeros(2, dtype=strategy.exact, device=strategy.device)
    own[1] = batch.counts[0]
    with leaving_no_trace(strategy.sharding.model), torch.no_grad():
        if isinstance(task, BatchLossTask):
            losses_B, _ = compared_losses(replayer, batch, step)
            own[0] = losses_B.sum() if strategy.is_main else 0.0
        else:
            for index, weight in enumerate(batch.weights):
                if weight:
                    outputs, inputs = strategy.compute_again(batch, index, replayer.recipe.seed, step - 1)
                    own[0] += task.loss(outputs, task.target(inputs))
    loss, items = strategy.sum(own).tolist()
    return loss / items


class Usual(NamedTuple):
    """The losses of the steps before one."""

    loss: float
    """In the middle."""
    deviation: float
    """Robust standard deviation."""


def usual_loss(losses: Mapping[int, float], step: int) -> Usual | None:
    """Return what the steps before one had; None if there are fewer than three."""
    before = [losses[number] for number in range(step - BEFORE, step) if number in losses]
    if len(before) < 3:
        return None
    middle = median(before)
    return Usual(middle, 1.4826 * median(abs(value - middle) for value in before))


def verdict(step: int, losses: Mapping[int, float], usual: Usual | None) -> list[str]:
    """Say what made the loss of a step: its batch, or an update before it. Sentences.

    Args:
        losses: of ``EarlierWeights``.
    """
    numbers = sorted(losses)
    if len(numbers) < 2:
        return [f"Nothing was computed before step {step:,}, so that its batch has no loss at earlier weights."]
    values = [losses[number] for number in numbers]
    places = " ".join(f"{number:,}" for number in numbers)
    row = " ".join(f"{value:.4g}" for value in values)
    return [f"The batch of step {step:,} at the weights after step {places}: {row}.", _blame(step, numbers, values, usual)]


def _blame(step: int, numbers: Sequence[int], values: Sequence[float], usual: Usual | None) -> str:
    """Name the cause. ``values``: of the batch at the weights after the steps ``numbers``; the last is the loss in question."""
    last, lowest = values[-1], min(values)
    rises = [later - earlier for earlier, later in pairwise(values)]
    worst = max(range(len(rises)), key=rises.__getitem__)
    excess = last - lowest if usual is None else last - usual.loss
    if last - lowest > max(NOTHING * abs(last), 0.5 * excess):
        return (
            f"The weights make this loss, not the batch: the update of step {numbers[worst + 1]:,} raised it by "
            f"{rises[worst]:.3g}."
        )
    if rises[worst] > NOTHING * abs(last):
        return "The updates before it move this loss up and down: the learning rate may be too high."
    if usual is not None and excess <= 2 * usual.deviation:
        return f"Step {step:,} is no spike: the steps before it had {usual.loss:.4g} +- {usual.deviation:.2g}."
    before = "" if usual is None else f" The steps before it had {usual.loss:.4g} +- {usual.deviation:.2g}."
    return f"The batch makes this loss, no update before it.{before}"

"""Whether a step's loss is due to its batch, or to an update of the weights before it. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

EARLIER = 4
"""How many steps before the one in question the batch is tried at their weights."""
BEFORE = 20
"""How many steps before it say what was usual."""
NOTHING = 0.05
"""A change by this part of a loss says nothing."""
JUMP, MIN_JUMPS = 0.07, 3
"""By what part of a loss updates raise and lower it in turn, and how often, if they are too large. Once is usual."""
UP_AND_DOWN = "he updates before it move this loss up and down: the learning rate may be too high."


class Usual(NamedTuple):
    """The losses of the steps before one."""

    loss: float
    """In the middle."""
    deviation: float
    """Robust standard deviation."""


class Verdict(NamedTuple):
    """What made the loss of a step."""

    sentences: list[str]
    blames_batch: bool


def losses_of(steps: Mapping[int, Mapping[str, Any]]) -> dict[int, float]:
    """Return the finite losses that a ledger has, by step."""
    return {step: line["loss"] for step, line in steps.items() if line.get("loss") is not None}


def suspect_of(losses: Mapping[int, float], first: int, last: int) -> int:
    """Return the step with the greatest loss, of those from ``first`` to ``last``."""
    return max(range(first, last + 1), key=lambda step: losses.get(step, -math.inf))


def usual_loss(losses: Mapping[int, float], step: int) -> Usual | None:
    """Return what the steps before one had; None if there are fewer than three."""
    before = [losses[number] for number in range(step - BEFORE, step) if number in losses]
    if len(before) < 3:
        return None
    middle = median(before)
    return Usual(middle, 1.4826 * median(abs(value - middle) for value in before))


def judge_spike(step: int, losses: Mapping[int, float], usual: Usual | None) -> Verdict:
    """Say what made the loss of a step: its batch, or an update before it.

    Args:
        losses: of its batch, by the step after which the weights were those. The last is the loss in question.
    """
    numbers = sorted(losses)
    if len(numbers) < 2:
        return Verdict([f"Nothing was computed before step {step:,}, so its batch has no loss at earlier weights."], False)
    values = [losses[number] for number in numbers]
    places, row = " ".join(f"{number:,}" for number in numbers), " ".join(f"{value:.4g}" for value in values)
    sentence, blames_batch = _blame(step, numbers, values, usual)
    return Verdict([f"The batch of step {step:,} at the weights after step {places}: {row}.", sentence], blames_batch)


def _blame(step: int, numbers: Sequence[int], values: Sequence[float], usual: Usual | None) -> tuple[str, bool]:
    last, lowest = values[-1], min(values)
    if not math.isfinite(last):
        first = next(place for place, value in enumerate(values) if not math.isfinite(value))
        if first == 0:
            return "The batch has no finite loss at any of these weights: look at its samples.", True
        return (
            f"The weights make this loss, not the batch: not finite since the update of step {numbers[first]:,}.",
            False,
        )
    moves = [later - earlier for earlier, later in pairwise(values)]
    is_jumping = count_turns([move for move in moves if abs(move) > JUMP * abs(last)]) >= MIN_JUMPS
    before = "" if usual is None else f"the steps before it had {usual.loss:.4g} +- {usual.deviation:.2g}."
    if usual is not None and last - usual.loss <= 2 * usual.deviation:
        return f"Step {step:,} is no spike: {before}{f' But t{UP_AND_DOWN}' if is_jumping else ''}", False
    excess = last - lowest if usual is None else last - usual.loss
    if last - lowest > max(NOTHING * abs(last), 0.5 * excess):
        worst = max(range(len(moves)), key=moves.__getitem__)
        update = f"the update of step {numbers[worst + 1]:,} raised it by {moves[worst]:.3g}"
        return f"The weights make this loss, not the batch: {update}.", False
    if is_jumping:
        return f"T{UP_AND_DOWN}", False
    if usual is None:
        few = f"The steps before it are too few to say if step {step:,} is a spike."
        return f"No update before it makes this loss. {few}", False
    return f"The batch makes this loss, no update before it; {before}", True


def count_turns(moves: Sequence[float]) -> int:
    """Count the longest series of moves that go up and down in turn."""
    longest = run = min(1, len(moves))
    for one, other in pairwise(moves):
        run = run + 1 if one * other < 0 else 1
        longest = max(longest, run)
    return longest

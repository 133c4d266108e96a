"""Whether a step's loss is due to its batch, or to an update of the weights before it. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
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
    """The losses of the steps before one: the middle, and their robust standard deviation."""

    loss: float
    deviation: float


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
    last, moves = values[-1], [later - earlier for earlier, later in pairwise(values)]
    large = [move for move in moves if abs(move) > JUMP * abs(last)]
    turns = longest = min(1, len(large))
    for one, other in pairwise(large):
        turns = turns + 1 if one * other < 0 else 1
        longest = max(longest, turns)
    is_jumping = longest >= MIN_JUMPS
    excess = last - min(values) if usual is None else last - usual.loss
    before = "" if usual is None else f"the steps before it had {usual.loss:.4g} +- {usual.deviation:.2g}."
    blames_batch, weights = False, "The weights make this loss, not the batch"
    if not math.isfinite(last) and not math.isfinite(values[0]):
        said, blames_batch = "The batch has no finite loss at any of these weights: look at its samples.", True
    elif not math.isfinite(last):
        first = next(number for number, value in zip(numbers, values, strict=True) if not math.isfinite(value))
        said = f"{weights}: not finite since the update of step {first:,}."
    elif usual is not None and last - usual.loss <= 2 * usual.deviation:
        said = f"Step {step:,} is no spike: {before}{f' But t{UP_AND_DOWN}' if is_jumping else ''}"
    elif last - min(values) > max(NOTHING * abs(last), 0.5 * excess):
        worst = max(range(len(moves)), key=moves.__getitem__)
        said = f"{weights}: the update of step {numbers[worst + 1]:,} raised it by {moves[worst]:.3g}."
    elif is_jumping:
        said = f"T{UP_AND_DOWN}"
    elif usual is None:
        few = f"The steps before it are too few to say if step {step:,} is a spike."
        said = f"No update before it makes this loss. {few}"
    else:
        said, blames_batch = f"The batch makes this loss, no update before it; {before}", True
    places, row = " ".join(f"{number:,}" for number in numbers), " ".join(f"{value:.4g}" for value in values)
    return Verdict([f"The batch of step {step:,} at the weights after step {places}: {row}.", said], blames_batch)

"""Whether a step's loss is due to its batch, or to an update of the weights before it. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

EARLIER = 4
"""Steps before the one in question whose weights the batch is tried at."""
BEFORE = 20
"""Steps before it whose losses say what was usual."""
NOTHING = 0.05
"""Part of a loss that says nothing."""
JUMP, JUMPS = 0.07, 3
"""Parts of a loss by which updates raise and lower it in turn, and how often, if they are too large. Once is usual."""
BATCH = "The batch makes this loss, no update before it"
"""How a verdict begins that blames samples."""
MOVED, TOO_HIGH = "the updates before it move", "the learning rate may be too high."


def losses_of(steps: Mapping[int, Mapping[str, Any]]) -> dict[int, float]:
    """Return the losses that a ledger has, by step; an old one has none, and a step that was left out has none, either."""
    return {step: line["loss"] for step, line in steps.items() if line.get("loss") is not None}


def suspect_of(losses: Mapping[int, float], first: int, last: int) -> int:
    """Return the step with the greatest loss, of those from ``first`` to ``last``."""
    return max(range(first, last + 1), key=lambda step: losses.get(step, -math.inf))


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
    if not math.isfinite(last):
        first = next(place for place, value in enumerate(values) if not math.isfinite(value))
        if first == 0:
            return "The batch has no finite loss at any of these weights: look at its samples."
        return f"The weights make this loss, not the batch: since the update of step {numbers[first]:,} it is not finite."
    moves = [later - earlier for earlier, later in pairwise(values)]
    worst = max(range(len(moves)), key=moves.__getitem__)
    is_jumping = turns([move for move in moves if abs(move) > JUMP * abs(last)]) >= JUMPS
    before = "" if usual is None else f"the steps before it had {usual.loss:.4g} +- {usual.deviation:.2g}."
    if usual is not None and last - usual.loss <= 2 * usual.deviation:
        but = f" But {MOVED} it up and down: {TOO_HIGH}" if is_jumping else ""
        return f"Step {step:,} is no spike: {before}{but}"
    excess = last - lowest if usual is None else last - usual.loss
    if last - lowest > max(NOTHING * abs(last), 0.5 * excess):
        return (
            f"The weights make this loss, not the batch: the update of step {numbers[worst + 1]:,} raised it by "
            f"{moves[worst]:.3g}."
        )
    if is_jumping:
        return f"{MOVED.capitalize()} this loss up and down: {TOO_HIGH}"
    if usual is None:
        return f"No update before it makes this loss. The steps before it are too few to say if step {step:,} is a spike."
    return f"{BATCH}; {before}"


def turns(moves: Sequence[float]) -> int:
    """Count the longest series of moves that go up and down in turn."""
    longest = run = min(1, len(moves))
    for one, other in pairwise(moves):
        run = run + 1 if one * other < 0 else 1
        longest = max(longest, run)
    return longest

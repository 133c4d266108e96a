"""The search for the change that made a run bad. Knows neither recipes nor models: a caller computes the steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import mul
from typing import Any, TypeVar

import numpy as np

from hftune.errors import ConfigError, DataError

Change = TypeVar("Change")

MIN_STEPS, MAX_STEPS = 15, 100
"""How many steps a try computes, if the user does not say. A warmup hides a learning rate in the first ones."""
CLEARLY_APART = 0.05
"""Relative difference of two runs' losses that is enough to tell which of them a try is like."""
UNCLEAR = (0.3, 0.7)
"""Places between good (0) and bad (1) that say little about which of them a try is like."""
CEILING = 10.0
"""Losses count up to this multiple of the good end's largest. Otherwise a loss of 1e30 makes one of 1e3 look good."""
NUM_PARTS = 3
"""Into how many parts the steps are cut, whose mean losses are compared: single losses say when a run diverges, by chance."""


@dataclass(frozen=True)
class Scale:
    """Measures how far a try is on the way from the good end to the bad one, by the losses of the same steps."""

    good: Sequence[float]
    bad: Sequence[float]

    def curve(self, losses: Sequence[float]) -> list[float]:
        """Return the mean loss of the first, the second and the last third of the steps."""
        ceiling = CEILING * (max((abs(loss) for loss in self.good if math.isfinite(loss)), default=0.0) or 1.0)
        capped = [min(loss, ceiling) if math.isfinite(loss) else ceiling for loss in losses]
        return [float(part.mean()) for part in np.array_split(capped, min(NUM_PARTS, len(capped)))]

    @property
    def difference(self) -> float:
        """How far the curves of the ends are apart, relative to the higher one; 0 if they are equal."""
        good, bad = self.curve(self.good), self.curve(self.bad)
        return math.dist(good, bad) / (max(math.hypot(*good), math.hypot(*bad)) or 1.0)

    def place(self, losses: Sequence[float]) -> float:
        """Return 0 for the curve of the good end, 1 for that of the bad one; of others, how far they have gone that way."""
        good = self.curve(self.good)
        way = [bad - start for bad, start in zip(self.curve(self.bad), good, strict=True)]
        gone = [value - start for value, start in zip(self.curve(losses), good, strict=True)]
        return sum(map(mul, gone, way)) / sum(map(mul, way, way))


def steps_to_compute(good: Sequence[float], bad: Sequence[float]) -> int:
    """Return how many steps a try should compute, from the losses that two runs had: as few as tell them apart.

    If none do clearly, as many as tell them apart best.
    """
    most = min(len(good), len(bad), MAX_STEPS)
    if most <= MIN_STEPS:
        return most
    apart = {count: Scale(good[:count], bad[:count]).difference for count in range(MIN_STEPS, most + 1)}
    return next((count for count, value in apart.items() if value >= CLEARLY_APART), max(apart, key=apart.__getitem__))


def find_bad(changes: Sequence[Change], is_bad: Callable[[Sequence[Change]], bool]) -> list[Change]:
    """Return changes that are bad together, such that the last of them is needed for that, then the one before, and so on.

    The changes are made one after the other, and the one is found with which the run turns bad, by halving: log2(N) tries. If
    it is not bad alone, it needs some of those before it: the search goes on among these, with it.

    Args:
        changes: all together are bad, and none is good; neither is tried.
        is_bad: tries some of the changes, in their order. False also if they cannot be tried.
    """
    found: list[Change] = []
    end = len(changes)
    while end > 0 and (not found or not is_bad(found)):
        good, bad = 0, end  # the first ``good`` changes with those found are not bad, the first ``bad`` are
        while bad - good > 1:
            middle = (good + bad) // 2
            good, bad = (good, middle) if is_bad([*changes[:middle], *found]) else (middle, bad)
        end = bad - 1
        found.insert(0, changes[end])
    return found


@dataclass
class Try:
    """Some of the changes, and what came of them."""

    changes: list[str]
    losses: list[float] = field(default_factory=list)
    curve: list[float] = field(default_factory=list)
    """Their means, by thirds."""
    place: float | None = None
    """Between the good end, 0, and the bad one, 1; None if it could not be computed."""
    problem: str | None = None
    """Why not."""

    @property
    def is_bad(self) -> bool:
        return self.place is not None and self.place > 0.5

    @property
    def is_unclear(self) -> bool:
        return self.place is not None and UNCLEAR[0] <= self.place <= UNCLEAR[1]


class Judge:
    """Makes tries, each once, and says which are bad: those nearer to the bad end than to the good one.

    Args:
        compute: returns the losses of the steps with some of the changes.
        scale: of the two ends.
        on_try: called after each try.
    """

    def __init__(self, compute: Callable[[Any], Sequence[float]], scale: Scale, on_try: Callable[[Try], None]):
        self.compute, self.scale, self.on_try = compute, scale, on_try
        self.tries: dict[tuple[str, ...], Try] = {}
        """By their changes."""

    def look(self, changes: Sequence[Any]) -> Try:
        """Make a try, unless it has been made."""
        key = tuple(map(str, changes))
        if key not in self.tries:
            made = self.tries[key] = Try([*key])
            try:
                made.losses = [*self.compute(changes)]
                made.curve, made.place = self.scale.curve(made.losses), self.scale.place(made.losses)
            except (ConfigError, DataError) as error:
                made.problem = str(error)
            self.on_try(made)
        return self.tries[key]

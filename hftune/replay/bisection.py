"""The search for the change that made a run bad: among changes without an order, and along a list of versions.

It knows neither recipes nor models: a caller computes the steps, and says how bad they are. Python's own module is ``bisect``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import mul
from typing import Any, Generic, TypeVar

from hftune.errors import ConfigError, DataError

Change = TypeVar("Change")
Item = TypeVar("Item")

FEWEST_STEPS, MOST_STEPS = 15, 100
"""Steps that a try computes, if the user does not say. A warmup hides a learning rate in the first ones."""
CLEARLY_APART = 0.05
"""Relative difference of two runs' losses that is enough to tell which of them a try is like."""
UNCLEAR = (0.3, 0.7)
"""Places between good (0) and bad (1) that say little about which of them a try is like."""
CEILING = 10.0
"""Losses count up to this multiple of the good end's largest. Otherwise a loss of 1e30 makes one of 1e3 look good."""
NUM_PARTS = 3
"""The mean losses of so many parts of the steps are compared: single losses say when a run diverges, which is chance."""


@dataclass(frozen=True)
class Scale:
    """Measures how far a try is on the way from the good end to the bad one.

    Args:
        good: the losses of the good end's steps.
        bad: those of the bad end, of the same steps.
    """

    good: Sequence[float]
    bad: Sequence[float]

    @property
    def ceiling(self) -> float:
        return CEILING * (max((abs(loss) for loss in self.good if math.isfinite(loss)), default=0.0) or 1.0)

    def curve(self, losses: Sequence[float]) -> list[float]:
        """Return the mean loss of the first, the second and the last third of the steps."""
        capped = [min(loss, self.ceiling) if math.isfinite(loss) else self.ceiling for loss in losses]
        return [sum(part) / len(part) for part in split(capped, min(NUM_PARTS, len(capped)))]

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
    most = min(len(good), len(bad), MOST_STEPS)
    if most <= FEWEST_STEPS:
        return most
    apart = {count: Scale(good[:count], bad[:count]).difference for count in range(FEWEST_STEPS, most + 1)}
    return next((count for count, value in apart.items() if value >= CLEARLY_APART), max(apart, key=apart.__getitem__))


@dataclass(frozen=True)
class Found(Generic[Change]):
    """What a search has come to."""

    changes: list[Change]
    """Together they are bad."""
    is_smallest: bool
    """Whether they are not bad if any of them is left out; False if the tries were used up before."""


def smallest_bad(
    changes: Sequence[Change], is_bad: Callable[[Sequence[Change]], bool], most_tries: int | None = None
) -> Found[Change]:
    """Find a smallest set of changes that is bad, by delta debugging: ddmin of Zeller and Hildebrandt (2002).

    One cause among N takes about 2 log2(N) tries. Causes that act together are found together; of two that are each bad alone,
    one is found.

    Args:
        changes: that are bad all together; this is not tried.
        is_bad: tries some of the changes, in their order. False also if they cannot be tried. No set is tried twice.
        most_tries: None: as many as it takes, which at worst is N squared.
    """
    known: dict[frozenset[int], bool] = {frozenset(range(len(changes))): True}

    def tried_bad(places: Sequence[int]) -> bool:
        if (key := frozenset(places)) not in known:
            if most_tries is not None and len(known) > most_tries:
                raise _NoTriesLeft
            known[key] = is_bad([changes[place] for place in places])
        return known[key]

    left, num_parts = list(range(len(changes))), 2
    try:
        while len(left) > 1:
            parts = split(left, num_parts)
            rests = [[place for place in left if place not in set(part)] for part in parts]
            if (part := next(filter(tried_bad, parts), None)) is not None:
                left, num_parts = part, 2
            elif num_parts > 2 and (rest := next(filter(tried_bad, rests), None)) is not None:
                left, num_parts = rest, num_parts - 1
            elif num_parts < len(left):
                num_parts = min(2 * num_parts, len(left))
            else:
                break
    except _NoTriesLeft:
        return Found([changes[place] for place in left], is_smallest=False)
    return Found([changes[place] for place in left], is_smallest=True)


class _NoTriesLeft(Exception):
    """The search has used up its tries."""


def split(items: list[Item], num_parts: int) -> list[list[Item]]:
    """Cut a list into parts of equal lengths, give or take one."""
    ends = [len(items) * part // num_parts for part in range(num_parts + 1)]
    return [items[start:end] for start, end in pairwise(ends)]


def first_bad(count: int, is_bad: Callable[[int], bool | None]) -> tuple[int, int]:
    """Find where a list of versions turns bad, with about log2(count) tries.

    Args:
        count: of the versions. The first is good and the last bad; they are not tried.
        is_bad: tries a version by its number; None if it cannot be tried. No version is tried twice.

    Returns:
        The last version known to be good and the first known to be bad. Those between them, if any, cannot be tried.
    """
    good, bad, skipped = 0, count - 1, set()
    while open_ := [place for place in range(good + 1, bad) if place not in skipped]:
        middle = min(open_, key=lambda place: abs(place - (good + bad) / 2))
        verdict = is_bad(middle)
        if verdict is None:
            skipped.add(middle)
        elif verdict:
            bad = middle
        else:
            good = middle
    return good, bad


@dataclass
class Try:
    """Some of the changes, and what came of them."""

    changes: list[str]
    losses: list[float] = field(default_factory=list)
    """Of the steps that were computed."""
    curve: list[float] = field(default_factory=list)
    """Their means, by thirds."""
    place: float | None = None
    """Between the good end, 0, and the bad one, 1; None if it could not be computed."""
    problem: str | None = None
    """Why not."""

    @property
    def is_bad(self) -> bool | None:
        return None if self.place is None else self.place > 0.5

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

    def __init__(
        self, compute: Callable[[Any], Sequence[float]], scale: Scale, on_try: Callable[[Try], None] = lambda made: None
    ):
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

"""Mean differences of two runs with the interval in which they may lie by chance. Knows no files.

Steps of a run depend on each other, samples of an evaluation do not, and neither do runs with different seeds: each of them has
an interval of its own. Shape suffixes: S steps, N samples or seeds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import bdtr, stdtrit

COVERAGE = 0.95
NUM_BATCHES = 8
WARM_UP = 0.2
"""Share of the first steps that does not count: there, differences say more about the beginning than about the runs."""
MIN_STEPS = 60
"""With fewer steps there is no interval: batch means of so few would be too sure of themselves."""
MIN_UNEQUAL_STEPS = 40
"""The same of the steps that are left without the beginning."""
MIN_ROWS = 10
MIN_SEEDS = 3


@dataclass(frozen=True)
class Interval:
    """A mean difference, B less A, and where it may lie by chance."""

    mean: float
    half_width: float
    """Of the 95 % interval."""

    @property
    def is_significant(self) -> bool:
        """Whether 0 lies outside."""
        return abs(self.mean) > self.half_width


def of_independent(differences_N: Sequence[float] | np.ndarray, min_count: int = 2) -> Interval | None:
    """Return the mean of independent differences with Student's interval; None with fewer than ``min_count``."""
    values_N = np.asarray(differences_N, float)
    if len(values_N) < max(2, min_count) or not np.isfinite(values_N).all():
        return None
    deviation = values_N.std(ddof=1) / math.sqrt(len(values_N))
    return Interval(float(values_N.mean()), float(_quantile(len(values_N) - 1) * deviation))


def of_steps(differences_S: Sequence[float] | np.ndarray) -> Interval | None:
    """Return the mean of the differences of successive steps, with the interval of batch means; None with too few steps.

    The steps are cut into 8 batches, whose means are nearly independent although the steps are not. Of AR(1) noise with a
    correlation of 0.9, 250 steps, 95 % intervals covered the mean in 91 % of cases, the naive one in 37 %.
    """
    start = first_of_interval(differences_S)
    if start is None:
        return None
    return of_independent(np.asarray(differences_S, float)[start:].reshape(NUM_BATCHES, -1).mean(1))


def first_of_interval(differences_S: Sequence[float] | np.ndarray) -> int | None:
    """Return the index of the first step that counts for the interval of batch means; None if there are too few steps.

    The first 20 % do not count, nor steps before the first that differs, as in a run that was resumed from the other's
    checkpoint, nor the few that 8 equal batches cannot take.
    """
    num_steps, unequal = len(differences_S), np.flatnonzero(differences_S)
    start = max(int(WARM_UP * num_steps), int(unequal[0]) if len(unequal) else 0)
    start += (num_steps - start) % NUM_BATCHES
    return start if num_steps >= MIN_STEPS and num_steps - start >= MIN_UNEQUAL_STEPS else None


def of_unpaired(a_N: Sequence[float], b_N: Sequence[float], min_count: int = 2) -> Interval | None:
    """Return the difference of two means with Welch's interval; None if a side has fewer than ``min_count`` values."""
    if min(len(a_N), len(b_N)) < max(2, min_count) or not np.isfinite([*a_N, *b_N]).all():
        return None
    sides = [np.asarray(values, float) - a_N[0] for values in (a_N, b_N)]  # equal values are then 0, whose mean has no rounding
    parts = [values.var(ddof=1) / len(values) for values in sides]
    mean = float(sides[1].mean() - sides[0].mean())
    if (total := sum(parts)) == 0:
        return Interval(mean, 0.0)
    freedom = total**2 / sum(part**2 / (len(values) - 1) for part, values in zip(parts, sides, strict=True))
    return Interval(mean, float(_quantile(freedom) * math.sqrt(total)))


def _quantile(freedom: float) -> float:
    """Return how many standard errors Student's interval reaches to either side."""
    return float(stdtrit(freedom, 0.5 + COVERAGE / 2))


def mcnemar(won: int, lost: int) -> float:
    """Return the exact two-sided p-value of McNemar's test.

    Args:
        won, lost: rows that only B has right, and rows that only A has right.
    """
    return 1.0 if won + lost == 0 else min(1.0, 2 * float(bdtr(min(won, lost), won + lost, 0.5)))

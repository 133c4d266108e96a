"""When two computations of one step count as equal: the one tolerance of compare, replay, bisect and verify. Knows no run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

TOLERANCE = 2e-6
"""Relative difference of a step's loss or gradient norm that other processes, threads, devices or code may make by rounding.
The largest rounding met from equal weights was 2e-7, the smallest planted cause 1.6e-5. It does not grow with the steps."""


def relative(a: float | None, b: float | None) -> float:
    """Return the relative difference of two values; infinite if only one is finite. In a ledger, None stands for the others."""
    is_finite = [value is not None and math.isfinite(value) for value in (a, b)]
    if a == b or not any(is_finite):
        return 0.0
    return abs(a - b) / max(abs(a), abs(b)) if all(is_finite) else math.inf


@dataclass(frozen=True)
class StepDifference:
    """How a step that was computed again compares with the ledger."""

    loss: float
    """Relative, as is that of the gradient norms."""
    grad_norm: float
    same_samples: bool

    @property
    def largest(self) -> float:
        return max(self.loss, self.grad_norm)

    @property
    def is_bit_equal(self) -> bool:
        return self.same_samples and self.largest == 0

    @property
    def is_equal(self) -> bool:
        """Whether nothing differs but rounding."""
        return self.same_samples and self.largest <= TOLERANCE


def difference(step: Any, line: Mapping[str, Any]) -> StepDifference:
    """Compare a ``ReplayedStep`` with its line in the ledger."""
    loss, norm = (relative(getattr(step, name), line.get(name)) for name in ("loss", "grad_norm"))
    return StepDifference(loss, norm, step.digest == line.get("digest"))

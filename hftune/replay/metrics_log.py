"""Reads metrics.jsonl: the curves of a run, its confusion matrices, and the scores of its classes. Knows no page."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hftune.tracking.jsonl import lines_of

MATRIX = "confusion_matrix"
PER_CLASS = "per_class"
Points = tuple[list[int], list[float | None]]
"""Steps and values."""


@dataclass
class Curve:
    """One metric over the steps of a run, in the order of the file. NaN stands for a number that was not finite."""

    steps: array = field(default_factory=lambda: array("q"))
    values: array = field(default_factory=lambda: array("d"))

    def finite(self) -> np.ndarray:
        """Return the values that are numbers."""
        values = np.asarray(self.values)
        return values[np.isfinite(values)]

    def last(self) -> float | None:
        """Return the last value; None if it is not finite."""
        return self.values[-1] if self.values and np.isfinite(self.values[-1]) else None

    def ordered(self) -> tuple[np.ndarray, np.ndarray]:
        """Return steps and values by ascending step; if a step was logged twice, its last value."""
        steps, values = np.asarray(self.steps), np.asarray(self.values)
        if (np.diff(steps) > 0).all():
            return steps, values
        steps, last = np.unique(steps[::-1], return_index=True)
        return steps, values[::-1][last]

    def thinned(self, limit: int) -> Points:
        """Return steps and values of at most about ``limit`` points, values to six digits, None where not finite.

        Of each stretch of the curve its least and its greatest value are kept, so that no peak is lost; and both ends.
        """
        steps, values = self.ordered()
        if len(steps) > limit:
            rows, starts = stretches(values, limit)
            least = np.where(np.isfinite(rows), rows, np.inf).argmin(axis=1) + starts
            greatest = np.where(np.isfinite(rows), rows, -np.inf).argmax(axis=1) + starts
            kept = np.unique(np.concatenate([least, greatest, [0, len(values) - 1]]))
            kept = kept[kept < len(values)]
            steps, values = steps[kept], values[kept]
        return points(steps, values)

    def means(self, limit: int) -> Points | None:
        """Return the mean of each stretch, at its last step; None if ``thinned`` keeps every point.

        Smoothing starts from them: the kept points alone would give the middle between the extremes.
        """
        steps, values = self.ordered()
        if len(steps) <= limit:
            return None
        rows, starts = stretches(values, limit)
        counts = np.isfinite(rows).sum(axis=1)
        sums = np.where(np.isfinite(rows), rows, 0.0).sum(axis=1)
        means = np.divide(sums, counts, out=np.full(len(rows), np.nan), where=counts > 0)
        ends = np.minimum(starts + rows.shape[1], len(values)) - 1
        return points(steps[ends], means)


def stretches(values: np.ndarray, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut a curve into at most ``limit / 2`` stretches of equal length: return their values, filled up with NaN, and starts."""
    size = -(-2 * len(values) // limit)
    count = -(-len(values) // size)
    padded = np.full(size * count, np.nan)
    padded[: len(values)] = values
    return padded.reshape(count, size), np.arange(count) * size


def points(steps: np.ndarray, values: np.ndarray) -> Points:
    """Return points as JSON has them: values to six digits, which halves the file, and None where not finite."""
    return steps.tolist(), [float(f"{value:.6g}") if np.isfinite(value) else None for value in values.tolist()]


@dataclass
class Log:
    """What metrics.jsonl holds."""

    curves: dict[str, Curve] = field(default_factory=dict)
    """By key, such as "train/loss"; those of the test split, which have one point, included."""
    last_step: int = 0
    epochs_per_step: float = 0.0
    matrices: dict[str, tuple[int, list[list[float]]]] = field(default_factory=dict)
    """The last confusion matrix of "eval" and of "test", each with its step; rows are true classes."""
    classes: dict[str, tuple[int, dict[str, dict[str, Any]]]] = field(default_factory=dict)
    """The last scores of each class by its name, likewise."""

    @property
    def last_evaluation(self) -> int | None:
        """The step of the last evaluation; None if there has been none."""
        return max(
            (step for key, curve in self.curves.items() if key.startswith("eval/") for step in curve.steps), default=None
        )

    def value_at(self, key: str, step: int | None) -> float | None:
        """Return a metric at a step, None if it has no finite value there."""
        if key not in self.curves or step is None:
            return None
        steps, values = self.curves[key].ordered()
        found = values[steps == step]
        return float(found[0]) if found.size and np.isfinite(found[0]) else None


def read_log(path: Path) -> Log:
    """Read metrics.jsonl, which may be growing; empty if there is none. Lines that are no metrics are passed over."""
    log, candidates = Log(), {}
    for row in lines_of(path):
        step, epoch = row.pop("step", None), row.pop("epoch", None)
        if not isinstance(step, int) or abs(step) >= 2**62:
            continue
        log.last_step = max(log.last_step, step)
        if step > 0 and is_number(epoch):
            log.epochs_per_step = epoch / step
        for key, value in row.items():
            if value is None or is_number(value):
                curve = log.curves.setdefault(key, Curve())
                curve.steps.append(step)
                curve.values.append(float("nan") if value is None else value)
            elif key.endswith(f"/{MATRIX}"):
                candidates[key.removesuffix(f"/{MATRIX}")] = step, value
            elif key.endswith(f"/{PER_CLASS}") and mapping(value) and all(map(mapping, value.values())):
                log.classes[key.removesuffix(f"/{PER_CLASS}")] = step, value
    for part, (step, value) in candidates.items():
        is_square = isinstance(value, list) and all(isinstance(row, list) and len(row) == len(value) for row in value)
        if is_square and value and all(is_number(count) for row in value for count in row):
            log.matrices[part] = step, value
    return log


def mapping(value: Any) -> dict[str, Any]:
    """Return a JSON object as it is, and anything else as an empty one: files may come from elsewhere."""
    return value if isinstance(value, dict) else {}


def is_number(value: Any) -> bool:
    """Return whether a value can be drawn as a point."""
    return isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**1000)

"""What the files in a run's folder say, as far as they are there and readable. Changes nothing; a run may be writing them."""

from __future__ import annotations

import heapq
import json
import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from hftune.errors import is_number
from hftune.secrecy import without_secrets
from hftune.tracking.jsonl import lines_of, read_object

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The same loader in C, if PyYAML has it: seven times as fast."""
MAX_ROWS = 200_000
"""Rows of predictions.jsonl that are looked through for the largest errors: more would hold up the training."""
FIRST_ROWS, WORST_ROWS = 8, 25
"""Rows that are kept."""
MATRIX, PER_CLASS = "confusion_matrix", "per_class"
Points = tuple[list[int], list[float | None]]
"""Steps and values."""


@dataclass
class Curve:
    """One metric over the steps of a run, in the order of the file. NaN stands for a number that was not finite."""

    steps: array = field(default_factory=lambda: array("q"))
    values: array = field(default_factory=lambda: array("d"))

    def finite(self) -> np.ndarray:
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


@dataclass
class Predictions:
    """A few rows of the last evaluation."""

    first: list[dict[str, Any]] = field(default_factory=list)
    """In data set order."""
    worst: list[dict[str, Any]] = field(default_factory=list)
    """The greatest error first; empty if the rows say nothing about errors."""
    num_rows: int = 0
    """Rows looked at."""
    is_whole: bool = True
    """Whether these are all rows of the file."""


@dataclass
class RunRecord:
    """A run, as its folder shows it. Every part may be empty."""

    folder: Path
    name: str
    """That of the folder; unique on a page."""
    recipe_text: str
    recipe: dict[str, Any]
    """Keys such as "train.lr", with plain values."""
    facts: dict[str, Any]
    """run.json."""
    result: dict[str, Any]
    """result.json, which a finished run has."""
    log: Log
    best: dict[str, Any]
    """metric, value and step of the best model."""
    predictions: Predictions
    images: dict[int, list[Path]]
    """Of the samples of each evaluation, by its step, ascending."""

    @property
    def title(self) -> str:
        return str(self.facts.get("recipe") or self.recipe.get("recipe") or self.name)

    @property
    def is_finished(self) -> bool:
        return bool(self.result)

    @property
    def class_names(self) -> list[str]:
        """Names of the classes; empty if they are not known."""
        names = self.facts.get("labels") or self.recipe.get("task.label_names")
        return [str(name) for name in names] if isinstance(names, list) else []

    def best_point(self) -> tuple[str, int, float] | None:
        """Return metric, step and value of the best model, if all three are known."""
        metric, step, value = (self.best.get(name) for name in ("metric", "step", "value"))
        is_known = isinstance(metric, str) and isinstance(step, int) and is_number(value)
        return (metric, step, float(value)) if is_known else None


def read_run(folder: Path, name: str | None = None, result: Mapping[str, Any] | None = None) -> RunRecord:
    """Read what a page shows of a run; ``result``: of result.json, before it is written."""
    path = folder / "recipe.yaml"
    recipe_text = without_secrets(path.read_text(encoding="utf-8", errors="replace") if path.is_file() else "")
    try:
        recipe = flat(yaml.load(recipe_text, LOADER))
    except yaml.YAMLError:
        recipe = {}
    found = read_object(folder / "result.json") if result is None else dict(result)
    return RunRecord(
        folder=folder,
        name=name or folder.resolve().name,
        recipe_text=recipe_text,
        recipe=recipe,
        facts=read_object(folder / "run.json"),
        result=found,
        log=read_log(folder / "metrics.jsonl"),
        best=mapping(found.get("best")) or read_object(folder / "model" / "hftune.json"),
        predictions=read_predictions(folder / "predictions.jsonl"),
        images=find_images(folder / "samples"),
    )


def run_names(folders: Sequence[Path]) -> list[str]:
    """Name runs by the ends of their paths, as many parts of them as tell all of them apart."""
    parts = [folder.resolve().parts[1:] for folder in folders]  # without the root
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(path[-length:]) for path in parts]
        if len({*names}) == len(names):
            break
    return names


def read_predictions(path: Path) -> Predictions:
    """Find the first rows and those with the largest errors in predictions.jsonl, without holding the others in memory.

    A row's error is what it says, or of a wrong class its probability.
    """
    found = Predictions()
    worst: list[tuple[float, int, dict[str, Any]]] = []
    for index, row in enumerate(lines_of(path)):
        if index == MAX_ROWS:
            found.is_whole = False
            break
        found.num_rows += 1
        if index < FIRST_ROWS:
            found.first.append(row)
        is_wrong = "label" in row and "prediction" in row and row["label"] != row["prediction"]
        error = row.get("error", row.get("probability") if is_wrong else None)
        if is_number(error) and math.isfinite(error):
            heapq.heappush(worst, (float(error), -index, row))  # of equal errors the earlier row; no two rows are ever compared
            if len(worst) > WORST_ROWS:
                heapq.heappop(worst)
    found.worst = [row for _, _, row in sorted(worst, key=lambda entry: entry[:2], reverse=True)]
    return found


def find_images(folder: Path) -> dict[int, list[Path]]:
    """Find the images of the samples of each evaluation, by its step."""
    found: dict[int, list[Path]] = {}
    for path in folder.glob("step_*"):
        number = path.name.removeprefix("step_")
        images = sorted((file for file in path.glob("*.png") if file.stem.isdecimal()), key=lambda file: int(file.stem))
        if number.isdecimal() and images:
            found[int(number)] = images
    return dict(sorted(found.items()))


def flat(values: Any, prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one, with dotted keys. Lists stay whole."""
    if not isinstance(values, Mapping):
        return {}
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) and value else {f"{prefix}{key}": value}
    return found


def plain(value: Any) -> str:
    """Return any value on one line, as JSON has it; a text as it is."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)

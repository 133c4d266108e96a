"""What the files in a run's folder say, as far as they are there and readable. Changes nothing; a run may be writing them."""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from hftune.replay.metrics_log import Log, is_number, mapping, read_log
from hftune.secrecy import without_secrets
from hftune.tracking.jsonl import lines_of

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The same loader in C, if PyYAML has it: seven times as fast."""
MAX_ROWS = 200_000
"""Rows of predictions.jsonl that are looked through for the largest errors: more would hold up the training."""
FIRST_ROWS, WORST_ROWS = 8, 25
"""Rows that are kept."""
MAX_TEXT_LENGTH = 600
"""Characters of a text that are shown."""


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
class Images:
    """Images of one evaluation."""

    step: int
    paths: list[Path]
    """One each sample; or a single one, a grid of all samples."""
    is_grid: bool


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
    images: list[Images]
    """In the order of their steps."""

    @property
    def title(self) -> str:
        """The recipe's name."""
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
    recipe_text = without_secrets(_read_text(folder / "recipe.yaml"))
    try:
        recipe = flat(yaml.load(recipe_text, LOADER))
    except yaml.YAMLError:
        recipe = {}
    found = _read_object(folder / "result.json") if result is None else dict(result)
    return RunRecord(
        folder=folder,
        name=name or folder.resolve().name,
        recipe_text=recipe_text,
        recipe=recipe,
        facts=_read_object(folder / "run.json"),
        result=found,
        log=read_log(folder / "metrics.jsonl"),
        best=mapping(found.get("best")) or _read_object(folder / "model" / "hftune.json"),
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


def find_images(folder: Path) -> list[Images]:
    """Find the images of each evaluation: one each sample where there are such, otherwise all in one."""
    found: dict[int, Images] = {}
    for path in folder.glob("step_*") if folder.is_dir() else ():
        number = path.name.removeprefix("step_").removesuffix(".png")
        if not number.isdecimal():
            continue
        singles = sorted((file for file in path.glob("*.png") if file.stem.isdecimal()), key=lambda file: int(file.stem))
        if singles:
            found[int(number)] = Images(int(number), singles, is_grid=False)
        elif path.suffix == ".png" and path.is_file():
            found.setdefault(int(number), Images(int(number), [path], is_grid=True))
    return [found[step] for step in sorted(found)]


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


def cut(text: str, length: int = MAX_TEXT_LENGTH) -> str:
    """Return a text, its end left out if it is too long."""
    return text if len(text) <= length else f"{text[: length - 1]}\N{HORIZONTAL ELLIPSIS}"


def _read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty if there is none."""
    try:
        return mapping(json.loads(_read_text(path) or "{}"))
    except ValueError:
        return {}

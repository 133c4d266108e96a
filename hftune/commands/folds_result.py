"""Joins the finished folds of ``hftune folds``: predictions in the order of the rows, mean and deviation of the metrics."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from hftune.atomic import atomic_path, explain_write_errors, write_text
from hftune.checkpoints.output_dir import TrainResult
from hftune.checkpoints.run_folder import OUT_OF_FOLD
from hftune.config import Recipe
from hftune.errors import ConfigError
from hftune.tracking.console import aligned, is_number, short
from hftune.tracking.facts import differing
from hftune.tracking.jsonl import read_lines, strict_json
from hftune.tracking.summary import best_and_last

FOLDS = "folds.json"
AGAIN = "the folds are not of the same data. Train all of them again with resume=never, or set a different output_dir."


def join_folds(recipes: Sequence[Recipe]) -> str:
    """Write out_of_fold.jsonl and folds.json into the folder above the folds, and return what to print.

    Raises:
        ConfigError: a fold lacks its predictions, or the folds are not of the same data.
    """
    check_same_data([Path(str(recipe.output_dir)) for recipe in recipes])
    folder = Path(str(recipes[0].output_dir)).parent
    results = [TrainResult.read(Path(str(recipe.output_dir))) for recipe in recipes]
    metrics = [metrics_of(result) for result in results]
    rows = joined_rows([result.output_dir for result in results])
    mean, deviation = spread(metrics)
    summary = {
        "recipe": recipes[0].recipe,
        "metric": recipes[0].eval.metric,
        "mean": mean,
        "standard_deviation": deviation,
        "folds": [
            {"fold": number, "output_dir": str(result.output_dir), "best_step": result.best["step"], "metrics": own}
            for number, (result, own) in enumerate(zip(results, metrics, strict=True))
        ],
        "num_rows": len(rows),
    }
    with explain_write_errors(folder / OUT_OF_FOLD), atomic_path(folder / OUT_OF_FOLD) as temporary:
        with temporary.open("w", encoding="utf-8") as file:
            file.writelines(strict_json(row, ensure_ascii=False) + "\n" for row in rows)
    with explain_write_errors(folder / FOLDS):
        write_text(folder / FOLDS, strict_json(summary, indent=2) + "\n")
    written = f"  {len(rows):,} rows, each predicted by the model that was not trained on it: {folder / OUT_OF_FOLD}"
    return f"\n{score_table(metrics, mean, deviation)}\n\n{written}\n  scores: {folder / FOLDS}"


def metrics_of(result: TrainResult) -> dict[str, float]:
    """Return the metrics of a fold's best model that are numbers."""
    step = result.best["step"]
    found = best_and_last(read_lines(result.output_dir / "metrics.jsonl"), step, step)
    (metrics,) = found.values() or [result.metrics]
    return {name: value for name, value in metrics.items() if is_number(value)}


def joined_rows(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the predictions of all folds in the order of the rows."""
    rows = []
    for number, folder in enumerate(folders):
        if not (path := folder / OUT_OF_FOLD).is_file():
            raise ConfigError(f"{path} is missing: train this fold again with resume=never, or in a different output_dir.")
        for line in read_lines(path):
            del line["index"]  # within the fold
            rows.append({"row": line.pop("row"), "fold": number, **line})
    if twice := [number for number, count in Counter(row["row"] for row in rows).items() if count > 1]:
        raise ConfigError(f"Row {twice[0]} is in two folds, so {AGAIN}")
    return sorted(rows, key=lambda row: row["row"])


def check_same_data(folders: Sequence[Path]) -> None:
    """Raise ConfigError if folds are known to be of different data."""
    if found := differing(folders, "fold_data"):
        raise ConfigError(f"The data have changed between {found[1]} and {found[2]}, so {AGAIN}")


def spread(metrics: Sequence[Mapping[str, float]]) -> tuple[dict[str, float], dict[str, float]]:
    """Return mean and standard deviation (of a sample, with n - 1) of each metric that all folds have."""
    names = [name for name in metrics[0] if all(math.isfinite(own.get(name, math.nan)) for own in metrics)]
    values = {name: [float(own[name]) for own in metrics] for name in names}
    return {name: fmean(values[name]) for name in names}, {name: stdev(values[name]) for name in names}


def score_table(metrics: Sequence[Mapping[str, float]], mean: Mapping[str, float], deviation: Mapping[str, float]) -> str:
    """Format a row for each fold, for the mean and for the standard deviation, and a column for each metric."""
    rows = {**{f"fold {number}": own for number, own in enumerate(metrics)}, "mean": mean, "deviation": deviation}
    cells = [["", *mean], *([name, *(short(own[metric]) for metric in mean)] for name, own in rows.items())]
    lines = aligned(cells)
    return "\n".join([*lines[:-2], "", *lines[-2:]])

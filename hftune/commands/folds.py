"""``hftune folds``: train a recipe once for each fold of its data, one after the other, and join what the models predict.

Each fold is a run of its own, in a folder of its own, which resumes like any other; only ``task.eval_fold`` tells it apart.
"""

from __future__ import annotations

import argparse
import gc
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from hftune.commands.arguments import add_recipe, check_at_least_1
from hftune.config.addresses import refuse_address
from hftune.distributed.process_info import ProcessInfo
from hftune.errors import ConfigError, is_number

if TYPE_CHECKING:
    from hftune.config import Recipe

FOLDS = "folds.json"
AGAIN = "the folds are not of the same data. Train all of them again with resume=never, or set a different output_dir."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser)
    parser.add_argument("-k", "--folds", type=int, default=5, help="number of folds, at least 2 (default %(default)s)")
    parser.add_argument(
        "--processes", type=int, help="number of processes to start on this machine for each fold (default: train in this one)"
    )


def run(options: argparse.Namespace) -> int:
    """Train all folds and print their scores; exit codes as of hftune.run. Under a launcher every process calls it."""
    check_at_least_1(options, "processes")
    recipes = fold_recipes(options.words, options.folds)
    for number, recipe in enumerate(recipes):
        train_fold(recipe, number, len(recipes), options.processes)
    if ProcessInfo.from_environment().is_main:
        print(join_folds(recipes), flush=True)
    return 0


def fold_recipes(words: list[str], num_folds: int) -> list[Recipe]:
    """Return the recipe of each fold.

    Raises:
        ConfigError: there are fewer than two folds; the recipe is invalid; or its task cannot hold out a fold.
    """
    from hftune.config import Recipe

    if num_folds < 2:
        raise ConfigError(
            f"-k {num_folds} must be at least 2: each fold is evaluated by a model that was trained on the others."
        )
    given = Recipe.from_argv(words)
    if getattr(type(given.task), "fold_rows", None) is None:
        raise ConfigError(
            f"{type(given.task).__name__} cannot hold out folds: it does not say which rows they are (fold_rows)."
        )
    if given.eval.is_off:
        raise ConfigError("eval.every=never: folds are there to be evaluated. Leave it out.")
    if given.resume not in ("auto", "never"):
        raise ConfigError(f"resume={given.resume}: each fold resumes from its own folder. Use auto or never.")
    refuse_address(given.output_dir, "hftune folds")
    folder, name = given.folder, given.track.run_name or given.recipe
    shared = {"task.eval_share": None, "task.max_eval_samples": None, "track.group": given.track.group or given.recipe}
    recipes = []
    for number in range(num_folds):
        own = {"task.eval_fold": [number, num_folds], "output_dir": str(folder / f"fold_{number}")}
        recipes.append(Recipe.from_argv([*words, {**shared, **own, "track.run_name": f"{name}-fold-{number}"}]))
    recipes[0].validate()
    return recipes


def train_fold(recipe: Recipe, number: int, num_folds: int, num_processes: int | None) -> None:
    """Train one fold, unless it is finished. Under a launcher collective: there, ``train`` finds out itself."""
    info = ProcessInfo.from_environment()
    where = f"fold {number} of {num_folds} ({recipe.output_dir})"
    if info.world_size == 1 and recipe.resume != "never" and is_finished(recipe):
        print(f"{where} is finished.", flush=True)
        return
    if info.is_main:
        print(f"{where} ...", flush=True)
    if num_processes is None:
        from hftune.run import train_valid

        train_valid(recipe)
        gc.collect()  # models have cycles, which would keep the memory of this fold's from the next one
    else:
        from hftune.launchers.local import launch

        launch(recipe, num_processes)


def is_finished(recipe: Recipe) -> bool:
    """Return whether the folder of a fold holds the result of exactly this recipe."""
    from hftune.config import Recipe

    folder = recipe.folder
    if not ((folder / "result.json").is_file() and (folder / "model").is_dir() and (folder / "recipe.yaml").is_file()):
        return False
    try:
        return Recipe.load(folder / "recipe.yaml").to_dict() == recipe.to_dict()
    except ConfigError:  # of another version
        return False


def join_folds(recipes: Sequence[Recipe]) -> str:
    """Write out_of_fold.jsonl and folds.json into the folder above the folds, and return what to print.

    Mean and standard deviation (of a sample, with n - 1) are of the metrics that all folds have.

    Raises:
        ConfigError: a fold lacks its predictions, or the folds are not of the same data.
    """
    from hftune.atomic import explain_write_errors, write_lines, write_text
    from hftune.checkpoints.output_dir import TrainResult
    from hftune.checkpoints.run_folder import OUT_OF_FOLD
    from hftune.tracking.console import aligned, short
    from hftune.tracking.jsonl import read_lines, strict_json
    from hftune.tracking.summary import best_and_last

    folders = [recipe.folder for recipe in recipes]
    check_same_data(folders)
    rows, folds = joined_rows(folders), []
    for number, folder in enumerate(folders):
        result = TrainResult.read(folder)
        step = result.best["step"]
        (found,) = best_and_last(read_lines(folder / "metrics.jsonl"), step, step).values() or [result.metrics]
        metrics = {name: value for name, value in found.items() if is_number(value)}
        folds.append({"fold": number, "output_dir": str(folder), "best_step": step, "metrics": metrics})
    scores = {f"fold {number}": fold["metrics"] for number, fold in enumerate(folds)}
    names = [name for name in folds[0]["metrics"] if all(math.isfinite(own.get(name, math.nan)) for own in scores.values())]
    values = {name: [float(own[name]) for own in scores.values()] for name in names}
    mean, deviation = ({name: of(values[name]) for name in names} for of in (fmean, stdev))
    summary = {
        "recipe": recipes[0].recipe,
        "metric": recipes[0].eval.metric,
        "mean": mean,
        "standard_deviation": deviation,
        "folds": folds,
        "num_rows": len(rows),
    }
    parent = folders[0].parent
    with explain_write_errors(parent / OUT_OF_FOLD):
        write_lines(parent / OUT_OF_FOLD, (strict_json(row, ensure_ascii=False) + "\n" for row in rows))
    with explain_write_errors(parent / FOLDS):
        write_text(parent / FOLDS, strict_json(summary, indent=2) + "\n")
    table = {**scores, "mean": mean, "deviation": deviation}
    lines = aligned([["", *mean], *([name, *(short(own[metric]) for metric in mean)] for name, own in table.items())])
    written = f"  {len(rows):,} rows, each predicted by the model that was not trained on it: {parent / OUT_OF_FOLD}"
    return "\n".join(["", *lines[:-2], "", *lines[-2:], "", written, f"  scores: {parent / FOLDS}"])


def joined_rows(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the predictions of all folds in the order of the rows."""
    from hftune.checkpoints.run_folder import OUT_OF_FOLD
    from hftune.tracking.jsonl import read_lines

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
    from hftune.tracking.facts import differing

    if found := differing(folders, "fold_data"):
        raise ConfigError(f"The data have changed between {found[1]} and {found[2]}, so {AGAIN}")

"""``hftune folds``: train a recipe once for each fold of its data, one after the other, and join what the models predict.

Each fold is a run of its own, in a folder of its own, which resumes like any other; only ``task.eval_fold`` tells it apart.
``commands/folds_result.py`` reads what they leave behind.
"""

from __future__ import annotations

import argparse
import gc
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hftune.commands.arguments import add_recipe, check_at_least_1
from hftune.distributed.process_info import ProcessInfo
from hftune.errors import ConfigError

if TYPE_CHECKING:
    from hftune.config import Recipe


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
        from hftune.commands.folds_result import join_folds

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
    recipes = [Recipe.from_argv([*words, _overrides(given, number, num_folds)]) for number in range(num_folds)]
    recipes[0].validate()
    return recipes


def _overrides(given: Recipe, number: int, num_folds: int) -> dict[str, Any]:
    """Return what tells the recipe of a fold from the one that was given."""
    return {
        **{"task.eval_fold": [number, num_folds], "task.eval_share": None, "task.max_eval_samples": None},
        "output_dir": str(Path(str(given.output_dir)) / f"fold_{number}"),
        "track.group": given.track.group or given.recipe,
        "track.run_name": f"{given.track.run_name or given.recipe}-fold-{number}",
    }


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

    folder = Path(str(recipe.output_dir))
    if not ((folder / "result.json").is_file() and (folder / "model").is_dir() and (folder / "recipe.yaml").is_file()):
        return False
    try:
        return Recipe.load(folder / "recipe.yaml").to_dict() == recipe.to_dict()
    except ConfigError:  # of another version
        return False

"""``hftune train``: train a recipe in this process, or on several processes of this machine."""

from __future__ import annotations

import argparse

from hftune import __version__
from hftune.commands.arguments import add_recipe, check_at_least_1, find_modules_here


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser)
    parser.add_argument(
        "--processes", type=int, help="number of processes to start on this machine (default: train in this one)"
    )


def run(options: argparse.Namespace) -> int:
    """Train. The exit codes are those of hftune.run."""
    from hftune.run import fail, main

    find_modules_here()
    if options.processes is None:
        return main(options.words)
    check_at_least_1(options, "processes")
    try:
        from hftune.config import Recipe

        recipe, count = Recipe.from_argv(options.words), options.processes
        recipe.validate()
        print(f"hftune {__version__}: recipe {recipe.recipe}; starting {count} process{'es' * (count > 1)} ...", flush=True)
        from hftune.launchers.local import launch

        launch(recipe, count)
    except (Exception, KeyboardInterrupt) as error:
        return fail(error)
    return 0

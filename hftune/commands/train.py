"""``hftune train``: train a recipe in this process, or on several processes of this machine."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from hftune import __version__
from hftune.commands.arguments import add_recipe, check_at_least_1, find_modules_here


class _Help(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, options: Any, sections: Sequence[str], option: Any = None) -> None:
        """Print the usage; or the keys of the recipe sections that are named, as ``python -m hftune.run --help`` does."""
        if sections:
            from hftune.run import help_text

            print(help_text(list(sections)))
        else:
            parser.print_help()
        parser.exit()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser)
    parser.add_argument(
        *("-h", "--help"),
        nargs="*",
        action=_Help,
        metavar="SECTION",
        help="this help, or the keys of recipe sections",
    )
    parser.add_argument(
        "--processes", type=int, help="number of processes to start on this machine (default: train in this one)"
    )


def run(options: argparse.Namespace) -> int:
    """Train. The exit codes are those of hftune.run."""
    from hftune.run import fail, main, outlive_readers

    outlive_readers()
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

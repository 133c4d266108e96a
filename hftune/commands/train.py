"""``hftune train``: train a recipe in this process, or on several processes of this machine."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any

from hftune import __version__
from hftune.commands.arguments import add_recipe
from hftune.errors import ConfigError


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
        *("-h", "--help"), nargs="*", action=_Help, metavar="SECTION", help="this help, or the keys of recipe sections"
    )
    parser.add_argument(
        "--processes",
        metavar="N",
        help="number of processes to start on this machine (default: train in this one). 1-4: up to 4, and those that die are "
        "replaced, as long as at least 1 is left",
    )


def run(options: argparse.Namespace) -> int:
    """Train. The exit codes are those of hftune.run."""
    if options.processes is None:
        from hftune.run import main

        return main(options.words)
    from hftune.config import Recipe

    count = parse_processes(options.processes)
    recipe = Recipe.from_argv(options.words)
    recipe.validate()
    from hftune.launchers.local import check_range, start_training

    if isinstance(count, tuple):
        check_range(f"--processes {options.processes}", *count, recipe.parallel.pipeline_stages)
    number = f"{count[0]} to {count[1]} processes" if isinstance(count, tuple) else f"{count} process{'es' * (count > 1)}"
    print(f"hftune {__version__}: recipe {recipe.recipe}; starting {number} ...", flush=True)
    start_training(recipe, count)
    return 0


def parse_processes(text: str) -> int | tuple[int, int]:
    """Read ``4`` or ``1-4``.

    Raises:
        ConfigError: it is neither, or below 1.
    """
    least, dash, most = text.partition("-")
    if dash and least.isdecimal() and most.isdecimal():
        return int(least), int(most)
    if not re.fullmatch(r"-?\d+", text):
        raise ConfigError(f"--processes {text} is neither a number, such as 4, nor the least and the most, such as 1-4.")
    if int(text) < 1:
        raise ConfigError(f"--processes {text} must be at least 1.")
    return int(text)

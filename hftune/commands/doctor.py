"""``hftune doctor``: the same as ``python -m hftune.doctor``."""

from __future__ import annotations

import argparse

from hftune.commands.arguments import add_recipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser)


def run(options: argparse.Namespace) -> int:
    """Examine this machine, and the recipe if there is one. Exit code 1 if there is a fault."""
    if options.words:
        from hftune.config import Recipe

        Recipe.from_argv(options.words).validate()
    from hftune.doctor import main  # imports torch: only once the recipe is known to be valid

    return main(options.words)

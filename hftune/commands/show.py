"""``hftune show``: print a recipe with bases and overrides applied."""

from __future__ import annotations

import argparse

from hftune.commands.arguments import add_recipe, find_modules_here


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser, is_required=True)


def run(options: argparse.Namespace) -> int:
    """Print what a run would write to recipe.yaml."""
    find_modules_here()
    from hftune.config import Recipe

    print(Recipe.from_argv(options.words).to_yaml(), end="")
    return 0

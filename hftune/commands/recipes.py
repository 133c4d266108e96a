"""``hftune recipes``: list the shipped recipes."""

from __future__ import annotations

import argparse

from hftune.config.shipped_files import recipe_names, recipe_path
from hftune.tracking.console import table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: the command takes no arguments."""


def run(options: argparse.Namespace) -> int:
    """Print each recipe with the first line of its file."""
    lines = {name: recipe_path(name).read_text(encoding="utf-8").partition("\n")[0] for name in recipe_names()}
    print(table({name: line.removeprefix("# ") for name, line in lines.items()}))
    return 0

"""``hftune recipes``: list the shipped recipes."""

from __future__ import annotations

import argparse
import re

from hftune.config.shipped_files import recipe_names, recipe_path
from hftune.tracking.console import table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: the command takes no arguments."""


def run(options: argparse.Namespace) -> int:
    """Print each recipe with the first sentence of its file."""
    print(table({name: purpose(recipe_path(name).read_text(encoding="utf-8")) for name in recipe_names()}))
    return 0


def purpose(text: str) -> str:
    """Return the first comment of a recipe file, after the line that names its schema to editors."""
    return re.search(r"^# (?!yaml-language-server)(.*)$", text, flags=re.MULTILINE)[1]

"""``hftune recipes``: list the shipped recipes by problem, with the columns that each wants."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from hftune.config.shipped_files import recipe_names, recipe_path
from hftune.tracking.console import printed_width

INDENT = 2
"""Spaces before a recipe, and more for each recipe that it builds on."""
OWN_DATA = """
A recipe at the left margin takes data of your own; one below it is the same problem on given data.
  hftune train recipe=text_classification task.data_files.train=my.csv task.eval_share=0.1
  hftune show recipe=text_classification      all its keys and values
"""


class Listed(NamedTuple):
    """What is said of a recipe."""

    purpose: str
    columns: str | None
    """Of the data that it wants; None if it has its own."""
    base: str | None
    """The recipe that it builds on."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: the command takes no arguments."""


def run(options: argparse.Namespace) -> int:
    """Print each recipe with the first sentence of its file, below the recipe that it builds on."""
    listed = {name: read(recipe_path(name).read_text(encoding="utf-8")) for name in recipe_names()}
    print(listing(listed, printed_width()))
    print(OWN_DATA.rstrip())
    return 0


def read(text: str) -> Listed:
    """Return what a recipe file says of itself."""
    columns = re.search(r"^# Columns: (.*)$", text, flags=re.MULTILINE)
    import yaml  # here, as a module of the current folder must not take its place: see hftune.cli

    return Listed(purpose(text), columns[1] if columns else None, yaml.safe_load(text).get("base"))


def purpose(text: str) -> str:
    """Return the first sentence of a recipe file's comment, after the line that names its schema to editors."""
    lines = re.findall(r"^# (?!yaml-language-server)(.*)$", text, flags=re.MULTILINE)
    end = next((number for number, line in enumerate(lines) if line.endswith((".", ":"))), 0)
    return " ".join(lines[: end + 1])


def listing(listed: Mapping[str, Listed], width: int | None) -> str:
    """Format recipes: those that build on none at the left, the others indented below their base.

    Args:
        width: of the terminal, which texts are wrapped to. None: they are not wrapped.
    """
    from rich.console import Console
    from rich.table import Table

    grid = Table.grid("", "", padding=(0, 2))
    grid.columns[0].no_wrap = True
    for name, depth in _below(listed, None):
        about = listed[name]
        if not depth and grid.rows:
            grid.add_row()
        grid.add_row(" " * INDENT * depth + name, about.purpose)
        if about.columns and not depth:
            grid.add_row("", f"Columns: {about.columns}")
    console = Console(width=width or 1000, markup=False, highlight=False, color_system=None)
    with console.capture() as capture:
        console.print(grid)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def _below(listed: Mapping[str, Listed], base: str | None, depth: int = 0) -> Iterator[tuple[str, int]]:
    """Yield the recipes that build on one, each with its depth and before those that build on it; first the recipe's demo."""
    names = [name for name, about in listed.items() if about.base == base]
    for name in sorted(names, key=lambda name: (name != f"{base}_demo", name)):
        yield name, depth
        yield from _below(listed, name, depth + 1)

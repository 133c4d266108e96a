"""``hftune recipes``: list the shipped recipes by problem, with the columns that each wants; or say which fit some data."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hftune.config.addresses import is_address
from hftune.config.shipped_files import recipe_names, recipe_path
from hftune.errors import ConfigError, DataError
from hftune.tracking.console import hide_progress_bars, printed_width

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
    """Add the command's arguments to its parser."""
    parser.add_argument(
        "--for",
        dest="data",
        metavar="DATA",
        help="file, folder of images or recordings, or data set on the Hub: say which recipes fit it, and what they would read",
    )


def run(options: argparse.Namespace) -> int:
    """Print each recipe with the first sentence of its file, below the recipe that it builds on; or those that fit data.

    Raises:
        ConfigError: no recipe fits.
    """
    listed = {name: read(recipe_path(name).read_text(encoding="utf-8")) for name in recipe_names()}
    if options.data is not None:
        print(fitting(listed, options.data))
        return 0
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


def with_own_data(listed: Mapping[str, Listed]) -> Iterator[tuple[str, Listed]]:
    """Yield the recipes that take data of one's own, one for each layout."""
    for name, about in listed.items():
        same = about.base is not None and about.columns == listed[about.base].columns
        if about.columns is not None and not name.endswith("_demo") and not same:
            yield name, about


def fitting(listed: Mapping[str, Listed], data: str) -> str:
    """Return which recipes find the columns that they need in some data, as a command each, and why others do not.

    Raises:
        ConfigError: none does; with the reasons.
    """
    from hftune.config import Recipe

    words = [f"task.dataset={data}"]
    if Path(data).is_dir():
        words = [f"task.data_dir={data}"]
    elif Path(data).suffix[1:].isalpha() or Path(data).exists() or is_address(data):
        words = ["task.dataset=null", f"task.data_files.train={data}"]
    hide_progress_bars()
    fit: dict[str, list[str]] = {}
    others = {}
    for name, _ in with_own_data(listed):
        try:
            task: Any = Recipe.load(name, *words).task
            task.evaluates = False
            if Path(data).is_dir() and not str(task.dataset).endswith("folder"):
                raise ConfigError("It reads no folders of images or recordings.")
            if problems := task.validate():
                raise ConfigError(problems[0])
            if len(task.rows["train"]):  # their columns are checked
                fit[name] = [f"{key.removesuffix('_column')}={column}" for key, column in task.read_columns.items()]
        except (ConfigError, DataError) as error:
            others[name] = re.sub(r"(?<=\.) (It has: |Set it to one of ).*", "", str(error), flags=re.DOTALL)
    reasons = [f"  {name}: {reason}" for name, reason in others.items()]
    if not fit and len({*others.values()}) == 1:
        raise ConfigError(next(iter(others.values())))
    if not fit:
        raise ConfigError("\n".join([f"No recipe fits {data}.", *reasons]))
    names = sorted(fit, key=lambda name: -len(fit[name]))  # who reads most of the columns leaves least of the data unused
    lines = [line for name in names for line in (f"  {name}: {listed[name].purpose}", f"    {', '.join(fit[name])}")]
    command = f"  hftune train recipe={names[0]} {' '.join(words)} task.eval_share=0.1"
    return "\n".join(
        [f"These fit {data}, and would read:", *lines, "", "These do not:", *reasons, "", "To train the first:", command]
    )


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

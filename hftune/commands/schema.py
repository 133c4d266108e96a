"""``hftune schema``: print the JSON schema of recipes, or write it beside one's own."""

from __future__ import annotations

import argparse
from pathlib import Path

from hftune.config.shipped_files import resource_dir
from hftune.errors import ConfigError

SCHEMA = "hftune.schema.json"
"""File in recipes/; the shipped recipes name it on their first line."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--output", nargs="?", const=Path(SCHEMA), type=Path, metavar="PATH", help=f"file to write it to (default ./{SCHEMA})"
    )


def run(options: argparse.Namespace) -> int:
    """Print the schema, or write it and say how a recipe names it."""
    text = (resource_dir("recipes") / SCHEMA).read_text(encoding="utf-8")
    if options.output is None:
        print(text, end="")
        return 0
    write(text, options.output)
    print(f"Wrote {options.output}. Recipes in the same folder name it on their first line:")
    print(f"# yaml-language-server: $schema=./{options.output.name}")
    return 0


def write(text: str, path: Path) -> None:
    """Write the schema, over an older one if there is one.

    Raises:
        ConfigError: the file cannot be written, or its name is not that of a schema, such as a recipe's.
    """
    if path.suffix != ".json":
        raise ConfigError(f"--output {path}: the name of the file must end in .json, such as {SCHEMA}.")
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output {path} cannot be written: {error.strerror}.") from error

"""``hftune schema``: print the JSON schema of recipes, or write it beside one's own."""

from __future__ import annotations

import argparse
from pathlib import Path

from hftune.commands.arguments import writing
from hftune.errors import ConfigError

SCHEMA = "hftune.schema.json"
"""The shipped recipes name it on their first line."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--output", nargs="?", const=Path(SCHEMA), type=Path, metavar="PATH", help=f"file to write it to (default ./{SCHEMA})"
    )


def run(options: argparse.Namespace) -> int:
    """Print the schema, or write it, over an older one if there is one, and say how a recipe names it."""
    from hftune.config.schema import schema_text  # imports all tasks

    path = options.output
    if path is None:
        print(schema_text())
        return 0
    if path.suffix != ".json":
        raise ConfigError(f"--output {path}: the name of the file must end in .json, such as {SCHEMA}.")
    with writing(f"--output {path}"):
        path.write_text(schema_text() + "\n", encoding="utf-8")
    print(f"Wrote {path}. Recipes in the same folder name it on their first line:")
    print(f"# yaml-language-server: $schema=./{path.name}")
    return 0

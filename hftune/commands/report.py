"""``hftune report``: write the page that shows a run, or compares several."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from hftune.checkpoints.run_folder import here
from hftune.commands.arguments import run_path, writing
from hftune.errors import ConfigError

COMPARISON = Path("compare.html")
"""Where the page of several runs goes by default."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folders", nargs="+", type=run_path, metavar="RUN", help="output folder of a run, such as outputs/yelp, or its address"
    )
    parser.add_argument(
        "--output", type=Path, help=f"HTML file to write (default: report.html in the run's folder; {COMPARISON} for several)"
    )


def run(options: argparse.Namespace) -> int:
    """Write the page, and print its path."""
    folders = run_folders(options.folders)
    from hftune.reporting.page import REPORT, page

    output = options.output or (folders[0] / REPORT if len(folders) == 1 else COMPARISON)
    write(output, page(folders))
    print(output)
    return 0


def run_folders(runs: Sequence[str | Path]) -> list[Path]:
    """Return the folders of runs, or raise ConfigError for one that holds no run, and for one that is named twice."""
    folders = [here(run) for run in runs]
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"{folder}: there is no such folder. Name the output folder of a run, such as outputs/yelp.")
        if not any((folder / name).is_file() for name in ("metrics.jsonl", "recipe.yaml")):
            raise ConfigError(f"{folder} holds no run: neither metrics.jsonl nor recipe.yaml is in it.")
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise ConfigError("The same run is named twice. Name each once.")
    return folders


def write(output: Path, text: str) -> None:
    """Write the page, or raise ConfigError."""
    from hftune.atomic import write_text

    with writing(output, " Name another: --output FILE."):
        output.parent.mkdir(parents=True, exist_ok=True)
        write_text(output, text)

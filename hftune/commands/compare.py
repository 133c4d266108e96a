"""``hftune compare``: say where runs diverge, why, and whether one is better than the other or it was luck."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from hftune.commands.arguments import run_path
from hftune.commands.report import run_folders
from hftune.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    outputs = "output folders of runs, such as outputs/a outputs/b, or their addresses; the others are compared with the first"
    parser.add_argument("folders", nargs="+", type=run_path, metavar="RUN", help=outputs)
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def run(options: argparse.Namespace) -> int:
    """Print the comparison."""
    folders = run_folders(options.folders)
    if len(folders) < 2:
        raise ConfigError(f"compare needs two or more runs: hftune compare {options.folders[0]} RUN.")
    from hftune.replay.comparison import compare
    from hftune.replay.findings import describe
    from hftune.replay.run_record import read_run, run_names
    from hftune.tracking.jsonl import strict_json

    comparison = compare([read_run(*pair) for pair in zip(folders, run_names(folders), strict=True)])
    if options.json:
        print(strict_json(asdict(comparison), indent=2, ensure_ascii=False, default=sorted))  # sets of effects
    else:
        print(describe(comparison))
    return 0

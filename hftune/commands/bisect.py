"""``hftune bisect``: find the recipe key, or the line of a data file, that made a run bad, by replaying a few steps."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from hftune.commands.arguments import add_trust_code, check_at_least_1, check_single
from hftune.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="output folder of the good run, then of the bad one")
    parser.add_argument(
        "--good", nargs="+", default=[], metavar="KEY=VALUE", help="keys of the good end, over those of its run"
    )
    parser.add_argument("--bad", nargs="+", default=[], metavar="KEY=VALUE", help="keys of the bad end, over those of its run")
    parser.add_argument(
        "--steps", type=int, metavar="K", help="steps of a try (default: as many as tell the two runs apart, 15 to 100)"
    )
    parser.add_argument("--from", type=int, default=1, dest="first", metavar="STEP", help="first of them (default %(default)s)")
    parser.add_argument("--data", nargs="+", default=[], metavar="PLACE", help="where the data are now, as for hftune replay")
    parser.add_argument("--json", action="store_true", help="print the result alone, as JSON")
    add_trust_code(parser)


def run(options: argparse.Namespace) -> int:
    """Search, and print each try and the result. Exit code 1 if no cause was found."""
    check_at_least_1(options, "steps")
    if options.first < 1:
        raise ConfigError(f"--from {options.first} must be at least 1.")
    check_single("hftune bisect")
    from hftune.replay.key_search import search_for

    result = search_for(options, (lambda line: None) if options.json else partial(print, flush=True)).run()
    if options.json:
        from hftune.tracking.jsonl import strict_json

        print(strict_json(result, indent=2, ensure_ascii=False, default=str), flush=True)
    return 0 if result["found"] else 1

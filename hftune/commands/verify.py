"""``hftune verify``: check a receipt against a run's folder, and compute parts of the run again.

``commands/verify_receipt.py`` does it; what it imports takes too long for a command that is only being listed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from hftune.commands.arguments import add_trust_code, find_modules_here
from hftune.distributed.process_info import ProcessInfo

SEGMENTS = 5
"""Replayed by default."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("receipt", type=Path, help="file that hftune receipt wrote")
    parser.add_argument("--folder", type=Path, metavar="RUN", help="output folder of the run (default: where the receipt is)")
    how_many = parser.add_mutually_exclusive_group()
    how_many.add_argument(
        "--segments",
        type=int,
        default=SEGMENTS,
        metavar="N",
        help="how many segments between checkpoints to compute again: the first, the last, and others at random (default: "
        f"{SEGMENTS}). 0: check the files alone, which needs neither data nor model",
    )
    how_many.add_argument("--all", action="store_true", help="compute the whole run again")
    parser.add_argument("--seed", help="draw the same segments as a verification that printed this seed (default: at random)")
    parser.add_argument(
        "--data",
        action="append",
        default=[],
        metavar="[SPLIT=]PATH",
        help="your own copy of the data: a folder, or train=FILE (default: where the recipe says)",
    )
    add_trust_code(parser)


def run(options: argparse.Namespace) -> int:
    """Verify. Exit code 1 if something is not as the receipt says. Under a launcher all processes call it, and the main one
    returns 1."""
    from hftune.run import fail, outlive_readers

    outlive_readers()
    if options.trust_code:
        find_modules_here()
    try:
        from hftune.commands.verify_receipt import verify

        num_problems = verify(options)
    except (Exception, KeyboardInterrupt) as error:
        return fail(error)
    return 1 if num_problems and ProcessInfo.from_environment().is_main else 0

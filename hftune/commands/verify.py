"""``hftune verify``: check a receipt against a run's folder, and compute parts of the run again."""

from __future__ import annotations

import argparse
from pathlib import Path

from hftune.commands.arguments import add_trust_code
from hftune.distributed.process_info import ProcessInfo
from hftune.errors import ConfigError

SEGMENTS = 5
"""How many segments are computed again by default."""
NAME_WIDTH = 13
"""Columns of what was checked."""


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
    from hftune.replay.history import History
    from hftune.replay.receipt import read_receipt
    from hftune.replay.verify import verify

    if options.segments == 1 or options.segments < 0:
        raise ConfigError(
            f"--segments {options.segments} must be 0, for the files alone, or at least 2: the first and the last are always "
            "replayed."
        )
    receipt = read_receipt(options.receipt)
    history = History.open(options.folder or options.receipt.parent, trust_code=options.trust_code, data=options.data)
    is_main, num_problems = ProcessInfo.from_environment().is_main, 0
    for found in verify(receipt, history, None if options.all else options.segments, options.seed):
        lines = [found]
        if not isinstance(found, str):
            num_problems += len(found.problems)
            mark = f"  {'NO' if found.problems else 'ok'}  {found.name:<{NAME_WIDTH}}  "
            lines = [mark + text for text in found.problems or [found.text] if text]
        if is_main and lines:
            print(*lines, sep="\n", flush=True)
    if not is_main:
        return 0
    if num_problems:
        print(f"Not verified: {num_problems} problem{'s' if num_problems > 1 else ''}.", flush=True)
        return 1
    print("Verified: what was checked is as the receipt says.", flush=True)
    return 0

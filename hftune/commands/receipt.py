"""``hftune receipt``: write what a run was and what came out of it into one file, for others to verify."""

from __future__ import annotations

import argparse
from pathlib import Path

from hftune.commands.arguments import local_path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="RUN", type=local_path, help="output folder of a finished run, such as outputs/yelp")
    parser.add_argument("--output", type=Path, metavar="FILE", help="file to write (default: receipt.json in the run's folder)")


def run(options: argparse.Namespace) -> int:
    """Write the receipt, and say how to sign it."""
    from hftune.replay.differences import count
    from hftune.replay.receipt import NAME, make_receipt, write_receipt

    path = options.output or options.folder / NAME
    receipt = make_receipt(options.folder)
    write_receipt(receipt, path)
    print(
        f"{path}: {receipt.num_lines:,} lines of the ledger, {count(len(receipt.checkpoints), 'checkpoint')}, "
        f"{len(receipt.exports)} files of models."
    )
    print("Sign it and publish it before the verifier chooses what to check; for example:")
    print(f"  gpg --armor --detach-sign {path}")
    print(f"To verify it: hftune verify {path}" + ("" if options.output is None else f" --folder {options.folder}"))
    return 0

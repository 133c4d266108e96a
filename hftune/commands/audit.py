"""``hftune audit``: prove from a run's ledger that each epoch used every sample exactly once."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", help="output folder of a run, such as outputs/yelp")


def run(options: argparse.Namespace) -> int:
    """Print what the ledger proves. Exit code 1 if the proof fails."""
    from hftune.tracking.ledger import audit

    result = audit(options.folder)
    for start in result.starts:
        began = f"resumed after step {start['after_step']:,}" if start["after_step"] else "started"
        print(f"  {began} on {start['world_size']} process{'es' if start['world_size'] > 1 else ''}")
    epochs = f"{result.whole_epochs} complete epoch{'' if result.whole_epochs == 1 else 's'}"
    print(f"{options.folder}: {result.steps:,} steps, {result.samples:,} samples, {epochs}.")
    for index, part in enumerate(result.mixture):
        rows, weight, samples = part["rows"], part["weight"], part["samples"]
        print(f"  task.datasets[{index}]: {rows:,} rows x {weight:g} = {samples:,} samples an epoch")
    for problem in result.problems:
        print(f"  {problem}")
    if result.problems:
        print("Not proven.")
    elif result.steps:
        how = "each exactly once per epoch"
        if result.mixture:
            how = "as many of each data set as its weight says, and each of its rows equally often, give or take one"
        print(f"Every step used the samples of its plan, {how}.")
    else:
        print("The run has not finished a step yet.")
    return 1 if result.problems else 0

"""``hftune audit``: prove from a run's ledger that each epoch used every sample exactly once, and check its chain."""

from __future__ import annotations

import argparse
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", help="output folder of a run, such as outputs/yelp, or its address")


def run(options: argparse.Namespace) -> int:
    """Print what the ledger proves. Exit code 1 if the proof fails."""
    from hftune.config.recipe import flat
    from hftune.errors import first_few, format_value
    from hftune.replay.audit import audit
    from hftune.replay.differences import count
    from hftune.tracking.summary import processes

    result = audit(options.folder)
    old: dict[str, Any] = {}
    for start in result.starts:
        new = flat(start.get("recipe", {}))
        keys = [key for key in {**old, **new} if old and new and old.get(key) != new.get(key)]
        changed = f", with {first_few(f'{key}={format_value(new.get(key))}' for key in keys)}" if keys else ""
        began = f"resumed after step {start['after_step']:,}" if start["after_step"] else "started"
        print(f"  {began} on {processes(start['world_size'])}{changed}")
        old = new
    epochs = count(result.whole_epochs, "complete epoch")
    print(f"{options.folder}: {result.steps:,} steps, {result.samples:,} samples, {epochs}.")
    for index, part in enumerate(result.mixture):
        rows, weight, samples, used = part["rows"], part["weight"], part["samples"], part["used"]
        print(f"  task.datasets[{index}]: {rows:,} rows x {weight:g} = {samples:,} samples an epoch, {used:,} used in all")
    if result.repeated:
        print(f"  not counted: {count(result.repeated, 'step')} that a resume took back")
    if result.left_out:
        print(f"  left out: {count(result.left_out, 'sample')} that cannot be trained on (task.bad_rows=skip)")
    if result.skipped:
        print(f"  skipped: {count(len(result.skipped), 'step')} ({first_few(map(str, result.skipped))})")
    for problem in result.problems:
        print(f"  {problem}")
    if result.problems:
        print("Not proven.")
        return 1
    if result.steps:
        often = ", each exactly once per epoch"
        if result.mixture:
            often = ", as many of each data set as its weight says, and each of its rows equally often, give or take one"
        every, often = ("Every other step", "") if result.skipped else ("Every step", often)
        print(f"{every} used the samples of its plan{often}.")
    else:
        print("The run has not finished a step yet.")
    print(f"The chain of {count(result.lines, 'line')} is unbroken and ends in {result.end}.")
    return 0

"""``hftune audit``: prove from a run's ledger that each epoch used every sample exactly once, and check its chain."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hftune.replay.audit import Audit

MAX_SHOWN = 8
"""How many changed keys or skipped steps to list; the others are counted."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", help="output folder of a run, such as outputs/yelp")


def run(options: argparse.Namespace) -> int:
    """Print what the ledger proves. Exit code 1 if the proof fails."""
    from hftune.replay.audit import audit

    result = audit(options.folder)
    before: Mapping[str, Any] = {}
    for start in result.starts:
        began = f"resumed after step {start['after_step']:,}" if start["after_step"] else "started"
        changed = changes(before, recipe := start.get("recipe", {}))
        print(f"  {began} on {start['world_size']} process{'es' if start['world_size'] > 1 else ''}{changed}")
        before = recipe
    epochs = counted(result.whole_epochs, "complete epoch")
    print(f"{options.folder}: {result.steps:,} steps, {result.samples:,} samples, {epochs}.")
    for index, part in enumerate(result.mixture):
        rows, weight, samples = part["rows"], part["weight"], part["samples"]
        print(f"  task.datasets[{index}]: {rows:,} rows x {weight:g} = {samples:,} samples an epoch")
    if result.repeated:
        print(f"  not counted: {counted(result.repeated, 'step')} that a resume took back")
    if result.skipped:
        print(f"  skipped: {counted(len(result.skipped), 'step')} ({some(map(str, result.skipped))})")
    for problem in result.problems:
        print(f"  {problem}")
    if result.problems:
        print("Not proven.")
        return 1
    if result.steps:
        print(f"Every {'other ' if result.skipped else ''}step used the samples of its plan{how_often(result)}.")
    else:
        print("The run has not finished a step yet.")
    print(f"The chain of {counted(result.lines, 'line')} is unbroken and ends in {result.end}.")
    return 0


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Say which keys of a recipe have other values than at the start before; nothing if either is not known."""
    from hftune.config.recipe import flat
    from hftune.errors import format_value

    if not (before and now):
        return ""
    old, new = flat(before), flat(now)
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    return f", with {some(f'{key}={format_value(new.get(key))}' for key in keys)}" if keys else ""


def some(words: Iterable[str]) -> str:
    """Join words by commas; of many, the first, and how many more there are."""
    remaining = iter(words)
    first, rest = [*islice(remaining, MAX_SHOWN)], sum(1 for _ in remaining)
    return f"{', '.join(first)}{f' and {rest} more' if rest else ''}"


def how_often(result: Audit) -> str:
    """Say how often the steps used each sample."""
    if result.skipped:
        return ""
    if result.mixture:
        return ", as many of each data set as its weight says, and each of its rows equally often, give or take one"
    return ", each exactly once per epoch"


def counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"

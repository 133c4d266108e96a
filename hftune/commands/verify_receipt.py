"""Verifies a receipt for ``hftune verify``, and prints what was found. Files are checked before torch is imported."""

from __future__ import annotations

import argparse
import secrets

from hftune.distributed.process_info import ProcessInfo
from hftune.errors import ConfigError
from hftune.replay.file_checks import Check, check_files
from hftune.replay.history import History
from hftune.replay.receipt import Receipt, check_ledger, read_receipt
from hftune.replay.segments import Draw, Segment, draw
from hftune.tracking.console import duration

NAME_WIDTH = 13
"""Columns of what was checked."""


def verify(options: argparse.Namespace) -> int:
    """Check and compute what was asked for, and print what was found. Collective. Returns the number of problems."""
    if options.segments == 1 or options.segments < 0:
        raise ConfigError(
            f"--segments {options.segments} must be 0, for the files alone, or at least 2: the first and the last are always "
            "replayed."
        )
    receipt = read_receipt(options.receipt)
    history = History.open(options.folder or options.receipt.parent, trust_code=options.trust_code, data=options.data)
    check_ledger(receipt, history.ledger, history.folder)
    seen = Printer(ProcessInfo.from_environment().is_main)
    seen.line(describe(receipt, history))
    for check in check_files(receipt, history):
        seen.show(check)
    if (step := first_missing(history)) is not None:
        seen.line(f"Nothing was computed again: the ledger has no step {step:,}.")
    elif options.all or options.segments:
        replay(receipt, history, None if options.all else options.segments, options.seed, seen)
    else:
        seen.line("Nothing was computed again: an owner can make every hash anew. --segments 5 replays some of the run.")
    seen.line(verdict(seen.num_problems))
    return seen.num_problems


def replay(receipt: Receipt, history: History, count: int | None, seed: str | None, seen: Printer) -> None:
    """Compute parts of the run again. Collective."""
    from hftune.replay.verification import Verification  # imports torch

    with Verification(receipt, history) as verification:
        for check in (verification.check_data, verification.check_weights, verification.check_speed):
            seen.show(check())
        drawn_by = verification.replayer.strategy.broadcast(seed or secrets.token_hex(8))
        if not verification.segments:
            seen.line("Nothing was computed again: no checkpoint is intact.")
            return
        chosen = draw(verification.segments, count, drawn_by)
        seen.line(announce(chosen, drawn_by, history.seconds_per_step()))
        for segment in chosen.chosen:
            seen.show(verification.check_segment(segment))
        seen.line(odds(chosen))


def first_missing(history: History) -> int | None:
    """Return the first step that the ledger does not have, before which nothing leads to the others; None if it has all."""
    steps = history.ledger.steps
    return next((step for step in range(1, history.last + 1) if step not in steps), None)


class Printer:
    """Prints what was checked, on the main process, and counts the problems."""

    def __init__(self, is_main: bool):
        self.is_main, self.num_problems = is_main, 0

    def line(self, text: str) -> None:
        if self.is_main and text:
            print(text, flush=True)

    def show(self, check: Check) -> None:
        """Print a check: what holds, or a line for each problem."""
        self.num_problems += len(check.problems)
        for text in check.problems or [check.text]:
            self.line(f"  {'NO' if check.problems else 'ok'}  {check.name:<{NAME_WIDTH}}  {text}")


def describe(receipt: Receipt, history: History) -> str:
    """Say what the receipt is about."""
    start, count = receipt.starts[0], len(receipt.starts)
    processes = f"{start['world_size']} process{'es' if start['world_size'] > 1 else ''} ({start['hardware'].get('device')})"
    resumed = "" if count == 1 else f", resumed {count - 1} time{'s' if count > 2 else ''}"
    return f"{history.folder}: {history.last:,} steps on {processes}{resumed}; receipt {receipt.end[:12]}."


def announce(chosen: Draw, seed: str, seconds_per_step: float | None) -> str:
    """Say which segments will be replayed, how they were chosen, and how long it took the run."""
    num_steps = sum(map(len, chosen.chosen))
    took = "" if seconds_per_step is None else f", which took the run {duration(num_steps * seconds_per_step)}"
    which = listed(chosen.always)
    if not chosen.left:
        which = "all segments"
    elif chosen.drawn:
        others = len(chosen.drawn) + len(chosen.left)
        which += f"; and of the {others} others, drawn with seed {seed}: {listed(chosen.drawn)}"
    return f"Replaying {num_steps:,} steps{took}: {which}."


def listed(segments: list[Segment]) -> str:
    return ", ".join(map(str, segments))


def odds(chosen: Draw) -> str:
    """Say what was not replayed, and how likely a forgery there would have been missed."""
    if not chosen.left:
        return "Every step was computed again."
    middle, missed = len(chosen.drawn) + len(chosen.left), 100 * chosen.chance_to_miss_one
    return (
        f"Not replayed: {len(chosen.left)} of {len(chosen.left) + len(chosen.chosen)} segments. One forged segment among the "
        f"{middle} that were drawn from would have been missed with a chance of {missed:.0f} %; --all leaves none."
    )


def verdict(num_problems: int) -> str:
    """Sum up."""
    if num_problems:
        return f"Not verified: {num_problems} problem{'s' if num_problems > 1 else ''}."
    return "Verified: what was checked is as the receipt says."

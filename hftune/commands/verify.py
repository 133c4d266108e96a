"""``hftune verify``: check a receipt against a run's folder, and compute parts of the run again."""

from __future__ import annotations

import argparse
import secrets
from collections.abc import Iterator
from typing import TYPE_CHECKING

from hftune.commands.arguments import add_trust_code, local_path
from hftune.distributed.process_info import ProcessInfo
from hftune.errors import ConfigError

if TYPE_CHECKING:
    from hftune.replay.file_checks import Check
    from hftune.replay.history import History
    from hftune.replay.receipt import Receipt

SEGMENTS = 5
"""How many segments are computed again by default."""
NAME_WIDTH = 13
"""Columns of what was checked."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("receipt", type=local_path, help="file that hftune receipt wrote")
    parser.add_argument("--folder", type=local_path, metavar="RUN", help="folder of the run (default: where the receipt is)")
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


def verify(receipt: Receipt, history: History, count: int | None, seed: str | None) -> Iterator[Check | str]:
    """Check the files and compute what was asked for; yield what was found, and sentences between. Collective.

    Args:
        count: of segments to compute again; 0: none, None: all.
        seed: equal seeds draw equal segments. None: a new one.

    Raises:
        ConfigError: the receipt is of another run; the recipe cannot be run here.
    """
    from hftune.replay.file_checks import check_files
    from hftune.tracking.summary import processes

    record, folder = history.ledger, history.folder
    if missing := [step for step in receipt.checkpoints if step not in record.steps]:
        raise ConfigError(f"{folder} has no step {missing[0]:,}: the receipt is of another run.")
    start, resumes = receipt.starts[0], len(receipt.starts) - 1
    on = f"{processes(start['world_size'])} ({start['hardware'].get('device')})"
    resumed = f", resumed {resumes} time{'s' if resumes > 1 else ''}" if resumes else ""
    yield f"{folder}: {history.last:,} steps on {on}{resumed}; receipt {receipt.end[:12]}."
    yield from check_files(receipt, history)
    lost = next((step for step in range(1, history.last + 1) if step not in record.steps), None)
    if lost is not None:
        yield f"Nothing was computed again: the ledger has no step {lost:,}."
    elif count == 0:
        yield "Nothing was computed again: an owner can make every hash anew. --segments 5 replays some of the run."
    else:
        yield from compute_again(receipt, history, count, seed)


def compute_again(receipt: Receipt, history: History, count: int | None, seed: str | None) -> Iterator[Check | str]:
    """Compute parts of the run again. Collective."""
    from hftune.replay.engine import Replayer  # imports torch
    from hftune.replay.verification import PinnedHistory, Verification, draw
    from hftune.tracking.console import duration, hide_progress_bars

    hide_progress_bars()  # exports would draw one each
    pinned = PinnedHistory(history.folder, history.ledger, history.trust_code, history.data, receipt.checkpoints)
    with Replayer(pinned, 1) as replayer:
        verification = Verification(receipt, replayer)
        yield verification.check_data()
        yield verification.check_weights()
        yield verification.check_speed()
        seed = replayer.strategy.broadcast(seed or secrets.token_hex(8))
        if not verification.segments:
            yield "Nothing was computed again: no checkpoint is intact."
            return
        always, drawn, left = draw(verification.segments, count, seed)
        chosen, middle = sorted([*always, *drawn]), len(drawn) + len(left)
        num_steps, step_s = sum(map(len, chosen)), history.seconds_per_step()
        took = "" if step_s is None else f", which took the run {duration(num_steps * step_s)}"
        which = ", ".join(map(str, always)) if left else "all segments"
        if left and drawn:
            which += f"; and of the {middle} others, drawn with seed {seed}: {', '.join(map(str, drawn))}"
        yield f"Replaying {num_steps:,} steps{took}: {which}."
        for segment in chosen:
            yield verification.check_segment(segment)
    if not left:
        yield "Every step was computed again."
        return
    yield (
        f"Not replayed: {len(left)} of {len(left) + len(chosen)} segments. One forged segment among the {middle} that were "
        f"drawn from would have been missed with a chance of {100 * len(left) / middle:.0f} %; --all leaves none."
    )

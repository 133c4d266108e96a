"""Verifies a receipt: the files of the run first, which needs neither data nor model, then segments that are computed again."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

from hftune.errors import ConfigError
from hftune.replay.file_checks import Check, check_files
from hftune.replay.history import History
from hftune.replay.receipt import Receipt
from hftune.replay.segments import draw
from hftune.tracking.console import duration


def verify(receipt: Receipt, history: History, count: int | None, seed: str | None) -> Iterator[Check | str]:
    """Check and compute what was asked for; yield what was found, and sentences between. Collective.

    Args:
        count: of segments to compute again; 0: none, None: all.
        seed: equal seeds draw equal segments. None: a new one.

    Raises:
        ConfigError: the receipt is of another run; the recipe cannot be run here.
    """
    record, folder = history.ledger, history.folder
    if missing := [step for step in receipt.checkpoints if step not in record.steps]:
        raise ConfigError(f"{folder} has no step {missing[0]:,}: the receipt is of another run.")
    start, resumes = receipt.starts[0], len(receipt.starts) - 1
    processes = f"{start['world_size']} process{'es' if start['world_size'] > 1 else ''} ({start['hardware'].get('device')})"
    resumed = f", resumed {resumes} time{'s' if resumes > 1 else ''}" if resumes else ""
    yield f"{folder}: {history.last:,} steps on {processes}{resumed}; receipt {receipt.end[:12]}."
    yield from check_files(receipt, history)
    lost = next((step for step in range(1, history.last + 1) if step not in record.steps), None)
    if lost is not None:
        yield f"Nothing was computed again: the ledger has no step {lost:,}."
    elif count == 0:
        yield "Nothing was computed again: an owner can make every hash anew. --segments 5 replays some of the run."
    else:
        yield from _compute_again(receipt, history, count, seed)


def _compute_again(receipt: Receipt, history: History, count: int | None, seed: str | None) -> Iterator[Check | str]:
    """Compute parts of the run again. Collective."""
    from hftune.replay.verification import Verification  # imports torch

    with Verification(receipt, history) as verification:
        yield verification.check_data()
        yield verification.check_weights()
        yield verification.check_speed()
        seed = verification.replayer.strategy.broadcast(seed or secrets.token_hex(8))
        if not verification.segments:
            yield "Nothing was computed again: no checkpoint is intact."
            return
        draws = draw(verification.segments, count, seed)
        middle = len(draws.drawn) + len(draws.left)
        num_steps, step_s = sum(map(len, draws.chosen)), history.seconds_per_step()
        took = "" if step_s is None else f", which took the run {duration(num_steps * step_s)}"
        which = ", ".join(map(str, draws.always)) if draws.left else "all segments"
        if draws.left and draws.drawn:
            which += f"; and of the {middle} others, drawn with seed {seed}: {', '.join(map(str, draws.drawn))}"
        yield f"Replaying {num_steps:,} steps{took}: {which}."
        for segment in draws.chosen:
            yield verification.check_segment(segment)
    if not draws.left:
        yield "Every step was computed again."
        return
    missed = f"would have been missed with a chance of {100 * draws.chance_to_miss_one:.0f} %; --all leaves none."
    yield (
        f"Not replayed: {len(draws.left)} of {len(draws.left) + len(draws.chosen)} segments. One forged segment among the "
        f"{middle} that were drawn from {missed}"
    )

"""How a run at W&B continues after an interruption, so that it shows each step once, with the values that count.

W&B numbers its rows by step and takes none that comes after a later one. A killed run has sent steps that its checkpoint does
not have and that are computed again, and may lack the newest ones before. So a server is asked what it has, and is made to
forget the steps that are repeated. Files of an offline run that nobody has uploaded are replaced.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hftune.tracking.backend import EarlierRun


@dataclass
class Continuation:
    """What to give to wandb.init, and what to log again."""

    options: dict[str, Any] = field(default_factory=dict)
    last_step: int = -1
    """Of the rows that the run has, and keeps; -1 without any."""
    lines: Sequence[Mapping[str, Any]] = ()
    """Lines of metrics.jsonl that it lacks."""


def repeat_all(earlier: EarlierRun, **options: Any) -> Continuation:
    """Begin a run that gets all lines again."""
    return Continuation(options, lines=earlier.lines)


def continue_offline(folder: Path, earlier: EarlierRun) -> Continuation:
    """Begin the files of a run anew: under the same id instead of the old ones, unless those have been uploaded.

    Two files of one run would be uploaded one after the other, each row with a number of its own.

    Args:
        folder: wandb, in the output folder.
    """
    old = [path for path in folder.glob(f"*run-*-{earlier.run_id}") if not path.is_symlink()] if earlier.run_id else []
    if not old or any(not path.name.startswith("offline-") or [*path.glob("*.synced")] for path in old):
        return repeat_all(earlier)
    for path in old:
        shutil.rmtree(path, ignore_errors=True)
    return repeat_all(earlier, id=earlier.run_id)


def continue_online(path: str, earlier: EarlierRun) -> Continuation | None:
    """Let the server keep the rows that still count; None if it does not know the run.

    Args:
        path: project, or entity and project, of the run.
    """
    if earlier.run_id is None or (last := last_step(f"{path}/{earlier.run_id}")) is None:
        return None
    settled = [line["step"] for line in earlier.lines if line["step"] < earlier.step + (not earlier.awaits_evaluation)]
    kept = max((step for step in settled if step <= last), default=-1)
    again = [line for line in earlier.lines if line["step"] > kept]
    if last <= max(settled, default=-1):  # nothing that is repeated
        return Continuation({"id": earlier.run_id, "resume": "must"}, last, [line for line in again if line["step"] > last])
    if kept < 0:
        return None
    return Continuation({"resume_from": f"{earlier.run_id}?_step={kept}"}, kept, again)


def last_step(path: str) -> int | None:
    """Ask the server for the step of a run's last row: -1 if it has none, None if the server does not know the run."""
    import wandb

    try:
        return int(wandb.Api(timeout=20).run(path).lastHistoryStep)
    except (wandb.errors.CommError, ValueError):
        return None

"""Writes ledger.jsonl: what each step of a run was computed from and what came out, as a chain. Knows no model and no process.

There is one line for each step, one for each checkpoint, and one each time training starts or resumes. Lines are only ever
added, and each holds the SHA-256 of the line before, so the last hash stands for all of them. ``replay/ledger.py`` reads them.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from threading import Lock
from typing import Any

from hftune.batch_plan import BatchPlan
from hftune.checkpoints.atomic_files import GrowingFile, explain_write_errors
from hftune.errors import TrainingError
from hftune.tracking.jsonl import strict_json

NAME = "ledger.jsonl"
FORMAT = 2
"""The format of the lines that are written, and the only one that can be read."""
AWAY_S = 2.0
"""Between two lines, after which a later round of the job may have taken over the file; by a clock that goes on in a suspended
machine."""
NOTHING = "0" * 64
"""Stands for the line before the first one."""
KEYS = {
    "after_step": {"world_size", "plan"},
    "step": {"epoch", "step_in_epoch"},
    "checkpoint": set(),
}
"""The kinds of lines, by the key that tells them apart: what else each has."""


Line = dict[str, Any]
"""The values of a line."""


class Ledger:
    """Writes ledger.jsonl. Main process only; checkpoints are noted from the thread that writes them."""

    def __init__(self, path: Path, is_ours: Callable[[], bool] = lambda: True):
        self.path = path
        self._is_ours, self._written = is_ours, time.time()
        self._lock = Lock()

    def begin(self, step: int, facts: Mapping[str, Any]) -> None:
        """Record that training starts, or resumes after ``step``: from here on, lines of later steps further up do not count.

        What a kill or a power failure left of a line at the end is cut off; nothing else is ever removed.

        Args:
            facts: JSON values, see ``plan_facts`` and docs/output-folder.md.

        Raises:
            TrainingError: the file cannot be written.
        """
        with explain_write_errors(self.path):
            texts = whole_lines(self.path) if self.path.is_file() else []
            self._end = hash_of(texts[-1]) if texts else NOTHING
            self.file = GrowingFile(self.path, sum(len(text) + 1 for text in texts))
        self._append(strict_json({"format": FORMAT, "after_step": step, **facts}, default=str))

    def note(
        self,
        step: int,
        epoch: int,
        step_in_epoch: int,
        *,
        num_samples: int,
        digest: str,
        loss: float,
        grad_norm: float,
        lr: float,
        items: float,
    ) -> None:
        """Record one step.

        Args:
            step: counted from 1.
            epoch: counted from 0, as is ``step_in_epoch``.
            num_samples: that the processes computed, and ``digest`` of their numbers; see ``samples_digest``.
            loss: mean over the ``items`` of the global batch.
            grad_norm: before clipping.

        Raises:
            TrainingError: the file cannot be written.
        """
        # As json would write it, whose encoder takes 30 us between two steps, when nothing of it is in the processor's caches.
        self._append(
            f'{{"step": {step}, "epoch": {epoch}, "step_in_epoch": {step_in_epoch}, "num_samples": {num_samples}, '
            f'"digest": "{digest}", "loss": {_number(loss)}, "grad_norm": {_number(grad_norm)}, "lr": {_number(lr)}, '
            f'"items": {_number(items)}}}'
        )

    def note_skipped(self, step: int, epoch: int, step_in_epoch: int) -> None:
        """Record a step that was left out: its samples were not used, and nothing was updated. Raises as ``note``."""
        self._append(json.dumps({"step": step, "epoch": epoch, "step_in_epoch": step_in_epoch, "skipped": True}))

    def note_checkpoint(self, step: int, hashes: Mapping[str, str]) -> None:
        """Record a checkpoint that is complete, from any thread. Raises as ``note``.

        Args:
            hashes: the SHA-256 of its files of tensors, such as ``{"model": ..., "optimizer": ...}``.
        """
        self._append(json.dumps({"checkpoint": step, **hashes}))

    def _append(self, line: str) -> None:
        """Write a line, given as a JSON object, with the hash of the one before.

        Raises:
            TrainingError: this process was stopped for a while, and another one goes on with the file; or it cannot be written.
        """
        with self._lock:
            if abs(time.time() - self._written) > AWAY_S and not self._is_ours():
                raise TrainingError(f"{self.path} is another process's by now: this one was stopped for a while.")
            self._written = time.time()
            data = f'{line[:-1]}, "prev": "{self._end}"}}'.encode()
            self.file.append(data + b"\n")
            self._end = hash_of(data)

    def close(self) -> None:
        self.file.close()


def plan_facts(plan: BatchPlan) -> dict[str, Any]:
    """Return what the line of a start says about the batches: their plan, and how they are cut, which keys dropout."""
    facts: dict[str, Any] = {"num_samples": plan.num_samples, "batch_size": plan.batch_size, "seed": plan.seed}
    if plan.mixture is not None:
        facts["mixture"] = [list(part) for part in plan.mixture]
    bounds = {"micro_batch_size": plan.micro_batch_size, "micro_batch_tokens": plan.micro_batch_tokens}
    return {**bounds, "packed": plan.packed, "plan": facts}


def whole_lines(path: Path) -> list[bytes]:
    """Read the lines of a ledger, without what a kill, a power failure or a full disk left of one at the end."""
    *texts, _ = path.read_bytes().split(b"\n")
    while texts and _values(texts[-1]) is None:
        texts.pop()
    return texts


def last_step(path: Path) -> int:
    """Return the last step that a ledger has a line of, whether it counts or not; 0 if it has none or is not there."""
    lines = map(parse_line, reversed(whole_lines(path) if path.is_file() else []))
    return next((line["step"] for line in lines if line is not None and "step" in line), 0)


def parse_line(text: bytes) -> Line | None:
    """Return the values of a line; None if it is none of a ledger."""
    line = _values(text) or {}
    kind = next((key for key in KEYS if key in line), None)
    return line if kind is not None and isinstance(line[kind], int) and line.keys() >= KEYS[kind] else None


def _values(text: bytes) -> Line | None:
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) else None


def _number(value: float) -> str:
    """Format a number so that reading it gives the same bits; null for one that JSON does not have."""
    return float.__repr__(float(value)) if math.isfinite(value) else "null"


def hash_of(text: bytes) -> str:
    return sha256(text).hexdigest()

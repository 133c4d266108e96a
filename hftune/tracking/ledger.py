"""Writes ledger.jsonl: what each step of a run was computed from and what came out, as a chain. Knows no model and no process.

There is one line for each step, one for each checkpoint, and one each time training starts or resumes. Lines are only ever
added, and each holds the SHA-256 of the line before, so the last hash stands for all of them. ``replay/ledger.py`` reads them.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from hftune.atomic import GrowingFile, explain_write_errors
from hftune.batch_plan import BatchPlan, EpochPlan
from hftune.callbacks import Begin, Callback, CheckpointDone, End, Step
from hftune.errors import TrainingError
from hftune.tracking.jsonl import strict_json

NAME = "ledger.jsonl"
FORMAT = 2
"""The format of the lines that are written, and the only one that can be read."""
AWAY_S = 2.0
"""After this many seconds without a line, check whether another process has taken over the file. By the wall clock, which
goes on while a machine is suspended."""
NOTHING = "0" * 64
"""The hash of the line before the first one, which does not exist."""
KEYS = {
    "after_step": {"world_size", "plan"},
    "step": {"epoch", "step_in_epoch"},
    "checkpoint": set(),
}
"""The kinds of lines, by the key that tells them apart: what else each has."""


Line = dict[str, Any]
"""The values of a line."""


class Ledger(Callback):
    """Writes ledger.jsonl. Main process only; checkpoints are noted from the thread that writes them.

    A method raises TrainingError if the file cannot be written.

    Args:
        facts: returns JSON values about the start of the training, see ``start_facts`` and docs/output-folder.md.
        is_ours: whether this process still has the output folder; see ``only_writer``.
    """

    must_not_fail = True

    def __init__(self, path: Path, facts: Callable[[], Mapping[str, Any]] = dict, is_ours: Callable[[], bool] = lambda: True):
        self.path, self._facts = path, facts
        self._is_ours, self._written = is_ours, time.time()
        self._lock = Lock()
        self._epoch: Callable[[int], EpochPlan] | None = None

    def on_begin(self, begin: Begin) -> None:
        """Record that training starts, or resumes after a step: lines of later steps further up do not count any more."""
        self._epoch = lru_cache(maxsize=1)(begin.plan.epoch)
        self.start(begin.step, self._facts())

    def start(self, step: int, facts: Mapping[str, Any]) -> None:
        """Open the file, and record that training starts after ``step``.

        What a kill or a power failure left of a line at the end is cut off; nothing else is ever removed.
        """
        with explain_write_errors(self.path):
            texts = whole_lines(self.path) if self.path.is_file() else []
            self._end = hash_of(texts[-1]) if texts else NOTHING
            self.file = GrowingFile(self.path, sum(len(text) + 1 for text in texts))
        self._append(strict_json({"format": FORMAT, "after_step": step, **facts}, default=str))

    def on_step(self, step: Step) -> None:
        """Record one step; of a skipped one, that its samples were not used and nothing was updated."""
        epoch, step_in_epoch = step.place
        place = f'{{"step": {step.step}, "epoch": {epoch}, "step_in_epoch": {step_in_epoch}, '
        if step.loss is None:
            self._append(f'{place}"skipped": true}}')
            return
        left_out = self._left_out(step)
        # As json would write it, whose encoder takes 30 us between two steps, when nothing of it is in the processor's caches.
        self._append(
            f'{place}"num_samples": {step.num_samples}, "digest": "{step.digest}", "loss": {_number(step.loss)}, '
            f'"grad_norm": {_number(step.grad_norm)}, "lr": {_number(step.lr)}, "items": {_number(step.num_items)}{left_out}}}'
        )

    def _left_out(self, step: Step) -> str:
        """Return the entry of the samples that the plan has in a step, and that were left out of it."""
        epoch, place = step.place
        planned = self._epoch(epoch).samples(place) if self._epoch else ()  # without on_begin, there is no plan
        if len(planned) <= step.num_samples:
            return ""
        used = np.concatenate([micro_batch.samples for micro_batch in step.micro_batches])
        return f', "left_out": {json.dumps(np.setdiff1d(planned, used).tolist())}'

    def on_checkpoint(self, checkpoint: CheckpointDone) -> None:
        """Record the hashes of a checkpoint that is complete."""
        if checkpoint.failure is None:
            self._append(json.dumps({"checkpoint": checkpoint.step, **checkpoint.hashes}))

    def on_end(self, end: End) -> None:
        self.file.close()

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


def plan_facts(plan: BatchPlan) -> dict[str, Any]:
    """Return what the line of a start says about the batches: their plan, and how they are cut, which keys dropout."""
    facts: dict[str, Any] = {"num_samples": plan.num_samples, "batch_size": plan.batch_size, "seed": plan.seed}
    if plan.mixture is not None:
        facts["mixture"] = [list(part) for part in plan.mixture]
    if plan.window is not None:
        facts |= {"window": plan.window, "groups": [*plan.groups]}
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


def _number(value: float | None) -> str:
    """Format a number so that reading it gives the same bits; null for one that JSON does not have."""
    return float.__repr__(float(value)) if value is not None and math.isfinite(value) else "null"


def hash_of(text: bytes) -> str:
    return sha256(text).hexdigest()

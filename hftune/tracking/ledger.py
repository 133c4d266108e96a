"""ledger.jsonl: what each step of a run was computed from and what came out, as a chain; and the audit of the samples.

One line for each step, one for each checkpoint, and one each time training starts or resumes. Lines are only ever added, and
each holds the SHA-256 of the line before, so that the last hash stands for all of them. Independent of models and processes.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from hftune.batch_plan import BatchPlan, format_digest, samples_digest
from hftune.checkpoints.atomic_files import GrowingFile, explain_write_errors
from hftune.errors import ConfigError, TrainingError
from hftune.tracking.jsonl import strict_json

NAME = "ledger.jsonl"
FORMAT = 2
"""Of the lines that are written, and that can be read. 1 was hftune 0.2's."""
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
            self._end = _hash(texts[-1]) if texts else NOTHING
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
            self._end = _hash(data)

    def close(self) -> None:
        self.file.close()


def plan_facts(plan: BatchPlan) -> dict[str, Any]:
    """Return what the line of a start says about the batches: their plan, and how they are cut, which keys dropout."""
    facts: dict[str, Any] = {"num_samples": plan.num_samples, "batch_size": plan.batch_size, "seed": plan.seed}
    if plan.mixture is not None:
        facts["mixture"] = [list(part) for part in plan.mixture]
    bounds = {"micro_batch_size": plan.micro_batch_size, "micro_batch_tokens": plan.micro_batch_tokens}
    return {**bounds, "packed": plan.packed, "plan": facts}


@dataclass
class LedgerRecord:
    """A ledger as it was read. Steps that were taken again after a resume are superseded: only their last lines count."""

    lines: list[Line]
    """All that can be read, in order, superseded ones included."""
    starts: list[Line]
    """Where training started and resumed, in order."""
    taken: list[Line]
    """The lines of steps that count, in the order of the file: ascending, unless somebody has changed it."""
    steps: dict[int, Line]
    """The same by step; those that were left out have ``skipped``."""
    checkpoints: dict[int, Line]
    """By step: the hashes of the checkpoints that belong to the steps that count."""
    end: str
    """SHA-256 of the last line, which stands for all lines."""
    starts_of: dict[int, Line]
    """See ``start_of``."""
    found: list[str]
    """See ``problems``."""

    def start_of(self, step: int) -> Line:
        """Return the line of the start under which this step was computed as it counts.

        Raises:
            KeyError: there is no such step.
        """
        return self.starts_of[step]

    def problems(self) -> list[str]:
        """Return what shows that lines were changed, removed or added, as sentences. Empty if the chain is whole."""
        return self.found


def read_ledger(folder: str | Path) -> LedgerRecord:
    """Read the ledger in an output folder, also of a run that is still going on.

    Raises:
        ConfigError: there is none, it has no start, or a different version of hftune wrote it.
    """
    path = Path(folder).expanduser() / NAME
    if not path.is_file():
        raise ConfigError(f"{folder} holds no ledger.jsonl: name the output folder of a run.")
    texts = whole_lines(path)
    parsed = [_parse(text) for text in texts]
    lines = [line for line in parsed if line is not None]
    starts = [line for line in lines if "after_step" in line]
    if not starts:
        raise ConfigError(f"{path} does not say how a training started: no run has written it.")
    if odd := {start.get("format", 1) for start in starts} - {FORMAT}:
        raise ConfigError(f"{path} has format {odd.pop()}, and this hftune reads format {FORMAT}: a different one wrote it.")
    taken, checkpoints, exchanged = _counting(lines)
    return LedgerRecord(
        lines=lines,
        starts=starts,
        taken=[line for line, _ in taken],
        steps={line["step"]: line for line, _ in taken},
        checkpoints=checkpoints,
        end=_hash(texts[-1]),
        starts_of={line["step"]: start for line, start in taken},
        found=[*_breaks(texts, parsed), *exchanged],
    )


def whole_lines(path: Path) -> list[bytes]:
    """Read the lines of a ledger, without what a kill, a power failure or a full disk left of one at the end."""
    *texts, _ = path.read_bytes().split(b"\n")
    while texts and _values(texts[-1]) is None:
        texts.pop()
    return texts


def last_step(path: Path) -> int:
    """Return the last step that a ledger has a line of, whether it counts or not; 0 if it has none or is not there."""
    lines = map(_parse, reversed(whole_lines(path) if path.is_file() else []))
    return next((line["step"] for line in lines if line is not None and "step" in line), 0)


def _parse(text: bytes) -> Line | None:
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


def _hash(text: bytes) -> str:
    return sha256(text).hexdigest()


def _counting(lines: Sequence[Line]) -> tuple[list[tuple[Line, Line]], dict[int, Line], list[str]]:
    """Return the lines of steps that count, each with its start; the checkpoints that belong to them, by step; and problems."""
    start: Line = {}
    taken: list[tuple[Line, Line]] = []
    checkpoints: dict[int, Line] = {}
    problems = []
    for line in lines:
        if "after_step" in line:
            start, after = line, line["after_step"]
            taken = [pair for pair in taken if pair[0]["step"] <= after]
            checkpoints = {step: hashes for step, hashes in checkpoints.items() if step <= after}
            if hashes := start.get("checkpoint"):
                written = checkpoints.setdefault(after, hashes)  # its own line is missing if a kill came before it
                if any(written[group] != hashes[group] for group in hashes.keys() & written.keys() - {"step"}):
                    problems.append(f"Training resumed after step {after} from another checkpoint than was written there.")
        elif "step" in line:
            taken.append((line, start))
        else:
            checkpoints[line["checkpoint"]] = line
    return taken, checkpoints, problems


def _breaks(texts: Sequence[bytes], lines: Sequence[Mapping[str, Any] | None]) -> Iterator[str]:
    """Yield a sentence for each line that cannot be read, or does not hold the hash of the one before it."""
    before, places = NOTHING, {}
    for number, (text, line) in enumerate(zip(texts, lines, strict=True), start=1):
        if line is None:
            yield f"Line {number} cannot be read."
        elif (prev := line.get("prev")) != before:
            if number == 1:
                yield "Line 1 is not the first: lines before it were removed."
            elif prev in places:
                yield f"Line {number} does not follow line {number - 1}: it was written after line {places[prev]}."
            else:
                yield f"Line {number} does not follow: line {number - 1} was changed, or a line between them was removed."
        before = _hash(text)
        places[before] = number


@dataclass
class Audit:
    """The result of an audit."""

    steps: int = 0
    whole_epochs: int = 0
    """Epochs in which every sample was used exactly once; of a mixture, in which as many samples of each data set were used as
    its weight says, all of its samples equally often since the start, give or take one."""
    samples: int = 0
    """Samples used, each as often as it was."""
    skipped: list[int] = field(default_factory=list)
    """Steps that were left out; their epochs are not whole."""
    starts: list[dict[str, Any]] = field(default_factory=list)
    """Where training started and resumed: after_step, world_size, micro_batch_size, micro_batch_tokens."""
    repeated: int = 0
    """Steps that a resume took back: it began before them. Neither they nor their samples are counted."""
    lines: int = 0
    """Each holds the hash of the line before."""
    end: str = NOTHING
    """SHA-256 of the last line, which stands for all of them."""
    mixture: list[dict[str, Any]] = field(default_factory=list)
    """Of each data set of a mixture: rows, weight, and samples, the number that an epoch uses."""
    problems: list[str] = field(default_factory=list)
    """Empty if the ledger proves that no sample was lost or used twice."""


def audit(folder: str | Path) -> Audit:
    """Prove from an output folder's ledger that each finished epoch used every sample exactly once, and no step twice.

    The plan is computed again from its few parameters. Each of its epochs must hold every sample once (of a mixture, see
    ``unequal_use``), and each step's samples must have the digest of those that the processes computed. The lines must be those
    that were written, in their order.

    Raises:
        ConfigError: there is no ledger, or it cannot be read.
    """
    record = read_ledger(folder)
    found = Audit(starts=record.starts, lines=len(record.lines), end=record.end, problems=[*record.problems()])
    found.repeated = sum("epoch" in line for line in record.lines) - len(record.taken)
    plans = {json.dumps(start["plan"], sort_keys=True) for start in found.starts}
    if len(plans) != 1:
        found.problems.append(f"{len(plans)} different plans were followed; one run has one.")
        return found
    plan = BatchPlan(**found.starts[0]["plan"])
    order_N, epoch, used_N = np.array([], int), -1, np.zeros(plan.num_samples, int)
    if plan.mixture is not None:
        found.mixture = [
            {"rows": rows, "weight": weight, "samples": samples}
            for (rows, weight), samples in zip(plan.mixture, plan.drawn_per_epoch, strict=True)
        ]
    for number, line in enumerate(record.taken, start=1):
        place = divmod(number - 1, plan.num_steps)
        if (line["step"], line["epoch"], line["step_in_epoch"]) != (number, *place):
            said = f"step {line['step']} (epoch {line['epoch']}, step {line['step_in_epoch']} of it)"
            found.problems.append(f"Line {number} of the steps is {said}; step {number} should follow here.")
            break
        found.steps = number
        if place[0] != epoch:
            epoch, order_N = place[0], plan.epoch(place[0]).order_N
            in_epoch_N = np.bincount(order_N, minlength=plan.num_samples)
            used_N += in_epoch_N
            if plan.mixture is None and not (in_epoch_N == 1).all():
                found.problems.append(f"The plan of epoch {epoch} does not hold every sample once.")
            found.problems += unequal_use(found.mixture, epoch, in_epoch_N, used_N)
        if line.get("skipped"):
            found.skipped.append(number)
            continue
        samples = order_N[place[1] * plan.batch_size : (place[1] + 1) * plan.batch_size]
        if (line.get("num_samples"), line.get("digest")) != (len(samples), format_digest(*samples_digest(samples))):
            found.problems.append(f"Step {number} was computed from other samples than its plan says.")
        found.samples += line.get("num_samples", 0)
    broken = {(number - 1) // plan.num_steps for number in found.skipped}
    found.whole_epochs = len(set(range(found.steps // plan.num_steps)) - broken)
    return found


def unequal_use(mixture: Sequence[Mapping[str, Any]], epoch: int, in_epoch_N: np.ndarray, used_N: np.ndarray) -> Iterator[str]:
    """Yield a problem for each data set of which an epoch does not use as many samples as its weight says, all equally often.

    Args:
        in_epoch_N: how often this epoch uses each sample.
        used_N: how often all epochs so far do. Of any two samples of a data set, one is used at most once more than the other.
    """
    start = 0
    for index, part in enumerate(mixture):
        own = slice(start, start + part["rows"])
        start = own.stop
        if (count := int(in_epoch_N[own].sum())) != max(1, int(part["weight"] * part["rows"] + 0.5)):
            yield f"The plan of epoch {epoch} uses {count:,} samples of data set {index}, not as weight {part['weight']} says."
        if np.ptp(used_N[own]) > 1:
            yield f"The plan does not use the samples of data set {index} equally often up to epoch {epoch}."

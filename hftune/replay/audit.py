"""The audit of a run: proves from its ledger that every epoch used each sample exactly once. Knows no model and no data."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hftune.batch_plan import BatchPlan, format_digest, samples_digest
from hftune.checkpoints.run_folder import here
from hftune.replay.ledger import read_ledger
from hftune.tracking.ledger import NOTHING


@dataclass
class Audit:
    """The result of an audit."""

    steps: int = 0
    whole_epochs: int = 0
    """Epochs in which every sample was used exactly once. Of a mixture: in which the number of samples of each data set follows
    its weight, and the use counts of any two of its samples since the start differ by at most one."""
    samples: int = 0
    skipped: list[int] = field(default_factory=list)
    """Skipped steps; their epochs are not whole."""
    left_out: int = 0
    """How often a sample was left out of its step, because it cannot be trained on; see ``task.bad_rows``."""
    starts: list[dict[str, Any]] = field(default_factory=list)
    """Where training started and resumed: after_step, world_size, micro_batch_size, micro_batch_tokens."""
    repeated: int = 0
    """Steps that a resume took back: it began before them. Neither they nor their samples are counted."""
    lines: int = 0
    """Each holds the hash of the line before."""
    end: str = NOTHING
    mixture: list[dict[str, Any]] = field(default_factory=list)
    """Of each data set of a mixture: rows, weight, samples, the number that an epoch uses, and used, that of all steps."""
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
    record = read_ledger(here(folder))
    found = Audit(starts=record.starts, lines=len(record.lines), end=record.end, problems=[*record.problems])
    found.repeated = sum("epoch" in line for line in record.lines) - len(record.taken)
    plans = {json.dumps(start["plan"], sort_keys=True) for start in found.starts}
    if len(plans) != 1:
        found.problems.append(f"{len(plans)} different plans were followed; one run has one.")
        return found
    plan = BatchPlan(**found.starts[0]["plan"])
    order, epoch, used_N = plan.epoch(0), -1, np.zeros(plan.num_samples, int)
    if plan.mixture is not None:
        found.mixture = [
            {"rows": rows, "weight": weight, "samples": samples, "used": 0}
            for (rows, weight), samples in zip(plan.mixture, plan.drawn_per_epoch, strict=True)
        ]
    ends = np.cumsum([0, *(part["rows"] for part in found.mixture)])
    for number, line in enumerate(record.taken, start=1):
        place = divmod(number - 1, plan.num_steps)
        if (line["step"], line["epoch"], line["step_in_epoch"]) != (number, *place):
            said = f"step {line['step']} (epoch {line['epoch']}, step {line['step_in_epoch']} of it)"
            found.problems.append(f"Line {number} of the steps is {said}; step {number} should follow here.")
            break
        found.steps = number
        if place[0] != epoch:
            epoch, order = place[0], plan.epoch(place[0])
            in_epoch_N = np.bincount(order.order_N, minlength=plan.num_samples)
            used_N += in_epoch_N
            if plan.mixture is None and not (in_epoch_N == 1).all():
                found.problems.append(f"The plan of epoch {epoch} does not hold every sample once.")
            found.problems += unequal_use(found.mixture, epoch, in_epoch_N, used_N)
        if line.get("skipped"):
            found.skipped.append(number)
            continue
        samples, left_out = order.samples(place[1]), line.get("left_out", [])
        if not np.isin(left_out, samples).all():
            found.problems.append(f"Step {number} left out samples that its plan does not have.")
        found.left_out += len(left_out)
        samples = np.setdiff1d(samples, left_out) if left_out else samples
        if (line.get("num_samples"), line.get("digest")) != (len(samples), format_digest(*samples_digest(samples))):
            found.problems.append(f"Step {number} was computed from other samples than its plan says.")
        found.samples += line.get("num_samples", 0)
        counts = np.histogram(samples, bins=ends)[0].tolist() if found.mixture else ()
        for part, used in zip(found.mixture, counts, strict=True):
            part["used"] += used
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

"""ledger.jsonl: the samples of each step, and the audit that proves from it that no sample was lost or used twice.

One line for each step with the digest of the samples that the processes computed, and one each time training starts or resumes.
Independent of models and processes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hftune.batch_plan import BatchPlan, format_digest, samples_digest
from hftune.errors import ConfigError
from hftune.tracking.jsonl import LineFile, read_lines


@dataclass
class Ledger:
    """Writes ledger.jsonl. Main process only."""

    path: Path

    def begin(self, step: int, plan: BatchPlan, world_size: int) -> None:
        """Record that training starts, or resumes after ``step``; lines of later steps are dropped."""
        lines = [line for line in read_lines(self.path) if line.get("step", line.get("after_step", 0)) <= step]
        facts: dict[str, Any] = {"num_samples": plan.num_samples, "batch_size": plan.batch_size, "seed": plan.seed}
        if plan.mixture is not None:
            facts["mixture"] = [list(part) for part in plan.mixture]
        bounds = {"micro_batch_size": plan.micro_batch_size, "micro_batch_tokens": plan.micro_batch_tokens}
        self._file = LineFile(self.path, [*lines, {"after_step": step, "world_size": world_size, **bounds, "plan": facts}])

    def note(self, step: int, epoch: int, step_in_epoch: int, num_samples: int, digest: str) -> None:
        """Record one step.

        Args:
            step: counted from 1.
            epoch: counted from 0, as is ``step_in_epoch``.
            num_samples: that the processes computed, and ``digest`` of their numbers; see ``samples_digest``.
        """
        where = {"step": step, "epoch": epoch, "step_in_epoch": step_in_epoch}
        self._file.append({**where, "num_samples": num_samples, "digest": digest})

    def close(self) -> None:
        self._file.close()


@dataclass
class Audit:
    """The result of an audit."""

    steps: int = 0
    whole_epochs: int = 0
    """Epochs in which every sample was used exactly once; of a mixture, in which as many samples of each data set were used as
    its weight says, all of its samples equally often since the start, give or take one."""
    samples: int = 0
    """Samples used, each as often as it was."""
    starts: list[dict[str, Any]] = field(default_factory=list)
    """Where training started and resumed: after_step, world_size, micro_batch_size, micro_batch_tokens."""
    mixture: list[dict[str, Any]] = field(default_factory=list)
    """Of each data set of a mixture: rows, weight, and samples, the number that an epoch uses."""
    problems: list[str] = field(default_factory=list)
    """Empty if the ledger proves that no sample was lost or used twice."""


def audit(folder: str | Path) -> Audit:
    """Prove from an output folder's ledger that each finished epoch used every sample exactly once, and no step twice.

    The plan is computed again from its few parameters. Each of its epochs must hold every sample once (of a mixture, see
    ``unequal_use``), and each step's samples must have the digest of those that the processes computed.

    Raises:
        ConfigError: there is no ledger, or it cannot be read.
    """
    path = Path(folder) / "ledger.jsonl"
    if not path.is_file():
        raise ConfigError(f"{folder} holds no ledger.jsonl: name the output folder of a run.")
    lines = read_lines(path)
    found = Audit(starts=[line for line in lines if "after_step" in line])
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
    for number, line in enumerate((line for line in lines if "step" in line), start=1):
        place = divmod(number - 1, plan.num_steps)
        if (line["step"], line["epoch"], line["step_in_epoch"]) != (number, *place):
            said = f"step {line['step']} (epoch {line['epoch']}, step {line['step_in_epoch']} of it)"
            found.problems.append(f"Line {number} of the steps is {said}; step {number} should follow here.")
            break
        if place[0] != epoch:
            epoch, order_N = place[0], plan.epoch(place[0]).order_N
            in_epoch_N = np.bincount(order_N, minlength=plan.num_samples)
            used_N += in_epoch_N
            if plan.mixture is None and not (in_epoch_N == 1).all():
                found.problems.append(f"The plan of epoch {epoch} does not hold every sample once.")
            found.problems += unequal_use(found.mixture, epoch, in_epoch_N, used_N)
        samples = order_N[place[1] * plan.batch_size : (place[1] + 1) * plan.batch_size]
        if (line["num_samples"], line["digest"]) != (len(samples), format_digest(*samples_digest(samples))):
            found.problems.append(f"Step {number} was computed from other samples than its plan says.")
        found.steps, found.samples = number, found.samples + line["num_samples"]
    found.whole_epochs = found.steps // plan.num_steps
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

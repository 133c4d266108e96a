"""ledger.jsonl: the samples of each step, and the audit that proves from it that no sample was lost or used twice.

One line for each step with the digest of the samples that the processes computed, and one each time training starts or resumes.
Independent of models and processes.
"""

from __future__ import annotations

import json
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
        facts = {"num_samples": plan.num_samples, "batch_size": plan.batch_size, "seed": plan.seed}
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
    """Epochs in which every sample was used exactly once."""
    samples: int = 0
    """Samples used, each as often as it was."""
    starts: list[dict[str, Any]] = field(default_factory=list)
    """Where training started and resumed: after_step, world_size, micro_batch_size, micro_batch_tokens."""
    problems: list[str] = field(default_factory=list)
    """Empty if the ledger proves that no sample was lost or used twice."""


def audit(folder: str | Path) -> Audit:
    """Prove from an output folder's ledger that each finished epoch used every sample exactly once, and no step twice.

    The plan is computed again from its few parameters. Each of its epochs must hold every sample once, and each step's samples
    must have the digest of those that the processes computed.

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
    order_N, epoch = np.array([], int), -1
    for number, line in enumerate((line for line in lines if "step" in line), start=1):
        place = divmod(number - 1, plan.num_steps)
        if (line["step"], line["epoch"], line["step_in_epoch"]) != (number, *place):
            said = f"step {line['step']} (epoch {line['epoch']}, step {line['step_in_epoch']} of it)"
            found.problems.append(f"Line {number} of the steps is {said}; step {number} should follow here.")
            break
        if place[0] != epoch:
            epoch, order_N = place[0], plan.epoch(place[0]).order_N
            if not np.array_equal(np.sort(order_N), np.arange(plan.num_samples)):
                found.problems.append(f"The plan of epoch {epoch} does not hold every sample once.")
        samples = order_N[place[1] * plan.batch_size : (place[1] + 1) * plan.batch_size]
        if (line["num_samples"], line["digest"]) != (len(samples), format_digest(*samples_digest(samples))):
            found.problems.append(f"Step {number} was computed from other samples than its plan says.")
        found.steps, found.samples = number, found.samples + line["num_samples"]
    found.whole_epochs = found.steps // plan.num_steps
    return found

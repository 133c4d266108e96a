"""Writes the SLURM batch script that trains a recipe on several nodes across time limits. Independent of training."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hftune.distributed.failure_report import STOPPED
from hftune.launchers.jobs import MARGIN_S, Job, launch_config, load, render

EARLY_S = 60
"""How much earlier than requested SLURM may send the signal (sbatch's manual, --signal)."""
START_S = 60
"""For imports, data and model before the first step; large ones need more."""


@dataclass(kw_only=True)
class SlurmJob(Job):
    """What to ask SLURM for."""

    time: str = "24:00:00"
    """Time limit in SLURM's format, such as 2-12:00:00. At the limit the job is requeued and later resumes."""
    partition: str | None = None
    account: str | None = None

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        for name in ("partition", "account", "name"):
            if (value := getattr(self, name)) is not None and not re.fullmatch(r"[\w.,:@%+-]+", value):
                option = "job-name" if name == "name" else name
                yield f"--{option} {value!r} has characters that are not allowed in an #SBATCH line."
        if (seconds := time_s(self.time)) is None:
            yield f"--time {self.time!r} is not a SLURM time: MINUTES, HH:MM:SS, D-HH or D-HH:MM:SS."
        elif seconds < (least := START_S + EARLY_S + self.grace_s):
            yield (
                f"--time {self.time} is {seconds:,} s and must be at least {least:,} s: {START_S} to start, --grace-s "
                f"{self.grace_s} to stop, and {EARLY_S} by which SLURM may send its signal early. With less, the job would be "
                "requeued again and again without training. A bare number means minutes; 2 hours are 2:00:00."
            )


def time_s(text: str) -> int | None:
    """Return the seconds of a SLURM time; None if it is none."""
    if not re.fullmatch(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}", text):
        return None
    days, _, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if days:  # D-HH[:MM[:SS]]
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:  # MM[:SS]
        hours, (minutes, seconds) = 0, (*parts, 0)[:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def batch_script(words: list[str], job: SlurmJob) -> tuple[str, list[str]]:
    """Return the script for ``recipe=... key=value ...``, after checking these as the run does, and what its user should know.

    Raises:
        ConfigError: see ``load`` and ``launch_config``.
    """
    _, notices = load(words, job)
    if job.config is None:
        kind = "--multi_gpu --mixed_precision no --dynamo_backend no"
    else:
        kind = f"--config_file {shlex.quote(str(launch_config(job.config)[0]))}"
    options = {
        "gpus-per-node": job.gpus,
        "cpus-per-task": job.cores * job.processes_a_node,
        "partition": job.partition,
        "account": job.account,
    }
    text = render(
        "slurm.sh.jinja",
        job=job,
        options=options,
        words=words,
        kind=kind,
        folder=Path.cwd(),
        python=Path(sys.executable),
        shutdown_s=job.grace_s - MARGIN_S,
        stopped=STOPPED,
    )
    return text, notices

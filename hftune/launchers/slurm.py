"""Writes the batch script with which SLURM trains a recipe on several nodes, through every time limit. Knows no training."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from hftune.config import Recipe
from hftune.errors import ConfigError
from hftune.resources import config_path

MARGIN_S = 20
"""Of the grace, for the launchers to end and the job to go back into the queue."""


@dataclass(kw_only=True)
class Job:
    """What is asked of SLURM. The sizes of the training itself are the recipe's."""

    nodes: int
    gpus: int
    """Of each node: as many processes run there."""
    time: str = "24:00:00"
    """Until SLURM ends the job, and it goes on from its place in the queue; in SLURM's spelling, such as 2-12:00:00."""
    partition: str | None = None
    account: str | None = None
    name: str | None = None
    """None: the recipe's."""
    config: str | None = None
    """A launch configuration, such as one for FSDP: a shipped one's name or the path of a .yaml file. None: plain DDP."""
    cpus_per_gpu: int | None = None
    """Cores for each process. None: what the cluster gives."""
    grace_s: int = 120
    """Seconds before the end of the time in which training finishes its step and writes a checkpoint."""

    def __post_init__(self):
        if problems := list(self._problems()):
            raise ConfigError("\n  ".join(problems))

    def _problems(self) -> Iterator[str]:
        for name, least in {"nodes": 1, "gpus": 1, "cpus_per_gpu": 1, "grace_s": 2 * MARGIN_S}.items():
            if (value := getattr(self, name)) is not None and value < least:
                yield f"--{name.replace('_', '-')} {value} must be at least {least}."
        for name in ("partition", "account", "name"):
            if (value := getattr(self, name)) is not None and not re.fullmatch(r"[\w.,:@%+-]+", value):
                option = "job-name" if name == "name" else name
                yield f"--{option} {value!r} has characters that SLURM's names do not: it goes into an #SBATCH line."
        if (seconds := time_s(self.time)) is None:
            yield f"--time {self.time!r} is not a time as SLURM writes it: MINUTES, HH:MM:SS, D-HH or D-HH:MM:SS."
        elif seconds <= self.grace_s:
            yield (
                f"--time {self.time} is {seconds:,} s, and --grace-s {self.grace_s} stops training so many seconds before its "
                "end: at once. A bare number means minutes; 2 hours are 2:00:00."
            )
        if self.config is not None and self.nodes * self.gpus == 1:
            yield f"--config {self.config} is for several processes, and --nodes 1 --gpus 1 are one."


def time_s(text: str) -> int | None:
    """Return the seconds of a SLURM time; None where it is none."""
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


def batch_script(words: list[str], job: Job) -> str:
    """Return the script for ``recipe=... key=value ...``, once these have been checked as the run itself would.

    Raises:
        ConfigError: a mistyped key, a recipe that would not resume, or a launch configuration that starts one process.
    """
    recipe = Recipe.from_argv(words)
    recipe.check()
    if recipe.resume != "auto":
        raise ConfigError(f"resume={recipe.resume} would begin there again each time that the job is requeued. Leave it out.")
    name = job.name or re.sub(r"[^\w.-]+", "-", recipe.recipe)
    options = {"partition": job.partition, "account": job.account}
    if job.cpus_per_gpu is not None:
        options["cpus-per-task"] = job.cpus_per_gpu * job.gpus
    optional = "".join(f"\n#SBATCH --{key}={value}" for key, value in options.items() if value is not None)
    listed = "\n".join(f"    {shlex.quote(word)}" for word in words)
    return f"""#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={job.nodes}
#SBATCH --ntasks-per-node=1  # a launcher, which starts a process for each GPU
#SBATCH --gpus-per-node={job.gpus}{optional}
#SBATCH --time={job.time}
#SBATCH --signal=B:USR1@{job.grace_s}  # to this script alone, so many seconds before the time is up
#SBATCH --requeue
#SBATCH --open-mode=append  # one log, however often the job is requeued
#SBATCH --output=%x-%j.log

# Relative paths, such as outputs/, are seen from here. The Python environment is that in which sbatch is called.
cd {shlex.quote(str(Path.cwd()))} || exit

# What is trained. When the job comes back, the same words go on from the newest checkpoint.
words=(
{listed}
)
{_launch(job)}
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={job.grace_s - MARGIN_S}  # seconds that a launcher gives its processes to end
{_cores(job)}
# One launcher on each node, none of which is ended because another one has ended first: it may be writing.
srun --kill-on-bad-exit=0 --wait=0 {_start(job)} "${{words[@]}}" &
training=$!

# The time is nearly up: the processes finish their step, write a checkpoint, and end with an exit code that is not 0.
# Not `kill "$training"`: srun makes a SIGKILL of a SIGTERM. scancel sends it to the launchers as it is.
stopped=
trap 'stopped=yes; trap "" USR1; scancel --signal=TERM "$SLURM_JOB_ID"' USR1

wait "$training"
code=$?
if [[ $stopped ]]; then
    wait "$training"  # the signal cut the first waiting short
    code=$?
    if ((code != 0)); then
        scontrol requeue "$SLURM_JOB_ID"
        exit
    fi
fi
exit "$code"  # 0: all is done and saved; else training failed, and the log says why
"""


def _launch(job: Job) -> str:
    """Return the lines that set the launcher's options; none where one process needs no launcher."""
    processes = job.nodes * job.gpus
    if processes == 1:
        return ""
    if job.config is None:
        kind = "--multi_gpu --mixed_precision no --dynamo_backend no"
    else:
        kind = f"--config_file {shlex.quote(str(_launch_config(job.config)))}"
    meeting = "\n    --rdzv_backend hftune" if job.nodes > 1 else ""
    return f"""
# The launchers meet on the first node, at a port of this job's own; a node that does not come is named. The recipe decides on
# precision and compilation.
export HFTUNE_MACHINES=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
launch=(
    {kind}
    --num_machines {job.nodes} --num_processes {processes}
    --main_process_ip "$(head -n 1 <<< "$HFTUNE_MACHINES")" --main_process_port $((10000 + SLURM_JOB_ID % 20000)){meeting}
)
"""


def _cores(job: Job) -> str:
    """Return the line that hands the cores of the job on to its step; none where none were asked for."""
    line = 'export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"  # srun does not take it over by itself\n'
    return "" if job.cpus_per_gpu is None else line


def _start(job: Job) -> str:
    """Return what srun starts on each node; only there is the node's own number known."""
    if job.nodes * job.gpus == 1:
        return "python -m hftune.run"
    line = """bash -c 'exec accelerate launch --machine_rank "$SLURM_NODEID" "$@"' accelerate"""
    return f'{line} \\\n    "${{launch[@]}}" -m hftune.run'


def _launch_config(name: str) -> Path:
    """Find a launch configuration for several processes.

    Raises:
        ConfigError: there is none, it cannot be read, or it starts one process.
    """
    path = Path(name).resolve() if name.endswith(".yaml") and Path(name).is_file() else config_path(name)
    try:
        config = OmegaConf.load(path)
    except Exception as error:  # YAML's errors share no base with OmegaConf's and OSError
        raise ConfigError(f"--config {name} cannot be read: {error}") from error
    if not isinstance(config, DictConfig):
        raise ConfigError(f"--config {name} is not a launch configuration: its top level must be keys such as num_processes.")
    kind = config.get("distributed_type")
    if kind in ("NO", "MULTI_CPU"):
        raise ConfigError(
            f"--config {name} has distributed_type {kind}: accelerate launch would start one process on each node."
        )
    return path

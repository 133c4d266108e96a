"""Writes the SLURM batch script that trains a recipe on several nodes across time limits. Independent of training."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment
from omegaconf import DictConfig, OmegaConf

from hftune.config import Recipe
from hftune.config.shipped_files import config_path
from hftune.distributed.failure_report import STOPPED
from hftune.errors import ConfigError

TEMPLATE = Path(__file__).with_name("slurm.sh.jinja")
MARGIN_S = 20
"""The part of the grace period in which launchers exit and the job is requeued."""
EARLY_S = 60
"""How much earlier than requested SLURM may send the signal (sbatch's manual, --signal)."""
START_S = 60
"""For imports, data and model before the first step; large ones need more."""


@dataclass(kw_only=True)
class Job:
    """What to ask SLURM for; the recipe decides what is trained and in which batches."""

    nodes: str
    """Number of nodes, "2", or the minimum and maximum, "1-4": as many as are free, and training goes on without lost ones."""
    gpus: int | None = None
    """GPUs per node, with one process each. None: a job on CPUs."""
    cpu: bool = False
    """Train on CPUs."""
    processes: int | None = None
    """Processes per node of a job on CPUs. None: 1."""
    cores: int | None = None
    """CPU cores per process. None: 1 on CPUs, 2 with a GPU, plus 1 for each loader worker."""
    time: str = "24:00:00"
    """Time limit in SLURM's format, such as 2-12:00:00. At the limit the job is requeued and later resumes."""
    partition: str | None = None
    account: str | None = None
    name: str | None = None
    """None: the recipe's."""
    config: str | None = None
    """Launch configuration, such as one for FSDP: the name of a shipped one or the path of a .yaml file. None: plain DDP."""
    grace_s: int = 120
    """Seconds before the time limit at which training finishes its step and writes a checkpoint."""

    def __post_init__(self):
        if problems := list(self._problems()):
            raise ConfigError("\n  ".join(problems))

    @property
    def min_nodes(self) -> int:
        return int(self.nodes.partition("-")[0])

    @property
    def max_nodes(self) -> int:
        return int(self.nodes.rpartition("-")[2])

    @property
    def is_elastic(self) -> bool:
        return self.max_nodes > self.min_nodes

    @property
    def processes_a_node(self) -> int:
        return self.gpus or self.processes or 1

    @property
    def may_be_one_process(self) -> bool:
        return self.min_nodes == self.processes_a_node == 1

    @property
    def is_one_process(self) -> bool:
        return self.may_be_one_process and not self.is_elastic

    def _problems(self) -> Iterator[str]:
        counts = {"gpus": 1, "processes": 1, "cores": 1, "grace_s": 2 * MARGIN_S}
        cores = "cpus-per-process" if self.cpu else "cpus-per-gpu"
        if not re.fullmatch(r"[1-9]\d*(-[1-9]\d*)?", self.nodes):
            yield f"--nodes {self.nodes} is neither a number of nodes, such as 2, nor a range, such as 1-2."
        elif self.min_nodes > self.max_nodes:
            yield f"--nodes {self.nodes} starts with the larger number."
        for name, least in counts.items():
            if (value := getattr(self, name)) is not None and value < least:
                yield f"--{cores if name == 'cores' else name.replace('_', '-')} {value} must be at least {least}."
        if self.cpu == (self.gpus is not None):
            yield "Set either --gpus, the number per node, or --cpu."
        if self.processes is not None and not self.cpu:
            yield f"--processes {self.processes} is for --cpu. With --gpus there is one process per GPU."
        for name in ("partition", "account", "name"):
            if (value := getattr(self, name)) is not None and not re.fullmatch(r"[\w.,:@%+-]+", value):
                option = "job-name" if name == "name" else name
                yield f"--{option} {value!r} has characters that are not allowed in an #SBATCH line."
        if self.config is not None and self.nodes.startswith("1") and self.may_be_one_process:
            each = f"--gpus {self.gpus}" if self.gpus else f"--processes {self.processes_a_node}"
            yield f"--config {self.config} is for several processes, but --nodes {self.nodes} {each} may be one."
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


def batch_script(words: list[str], job: Job) -> tuple[str, list[str]]:
    """Return the script for ``recipe=... key=value ...``, after checking these as the run does, and what its user should know.

    Raises:
        ConfigError: a mistyped key, a recipe that would not resume, or a launch configuration that starts one process.
    """
    recipe = Recipe.from_argv(words)
    recipe.validate()
    if recipe.resume != "auto":
        raise ConfigError(f"resume={recipe.resume} would start over each time the job is requeued. Leave it out.")
    name = job.name or re.sub(r"[^\w.-]+", "-", recipe.recipe)
    cores, notices = job.cores, []
    if cores is None:
        num_workers = recipe.train.num_workers
        cores = (2 if job.gpus else 1) + num_workers
        option, each = ("--cpus-per-gpu", "GPU") if job.gpus else ("--cpus-per-process", "process")
        workers = f", {num_workers} of them for train.num_workers={num_workers}" if num_workers else ""
        asks = f"The script asks for {cores} CPU core{'s' if cores > 1 else ''} for each {each}{workers}."
        notices.append(f"{asks} {option} N asks for more.")
    if job.config is None:
        kind = "--multi_gpu --mixed_precision no --dynamo_backend no"
    else:
        kind = f"--config_file {shlex.quote(str(_launch_config(job.config)))}"
    options = {
        "gpus-per-node": job.gpus,
        "cpus-per-task": cores * job.processes_a_node,
        "partition": job.partition,
        "account": job.account,
    }
    template = Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, autoescape=False)  # it is no HTML
    template.filters["quote"] = lambda value: shlex.quote(str(value))
    text = template.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        job=job,
        name=name,
        options=options,
        words=words,
        cores=cores,
        kind=kind,
        folder=Path.cwd(),
        python=Path(sys.executable),
        shutdown_s=job.grace_s - MARGIN_S,
        stopped=STOPPED,
    )
    return text, notices


def _launch_config(name: str) -> Path:
    """Find a launch configuration for several processes.

    Raises:
        ConfigError: it does not exist, cannot be read, or starts one process.
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
            f"--config {name} has distributed_type {kind}: accelerate launch would start only one process per node."
        )
    return path

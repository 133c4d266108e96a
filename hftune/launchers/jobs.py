"""What a job on a cluster is: a recipe, machines, processes and cores. slurm.py and manifests.py write it for a scheduler."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment
from omegaconf import DictConfig, OmegaConf

from hftune.config import Recipe
from hftune.config.shipped_files import config_path
from hftune.errors import ConfigError

MARGIN_S = 20
"""The part of the grace period in which launchers exit, and the scheduler notices."""


@dataclass(kw_only=True)
class Job:
    """What to ask a scheduler for; the recipe decides what is trained and in which batches."""

    nodes: str
    """Number of machines, "2", or the least and the most, "1-4": as many as are free, going on without lost ones."""
    gpus: int | None = None
    """GPUs per machine, with one process each. None: a job on CPUs."""
    cpu: bool = False
    """Train on CPUs."""
    processes: int | None = None
    """Processes per machine of a job on CPUs. None: 1."""
    cores: int | None = None
    """CPU cores per process. None: 1 on CPUs, 2 with a GPU, plus 1 for each loader worker."""
    name: str | None = None
    """None: the recipe's."""
    config: str | None = None
    """Launch configuration, such as one for FSDP: the name of a shipped one or the path of a .yaml file. None: plain DDP."""
    grace_s: int = 120
    """Seconds before the end at which training finishes its step and writes a checkpoint."""

    def __post_init__(self):
        if problems := list(self.problems()):
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

    @property
    def size(self) -> str:
        """Machines and processes, as they were asked for."""
        return f"--nodes {self.nodes} {f'--gpus {self.gpus}' if self.gpus else f'--processes {self.processes_a_node}'}"

    def problems(self) -> Iterator[str]:
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
        if self.config is not None and re.fullmatch(r"1(-\d+)?", self.nodes) and self.may_be_one_process:
            yield f"--config {self.config} is for several processes, but {self.size} may be one."


def load(words: list[str], job: Job) -> tuple[Recipe, list[str]]:
    """Return the recipe of ``recipe=... key=value ...``, and what its user should know. Set the job's name and cores.

    Raises:
        ConfigError: a mistyped key, a recipe that would not resume, or one that does not suit the numbers of processes.
    """
    recipe = Recipe.from_argv(words)
    recipe.validate()
    if recipe.resume != "auto":
        raise ConfigError(f"resume={recipe.resume} would start over each time the job is started again. Leave it out.")
    for key in ("pipeline_stages", "context"):
        for count in range(job.min_nodes, job.max_nodes + 1):
            processes, parts = count * job.processes_a_node, getattr(recipe.parallel, key)
            if processes % parts and (key, processes) != ("context", 1):  # one process computes alone
                raise ConfigError(
                    f"parallel.{key}={parts} does not divide the number of processes: {processes} with {job.size}."
                )
    job.name = job.name or re.sub(r"[^\w.-]+", "-", recipe.recipe)
    if job.cores is not None:
        return recipe, []
    num_workers = recipe.train.num_workers
    job.cores = (2 if job.gpus else 1) + num_workers
    option, each = ("--cpus-per-gpu", "GPU") if job.gpus else ("--cpus-per-process", "process")
    workers = f", {num_workers} of them for train.num_workers={num_workers}" if num_workers else ""
    asks = f"The job asks for {job.cores} CPU core{'s' if job.cores > 1 else ''} for each {each}{workers}."
    return recipe, [f"{asks} {option} N asks for more."]


def render(template: str, **values: Any) -> str:
    """Fill in a template of this folder."""
    environment = Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, autoescape=False)  # no HTML
    environment.filters["quote"] = lambda value: shlex.quote(str(value))
    environment.filters["text"] = lambda value: json.dumps(str(value), ensure_ascii=False)  # a string of YAML, too
    return environment.from_string(Path(__file__).with_name(template).read_text(encoding="utf-8")).render(values)


def launch_config(name: str) -> tuple[Path, DictConfig]:
    """Find a launch configuration for several processes, and read it.

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
    return path, config

"""Writes manifests of Kubernetes and tasks of SkyPilot that train a recipe. Independent of training, and of both.

torchrun starts the processes, with hftune's rendezvous: the same command on all machines, none of which needs a rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from hftune.config import Recipe
from hftune.config.addresses import is_address
from hftune.distributed.failure_report import STOPPED
from hftune.distributed.network import JOIN_TIMEOUT, PORT
from hftune.distributed.rounds import REFUSED
from hftune.errors import ConfigError
from hftune.launchers.jobs import MARGIN_S, Job, launch_config, load, render

OUTPUTS = PurePosixPath("/outputs")
"""Where pods see the volume that outlives them."""
NAMES = r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?"


@dataclass(kw_only=True)
class PodJob(Job):
    """What to ask Kubernetes for."""

    image: str
    kind: str = "job"
    queue: str | None = None
    """Kueue's local queue. None: Kueue is not asked."""
    claim: str = "outputs"
    """The PersistentVolumeClaim for output_dir, unless that is an address."""
    memory: str | None = None
    """Of a pod, such as 64Gi."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        forms = {"image": r"\S+", "queue": NAMES, "claim": NAMES, "memory": r"\d+(\.\d+)?([KMGT]i?)?"}
        for name, form in forms.items():
            if (value := getattr(self, name)) is not None and not re.fullmatch(form, value):
                yield f"--{name} {value!r} has characters that Kubernetes does not allow there."


@dataclass(kw_only=True)
class SkyJob(Job):
    """What to ask SkyPilot for."""

    gpu_type: str | None = None
    """As `sky show-gpus` names it."""
    image: str | None = None
    """None: hftune is installed from the current folder, a clone of it."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.gpus is not None and not re.fullmatch(r"[\w-]+", self.gpu_type or ""):
            yield "--gpus needs --gpu-type, such as H100: the GPU's name for SkyPilot."
        if "-" in self.nodes:
            yield f"--nodes {self.nodes}: SkyPilot starts all machines of a job or none. Give one number."
        if self.image is not None and not re.fullmatch(r"\S+", self.image):
            yield f"--image {self.image!r} is not the name of an image."


def manifest(words: list[str], job: PodJob) -> tuple[str, list[str]]:
    """Return the manifest for ``recipe=... key=value ...``, after checking these, and what its user should know.

    Raises:
        ConfigError: see ``load``; or output_dir lies where it would go with the pod.
    """
    recipe, notices, variables = prepare(words, job)
    has_claim, path = not is_address(recipe.output_dir), PurePosixPath(recipe.output_dir)
    if has_claim and OUTPUTS not in (path, *path.parents):
        if str(path) != f"outputs/{recipe.recipe}":  # the default
            where = f"{OUTPUTS / str(job.name)}, on the volume of --claim {job.claim}, or an address such as s3://bucket/run"
            raise ConfigError(f"output_dir={recipe.output_dir} is in the pod, and goes with it. Name {where}, or leave it out.")
        words = [*words, f"output_dir={OUTPUTS / str(job.name)}"]
    several, fixed = job.max_nodes > 1, job.max_nodes > 1 and not job.is_elastic
    first = f"{job.name}-0" if job.kind == "job" else f"{job.name}-node-0-0"
    endpoint = f"{first}.{job.name}:{PORT}" if fixed else f"{job.name}-meeting:{PORT}" if several else "127.0.0.1:0"
    command = [*launcher(job, job.nodes.replace("-", ":"), str(job.processes_a_node), endpoint), *words]
    limits = {"nvidia.com/gpu": job.gpus, "memory": job.memory}
    text = render(
        "k8s.yaml.jinja",
        job=job,
        command=[word.replace("$", "$$") for word in command],  # Kubernetes expands $(NAME), and makes $ of $$
        variables={**variables, JOIN_TIMEOUT: "1800", "HF_HOME": "/cache/huggingface"},
        limits={name: value for name, value in limits.items() if value},
        has_claim=has_claim,
        has_service=fixed and job.kind == "job",  # a JobSet makes its own
        main_job=job.name if job.kind == "job" else f"{job.name}-node-0",
        outputs=OUTPUTS,
        port=PORT,
        refused=REFUSED,
        stopped=STOPPED,
    )
    return text, notices


def task(words: list[str], job: SkyJob) -> tuple[str, list[str]]:
    """Return SkyPilot's task for ``recipe=... key=value ...``, after checking these, and what its user should know.

    Raises:
        ConfigError: see ``load``.
    """
    recipe, notices, variables = prepare(words, job)
    if not is_address(recipe.output_dir):
        lost = f"output_dir={recipe.output_dir} is on the first machine's disk, and goes with it"
        notices.append(f"{lost}: with `sky jobs launch`, or to keep the run, set output_dir=s3://bucket/run or the like.")
    gpus = '"$SKYPILOT_NUM_GPUS_PER_NODE"' if job.gpus else str(job.processes_a_node)
    command = launcher(job, '"$SKYPILOT_NUM_NODES"', gpus, f'"$first:{PORT}"')
    return render("sky.yaml.jinja", job=job, command=command, words=words, variables=variables, stopped=STOPPED), notices


def prepare(words: list[str], job: Job) -> tuple[Recipe, list[str], dict[str, str]]:
    """Return the recipe, what its user should know, and the variables of each machine. Set the job's name and cores.

    Raises:
        ConfigError: see ``load``; or the name is none for a host, or the launch configuration needs accelerate.
    """
    given = job.name
    recipe, notices = load(words, job)
    job.name = given or re.sub(r"[^a-z0-9]+", "-", job.name.lower()).strip("-")
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", job.name):
        raise ConfigError(
            f"--job-name {job.name} must be a host name: at most 40 lower-case letters, digits and hyphens, a letter first."
        )
    if (path := next((word for word in words if re.fullmatch(r"(recipe|base)=.*\.ya?ml", word)), None)) is not None:
        notices.append(f"{path} is read on each machine: it must be there at this path.")
    variables = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(job.grace_s - MARGIN_S), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    if job.cpu:
        variables |= {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": str(job.cores)}
    if job.config is not None:
        variables |= accelerate_variables(job.config)
    return recipe, notices, variables


def launcher(job: Job, nodes: str, processes: str, endpoint: str) -> list[str]:
    """Return the command that starts the processes of one machine, up to the words of the recipe."""
    return [
        *("python", "-m", "hftune.launchers.quietly", "torchrun", f"--nnodes={nodes}", f"--nproc_per_node={processes}"),
        *(["--max-restarts=3"] if job.is_elastic else []),
        *("--rdzv-backend=hftune", f"--rdzv-endpoint={endpoint}", "-m", "hftune.run"),
    ]


def accelerate_variables(name: str) -> dict[str, str]:
    """Return what ``accelerate launch --config_file`` would say to its processes, as torchrun starts them.

    Raises:
        ConfigError: see ``launch_config``; or it is neither for plain DDP nor for FSDP.
    """
    _, config = launch_config(name)
    kind: Any = config.get("distributed_type")
    if kind not in ("MULTI_GPU", "FSDP"):
        raise ConfigError(f"--config {name} has distributed_type {kind}; MULTI_GPU and FSDP can be written into a manifest.")
    if kind == "MULTI_GPU":
        return {}
    values = {
        key.upper().replace("_LAYER_CLS_", "_CLS_"): str(value).lower() if isinstance(value, bool) else str(value)
        for key, value in (config.get("fsdp_config") or {}).items()
        if value is not None
    }
    return {"ACCELERATE_USE_FSDP": "true", **values}

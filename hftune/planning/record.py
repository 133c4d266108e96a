"""What a plan says. Its fields are the keys of ``hftune plan --json``; docs/plan-and-doctor.md says what each of them means.

Sizes are in bytes; None stands for what does not exist, or cannot be known without values. Computes nothing.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from hftune.planning.memory import StepMemory


@dataclass
class Data:
    """The samples. Tokens are those of the first epoch, or of the part that ``train.max_steps`` leaves of it."""

    train_samples: int
    eval_samples: int
    tokens: int | None
    padded_tokens: int | None
    padding_share: float | None
    longest: int | None


@dataclass
class Steps:
    """The optimizer steps."""

    total: int
    per_epoch: int
    epochs: float
    batch_size: int


@dataclass
class Work:
    """How the steps of the first epoch are computed: gradients are accumulated over micro-batches, which processes share."""

    micro_batches: int
    fewest_per_step: int
    most_per_step: int
    most_per_process: int
    evenness: float
    idle_steps: int
    packed: bool
    mean_tokens: float | None
    most_tokens: int | None
    evenness_by_processes: dict[int, float]


@dataclass
class Rate:
    """The learning rate of one optimizer step, counted from 1."""

    step: int
    lr: float
    when: str


@dataclass
class Group:
    """Parameters with the same learning rate, at the peak of the schedule, and weight decay; names of the tensors."""

    parameters: int
    lr: float
    weight_decay: float | None
    names: list[str]


@dataclass
class Memory(StepMemory):
    """Of each process; in a pipeline, of the one that needs the most. torch itself is not included."""

    device: str = "cpu"
    samples: int = 0
    longest: int | None = None
    host_copy_bytes: int = 0
    load_bytes: int | None = None
    export_bytes: int | None = None


@dataclass
class StagePlan:
    """One stage of the model: the rank of its process in the pipeline, from 0, and its modules, layers one by one."""

    place: int
    modules: list[str]
    parameters: int


@dataclass
class PipelinePlan:
    """How a model is spread over the processes of a pipeline. Stages and places are empty if they cannot be known."""

    replicas: int
    schedule: str
    micro_batches: int
    idle_share: float
    idle_share_of_twice: float
    filled_up: int
    stages: list[StagePlan] = field(default_factory=list)
    places: list[StepMemory] = field(default_factory=list)


@dataclass
class Disk:
    """What the output folder holds at most, with the checkpoint and the model that are being written."""

    checkpoint_bytes: int
    checkpoints: int
    model_bytes: int
    models: int
    total_bytes: int


@dataclass
class Plan:
    """What a run would do. More keys may be added, and the existing ones keep their meaning."""

    recipe: str
    processes: int
    data: Data
    steps: Steps
    work: Work
    learning_rate: list[Rate]
    evaluations: list[int]
    checkpoints: list[int]
    parameters: int | None = None
    trainable_parameters: int | None = None
    groups: list[Group] | None = None
    unused_parameters: list[str] | None = None
    fsdp: bool = False
    memory: Memory | None = None
    pipeline: PipelinePlan | None = None
    disk: Disk | None = None
    notices: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

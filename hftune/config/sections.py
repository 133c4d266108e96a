"""The sections of a recipe: every key, its default, its bounds. Knows no task, no file and no machine."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, Union, get_args, get_origin, get_type_hints

from hftune.errors import ConfigError, did_you_mean, format_value, type_problem


@dataclass
class Section:
    """A part of a recipe. Bounds are checked on construction, so code and command line meet the same sentence."""

    def __post_init__(self):
        if problems := list(self.problems()):
            raise ConfigError(problems)

    def problems(self) -> Iterator[str]:
        """Yield what is wrong with the values, one sentence each, with the full key as a user types it."""
        yield from ()


@dataclass
class TrainConfig(Section):
    """The optimization. Sizes are global: none of them depends on how many processes share the work."""

    epochs: int = 3
    """Passes over the training data, at least 1."""
    max_steps: int | None = None
    """Stop after this many optimizer steps, even in mid-epoch; the schedule then ends there. null: epochs decide."""
    batch_size: int = 32
    """Samples of one optimizer step, over ALL processes and machines."""
    micro_batch_size: Union[int, str, None] = None  # noqa: UP007 - OmegaConf reads this spelling
    """Most samples in one forward pass: the memory knob. auto: as many of the longest as fit. null: 8 (or no bound, where
    micro_batch_tokens is set)."""
    micro_batch_tokens: int | None = None
    """Most padded tokens (samples x padded length) in one forward pass; evens out unequal lengths. null: no bound."""
    lr: float = 5e-5
    """Peak learning rate."""
    optimizer: Literal["adamw", "adam", "sgd"] = "adamw"
    """adamw decouples weight decay; adam adds it to the gradient; sgd takes momentum."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of Adam's two moment estimates."""
    eps: float = 1e-8
    """Added to Adam's denominator."""
    momentum: float = 0.0
    """Of sgd."""
    weight_decay: float = 0.0
    """On weight matrices and embeddings only; biases and norm parameters (fewer than 2 dimensions) never decay."""
    warmup_ratio: float = 0.0
    """Share of all steps in which the learning rate rises linearly from 0, in [0, 1). Never the last step."""
    schedule: Literal["linear", "cosine", "constant", "step"] = "linear"
    """After the warmup: down to min_lr linearly, down to it along half a cosine, constant, or a fall by gamma now and then."""
    min_lr: float = 0.0
    """Learning rate at which linear and cosine end."""
    gamma: float | None = None
    """Of schedule step, in (0, 1]: the learning rate is multiplied by this ..."""
    step_size: int = 1
    """... each time so many epochs are over, as torch's StepLR has it."""
    clip_norm: float | None = 1.0
    """Largest norm of the global gradient; larger ones are scaled down to it. null: no clipping."""
    mixed_precision: Literal["no", "bf16", "fp16"] = "no"
    """Precision of forward and backward; weights and optimizer stay float32. fp16 needs a GPU."""
    batch_norm: Literal["train", "frozen"] = "train"
    """Modules with running statistics, such as BatchNorm. train: each micro-batch is normalised by itself, and the statistics
    are averaged over the whole step, on any number of processes. frozen: training uses the statistics and leaves them as they
    are; weight and bias are still trained."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more compute. Needs a transformers model."""
    compile: bool = False
    """torch.compile the model, for changing shapes."""
    tf32: bool = False
    """On GPUs that have it: float32 products and convolutions in TF32, faster and to 3 digits. false: none at all in TF32,
    where torch by itself would have convolutions so."""
    cudnn_benchmark: bool = False
    """On GPUs: have cuDNN try its algorithms for each new shape and keep the fastest. For images of one size."""
    deterministic: bool = False
    """On GPUs: use only algorithms that give the same bits each time. They are slower; an operation that has none is an error.
    CPUs need no such key: resuming on as many processes is bit-equal there. On GPUs it should be with this key, on as many GPUs
    of the same kind, which nobody has watched yet."""
    num_workers: int = 0
    """Processes that load and collate ahead of training, for each training process."""
    log_every: int = 10
    """Steps between two lines of metrics.jsonl; the first and the last step always get one. train/loss is the mean over the
    items of all steps since the line before, train/loss_step that of the last step alone."""
    dead_after_s: float = 60.0
    """Seconds without a sign of life, given once a second, after which a process counts as dead and all end; at least 3. One
    that a process beside it knows to be alive, such as in C code that holds Python's lock, has stall_after_s."""
    stall_after_s: float | None = 1800.0
    """Seconds in which no process finishes a micro-batch or a save, after which all end; at least 3. null: wait for ever."""

    def problems(self) -> Iterator[str]:
        for name, hint in get_type_hints(type(self)).items():
            if get_origin(hint) is Literal and (value := getattr(self, name)) not in get_args(hint):
                yield f"train.{name}={format_value(value)} {type_problem(hint, value)}"
        for name in ("epochs", "max_steps", "batch_size", "micro_batch_size", "micro_batch_tokens", "log_every"):
            if isinstance(value := getattr(self, name), int) and value < 1:
                yield f"train.{name}={value} must be at least 1."
        if self.deterministic and self.cudnn_benchmark:
            yield (
                "train.deterministic=true contradicts train.cudnn_benchmark=true, which may pick other algorithms each time. "
                "Set train.cudnn_benchmark=false."
            )
        if isinstance(self.micro_batch_size, str) and self.micro_batch_size != "auto":
            yield f"train.micro_batch_size={self.micro_batch_size!r} is neither a whole number nor auto nor null."
        if isinstance(self.micro_batch_size, int) and self.micro_batch_size > self.batch_size >= 1:
            yield (
                f"train.micro_batch_size={self.micro_batch_size} is larger than train.batch_size={self.batch_size}: "
                "a micro-batch is a part of the global batch. Lower the first or raise the second."
            )
        for name in ("lr", "weight_decay", "momentum", "eps"):
            if math.isinf(value := getattr(self, name)) and value > 0:
                yield f"train.{name}={value} must be finite."
        if not self.lr > 0:
            yield f"train.lr={self.lr} must be above 0."
        if self.min_lr > self.lr > 0:
            yield f"train.min_lr={self.min_lr} must not be above train.lr={self.lr}: the schedule falls to it."
        if self.min_lr > 0 and self.schedule in (falls := {"constant": "never falls", "step": "falls by train.gamma"}):
            what = f"{self.schedule} {falls[self.schedule]}"
            yield f"train.min_lr={self.min_lr} needs train.schedule=linear or cosine: {what}."
        yield from self._step_problems()
        for name in ("weight_decay", "momentum", "num_workers", "eps", "min_lr"):
            if not getattr(self, name) >= 0:
                yield f"train.{name}={getattr(self, name)} must not be negative."
        for name in ("dead_after_s", "stall_after_s"):
            if (value := getattr(self, name)) is not None and not value >= 3:
                yield f"train.{name}={value} must be at least 3: processes give a sign of life once a second."
            elif value is not None and value > 1e8:  # Python's own waits take no more than 9e9 s, and no infinity
                no_limit = "; null waits for ever" if name == "stall_after_s" else ""
                yield f"train.{name}={value} must be at most 1e8, which is three years{no_limit}."
        if not all(0 <= beta < 1 for beta in self.betas):
            yield f"train.betas={list(self.betas)} must both lie in [0, 1)."
        if not 0 <= self.warmup_ratio < 1:
            yield f"train.warmup_ratio={self.warmup_ratio} must lie in [0, 1): it is a share of all steps."
        if self.clip_norm is not None and not self.clip_norm > 0:
            yield f"train.clip_norm={self.clip_norm} must be above 0; null turns clipping off."

    def _step_problems(self) -> Iterator[str]:
        if self.schedule != "step":
            for name, default in {"gamma": None, "step_size": 1}.items():
                if (value := getattr(self, name)) != default:
                    yield f"train.{name}={value} needs train.schedule=step, not {self.schedule}."
            return
        if self.gamma is None:
            yield "train.schedule=step needs train.gamma: by what the learning rate is multiplied, such as 0.95."
        elif not 0 < self.gamma <= 1:
            yield f"train.gamma={self.gamma} must lie in (0, 1]: the learning rate is multiplied by it."
        if self.step_size < 1:
            yield f"train.step_size={self.step_size} must be at least 1 epoch."

    @property
    def max_rows(self) -> int | None:
        """Most samples in one forward pass, once the default of ``micro_batch_size`` is filled in; None for no bound."""
        if isinstance(self.micro_batch_size, str):  # "auto"
            return None
        if self.micro_batch_size is None and self.micro_batch_tokens is None:
            return min(8, self.batch_size)
        return self.micro_batch_size


SCHEDULE_KEYS = {"gamma": ("step",), "step_size": ("step",), "min_lr": ("linear", "cosine")}
"""Keys of ``train`` that mean something to these schedules only."""


@dataclass
class EvalConfig(Section):
    """When to evaluate, and which metric picks the best model. The numbers do not depend on batch_size."""

    every: Union[int, str] = "epoch"  # noqa: UP007 - OmegaConf reads this spelling
    """Steps between two evaluations, or "epoch", or "2 epochs". One always follows the last step."""
    batch_size: int = 32
    """Samples in one forward pass of the evaluation, on each process."""
    metric: str = "loss"
    """The metric that picks the best model: loss, or one that the task computes."""
    greater_is_better: bool | None = None
    """Whether more of eval.metric is better, for metrics of which the task does not say so. null: as the task says."""
    show_samples: int = 3
    """Samples to show after each evaluation, the data set's first, where the task shows any (titles and pictures do)."""

    def problems(self) -> Iterator[str]:
        if self.batch_size < 1:
            yield f"eval.batch_size={self.batch_size} must be at least 1."
        if self.show_samples < 0:
            yield f"eval.show_samples={self.show_samples} must not be negative."
        if isinstance(self.every, int) and self.every < 1:
            yield f"eval.every={self.every} must be at least 1."
        if isinstance(self.every, str) and not re.fullmatch(r"epoch|[1-9]\d* epochs?", self.every):
            yield f"eval.every={self.every!r} is neither a number of steps nor 'epoch' nor, say, '2 epochs'."

    @property
    def every_epochs(self) -> int | None:
        """Epochs between two evaluations, where ``every`` is given in epochs."""
        return None if isinstance(self.every, int) else int(self.every.split()[0].replace("epoch", "1"))

    def falls_on(self, step: int, num_steps: int, steps_per_epoch: int) -> bool:
        """Say whether an evaluation follows optimizer step ``step`` (from 1) of a run of ``num_steps``."""
        interval = self.every if isinstance(self.every, int) else self.every_epochs * steps_per_epoch
        return step == num_steps or step % interval == 0


@dataclass
class CheckpointConfig(Section):
    """What a run goes on from after it was killed. One is always written at the end of an epoch, after the last step, and where
    an evaluation found the best model so far."""

    every: int | None = 500
    """Steps between two checkpoints. null: only at the end of each epoch."""
    keep: int = 2
    """Newest checkpoints to keep; the one of the best evaluation stays, too."""

    def problems(self) -> Iterator[str]:
        for name in ("every", "keep"):
            if (value := getattr(self, name)) is not None and value < 1:
                yield f"checkpoint.{name}={value} must be at least 1."

    def falls_on(self, step: int, num_steps: int, steps_per_epoch: int) -> bool:
        """Say whether a checkpoint follows optimizer step ``step`` (from 1), whatever the evaluations find."""
        return step == num_steps or step % steps_per_epoch == 0 or (self.every is not None and step % self.every == 0)


@dataclass
class ParallelConfig(Section):
    """How one model is spread over several processes. No result depends on it."""

    pipeline_stages: int = 1
    """Processes that compute the model one after the other, each some of its layers; they divide the number of processes, and
    the rest is data parallel. 1: each process has the whole model."""
    schedule: str = "1f1b"
    """Order of the micro-batches' forward and backward passes: gpipe, 1f1b, interleaved or zero_bubble. interleaved idles less
    and sends more; zero_bubble computes the gradients of weights where it would idle."""
    virtual_stages: int | None = None
    """Of interleaved and zero_bubble: stages on each process, which alternate. null: 2 for interleaved, 1 for zero_bubble."""
    split: list[int] | None = None
    """Layers of each stage, first to last. null: the largest stage has as few parameters as can be."""

    def problems(self) -> Iterator[str]:
        if self.pipeline_stages < 1:
            yield f"parallel.pipeline_stages={self.pipeline_stages} must be at least 1."
        if self.schedule.lower().replace("_", "") in ("zbv", "zbvzerobubble", "dualpipev"):
            yield (
                f"parallel.schedule={self.schedule!r} puts the first and the last stage on one process, where torch's "
                "evaluation fails. Use zero_bubble."
            )
        elif self.schedule not in PIPELINE_SCHEDULES:
            hint = did_you_mean(self.schedule, PIPELINE_SCHEDULES)
            yield f"parallel.schedule={self.schedule!r} is not one of {', '.join(PIPELINE_SCHEDULES)}.{hint}"
        elif self.virtual_stages is not None and self.schedule in ("gpipe", "1f1b"):
            yield (
                f"parallel.virtual_stages={self.virtual_stages} is for parallel.schedule=interleaved or zero_bubble, not for "
                f"{self.schedule}."
            )
        elif self.virtual_stages is not None and self.virtual_stages < (least := 2 if self.schedule == "interleaved" else 1):
            yield f"parallel.virtual_stages={self.virtual_stages} must be at least {least} with schedule={self.schedule}."
        elif self.split is not None and len(self.split) != self.num_stages:
            yield f"parallel.split={self.split} must have a number of layers for each of the {self.num_stages} stages."
        if self.split is not None and any(count < 1 for count in self.split):
            yield f"parallel.split={self.split}: each stage has at least 1 layer."

    @property
    def num_stages(self) -> int:
        """Of one pipeline, on all its processes."""
        several = self.virtual_stages or (2 if self.schedule == "interleaved" else 1)
        return self.pipeline_stages * (several if self.pipeline_stages > 1 else 1)

    def fill_up(self, num_micro_batches: int) -> int:
        """Return the number of micro-batches, at least so many, that the schedule takes in one step of one pipeline."""
        if self.schedule == "gpipe":
            return max(1, num_micro_batches)
        count = max(self.pipeline_stages, num_micro_batches)
        while self.schedule != "1f1b" and count % (count // self.pipeline_stages):
            count += 1  # torch's interleaved schedules go in rounds of equal size
        return count


PIPELINE_SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")


@dataclass
class TrackConfig(Section):
    """Dashboards. metrics.jsonl is always written."""

    with_: list[str] = field(default_factory=list)
    """Any of wandb, mlflow, tensorboard."""
    project: str = "hftune"
    """Project of the dashboards; experiment at MLflow."""
    run_name: str | None = None
    """Name of this run. null: the recipe's name."""

    def problems(self) -> Iterator[str]:
        for name in self.with_:
            if name not in TRACKERS:
                yield f"track.with={name!r} is not one of {', '.join(TRACKERS)}.{did_you_mean(name, TRACKERS)}"


TRACKERS = ("wandb", "mlflow", "tensorboard")


@dataclass(kw_only=True)
class RunConfig(Section):
    """The keys at the top of a recipe. A recipe file can have two more:

    `base: yelp` builds on a shipped recipe or on a file; its sections and mappings are merged with those of this file.
    `replace: [task.model_config]` lists keys, or whole sections, of which nothing is taken over from the base. On the command
    line, `replace=[task.model_config] task.model_config={...}` does the same.

    A value can refer to another one, `${train.batch_size}`, or to an environment variable, `${oc.env:WANDB_NAME}`. A text that
    does the latter is written to no file: recipe.yaml and the dashboards get it as it stands here.
    """

    recipe: str = "unnamed"
    """Name of the recipe; names the output folder."""
    seed: int = 42
    """Of weights, shuffling and dropout, from 0 to 2**32 - 1."""
    output_dir: str | None = None
    """Where everything is written. null: outputs/<recipe>."""
    resume: str = "auto"
    """auto: go on from the newest whole checkpoint in output_dir, if any. never: start anew. Or the path of a checkpoint."""

    def __post_init__(self):
        super().__post_init__()
        self.output_dir = self.output_dir or f"outputs/{self.recipe}"

    def problems(self) -> Iterator[str]:
        if not 0 <= self.seed < 2**32:
            yield f"seed={self.seed} must lie in 0 to {2**32 - 1}."


def key_of(field_name: str) -> str:
    """Return a field's key in recipes: ``with_`` avoids Python's keyword, the recipe says ``with``."""
    return field_name.removesuffix("_")

"""The sections of a recipe: every key, its default, its bounds. Independent of tasks, files and machines."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from hftune.errors import ConfigError, did_you_mean, format_value, type_problem

OPTIMIZERS = ("adamw", "adam", "sgd", "muon", "adafactor", "lion", "schedule_free", "adamw_8bit")
"""The bare names of ``train.optimizer``; hftune.optim.OPTIMIZERS has the classes."""
UNSHARDED = {
    "adafactor": "keeps statistics of whole rows and columns",
    "adamw_8bit": "keeps its state in blocks of 256 numbers, with a scale for each",
}
"""The optimizers that cannot work on the parts of weights that FSDP leaves on each process, and why."""
SCHEDULES = ("linear", "cosine", "constant", "step", "wsd", "cosine_restarts", "inverse_sqrt", "polynomial")
"""The bare names of ``train.schedule``; hftune.optim.SCHEDULES has the functions."""
TRACKERS = ("wandb", "mlflow", "tensorboard", "trackio", "swanlab", "comet_ml", "aim", "clearml", "dvclive")
"""The bare names of ``track.with``; hftune.tracking.tracker.TRACKERS has the classes."""

DOUBLING = "doubling"
"""The value of ``checkpoint.keep_every`` that thins out checkpoints with their age."""


def is_dotted(name: Any) -> bool:
    """Say whether a name is a dotted path, which leads to the user's code; a bare name is hftune's."""
    return isinstance(name, str) and all(part.isidentifier() for part in name.split(".")) and "." in name


def name_problem(key: str, name: Any, names: Sequence[str], example: str) -> str | None:
    """Say that a value is neither one of hftune's names nor a dotted path; None if it is one of them."""
    if name in names or is_dotted(name):
        return None
    choices = f"{', '.join(names)}, nor a dotted path such as {example}"
    return f"{key}={format_value(name)} is not one of {choices}.{did_you_mean(name, names)}"


@dataclass
class Section:
    """A section of a recipe. Bounds are checked on construction, so code and command line get the same message."""

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
    """Number of optimizer steps after which training and the schedule end, even in the middle of an epoch. null: train.epochs
    decides."""
    batch_size: int = 32
    """Samples in one optimizer step, over ALL processes and nodes."""
    micro_batch_size: Union[int, str, None] = None  # noqa: UP007 - OmegaConf reads this spelling
    """Maximum number of samples in one forward pass, which decides the memory needed. auto: as many of the longest samples as
    fit. null: 8, or no limit if train.micro_batch_tokens is set."""
    micro_batch_tokens: Union[int, str, None] = None  # noqa: UP007
    """Maximum number of tokens in one forward pass, for samples of unequal lengths: real ones where training computes no
    padding (train.packing), otherwise padded ones (samples x padded length). auto: as many as fit, and at most a process's
    share of a step. null: no limit."""
    packing: Literal["auto", "off"] = "auto"
    """Whether to leave out padding: the layers compute the real tokens of a micro-batch and nothing else, and micro-batches get
    equal work. auto: for tasks with lengths and transformers models whose layers compute the same without padding, which is
    tried before training. off: samples are padded to the longest of their micro-batch."""
    head_loss: Literal["auto", "whole", "liger"] = "auto"
    """How tasks that predict tokens compute their loss. auto: if a micro-batch has more than 2^24 logits (tokens x words), in
    chunks together with the loss, and only those of tokens with a target: the same loss in less memory. Pipelines keep all
    logits. whole: all logits at once. liger: by Liger's kernel, on GPUs, for models with a plain linear head."""
    parts: int | None = None
    """The number of micro-batches in a step is a multiple of it, so that numbers of processes that divide it have equal work.
    null: where training computes no padding 4, 2 or 1, so that a part has 1,024 tokens or more; otherwise any number."""
    lr: float = 5e-5
    """Peak learning rate."""
    optimizer: str = "adamw"
    """adamw (decoupled weight decay), adam (weight decay in the gradient), sgd, muon (for the matrices between embeddings and
    head; adamw for all else), adafactor, lion, schedule_free (AdamW that averages the weights itself; needs schedule: constant)
    or adamw_8bit; or the dotted path of a torch.optim.Optimizer class of your choice, such as torch.optim.RMSprop."""
    optimizer_args: dict[str, Any] = field(default_factory=dict)
    """Further keyword arguments of the optimizer class. Learning rate and weight decay are train.lr and train.weight_decay."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of Adam's two moment estimates, each in [0, 1); for all optimizers that are a kind of Adam."""
    eps: float = 1e-8
    """Constant added to the denominator of Adam's update."""
    momentum: float = 0.0
    """SGD momentum, 0 or more."""
    weight_decay: float = 0.0
    """Weight decay of matrices and embeddings; biases and norm parameters (fewer than 2 dimensions) have none."""
    freeze: list[str] = field(default_factory=list)
    """Regular expressions, searched for in the names of parameters: those that match are not trained. ^ and $ stand for the
    beginning and the end of a name, such as bert.embeddings.word_embeddings.weight."""
    groups: list[dict[str, Any]] = field(default_factory=list)
    """Parameters with learning rates or weight decay of their own: a list of {match: REGEX, lr: 1e-4, weight_decay: 0.1}, of
    which lr or weight_decay can be left out. The first that matches a name counts. lr is absolute, and the schedule scales it
    like train.lr; weight_decay applies to all that matches, biases included."""
    layer_decay: float | None = None
    """Factor of the learning rate from each layer to the one below it, in (0, 1], such as 0.8: the head has train.lr, and
    embeddings the lowest. For models with a stack of layers, as those of transformers; not for what has an lr in train.groups.
    null: all layers have train.lr."""
    warmup_ratio: float = 0.0
    """Share of all steps in which the learning rate rises linearly from 0, in [0, 1). The last step is never part of it."""
    schedule: str = "linear"
    """Learning rate after the warmup: linear or cosine decay to min_lr; constant; step (multiplied by gamma every step_size
    epochs); wsd (constant, then linear decay in the last decay_ratio of the steps); cosine_restarts (cosine decay, cycles
    times); inverse_sqrt; polynomial (decay to the power of power); or the dotted path of a function f(step, num_steps,
    steps_per_epoch) that returns the factor of train.lr."""
    min_lr: float = 0.0
    """Final learning rate of the schedules linear, cosine, wsd, cosine_restarts and polynomial."""
    decay_ratio: float = 0.1
    """Share of all steps in which the learning rate falls at the end of schedule=wsd, in (0, 1]."""
    cycles: int = 2
    """Number of times that the learning rate falls from its peak with schedule=cosine_restarts, at least 1."""
    power: float = 2.0
    """Exponent of schedule=polynomial, above 0; 1 is linear."""
    gamma: float | None = None
    """Decay factor for schedule=step, in (0, 1]."""
    step_size: int = 1
    """Epochs between two decays for schedule=step, as StepLR.step_size."""
    ema_decay: float | None = None
    """Decay of an exponential moving average of the weights, in (0, 1), such as 0.999. The average is evaluated and exported;
    training goes on with the weights themselves. After each step it takes in 1 - ema_decay of the weights; more in early steps,
    whose decay is at most (1 + step) / (10 + step). BatchNorm's statistics are averaged alike. null: no average."""
    clip_norm: float | None = 1.0
    """Maximum norm of the global gradient; a larger gradient is scaled down to it. null: no clipping."""
    mixed_precision: Literal["no", "bf16", "fp16", "auto"] = "no"
    """Precision of the forward and backward passes; weights and optimizer state stay float32. no: float32. fp16 needs a GPU.
    auto: bf16 if the GPUs of all processes compute it, else no; on CPUs always no."""
    fsdp_gather: Literal["float32", "bf16"] = "float32"
    """Precision in which FSDP sends the weights of a block's linear layers; needs FSDP. bf16: half the bytes, for
    train.mixed_precision=bf16, which computes these layers in bf16 anyway. Other weights, and all gradients, stay float32."""
    batch_norm: Literal["train", "frozen"] = "train"
    """Mode of modules with running statistics, such as BatchNorm. train: each micro-batch is normalised separately, and the
    statistics are averaged over the whole step, on any number of processes. frozen: training uses the running statistics and
    leaves them unchanged; weight and bias are still trained."""
    gradient_checkpointing: bool = False
    """Whether to recompute activations in the backward pass: less memory, more compute. Needs a transformers model."""
    compile: bool = False
    """Whether to compile the model with torch.compile, for dynamic shapes: each layer of a stack of layers by itself, which all
    share their code; other models as a whole."""
    tf32: bool = False
    """Whether GPUs compute float32 matrix products and convolutions in TF32: faster, with 3 digits. false: neither, although
    torch's own default allows it for convolutions."""
    cudnn_benchmark: bool = False
    """Whether cuDNN tries its algorithms for each new shape and keeps the fastest. For images of one size on GPUs."""
    deterministic: bool = False
    """Whether GPUs use only algorithms that give the same bits every time. They are slower; an operation without one is an
    error. CPUs do not need this key: resuming on the same number of processes is bit-equal there. With it, resuming on the same
    number of GPUs of the same kind should be bit-equal, too; this has not been tested yet."""
    num_workers: int = 0
    """Number of processes that load and collate batches in advance, for each training process; as many again for evaluations.
    On GPUs a thread loads one step in advance in any case."""
    log_every: int = 10
    """Steps between two lines of metrics.jsonl; the first and the last step always get one. train/loss is the mean over the
    items of all steps since the previous line, train/loss_step that of the last step alone."""
    skip: list[int] = field(default_factory=list)
    """Steps to leave out, such as [137], counted from 1. Their samples are not loaded, and weights, optimizer state and average
    stay as they are; the schedule moves on. May be changed on resume for steps to come."""
    profile: list[int] | None = None
    """First and last step, such as [20, 23], of which each process writes a trace and a table of its most expensive operators
    into the folder profile of output_dir. Steps count from 1. null: none."""
    dead_after_s: float = 60.0
    """Seconds without a heartbeat, sent once a second, after which a process counts as dead and the job ends; at least 3. If
    another process on its node can see that it is alive, perhaps in C code that holds Python's lock, stall_after_s applies."""
    stall_after_s: float | None = 1800.0
    """Seconds in which no process finishes a micro-batch or a save, after which the job ends; at least 3. null: no limit."""

    def problems(self) -> Iterator[str]:
        for name, hint in get_type_hints(type(self)).items():
            if get_origin(hint) is Literal and (value := getattr(self, name)) not in get_args(hint):
                yield f"train.{name}={format_value(value)} {type_problem(hint, value)}"
        examples = {"optimizer": (OPTIMIZERS, "torch.optim.RMSprop"), "schedule": (SCHEDULES, "my_module.my_schedule")}
        for name, (names, example) in examples.items():
            if problem := name_problem(f"train.{name}", getattr(self, name), names, example):
                yield problem
        yield from self._optimizer_problems()
        for name in ("epochs", "max_steps", "batch_size", "micro_batch_size", "micro_batch_tokens", "parts", "log_every"):
            if isinstance(value := getattr(self, name), int) and value < 1:
                yield f"train.{name}={value} must be at least 1."
        if wrong := [step for step in self.skip if step < 1]:
            yield f"train.skip={format_value(self.skip)}: there is no step {wrong[0]}. Steps count from 1."
        if self.deterministic and self.cudnn_benchmark:
            yield (
                "train.deterministic=true contradicts train.cudnn_benchmark=true, which may pick different algorithms each "
                "time. Set train.cudnn_benchmark=false."
            )
        if self.fsdp_gather == "bf16" and self.mixed_precision != "bf16":
            yield (
                f"train.fsdp_gather=bf16 needs train.mixed_precision=bf16, not {self.mixed_precision}: it sends weights in the "
                "precision that layers compute in."
            )
        if self.fsdp_gather == "bf16" and self.compile:
            yield "train.fsdp_gather=bf16 does not work with train.compile=true. Set train.compile=false."
        for name in ("micro_batch_size", "micro_batch_tokens"):
            if isinstance(value := getattr(self, name), str) and value != "auto":
                yield f"train.{name}={value!r} is neither a whole number nor auto nor null."
        if self.micro_batch_size == self.micro_batch_tokens == "auto":
            yield (
                "train.micro_batch_size=auto and train.micro_batch_tokens=auto both ask for what fits into memory. Keep "
                "train.micro_batch_tokens=auto if lengths differ, and set train.micro_batch_size=null."
            )
        if isinstance(self.micro_batch_size, int) and self.micro_batch_size > self.batch_size >= 1:
            yield (
                f"train.micro_batch_size={self.micro_batch_size} is larger than train.batch_size={self.batch_size}: "
                "a micro-batch is a part of the global batch. Lower the first or raise the second."
            )
        if self.parts is not None and self.parts > self.batch_size >= 1:
            yield (
                f"train.parts={self.parts} is larger than train.batch_size={self.batch_size}: a micro-batch has at least one "
                "sample. Lower the first or raise the second."
            )
        for name in ("lr", "weight_decay", "momentum", "eps"):
            if math.isinf(value := getattr(self, name)) and value > 0:
                yield f"train.{name}={value} must be finite."
        if not self.lr > 0:
            yield f"train.lr={self.lr} must be above 0."
        if self.min_lr > self.lr > 0:
            yield f"train.min_lr={self.min_lr} must not be above train.lr={self.lr}: the schedule falls to it."
        if self.min_lr > 0 and self.schedule not in SCHEDULE_KEYS["min_lr"]:
            others = {"constant": "never falls", "step": "falls by train.gamma", "inverse_sqrt": "has no end to fall to"}
            reason = f"{self.schedule} {others.get(self.schedule, 'decides by itself where it ends')}"
            falling = f"{', '.join(SCHEDULE_KEYS['min_lr'][:-1])} or {SCHEDULE_KEYS['min_lr'][-1]}"
            yield f"train.min_lr={self.min_lr} needs train.schedule={falling}: {reason}."
        yield from self._step_problems()
        yield from self._schedule_problems()
        yield from self._group_problems()
        for name in ("weight_decay", "momentum", "num_workers", "eps", "min_lr"):
            if not getattr(self, name) >= 0:
                yield f"train.{name}={getattr(self, name)} must not be negative."
        for name in ("dead_after_s", "stall_after_s"):
            if (value := getattr(self, name)) is not None and not value >= 3:
                yield f"train.{name}={value} must be at least 3: processes send a heartbeat once a second."
            elif value is not None and value > 1e8:  # Python's own waits take no more than 9e9 s, and no infinity
                no_limit = "; null sets no limit" if name == "stall_after_s" else ""
                yield f"train.{name}={value} must be at most 1e8, which is three years{no_limit}."
        if self.profile is not None and not (len(self.profile) == 2 and 1 <= self.profile[0] <= self.profile[1]):
            yield (
                f"train.profile={self.profile} must be the first and the last step to profile, counted from 1, such as "
                "[20, 23]; null profiles none."
            )
        if not all(0 <= beta < 1 for beta in self.betas):
            yield f"train.betas={list(self.betas)} must both be in [0, 1)."
        if not 0 <= self.warmup_ratio < 1:
            yield f"train.warmup_ratio={self.warmup_ratio} must be in [0, 1): it is a share of all steps."
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            yield f"train.ema_decay={self.ema_decay} must be in (0, 1), such as 0.999; null keeps no average."
        if self.clip_norm is not None and not self.clip_norm > 0:
            yield f"train.clip_norm={self.clip_norm} must be above 0; null turns clipping off."

    def _optimizer_problems(self) -> Iterator[str]:
        for name in ("params", "lr", "weight_decay", *OPTIMIZER_KEYS):
            owners = OPTIMIZER_KEYS.get(name, (self.optimizer,))
            if name in self.optimizer_args and self.optimizer in owners:
                instead = "the task gives the parameters" if name == "params" else f"set train.{name} instead"
                yield f"train.optimizer_args.{name} does not belong there: {instead}."
        for name, owners in OPTIMIZER_KEYS.items() if self.optimizer not in ("adamw", "adam", "sgd") else ():
            if self.optimizer not in owners and (value := getattr(self, name)) != getattr(type(self), name):
                yield (
                    f"train.{name}={format_value(value)} is for train.optimizer={' or '.join(owners)}. Give {self.optimizer} "
                    "its arguments in train.optimizer_args."
                )
        if self.optimizer == "schedule_free" and self.schedule != "constant":
            yield (
                f"train.optimizer=schedule_free does without train.schedule={self.schedule}: it averages the weights instead. "
                "Set train.schedule=constant; a warmup is welcome."
            )
        if self.optimizer == "schedule_free" and self.ema_decay is not None:
            yield f"train.ema_decay={self.ema_decay}: train.optimizer=schedule_free averages the weights. Set it to null."

    def _step_problems(self) -> Iterator[str]:
        if self.schedule != "step":
            for name, default in {"gamma": None, "step_size": 1}.items():
                if (value := getattr(self, name)) != default:
                    yield f"train.{name}={value} needs train.schedule=step, not {self.schedule}."
            return
        if self.gamma is None:
            yield "train.schedule=step needs train.gamma, the factor by which the learning rate decays, such as 0.95."
        elif not 0 < self.gamma <= 1:
            yield f"train.gamma={self.gamma} must be in (0, 1]: the learning rate is multiplied by it."
        if self.step_size < 1:
            yield f"train.step_size={self.step_size} must be at least 1 epoch."

    def _schedule_problems(self) -> Iterator[str]:
        for name in ("decay_ratio", "cycles", "power"):
            owner, value = SCHEDULE_KEYS[name][0], getattr(self, name)
            if self.schedule != owner and value != getattr(type(self), name):
                yield f"train.{name}={value} needs train.schedule={owner}, not {self.schedule}."
        if not 0 < self.decay_ratio <= 1:
            yield f"train.decay_ratio={self.decay_ratio} must be in (0, 1]: it is a share of all steps."
        if self.cycles < 1:
            yield f"train.cycles={self.cycles} must be at least 1."
        if not 0 < self.power < math.inf:
            yield f"train.power={self.power} must be above 0 and finite."

    def _group_problems(self) -> Iterator[str]:
        if self.layer_decay is not None and not 0 < self.layer_decay <= 1:
            yield f"train.layer_decay={self.layer_decay} must be in (0, 1], such as 0.8; null gives all layers the same rate."
        for index, pattern in enumerate(self.freeze):
            yield from _regex_problem(f"train.freeze[{index}]", pattern)
        for index, group in enumerate(self.groups):
            key = f"train.groups[{index}]"
            for name in group:
                if name not in GROUP_KEYS:
                    yield f"{key}.{name} is not one of {', '.join(GROUP_KEYS)}.{did_you_mean(name, GROUP_KEYS)}"
            if "match" not in group:
                yield f"{key} has no match: a regular expression for the names of its parameters."
            else:
                yield from _regex_problem(f"{key}.match", group["match"])
            if not group.keys() & {"lr", "weight_decay"}:
                yield f"{key} sets neither lr nor weight_decay."
            for name in ("lr", "weight_decay"):
                value = group.get(name, 1)
                if isinstance(value, bool) or not isinstance(value, (int, float)):
                    yield f"{key}.{name}={format_value(value)} is not a number, such as 1e-4."
                elif not (value > 0 if name == "lr" else value >= 0) or math.isinf(value):
                    yield f"{key}.{name}={value} must be finite and {'above 0' if name == 'lr' else 'not negative'}."

    @property
    def max_rows(self) -> int | None:
        """Maximum number of samples in one forward pass, the default of ``micro_batch_size`` filled in; None for no limit."""
        if isinstance(self.micro_batch_size, str):  # "auto"
            return None
        if self.micro_batch_size is None and self.micro_batch_tokens is None:
            return min(8, self.batch_size)
        return self.micro_batch_size


def _regex_problem(key: str, pattern: Any) -> Iterator[str]:
    if not isinstance(pattern, str) or not pattern:
        yield f"{key}={format_value(pattern)} is not a regular expression for the names of parameters."
        return
    try:
        re.compile(pattern)
    except re.error as error:
        yield f"{key}={pattern!r} is not a regular expression: {error}."


GROUP_KEYS = ("match", "lr", "weight_decay")
"""Keys of each of ``train.groups``."""
SCHEDULE_KEYS = {
    "gamma": ("step",),
    "step_size": ("step",),
    "min_lr": ("linear", "cosine", "wsd", "cosine_restarts", "polynomial"),
    "decay_ratio": ("wsd",),
    "cycles": ("cosine_restarts",),
    "power": ("polynomial",),
}
"""Keys of ``train`` that only these schedules use."""
OPTIMIZER_KEYS = {
    "betas": (ADAMS := ("adamw", "adam", "muon", "schedule_free", "adamw_8bit")),
    "eps": ADAMS,
    "momentum": ("sgd",),
}
"""Keys of ``train`` that only these optimizers use; muon, for what it leaves to adamw."""


@dataclass
class EvalConfig(Section):
    """When and how to evaluate. The results do not depend on batch_size and batch_tokens."""

    every: Union[int, str] = "epoch"  # noqa: UP007 - OmegaConf reads this spelling
    """Steps between two evaluations, or "epoch", or "2 epochs". The last step is always followed by one. never: no evaluation,
    and no evaluation data are needed; the last model is the model. A test split is scored in any case."""
    batch_size: int = 32
    """Maximum number of samples in one forward pass of the evaluation, on each process."""
    batch_tokens: int | None = None
    """Maximum number of padded tokens in one forward pass of the evaluation, unless a single sample has more. When titles are
    generated with beams, each token counts once for each beam. null: no limit."""
    metric: str = "loss"
    """The metric that picks the best model: loss, or one that the task or eval.metrics computes."""
    metrics: list[str] = field(default_factory=list)
    """Metrics to compute in addition to the task's: names of evaluate modules, paths of their scripts, or dotted paths of
    functions that take the rows of a whole split and return a dict of metrics or one number."""
    greater_is_better: bool | None = None
    """Whether a greater eval.metric is better. null: as the task declares; required if it does not."""
    patience: int | None = None
    """Number of evaluations in a row that may pass without improving eval.metric by more than eval.min_improvement; after the
    last of them training stops. null: it never stops early."""
    min_improvement: float = 0.0
    """An evaluation counts as an improvement if it is better than the last such one by more than this. For eval.patience; the
    best model is the best one in any case."""
    show_samples: int = 3
    """Number of samples to show after each evaluation, the first of the dataset, for tasks that show samples (titles and
    images)."""

    def problems(self) -> Iterator[str]:
        for name in ("batch_size", "batch_tokens"):
            if (value := getattr(self, name)) is not None and value < 1:
                yield f"eval.{name}={value} must be at least 1."
        if self.show_samples < 0:
            yield f"eval.show_samples={self.show_samples} must not be negative."
        if self.patience is not None and self.patience < 1:
            yield f"eval.patience={self.patience} must be at least 1; null never stops early."
        if self.patience is not None and self.is_off:
            yield f"eval.patience={self.patience} needs evaluations, but eval.every=never. Leave one of them out."
        if not 0 <= self.min_improvement < math.inf:
            yield f"eval.min_improvement={self.min_improvement} must be a finite number of at least 0."
        elif self.min_improvement > 0 and self.patience is None:
            yield f"eval.min_improvement={self.min_improvement} needs eval.patience, the number of evaluations to wait for it."
        if isinstance(self.every, int) and self.every < 1:
            yield f"eval.every={self.every} must be at least 1."
        if isinstance(self.every, str) and not re.fullmatch(r"never|epoch|[1-9]\d* epochs?", self.every):
            yield f"eval.every={self.every!r} is neither a number of steps nor 'epoch' nor, say, '2 epochs', nor 'never'."
        if repeated := [name for name in self.metrics if self.metrics.count(name) > 1]:
            yield f"eval.metrics={format_value(self.metrics)} names {repeated[0]} twice."

    @property
    def is_off(self) -> bool:
        """Whether there is no evaluation."""
        return self.every == "never"

    @property
    def every_epochs(self) -> int | None:
        """Epochs between two evaluations if ``every`` is given in epochs, else None."""
        return None if isinstance(self.every, int) or self.is_off else int(self.every.split()[0].replace("epoch", "1"))

    def falls_on(self, step: int, num_steps: int, steps_per_epoch: int) -> bool:
        """Say whether an evaluation follows optimizer step ``step`` (from 1) of a run of ``num_steps``."""
        if self.is_off:
            return False
        interval = self.every if isinstance(self.every, int) else self.every_epochs * steps_per_epoch
        return step == num_steps or step % interval == 0


@dataclass
class CheckpointConfig(Section):
    """Checkpoints to resume from. One is always written at the end of an epoch, after the last step, and when an evaluation
    finds the best model so far."""

    every: int | None = 500
    """Steps between two checkpoints. null: only those that are always written."""
    every_s: float | None = None
    """Seconds between two checkpoints, besides ``every``: the most that the loss of a machine costs. After the first step that
    ends later than that. Not while the one before is still being written. null: only steps count."""
    keep: int = 2
    """Number of newest checkpoints to keep. The one of the best evaluation is kept as well."""
    keep_every: Union[int, str, None] = None  # noqa: UP007
    """What to keep of older checkpoints. A number of steps: the first checkpoint in every so many steps, for good. doubling: at
    distances that double with their age, about log2(steps / checkpoint.every) in all. null: none of them."""
    copies: int = 1
    """Other machines that keep a copy of the output folder, in jobs whose machines come and go and have no common file system.
    0: none; if the main machine is lost, so is the run."""

    def problems(self) -> Iterator[str]:
        for name in ("every", "keep", "keep_every"):
            if isinstance(value := getattr(self, name), int) and value < 1:
                yield f"checkpoint.{name}={value} must be at least 1."
        if self.every_s is not None and not 0 < self.every_s < math.inf:
            yield f"checkpoint.every_s={self.every_s:g} must be above 0."
        if self.copies < 0:
            yield f"checkpoint.copies={self.copies} must be at least 0."
        if isinstance(self.keep_every, str) and self.keep_every != DOUBLING:
            hint = did_you_mean(self.keep_every, (DOUBLING,))
            yield f"checkpoint.keep_every={self.keep_every!r} is neither a whole number nor {DOUBLING} nor null.{hint}"

    def falls_on(self, step: int, num_steps: int, steps_per_epoch: int) -> bool:
        """Say whether a checkpoint follows optimizer step ``step`` (from 1), whatever the evaluations find."""
        return step == num_steps or step % steps_per_epoch == 0 or (self.every is not None and step % self.every == 0)

    def kept(self, steps: Sequence[int]) -> set[int]:
        """Return which checkpoints to keep of those of these steps, ascending; that of the best evaluation aside.

        It may be asked again and again, each time with what it kept and a new one. For doubling, an interval of every power of
        two keeps the first checkpoint in each of its multiples until that is two intervals old. The first one in an interval is
        the first one in half of it, too, so it is still there.
        """
        newest, kept = steps[-1], set(steps[-self.keep :])
        if isinstance(self.keep_every, int):
            kept |= firsts(steps, self.keep_every)
        elif self.keep_every == DOUBLING:
            for interval in (2**power for power in range(newest.bit_length())):
                kept |= {step for step in firsts(steps, interval) if newest - step <= 2 * interval}
        return kept


def firsts(steps: Sequence[int], interval: int) -> set[int]:
    """Return the first of ascending steps from each multiple of an interval to the next; 0, the beginning, does not count."""
    by_multiple = {step // interval: step for step in reversed(steps)}
    return {step for multiple, step in by_multiple.items() if multiple}


@dataclass
class ParallelConfig(Section):
    """Pipeline parallelism: how one model is cut into stages on several processes. Results do not depend on it."""

    pipeline_stages: int = 1
    """Number of processes in a pipeline; each has some of the model's layers. It must divide the total number of processes;
    the pipelines run data parallel. 1: no pipeline; each process has the whole model."""
    schedule: str = "1f1b"
    """Order of the micro-batches' forward and backward passes: gpipe, 1f1b, interleaved or zero_bubble. interleaved idles less
    and communicates more; zero_bubble computes weight gradients while it would otherwise idle."""
    virtual_stages: int | None = None
    """Stages on each process for interleaved and zero_bubble. null: 2 for interleaved, 1 for zero_bubble."""
    split: list[int] | None = None
    """Number of layers of each stage, first to last. null: the largest stage gets as few parameters as possible."""
    regroup_every_s: float = 60.0
    """In an elastic job, whose machines come and go: a machine that comes is taken in after the next checkpoint, or after so
    many seconds, so that newcomers do not stop the others again and again. The loss of a machine is always seen to at once."""

    def problems(self) -> Iterator[str]:
        if self.pipeline_stages < 1:
            yield f"parallel.pipeline_stages={self.pipeline_stages} must be at least 1."
        if not 0 <= self.regroup_every_s < math.inf:
            yield f"parallel.regroup_every_s={self.regroup_every_s:g} must be at least 0."
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
        """Return the number of stages of one pipeline, on all its processes."""
        several = self.virtual_stages or (2 if self.schedule == "interleaved" else 1)
        return self.pipeline_stages * (several if self.pipeline_stages > 1 else 1)

    def fill_up(self, num_micro_batches: int) -> int:
        """Return the smallest number of micro-batches, from this one up, that the schedule can run in a pipeline's step."""
        if self.schedule == "gpipe":
            return max(1, num_micro_batches)
        count = max(self.pipeline_stages, num_micro_batches)
        while self.schedule != "1f1b" and count % (count // self.pipeline_stages):
            count += 1  # torch's interleaved schedules go in rounds of equal size
        return count


PIPELINE_SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")


@dataclass
class TrackConfig(Section):
    """Experiment trackers. metrics.jsonl is always written."""

    with_: list[str] = field(default_factory=list)
    """Trackers to log to: wandb, mlflow, tensorboard, trackio, swanlab, comet_ml, aim, clearml, dvclive, or dotted paths of
    your own subclasses of hftune.TrackerBackend."""
    project: str = "hftune"
    """Name of the project in the trackers; in MLflow, of the experiment."""
    run_name: str | None = None
    """Name of this run in the trackers. null: the recipe's name."""
    entity: str | None = None
    """User or team that owns the project in W&B. null: your default one, or WANDB_ENTITY."""
    group: str | None = None
    """Group of runs that belong together, such as those of a comparison, or a training run and its evaluations."""
    tags: list[str] = field(default_factory=list)
    """Tags of the run in the trackers."""
    notes: str | None = None
    """A longer description of the run, in Markdown."""
    job_type: str = "train"
    """Kind of the run in W&B."""
    upload: str | None = None
    """Models to upload when the run ends: none, best or all (best and last). null: best in MLflow, none in W&B."""
    register: str | None = None
    """Name in the model registry of MLflow or W&B, where the best model becomes a new version. null: it is not registered."""

    def problems(self) -> Iterator[str]:
        for name in self.with_:
            if problem := name_problem("track.with", name, TRACKERS, "my_module.MyTracker"):
                yield problem
        if self.upload not in (None, *UPLOADS):
            hint = did_you_mean(self.upload, UPLOADS)
            yield f"track.upload={self.upload!r} is not one of {', '.join(UPLOADS)}.{hint}"
        if self.register is not None and self.upload == "none":
            yield f"track.register={self.register} needs the best model, which track.upload=none keeps here. Set it to best."


UPLOADS = ("none", "best", "all")


@dataclass
class AdapterConfig(Section):
    """Adapters: small matrices that are trained beside the weights of a transformers model, which stay as they are. Needs peft,
    pip install "hftune[lora]"."""

    type: str | None = None
    """lora (the product of two narrow matrices is added to each target's weight) or dora (LoRA of its direction, and a vector
    of its columns' lengths). null: no adapters, all weights are trained."""
    rank: int = 16
    """Width of the narrow matrices."""
    alpha: float = 32.0
    """What an adapter adds is multiplied by alpha / rank."""
    dropout: float = 0.0
    """Dropout of an adapter's input, in [0, 1)."""
    targets: Any = "all-linear"
    """The modules that get an adapter: all-linear (all linear layers but the head), or a list of names, or of their ends, such
    as [q_proj, v_proj]."""
    train_also: list[str] = field(default_factory=list)
    """Modules that are trained as a whole, by their names or the ends of these, such as [embed_tokens]. Heads that the task
    adds to the model, and what the model's files lack, are trained in any case."""
    rslora: bool = False
    """Whether to multiply by alpha / sqrt(rank) instead: rank-stabilised LoRA, for high ranks."""
    quantize: str | None = None
    """nf4: keep the frozen weights of linear layers in 4 bits (QLoRA). null: adapter.base_dtype."""
    base_dtype: Literal["float32", "bf16", "auto"] = "float32"
    """Precision in which the frozen weights are kept; what is trained stays float32. bf16: half the memory, needs
    train.mixed_precision=bf16. auto: bf16 on GPUs that compute it under train.mixed_precision=bf16 or auto, else float32."""
    export: Literal["adapter", "merged", "both"] = "adapter"
    """What the models in output_dir hold: adapter (a folder of peft, beside the base model's name), merged (the weights with
    the adapters added to them, a plain model) or both."""

    def problems(self) -> Iterator[str]:
        for name, choices in {"type": ADAPTERS, "quantize": QUANTIZATIONS}.items():
            if (value := getattr(self, name)) not in (None, *choices):
                yield f"adapter.{name}={value!r} is not {' or '.join(choices)}, nor null.{did_you_mean(value, choices)}"
        for name in ("base_dtype", "export"):
            if (value := getattr(self, name)) not in get_args(hint := get_type_hints(type(self))[name]):
                yield f"adapter.{name}={format_value(value)} {type_problem(hint, value)}"
        if self.rank < 1:
            yield f"adapter.rank={self.rank} must be at least 1."
        if not 0 < self.alpha < math.inf:
            yield f"adapter.alpha={self.alpha} must be above 0 and finite."
        if not 0 <= self.dropout < 1:
            yield f"adapter.dropout={self.dropout} must be in [0, 1)."
        is_list = isinstance(self.targets, list) and self.targets and all(isinstance(name, str) for name in self.targets)
        if self.targets != "all-linear" and not is_list:
            value = format_value(self.targets)
            yield f"adapter.targets={value} is neither all-linear nor a list of names, such as [q_proj, v_proj]."


ADAPTERS = ("lora", "dora")
QUANTIZATIONS = ("nf4",)


@dataclass(kw_only=True)
class RunConfig(Section):
    """The top-level keys of a recipe. A recipe file can have two more:

    `base: yelp` builds on a shipped recipe or on a file; its sections and mappings are merged with those of this file.
    `replace: [task.model_config]` lists keys or whole sections that are not inherited from the base. On the command line,
    `replace=[task.model_config] task.model_config={...}` does the same.

    A text is taken as it is written, also where YAML alone would read a number or true and false: 1e3, 1.10, no. In paths, `~`
    is the folder of the user.

    A value can refer to another one, `${train.batch_size}`, or to an environment variable, `${oc.env:WANDB_NAME}`. The value of
    an environment variable is written to no file: recipe.yaml and the trackers get the reference itself.
    """

    recipe: str = "unnamed"
    """Name of the recipe, also of its output folder."""
    seed: int = 42
    """Random seed of initial weights, shuffling and dropout, from 0 to 2**32 - 1."""
    output_dir: str | None = None
    """Output folder. null: outputs/<recipe>."""
    resume: str = "auto"
    """auto: resume from the newest intact checkpoint in output_dir, if there is one. never: start from scratch. Or the path of
    a checkpoint."""

    def __post_init__(self):
        super().__post_init__()
        self.output_dir = os.path.expanduser(self.output_dir or f"outputs/{self.recipe}")  # noqa: PTH111 - Path's raises for ~a

    def problems(self) -> Iterator[str]:
        if not 0 <= self.seed < 2**32:
            yield f"seed={self.seed} must be in the range 0 to {2**32 - 1}."


def key_of(field_name: str) -> str:
    """Return a field's key in recipes: ``with_`` avoids Python's keyword, the recipe says ``with``."""
    return field_name.removesuffix("_")

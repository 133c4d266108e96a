"""The sections of a recipe: every key, its default, its rules. Independent of tasks, files and machines."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from hftune.config.addresses import is_address, local_folder
from hftune.config.every import Every
from hftune.config.keys import is_dotted, key, keys_of, problems_of
from hftune.errors import ConfigError, did_you_mean, format_value

OPTIMIZERS = ("adamw", "adam", "sgd", "muon", "adafactor", "lion", "schedule_free", "adamw_8bit")
"""The bare names of ``train.optimizer``; hftune.optim.OPTIMIZERS has the classes."""
ADAMS = ("adamw", "adam", "muon", "schedule_free", "adamw_8bit")
"""Those that take betas and eps; muon, for what it leaves to adamw."""
UNSHARDED = {
    "adafactor": "keeps statistics of whole rows and columns",
    "adamw_8bit": "keeps its state in blocks of 256 numbers, with a scale for each",
}
"""The optimizers that cannot work on the parts of weights that FSDP leaves on each process, and why."""
SCHEDULES = ("linear", "cosine", "constant", "step", "wsd", "cosine_restarts", "inverse_sqrt", "polynomial", "plateau")
"""The bare names of ``train.schedule``; hftune.optim.schedules.factor_at computes them."""
FALLING = ("linear", "cosine", "wsd", "cosine_restarts", "polynomial", "plateau")
"""The schedules that fall to ``train.min_lr``."""
PIPELINE_SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")
TRACKERS = ("wandb", "mlflow", "tensorboard", "trackio", "swanlab", "comet_ml", "aim", "clearml", "dvclive")
"""The bare names of ``track.with``; hftune.tracking.tracker.TRACKERS has the classes."""
DOUBLING = "doubling"
"""The value of ``checkpoint.keep_every`` that thins out checkpoints with their age."""


@dataclass
class Section:
    """A section of a recipe. Its rules are checked on construction, so code and command line get the same message."""

    section: ClassVar[str] = ""
    """Its name in a recipe; empty for the keys at the top."""

    def __post_init__(self):
        if problems := [*problems_of(self, self.section), *self.problems()]:
            raise ConfigError(problems)

    def problems(self) -> Iterator[str]:
        """Yield what is wrong beyond the rules of single keys, one sentence each, with the full key as a user types it."""
        yield from ()


@dataclass
class TrainConfig(Section):
    """The optimization. Sizes are global: none of them depends on how many processes share the work."""

    section = "train"

    epochs: int = key(3, ge=1, changes="lr", resume="length")
    """Passes over the training data, at least 1."""
    max_steps: int | None = key(None, ge=1, changes="lr", resume="length")
    """Number of optimizer steps after which training and the schedule end, even in the middle of an epoch. null: train.epochs
    decides."""
    batch_size: int = key(32, ge=1, changes="samples lr")
    """Samples in one optimizer step, over ALL processes and nodes."""
    micro_batch_size: int | str | None = key(None, ge=1, choices=("auto",), changes="compute", resume="harmless")
    """Maximum number of samples in one forward pass, which decides the memory needed. auto: as many of the longest samples as
    fit. null: 8, or no limit if train.micro_batch_tokens is set."""
    micro_batch_tokens: int | str | None = key(None, ge=1, choices=("auto",), changes="compute", resume="harmless")
    """Maximum number of tokens in one forward pass, for samples of unequal lengths: real ones where training computes no
    padding (train.packing), otherwise padded ones (samples x padded length). auto: as many as fit, and at most a process's
    share of a step. null: no limit."""
    packing: Literal["auto", "off"] = key("auto", changes="compute")
    """Whether to leave out padding: the layers compute the real tokens of a micro-batch and nothing else, and micro-batches get
    equal work. auto: for tasks with lengths and transformers models whose layers compute the same without padding, which is
    tried before training. off: samples are padded to the longest of their micro-batch."""
    head_loss: Literal["auto", "whole"] = key("auto", changes="compute")
    """How tasks that predict tokens compute their loss. auto: logits in chunks together with the loss, and only those of tokens
    with a target, if a micro-batch has more tokens than a chunk, which has 2^24 logits (tokens x words) and at most (CPU) or at
    least (GPU) 512 tokens: the same loss in less memory. Pipelines keep all logits. whole: all logits at once."""
    parts: int | None = key(None, ge=1, changes="compute")
    """Micro-batches per step are a multiple of this, so that every process gets the same number of them if the number of
    processes divides it. null: where training computes no padding 4, 2 or 1, so that a part has 1,024 tokens or more; otherwise
    any number."""
    lr: float = key(5e-5, gt=0, changes="lr")
    """Peak learning rate."""
    optimizer: str = key("adamw", choices=OPTIMIZERS, own="torch.optim.RMSprop", changes="update", resume="fixed")
    """adamw (decoupled weight decay), adam (weight decay in the gradient), sgd, muon (for the matrices between embeddings and
    head; adamw for all else), adafactor, lion, schedule_free (AdamW that averages the weights itself; needs schedule: constant)
    or adamw_8bit; or the dotted path of a torch.optim.Optimizer class of your choice, such as torch.optim.RMSprop."""
    optimizer_args: dict[str, Any] = key(dict, changes="update")
    """Further keyword arguments of the optimizer class. Learning rate and weight decay are train.lr and train.weight_decay."""
    betas: tuple[float, float] = key((0.9, 0.999), ge=0, lt=1, needs=("optimizer", ADAMS), changes="update")
    """Decay rates of Adam's two moment estimates, each in [0, 1); for all optimizers that are a kind of Adam."""
    eps: float = key(1e-8, ge=0, needs=("optimizer", ADAMS), changes="update")
    """Constant added to the denominator of Adam's update."""
    momentum: float = key(0.0, ge=0, needs=("optimizer", ("sgd",)), changes="update")
    """SGD momentum, 0 or more."""
    weight_decay: float = key(0.0, ge=0, changes="update")
    """Weight decay of matrices and embeddings; biases and norm parameters (fewer than 2 dimensions) have none."""
    freeze: list[str] = key(list, changes="update backward", resume="fixed")
    """Regular expressions, searched for in the names of parameters: those that match are not trained. ^ and $ stand for the
    beginning and the end of a name, such as bert.embeddings.word_embeddings.weight."""
    groups: list[dict[str, Any]] = key(list, changes="update", resume="fixed")
    """Parameters with learning rates or weight decay of their own: a list of {match: REGEX, lr: 1e-4, weight_decay: 0.1};
    either lr or weight_decay may be left out. The first that matches a name counts. lr is absolute, and the schedule scales it
    like train.lr; weight_decay applies to all that matches, biases included."""
    layer_decay: float | None = key(None, gt=0, le=1, changes="update", resume="fixed")
    """Factor of the learning rate from each layer to the one below it, in (0, 1], such as 0.8: the head has train.lr, and
    embeddings the lowest. For models with a stack of layers, as those of transformers; not for what has an lr in train.groups.
    null: all layers have train.lr."""
    warmup_ratio: float = key(0.0, ge=0, lt=1, changes="lr")
    """Share of all steps in which the learning rate rises linearly from 0, in [0, 1). The last step is never part of it."""
    warmup_steps: int | None = key(None, ge=0, changes="lr")
    """Number of these steps, fewer than all, instead of train.warmup_ratio. null: that share of all steps."""
    schedule: str = key("linear", choices=SCHEDULES, own="my_module.my_schedule", changes="lr")
    """Learning rate after the warmup: linear or cosine decay to min_lr; constant; step (multiplied by gamma every step_size
    epochs); wsd (constant, then linear decay in the last decay_ratio of the steps); cosine_restarts (cosine decay, cycles
    times); inverse_sqrt; polynomial (decay to the power of power); plateau (multiplied by gamma after plateau_patience
    evaluations that do not improve eval.metric); or the dotted path of a function f(step, num_steps, steps_per_epoch) that
    returns the factor of train.lr."""
    min_lr: float = key(0.0, ge=0, needs=("schedule", FALLING), changes="lr")
    """Final learning rate of the schedules linear, cosine, wsd, cosine_restarts and polynomial, and the lowest of plateau."""
    decay_ratio: float = key(0.1, gt=0, le=1, needs=("schedule", ("wsd",)), changes="lr")
    """Share of all steps in which the learning rate falls at the end of schedule=wsd, in (0, 1]."""
    cycles: int = key(2, ge=1, needs=("schedule", ("cosine_restarts",)), changes="lr")
    """Number of times that the learning rate falls from its peak with schedule=cosine_restarts, at least 1."""
    power: float = key(2.0, gt=0, needs=("schedule", ("polynomial",)), changes="lr")
    """Exponent of schedule=polynomial, above 0; 1 is linear."""
    gamma: float | None = key(None, gt=0, le=1, needs=("schedule", ("step", "plateau")), changes="lr")
    """Decay factor for schedule=step and schedule=plateau, in (0, 1]."""
    plateau_patience: int = key(2, ge=1, needs=("schedule", ("plateau",)), changes="lr")
    """Evaluations in a row without an improvement after which the learning rate falls with schedule=plateau, and again after as
    many more; never before a step with the full rate. One that improves eval.metric by no more than eval.min_improvement is
    none."""
    step_size: int = key(1, ge=1, needs=("schedule", ("step",)), changes="lr")
    """Epochs between two decays for schedule=step, as StepLR.step_size."""
    teacher: str | None = key(None, changes="forward backward", resume="fixed")
    """A trained model whose probabilities are learned besides the labels (knowledge distillation): a name on the Hub
    (owner/name), a local folder, or the output folder of a run. It has the student's tokenizer and classes, any architecture,
    and is whole on each process. The logits of a micro-batch are then computed as a whole. null: none."""
    teacher_revision: str | None = key(None, changes="forward backward")
    """Commit, tag or branch of the teacher on the Hub. null: the newest commit."""
    teacher_temperature: float = key(2.0, gt=0, changes="forward backward")
    """What the logits of teacher and student are divided by before they are compared, above 0: with more, the classes that the
    teacher finds unlikely count more."""
    teacher_weight: float = key(0.5, gt=0, le=1, changes="forward backward")
    """Weight w of the teacher, in (0, 1]: the loss is (1 - w) times that of the labels, plus w times temperature^2 times the
    divergence KL(teacher || student)."""
    reference: str | None = key(None, changes="forward backward")
    """The model that dpo and kto compare with: a name on the Hub (owner/name), a local folder, or the output folder of a run.
    It has the tokenizer of task.model; its weights leave memory before training begins. null: the model as training begins."""
    reference_revision: str | None = key(None, changes="forward backward")
    """Commit, tag or branch of the reference on the Hub. null: the newest commit."""
    ema_decay: float | None = key(None, gt=0, lt=1, changes="output")
    """Decay of an exponential moving average of the weights, in (0, 1), such as 0.999. The average is evaluated and exported;
    training goes on with the weights themselves. After each step it takes in 1 - ema_decay of the weights; more in early steps,
    whose decay is at most (1 + step) / (10 + step). BatchNorm's statistics are averaged alike. null: no average."""
    neftune_alpha: float | None = key(None, gt=0, changes="forward backward")
    """NEFTune, such as 5: in training, uniform noise of up to alpha / sqrt(tokens x width) is added to the embeddings of each
    text; the same on any number of processes and with any micro-batches. For models of transformers that read tokens. null:
    none."""
    clip_norm: float | None = key(1.0, gt=0, changes="update")
    """Maximum norm of the global gradient; a larger gradient is scaled down to it. null: no clipping."""
    mixed_precision: Literal["no", "bf16", "fp16", "auto"] = key("no", changes="compute")
    """Precision of the forward and backward passes; weights and optimizer state stay float32. no: float32. fp16 needs a GPU.
    auto: bf16 if the GPUs of all processes compute it, else no; on CPUs always no."""
    fsdp_gather: Literal["float32", "bf16"] = key("float32", changes="compute", resume="harmless")
    """Precision in which FSDP sends the weights of a block's linear layers; needs FSDP. bf16: half the bytes, for
    train.mixed_precision=bf16, which computes these layers in bf16 anyway. Other weights, and all gradients, stay float32."""
    batch_norm: Literal["train", "frozen"] = key("train", changes="compute")
    """Mode of modules with running statistics, such as BatchNorm. train: each micro-batch is normalised separately, and the
    statistics are averaged over the whole step, on any number of processes. frozen: training uses the running statistics and
    leaves them unchanged; weight and bias are still trained."""
    gradient_checkpointing: bool = key(False, changes="compute", resume="harmless")
    """Whether to recompute activations in the backward pass: less memory, more compute. Needs a transformers model."""
    compile: bool = key(False, changes="compute", resume="harmless")
    """Whether to compile the model with torch.compile, for dynamic shapes: each layer of a stack of layers by itself, which all
    share their code; other models as a whole."""
    tf32: bool = key(False, changes="compute")
    """Whether GPUs compute float32 matrix products and convolutions in TF32: faster, with 3 digits. false: neither, although
    torch's own default allows it for convolutions."""
    cudnn_benchmark: bool = key(False, changes="rounding")
    """Whether cuDNN tries its algorithms for each new shape and keeps the fastest. For images of one size on GPUs."""
    deterministic: bool = key(False, changes="compute")
    """Whether GPUs use only algorithms that give the same bits every time. They are slower; an operation without one is an
    error. CPUs do not need this key: resuming on the same number of processes is bit-equal there. With it, resuming was
    bit-equal on one GPU (an H100), too; on the same number of GPUs of the same kind it should be."""
    num_workers: int = key(0, ge=0, changes="nothing")
    """Number of processes that load and collate batches in advance, for each training process; as many again for evaluations.
    On GPUs a thread loads one step in advance in any case."""
    log_every: int | str = key(10, read=Every.read, changes="nothing")
    """How often metrics.jsonl gets a line: a number of steps, epoch, "2 epochs", "30 s" (or min, or h), or never. The first and
    the last step always get one. train/loss is the mean over the items of all steps since the previous line, train/loss_step
    that of the last step alone."""
    skip: list[int] = key(list, ge=1, changes="skipped")
    """Steps to leave out, such as [137], counted from 1. Their samples are not loaded, and weights, optimizer state and average
    stay as they are; the schedule moves on. May be changed on resume for steps to come."""
    profile: list[int] | None = key(None, ge=1, changes="nothing")
    """First and last step to profile, such as [20, 23]: each process writes a trace and a table of its most expensive operators
    into the folder profile of output_dir. Steps count from 1. null: none."""
    dead_after_s: float = key(60.0, ge=3, le=1e8, changes="nothing")
    """Seconds without a heartbeat, sent once a second, after which a process counts as dead and the job ends; at least 3. If
    another process on its node can see that it is alive, perhaps in C code that holds Python's lock, stall_after_s applies."""
    stall_after_s: float | None = key(1800.0, ge=3, le=1e8, changes="nothing")  # Python's own waits take no more than 9e9 s
    """Seconds in which no process finishes a micro-batch or a save, after which the job ends; at least 3. null: no limit."""

    def problems(self) -> Iterator[str]:
        yield from self._size_problems()
        yield from self._optimizer_problems()
        yield from self._group_problems()
        if self.schedule in ("step", "plateau") and self.gamma is None:
            yield (
                f"train.schedule={self.schedule} needs train.gamma, the factor by which the learning rate decays, such as "
                f"{0.95 if self.schedule == 'step' else 0.5}."
            )
        if self.warmup_steps is not None and self.warmup_ratio > 0:
            yield (
                f"train.warmup_steps={self.warmup_steps} and train.warmup_ratio={self.warmup_ratio} both say how long the "
                "warmup is. Set train.warmup_ratio=0, or train.warmup_steps=null."
            )
        if self.min_lr > self.lr > 0:
            yield f"train.min_lr={self.min_lr} must not be above train.lr={self.lr}: the schedule falls to it."
        if self.neftune_alpha is not None and self.compile:
            yield f"train.neftune_alpha={self.neftune_alpha:g} does not work with train.compile=true. Set train.compile=false."
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
        if self.profile is not None and not (len(self.profile) == 2 and self.profile[0] <= self.profile[1]):
            yield f"train.profile={self.profile} must be the first and the last step to profile, such as [20, 23]."

    def _size_problems(self) -> Iterator[str]:
        if self.micro_batch_size == self.micro_batch_tokens == "auto":
            yield (
                "train.micro_batch_size=auto and train.micro_batch_tokens=auto both ask for what fits into memory. Keep "
                "train.micro_batch_tokens=auto if lengths differ, and set train.micro_batch_size=null."
            )
        for name, why in {
            "micro_batch_size": "a micro-batch is a part of the global batch",
            "parts": "a micro-batch has at least one sample",
        }.items():
            if isinstance(value := getattr(self, name), int) and value > self.batch_size >= 1:
                yield (
                    f"train.{name}={value} is larger than train.batch_size={self.batch_size}: {why}. Lower the first or raise "
                    "the second."
                )

    def _optimizer_problems(self) -> Iterator[str]:
        used = ("lr", "weight_decay", *(("betas", "eps") if self.optimizer in ADAMS else ()))
        for name in self.optimizer_args:
            if name == "params":
                yield "train.optimizer_args.params does not belong there: the task gives the parameters."
            elif name in used or (name == "momentum" and self.optimizer == "sgd"):
                yield f"train.optimizer_args.{name} does not belong there: set train.{name} instead."
        if self.optimizer == "schedule_free" and self.schedule != "constant":
            yield (
                f"train.optimizer=schedule_free does without train.schedule={self.schedule}: it averages the weights instead. "
                "Set train.schedule=constant; a warmup is welcome."
            )
        if self.optimizer == "schedule_free" and self.ema_decay is not None:
            yield f"train.ema_decay={self.ema_decay}: train.optimizer=schedule_free averages the weights. Set it to null."

    def _group_problems(self) -> Iterator[str]:
        for index, pattern in enumerate(self.freeze):
            yield from _regex_problem(f"train.freeze[{index}]", pattern)
        for index, group in enumerate(self.groups):
            name = f"train.groups[{index}]"
            yield from (
                f"{name}.{word} is not one of {', '.join(GROUP_KEYS)}.{did_you_mean(word, GROUP_KEYS)}"
                for word in group
                if word not in GROUP_KEYS
            )
            if "match" not in group:
                yield f"{name} has no match: a regular expression for the names of its parameters."
            else:
                yield from _regex_problem(f"{name}.match", group["match"])
            if not group.keys() & {"lr", "weight_decay"}:
                yield f"{name} sets neither lr nor weight_decay."
            for word in [word for word in group if word in ("lr", "weight_decay")]:
                rule, value = keys_of(type(self), "train")[word].rule, group[word]  # type: ignore[arg-type]
                if isinstance(value, bool) or not isinstance(value, (int, float)):
                    yield f"{name}.{word}={format_value(value)} is not a number, such as 1e-4."
                elif not rule.holds(value):
                    yield f"{name}.{word}={format_value(value)} must be finite and {rule.bounds}."

    @property
    def log_interval(self) -> Every:
        """``log_every``, read."""
        return Every.read(self.log_every)

    @property
    def max_rows(self) -> int | None:
        """Maximum number of samples in one forward pass, the default of ``micro_batch_size`` filled in; None for no limit."""
        if isinstance(self.micro_batch_size, str):  # "auto"
            return None
        if self.micro_batch_size is None and self.micro_batch_tokens is None:
            return min(8, self.batch_size)
        return self.micro_batch_size


GROUP_KEYS = ("match", "lr", "weight_decay")
"""Keys of each of ``train.groups``."""


def _regex_problem(name: str, pattern: Any) -> Iterator[str]:
    if not isinstance(pattern, str) or not pattern:
        yield f"{name}={format_value(pattern)} is not a regular expression for the names of parameters."
        return
    try:
        re.compile(pattern)
    except re.error as error:
        yield f"{name}={pattern!r} is not a regular expression: {error}."


FORWARD: dict[str, Any] = {"fsdp_gather": "float32", "micro_batch_size": None, "micro_batch_tokens": None}
"""``train`` for who only predicts: without how weights are sent under FSDP and batches are cut, which some launchers refuse."""


@dataclass
class EvalConfig(Section):
    """When and how to evaluate. The results do not depend on batch_size and batch_tokens."""

    section = "eval"

    every: int | str = key("epoch", read=Every.read, changes="output")
    """How often to evaluate: a number of steps, epoch, "2 epochs", "30 min" (or s, or h), or never. The last step is always
    followed by an evaluation. never: there is none, and no evaluation data are needed; the last model is the model. A test
    split is scored in any case."""
    batch_size: int = key(32, ge=1, changes="nothing")
    """Maximum number of samples in one forward pass of the evaluation, on each process."""
    batch_tokens: int | None = key(None, ge=1, changes="nothing")
    """Maximum number of padded tokens in one forward pass of the evaluation, unless a single sample has more. When titles are
    generated with beams, each token counts once for each beam. null: no limit."""
    on_start: bool = key(False, changes="output")
    """Whether to evaluate before the first step, too, for the curves to begin with; the best model is one that was trained."""
    sets: dict[str, Any] = key(dict, changes="output")
    """More sets to evaluate on each time, by name, for tasks that read rows: {shifted: VALUE} computes eval/shifted/accuracy. A
    value is a split of task.dataset, a file, a list of files or, as in task.datasets, {dataset or data_files, split, columns}.
    task.max_eval_samples counts the rows of each. See docs/own-data.md."""
    metric: str = key("loss", changes="output")
    """The metric that picks the best model: loss, or one that the task or eval.metrics computes; of one of eval.sets, with its
    name in front, such as shifted/accuracy."""
    metrics: list[str] = key(list, changes="output")
    """Metrics to compute in addition to the task's: names of evaluate modules, paths of their scripts, or dotted paths of
    functions that take the rows of a whole split and return a dict of metrics or one number."""
    greater_is_better: bool | None = key(None, changes="output")
    """Whether a greater eval.metric is better. null: as the task declares; required if it does not."""
    patience: int | None = key(None, ge=1, changes="nothing", resume="length")
    """Number of evaluations in a row that may pass without improving eval.metric by more than eval.min_improvement; after the
    last of them training stops. null: it never stops early."""
    min_improvement: float = key(0.0, ge=0, changes="nothing", resume="length")
    """An evaluation counts as an improvement if it beats the last one that counted by more than this. For eval.patience and
    train.schedule=plateau; the best model is the best one in any case."""
    show_samples: int = key(3, ge=0, changes="nothing")
    """Number of samples to show after each evaluation, the first of the dataset, for tasks that show samples (titles and
    images)."""

    def problems(self) -> Iterator[str]:
        if self.patience is not None and self.is_off:
            yield f"eval.patience={self.patience} needs evaluations, but eval.every=never. Leave one of them out."
        if repeated := [name for name in self.metrics if self.metrics.count(name) > 1]:
            yield f"eval.metrics={format_value(self.metrics)} names {repeated[0]} twice."
        for name in self.sets if self.sets and self.is_off else ():
            yield f"eval.sets.{name} needs evaluations, but eval.every=never. Leave one of them out."
        if self.on_start and self.is_off:
            yield "eval.on_start=true needs evaluations, but eval.every=never. Leave one of them out."
        for name in self.sets:
            if not re.fullmatch(r"[A-Za-z0-9_-]+", name) or name in ("eval", "test", "train"):
                yield (
                    f"eval.sets.{name}: metrics and files have the name of a set. Use letters, digits, - and _, and not train, "
                    "eval or test."
                )

    @property
    def interval(self) -> Every:
        """``every``, read."""
        return Every.read(self.every)

    @property
    def is_off(self) -> bool:
        """Whether there is no evaluation."""
        return self.interval.is_never

    @property
    def splits(self) -> list[str]:
        """The splits of each evaluation: "eval", and "eval/NAME" for each of ``sets``."""
        return ["eval", *(f"eval/{name}" for name in self.sets)]

    @property
    def metric_name(self) -> str:
        """``metric`` without the set that it is of."""
        first, _, rest = self.metric.partition("/")
        return rest if first in self.sets else self.metric

    def falls_on(self, step: int, num_steps: int, steps_per_epoch: int) -> bool:
        """Say whether an evaluation follows step ``step`` (from 1) of a run of ``num_steps``, whatever the clock says."""
        return not self.is_off and (step == num_steps or self.interval.falls_on(step, steps_per_epoch))


@dataclass
class CheckpointConfig(Section):
    """Checkpoints to resume from. One is always written at the end of an epoch, after the last step, and when an evaluation
    finds the best model so far."""

    section = "checkpoint"

    every: int | str = key(500, read=Every.read, changes="nothing")
    """How often to save, besides the checkpoints that are always written: a number of steps, epoch, "2 epochs", "30 min" (or s,
    or h), or never. A time limits how much work a lost machine costs: the first step that ends later is followed by a
    checkpoint, unless the one before is still being written."""
    keep: int = key(2, ge=1, changes="nothing")
    """Number of newest checkpoints to keep. The one of the best evaluation is kept as well."""
    keep_every: int | str | None = key(None, ge=1, choices=(DOUBLING,), changes="nothing")
    """Which older checkpoints to keep. A number of steps: the first one in each interval of that length, for good. doubling: a
    few whose distances double with their age, about log2(steps / checkpoint.every) in all. null: none of them."""
    copies: int = key(1, ge=0, changes="nothing")
    """How many other machines keep a copy of the output folder, in jobs whose machines come and go and have no common file
    system. 0: none; if the main machine is lost, so is the run."""

    @property
    def interval(self) -> Every:
        """``every``, read."""
        return Every.read(self.every)

    def falls_on(self, step: int, num_steps: int, steps_per_epoch: int) -> bool:
        """Say whether a checkpoint follows optimizer step ``step`` (from 1), whatever evaluations find and the clock says."""
        return step == num_steps or step % steps_per_epoch == 0 or self.interval.falls_on(step, steps_per_epoch)

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
    """How one model is spread over several processes: in stages of a pipeline, or under FSDP. Results do not depend on it."""

    section = "parallel"

    pipeline_stages: int = key(1, ge=1, changes="rounding")
    """Number of processes in a pipeline; each has some of the model's layers. It must divide the total number of processes;
    the pipelines run data parallel. 1: no pipeline; each process has the whole model."""
    schedule: str = key("1f1b", choices=PIPELINE_SCHEDULES, changes="rounding")
    """Order of the micro-batches' forward and backward passes: gpipe, 1f1b, interleaved or zero_bubble. interleaved idles less
    and communicates more; zero_bubble computes weight gradients while it would otherwise idle, and needs torch 2.13."""
    virtual_stages: int | None = key(None, ge=1, needs=("schedule", ("interleaved", "zero_bubble")), changes="rounding")
    """Stages on each process for interleaved and zero_bubble. null: 2 for interleaved, 1 for zero_bubble."""
    split: list[int] | None = key(None, ge=1, changes="rounding")
    """Number of layers of each stage, first to last. null: the largest stage gets as few parameters as possible."""
    replicas: int = key(1, ge=1, changes="rounding")
    """Under FSDP, groups of processes that have all weights between them, such as one a machine: weights are then gathered
    within a group, and a step's gradient is added up over the groups once. It must divide the number of processes. 1: all
    processes are one group."""
    context: int = key(1, ge=1, changes="rounding")
    """Number of neighbouring processes that compute each micro-batch together, a part of its tokens each, for long texts. It
    must divide the number of processes and the number of attention heads, and needs training without padding
    (train.packing=auto). One process computes alone. 1: each process computes micro-batches of its own."""
    regroup_every_s: float = key(60.0, ge=0, changes="rounding")
    """In an elastic job, whose machines come and go: seconds until a new machine is taken in, unless a checkpoint comes first,
    so that newcomers do not stop the others again and again. The loss of a machine is handled at once."""

    def problems(self) -> Iterator[str]:
        if self.virtual_stages == 1 and self.schedule == "interleaved":
            yield "parallel.virtual_stages=1 must be at least 2 with parallel.schedule=interleaved."
        elif self.split is not None and self.schedule in PIPELINE_SCHEDULES and len(self.split) != self.num_stages:
            yield f"parallel.split={self.split} must have a number of layers for each of the {self.num_stages} stages."

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


@dataclass
class TrackConfig(Section):
    """Experiment trackers. metrics.jsonl is always written."""

    section = "track"

    with_: list[str] = key(list, choices=TRACKERS, own="my_module.MyTracker", changes="nothing")
    """Trackers to log to: wandb, mlflow, tensorboard, trackio, swanlab, comet_ml, aim, clearml, dvclive, or dotted paths of
    your own subclasses of hftune.TrackerBackend."""
    project: str = key("hftune", changes="nothing")
    """Name of the project in the trackers; in MLflow, of the experiment."""
    run_name: str | None = key(None, changes="nothing")
    """Name of this run in the trackers. null: the recipe's name."""
    entity: str | None = key(None, changes="nothing")
    """User or team that owns the project in W&B. null: your default one, or WANDB_ENTITY."""
    group: str | None = key(None, changes="nothing")
    """Group of runs that belong together, such as those of a comparison, or a training run and its evaluations."""
    tags: list[str] = key(list, changes="nothing")
    """Tags of the run in the trackers."""
    notes: str | None = key(None, changes="nothing")
    """A longer description of the run, in Markdown."""
    job_type: str = key("train", changes="nothing")
    """Kind of the run in W&B."""
    upload: str | None = key(None, choices=("none", "best", "all"), changes="nothing")
    """Models to upload when the run ends: none, best or all (best and last). null: best in MLflow, none in W&B."""
    register: str | None = key(None, changes="nothing")
    """Name in the model registry of MLflow or W&B, where the best model becomes a new version. null: it is not registered."""

    def problems(self) -> Iterator[str]:
        if self.register is not None and self.upload == "none":
            yield f"track.register={self.register} needs the best model, which track.upload=none keeps here. Set it to best."


def _read_targets(value: Any) -> None:
    is_list = isinstance(value, list) and value and all(isinstance(name, str) for name in value)
    if value != "all-linear" and not is_list:
        raise ValueError("is neither all-linear nor a list of names, such as [q_proj, v_proj].")


@dataclass
class AdapterConfig(Section):
    """Adapters: small matrices that are trained beside the weights of a transformers model, which stay as they are. Needs peft,
    pip install "hftune[lora]"."""

    section = "adapter"

    type: str | None = key(None, choices=("lora", "dora"), changes="model update")
    """lora (the product of two narrow matrices is added to each target's weight) or dora (LoRA of its direction, and a vector
    of its columns' lengths). null: no adapters, all weights are trained."""
    rank: int = key(16, ge=1, changes="model update")
    """Width of the narrow matrices."""
    alpha: float = key(32.0, gt=0, changes="model update")
    """What an adapter adds is multiplied by alpha / rank."""
    dropout: float = key(0.0, ge=0, lt=1, changes="forward backward", resume="fixed")
    """Dropout of an adapter's input, in [0, 1)."""
    targets: Any = key("all-linear", read=_read_targets, changes="model update")
    """The modules that get an adapter: all-linear (all linear layers but the head), or a list of names, or of their ends, such
    as [q_proj, v_proj]."""
    train_also: list[str] = key(list, changes="model update")
    """Modules that are trained as a whole, by their names or the ends of these, such as [embed_tokens]. Heads that the task
    adds to the model, and what the model's files lack, are trained in any case."""
    init: str | None = key(None, choices=("gaussian", "pissa", "olora"), changes="model update")
    """How the matrices begin, by peft's name: gaussian; pissa (the largest singular vectors of the weight) or olora (its QR
    factors), which take what they begin with out of the frozen weight, so that adapter.export must be merged. null: what an
    adapter adds begins as 0, as with gaussian."""
    rslora: bool = key(False, changes="model update")
    """Whether to multiply by alpha / sqrt(rank) instead: rank-stabilised LoRA, for high ranks."""
    quantize: str | None = key(None, choices=("nf4",), changes="model update")
    """nf4: keep the frozen weights of linear layers in 4 bits (QLoRA). null: adapter.base_dtype."""
    base_dtype: Literal["float32", "bf16", "auto"] = key("float32", changes="model update")
    """Precision in which the frozen weights are kept; what is trained stays float32. bf16: half the memory, needs
    train.mixed_precision=bf16. auto: bf16 on GPUs that compute it under train.mixed_precision=bf16 or auto, else float32."""
    export: Literal["adapter", "merged", "both"] = key("adapter", changes="output")
    """What the models in output_dir hold: adapter (a folder of peft, beside the base model's name), merged (the weights with
    the adapters added to them, a plain model) or both."""


def _read_callbacks(value: Any) -> None:
    for entry in value:
        if not is_dotted(entry.get("type") if isinstance(entry, dict) else entry):
            raise ValueError(
                f"names {format_value(entry)}, which is neither a dotted path, such as my_module.Watch, nor a mapping with "
                "one, such as {type: my_module.Watch, threshold: 3}."
            )


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

    recipe: str = key("unnamed", changes="nothing", resume="own")
    """Name of the recipe, also of its output folder."""
    seed: int = key(42, ge=0, le=2**32 - 1, changes="weights samples forward")
    """Random seed of initial weights, shuffling and dropout, from 0 to 2**32 - 1."""
    output_dir: str | None = key(None, changes="nothing", resume="own")
    """Output folder, or an address in a bucket, such as s3://bucket/run: the run is kept there, and trains in a copy of it in
    outputs/bucket/run. null: outputs/<recipe>."""
    resume: str = key("auto", changes="nothing", resume="own")
    """auto: resume from the newest intact checkpoint in output_dir, if there is one. never: start from scratch. Or the path or
    address of a checkpoint."""
    callbacks: list[Any] = key(list, read=_read_callbacks, changes="nothing")
    """Callbacks of your own, which hear of what happens in the training: dotted paths of subclasses of hftune.Callback, or
    mappings with such a path as their type, and arguments: [my_module.Watch, {type: my_module.Norms, every: 100}]."""

    def __post_init__(self):
        super().__post_init__()
        self.output_dir = os.path.expanduser(self.output_dir or f"outputs/{self.recipe}")  # noqa: PTH111 - Path's raises for ~a
        if is_address(self.output_dir):
            self.output_dir = self.output_dir.rstrip("/")

    @property
    def folder(self) -> Path:
        """The folder of this machine that is ``output_dir``, or the working copy of what is at that address."""
        return local_folder(self.output_dir)


SECTIONS: dict[str, type[Section]] = {
    type_.section: type_ for type_ in (TrainConfig, AdapterConfig, EvalConfig, CheckpointConfig, ParallelConfig, TrackConfig)
}
"""The sections beside ``task``, by their names, in the order of the reference."""

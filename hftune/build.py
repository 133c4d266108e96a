"""Builds what a recipe trains: data, batch plan, model and strategy, the same on every process.

Processes do not communicate here, except to find the micro-batch size that fits into the memory of all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator, DistributedType
from torch import nn

from hftune.batch_plan import BatchPlan
from hftune.config import ParallelConfig, Recipe, TrainConfig
from hftune.data.augmentation import augmented
from hftune.data.cache import one_at_a_time
from hftune.distributed.accelerator import on_cpu
from hftune.distributed.devices import computes_bf16, precision_notices
from hftune.distributed.process_info import ProcessInfo
from hftune.distributed.progress import Progress
from hftune.errors import ConfigError, DataError, format_value
from hftune.metrics.named import load_metrics
from hftune.models.adapter_files import is_quantized
from hftune.models.adapters import add_adapter, base_digest, check_installed, has_adapter, new_modules
from hftune.models.dropout import replace_dropout
from hftune.models.kinds import compute_padding, is_of_transformers
from hftune.models.weights import load_weights, weight_files
from hftune.optim import build_optimizer, check_schedule, freeze, optimizer_class
from hftune.strategies.arithmetic import Arithmetic
from hftune.strategies.base import Strategy
from hftune.strategies.compilation import compile_model, repeated_layers
from hftune.strategies.contract import check_sums, needs_two_samples
from hftune.strategies.data_parallel import DataParallel
from hftune.strategies.packing import collate_for
from hftune.strategies.pipeline_stages import check_stages
from hftune.strategies.statistics import has_running_statistics
from hftune.strategies.trial import head_problem, packing_problem, trial_samples


@dataclass
class Parts:
    """What is built from a recipe, before the processes have joined."""

    datasets: Mapping[str, Any]
    """"train"; "eval" unless the recipe never evaluates; and, if the recipe has one, "test"."""
    plan: BatchPlan
    model: nn.Module
    """On the CPU, with the same weights on every process."""
    num_steps: int
    """Optimizer steps of the whole run."""
    base: str | None = None
    """On the main process: the digest of the frozen weights that adapters are trained on."""
    first_weights: str | None = None
    """On the main process of a run that begins: the digest of its weights, see ``weights_digest``."""
    notices: list[str] = field(default_factory=list)
    """What the user should know, one sentence each; on the main process."""
    model_name: str = field(init=False)
    """Of the model's class. Counted here and now, as a strategy may wrap or cut the model."""
    num_parameters: int = field(init=False)
    num_trainable: int = field(init=False)
    arithmetic: Arithmetic | None = field(init=False)

    def __post_init__(self):
        self.model_name = type(self.model).__name__
        self.num_parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self.num_trainable = sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)
        self.arithmetic = Arithmetic.of(self.model)


def build(recipe: Recipe, progress: Progress, datasets: Mapping[str, Any] | None = None) -> Parts:
    """Load the data, plan the batches and build the model. Not collective, so a slow download cannot time one out.

    Args:
        datasets: those of this recipe, if they have been loaded already.

    Raises:
        ConfigError: an optimizer, schedule or metric of the recipe cannot be used; the model cannot be cut into pipeline
            stages, or its loss is not a sum; what the functions below refuse.
        DataError: the data cannot be trained on.
    """
    is_main = ProcessInfo.from_environment().is_main
    check_names(recipe)
    if is_main:  # it alone computes them
        load_metrics(recipe.eval.metrics)
    progress.stage("preparing the data")
    datasets = load_datasets(recipe) if datasets is None else datasets
    recipe.validate_metric()
    plan = plan_batches(recipe, datasets["train"])
    num_steps = total_steps(recipe.train, plan)
    check_schedule(recipe.train, num_steps, plan.num_steps)
    check_skip(recipe.train, num_steps)
    progress.stage("building the model")
    said: list[str] = []
    model = build_model(recipe, said)
    check_pipeline(recipe, plan, datasets["train"], model)
    check_single_samples(recipe, plan, first_epoch(recipe, datasets), model, num_steps)
    parts = Parts(datasets, plan, model, num_steps)
    if is_main:
        parts.base = base_digest(model) if has_adapter(model) else None
        parts.notices = said + check_sums(recipe.task, model, first_epoch(recipe, datasets), plan.lengths)
    return parts


def check_names(recipe: Recipe) -> None:
    """Refuse what is not there, such as an optimizer, adapters or weights, before data and model are loaded, or
    raise ConfigError."""
    optimizer_class(recipe.train)
    check_installed(recipe.adapter)
    if recipe.train.head_loss == "liger" and (problem := liger_problem(recipe)) is not None:
        raise ConfigError(f"train.head_loss=liger: {problem}. Set train.head_loss=auto.")
    if (path := own_weights(recipe)) is not None:
        weight_files(path)


def check_skip(config: TrainConfig, num_steps: int) -> None:
    """Refuse ``train.skip`` if it leaves no step, or raise ConfigError."""
    if {*range(1, num_steps + 1)} <= {*config.skip}:
        raise ConfigError(f"train.skip leaves out all {num_steps} steps of the run: nothing would be trained. Name fewer.")


def skip_notices(config: TrainConfig, done: int, num_steps: int) -> list[str]:
    """Say which steps to come ``train.skip`` leaves out, and which there are none of."""
    notices = []
    if coming := sorted({step for step in config.skip if done < step <= num_steps}):
        which = f"step {coming[0]:,} is" if len(coming) == 1 else f"{len(coming):,} steps are"
        notices.append(f"train.skip={format_value([*config.skip])}: {which} left out.")
    if beyond := [step for step in config.skip if step > num_steps]:
        notices.append(f"train.skip: there is no step {max(beyond):,}, because the run has {num_steps:,} steps.")
    return notices


def own_weights(recipe: Recipe) -> str | None:
    """Return the path of the task's field ``weights``, from which training starts; None if it has none."""
    path = getattr(recipe.task, "weights", None)
    return path if isinstance(path, str) else None


def load_datasets(recipe: Recipe) -> Mapping[str, Any]:
    """Prepare the data. The first time, one process of a node after the other: the first fills the cache that serves the rest.

    They wait on a file lock, not in a collective. Once the cache is filled, no process waits for another one.

    Raises:
        ConfigError: ``eval.batch_tokens`` is set, but the samples have no lengths.
        DataError: a split is missing or empty.
    """
    task = recipe.task

    def say_waiting() -> None:
        if ProcessInfo.from_environment().local_rank == 0:
            print("note: Waiting for another process that is preparing the same data.", flush=True)

    with one_at_a_time([type(task).__qualname__, asdict(task)], say_waiting):
        datasets = task.datasets()
    if recipe.eval.is_off:
        datasets = {split: rows for split, rows in datasets.items() if split != "eval"}
    for split in ("train", *(() if recipe.eval.is_off else ("eval",)), *({"test"} & datasets.keys())):
        if split not in datasets or len(datasets[split]) == 0:
            without = " eval.every=never trains without evaluation." if split == "eval" else ""
            raise DataError(f"{type(task).__name__}.datasets() returned no samples for {split!r}.{without}")
    if recipe.eval.batch_tokens is not None and "eval" in datasets and task.lengths(datasets["eval"]) is None:
        raise ConfigError(
            "eval.batch_tokens needs a task whose samples have lengths; this task's have none. Set eval.batch_size instead."
        )
    return datasets


def first_epoch(recipe: Recipe, datasets: Mapping[str, Any]) -> Any:
    """Return the training data as the first epoch sees it: augmented."""
    return augmented(datasets["train"], recipe.task, recipe.seed, 0)


def plan_batches(recipe: Recipe, dataset: Any) -> BatchPlan:
    """Plan the training batches; the same on every process. What is auto has no limit yet: see ``settle_micro_batches``.

    Raises:
        ConfigError: ``train.micro_batch_tokens`` cannot hold the longest sample, or the samples have no lengths.
    """
    config, lengths = recipe.train, recipe.task.lengths(dataset)
    if config.micro_batch_tokens == "auto" and lengths is None:
        raise ConfigError(
            "train.micro_batch_tokens=auto needs a task whose samples have lengths; this task's have none. "
            "Set train.micro_batch_size=auto instead."
        )
    return BatchPlan(
        num_samples=len(dataset),
        batch_size=config.batch_size,
        micro_batch_size=config.max_rows,
        micro_batch_tokens=None if isinstance(config.micro_batch_tokens, str) else config.micro_batch_tokens,
        lengths=lengths,
        sizes=recipe.task.sizes(dataset),
        padded_length=recipe.task.padded_length,
        seed=recipe.seed,
        mixture=recipe.task.mixture(dataset),
    )


PARTS, TOKENS_OF_A_PART = (4, 2, 1), 1024
"""``train.parts`` where training computes no padding: as many as a machine usually has processes, if a step has so many tokens
for each of them on average. With fewer, a GPU takes hardly less time, and splitting a step would only cost."""


HALF = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The dtype of autocast, by ``Strategy.precision``."""


def default_parts(plan: BatchPlan, least: int = 1) -> int:
    """Return what ``train.parts`` is by default for a plan without padding; the same for any number of processes."""
    samples = min(plan.batch_size, plan.samples_per_epoch)
    tokens = float(plan.lengths.mean()) * samples
    return next(parts for parts in PARTS if parts <= samples and (parts <= least or tokens >= parts * TOKENS_OF_A_PART))


def idle_notices(plan: BatchPlan, num_processes: int) -> list[str]:
    """Say that steps have fewer micro-batches than there are processes; the first 20 steps are looked at."""
    most = max(len(step) for _, step in zip(range(20), plan.epoch(0), strict=False))
    if most >= num_processes:
        return []
    micro_batches = "1 micro-batch" if most == 1 else f"{most} micro-batches"
    samples = min(plan.batch_size, plan.samples_per_epoch)
    how = f"set train.parts={num_processes}" if samples >= num_processes else "raise train.batch_size"
    return [
        f"A step of {samples} samples has {micro_batches}, so {num_processes - most} of {num_processes} processes have nothing "
        f"to compute. To use them all, {how}."
    ]


def without_padding(config: TrainConfig, plan: BatchPlan, pipeline_stages: int = 1) -> BatchPlan:
    """Return the plan of a training that computes no padding. Bounds that are not set follow from 8 of the longest samples."""
    is_bounded = config.micro_batch_tokens is not None or config.micro_batch_size is not None
    return replace(
        plan,
        packed=True,
        parts=config.parts or default_parts(plan, 1 if pipeline_stages == 1 else PARTS[0]),  # a pipeline lives on many
        micro_batch_size=plan.micro_batch_size if is_bounded else None,
        micro_batch_tokens=plan.micro_batch_tokens if is_bounded else 8 * int(plan.lengths.max()),
    )


def width_of(model: nn.Module) -> int | None:
    """Return the width of a transformers model's hidden states; None for other models."""
    if not is_of_transformers(model):
        return None
    try:
        width = getattr(model.config.get_text_config(), "hidden_size", None)
    except ValueError:  # it has several text models
        return None
    return width if isinstance(width, int) else None


def padding_share(plan: BatchPlan) -> float:
    """Return the share of padding in what the first steps of a plan compute; at most 20 steps are looked at."""
    steps = [step for _, step in zip(range(20), plan.epoch(0), strict=False)]
    computed = sum(micro_batch.tokens for step in steps for micro_batch in step)
    return 1 - sum(int(plan.lengths[micro_batch.samples].sum()) for step in steps for micro_batch in step) / computed


def settle_packing(recipe: Recipe, strategy: Strategy, parts: Parts) -> None:
    """Leave out padding, if train.packing=auto and the model computes the same without, as the main process tries. Collective.

    Before ``strategy.prepare``, while every process has the whole model on its host.

    Raises:
        ConfigError: a step has too few micro-batches for the pipeline's schedule.
    """
    config, model = recipe.train, parts.model
    parts.plan = plan = replace(parts.plan, parts=config.parts, width=width_of(model))
    if not may_be_packed(recipe, plan, model):
        compute_padding(model)
        return
    strategy.progress.stage("trying the model without padding")
    half = HALF[strategy.precision]
    samples, dataset = trial_samples(plan.lengths), first_epoch(recipe, parts.datasets)

    def tried() -> str | None:
        if config.compile and not repeated_layers(model):
            return "it is compiled as a whole (train.compile=true)"
        return packing_problem(model, recipe.task, dataset, samples, strategy.device, half, padding_share(plan) >= 0.01)

    reason = strategy.on_main(tried)
    if reason is None:
        strategy.collate_packed = collate_for(model, recipe.task)
        parts.plan = without_padding(config, plan, recipe.parallel.pipeline_stages)
        if recipe.parallel.pipeline_stages > 1:
            check_micro_batches(recipe.parallel, parts.plan, strategy.num_processes // recipe.parallel.pipeline_stages)
        return
    compute_padding(model)
    if (share := padding_share(plan)) >= 0.01:
        parts.notices.append(
            f"{share:.0%} of what training computes is padding: {parts.model_name} cannot leave it out, because {reason}."
        )


def settle_head(
    recipe: Recipe, strategy: Strategy, model: nn.Module, dataset: Any, rows: int, others: Iterable[Any] = ()
) -> list[str]:
    """Let a model compute its loss together with its head, where there are many logits and it comes out the same. Collective.

    Before ``strategy.prepare``, while every process has the whole model on its host.

    Args:
        rows: of the largest micro-batch.
        others: data sets that are evaluated, too, and may have longer samples.

    Returns:
        Sentences on why the logits are computed as a whole.

    Raises:
        ConfigError: ``train.head_loss=liger`` cannot be used.
    """
    kernel = recipe.train.head_loss
    if kernel != "liger" and not may_score_head(recipe, model):
        return []
    from hftune.models import scored_head

    if kernel == "liger" and (problem := scored_head.liger_problem(model, strategy.device)) is not None:
        raise ConfigError(f"train.head_loss=liger: {problem}. Set train.head_loss=auto.")
    if not may_score_head(recipe, model):
        raise ConfigError(f"train.head_loss=liger: {type(model).__name__} is compiled as a whole. Set train.compile=false.")
    lengths = recipe.task.lengths(dataset)
    longest = max((int(found.max()) for rows in others if (found := recipe.task.lengths(rows)) is not None), default=1)
    longest = longest if lengths is None else max(longest, int(lengths.max()))
    if kernel == "auto" and rows * longest * scored_head.Head.of(model).num_words <= scored_head.AT_ONCE:
        return []
    sample = 0 if lengths is None else int(np.argsort(lengths, kind="stable")[len(lengths) // 2])
    strategy.progress.stage("trying the loss in chunks")
    half = HALF[strategy.precision]
    reason = strategy.on_main(lambda: head_problem(model, recipe.task, dataset, sample, strategy.device, half))
    if reason is None:
        scored_head.install(model, "liger" if kernel == "liger" else "chunks")
        strategy.scores_head = True
        return []
    if kernel == "liger":
        raise ConfigError(f"train.head_loss=liger: {type(model).__name__} cannot use it, because {reason}.")
    return [f"The logits of a micro-batch are computed all at once, because {reason}."]


def prepare(recipe: Recipe, strategy: Strategy, parts: Parts) -> None:
    """Settle what only shows once the processes have joined, and hand model and optimizer to the strategy. Collective.

    Raises:
        ConfigError: what is built does not fit these devices, or this number of processes.
    """
    check_base_dtype(recipe, strategy, parts.model)
    check_dropped_layers(strategy, parts.model)
    settle_packing(recipe, strategy, parts)
    rows = largest_rows(recipe, parts.plan, "test" in parts.datasets)
    train, *others = parts.datasets.values()
    parts.notices += settle_head(recipe, strategy, parts.model, train, rows, others)
    strategy.progress.stage("preparing model and optimizer")
    strategy.prepare(parts.model, build_optimizer(parts.model, recipe))
    strategy.sharding.begin_training(keeps_average=recipe.train.ema_decay is not None)
    parts.notices += [*strategy.notices(), *precision_notices(recipe.train, strategy.precision, strategy.device)]


def warm_up_strategy(recipe: Recipe, strategy: Strategy, plan: BatchPlan, datasets: Mapping[str, Any]) -> list[str]:
    """Let the strategy do the one-time work of a first step, and return what ``Strategy.warm_up`` does. Collective."""
    strategy.progress.stage("the warm-up backward pass")
    first, *_ = plan.epoch(0)[0]
    return strategy.warm_up(first_epoch(recipe, datasets), first, frozen=recipe.train.batch_norm == "frozen")


def may_score_head(recipe: Recipe, model: nn.Module) -> bool:
    """Say whether to try to compute the loss together with the head. A pipeline's stages return logits."""
    if recipe.train.head_loss == "whole" or recipe.parallel.pipeline_stages > 1 or not recipe.task.scored_head:
        return False
    if not is_of_transformers(model):
        return False
    from hftune.models.scored_head import Head

    return Head.of(model) is not None and not (recipe.train.compile and not repeated_layers(model))


def liger_problem(recipe: Recipe) -> str | None:
    """Return why a recipe cannot use Liger's kernel, on any device; None if it may."""
    if not recipe.task.scored_head:
        return f"{type(recipe.task).__name__} does not predict tokens"
    if recipe.parallel.pipeline_stages > 1:
        return "a pipeline returns logits"
    return None if find_spec("liger_kernel") else "liger-kernel is not installed: pip install liger-kernel"


def largest_rows(recipe: Recipe, plan: BatchPlan, has_test: bool) -> int:
    """Return a bound on the rows of a micro-batch, in training or in an evaluation."""
    evaluated = 0 if recipe.eval.is_off and not has_test else recipe.eval.batch_size
    return max(evaluated, min(plan.batch_size, plan.micro_batch_size or plan.batch_size))


def may_be_packed(recipe: Recipe, plan: BatchPlan, model: nn.Module) -> bool:
    """Say whether to try a model without padding."""
    return recipe.train.packing == "auto" and plan.lengths is not None and is_of_transformers(model)


def total_steps(config: TrainConfig, plan: BatchPlan) -> int:
    """Return the number of optimizer steps of the whole run."""
    steps = config.epochs * plan.num_steps
    return steps if config.max_steps is None else min(steps, config.max_steps)


def build_model(recipe: Recipe, notices: list[str] | None = None) -> nn.Module:
    """Build the task's model, with the same initial weights on every process.

    Args:
        notices: gets sentences on what weights of one's own leave out. None: nobody reads them.

    Raises:
        ConfigError: the model does not support the gradient checkpointing that the recipe asks for; ``task.weights``,
            ``train.freeze`` or ``adapter`` do not fit it.
    """
    torch.manual_seed(recipe.seed)
    with load_options(recipe):
        model = recipe.task.build_model()
    if (path := own_weights(recipe)) is not None and torch.get_default_device().type != "meta":
        said = load_weights(model, path)
        if notices is not None:
            notices += said
    freeze(model, recipe.train.freeze)
    if recipe.adapter.type is not None:
        check_statistics(recipe, model)
        check_quantized(recipe, model)
        add_adapter(model, recipe.adapter, new_modules(model))
    if recipe.train.gradient_checkpointing:
        if not getattr(model, "supports_gradient_checkpointing", False):
            raise ConfigError(f"train.gradient_checkpointing=true: {type(model).__name__} does not support it.")
        model.activation_checkpointing_enable({"use_reentrant": False})
    if recipe.train.compile:
        compile_model(model)
    else:
        replace_dropout(model)
    return model


def load_options(recipe: Recipe) -> AbstractContextManager[None]:
    """Let ``from_pretrained`` load a model in float32, unless its weights stay frozen beside adapters."""
    config, precision = recipe.adapter, recipe.train.mixed_precision
    if config.type is None:
        return nullcontext()
    from hftune.models.pretrained import loading, quantization

    on_gpu = (
        not on_cpu() and torch.cuda.is_available() and computes_bf16(torch.device("cuda")) and precision in ("bf16", "auto")
    )
    is_bf16 = config.base_dtype == "bf16" or (config.base_dtype == "auto" and on_gpu)
    dtype = torch.bfloat16 if is_bf16 else torch.float32
    device = "cpu" if on_cpu() else f"{torch.accelerator.current_accelerator()}:{ProcessInfo.from_environment().local_rank}"
    options = quantization(config.quantize, dtype, config.train_also, device)
    return loading(**({"dtype": dtype} if is_bf16 else {}), **options)


def check_quantized(recipe: Recipe, model: nn.Module) -> None:
    """Refuse ``adapter.quantize`` where nothing came of it, or raise ConfigError."""
    if recipe.adapter.quantize is not None and torch.get_default_device().type != "meta" and not is_quantized(model):
        raise ConfigError(
            f"adapter.quantize={recipe.adapter.quantize}: the {type(model).__name__} of {type(recipe.task).__name__} is not "
            "quantised. That works for linear layers of models that task.model names. Leave it out."
        )


def check_base_dtype(recipe: Recipe, strategy: Strategy, model: nn.Module) -> None:
    """Refuse ``adapter.base_dtype=auto`` where not all GPUs compute bf16, which only shows once the processes have joined.

    Raises:
        ConfigError: this one's does, and its frozen weights are bf16.
    """
    is_bf16 = any(parameter.dtype == torch.bfloat16 for parameter in model.parameters())
    if recipe.adapter.base_dtype == "auto" and is_bf16 and strategy.precision != "bf16":
        raise ConfigError("adapter.base_dtype=auto: not all GPUs of this job compute bf16. Set it to float32.")


def check_dropped_layers(strategy: Strategy, model: nn.Module) -> None:
    """Refuse layers that a model drops at random where processes meet in each layer: they would exchange different ones.

    Raises:
        ConfigError: naming the keys of the model's configuration.
    """
    configs = [vars(config) for module in model.modules() if (config := getattr(module, "config", None)) is not None]
    drops = {name: value for config in configs for name, value in config.items() if "layerdrop" in name and value}
    if drops and not strategy.computes_alone:
        raise ConfigError(
            f"{type(model).__name__} drops whole layers at random: {', '.join(f'{name}={drops[name]}' for name in drops)}. "
            f"{type(strategy).__name__} cannot compute that, as its processes meet in each layer. Set "
            f"{' '.join(f'task.model_config.{name}=0' for name in drops)}, or train without FSDP and pipeline stages."
        )


def check_single_samples(recipe: Recipe, plan: BatchPlan, dataset: Any, model: nn.Module, num_steps: int) -> None:
    """Refuse micro-batches of one sample for a model that normalises each micro-batch by itself and needs two.

    Raises:
        ConfigError: naming the first one.
    """
    config = recipe.train
    if config.batch_norm == "frozen" or not needs_two_samples(recipe.task, model, dataset):
        return
    steps = chain.from_iterable(map(plan.epoch, range(config.epochs)))
    for number, step in enumerate(islice(steps, num_steps), start=1):
        if number not in config.skip and (single := next((part for part in step if len(part.samples) == 1), None)):
            key = "batch_size" if len(step) == 1 else "micro_batch_size"
            raise ConfigError(
                f"Step {number:,} has a micro-batch of one sample, {single.samples[0]}, of which BatchNorm cannot take a "
                f"variance. Set a train.{key} that leaves no sample alone, leave the step out with train.skip=[{number}], or "
                "set train.batch_norm=frozen."
            )


def check_statistics(recipe: Recipe, model: nn.Module) -> None:
    """Refuse adapters beside running statistics that training changes, which an adapter's folder has no place for.

    Raises:
        ConfigError: the model has some.
    """
    if recipe.train.batch_norm == "train" and any(map(has_running_statistics, model.modules())):
        raise ConfigError(
            f"adapter.type={recipe.adapter.type}: {type(model).__name__} has running statistics, such as BatchNorm's, which "
            "adapters leave as they are. Set train.batch_norm=frozen."
        )


def choose_strategy(accelerator: Accelerator, recipe: Recipe, progress: Progress) -> Strategy:
    """Return the strategy that the recipe or the launcher's configuration asks for."""
    if recipe.parallel.pipeline_stages > 1:
        from hftune.strategies.pipeline import Pipeline

        return Pipeline(accelerator, recipe.task, recipe.parallel, progress)
    if accelerator.distributed_type == DistributedType.FSDP:
        from hftune.strategies.fully_sharded import FullySharded  # importing it takes a second; others need not wait

        return FullySharded(accelerator, recipe.task, progress, recipe.train.fsdp_gather)
    return DataParallel(accelerator, recipe.task, progress)


def check_pipeline(recipe: Recipe, plan: BatchPlan, dataset: Any, model: nn.Module) -> None:
    """Refuse a pipeline that cannot compute this model or these batches.

    Raises:
        ConfigError: the model cannot be cut; or a step has fewer micro-batches than the schedule needs.
    """
    config, task = recipe.parallel, recipe.task
    if config.pipeline_stages == 1:
        return
    check_micro_batches(config, plan, ProcessInfo.from_environment().world_size // config.pipeline_stages)
    shortest = 0 if plan.lengths is None else int(np.argmin(plan.lengths))
    example = augmented(dataset, task, recipe.seed, 0)[shortest]
    check_stages(model, config.num_stages, config.split, task.inputs(task.collate([example])))


def check_micro_batches(config: ParallelConfig, plan: BatchPlan, num_replicas: int) -> None:
    """Refuse full batches that are cut into too few micro-batches for the schedule, or raise ConfigError."""
    needed, found = config.fill_up(1), len(plan.epoch(0)[0])
    if plan.samples_per_epoch >= plan.batch_size and found < needed * num_replicas:
        pipelines = f" for each of {num_replicas} pipelines" if num_replicas > 1 else ""
        raise ConfigError(
            f"parallel.schedule={config.schedule} with parallel.pipeline_stages={config.pipeline_stages} needs at least "
            f"{needed} micro-batches in a step{pipelines}, {needed * num_replicas} in all; a step of "
            f"train.batch_size={plan.batch_size} has {found}. Lower train.micro_batch_size or train.micro_batch_tokens, or "
            "raise train.batch_size."
        )


def find_micro_batch_size(strategy: Strategy, plan: BatchPlan, dataset: Any, key: str = "micro_batch_size") -> int:
    """Halve the size until the longest samples fit on every process, starting from a process's share. Collective.

    accelerate's find_executable_batch_size does the same for one process: the others would not hear of its failures.

    Args:
        key: of the recipe's train section, which is auto. micro_batch_tokens: as many short samples as have the tokens of so
            many long ones have to fit as well.

    Raises:
        ConfigError: not even one sample fits.
    """
    size = largest_micro_batch_size(plan, strategy.num_processes)

    def fits() -> bool:
        if not strategy.fits(dataset, plan.longest(size)):
            return False
        return key == "micro_batch_size" or strategy.fits(dataset, shortest(plan, size * plan.most_padded))

    while not fits():
        if size == 1:
            raise ConfigError(
                f"train.{key}=auto: not even the longest sample alone fits into memory. Lower the task's maximum "
                "length, or set train.gradient_checkpointing=true or train.mixed_precision=bf16."
            )
        size = -(-size // 2)
    return size


def largest_micro_batch_size(plan: BatchPlan, num_processes: int) -> int:
    """Return a process's share of the global batch, or fewer if ``train.micro_batch_tokens`` bounds the longest samples."""
    share = -(-plan.batch_size // num_processes)
    return share if plan.micro_batch_tokens is None else min(share, max(1, plan.micro_batch_tokens // plan.most_padded))


def largest_micro_batch_tokens(plan: BatchPlan, size: int, num_processes: int) -> int:
    """Return the tokens of ``size`` of the longest samples, so that a step has micro-batches for all processes.

    Unless ``plan.parts`` sees to that: at most a process's share of a mean step, but the longest sample.
    """
    largest = size * plan.most_padded
    if plan.packed and (plan.parts or 1) >= num_processes:
        return largest
    share = math.ceil(plan.batch_size * float(plan.lengths.mean()) / num_processes)
    return max(plan.most_padded, min(largest, share))


def shortest(plan: BatchPlan, tokens: int) -> np.ndarray:
    """Return as many of the shortest samples as a micro-batch of so many tokens can hold, at most those of a step."""
    order_N = np.argsort(plan.lengths, kind="stable")[: plan.batch_size]
    count = int(np.searchsorted(plan.lengths[order_N].cumsum(), tokens, side="right"))
    return order_N[: max(1, count)]


def settle_micro_batches(recipe: Recipe, strategy: Strategy, parts: Parts, earlier: Mapping[str, Any]) -> dict[str, Any]:
    """Put what fits into the plan, if ``train.micro_batch_size`` or ``train.micro_batch_tokens`` is auto. Collective.

    Args:
        earlier: what this function returned when the run that is resumed began; its size is reused under the same conditions,
            because a different size may change the last bits of a result.

    Returns:
        The number of the longest samples that fit, and the conditions it was found under, for the checkpoints.
    """
    conditions, config = memory_conditions(recipe, strategy) | {"packed": parts.plan.packed}, recipe.train
    if earlier.get("packed", parts.plan.packed) != parts.plan.packed:
        now, then = ("no padding", "padding") if parts.plan.packed else ("padding", "no padding")
        parts.notices.append(
            f"Training computes {now} here, but {then} before: its micro-batches and dropout are different ones from here on."
        )
    key = next((name for name in ("micro_batch_size", "micro_batch_tokens") if getattr(config, name) == "auto"), None)
    if key is None:
        return conditions | {"size": None}
    known = earlier["size"] if earlier == conditions | {"size": earlier.get("size")} else None
    size = known or find_micro_batch_size(strategy, parts.plan, first_epoch(recipe, parts.datasets), key)
    bound, what, bounded = size, " of the longest samples fit on every process", key
    if key == "micro_batch_tokens":
        bound = largest_micro_batch_tokens(parts.plan, size, strategy.num_processes)
        what = " tokens, a process's share of a step, fit on every process"
        if bound == size * parts.plan.most_padded:
            what = f" tokens, {size} of the longest samples, fit on every process"
    elif parts.plan.packed:  # samples of any length are computed together: what fits is their tokens
        bounded, tokens = "micro_batch_tokens", size * parts.plan.most_padded
        bound, what = min(tokens, parts.plan.micro_batch_tokens or tokens), f" tokens, {size}{what}"
    bounds: dict[str, Any] = {bounded: bound}
    parts.plan = replace(parts.plan, **bounds)
    parts.notices.append(f"train.{key}=auto: {bound:,}{', found when the run began' if known else what}.")
    return conditions | {"size": size}


def memory_conditions(recipe: Recipe, strategy: Strategy) -> dict[str, Any]:
    """Return what decides how many samples fit, as far as it may change when a run is resumed. Collective."""
    keys = ("gradient_checkpointing", "compile", "deterministic", "batch_norm", "micro_batch_tokens", "packing", "head_loss")
    device = strategy.device.type
    if device == "cuda":
        properties = torch.cuda.get_device_properties(strategy.device)
        device = f"{properties.name} with {properties.total_memory} bytes"
    devices = strategy.broadcast(sorted({*(strategy.gather_to_main([device]) or ())}))
    shared = {"processes": strategy.num_processes, "device": ", ".join(devices)}
    return shared | {key: getattr(recipe.train, key) for key in keys} | {"mixed_precision": strategy.precision}

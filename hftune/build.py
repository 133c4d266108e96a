"""Builds what a recipe trains: data, batch plan, model and strategy, the same on every process. It does not communicate."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass, field
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator, DistributedType
from torch import nn

from hftune.batch_plan import BatchPlan, by_length
from hftune.config import ParallelConfig, Recipe, TrainConfig
from hftune.data.augmentation import augmented
from hftune.data.cache import one_at_a_time
from hftune.distributed.accelerator import asks_for_fsdp, on_cpu
from hftune.distributed.devices import computes_bf16
from hftune.distributed.process_info import ProcessInfo
from hftune.distributed.progress import Progress
from hftune.errors import ConfigError, DataError, format_value
from hftune.metrics.named import load_metrics
from hftune.models.adapter_files import check_widths, is_quantized
from hftune.models.adapters import add_adapter, check_installed, new_modules
from hftune.models.balancing import LoadBalancing
from hftune.models.dropout import replace_dropout
from hftune.models.trial import trying
from hftune.models.weights import load_weights, weight_files
from hftune.optim import check_schedule, freeze, optimizer_class
from hftune.strategies.arithmetic import Arithmetic
from hftune.strategies.base import Strategy
from hftune.strategies.compilation import compile_model
from hftune.strategies.contract import CANNOT, check_sums, needs_two_samples
from hftune.strategies.data_parallel import DataParallel
from hftune.strategies.pipeline_stages import check_stages, refuse_model
from hftune.strategies.statistics import has_running_statistics
from hftune.strategies.teacher import Teacher, load_named, load_teacher, named_folder
from hftune.strategies.whole_model import absent_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass
class Parts:
    """What is built from a recipe, before the processes have joined."""

    datasets: Mapping[str, Any]
    """"train"; unless the recipe never evaluates, "eval" and, for each of ``eval.sets``, "eval/NAME"; and, if there is one,
    "test"."""
    plan: BatchPlan
    model: nn.Module
    """On the CPU, with the same weights on every process; or on the meta device, with an attribute ``unread``, until it is
    sharded: see ``hftune.models.unread``."""
    num_steps: int
    """Optimizer steps of the whole run."""
    base: str | None = None
    """The digest of the frozen weights that adapters are trained on, once the model is prepared."""
    reference: str | None = None
    """What ``add_references`` returns."""
    first_weights: str | None = None
    """On the main process of a run that begins: the digest of its weights, see ``weights_digest``."""
    teacher: Teacher | None = None
    """Of ``train.teacher``."""
    compared: nn.Module | None = None
    """The model of ``train.reference``, on the CPU, until the references are known."""
    commits: dict[str, str] = field(default_factory=dict)
    """Of the models on the Hub that keys of ``train`` name."""
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
    model = build_model(recipe, said, may_leave_weights(recipe))
    check_pipeline(recipe, plan, datasets["train"], model)
    check_noise(recipe, first_epoch(recipe, datasets))
    check_single_samples(recipe, plan, first_epoch(recipe, datasets), model, num_steps)
    parts = Parts(datasets, plan, model, num_steps)
    if is_main:
        if (balancing := getattr(model, "load_balancing", None)) is not None:
            said.append(
                f"train/loss balances the experts, router_aux_loss_coef={balancing.coefficient:g}: a step of more than one "
                "micro-batch per process takes a second forward pass."
            )
        parts.notices = said + check_sums(recipe.task, model, first_epoch(recipe, datasets), plan.lengths)
    if recipe.train.teacher is not None:
        progress.stage("loading the teacher")
        parts.teacher = load_teacher(recipe.task, recipe.train)
        parts.commits |= parts.teacher.commits
    if recipe.train.reference is not None:
        progress.stage("loading the reference")
        parts.compared, commits = load_reference(recipe)
        parts.commits |= commits
    return parts


def check_names(recipe: Recipe) -> None:
    """Refuse what is not there, such as an optimizer, adapters or weights, before data and model are loaded, or
    raise ConfigError."""
    optimizer_class(recipe.train)
    check_installed(recipe.adapter)
    if (path := own_weights(recipe)) is not None:
        weight_files(path)
    for key in ("teacher", "reference"):
        if (name := getattr(recipe.train, key)) is not None:
            named_folder(f"train.{key}", name)


def load_reference(recipe: Recipe) -> tuple[nn.Module, dict[str, str]]:
    """Load the model of ``train.reference``, see ``load_named``."""
    config = recipe.train
    return load_named(recipe.task, "train.reference", config.reference or "", config.reference_revision)


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
    for split in ("train", *(() if recipe.eval.is_off else recipe.eval.splits), *({"test"} & datasets.keys())):
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
        **recipe.task.windows(dataset),
    )


def total_steps(config: TrainConfig, plan: BatchPlan) -> int:
    """Return the number of optimizer steps of the whole run."""
    steps = config.epochs * plan.num_steps
    return steps if config.max_steps is None else min(steps, config.max_steps)


def is_sharded() -> bool:
    """Say whether the processes of this job share out the weights, as FSDP does."""
    return asks_for_fsdp() and ProcessInfo.from_environment().world_size > 1


def may_leave_weights(recipe: Recipe) -> bool:
    """Say whether to leave a pretrained model's weights in the files until it is sharded.

    Not where anything may look at them earlier, or change them: a user's task, weights of one's own, or adapters that begin
    with what they find in them.
    """
    is_ours = type(recipe.task).__module__.startswith("hftune.")
    is_added = recipe.adapter.type != "dora" and recipe.adapter.init not in ("pissa", "olora")
    return is_sharded() and is_ours and own_weights(recipe) is None and is_added and recipe.task.needs_whole is None


def build_model(recipe: Recipe, notices: list[str] | None = None, leaves_weights: bool = False) -> nn.Module:
    """Build the task's model, with the same initial weights on every process.

    Args:
        notices: gets sentences on what weights of one's own leave out. None: nobody reads them.
        leaves_weights: in the files of a pretrained model, if that is possible: see ``hftune.models.unread``.

    Raises:
        ConfigError: the model does not support the gradient checkpointing that the recipe asks for; ``task.weights``,
            ``train.freeze`` or ``adapter`` do not fit it; its experts cannot be balanced.
    """
    torch.manual_seed(recipe.seed)
    with ExitStack() as options:
        options.enter_context(load_options(recipe))
        if is_sharded() or leaves_weights:
            from hftune.models.pretrained import loading

            options.enter_context(loading(sharded=True, unread=leaves_weights))
        model = recipe.task.build_model()
    if (path := own_weights(recipe)) is not None and torch.get_default_device().type != "meta":
        said = load_weights(model, path)
        if notices is not None:
            notices += said
    balance_experts(recipe, model)
    freeze(model, recipe.train.freeze)
    if recipe.adapter.type is not None:
        check_statistics(recipe, model)
        kind, is_real = recipe.adapter.quantize, torch.get_default_device().type != "meta"
        if kind is not None and is_real and not is_quantized(model):
            raise ConfigError(
                f"adapter.quantize={kind}: the {type(model).__name__} of {type(recipe.task).__name__} is not quantised. That "
                "works for linear layers of models that task.model names. Leave it out."
            )
        if kind is not None and on_cpu():
            check_widths(model)
        embeddings = token_embeddings(model) if getattr(recipe.task, "new_tokens", None) else []
        add_adapter(model, recipe.adapter, new_modules(model))
        if embeddings and (frozen := [module for module in token_embeddings(model) if module in embeddings]):
            names = [name.rpartition(".")[2] for name, module in model.named_modules() if module in frozen]
            raise ConfigError(
                f"task.new_tokens: adapter.type={recipe.adapter.type} would leave what new tokens have in {' and '.join(names)}"
                f" at their mean. Set adapter.train_also=[{', '.join([*recipe.adapter.train_also, *names])}]."
            )
    if (alpha := recipe.train.neftune_alpha) is not None:
        from hftune.models.neftune import Noise

        model.neftune = Noise(model, alpha)
    if recipe.train.gradient_checkpointing:
        if not getattr(model, "supports_gradient_checkpointing", False):
            raise ConfigError(f"train.gradient_checkpointing=true: {type(model).__name__} does not support it.")
        model.activation_checkpointing_enable({"use_reentrant": False})
    if recipe.train.compile:
        compile_model(model)
    else:
        replace_dropout(model)
    if leaves_weights and not can_be_read(model):
        return build_model(recipe, notices)
    return model


def token_embeddings(model: PreTrainedModel) -> list[nn.Module]:
    """Return the input embeddings, and the head that predicts tokens if it has weights of its own."""
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = head is None or getattr(head, "weight", None) is getattr(embeddings, "weight", None)
    return [embeddings] if is_tied else [embeddings, head]


def can_be_read(model: nn.Module) -> bool:
    """Say whether a model whose weights were left in the files can be sharded without them; name those in ``unread``."""
    from hftune.models.unread import match_unread

    return match_unread(model) and not any(map(has_running_statistics, model.modules()))


def balance_experts(recipe: Recipe, model: nn.Module) -> None:
    """Take over the loss that balances a mixture's experts, if the model's config asks for it.

    Raises:
        ConfigError: as ``LoadBalancing``; or a pipeline or a compiled model would have to compute it.
    """
    if not any(getattr(getattr(part, "config", None), "output_router_logits", False) for part in model.modules()):
        return
    if recipe.parallel.pipeline_stages > 1 or recipe.train.compile:
        raise ConfigError(
            "task.model_config.output_router_logits is true, but neither a pipeline nor a compiled model can balance its "
            "experts. Set parallel.pipeline_stages=1 and train.compile=false, or task.model_config.output_router_logits=false."
        )
    model.load_balancing = LoadBalancing(model)


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


def check_noise(recipe: Recipe, dataset: Any) -> None:
    """Refuse NEFTune for texts whose padding is not told apart: it would change the noise of a text with its micro-batch.

    Raises:
        ConfigError: the model is given tokens without a mask.
    """
    task, alpha = recipe.task, recipe.train.neftune_alpha
    if alpha is None:
        return
    inputs = task.inputs(task.collate([dataset[0]]))
    if "input_ids" in inputs and "attention_mask" not in inputs:
        raise ConfigError(
            f"train.neftune_alpha={alpha:g}: {type(task).__name__} gives its model no attention_mask, without which padding "
            "would change the noise. Leave train.neftune_alpha out."
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

        gather, parallel = recipe.train.fsdp_gather, recipe.parallel
        return FullySharded(accelerator, recipe.task, progress, gather, parallel.replicas, parallel.context)
    return DataParallel(accelerator, recipe.task, progress, recipe.parallel.context)


def check_pipeline(recipe: Recipe, plan: BatchPlan, dataset: Any, model: nn.Module) -> None:
    """Refuse a pipeline that cannot compute this model or these batches.

    Raises:
        ConfigError: the model cannot be cut; a step has fewer micro-batches than the schedule needs; or evaluations need the
            whole model.
    """
    config, task = recipe.parallel, recipe.task
    if config.pipeline_stages == 1:
        return
    check_micro_batches(config, plan, ProcessInfo.from_environment().world_size // config.pipeline_stages)
    shortest = 0 if plan.lengths is None else int(by_length(plan.lengths)[0])
    example = augmented(dataset, task, recipe.seed, 0)[shortest]
    batch = task.collate([example])
    check_stages(model, config.num_stages, config.split, task.inputs(batch))
    if recipe.eval.is_off:
        return
    try:
        with trying(model):
            task.predictions(model(**task.inputs(batch)), absent_model(refuse_model), batch)
    except ConfigError:
        raise
    except CANNOT:  # a real mistake will be reported when an evaluation meets it
        pass


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

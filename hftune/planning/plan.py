"""``make_plan(recipe)``: what a training run would do and need, before it starts. Reads the data, never the weights.

It calls the loop's own functions, so the plan cannot differ from the run; only the counting is done here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate.utils import convert_outputs_to_fp32
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from hftune.batch_plan import BatchPlan, MicroBatch, balance, known_lengths
from hftune.build import (
    build_model,
    check_micro_batches,
    check_names,
    check_skip,
    load_datasets,
    plan_batches,
    skip_notices,
    total_steps,
)
from hftune.config import Recipe
from hftune.config.sections import DOUBLING, CheckpointConfig, EvalConfig, ParallelConfig
from hftune.data.augmentation import augmented
from hftune.distributed.accelerator import on_cpu
from hftune.distributed.devices import computes_bf16
from hftune.distributed.preflight import auto_key, check_context, check_parallel
from hftune.errors import ConfigError, first_line
from hftune.models.adapters import base_tensors, has_adapter
from hftune.models.kinds import compute_padding, is_linear
from hftune.models.stacks import outermost_lists
from hftune.optim import build_optimizer, check_schedule, lr_at, num_warmup_steps
from hftune.planning.memory import (
    NEEDS_VALUES,
    PACKED,
    StepMemory,
    TensorBytes,
    as_fake,
    average_bytes,
    experts_by_shape,
    make_optimizer_state,
    optimizer_tensors,
    packable_weights,
    share_bytes,
    step_memory,
    without_values,
)
from hftune.planning.pipeline import PipelineMeter, idle_share
from hftune.planning.record import Data, Disk, Group, Memory, PipelinePlan, Plan, Rate, Steps, Work
from hftune.settle import check_spreadable, may_be_packed, may_score_head, width_of, without_padding
from hftune.strategies.base import dummy_micro_batch
from hftune.strategies.compilation import repeated_layers
from hftune.strategies.fitting import largest_micro_batch_size, largest_micro_batch_tokens
from hftune.strategies.packing import PACKING, collate_for, compute, given_to, install_packing, seems_packable
from hftune.strategies.sharding import checkpoint_tensors
from hftune.strategies.statistics import class_names, has_running_statistics, notice

if TYPE_CHECKING:
    from hftune.strategies.context import Context

OFTEN_USED = (2, 4, 8)
"""Numbers of processes that the balance is shown for, whatever number is planned."""

Collate = Callable[[list[Any]], dict[str, Any]]
"""Makes a batch of samples."""


def make_plan(recipe: Recipe, num_processes: int = 1, device: str | None = None, fsdp: bool = False) -> Plan:
    """Plan a run of a recipe. The data are prepared as for training; the model is built without weights.

    Args:
        num_processes: processes that would train, on all machines.
        device: "cpu" or "cuda", to estimate the memory for. None: the device that this machine would train on.
        fsdp: whether the processes would share weights, gradients and optimizer state.

    Raises:
        ConfigError, DataError: as ``train`` does, and for fewer than one process.
    """
    if num_processes < 1:
        raise ConfigError(f"--processes {num_processes} must be at least 1.")
    if fsdp and num_processes % recipe.parallel.replicas:
        raise ConfigError(f"parallel.replicas={recipe.parallel.replicas} does not divide --processes {num_processes}.")
    if fsdp and (num_processes == 1 or recipe.parallel.pipeline_stages > 1 or recipe.adapter.quantize is not None):
        raise ConfigError(
            "--fsdp: it needs two processes or more (--processes), and goes neither with parallel.pipeline_stages nor with "
            "adapter.quantize. Leave it out."
        )
    recipe.validate()
    check_names(recipe)
    unsure: list[str] = []
    recipe, on_device = settle_device(recipe, device, unsure)
    config, parallel = recipe.train, recipe.parallel
    if parallel.pipeline_stages > 1:
        check_parallel(recipe, num_processes)
    check_context(recipe, num_processes)
    context = parallel.context if num_processes > 1 else 1
    dp_size = num_processes // (parallel.pipeline_stages * context)
    datasets = load_datasets(recipe)
    model = build_on_meta(recipe, unsure)
    batches, looked_at = surveyed(plan_batches(recipe, datasets["train"]), unsure)
    batches, collate = planned_batches(recipe, batches, model)
    if model is not None:
        check_spreadable(recipe.task, model, context, None if batches.packed else "training computes padding")
    auto, largest = auto_key(config), largest_micro_batch_size(batches, num_processes)
    if auto == "train.micro_batch_size" and not batches.packed:
        batches = replace(batches, micro_batch_size=largest)
    elif auto is not None:
        largest = largest_micro_batch_tokens(batches, largest, num_processes)
        batches = replace(batches, micro_batch_tokens=largest)
    num_steps, per_epoch = total_steps(config, batches), batches.num_steps
    check_schedule(config, num_steps, per_epoch)
    check_skip(config, num_steps)
    found = survey(batches, num_steps, dp_size, parallel)
    warmup, moments = num_warmup_steps(num_steps, config), {1: "first"}
    if 0 < warmup < num_steps:
        moments.setdefault(warmup + 1, "peak, after the warmup")
    moments.setdefault(num_steps, "last")
    for quarter, name in enumerate(("a quarter", "half", "three quarters"), start=1):
        moments.setdefault(max(1, num_steps * quarter // 4), name)
    plan = Plan(
        recipe.recipe,
        num_processes,
        replace(found.data, eval_samples=sum(len(datasets[split]) for split in recipe.eval.splits if split in datasets)),
        Steps(num_steps, per_epoch, num_steps / per_epoch, batches.batch_size),
        found.work,
        [Rate(step, lr_at(step - 1, num_steps, config, per_epoch), moments[step]) for step in sorted(moments)],
        falls_on(recipe.eval, num_steps, per_epoch),
        falls_on(recipe.checkpoint, num_steps, per_epoch),
        fsdp=fsdp,
    )
    plan.notices += skip_notices(config, 0, num_steps)
    if config.teacher is not None:
        plan.notices.append(f"train.teacher={config.teacher} is not counted: its weights are whole in each process's memory.")
    for name, interval in {"eval": recipe.eval.interval, "checkpoint": recipe.checkpoint.interval}.items():
        if interval.seconds is not None:
            plan.notices.append(f"{name}.every is a time: more may follow than are counted here.")
    if auto is not None:
        plan.notices.append(f"{auto}=auto: planned with {largest}, the largest size that training would try.")
    if found.work.idle_steps:
        many = "pipelines" if parallel.pipeline_stages > 1 else "processes" if context == 1 else "groups of processes"
        # A short last step may have fewer samples than there are processes.
        is_small = dp_size > batches.batch_size or (batches.parts or 1) % dp_size == 0
        how = "Raise train.batch_size." if is_small else f"Set train.parts={dp_size}, or raise train.batch_size."
        plan.notices.append(
            f"In {found.work.idle_steps:,} of {min(num_steps, per_epoch):,} steps some {many} are idle: there are fewer "
            f"micro-batches than {many}. {how}"
        )
    if parallel.pipeline_stages > 1:
        check_micro_batches(parallel, batches, dp_size)
        once, twice = (idle_share(parallel, count) for count in (found.usual, 2 * found.usual))
        plan.pipeline = PipelinePlan(dp_size, parallel.schedule, found.usual, once, twice, found.filled_up)
    plan.notices += unsure
    if model is not None:
        seen = augmented(datasets["train"], recipe.task, recipe.seed, 0)
        for candidate in found.heaviest:
            candidate.batches = [
                collate([seen[sample] for sample in looked_at[part.samples].tolist()]) for part in candidate.parts
            ]
        add_model(plan, recipe, datasets, model, found.heaviest, on_device)
    return plan


def surveyed(batches: BatchPlan, notices: list[str]) -> tuple[BatchPlan, np.ndarray]:
    """Return the plan, and each sample's number.

    Samples that are made as they are needed, of which a plan is not to make all, are taken to be like some of them, with a
    notice: the numbers, (N,), are then of those.
    """
    if batches.lengths is None or isinstance(batches.lengths, np.ndarray):
        return batches, np.arange(batches.num_samples)
    samples, lengths = known_lengths(batches.lengths)
    likes_N = np.arange(batches.num_samples) * len(samples) // batches.num_samples
    sizes = None if batches.sizes is None else batches.sizes[samples][likes_N]
    if len(samples) < batches.num_samples:
        some = f"{len(samples):,} of the {batches.num_samples:,} training rows"
        notices.append(
            f"Tokens, micro-batches and memory are estimates from {some}. The "
            "others are tokenized when their step comes (task.prepare, task.bad_rows)."
        )
    return replace(batches, lengths=lengths[likes_N], sizes=sizes), samples[likes_N]


def planned_batches(recipe: Recipe, batches: BatchPlan, model: nn.Module | None) -> tuple[BatchPlan, Collate]:
    """Return the plan of training and how it collates: without padding, if the model looks as if it could do without."""
    if model is None:
        return batches, recipe.task.collate
    batches = replace(batches, parts=recipe.train.parts, width=width_of(model))
    is_whole = recipe.train.compile and not repeated_layers(model)  # compiled as a whole
    if is_whole or not may_be_packed(recipe, batches, model) or not seems_packable(model):
        compute_padding(model)
        return batches, recipe.task.collate
    batches = without_padding(recipe.train, batches, recipe.parallel.pipeline_stages)
    return batches, collate_for(model, recipe.task, recipe.parallel.context)


@dataclass
class Candidate:
    """Micro-batches that may need the most memory: one, or in a pipeline all that it computes in a step."""

    size: int
    parts: list[MicroBatch]
    is_first: bool
    """Of those that the process computes in the step."""
    batches: list[dict[str, Any]] = field(default_factory=list)
    """The same, loaded as a process does."""


@dataclass
class Survey:
    """Results of one walk through the first epoch."""

    data: Data
    work: Work
    heaviest: list[Candidate]
    """Without repetition."""
    usual: int
    """Micro-batches that a process or pipeline computes in a typical step: the most frequent number, the larger one of two."""
    filled_up: int
    """Dummies that the schedule of a pipeline needs."""


def survey(batches: BatchPlan, num_steps: int, num_processes: int, config: ParallelConfig | None = None) -> Survey:
    """Walk through the first epoch, or the part of it that is trained, as the processes, or pipelines, would."""
    is_pipeline = config is not None and config.pipeline_stages > 1
    order, num_steps = batches.epoch(0), min(num_steps, batches.num_steps)
    counts, shares_of, computed, largest, cost, idle, filled_up = [], Counter(), 0, 0, 0, 0, 0
    busiest = dict.fromkeys([num_processes, *OFTEN_USED], 0)
    heaviest: dict[tuple[str, bool], Candidate] = {}
    for number in range(num_steps):
        step = order[number]
        costs = [micro_batch.cost for micro_batch in step]
        counts.append(len(step))
        computed += sum(micro_batch.tokens for micro_batch in step)
        largest = max(largest, *(micro_batch.tokens for micro_batch in step))
        cost += sum(costs)
        shares = {count: balance(costs, count) for count in busiest}
        for count in busiest:
            busiest[count] += max(sum([costs[index] for index in share]) for share in shares[count])
        idle += len(step) < num_processes
        for share in shares[num_processes]:
            parts = [step[index] for index in share]
            shares_of[len(parts)] += 1
            if is_pipeline:
                missing = config.fill_up(len(parts)) - len(parts)
                filled_up += missing
                weigh(heaviest, [*parts, *[dummy_micro_batch(step)] * missing], True, config)
            else:
                for index, part in enumerate(parts):
                    weigh(heaviest, [part], index == 0)
    data, real = Data(batches.num_samples, 0, None, None, None, None), None
    if batches.lengths is not None:
        real = int(batches.lengths[order.order_N[: num_steps * batches.batch_size]].sum(dtype=np.int64))
        data = Data(batches.num_samples, 0, real, computed, 1 - real / computed, batches.most_padded)
    evenness = {count: cost / (count * load) for count, load in busiest.items()}
    work = Work(
        micro_batches=sum(counts),
        fewest_per_step=min(counts),
        most_per_step=max(counts),
        most_per_process=max(shares_of),
        evenness=evenness[num_processes],
        idle_steps=idle,
        packed=batches.packed,
        mean_tokens=None if real is None else computed / sum(counts),
        most_tokens=None if real is None else largest,
        evenness_by_processes={count: evenness[count] for count in OFTEN_USED},
    )
    different = {id(item.parts[0]) if len(item.parts) == 1 else id(item.parts): item for item in heaviest.values()}
    usual = max(shares_of, key=lambda count: (shares_of[count], count))
    return Survey(data, work, [*different.values()], usual, filled_up)


def weigh(
    heaviest: dict[tuple[str, bool], Candidate], parts: list[MicroBatch], is_first: bool, config: ParallelConfig | None = None
) -> None:
    """Keep what is the largest so far in what may take memory: padded rows; and tokens, pairs of tokens, and rows in flight."""
    rows, lengths = [len(part.samples) for part in parts], [part.length for part in parts]
    in_flight = slice(None if config is None or config.schedule == "gpipe" else config.pipeline_stages)
    sizes = {
        "padded": len(parts) * max(rows) * max(lengths),
        "tokens": sum(sorted((part.tokens for part in parts), reverse=True)[in_flight]),
        "pairs": sum(sorted((part.tokens * part.length for part in parts), reverse=True)[in_flight]),
        "rows": sum(rows[in_flight]),
    }
    for kind, size in sizes.items():
        known = heaviest.get((kind, is_first))
        if known is None or size > known.size:
            heaviest[kind, is_first] = Candidate(size, parts, is_first)


def falls_on(config: EvalConfig | CheckpointConfig, num_steps: int, steps_per_epoch: int) -> list[int]:
    return [step for step in range(1, num_steps + 1) if config.falls_on(step, num_steps, steps_per_epoch)]


def settle_device(recipe: Recipe, wanted: str | None, notices: list[str]) -> tuple[Recipe, torch.device]:
    """Return the recipe with what auto means for mixed_precision and base_dtype there, and the device to estimate memory for.

    Args:
        wanted: see ``make_plan``. A device that this PyTorch cannot simulate gets a notice, and its precision.
    """
    name = wanted or ("cuda" if torch.cuda.is_available() and not on_cpu() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():  # autograd needs a real one: pytorch/pytorch#92627
        why = "finds no GPU" if torch.version.cuda else "is built without CUDA"
        notices.append(
            f"The memory is estimated for the CPU: this PyTorch {why}, and cannot simulate a step there. "
            "Weights, gradients and optimizer are the same on a GPU; activations may differ, as other kernels run."
        )
        name = "cpu"
    device, precision = torch.device(name), recipe.train.mixed_precision
    if precision == "auto":
        precision = "bf16" if (computes_bf16(device) if device.type == "cuda" else wanted == "cuda") else "no"
        if precision == "bf16":
            notices.append("train.mixed_precision=auto: planned with bf16.")
    base_dtype = recipe.adapter.base_dtype
    if base_dtype == "auto":
        base_dtype = "bf16" if precision == "bf16" and "cuda" in (wanted, device.type) else "float32"
    train, adapter = replace(recipe.train, mixed_precision=precision), replace(recipe.adapter, base_dtype=base_dtype)
    return replace(recipe, train=train, adapter=adapter), device


def add_model(
    plan: Plan,
    recipe: Recipe,
    datasets: Mapping[str, Any],
    model: nn.Module,
    heaviest: Sequence[Candidate],
    device: torch.device,
) -> None:
    """Add the numbers of a model without weights to the plan."""
    plan.parameters = sum(parameter.numel() for parameter in model.parameters())
    plan.trainable_parameters = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    plan.notices += recipe.task.notices(datasets, model)
    with FakeTensorMode(allow_non_fake_inputs=True), experts_by_shape():
        as_fake(model, device)
        try:
            optimizer = build_optimizer(model.train(), recipe)
            names = {parameter: name for name, parameter in model.named_parameters()}
            plan.groups = [
                Group(
                    sum(parameter.numel() for parameter in group["params"]),
                    group["lr"],
                    group.get("weight_decay"),
                    [names[parameter] for parameter in group["params"]],
                )
                for group in optimizer.param_groups
            ]
            make_optimizer_state(optimizer)
        except (ConfigError, *NEEDS_VALUES) as error:
            cause = error.__cause__ if isinstance(error, ConfigError) else error
            if not isinstance(cause, NEEDS_VALUES):
                raise
            name = recipe.train.optimizer
            plan.notices.append(f"The memory cannot be estimated: train.optimizer={name} {needs_values(cause)}")
            return
        plan.disk = disk(recipe, plan, model, optimizer)
        parts = plan.processes // recipe.parallel.replicas
        count_memory = count_in_process if plan.pipeline is None else count_in_pipeline
        try:
            memory, candidate = count_memory(plan, recipe, heaviest, model, optimizer)
            memory = sharded(memory, recipe, model, optimizer, parts) if plan.fsdp else memory
            rows = max(len(part.samples) for part in candidate.parts)
            longest = None if plan.data.longest is None else max(part.length for part in candidate.parts)
            plan.memory = Memory(**asdict(memory), device=device.type, samples=rows, longest=longest)
            is_spread = plan.fsdp or plan.pipeline is not None
            copied = memory.weights_bytes - memory.frozen_bytes + memory.optimizer_bytes + memory.average_bytes
            plan.memory.host_copy_bytes = copied if is_spread else plan.disk.checkpoint_bytes
            if plan.fsdp:  # the main process has a piece of another one besides
                piece = max(share_bytes([value], parts) for value in model.parameters())
                plan.memory.load_bytes = memory.weights_bytes + piece
                plan.memory.host_copy_bytes += piece
                plan.memory.export_bytes = memory.weights_bytes + piece
        except NEEDS_VALUES as error:
            plan.notices.append(f"The memory cannot be estimated: the forward pass or the loss {needs_values(error)}")
        classes = class_names((module, "") for module in model.modules() if has_running_statistics(module))
        if sentence := notice(classes, recipe.train):
            plan.notices.append(sentence)


def count_in_process(
    plan: Plan, recipe: Recipe, heaviest: Sequence[Candidate], model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[StepMemory, Candidate]:
    """Return the memory of a process that has the whole model, and what it is needed for; add parameters without a gradient.

    Under DDP the gradients are in its buckets, from the beginning.
    """
    context = None
    if any(PACKING in batch for item in heaviest for batch in item.batches):
        install_packing(model)
        if recipe.parallel.context > 1 and plan.processes > 1:
            from hftune.strategies.context import Context

            context = Context(None, 0, recipe.parallel.context)
    if scores_head := may_score_head(recipe, model):
        from hftune.models import scored_head

        scored_head.install(model, each=recipe.task.scored_head == "each")
    average, is_ddp, found = average_bytes(model) if recipe.train.ema_decay is not None else 0, plan.processes > 1, []
    for item in heaviest:
        compute_it = partial(forward_backward, recipe, model, item.batches[0], scores_head, not plan.fsdp, context)
        counter = TensorBytes()
        found.append((step_memory(model, optimizer, compute_it, is_ddp or not item.is_first, average, counter), item))
        if plan.unused_parameters is None:
            trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
            plan.unused_parameters = [name for name, value in trained.items() if value not in counter.given]
    memory, item = max(found, key=lambda each: each[0].peak_bytes)
    if is_ddp:
        memory = replace(memory, ddp_buckets_bytes=memory.gradients_bytes, gradients_bytes=0)
    return in_4_bits(memory, model) if recipe.adapter.quantize is not None else memory, item


def count_in_pipeline(
    plan: Plan, recipe: Recipe, heaviest: Sequence[Candidate], model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[StepMemory, Candidate]:
    """Return the memory of the fullest process of a pipeline; add the stages, and the parameters without a gradient.

    Raises:
        ConfigError: the model cannot be cut as the recipe says: as in training, except for checks that need values.
    """
    meter = PipelineMeter(recipe, model, optimizer)
    plan.pipeline.stages = meter.described
    meter.check(heaviest[0].batches[0])
    found = [(meter.measure(item.batches), item) for item in heaviest]
    plan.pipeline.places, item = max(found, key=lambda each: max(place.peak_bytes for place in each[0]))
    plan.unused_parameters = [name for name, parameter in model.named_parameters() if parameter in meter.unused]
    return max(plan.pipeline.places, key=lambda place: place.peak_bytes), item


def sharded(
    memory: StepMemory, recipe: Recipe, model: nn.Module, optimizer: torch.optim.Optimizer, num_processes: int
) -> StepMemory:
    """Return the memory of a step under FSDP, given that of a process that has the whole model.

    Whole at once, at most: what is outside the blocks, two blocks (one computes, one arrives), and the gradients of one of them
    and of what is outside.
    """
    blocks = [block for _, layers in outermost_lists(model) for block in layers if [*block.children()]]
    inside = {value for block in blocks for value in block.parameters()}
    outside = [value for value in model.parameters() if value not in inside]
    largest = [*max(blocks, key=lambda block: sum(value.nbytes for value in block.parameters())).parameters()] if blocks else []
    trained = [value for value in model.parameters() if value.requires_grad]
    gathered = sum(value.nbytes for value in (*outside, *largest, *largest))
    activations = memory.activations_bytes
    if recipe.train.fsdp_gather == "bf16":  # they arrive rounded, so that autocast makes no second ones, which activations hold
        rounded = [value for block in blocks for layer in block.modules() if is_linear(layer) for value in layer.parameters()]
        gathered -= sum(value.nbytes for value in {*rounded} & {*largest})
        activations -= 0 if recipe.train.gradient_checkpointing else sum(2 * value.numel() for value in rounded)
    parts = {
        "weights_bytes": share_bytes(model.parameters(), num_processes) + sum(value.nbytes for value in model.buffers()),
        "gradients_bytes": share_bytes(trained, num_processes),
        "optimizer_bytes": share_bytes(optimizer_tensors(optimizer), num_processes),
        "average_bytes": -(-memory.average_bytes // num_processes),
        "activations_bytes": max(activations, 0),
        "gathered_bytes": gathered + sum(value.nbytes for value in (*outside, *largest) if value.requires_grad),
    }
    frozen = parts["weights_bytes"] - share_bytes(trained, num_processes) if memory.frozen_bytes else 0
    return StepMemory(sum(parts.values()), frozen_bytes=frozen, **parts)


def in_4_bits(memory: Any, model: nn.Module) -> Any:
    """Return the memory of a step whose frozen linear layers have 4 bits, given that of whole ones.

    One of them at a time is whole, while it computes.
    """
    weights = packable_weights(model)
    saved = sum(value.nbytes - round(value.numel() * PACKED) for value in weights)
    whole = max(value.nbytes for value in weights)
    return replace(
        memory,
        peak_bytes=memory.peak_bytes - saved + whole,
        weights_bytes=memory.weights_bytes - saved,
        frozen_bytes=memory.frozen_bytes - saved,
        activations_bytes=memory.activations_bytes + whole,
    )


def build_on_meta(recipe: Recipe, notices: list[str]) -> nn.Module | None:
    """Build the model on the meta device; None, and a notice, if that needs values."""
    try:
        with torch.device("meta"):
            return build_model(replace(recipe, train=replace(recipe.train, compile=False)))
    except (RuntimeError, TypeError) as error:  # torch has no exception type for this
        if "meta" not in str(error):
            raise
        notices.append(f"The model cannot be planned: build_model() {needs_values(error)}")
        return None


def forward_backward(
    recipe: Recipe,
    model: nn.Module,
    batch: Mapping[str, Tensor],
    scores_head: bool = False,
    caches: bool = True,
    context: Context | None = None,
) -> None:
    """Compute a micro-batch as a process does, with a model without values. ``caches``: autocast keeps what it rounds."""
    task, device = recipe.task, next(model.parameters()).device
    precision = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(recipe.train.mixed_precision)
    forward: Callable[..., Any] = model
    if precision is not None:  # as Accelerate does
        forward = convert_outputs_to_fp32(torch.autocast(device.type, precision, cache_enabled=caches)(model.forward))
    inputs = without_values(batch, device)
    arguments, target, _ = given_to(task, inputs, scores_head, context)
    task.loss(compute(forward, **arguments), target).backward()


def needs_values(error: BaseException) -> str:
    """Return the end of a sentence about something that failed because a plan has no values."""
    return f"needs the values of tensors, and a plan has none ({first_line(error)})."


def disk(recipe: Recipe, plan: Plan, model: nn.Module, optimizer: torch.optim.Optimizer) -> Disk:
    """Return what the output folder holds at most. A model with adapters is exported as these, merged, or both."""
    written = sorted({*plan.evaluations, *plan.checkpoints})  # each evaluation may find the best model so far
    kept = len(recipe.checkpoint.kept(written)) + (2 if recipe.checkpoint.keep_every == DOUBLING else 0)  # it varies
    most = len(written) if recipe.checkpoint.interval.seconds is None else plan.steps.total
    groups = checkpoint_tensors(model, optimizer)
    trained, moments = (sum(value.nbytes for value in groups[name].values()) for name in ("model", "optimizer"))
    checkpoint_bytes = trained + moments + (average_bytes(model) if recipe.train.ema_decay is not None else 0)
    model_bytes, checkpoints, models = trained, min(kept + 2, most), 3
    if has_adapter(model):
        base, kind = sum(value.nbytes for value in base_tensors(model).values()), recipe.adapter.export
        is_named = getattr(recipe.task, "model", None) is not None and getattr(recipe.task, "weights", None) is None
        has_own_base = kind != "merged" and not is_named
        model_bytes = trained * (kind != "merged") + base * (kind != "adapter") + base * has_own_base
    total_bytes = checkpoints * checkpoint_bytes + models * model_bytes
    return Disk(checkpoint_bytes, checkpoints, model_bytes, models, total_bytes)

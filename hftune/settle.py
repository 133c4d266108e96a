"""Settles what only shows once the processes have joined: padding, the head's loss, the precision, the size of micro-batches.

The plan and evaluations settle the same, with the same functions. It knows no steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from torch import nn

from hftune.batch_plan import SURVEYED, BatchPlan, MicroBatch, by_length, known_lengths
from hftune.build import Parts, check_micro_batches, choose_strategy, first_epoch
from hftune.config import EvalConfig, Recipe, TrainConfig
from hftune.data.cache import cached_arrays, kept_arrays, saying
from hftune.data.digest import content_digest
from hftune.distributed.accelerator import start_accelerator
from hftune.distributed.devices import precision_notices
from hftune.distributed.progress import Progress
from hftune.errors import ConfigError
from hftune.evaluation import evaluate
from hftune.models.adapters import base_digest, has_adapter, packed_digest
from hftune.models.kinds import compute_padding, is_of_transformers
from hftune.optim import build_optimizer
from hftune.strategies.base import Strategy
from hftune.strategies.compilation import repeated_layers
from hftune.strategies.fitting import find_micro_batch_size, largest_micro_batch_tokens, memory_conditions
from hftune.strategies.packing import collate_for, install_packing
from hftune.strategies.trial import head_problem, packing_problem, trial_samples
from hftune.task import BatchLossTask
from hftune.tracking.summary import PRECISIONS

PARTS, TOKENS_OF_A_PART = (4, 2, 1), 1024
"""``train.parts`` where training computes no padding: as many as a machine usually has processes, if a step has so many tokens
for each of them on average. With fewer, a GPU takes hardly less time, and splitting a step would only cost."""


HALF = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The dtype of autocast, by ``Strategy.precision``."""


def default_parts(plan: BatchPlan, least: int = 1) -> int:
    """Return what ``train.parts`` is by default for a plan without padding; the same for any number of processes."""
    samples = min(plan.batch_size, plan.samples_per_epoch)
    tokens = float(known_lengths(plan.lengths, SURVEYED)[1].mean()) * samples
    return next(parts for parts in PARTS if parts <= samples and (parts <= least or tokens >= parts * TOKENS_OF_A_PART))


def first_steps(plan: BatchPlan) -> Iterator[list[MicroBatch]]:
    """Return 20 steps or the first ones of some 64 samples: their rows may have to be read for it, from as many places."""
    return islice(plan.epoch(0), min(20, max(1, 64 // plan.batch_size)))


def idle_notices(plan: BatchPlan, num_processes: int) -> list[str]:
    """Say that steps have fewer micro-batches than there are processes; the first ones are looked at."""
    if num_processes == 1 or (most := max(map(len, first_steps(plan)))) >= num_processes:
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
        micro_batch_tokens=plan.micro_batch_tokens if is_bounded else 8 * int(known_lengths(plan.lengths, SURVEYED)[1].max()),
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
    """Return the share of padding in what the first steps of a plan compute."""
    steps = [*first_steps(plan)]
    computed = sum(micro_batch.tokens for step in steps for micro_batch in step)
    return 1 - sum(int(plan.lengths[micro_batch.samples].sum()) for step in steps for micro_batch in step) / computed


def settle_packing(recipe: Recipe, strategy: Strategy, parts: Parts) -> None:
    """Leave out padding, if train.packing=auto and the model computes the same without, as the main process tries. Collective.

    Before ``strategy.prepare``.

    Raises:
        ConfigError: a step has too few micro-batches for the pipeline's schedule.
    """
    config, model = recipe.train, parts.model
    parts.plan = plan = replace(parts.plan, parts=config.parts, width=width_of(model))
    if not may_be_packed(recipe, plan, model):
        check_spreadable(recipe.task, model, strategy.together, "training computes padding")
        compute_padding(model)
        return
    strategy.progress.stage("trying the model without padding")
    half = HALF[strategy.precision]
    samples, dataset = trial_samples(plan.lengths), first_epoch(recipe, parts.datasets)

    def tried(model: nn.Module) -> str | None:
        if config.compile and not repeated_layers(model):
            return "it is compiled as a whole (train.compile=true)"
        # Tokens that are spread over processes may well be padding: what counts is that the model knows how to do it.
        needs_mask = padding_share(plan) >= 0.01 and recipe.parallel.context == 1
        return packing_problem(model, recipe.task, dataset, samples, strategy.device, half, needs_mask)

    reason = strategy.tried(model, tried)
    check_spreadable(recipe.task, model, strategy.together, reason)
    if reason is None:
        strategy.collate_packed = collate_for(model, recipe.task, recipe.parallel.context)
        if (teacher := parts.teacher) is not None:
            kinds = {getattr(type(each), "find_packing", None) for each in (model, teacher.model)}
            reason = "its layers pack in another way" if len(kinds) > 1 else strategy.on_main(lambda: tried(teacher.model))
            if reason is None:
                install_packing(teacher.model)
                teacher.packs = True
            else:
                parts.notices.append(f"The teacher computes padding, because {reason}.")
        parts.plan = without_padding(config, plan, recipe.parallel.pipeline_stages)
        if recipe.parallel.pipeline_stages > 1:
            check_micro_batches(recipe.parallel, parts.plan, strategy.num_processes // recipe.parallel.pipeline_stages)
        return
    compute_padding(model)
    if (share := padding_share(plan)) >= 0.01:
        parts.notices.append(
            f"{share:.0%} of what training computes is padding: {parts.model_name} cannot leave it out, because {reason}."
        )


def check_spreadable(task: Any, model: nn.Module, context: int, reason: str | None) -> None:
    """Refuse to spread the tokens of a micro-batch over processes where that gives something else.

    Args:
        context: number of processes that compute one.
        reason: why the model cannot be trained without padding; None if it can.

    Raises:
        ConfigError: naming the reason.
    """
    if context == 1:
        return
    if isinstance(task, BatchLossTask):
        reason = "its loss compares samples with each other"
    elif hasattr(model, "load_balancing"):
        reason = "its experts are balanced (task.model_config.output_router_logits)"
    elif reason is not None:
        reason = f"it cannot leave out padding: {reason}"
    elif hasattr(type(model), "find_packing"):
        reason = "its attention knows more than one kind of tokens"
    elif model.config.is_encoder_decoder:
        reason = "an encoder-decoder has two kinds of them"
    elif not (heads := getattr(model.config.get_text_config(), "num_attention_heads", 0)) or heads % context:
        reason = f"its {heads or 'unknown number of'} attention heads cannot be shared out equally"
    if reason is not None:
        raise ConfigError(
            f"parallel.context={context}: the tokens of {type(model).__name__} cannot be spread over processes, "
            f"because {reason}. Set parallel.context=1."
        )


def settle_teacher(recipe: Recipe, strategy: Strategy, parts: Parts) -> None:
    """Hand a teacher to the strategy, on the device, once it has computed a few samples on the main process. Collective.

    Raises:
        ConfigError: it cannot.
    """
    if (teacher := parts.teacher) is None:
        return
    strategy.progress.stage("trying the teacher")
    compute_padding(teacher.model)
    teacher.model.to(strategy.device)
    teacher.half = HALF[strategy.precision]
    lengths, dataset = parts.plan.lengths, first_epoch(recipe, parts.datasets)
    strategy.on_main(lambda: teacher.check(dataset, [0] if lengths is None else trial_samples(lengths)))
    strategy.teacher = teacher
    count = sum(value.numel() for value in teacher.model.parameters())
    parts.notices.append(
        f"train.teacher={recipe.train.teacher}: {type(teacher.model).__name__} with {count:,} weights, whole on each process."
    )


def settle_head(
    recipe: Recipe,
    strategy: Strategy,
    model: nn.Module,
    dataset: Any,
    rows: int,
    others: Iterable[Any] = (),
    augmented: Any = None,
) -> list[str]:
    """Let a model compute its loss together with its head, where there are many logits and it comes out the same. Collective.

    Before ``strategy.prepare``.

    Args:
        rows: of the largest micro-batch.
        others: data sets that are evaluated, too, and may have longer samples.
        augmented: the data set as training sees it. None: it is not trained on.

    Returns:
        Sentences on why the logits are computed as a whole.
    """
    if not may_score_head(recipe, model):
        return []
    from hftune.models import scored_head

    lengths = recipe.task.lengths(dataset)
    longest = max((int(found.max()) for rows in others if (found := recipe.task.lengths(rows)) is not None), default=1)
    longest = longest if lengths is None else max(longest, int(lengths.max()))
    num_words = scored_head.Head.of(model).num_words
    if rows * longest <= scored_head.rows_at_once(num_words, strategy.device.type == "cuda"):
        return []
    known = [0] if lengths is None else by_length(lengths).tolist()
    strategy.progress.stage("trying the loss in chunks")
    half = HALF[strategy.precision]
    sample = known[len(known) // 2]
    seen = dataset if augmented is None else augmented
    reason = strategy.tried(model, lambda tried: head_problem(tried, recipe.task, seen, sample, strategy.device, half))
    if reason is None:
        scored_head.install(model, each=recipe.task.scored_head == "each")
        strategy.scores_head = True
        return []
    return [f"The logits of a micro-batch are computed all at once, because {reason}."]


def unread_names(strategy: Strategy, model: nn.Module) -> list[str]:
    """Return the names of the weights that are still in the files, the same on all processes. Collective.

    Raises:
        ConfigError: they are not the same.
    """
    unread = sorted(vars(model).get("unread", ()))
    if strategy.any_process(unread != strategy.broadcast(unread)):
        raise ConfigError(
            "task.model: some processes can leave its weights in the files until they are shared out, and others cannot. Its "
            "folder must hold the same safetensors files on all machines."
        )
    return unread


def prepare(recipe: Recipe, strategy: Strategy, parts: Parts) -> None:
    """Settle what only shows once the processes have joined, and hand model and optimizer to the strategy. Collective.

    Raises:
        ConfigError: what is built does not fit these devices, or this number of processes.
    """
    model = parts.model
    unread = unread_names(strategy, model)
    base = None
    if strategy.is_main and not unread and has_adapter(model):
        base = base_digest(model)  # before a first forward pass, by which a CPU may lay out weights of 4 bits in another shape
    is_bf16 = any(parameter.dtype == torch.bfloat16 for parameter in model.parameters())
    if recipe.adapter.base_dtype == "auto" and is_bf16 and strategy.precision != "bf16":
        raise ConfigError("adapter.base_dtype=auto: not all GPUs of this job compute bf16. Set it to float32.")
    configs = [vars(config) for module in model.modules() if (config := getattr(module, "config", None)) is not None]
    drops = {name: value for config in configs for name, value in config.items() if "layerdrop" in name and value}
    if drops and not strategy.computes_alone:  # processes would exchange different layers
        raise ConfigError(
            f"{type(model).__name__} drops whole layers at random: {', '.join(f'{name}={drops[name]}' for name in drops)}. "
            f"{type(strategy).__name__} cannot compute that, as its processes meet in each layer. Set "
            f"{' '.join(f'task.model_config.{name}=0' for name in drops)}, or train without FSDP, "
            "pipeline stages and parallel.context."
        )
    settle_teacher(recipe, strategy, parts)
    settle_packing(recipe, strategy, parts)
    if (compared := parts.compared) is not None:
        optimizer, parts.compared = torch.optim.SGD(compared.parameters()), None
        parts.reference = references_of_another(recipe, strategy.progress, compared, optimizer, parts.datasets.values())
        del compared, optimizer
    plan, train, *others = parts.plan, *parts.datasets.values()
    evaluated = 0 if recipe.eval.is_off and "test" not in parts.datasets else recipe.eval.batch_size
    rows = max(evaluated, min(plan.batch_size, plan.micro_batch_size or plan.batch_size))
    parts.notices += settle_head(recipe, strategy, model, train, rows, others, first_epoch(recipe, parts.datasets))
    strategy.progress.stage("preparing model and optimizer")
    strategy.prepare(model, build_optimizer(model, recipe))
    parts.base = strategy.broadcast(strategy.sharding.base_digest() if unread else base)
    if parts.base is not None:
        strategy.model.known_base_digest = parts.base  # exports name it
    strategy.sharding.begin_training(keeps_average=recipe.train.ema_decay is not None)
    if parts.reference is None:
        parts.reference = add_references(recipe, strategy, model, parts.base, parts.datasets.values())
    parts.notices += [*strategy.notices(), *precision_notices(recipe.train, strategy.precision, strategy.device)]


def references_of_another(
    recipe: Recipe, progress: Progress, model: nn.Module, optimizer: torch.optim.Optimizer, datasets: Iterable[Any]
) -> str | None:
    """Do the same as ``add_references`` with a model that is not trained here, on a strategy and an accelerator of its own.

    Args:
        optimizer: of the model; FSDP needs one to share it out.
    """
    progress.stage("preparing the reference")
    strategy = choose_strategy(start_accelerator(recipe.train), recipe, progress)
    unread = unread_names(strategy, model)
    base = base_digest(model) if has_adapter(model) and not unread else None
    first, *others = datasets
    settle_head(recipe, strategy, model, first, recipe.eval.batch_size, others)
    strategy.prepare(model, optimizer)
    return add_references(recipe, strategy, model, strategy.sharding.base_digest() if unread else base, [first, *others])


def add_references(
    recipe: Recipe, strategy: Strategy, model: nn.Module, base: str | None, datasets: Iterable[Any]
) -> str | None:
    """Give each sample what ``Hooks.reference_fields`` names, of the model that the strategy holds. Collective.

    It is computed once for the same model, data and precision, each sample by one process, and kept in the cache.

    Args:
        model: as the strategy was given it.
        base: digest of its frozen weights beside adapters, which change nothing yet; on the main process.

    Returns:
        The digest of the model's weights, those of 4 bits aside; None of a task that needs no reference.
    """
    if not (names := recipe.task.reference_fields):
        return None
    strategy.progress.stage("computing what the loss needs of the reference")
    reference = strategy.broadcast(" ".join(filter(None, [strategy.sharding.digest(), base])))
    start = [reference, packed_digest(strategy.sharding.model), repr(getattr(model, "config", None)), strategy.precision]
    config = replace(recipe.eval, metrics=[], show_samples=0)
    for dataset in datasets:
        dataset.add_column("reference", _reference(strategy, dataset, config, [*start, *names]))
    return reference


def _reference(strategy: Strategy, dataset: Any, config: EvalConfig, key: list[Any]) -> np.ndarray:
    """Return what ``add_references`` gives a data set, equal on all processes. Collective."""
    names = strategy.task.reference_fields

    def look() -> np.ndarray | None:
        key.append(content_digest(dataset))
        found = kept_arrays(key)
        return None if found is None else np.array(found["reference"])  # the file may be on this machine alone

    def keep(rows: list[dict[str, Any]]) -> np.ndarray:
        values = np.array([[row[name] for name in names] for row in rows], np.float32)
        return np.array(cached_arrays(key, lambda: {"reference": values})["reference"])

    found = strategy.on_main(look)
    if found is None:
        said = cache(partial(saying, "Reference", unit="micro-batches"))
        evaluation = evaluate(
            strategy, dataset, config, on_scored=lambda done, total: said(total)(done) if strategy.is_main else None
        )
        found = strategy.on_main(lambda: keep(evaluation.rows))
    return found


def warm_up_strategy(recipe: Recipe, strategy: Strategy, plan: BatchPlan, datasets: Mapping[str, Any]) -> list[str]:
    """Let the strategy do the one-time work of a first step, and return what ``Strategy.warm_up`` does. Collective."""
    strategy.progress.stage("the warm-up backward pass")
    first, *_ = plan.epoch(0)[0]
    if strategy.together > 1:  # a micro-batch with fewer tokens than processes would not show whether they can be shared out
        first = max(chain.from_iterable(first_steps(plan)), key=lambda micro_batch: micro_batch.tokens)
    return strategy.warm_up(first_epoch(recipe, datasets), first, frozen=recipe.train.batch_norm == "frozen")


def may_score_head(recipe: Recipe, model: nn.Module) -> bool:
    """Say whether to try to compute the loss together with the head. A pipeline's stages return logits; a teacher needs all."""
    if recipe.train.head_loss == "whole" or recipe.parallel.pipeline_stages > 1 or not recipe.task.scored_head:
        return False
    if recipe.train.teacher is not None or not is_of_transformers(model):
        return False
    if recipe.parallel.context > 1 and recipe.task.scored_head == "each":  # of which a process would have a part
        return False
    from hftune.models.scored_head import Head

    return Head.of(model) is not None and not (recipe.train.compile and not repeated_layers(model))


def may_be_packed(recipe: Recipe, plan: BatchPlan, model: nn.Module) -> bool:
    """Say whether to try a model without padding."""
    return recipe.train.packing == "auto" and plan.lengths is not None and is_of_transformers(model)


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
    strategy.most = parts.plan.micro_batch_size, parts.plan.micro_batch_tokens
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
    strategy.most = parts.plan.micro_batch_size, parts.plan.micro_batch_tokens
    parts.notices.append(f"train.{key}=auto: {bound:,}{', found when the run began' if known else what}.")
    return conditions | {"size": size}


def changed_precision(recipe: Recipe, strategy: Strategy, before: str | None) -> list[str]:
    """Say that ``train.mixed_precision=auto`` means something else than in the steps that a run is resumed from."""
    if recipe.train.mixed_precision != "auto" or before in (None, strategy.precision):
        return []
    return [
        f"train.mixed_precision=auto: the steps so far were computed in {PRECISIONS[before]}, those from here on in "
        f"{PRECISIONS[strategy.precision]}. To keep to one of them, set train.mixed_precision={before}."
    ]

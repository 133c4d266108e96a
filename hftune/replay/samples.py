"""Each sample's own loss and gradient, in the micro-batch and under the dropout that it was trained with."""

# Shapes: B samples of a micro-batch.

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from hftune.errors import ConfigError, TrainingError
from hftune.models.trial import restored_buffers
from hftune.strategies.absent_model import ModelNeeded, absent_model
from hftune.strategies.base import StepBatch, StepReport, Strategy
from hftune.strategies.data_parallel import DataParallel
from hftune.strategies.packing import PACKING
from hftune.strategies.sharding import Replicated
from hftune.strategies.two_pass import rows_of, step_losses
from hftune.task import BatchLossTask, Task, ask

if TYPE_CHECKING:
    from hftune.replay.engine import Replayer

EXACT = 1e-5
"""Largest difference between a micro-batch's loss and the sum of its samples' losses, in units of that sum: float32 rounds."""

EachLoss = Callable[[int, Any, Any], tuple[Sequence[Tensor], Sequence[Tensor]]]


@dataclass(frozen=True)
class SampleRecord:
    """What one sample did in one step."""

    sample: int
    """Its number in the training split, from 0."""
    micro_batch: int
    items: float
    loss_sum: float
    """Over its items."""
    loss_share: float = math.nan
    """Of the loss of the step."""
    grad_norm: float | None = None
    """Of its part of the step's gradient."""
    gradient_share: float | None = None
    """g . G / G . G, for its part g of the step's gradient G: adds up to 1 over the samples of a step. Negative for a sample
    that pulls against the others."""
    answer: Mapping[str, Any] = field(default_factory=dict)
    """Label and prediction, as numbers, of a task that classifies or predicts numbers."""
    picture: np.ndarray | None = None
    """(H, W, 3) uint8."""

    @property
    def loss(self) -> float:
        """Mean over its items."""
        return self.loss_sum / self.items if self.items else 0.0


# The loss of each sample


def sample_losses(task: Task, outputs: Any, target: Any, num_rows: int) -> Tensor:
    """Return the summed loss of each sample of a micro-batch, (B,), with its graph: ``task.loss`` of its row alone.

    The forward pass is that of the whole micro-batch. A sample that is computed alone draws another dropout, and so has
    another loss: by 5 % in the middle, and up to 20 %, in a trial with BERT.

    Args:
        outputs: what the model returned for the micro-batch. With gradients, it must not have been given ``targets``: a loss
            that was computed together with the head is known as a sum only.
        target: ``task.target`` of the micro-batch.
        num_rows: B.

    Raises:
        TrainingError: the loss of the micro-batch is not the sum of its samples' losses.
    """
    return torch.stack(_each_loss(task, outputs, target, num_rows))


def _each_loss(task: Task, outputs: Any, target: Any, num_rows: int) -> list[Tensor]:
    """Return ``sample_losses`` as scalars, each of which can be differentiated without the others."""
    if isinstance(task, BatchLossTask):  # compares the samples with each other
        losses = [*task.batch_losses(task.embed(outputs, target), task.batch_labels(target))]
    elif (token_losses_BT := getattr(outputs, "losses", None)) is not None:  # of a head that computed them; without gradients
        losses = [*token_losses_BT.sum(1)]
    else:
        losses = [task.loss(*cut_row((outputs, target), row, num_rows)) for row in range(num_rows)]
    _check_sum(task, losses, outputs, target)
    return losses


def cut_row(values: Any, row: int, num_rows: int) -> Any:
    """Cut one row out of all tensors that have ``num_rows`` of them, and leave anything else as it is."""
    return tree_map(partial(_cut, row=row, num_rows=num_rows), values)


def _cut(value: Any, row: int, num_rows: int) -> Any:
    has_rows = isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == num_rows
    return value[row : row + 1] if has_rows else value


@torch.no_grad()
def _check_sum(task: Task, losses: Sequence[Tensor], outputs: Any, target: Any) -> None:
    """Raise TrainingError unless the losses add up to what training computed. Losses that are not finite cannot be compared."""
    whole, each = float(task.loss(outputs, target)), torch.stack([*losses]).tolist()
    if abs(whole - math.fsum(each)) > EXACT * max(math.fsum(map(abs, each)), 1e-3):
        raise TrainingError(
            f"{type(task).__name__}.loss of a micro-batch is {whole:.6g}, and {math.fsum(each):.6g} if it is added up sample "
            "by sample, so single samples have no loss of their own. It must be a sum over samples, each of which has its row "
            "in the model's outputs and in the target: a tensor, or tensors in dicts, lists or tuples."
        )


# Looking into a step


def look_inside(
    replayer: Replayer, batch: StepBatch, report: StepReport, gradients: bool = True, pictures: int = 0
) -> list[SampleRecord] | None:
    """Return what each sample of a step did, between its backward pass and the optimizer's step. Leaves no trace. Collective.

    A pass over each micro-batch and, with ``gradients``, a backward pass for each sample: about as long as 5 steps for 32
    samples. In a loss that compares the samples of a step with each other, the gradient of a sample is what flows through its
    own embeddings.

    Args:
        pictures: of so many samples with the greatest loss.

    Returns:
        A record for each sample on the main process, in the order of the micro-batches; None elsewhere.

    Raises:
        ConfigError: the processes do not hold the whole model each.
        TrainingError: see ``sample_losses``.
    """
    strategy, task = whole_model(replayer), replayer.recipe.task
    parameters = [value for value in strategy.sharding.model.parameters() if value.grad is not None] if gradients else []
    records: list[SampleRecord] = []
    with leaving_no_trace(strategy.sharding.model), nullcontext() if gradients else torch.no_grad():
        each_loss = _differentiable_losses(replayer, batch)
        for index, (micro_batch, weight) in enumerate(zip(batch.mine, batch.weights, strict=True)):
            if not weight:
                continue
            outputs, inputs = strategy.compute_again(batch, index, replayer.recipe.seed, replayer.step - 1)
            target, count = task.target(inputs), len(micro_batch.samples)
            losses, parts = each_loss(index, outputs, target)
            found = [
                SampleRecord(sample, micro_batch.index, float(task.num_items(cut_row(target, row, count))), losses[row].item())
                for row, sample in enumerate(micro_batch.samples.tolist())
            ]
            if gradients:
                found = _with_gradients(found, parts, parameters, report, strategy.exact)
            records += _with_answers(found, task, outputs, inputs, pictures)
    gathered = strategy.gather_to_main(records)
    return None if gathered is None else _with_shares(gathered, pictures)


def holds_whole_model(strategy: Strategy) -> bool:
    """Say whether each process holds the whole model."""
    return isinstance(strategy, DataParallel) and isinstance(strategy.sharding, Replicated)


def whole_model(replayer: Replayer) -> DataParallel:
    """Return the strategy of a replay, or raise ConfigError unless each process holds the whole model."""
    strategy = replayer.strategy
    if holds_whole_model(strategy):
        return strategy  # type: ignore[return-value]
    raise ConfigError(
        "The samples of a step can be looked at where each process holds the whole model. Replay on one process, without a "
        "launcher: the numbers are the same, but for rounding."
    )


@contextmanager
def leaving_no_trace(model: nn.Module) -> Iterator[None]:
    """Restore buffers and random generators at the end, and use no compiled code, which frees what a backward pass needs."""
    devices = {value.device for value in model.parameters() if value.is_cuda}  # not all of the machine's
    with torch.random.fork_rng([*devices]), restored_buffers(model), torch.compiler.set_stance("force_eager"):
        yield


def _differentiable_losses(replayer: Replayer, batch: StepBatch) -> EachLoss:
    """Return the function of index, outputs and target of a micro-batch that gives the losses of its samples, and scalars.

    The gradient of each scalar is the sample's part of the step's gradient, before it is divided by the items. Collective.
    """
    task = replayer.recipe.task
    if not isinstance(task, BatchLossTask):

        def alone(index: int, outputs: Any, target: Any) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
            losses = _each_loss(task, outputs, target, len(batch.mine[index].samples))
            return losses, losses

        return alone
    losses_B, gradient = compared_losses(replayer, task, batch, replayer.step)

    def compared(index: int, outputs: Any, target: Any) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        span = rows_of(batch, index)
        embeddings = task.embed(outputs, target)
        return [*losses_B[span]], [*(embeddings * gradient[span]).flatten(1).sum(1)]

    return compared


def compared_losses(replayer: Replayer, task: BatchLossTask, batch: StepBatch, step: int) -> tuple[Tensor, Tensor]:
    """Return ``step_losses`` at the present weights, with the dropout of a step. Collective."""
    strategy = whole_model(replayer)
    embeddings, labels = [], []
    with torch.no_grad():
        for index in range(len(batch.mine)):
            outputs, inputs = strategy.compute_again(batch, index, replayer.recipe.seed, step - 1)
            target = task.target(inputs)
            embeddings.append(task.embed(outputs, target))
            labels.append(task.batch_labels(target))
    return step_losses(task, batch, embeddings, labels, strategy.sum)


def _with_gradients(
    records: Sequence[SampleRecord],
    parts: Sequence[Tensor],
    parameters: Sequence[nn.Parameter],
    report: StepReport,
    exact: torch.dtype,
) -> list[SampleRecord]:
    """Add the norm of each sample's gradient, and its share of that of the step.

    Args:
        parts: scalars whose gradients they are.
        parameters: those with a gradient, which may have been clipped since ``report``: then the direction is the same.
    """
    found, clipped = [], math.sqrt(sum(float(value.grad.to(exact).square().sum()) for value in parameters))
    for place, (record, part) in enumerate(zip(records, parts, strict=True)):
        own = torch.autograd.grad(part, parameters, retain_graph=place < len(parts) - 1, allow_unused=True)
        pairs = [(one.to(exact), value.grad.to(exact)) for one, value in zip(own, parameters, strict=True) if one is not None]
        sums = torch.stack([torch.stack([(one * one).sum(), (one * whole).sum()]) for one, whole in pairs]).sum(0)
        square, product = sums.tolist()
        share = product / (report.num_items * clipped * report.grad_norm) if clipped and report.grad_norm else math.nan
        found.append(replace(record, grad_norm=math.sqrt(square) / report.num_items, gradient_share=share))
    return found


def _with_shares(records: Sequence[SampleRecord], pictures: int) -> list[SampleRecord]:
    """Add each sample's share of the loss, and keep only as many pictures as were asked for."""
    loss = math.fsum(record.loss_sum for record in records)
    shown = {id(record) for record in sorted(records, key=lambda record: -record.loss)[:pictures]}
    return [
        replace(
            record,
            loss_share=record.loss_sum / loss if loss else math.nan,
            picture=record.picture if id(record) in shown else None,
        )
        for record in sorted(records, key=lambda record: record.micro_batch)  # several processes had them
    ]


# What a sample is


@torch.no_grad()
def _with_answers(
    records: Sequence[SampleRecord], task: Task, outputs: Any, inputs: Mapping[str, Any], pictures: int
) -> list[SampleRecord]:
    """Add label and prediction, and the pictures of those with the greatest loss, of tasks that need no model for them."""
    if task.scored_head or isinstance(task, BatchLossTask):  # texts, and embeddings
        return [*records]
    loaded = {name: value for name, value in inputs.items() if name != PACKING}
    answers = _without_model(task, "predictions", _detached(outputs), _one_label(task, loaded)) or [{}] * len(records)
    names = ("label", "prediction")
    found = [
        replace(record, answer={name: answer[name] for name in names} if {*names} <= {*answer} else {})
        for record, answer in zip(records, answers, strict=True)
    ]
    worst = sorted(range(len(found)), key=lambda row: -found[row].loss)[:pictures]
    images = _without_model(task, "sample_images", _detached(outputs), loaded, worst)
    for row, image in zip(worst, images, strict=False):
        found[row] = replace(found[row], picture=image)
    return found


def _without_model(task: Task, name: str, outputs: Any, loaded: Mapping[str, Any], *arguments: Any) -> list[Any]:
    """Return what a task shows of a micro-batch; nothing if it would need the model for it."""
    try:
        return ask(task, name, [], outputs, absent_model(lambda: None), loaded, *arguments)
    except ModelNeeded:
        return []


def _detached(outputs: Any) -> Any:
    return tree_map(lambda value: value.detach() if isinstance(value, Tensor) else value, outputs)


def _one_label(task: Task, loaded: Mapping[str, Any]) -> Mapping[str, Any]:
    """Give mixed images, whose labels are shares of the classes, the label with the greatest share."""
    labels = loaded.get("labels")
    is_mixed = getattr(task, "mixup", 0) or getattr(task, "cutmix", 0)
    return {**loaded, "labels": labels.argmax(-1)} if is_mixed and isinstance(labels, Tensor) and labels.ndim == 2 else loaded

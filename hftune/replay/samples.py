"""What each sample did in a step: its own loss and gradient, in the micro-batch and under the dropout of its training."""

# Shapes: B samples of a micro-batch.

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from hftune.errors import ConfigError, TrainingError
from hftune.models.trial import restored_buffers
from hftune.strategies.base import StepBatch, StepReport, Strategy
from hftune.strategies.data_parallel import DataParallel
from hftune.strategies.packing import PACKING
from hftune.strategies.sharding import Sharding
from hftune.strategies.two_pass import rows_of, step_losses
from hftune.strategies.whole_model import ModelNeeded, absent_model
from hftune.task import BatchLossTask, Task, ask

if TYPE_CHECKING:
    from hftune.replay.engine import Replayer

EXACT = 1e-5
"""Largest difference between a micro-batch's loss and the sum of its samples' losses, in units of that sum: float32 rounds."""


@dataclass
class SampleRecord:
    """What one sample did in one step."""

    sample: int
    """Its number in the training split, from 0."""
    micro_batch: int
    items: float
    loss_sum: float
    loss_share: float = math.nan
    grad_norm: float = math.nan
    """Of its part of the step's gradient."""
    gradient_share: float = math.nan
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


def sample_losses(task: Task, outputs: Any, target: Any, num_rows: int) -> list[Tensor]:
    """Return the summed loss of each sample of a micro-batch, ``task.loss`` of its row alone, as scalars with their graphs.

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
    if isinstance(task, BatchLossTask):  # compares the samples with each other
        losses = [*task.batch_losses(task.embed(outputs, target), task.batch_labels(target))]
    elif (losses_B := task.sample_losses(outputs, target)) is not None:
        losses = [*losses_B]
    elif (token_losses_BT := getattr(outputs, "losses", None)) is not None:  # of a head that computed them; without gradients
        losses = [*token_losses_BT.sum(1)]
    else:
        losses = [task.loss(*cut_row((outputs, target), row, num_rows)) for row in range(num_rows)]
    with torch.no_grad():
        whole, each = float(task.loss(outputs, target)), torch.stack(losses).tolist()
    if abs(whole - math.fsum(each)) > EXACT * max(math.fsum(map(abs, each)), 1e-3):  # never so of what is not finite
        raise TrainingError(
            f"{type(task).__name__}.loss of a micro-batch is {whole:.6g}, and {math.fsum(each):.6g} if it is added up sample "
            "by sample, so single samples have no loss of their own. It must be a sum over samples, each of which has its row "
            "in the model's outputs and in the target: a tensor, or tensors in dicts, lists or tuples."
        )
    return losses


def cut_row(values: Any, row: int, num_rows: int) -> Any:
    """Cut one row out of all tensors that have ``num_rows`` of them, and leave anything else as it is."""

    def cut(value: Any) -> Any:
        has_rows = isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == num_rows
        return value[row : row + 1] if has_rows else value

    return tree_map(cut, values)


class LeavingOut(DataParallel):
    """DataParallel with samples that stay in the forward pass, but add nothing to the loss, and whose items do not count.

    Taken out of their micro-batch, they would shift the dropout of their neighbours, and perhaps the padding: every other
    number would change a little, too, and nobody could tell what the samples themselves have done.
    """

    left_out: frozenset[int] = frozenset()

    def counts(self, batch: StepBatch) -> list[float]:
        _, *rest = counts = super().counts(batch)
        if not self._concerns(batch):
            return counts
        num_items = 0.0
        for micro_batch, weight, loaded in zip(batch.mine, batch.weights, batch.batches, strict=True):
            target, samples = self.task.target(loaded), micro_batch.samples.tolist()
            kept = (place for place, sample in enumerate(samples) if sample not in self.left_out)
            num_items += weight * sum(float(self.task.num_items(cut_row(target, place, len(samples)))) for place in kept)
        return [num_items, *rest]

    def _loss_of(self, batch: StepBatch, seed: int, step: int) -> Callable[[int, Any, Any], Tensor]:
        if not self._concerns(batch):
            return super()._loss_of(batch, seed, step)
        task = self.task
        if isinstance(task, BatchLossTask):
            samples = [sample for micro_batch in batch.plan for sample in micro_batch.samples.tolist()]
            self.task = copy.copy(task)  # the samples stay there for the others to be compared with
            self.task.batch_losses = lambda *rows: self._masked(task.batch_losses(*rows), samples)  # type: ignore[method-assign]
            try:
                return super()._loss_of(batch, seed, step)
            finally:
                self.task = task

        def loss(index: int, outputs: Any, target: Any) -> Tensor:
            samples = batch.mine[index].samples.tolist()
            return self._masked(torch.stack(sample_losses(task, outputs, target, len(samples))), samples).sum()

        return loss

    def _masked(self, losses_B: Tensor, samples: list[int]) -> Tensor:
        is_kept_B = torch.tensor([sample not in self.left_out for sample in samples], device=losses_B.device)
        return losses_B.where(is_kept_B, torch.zeros_like(losses_B))

    def _concerns(self, batch: StepBatch) -> bool:
        return any(sample in self.left_out for micro_batch in batch.plan for sample in micro_batch.samples.tolist())


def look_inside(replayer: Replayer, batch: StepBatch, report: StepReport, pictures: int = 0) -> list[SampleRecord] | None:
    """Return what each sample of a step did, between its backward pass and the optimizer's step. Leaves no trace. Collective.

    It takes a pass over each micro-batch and a backward pass for each sample: about as long as 5 steps for 32 samples. In a
    loss that compares the samples of a step, the gradient of a sample is what flows through its own embeddings.

    Args:
        pictures: how many of the samples with the greatest loss get their picture.

    Returns:
        A record for each sample on the main process, in the order of the micro-batches; None elsewhere.

    Raises:
        ConfigError: the processes do not hold the whole model each.
        TrainingError: see ``sample_losses``.
    """
    strategy, task = whole_model(replayer), replayer.task
    parameters = [value for value in strategy.sharding.model.parameters() if value.grad is not None]
    records: list[SampleRecord] = []
    with leaving_no_trace(strategy.sharding.model):
        compared = None
        if isinstance(task, BatchLossTask):
            embeddings, labels = strategy.embed(task, batch, replayer.recipe.seed, replayer.step - 1)
            compared = step_losses(task, batch, embeddings, labels, strategy.sum)
        for index, (micro_batch, weight) in enumerate(zip(batch.mine, batch.weights, strict=True)):
            if not weight:
                continue
            outputs, inputs = strategy.compute_again(batch, index, replayer.recipe.seed, replayer.step - 1)
            target, samples = task.target(inputs), micro_batch.samples.tolist()
            if compared is None:
                losses = parts = sample_losses(task, outputs, target, len(samples))
            else:  # the gradient of a sample is what flows through its embeddings
                of_batch, gradient = (values[rows_of(batch, index)] for values in compared)
                losses, parts = [*of_batch], [*(task.embed(outputs, target) * gradient).flatten(1).sum(1)]
            found = []
            for row, sample in enumerate(samples):
                items = float(task.num_items(cut_row(target, row, len(samples))))
                found.append(SampleRecord(sample, micro_batch.index, items, losses[row].item()))
            _add_gradients(found, parts, parameters, report, strategy.exact)
            _add_answers(found, task, outputs, inputs, pictures)
            records += found
    gathered = strategy.gather_to_main(records)
    if gathered is None:
        return None
    loss = math.fsum(record.loss_sum for record in gathered)
    for place, record in enumerate(sorted(gathered, key=lambda record: -record.loss)):
        record.loss_share = record.loss_sum / loss if loss else math.nan
        record.picture = record.picture if place < pictures else None
    return sorted(gathered, key=lambda record: record.micro_batch)  # several processes had them


def batch_loss(replayer: Replayer, batch: StepBatch, step: int) -> float:
    """Return the mean loss of a batch at the present weights, with the dropout of its own step. Leaves no trace. Collective."""
    strategy, task = whole_model(replayer), replayer.task
    own = torch.zeros(3, dtype=strategy.exact, device=strategy.device)
    own[1] = batch.counts[0]
    with leaving_no_trace(strategy.sharding.model), torch.no_grad():
        balance = strategy.balance(batch, replayer.recipe.seed, step - 1)
        if isinstance(task, BatchLossTask):
            embeddings, labels = strategy.embed(task, batch, replayer.recipe.seed, step - 1)
            losses_B, _ = step_losses(task, batch, embeddings, labels, strategy.sum)
            own[0] = losses_B.sum() if strategy.is_main else 0.0
        else:
            for index, weight in enumerate(batch.weights):
                outputs, inputs = strategy.compute_again(batch, index, replayer.recipe.seed, step - 1)
                own[0] += weight * task.loss(outputs, task.target(inputs))
                own[2] += 0 if balance is None else weight * balance(outputs, inputs)
    loss, items, experts = strategy.sum(own).tolist()
    return loss / items + experts


def can_look_inside(strategy: Strategy) -> bool:
    """Say whether single samples can be looked at: not under FSDP, nor with a teacher, whose part is in no ``task.loss``."""
    return isinstance(strategy, DataParallel) and type(strategy.sharding) is Sharding and strategy.teacher is None


def whole_model(replayer: Replayer) -> DataParallel:
    """Return the strategy of a replay, or raise ConfigError unless each process holds the whole model."""
    if can_look_inside(replayer.strategy):
        return replayer.strategy  # type: ignore[return-value]
    if replayer.strategy.teacher is not None:
        raise ConfigError("The samples of a step cannot be looked at with train.teacher, which their own losses leave out.")
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


def _add_gradients(
    records: Sequence[SampleRecord],
    parts: Sequence[Tensor],
    parameters: Sequence[nn.Parameter],
    report: StepReport,
    exact: torch.dtype,
) -> None:
    """Add the norm of each sample's gradient, that of its scalar in ``parts``, and its share of that of the step.

    The step's gradient may have been clipped since ``report``: then the direction is the same.
    """
    clipped = math.sqrt(sum(float(value.grad.to(exact).square().sum()) for value in parameters))
    for place, (record, part) in enumerate(zip(records, parts, strict=True)):
        own = torch.autograd.grad(part, parameters, retain_graph=place < len(parts) - 1, allow_unused=True)
        pairs = [(one.to(exact), value.grad.to(exact)) for one, value in zip(own, parameters, strict=True) if one is not None]
        sums = torch.stack([torch.stack([(one * one).sum(), (one * whole).sum()]) for one, whole in pairs]).sum(0)
        square, product = sums.tolist()
        record.grad_norm = math.sqrt(square) / report.num_items
        if clipped and report.grad_norm:
            record.gradient_share = product / (report.num_items * clipped * report.grad_norm)


@torch.no_grad()
def _add_answers(records: Sequence[SampleRecord], task: Task, outputs: Any, inputs: Mapping[str, Any], pictures: int) -> None:
    """Add label and prediction, and the pictures of those with the greatest loss, of tasks that need no model for them."""
    if task.scored_head or isinstance(task, BatchLossTask):  # texts, and embeddings
        return
    outputs = tree_map(lambda value: value.detach() if isinstance(value, Tensor) else value, outputs)
    loaded = {name: value for name, value in inputs.items() if name != PACKING}
    labels, is_mixed = loaded.get("labels"), getattr(task, "mixup", 0) or getattr(task, "cutmix", 0)
    # Mixed images have shares of the classes for labels: the greatest one counts.
    one_label = (
        {**loaded, "labels": labels.argmax(-1)} if is_mixed and isinstance(labels, Tensor) and labels.ndim == 2 else loaded
    )
    worst = sorted(range(len(records)), key=lambda row: -records[row].loss)[:pictures]

    def shown(name: str, batch: Mapping[str, Any], *arguments: Any) -> list[Any]:
        try:
            return ask(task, name, [], outputs, absent_model(lambda: None), batch, *arguments)
        except ModelNeeded:
            return []

    for record, answer in zip(records, shown("predictions", one_label), strict=False):
        if {"label", "prediction"} <= {*answer}:
            record.answer = {name: answer[name] for name in ("label", "prediction")}
    for row, image in zip(worst, shown("sample_images", loaded, worst), strict=False):
        records[row].picture = image

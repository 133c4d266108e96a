"""Checks before training that a user's task sums its losses and counts its items. Independent of processes and steps.

``task.loss`` must be a sum over the items that ``task.num_items`` counts. A mean, which is what most code computes, would
train with a wrong scale, and no number would look wrong.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from hftune.errors import ConfigError, first_line
from hftune.models.trial import trying
from hftune.task import BatchLossTask, Task

EXACT = 1e-3
"""Largest relative difference between the loss of two samples and the sum of theirs, in float32."""
ROUGH = 0.3
"""The same if padding is involved, which some models see; a mean is off by a half."""
LOW_PRECISION = 0.05
"""The same for weights in bfloat16 or float16."""
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
CANNOT = (RuntimeError, ValueError, TypeError, AssertionError, ImportError, LookupError, AttributeError)
"""What code of others raises if it cannot do what is asked here, although it may be able to train."""


class BatchLoss(NamedTuple):
    """A task's loss of one batch."""

    loss: float
    shapes: list[tuple[int, ...]]
    """Of a single sample in each of the batch's tensors."""


def check_sums(task: Task, model: nn.Module, dataset: Any, lengths: np.ndarray | None) -> list[str]:
    """Compare items and loss of samples together with those of the same samples alone: the loss in evaluation mode on the CPU.

    Skipped for hftune's own tasks; the loss also where it compares samples with each other. What cannot be compared, such as
    the loss of a model that is random in evaluation mode, gets a notice.

    Returns:
        Notices for the user.

    Raises:
        ConfigError: the loss is not a sum, or ``num_items`` does not count what it sums over.
    """
    if type(task).__module__.startswith("hftune."):
        return []
    if len(dataset) < 2:
        return not_checked(task, "there is only one training sample")
    order = np.arange(len(dataset)) if lengths is None else np.argsort(lengths, kind="stable")
    said = check_items(task, dataset, sorted({int(order[place * (len(order) - 1) // 7]) for place in range(8)}))
    if isinstance(task, BatchLossTask):
        return said
    indices = order[len(order) // 4 :][:2].tolist()  # rather short ones, which take little time
    shortest = int(order[0])
    lists = [indices, indices, indices[:1], indices[1:], [shortest, indices[0]], [shortest]]
    try:
        together, again, first, second, beside, short = compute(
            task, model, [task.collate([dataset[index] for index in some]) for some in lists]
        )
    except CANNOT as error:
        # Such as a kernel that only GPUs have; a real mistake will be reported when training meets it.
        return said + not_checked(
            task, f"one or two samples cannot be computed on the CPU in evaluation mode ({first_line(error)})"
        )
    if not np.isfinite([together.loss, first.loss, second.loss]).all():
        return said + not_checked(task, f"it is not finite for samples {indices[0]} and {indices[1]}")
    if together.loss != again.loss:
        return said + not_checked(task, "it differs between two passes over the same samples in evaluation mode")
    check_loss(task, model, indices, together, [first, second])
    return said + padding_notices(task, model, [shortest, indices[0]], beside, [short, first])


def not_checked(task: Task, reason: str) -> list[str]:
    """Return the notice that nobody has made sure of the sum."""
    return [f"{type(task).__name__}.loss was not checked, because {reason}. Make sure that it returns a sum over the items."]


def compute(task: Task, model: nn.Module, batches: list[dict[str, Tensor]]) -> list[BatchLoss]:
    """Return the loss of each batch; model and random generators stay as they are."""
    results = []
    with trying(model):
        for batch in batches:
            loss = float(task.loss(model(**task.inputs(batch)), task.target(batch)))
            shapes = [tuple(value.shape[1:]) for value in batch.values() if isinstance(value, Tensor)]
            results.append(BatchLoss(loss, shapes))
    return results


def needs_two_samples(task: Task, model: nn.Module, dataset: Any) -> bool:
    """Return whether a model cannot train on one sample, as BatchNorm cannot where it has one value per channel."""
    if not any(isinstance(module, BATCH_NORMS) for module in model.modules()):
        return False
    try:
        with trying(model, training=True):
            model(**task.inputs(task.collate([dataset[0]])))
    except CANNOT as error:
        return "more than 1 value per channel" in str(error)
    return False


def check_loss(task: Task, model: nn.Module, indices: list[int], together: BatchLoss, alone: list[BatchLoss]) -> None:
    """Raise ConfigError if the loss is not a sum over samples."""
    added, scale, tolerance = compared(model, alone)
    is_padded = any(one.shapes != together.shapes for one in alone)
    if abs(together.loss - added) <= max(ROUGH if is_padded else EXACT, tolerance) * scale + 1e-6:
        return
    low, high = sorted(one.loss for one in alone)
    slack = EXACT * scale
    what = "a mean" if low - slack <= together.loss <= high + slack else "not a sum over the samples"
    raise ConfigError(
        f"{type(task).__name__}.loss returns {what}, but must return a sum: samples {indices[0]} and {indices[1]} have "
        f"{alone[0].loss:.6g} and {alone[1].loss:.6g} alone, which add up to {added:.6g}, and {together.loss:.6g} together. "
        'Write reduction="sum", as in cross_entropy(outputs, target, reduction="sum"); hftune divides by the number of items.'
    )


def compared(model: nn.Module, alone: list[BatchLoss]) -> tuple[float, float, float]:
    """Return what two losses add up to, what a difference is relative to, and how large it may be without padding."""
    is_low = any(value.dtype in (torch.bfloat16, torch.float16) for value in model.parameters())
    losses = [one.loss for one in alone]
    return sum(losses), sum(map(abs, losses)), LOW_PRECISION if is_low else EXACT


def padding_notices(task: Task, model: nn.Module, indices: list[int], together: BatchLoss, alone: list[BatchLoss]) -> list[str]:
    """Say that the loss of a short sample changes beside a longer one. Some models see padding, so nothing is refused."""
    added, scale, tolerance = compared(model, alone)
    if abs(together.loss - added) <= tolerance * scale + 1e-6:
        return []
    return [
        f"{type(task).__name__}.loss depends on padding: samples {indices[0]} and {indices[1]} have {alone[0].loss:.6g} and "
        f"{alone[1].loss:.6g} alone, which add up to {added:.6g}, and {together.loss:.6g} together. So results depend on "
        "train.micro_batch_size. Mask padding in the model, and leave it out of the loss, as ignore_index=-100 does."
    ]


def check_items(task: Task, dataset: Any, indices: list[int]) -> list[str]:
    """Count the items of samples, of different lengths if they have any, together and alone; return notices.

    Raises:
        ConfigError: the numbers do not add up, or samples are counted instead of labels.
    """
    name, targets = type(task).__name__, []
    try:
        with torch.random.fork_rng(devices=[]):
            for some in (indices, indices, *([index] for index in indices)):
                targets.append(task.target(task.collate([dataset[index] for index in some])))
            together, again, *alone = [float(task.num_items(target)) for target in targets]
    except ConfigError:
        raise
    except CANNOT as error:
        return [f"{name}.num_items was not checked, because samples cannot be collated one by one ({first_line(error)})."]
    if together != again:
        return [f"{name}.num_items was not checked: it differs for the same samples, as collate draws random numbers."]
    if abs(together - sum(alone)) > EXACT * max(sum(map(abs, alone)), 1e-9):
        raise ConfigError(
            f"{name}.num_items must add up over samples: it returns {', '.join(f'{count:g}' for count in alone)} for samples "
            f"{', '.join(map(str, indices))} alone, {sum(alone):g} in all, and {together:g} for all of them together. Count "
            "what loss sums over, and no padding: def num_items(self, target): return int((target != -100).sum())."
        )
    target = targets[0]
    if type(task).num_items is not Task.num_items or target.numel() == len(target) or isinstance(task, BatchLossTask):
        return []
    shape = tuple(target.shape)
    if not target.is_floating_point() and target.dtype != torch.bool:
        raise ConfigError(
            f"{name} has no num_items of its own, so each sample counts as one item, but its target has several labels per "
            f"sample: {shape} for {len(indices)} samples. Count the labels: def num_items(self, target): return int((target != "
            "-100).sum()). If an item is meant to be a sample, say so: return len(target)."
        )
    return [
        f"{name} has no num_items of its own: each sample counts as one item, although its target has "
        f"{target.numel() // len(target):,} numbers per sample. If the loss is a sum over pixels or other numbers, count these "
        "in num_items."
    ]

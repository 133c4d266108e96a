"""Checks before training that a user's task sums its losses and counts its items. Independent of processes and steps.

``task.loss`` must be a sum over the items that ``task.num_items`` counts. A mean, which is what most code computes, would
train with a wrong scale, and no number would look wrong.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from hftune.errors import ConfigError
from hftune.strategies.statistics import restored_buffers
from hftune.task import BatchLossTask, Task

EXACT = 1e-3
"""Largest relative difference between the loss of two samples and the sum of theirs, in float32."""
ROUGH = 0.3
"""The same if padding is involved, which some models see; a mean is off by a half."""
LOW_PRECISION = 0.05
"""The same for weights in bfloat16 or float16."""


class BatchLoss(NamedTuple):
    """A task's loss and items of one batch."""

    loss: float
    num_items: float
    shapes: list[tuple[int, ...]]
    """Of a single sample in each of the batch's tensors."""
    target: Any


def check_sums(task: Task, model: nn.Module, dataset: Any, lengths: np.ndarray | None) -> list[str]:
    """Compare the loss of two samples together with their losses alone, in evaluation mode on the CPU.

    Skipped for hftune's own tasks, and for losses that compare samples with each other. Models that cannot run like this, or
    are random in evaluation mode, get a notice.

    Returns:
        Notices for the user.

    Raises:
        ConfigError: the loss is not a sum, or ``num_items`` does not count what it sums over.
    """
    if type(task).__module__.startswith("hftune.") or isinstance(task, BatchLossTask):
        return []
    if len(dataset) < 2:
        return not_checked(task, "there is only one training sample")
    order = np.arange(len(dataset)) if lengths is None else np.argsort(lengths, kind="stable")
    indices = order[len(order) // 4 :][:2].tolist()  # rather short ones, which take little time
    try:
        samples = [dataset[index] for index in indices]
        batches = [task.collate(some) for some in (samples, samples, samples[:1], samples[1:])]
        together, again, *alone = compute(task, model, batches)
    except (RuntimeError, ValueError, TypeError, AssertionError, ImportError, LookupError, AttributeError) as error:
        # Such as a kernel that only GPUs have; a real mistake will be reported when training meets it.
        reason = f"{type(error).__name__}: {error}".partition("\n")[0].rstrip(".: ")
        return not_checked(task, f"one or two samples cannot be computed on the CPU in evaluation mode ({reason})")
    if not np.isfinite([together.loss, *(one.loss for one in alone)]).all():
        return not_checked(task, f"it is not finite for samples {indices[0]} and {indices[1]}")
    if together.loss != again.loss:
        return not_checked(task, "it differs between two passes over the same samples in evaluation mode")
    check_loss(task, model, indices, together, alone)
    return check_items(task, indices, together, alone)


def not_checked(task: Task, reason: str) -> list[str]:
    """Return the notice that nobody has made sure of the sum."""
    return [f"{type(task).__name__}.loss was not checked, because {reason}. Make sure that it returns a sum over the items."]


def compute(task: Task, model: nn.Module, batches: list[dict[str, Tensor]]) -> list[BatchLoss]:
    """Return loss and items of each batch; model and random generators stay as they are."""
    results, modes = [], {module: module.training for module in model.modules()}
    with torch.no_grad(), torch.random.fork_rng(devices=[]), restored_buffers(model), torch.compiler.set_stance("force_eager"):
        model.eval()
        try:
            for batch in batches:
                target = task.target(batch)
                loss = float(task.loss(model(**task.inputs(batch)), target))
                shapes = [tuple(value.shape[1:]) for value in batch.values() if isinstance(value, Tensor)]
                results.append(BatchLoss(loss, float(task.num_items(target)), shapes, target))
        finally:
            for module, mode in modes.items():
                module.training = mode
    return results


def check_loss(task: Task, model: nn.Module, indices: list[int], together: BatchLoss, alone: list[BatchLoss]) -> None:
    """Raise ConfigError if the loss is not a sum over samples."""
    added = sum(one.loss for one in alone)
    scale = sum(abs(one.loss) for one in alone)
    is_padded = any(one.shapes != together.shapes for one in alone)
    is_low = any(value.dtype in (torch.bfloat16, torch.float16) for value in model.parameters())
    if abs(together.loss - added) <= max(ROUGH if is_padded else EXACT, LOW_PRECISION if is_low else 0) * scale + 1e-6:
        return
    low, high = sorted(one.loss for one in alone)
    slack = EXACT * scale
    what = "a mean" if low - slack <= together.loss <= high + slack else "not a sum over the samples"
    raise ConfigError(
        f"{type(task).__name__}.loss returns {what}, but must return a sum: samples {indices[0]} and {indices[1]} have "
        f"{alone[0].loss:.6g} and {alone[1].loss:.6g} alone, which add up to {added:.6g}, and {together.loss:.6g} together. "
        'Write reduction="sum", as in cross_entropy(outputs, target, reduction="sum"); hftune divides by the number of items.'
    )


def check_items(task: Task, indices: list[int], together: BatchLoss, alone: list[BatchLoss]) -> list[str]:
    """Raise ConfigError for numbers of items that do not add up, or samples counted instead of labels; return notices."""
    name, counts = type(task).__name__, [one.num_items for one in alone]
    if (
        abs(together.num_items - sum(counts)) > EXACT * max(sum(map(abs, counts)), 1e-9)
        and together.shapes == alone[0].shapes == alone[1].shapes
    ):
        raise ConfigError(
            f"{name}.num_items must add up over samples: it returns {counts[0]:g} and {counts[1]:g} for samples {indices[0]} "
            f"and {indices[1]} alone, and {together.num_items:g} for both together. Count what loss sums over."
        )
    target = together.target
    if type(task).num_items is not Task.num_items or not isinstance(target, Tensor) or target.numel() == len(target):
        return []
    shape = tuple(target.shape)
    if not target.is_floating_point() and target.dtype != torch.bool:
        raise ConfigError(
            f"{name} has no num_items of its own, so each sample counts as one item, but its target has several labels per "
            f"sample: {shape} for 2 samples. Count the labels: def num_items(self, target): return int((target != "
            "-100).sum()). If an item is meant to be a sample, say so: return len(target)."
        )
    return [
        f"{name} has no num_items of its own: each sample counts as one item, although its target has "
        f"{target.numel() // len(target):,} numbers per sample. If the loss is a sum over pixels or other numbers, count these "
        "in num_items."
    ]

"""Checks before training that a user's task sums its losses and counts its items. Independent of processes and steps.

``task.loss`` must be a sum over the items that ``task.num_items`` counts. A mean, which is what most code computes, would
train with a wrong scale, and no number would look wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hftune.batch_plan import by_length
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


@dataclass(frozen=True)
class Pair:
    """The losses of two samples, each alone and both together."""

    indices: list[int]
    alone: tuple[float, float]
    together: float

    def is_sum(self, tolerance: float) -> bool:
        """Say whether both together are the sum, but for a relative difference."""
        return abs(self.together - sum(self.alone)) <= tolerance * sum(map(abs, self.alone)) + 1e-6

    def __str__(self) -> str:
        (one, other), (first, second) = self.indices, self.alone
        return (
            f"samples {one} and {other} have {first:.6g} and {second:.6g} alone, which add up to {first + second:.6g}, and "
            f"{self.together:.6g} together"
        )


def check_sums(task: Task, model: nn.Module, dataset: Any, lengths: Any) -> list[str]:
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
    name = type(task).__name__

    def not_checked(reason: str) -> list[str]:
        return [f"{name}.loss was not checked, because {reason}. Make sure that it returns a sum over the items."]

    if len(dataset) < 2:
        return not_checked("there is only one training sample")
    order = np.arange(len(dataset)) if lengths is None else by_length(lengths)
    said = check_items(task, dataset, sorted({int(order[place * (len(order) - 1) // 7]) for place in range(8)}))
    if isinstance(task, BatchLossTask):
        return said
    one, other = order[len(order) // 4 :][:2].tolist()  # rather short ones, which take little time
    shortest, losses, shapes = int(order[0]), [], []
    try:
        with trying(model):
            for some in ([one, other], [one, other], [one], [other], [shortest, one], [shortest]):
                batch = task.collate([dataset[index] for index in some])
                losses.append(float(task.loss(model(**task.inputs(batch)), task.target(batch))))
                shapes.append([tuple(value.shape[1:]) for value in batch.values() if isinstance(value, Tensor)])
    except CANNOT as error:
        # Such as a kernel that only GPUs have; a real mistake will be reported when training meets it.
        return said + not_checked(f"one or two samples cannot be computed on the CPU in evaluation mode ({first_line(error)})")
    together, again, first, second, beside, short = losses
    if not np.isfinite([together, first, second]).all():
        return said + not_checked(f"it is not finite for samples {one} and {other}")
    if together != again:
        return said + not_checked("it differs between two passes over the same samples in evaluation mode")
    is_low = any(value.dtype in (torch.bfloat16, torch.float16) for value in model.parameters())
    tolerance = LOW_PRECISION if is_low else EXACT
    pair, is_padded = Pair([one, other], (first, second), together), not shapes[0] == shapes[2] == shapes[3]
    if not pair.is_sum(tolerance) and not (is_padded and pair.is_sum(ROUGH)):
        slack = EXACT * sum(map(abs, pair.alone))
        is_mean = min(pair.alone) - slack <= together <= max(pair.alone) + slack
        raise ConfigError(
            f"{name}.loss returns {'a mean' if is_mean else 'not a sum over the samples'}, but must return a sum: {pair}. "
            'Write reduction="sum", as in cross_entropy(outputs, target, reduction="sum"); hftune divides by the number of '
            "items."
        )
    pair = Pair([shortest, one], (short, first), beside)
    if pair.is_sum(tolerance):
        return said
    # Some models see padding, so nothing is refused.
    return [
        *said,
        f"{name}.loss depends on padding: {pair}. So results depend on train.micro_batch_size. Mask padding in "
        "the model, and leave it out of the loss, as ignore_index=-100 does.",
    ]


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

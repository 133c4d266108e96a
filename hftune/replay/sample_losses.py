"""The loss of each sample of a micro-batch that was computed as a whole. Knows neither runs nor processes."""

# Shapes: B samples of a micro-batch.

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from hftune.errors import TrainingError
from hftune.task import BatchLossTask, Task

EXACT = 1e-5
"""Largest difference between a micro-batch's loss and the sum of its samples' losses, in units of that sum: float32 rounds."""


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
    elif (token_losses_BT := getattr(outputs, "losses", None)) is not None:  # of a head that computed them; without gradients
        losses = [*token_losses_BT.sum(1)]
    else:
        losses = [task.loss(*cut_row((outputs, target), row, num_rows)) for row in range(num_rows)]
    _check_sum(task, losses, outputs, target)
    return losses


def cut_row(values: Any, row: int, num_rows: int) -> Any:
    """Cut one row out of all tensors that have ``num_rows`` of them, and leave anything else as it is."""

    def cut(value: Any) -> Any:
        has_rows = isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == num_rows
        return value[row : row + 1] if has_rows else value

    return tree_map(cut, values)


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

"""The gradient of a loss that compares the samples of a step with each other, as of ``BatchLossTask``, in two passes.

No process could keep the graphs of all micro-batches at once, so the gradient is cached where they meet, at the embeddings:

1. ``DataParallel.embed``: each process computes the embeddings of its micro-batches without a graph.
2. ``cached_losses``: all processes exchange them, and each computes the step's loss and its gradient with respect to them.
3. ``DataParallel.backward`` computes each micro-batch again, with its graph, which continues from there.

Dropout is keyed by step and micro-batch, so the second pass draws what the first one drew, and the result is exactly the
gradient of the loss over the global batch, on any number of processes. A step of one micro-batch per process needs no second
pass: its graph is kept, as are those of micro-batches of one process that are together no more than one may be.

Source: Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup" (2021), known as GradCache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from hftune.strategies.base import StepBatch
from hftune.task import BatchLossTask

SumUp = Callable[[Tensor], Tensor]
"""Returns the sum of a tensor over the processes."""


class _Cached(torch.autograd.Function):
    """A loss that is known, with a gradient that is known."""

    @staticmethod
    def forward(ctx: Any, embeddings: Tensor, loss: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * scale, None, None


def cached_losses(
    task: BatchLossTask, batch: StepBatch, embeddings: Sequence[Tensor], labels: Sequence[Tensor], sum_up: SumUp
) -> Callable[[int, Tensor], Tensor]:
    """Exchange the embeddings of a step and differentiate its loss, the same on each process. Collective.

    Args:
        embeddings: of each micro-batch of this process, (B, ...), without a graph.
        labels: of each of them, as ``task.batch_labels`` returns them, (B, ...).

    Returns:
        A function of a micro-batch's index and its embeddings, with their graph, that returns its summed loss, whose gradient
        is the one of the whole step; of a dummy, zeros.
    """
    losses_B, gradient = step_losses(task, batch, embeddings, labels, sum_up)

    def loss_of(index: int, own: Tensor) -> Tensor:
        if (span := rows_of(batch, index)) is None:
            return _Cached.apply(own, losses_B.new_zeros(()), torch.zeros_like(own))
        return _Cached.apply(own, losses_B[span].sum(), gradient[span])

    return loss_of


def step_losses(
    task: BatchLossTask, batch: StepBatch, embeddings: Sequence[Tensor], labels: Sequence[Tensor], sum_up: SumUp
) -> tuple[Tensor, Tensor]:
    """Return the loss of each sample of a step, (B,), and the gradient of their sum with respect to all embeddings, (B, ...).

    In the plan's order, on each process. Arguments as for ``cached_losses``. Collective.
    """
    num_samples = sum(len(micro_batch.samples) for micro_batch in batch.plan)

    def exchanged(own: Sequence[Tensor]) -> Tensor:
        """Return what all processes have, in the plan's order: an exact sum, as only one process has each row."""
        everything = own[0].new_zeros(num_samples, *own[0].shape[1:])
        for index, values in enumerate(own):
            if (span := rows_of(batch, index)) is not None:
                everything[span] = values
        return sum_up(everything)

    everything, all_labels = exchanged(embeddings).requires_grad_(), exchanged(labels)
    with torch.enable_grad():
        losses_B = task.batch_losses(everything, all_labels)
        (gradient,) = torch.autograd.grad(losses_B.sum(), everything)
    return losses_B.detach(), gradient


def rows_of(batch: StepBatch, index: int) -> slice | None:
    """Return where the samples of this process's micro-batch are among those of the step, in its order; None: a dummy."""
    if not batch.weights[index]:
        return None
    place = batch.mine[index].index
    starts = [0, *accumulate(len(micro_batch.samples) for micro_batch in batch.plan)]
    return slice(starts[place], starts[place + 1])

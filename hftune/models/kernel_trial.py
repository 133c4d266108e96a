"""A trial of an attention kernel that may be missing, not compile, or compute something else on a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def problem_of(
    kernel: Attention, reference: Attention, shape: Sequence[int], device: torch.device, dtype: torch.dtype
) -> str | None:
    """Return why a kernel cannot replace another one, a part of a sentence; None if both compute the same, both ways.

    Draws no random numbers. May be called in the middle of a forward pass, whatever its modes, and leaves no trace there: a
    checkpoint counts the tensors that are saved for the backward pass, and would miss them when it computes again.

    Args:
        shape: of the queries, keys and values that are tried.
    """
    saved_here = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False), saved_here:
        count = torch.Size(shape).numel()
        wave = torch.arange(3 * count, device=device, dtype=torch.float32).mul(0.37).sin().to(dtype)
        q, k, v = (part.clone().requires_grad_() for part in wave.view(3, *shape))
        try:
            found = _both_ways(kernel, q, k, v)
        except Exception as error:  # compilers raise anything, and it only decides between two kernels
            return f"{type(error).__name__}: {first_line(error)}"
        expected = _both_ways(reference, q, k, v)
    tolerance = 0.05 if dtype.itemsize < 4 else 0.01  # of the largest value: a wrong token is far beyond
    if all(
        bool((one - other).abs().max() <= tolerance * other.abs().max()) for one, other in zip(found, expected, strict=True)
    ):
        return None
    return "it computes something else"


def _both_ways(attend: Attention, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    context = attend(q, k, v)
    weight = torch.linspace(-1, 1, context.numel(), device=q.device).sin().view(context.shape)
    return [context, *torch.autograd.grad(context, (q, k, v), weight.to(q.dtype))]


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, without its full stop."""
    return (str(error).strip().splitlines() or [""])[0].rstrip(".")

"""Dropout of our own on CPUs: the same bits on every vendor's, a third of the time, a quarter of the memory.

torch (2.13) draws CPU dropout one number after the other, on one core, unless Intel's MKL draws it, with different numbers. So
it takes a good part of a small step, and the same seed gives other masks on AMD than on Intel. And attention with dropout takes
torch's slowest path: the scores of all texts in memory at once, padding included.

Here each mask begins with a single draw from torch's generator, which hftune seeds by seed, step, micro-batch and layer, and
numpy's SFC64 expands it to 16 random bits an element. Gradient checkpointing restores torch's generator, and so the masks.
Other devices keep torch's own dropout.
"""

# Shapes: R texts of equal length, H heads, t tokens, d width of a head.

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.autograd.function import once_differentiable

LEVELS = 2**16
"""Values of the random numbers: a probability is rounded to a multiple of 1 / LEVELS."""


def threshold(p: float) -> int:
    """Return below which random number an element is dropped."""
    return round(p * LEVELS)


def scale_of(p: float) -> float:
    """Return what the elements that are kept are multiplied by: 1 / (share that is kept), the rounding of ``p`` included."""
    return LEVELS / (LEVELS - threshold(p))


def draw_mask(like: Tensor, p: float, part: tuple[int, int] | None = None) -> Tensor:
    """Draw a mask of a tensor's shape, uint8: 0 with probability ``p``, otherwise 1. Takes one number from torch's generator.

    Args:
        part: where in dimension 1 of a larger tensor this one begins, and how long that is; the mask is a part of that one's.

    Source of the generator: numpy.random.SFC64, whose stream is fixed across versions and platforms (NEP 19).
    """
    if isinstance(like, FakeTensor):  # a plan's, which has no values
        return like.new_empty(like.shape, dtype=torch.uint8)
    shape = list(like.shape)
    if part is not None:
        shape[1] = part[1]
    key, count = int(torch.randint(2**62, ())), math.prod(shape)
    numbers = np.random.SFC64(key).random_raw(-(-count // 4)).view(np.uint16)[:count]
    mask = torch.from_numpy((numbers >= threshold(p)).view(np.uint8)).view(shape)
    return mask if part is None else mask.narrow(1, part[0], like.shape[1]).contiguous()


def masked(x: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Return x * mask * scale. The mask gets the type of ``x`` first: torch multiplies unequal types 20 times as slowly."""
    return mask.to(x.dtype).mul_(scale).mul_(x)


class Dropout(nn.Dropout):
    """``nn.Dropout``, with the masks of ``draw_mask`` on CPUs."""

    context: Any = None
    """See ``hftune.strategies.context``."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or not 0 < threshold(self.p) < LEVELS:
            return super().forward(input)
        if self.context is not None and input.ndim == 2:  # tokens without the dimension of a batch
            return self.forward(input[None])[0]
        part = None if self.context is None else self.context.part(input.shape)
        if input.device.type == "cpu":
            return _Masked.apply(input, self.p, part)
        if part is None:
            return super().forward(input)
        whole = input.new_ones(input.shape[0], part[1], *input.shape[2:])
        return input * super().forward(whole).narrow(1, part[0], input.shape[1])


class _Masked(torch.autograd.Function):
    """x * mask * scale. Keeps the mask alone, a byte an element, for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, part: tuple[int, int] | None) -> Tensor:
        mask, ctx.scale = draw_mask(x, p, part), scale_of(p)
        ctx.save_for_backward(mask)
        return masked(x, mask, ctx.scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (mask,) = ctx.saved_tensors
        return masked(grad, mask, ctx.scale), None, None


def replace_dropout(model: nn.Module) -> None:
    """Replace a model's ``nn.Dropout`` modules in place. Subclasses, and calls of torch's functions, stay as they are."""
    for module in model.modules():
        if type(module) is nn.Dropout:
            module.__class__ = Dropout  # keeps its hooks, its place and everything that refers to it


def attention_with_dropout(
    query_RHtd: Tensor,
    key_RHtd: Tensor,
    value_RHtd: Tensor,
    p: float,
    scale: float,
    hidden: Tensor | None = None,
    heads: tuple[int, int] | None = None,
    bias_1Htt: Tensor | None = None,
) -> Tensor:
    """Return the attention (R, H, t, d) of texts of equal length, with dropout of the attention weights. CPUs only.

    A few texts at a time, so that their scores stay in a core's cache. Keys and values may be more than queries. It cannot be
    differentiated twice.

    Args:
        p: probability with which an attention weight is dropped, in [0, 1).
        scale: of the scores; usually 1 / sqrt(d).
        hidden: bool, (t, t) or of four dimensions that broadcast to (R, H, t, t); true where a token (row) must not see another
            one (column).
        heads: which one the first of these heads is, and of how many; the masks are a part of those of all heads.
        bias_1Htt: is added to the scores, and may need a gradient, for which torch's fused kernel has no place.
    """
    length, heads = query_RHtd.shape[2], heads or (0, query_RHtd.shape[1])
    count = max(1, AT_ONCE // (heads[1] * length * key_RHtd.shape[2]))
    parts = [[x] if len(x) <= count else x.split(count) for x in (query_RHtd, key_RHtd, value_RHtd)]
    is_own = hidden is not None and hidden.ndim == 4
    hiddens = hidden.split(count) if is_own and len(parts[0]) > 1 else [hidden] * len(parts[0])
    outputs = [
        _AttentionWithDropout.apply(*some, p, scale, own, heads, bias_1Htt) for *some, own in zip(*parts, hiddens, strict=True)
    ]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


AT_ONCE = 2**18
"""Attention scores that are computed at once: 1 MiB of float32."""


class _AttentionWithDropout(torch.autograd.Function):
    """softmax(scale * q k^T) with dropout, times v: (R, H, t, d). Inside, texts and heads are one dimension.

    Keeps the softmax and the mask, a byte a score. The gradient of the scores is P * (M c dP - sum(g * out)): P the softmax, M
    the mask, c its scale, g the gradient of the output, dP = g v^T. The sum over a row of P * M c dP is that of g * out. A bias
    gets the sum of that over the texts.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        p: float,
        scale: float,
        hidden: Tensor | None,
        heads: tuple[int, int],
        bias: Tensor | None,
    ) -> Tensor:
        given = query.shape[1]
        query, key, value = (x.flatten(0, 1) for x in (query, key, value))
        with torch.autocast("cpu", enabled=False):  # what arrives has its precision already
            scores = torch.bmm(query if scale == 1 else query * scale, key.transpose(1, 2))
            if bias is not None:
                scores.unflatten(0, (-1, given)).add_(bias)
            if hidden is not None:
                scores.unflatten(0, (-1, given)).masked_fill_(hidden, -torch.inf)
            kept = weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(scores.dtype)
            mask = None
            if p:
                mask = draw_mask(weights.unflatten(0, (-1, given)), p, heads).flatten(0, 1)
                kept = masked(weights, mask, scale_of(p))
            output = torch.bmm(kept, value)
        ctx.save_for_backward(query, key, value, weights, mask, output)
        ctx.scale, ctx.up, ctx.given, ctx.bias = scale, scale_of(p), given, None if bias is None else bias.dtype
        return output.unflatten(0, (-1, given))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, weights, mask, output = ctx.saved_tensors
        with torch.autocast("cpu", enabled=False):
            grad = grad.flatten(0, 1).contiguous()
            row_sums = (grad * output).sum(-1, keepdim=True)
            scores_grad = torch.bmm(grad, value.transpose(1, 2))
            if mask is None:
                value_grad = torch.bmm(weights.transpose(1, 2), grad)
                scores_grad.sub_(row_sums).mul_(weights)
            else:
                kept = masked(weights, mask, ctx.up)
                value_grad = torch.bmm(kept.transpose(1, 2), grad)
                scores_grad = kept.mul_(scores_grad).sub_(weights * row_sums)
            query_grad = torch.bmm(scores_grad, key).mul_(ctx.scale)
            key_grad = torch.bmm(scores_grad.transpose(1, 2), query).mul_(ctx.scale)
            bias_grad = None
            if ctx.needs_input_grad[-1]:
                bias_grad = scores_grad.unflatten(0, (-1, ctx.given)).sum(0, keepdim=True, dtype=ctx.bias)
        gradients = (x.unflatten(0, (-1, ctx.given)) for x in (query_grad, key_grad, value_grad))
        return *gradients, *[None] * 4, bias_grad

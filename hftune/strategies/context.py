"""The tokens of a micro-batch, spread over several processes. Independent of steps and data.

Between the first layer and the last one each process has its part of the row (1, N, C) that ``hftune.models.packing`` makes.
Attention needs all tokens, but its heads know nothing of each other: before it, each process gives its tokens of all heads for
all tokens of its heads, and after it the other way round. So it computes what one process computes, whatever kind it is.

Source: Jacobs et al., "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long Sequence Transformer
Models" (2023).
"""

# Shapes: B texts, T tokens of the longest, N real tokens of all, n of them here, H heads, h of them here, d width of a head.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, all_reduce, all_to_all_single

from hftune.errors import ConfigError
from hftune.models.dropout import Dropout
from hftune.models.scored_head import NO_TARGET

if TYPE_CHECKING:
    from hftune.models.packing import Packing


class Context:
    """The processes that compute micro-batches together, and what each of them has of the present one."""

    def __init__(self, group: ProcessGroup | None, rank: int, size: int):
        """Args:
        group: None: nothing is exchanged, in a plan.
        """
        self.group, self.rank, self.size = group, rank, size
        self.tokens: list[int] | None = None
        """Of each process, in order. None: each computes all."""
        self.gathers = False
        """Whether each process needs the hidden states of all tokens behind the last layer."""

    def watch(self, layers: Sequence[nn.Module]) -> None:
        """Let the dropout of a model's layers be that of one process."""
        for module in (module for layer in layers for module in layer.modules() if isinstance(module, Dropout)):
            module.context = self

    def split(self, packing: Packing, gathers: bool) -> Packing:
        """Return the packing of a micro-batch by which a model takes the tokens of this process.

        If there are fewer tokens than processes, it stays as it is: each of them computes all.
        """
        if len(packing.indices_N) < self.size:
            self.tokens = None
            return packing
        count, rest = divmod(len(packing.indices_N), self.size)
        self.tokens, self.gathers = [count + (rank < rest) for rank in range(self.size)], gathers
        return replace(packing, indices_N=packing.indices_N[self.start : self.start + self.tokens[self.rank]], context=self)

    @property
    def start(self) -> int:
        """Number of tokens that the processes before this one have."""
        return sum(self.tokens[: self.rank])

    def whole(self, hidden_BTC: Tensor) -> Tensor:
        """Return the hidden states of all tokens, on each process; given are zeros for those that it has not."""
        return _Sum.apply(hidden_BTC, self.group)

    def part(self, shape: torch.Size) -> tuple[int, int] | None:
        """Return at which of how many tokens (1, n, ...) begin, for ``draw_mask``; None: these are all.

        Raises:
            ConfigError: it is a tensor of something else than the tokens of this process.
        """
        if self.tokens is None:
            return None
        if len(shape) < 3 or shape[1] != self.tokens[self.rank]:
            raise ConfigError(
                f"parallel.context={self.size}: a layer draws dropout for a tensor {tuple(shape)}, which has no row for each "
                "token, so that it cannot be divided. Set its dropout to 0, or parallel.context=1."
            )
        return self.start, sum(self.tokens)

    def heads(self, count: int) -> tuple[int, int]:
        """Return the number of the first of this process's heads, and of all heads."""
        return self.rank * count, self.size * count

    def by_heads(self, tensors_1HnD: Sequence[Tensor]) -> list[Tensor]:
        """Give some tokens of all heads for all tokens of some heads: each (1, H, n, d) becomes (1, h, N, d)."""
        given_HnD = torch.cat([tensor[0] for tensor in tensors_1HnD], -1)
        heads, _, width = given_HnD.shape
        share = heads // self.size
        own = [share * self.tokens[self.rank] * width] * self.size
        sizes = [share * count * width for count in self.tokens]
        parts = _Exchange.apply(given_HnD.flatten(), own, sizes, self.group).split(sizes)
        found_hND = torch.cat([part.view(share, -1, width) for part in parts], 1)
        return [tensor[None] for tensor in found_hND.split([tensor.shape[-1] for tensor in tensors_1HnD], -1)]

    def by_tokens(self, outputs_1NhD: Tensor) -> Tensor:
        """Give all tokens of some heads for some tokens of all heads: (1, N, h, d) becomes (1, n, H, d)."""
        share, width = outputs_1NhD.shape[2:]
        own = [self.tokens[self.rank] * share * width] * self.size
        sizes = [count * share * width for count in self.tokens]
        parts = _Exchange.apply(outputs_1NhD.flatten(), sizes, own, self.group).split(own)
        return torch.cat([part.view(-1, share, width) for part in parts], 1)[None]

    def own_targets(self, targets_BT: Tensor, packing: Packing) -> Tensor:
        """Return the targets of a micro-batch's tokens, without those of tokens that other processes have."""
        own = torch.full_like(targets_BT, NO_TARGET).flatten()
        return own.index_copy(0, packing.indices_N, targets_BT.flatten()[packing.indices_N]).view_as(targets_BT)

    def __deepcopy__(self, memo: Any) -> Context:
        return self  # of a copied model's dropout, too


class _Sum(torch.autograd.Function):
    """The sum over a group, of the gradient as well: of what each process computes from it, this is a part of the loss."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, group: ProcessGroup | None) -> Tensor:
        ctx.group, found = group, given.clone(memory_format=torch.contiguous_format)
        if group is not None:
            all_reduce(found, group=group)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Sum.apply(gradient, ctx.group), None


class _Exchange(torch.autograd.Function):
    """``all_to_all_single`` of a vector: the elements that each process gives, and gets, in the order of the processes."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, given_sizes: list[int], sizes: list[int], group: ProcessGroup | None) -> Tensor:
        ctx.options = sizes, given_sizes, group
        found = given.new_empty(sum(sizes))
        if group is not None:
            all_to_all_single(found, given, sizes, given_sizes, group)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _Exchange.apply(gradient.contiguous(), *ctx.options), None, None, None

"""Attention of a prefix LM without a T x T mask: sources among themselves, then titles over their source and themselves.

Both parts together are the function of the mask of ``hftune.models.bigbird.prefix_mask``: the first needs no mask, and the
second is causal, aligned at the bottom right. Padding is left out.
"""

# Shapes: B rows, T tokens of a padded row, N real tokens of all rows, H heads, d width of a head, C width of the model. R
# neighbouring rows with s source and t title tokens each.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor, nn

from hftune.models.packing import Packing, attention, varlen_attention
from hftune.models.trial import kernel_problem


@dataclass(frozen=True)
class Prefix:
    """Lengths of sources and titles. The real tokens of all rows are in one, row by row, each source before its title."""

    packing: Packing
    sources: Packing
    titles: Packing
    """Where those of each row are among the real tokens."""
    packs_layers: bool
    """Whether the layers compute the real tokens (1, N, C) of all rows only, or padded rows."""
    is_asked_for: bool = False
    """Whether the caller passed ``packing``, and not the model alone decided."""

    @classmethod
    def of(cls, is_title_BT: Tensor, valid_BT: Tensor, packs_layers: bool, is_asked_for: bool = False) -> Prefix:
        """Read which tokens are real, and which of them are the title's. Waits for the device, once."""

        def ranges(first: Sequence[int], lengths: Sequence[int]) -> Tensor:
            """Return first, first + 1, ... of each row, ``lengths`` of them, one after the other."""
            spans = zip(first, lengths, strict=True)
            return torch.cat([torch.arange(start, start + length) for start, length in spans]).to(device)

        kinds_BT = torch.where(valid_BT, is_title_BT.long(), 2)
        sources, titles = ((kinds_BT == kind).sum(1) for kind in (0, 1))
        counts = torch.stack([sources, titles]).tolist()
        totals = [source + title for source, title in zip(*counts, strict=True)]
        (B, T), device = valid_BT.shape, valid_BT.device
        sorted_BT = kinds_BT.argsort(dim=1, stable=True) + T * torch.arange(B, device=device)[:, None]
        real_N = sorted_BT.flatten()[ranges(range(0, B * T, T), totals)]
        first = [0, *accumulate(totals)][:-1]
        behind = [start + count for start, count in zip(first, counts[0], strict=True)]
        sources_at, titles_at = (
            Packing.at((1, len(real_N)), ranges(starts, lengths), lengths)
            for starts, lengths in ((first, counts[0]), (behind, counts[1]))
        )
        return cls(Packing.at((B, T), real_N, totals), sources_at, titles_at, packs_layers, is_asked_for)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Prefix:
        """Return it on a device."""
        return self._changed(lambda packing: packing.to(device, non_blocking))

    def pin_memory(self) -> Prefix:
        """Return it in memory that a GPU can copy from while the host goes on; torch's DataLoader calls it."""
        return self._changed(Packing.pin_memory)

    def _changed(self, change: Callable[[Packing], Packing]) -> Prefix:
        return replace(self, packing=change(self.packing), sources=change(self.sources), titles=change(self.titles))

    @cached_property
    def runs(self) -> list[tuple[int, int, int]]:
        """Neighbouring rows of equal lengths: how many, and their two lengths."""
        rows = groupby(zip(self.sources.lengths, self.titles.lengths, strict=True))
        return [(len([*group]), source, title) for (source, title), group in rows]

    @cached_property
    def order(self) -> Tensor:
        """Index of each real token among those of all sources, then all titles."""
        return torch.cat([self.sources.indices_N, self.titles.indices_N]).argsort()

    @torch.compiler.disable  # the lengths differ from batch to batch
    def attend(self, query: Tensor, key: Tensor, value: Tensor, dropout: float, scale: float) -> Tensor:
        """Return the context (1, N, H, d) of queries, keys and values (1, H, N, d); or (B, T, H, d) of (B, H, T, d)."""
        qkv = (query, key, value)
        if not self.packs_layers:
            qkv = tuple(self.packing.pack(x_BHTd.transpose(1, 2)).transpose(1, 2) for x_BHTd in qkv)
        if query.is_cuda and is_right(varlen_attention, query.device, query.dtype, query.shape[-1]):
            context = self.attend_in_two(varlen_attention, *qkv, dropout, scale)
        else:
            context = self.attend_by_rows(*qkv, dropout, scale)
        return context if self.packs_layers else self.packing.unpack(context)

    def attend_in_two(
        self, kernel: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, dropout: float, scale: float
    ) -> Tensor:
        """Call a kernel for texts of unequal length twice, for all sources and for all titles."""
        q_NHd, k_NHd, v_NHd = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
        of_sources = (x_NHd.index_select(0, self.sources.indices_N) for x_NHd in (q_NHd, k_NHd, v_NHd))
        parts = []
        if self.sources.longest:
            parts.append(kernel(*of_sources, self.sources, self.sources, False, dropout, scale))
        if self.titles.longest:
            q_title = q_NHd.index_select(0, self.titles.indices_N)
            parts.append(kernel(q_title, k_NHd, v_NHd, self.titles, self.packing, True, dropout, scale))
        return torch.cat(parts).index_select(0, self.order)[None]

    def attend_by_rows(self, query: Tensor, key: Tensor, value: Tensor, dropout: float, scale: float) -> Tensor:
        """Call torch's fused kernel for each run of rows of equal lengths."""
        contexts = []
        sizes = [count * (source + title) for count, source, title in self.runs]
        runs = (x_1HNd.squeeze(0).split(sizes, 1) for x_1HNd in (query, key, value))
        for (count, source, title), *qkv in zip(self.runs, *runs, strict=True):
            q, k, v = (x.unflatten(1, (count, -1)).transpose(0, 1) for x in qkv)
            parts = []
            if source:
                parts.append(attention(q[:, :, :source], k[:, :, :source], v[:, :, :source], None, False, dropout, scale))
            if title:
                seen = torch.ones(title, source + title, dtype=torch.bool, device=q.device).tril(source) if title > 1 else None
                parts.append(attention(q[:, :, source:], k, v, seen, False, dropout, scale))
            contexts += [torch.cat(parts, 2).transpose(1, 2).flatten(0, 1)] if parts else []
        return torch.cat(contexts)[None]


@cache
@torch.inference_mode(False)  # its tensors are saved for the backward pass
def is_right(kernel: Callable[..., Tensor], device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Return whether a kernel is right for heads of ``width`` on an example, forward and backward: it may align otherwise."""
    kinds_BT = torch.tensor([[0] * 9 + [1] * 4 + [2] * 3, [2] * 2 + [0] * 5 + [1] * 9, [0] * 16], device=device)
    prefix = Prefix.of(kinds_BT == 1, kinds_BT < 2, packs_layers=True)
    scale, shape = width**-0.5, (1, 2, len(prefix.packing.indices_N), width)
    problem = kernel_problem(
        lambda q, k, v: prefix.attend_in_two(kernel, q, k, v, 0.0, scale),
        lambda q, k, v: prefix.attend_by_rows(q, k, v, 0.0, scale),
        shape,
        device,
        dtype,
    )
    return problem is None


def pack_layers(encoder: nn.Module) -> None:
    """Let a stack of layers, which is given ``prefix``, compute real tokens only if ``prefix.packs_layers``."""

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if (prefix := kwargs.get("prefix")) is not None and prefix.packs_layers:
            return (prefix.packing.pack(args[0]), *args[1:]), kwargs
        return None

    def leave(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if (prefix := kwargs.get("prefix")) is not None and prefix.packs_layers:
            output.last_hidden_state = prefix.packing.unpack(output.last_hidden_state)

    encoder.register_forward_pre_hook(enter, with_kwargs=True)
    encoder.register_forward_hook(leave, with_kwargs=True)

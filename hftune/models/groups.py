"""Texts of similar length, whose attention is computed together on CPUs.

A call of attention for each length takes longer than the arithmetic of short texts, and so do gradients of slices: each fills a
row of zeros as long as all texts. So tokens are moved into groups at once, and back at once.
"""

# Shapes: N tokens of all texts, H heads, d width of a head, R texts of a group, T tokens of its longest, P tokens of all groups

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

SPARE = 2**13
"""Attention scores of all heads that take as long as another group, if dropout is our own. Without dropout, a mask that hides
padding takes longer than further groups. Both were measured."""


@dataclass(frozen=True)
class Groups:
    """Where the tokens of a packed row are in groups, each text padded at its end to the longest of its group."""

    shapes: list[tuple[int, int]]
    """R and T of each group."""
    real: list[np.ndarray | None]
    """Which tokens are real, (R, 1, 1, T); None: all are."""
    at_P: np.ndarray | None = None
    """Which of the N tokens each of the P is, another one of its text where it is padding. None: the row is its groups."""
    back_N: np.ndarray | None = None
    """Where each of the N tokens is among the P."""
    padding: np.ndarray | Sequence[int] = ()
    """Which of the P are padding."""

    @classmethod
    def at(cls, lengths: tuple[int, ...], groups: Sequence[Sequence[int]]) -> Groups:
        """Find the tokens of groups of texts, which have all tokens."""
        counts = np.array(lengths)
        shapes = [(len(group), int(counts[group].max())) for group in groups]
        order = [text for group in groups for text in group]
        if sum(R * T for R, T in shapes) == counts.sum() and order == sorted(order):
            return cls(shapes, [None] * len(shapes))
        starts = counts.cumsum() - counts
        inner = [np.arange(T)[None] for _, T in shapes]
        at_P = np.concatenate(
            [
                (starts[group, None] + np.minimum(places, counts[group, None] - 1)).ravel()
                for group, places in zip(groups, inner, strict=True)
            ]
        )
        is_real = [places < counts[group, None] for group, places in zip(groups, inner, strict=True)]
        real_P = np.concatenate([some.ravel() for some in is_real])
        back_N = np.empty(counts.sum(), np.int64)
        back_N[at_P[real_P]] = real_P.nonzero()[0]
        return cls(
            shapes, [None if some.all() else some[:, None, None] for some in is_real], at_P, back_N, (~real_P).nonzero()[0]
        )

    def pad(self, x_1HNd: Tensor, blank: bool = False) -> list[Tensor]:
        """Return the tokens of each group, (R, H, T, d); ``blank``: zeros for padding. Without gradient."""
        x_PHd = x_1HNd.squeeze(0).transpose(0, 1)
        if self.at_P is not None:
            x_PHd = x_PHd.index_select(0, torch.as_tensor(self.at_P, device=x_PHd.device))
            if blank and len(self.padding):
                x_PHd.index_fill_(0, torch.as_tensor(self.padding, device=x_PHd.device), 0)
        return self._split(x_PHd)

    def _split(self, x_PHd: Tensor) -> list[Tensor]:
        groups = x_PHd.split([R * T for R, T in self.shapes])
        return [x_RTHd.unflatten(0, shape).transpose(1, 2) for x_RTHd, shape in zip(groups, self.shapes, strict=True)]

    def unpad(self, groups: Sequence[Tensor]) -> Tensor:
        """Return the tokens of all groups, (N, H, d). Without gradient."""
        _, H, _, d = groups[0].shape
        x_PHd = groups[0].new_empty(sum(R * T for R, T in self.shapes), H, d)
        for part_RHTd, x_RHTd in zip(self._split(x_PHd), groups, strict=True):
            part_RHTd.copy_(x_RHTd)
        if self.back_N is not None:
            x_PHd = x_PHd.index_select(0, torch.as_tensor(self.back_N, device=x_PHd.device))
        return x_PHd


@lru_cache(maxsize=8)  # all layers ask for the same
def group_texts(queries: tuple[int, ...], keys: tuple[int, ...], spare: int) -> tuple[Groups, Groups]:
    """Group texts by their lengths, so that padding adds at most ``spare`` attention scores to each head of a group.

    Args:
        queries: tokens of each text; one that has none is in no group.
        keys: tokens that they see, such as those of its source.

    Returns:
        Where the queries are, and where the keys are.
    """
    groups, real, widest = list[list[int]](), 0, (0, 0)
    for text in np.lexsort((queries, keys)).tolist():
        own = queries[text], keys[text]
        if not own[0]:
            continue
        wider = max(widest[0], own[0]), max(widest[1], own[1])
        if not groups or (len(groups[-1]) + 1) * math.prod(wider) - real - math.prod(own) > spare:
            groups.append([])
            real, wider = 0, own
        groups[-1].append(text)
        real, widest = real + math.prod(own), wider
    found = Groups.at(queries, groups)
    return found, found if keys == queries else Groups.at(keys, groups)


class IntoGroups(torch.autograd.Function):
    """Moves the tokens of some rows (1, H, N, d), such as queries and keys, into their groups: (R, H, T, d) each.

    A single operation, as is the way back: autograd takes as long for each one as such short texts take to compute. And torch's
    gradient of a selection would add up row by row, though each is selected once. The gradients of padding must be 0.
    """

    @staticmethod
    def forward(ctx: Any, sides: Sequence[Groups], *rows: Tensor) -> tuple[Tensor, ...]:
        ctx.sides = sides
        return tuple(group for side, x_1HNd in zip(sides, rows, strict=True) for group in side.pad(x_1HNd))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rest = iter(grads)
        return None, *[side.unpad([*islice(rest, len(side.shapes))]).transpose(0, 1)[None] for side in ctx.sides]


class IntoRow(torch.autograd.Function):
    """Moves the tokens of groups back into their row: (N, H, d), no view, as models may change it in place."""

    @staticmethod
    def forward(ctx: Any, side: Groups, *groups: Tensor) -> Tensor:
        ctx.side = side
        return side.unpad(groups)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.side.pad(grad.transpose(0, 1)[None], blank=True)

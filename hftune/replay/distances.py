"""How far computed tensors lie from those of a checkpoint, relative to the way that they went. Knows no run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

OF_THE_WAY = 1e-4
"""How far the weights at the end of a segment may lie from its checkpoint, as a share of the way that they went in it. Across
numbers of processes 1.6e-5 was met."""
NOISE = 1e-5
"""The gradient of a weight, relative to that of all weights, below which it may be only rounding, as that of a key's bias in
attention is. Adam moves such a weight as far as any other, and no two machines agree where to: 2e-3 of the way was met."""

Tensors = Mapping[str, Tensor]
Groups = Mapping[str, Tensors]
"""As in checkpoints."""


@dataclass(frozen=True)
class Distance:
    """How far tensors that were computed lie from those that a checkpoint claims."""

    where: str
    """The tensor that is furthest off."""
    off: float = math.inf
    way: float = 0.0
    """From the segment's start to the checkpoint; of moments, their norm."""
    rounding: float = 0.0
    """The most that one rounding of every claimed number comes to."""

    @property
    def share(self) -> float:
        """Of the way."""
        return 0.0 if self.off == 0 else self.off / self.way if self.way else math.inf

    def is_too_far(self, num_steps: int) -> bool:
        """Say whether it is more than machines differ in. Where the learning rate is almost 0, every step's rounding counts."""
        return self.off > OF_THE_WAY * self.way + self.rounding * num_steps


def measure(before: Groups, now: Groups, claimed: Groups) -> Iterator[Distance]:
    """Yield how far what was computed lies from a checkpoint: weights, their moving averages, and each kind of moment.

    Weights whose gradient may be rounding do not count. Moments do, since they decide the steps that follow.
    """
    noise = _gradients_of_rounding(now.get("optimizer", {}))
    for group in sorted(now.keys() | claimed.keys()):
        ours, theirs = now.get(group, {}), claimed.get(group, {})
        if unpaired := sorted(ours.keys() ^ theirs.keys()):
            yield Distance(f"{unpaired[0]}, which only one of them has")
            continue
        kinds = sorted({name.rpartition("/")[2] for name in ours}) if group == "optimizer" else [""]
        for kind in kinds:
            names = [name for name in ours if not kind or name.endswith(f"/{kind}")]
            yield _distance(names, ours, theirs, before.get(group, {}), noise)


def _gradients_of_rounding(moments: Tensors) -> dict[str, Tensor]:
    """Say of each weight whether its gradients may have been nothing but rounding, for optimizers that step as far for them.

    Args:
        moments: of Adam, whose second moment tells the size of a gradient; of Lion, the first.
    """
    sizes: dict[str, Tensor] = {}
    for kind, size in (("/exp_avg", Tensor.abs), ("/exp_avg_sq", Tensor.sqrt)):
        sizes |= {name.removesuffix(kind): size(value) for name, value in moments.items() if name.endswith(kind)}
    count = sum(value.numel() for value in sizes.values())
    typical = (sum(_squared(value.double()) for value in sizes.values()) / max(1, count)) ** 0.5
    return {name: (value > 0) & (value < NOISE * typical) for name, value in sizes.items()}


def _distance(names: list[str], now: Tensors, then: Tensors, start: Tensors, noise: Tensors) -> Distance:
    """Measure the distance of two sets of tensors.

    Args:
        start: where the way begins; empty: at zero.
        noise: by name, which elements do not count.
    """
    off, way, rounding, worst, where = 0.0, 0.0, 0.0, 0.0, ""
    for name in names:
        if (now[name].shape, now[name].dtype) != (then[name].shape, then[name].dtype):
            return Distance(f"{name}, whose shape or type differs")
        ours, theirs = now[name].double(), then[name].double()
        begin = start[name].double() if name in start else torch.zeros((), dtype=torch.float64)
        apart = torch.where((ours == theirs) | (ours.isnan() & theirs.isnan()), 0.0, ours - theirs).nan_to_num(nan=torch.inf)
        moved, size = (theirs - begin).nan_to_num(0, 0, 0), theirs.nan_to_num(0, 0, 0)
        if name in noise:
            apart, moved, size = (value.masked_fill(noise[name], 0) for value in (apart, moved, size))
        own = _squared(apart)
        off, way = off + own, way + _squared(moved)
        if then[name].is_floating_point():
            rounding += _squared(size) * torch.finfo(then[name].dtype).eps ** 2
        if own > worst:
            worst, where = own, name
    return Distance(where, off**0.5, way**0.5, rounding**0.5)


def _squared(value: Tensor) -> float:
    return float(value.square().sum())


def is_near(one: Any, other: Any) -> bool:
    """Compare nested JSON values, numbers up to what machines differ in."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(is_near(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(is_near, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=OF_THE_WAY)
    return bool(one == other)

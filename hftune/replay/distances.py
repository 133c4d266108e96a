"""How far computed tensors lie from those of a checkpoint, and how far an optimizer can have moved them. Knows no run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hftune.optim.lion import Lion

if TYPE_CHECKING:
    from hftune.replay.verification import Segment

OF_THE_WAY = 1e-4
"""How far the weights at the end of a segment may lie from its checkpoint, as a share of the way that they went in it. Across
numbers of processes 1.6e-5 was met."""
NOISE = 1e-5
"""The gradient of a weight, relative to that of all weights, below which it may be only rounding, as that of a key's bias in
attention is. Adam moves such a weight as far as any other, and no two machines agree where to: 2e-3 of the way was met."""

Tensors = Mapping[str, Tensor]
Groups = Mapping[str, Tensors]
"""As in checkpoints."""
KNOWN = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, Lion)
"""The optimizers whose updates have a bound that is written here."""
SLACK = 1e-4
"""For the rounding of an update. Most weights reach the limit in the first steps, where it is the learning rate itself."""

Lines = Mapping[int, Mapping[str, Any]]
"""Of the ledger, by step."""


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


# How far an optimizer can move a weight from one checkpoint to the next: a check of all segments without replaying any.
# An update of AdamW is at most a known multiple of the learning rate, whatever the gradient is. Weights that were moved by
# hand, or taken from another training, are further away. Most forgeries stay below the limit; the others are found at once.


def why_unlimited(optimizer: torch.optim.Optimizer) -> str | None:
    """Say why there is no limit for this optimizer; None if there is one."""
    if type(optimizer) not in KNOWN:
        return f"{type(optimizer).__name__} has no bound on its updates that is known here"
    groups = optimizer.param_groups
    if type(optimizer) is torch.optim.SGD and any(group["weight_decay"] or group["maximize"] for group in groups):
        return "SGD with weight decay has no bound on its updates that is known here"
    return None


def adam_bound(step: np.ndarray, betas: tuple[float, float]) -> np.ndarray:
    """Return the most by which Adam can move a weight in an update, as a multiple of the learning rate.

    That is the maximum of |m| / sqrt(v) over all gradients there can have been. m and v are sums of the same gradients and of
    their squares, so the Cauchy-Schwarz inequality gives it: 1 in the first update; 7.27 after many, with betas of 0.9 and
    0.999, if gradients grow by 11 % each step. (1 - beta1) / sqrt(1 - beta2) = 3.16, in the paper, is for a single gradient.

    Args:
        step: numbers of updates, from 1.
    """
    beta1, beta2 = betas
    if beta2 == 0:  # v forgets at once what m still has
        return np.where(step == 1, 1.0, np.inf)
    ratio, step = beta1**2 / beta2, step.astype(float)
    with np.errstate(over="ignore"):
        series = step if np.isclose(ratio, 1) else (1 - ratio**step) / (1 - ratio)
    return (1 - beta1) / np.sqrt(1 - beta2) * np.sqrt(series) * np.sqrt(1 - beta2**step) / (1 - beta1**step)


class SpeedLimit:
    """The limit for each parameter of a model.

    Args:
        optimizer: of the run, with the groups of its recipe; one that is not ``why_unlimited``.
        parameters: by the names of checkpoints; frozen ones must not move at all.
        lines: of the ledger, by step.
        clip: ``train.clip_norm``.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Mapping[str, torch.nn.Parameter],
        lines: Lines,
        clip: float | None,
    ):
        groups = optimizer.param_groups
        numbers = {parameter: number for number, group in enumerate(groups) for parameter in group["params"]}
        self._group_of = {name: numbers.get(parameter) for name, parameter in parameters.items()}
        lr = np.array([lines.get(step, {}).get("lr") or 0.0 for step in range(max(lines) + 1)])
        updates = [_largest_updates(type(optimizer), group, lr * group["lr_scale"], lines, clip) for group in groups]
        is_decoupled = isinstance(optimizer, (torch.optim.AdamW, Lion))  # AdamW is a subclass of Adam
        # How far each step can have moved a weight in all, and what part of it decay can have taken off, by group.
        self._reaches = [np.cumsum(of_group) for of_group in updates]
        self._decays = [np.cumsum(lr * group["lr_scale"] * group["weight_decay"] * is_decoupled) for group in groups]

    def largest_share(self, segment: Segment, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> tuple[float, str]:
        """Return the most of its limit that any weight moved in a segment, and the name of its tensor; above 1: too far."""
        largest, worst = 0.0, ""
        for name, group in self._group_of.items():
            if name in before and name in after and (share := self._share(segment, group, before[name], after[name])) > largest:
                largest, worst = share, name
        return largest, worst

    def _share(self, segment: Segment, group: int | None, before: Tensor, after: Tensor) -> float:
        if (before.shape, before.dtype) != (after.shape, after.dtype):
            return math.inf
        eps, before, after = torch.finfo(after.dtype).eps, before.double(), after.double()
        is_same = (after == before) | (after.isnan() & before.isnan())
        moved = torch.where(is_same, 0.0, after - before).abs().nan_to_num(nan=torch.inf)
        if group is None:  # frozen
            return math.inf if moved.any() else 0.0
        reach, decay = (float(sums[group][segment.end] - sums[group][segment.start]) for sums in (self._reaches, self._decays))
        furthest = before.nan_to_num(0, 0, 0).abs() + reach
        # Besides what decay takes off, each update rounds, and so does what it is computed from.
        limit = reach * (1 + SLACK) + furthest * (decay + eps * len(segment))
        return float((moved / limit.clamp(min=1e-300)).max()) if moved.numel() else 0.0


def _largest_updates(kind: type, group: Mapping[str, Any], lr: np.ndarray, lines: Lines, clip: float | None) -> np.ndarray:
    """Return the most by which each step, from 0, can have moved a weight of a parameter group with these learning rates."""
    if kind is Lion:
        return lr
    if kind is not torch.optim.SGD:
        return np.append(0, lr[1:] * adam_bound(np.arange(1, len(lr)), group["betas"]))
    momentum, reach, found = group["momentum"], 0.0, [0.0]
    for step in range(1, len(lr)):  # no element of a gradient is larger than its norm
        norm = lines.get(step, {}).get("grad_norm") or 0.0
        norm = norm if clip is None else min(norm, clip)
        reach = momentum * reach + norm
        found.append(lr[step] * (norm + momentum * reach if group["nesterov"] else reach))
    return np.array(found)

"""How far an optimizer can move a weight from one checkpoint to the next: a check of all segments without replaying any.

An update of AdamW is at most a known multiple of the learning rate, whatever the gradient is. Weights that were moved by hand,
or taken from another training, are further away. Most forgeries stay below the limit; those that do not are found at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hftune.optim.lion import Lion

if TYPE_CHECKING:
    from hftune.replay.verification import Segment

KNOWN = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, Lion)
"""The optimizers whose updates have a bound that is written here."""
SLACK = 1e-4
"""For the rounding of an update. Most weights reach the limit in the first steps, where it is the learning rate itself."""

Lines = Mapping[int, Mapping[str, Any]]
"""Of the ledger, by step."""


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

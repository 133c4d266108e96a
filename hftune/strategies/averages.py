"""A moving average of a model's weights, of which each process keeps what it holds of them. Independent of steps and files."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from hftune.errors import ConfigError


class MovingAverage:
    """An exponential moving average of trainable parameters and of buffers of floats, such as BatchNorm's statistics.

    The buffers are averaged as well, with the same decay: statistics of the latest weights would not fit averaged ones. timm's
    ModelEmaV3 and TensorFlow's reference models do the same.
    """

    def __init__(self, live: Mapping[str, Tensor]):
        """Start from the present values of these tensors, which training changes in place.

        Raises:
            ConfigError: one is of half precision, in which an average soon stops moving: its changes are rounded away.
        """
        if low := [name for name, value in live.items() if value.dtype in (torch.bfloat16, torch.float16)]:
            raise ConfigError(
                f"train.ema_decay: {low[0]} is {live[low[0]].dtype}, too coarse for an average. Load the model in float32, "
                "which train.mixed_precision computes in bf16 all the same, or set train.ema_decay to null."
            )
        self.live = dict(live)
        self.values = {name: value.clone() for name, value in live.items()}
        """By the names of the whole model; sharded like the live tensors."""

    @torch.no_grad()
    def restart(self) -> None:
        """Start again from the present values."""
        for name, value in self.live.items():
            self.values[name].copy_(value)

    def update(self, decay: float) -> None:
        """Take the present values in: ``decay * average + (1 - decay) * value``."""
        by_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        for name, value in self.live.items():
            averages, values = by_dtype.setdefault(value.dtype, ([], []))
            averages.append(part_here(self.values[name]))
            values.append(part_here(value))
        for averages, values in by_dtype.values():
            get_ema_multi_avg_fn(decay)(averages, values, 0)

    @torch.no_grad()
    def exchange(self) -> None:
        """Swap averages and present values, bit for bit, in place: whoever holds the live tensors has the averages then."""
        for name, value in self.live.items():
            average, own = part_here(self.values[name]), part_here(value)
            kept = own.clone()
            own.copy_(average)
            average.copy_(kept)


def averaged_names(parameters: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the tensors to average: all floats but those of frozen parameters, which never change."""
    frozen = {name for name, value in parameters.items() if not value.requires_grad}
    return [name for name, value in tensors.items() if value.is_floating_point() and name not in frozen]


def part_here(value: Tensor) -> Tensor:
    """Return the memory of a tensor on this process, which a change in place changes."""
    return value.to_local() if isinstance(value, DTensor) else value


def averages_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Say whether an optimizer has other weights to evaluate than to train, as schedulefree's: ``eval`` sets them."""
    return callable(getattr(optimizer, "eval", None)) and callable(getattr(optimizer, "train", None))


def to_training(optimizer: torch.optim.Optimizer) -> None:
    """Tell an optimizer that averages weights itself that steps are to come."""
    if averages_itself(optimizer):
        optimizer.train()

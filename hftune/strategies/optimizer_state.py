"""The state of an optimizer of any class: whether it can be saved and spread, and which parts of it are not tensors.

Independent of recipes and processes.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hftune.config.sections import UNSHARDED
from hftune.errors import ConfigError, first_line
from hftune.optim.lion import Lion
from hftune.optim.muon import Muon
from hftune.strategies.averages import to_training

KNOWN = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD)
"""Classes that need no trial: their state consists of tensors with the shape of their parameters, and counters of steps."""
MOMENTS = {**dict.fromkeys(KNOWN, 2), torch.optim.SGD: 1, Lion: 1, Muon: 2, torch.optim.Adafactor: 1}
"""Tensors of a parameter's size that each class keeps at most; muon, for what it leaves to adamw."""
PLAIN = (bool, int, float, str, type(None))
"""What a checkpoint holds of an optimizer besides tensors."""
GIVEN = ("params", "lr", "lr_scale")
"""Options of a parameter group that are not the optimizer's own to change."""


def plain_state(optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> dict[str, Any]:
    """Return what the state holds besides tensors, such as a counter of steps, by parameter and name: "head.weight/step"."""
    return {
        f"{names[parameter]}/{key}": value
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
        if not isinstance(value, Tensor)
    }


def options_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key not in GIVEN} for group in optimizer.param_groups]


def changed_options(optimizer: torch.optim.Optimizer, before: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the options of each parameter group that the optimizer itself has changed since ``options_of``."""
    return [
        {key: value for key, value in now.items() if key not in then or not _is_same(value, then[key])}
        for now, then in zip(options_of(optimizer), before, strict=True)
    ]


def _is_same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) and isinstance(other, Tensor) else bool(one == other)


def most_moments(optimizer: torch.optim.Optimizer) -> int:
    """Return how many tensors of its size an optimizer keeps for a parameter, at most."""
    if type(optimizer) in MOMENTS:
        return MOMENTS[type(optimizer)] + bool(optimizer.defaults.get("amsgrad"))
    return 3  # to be safe: a class of the user's


def check_optimizer(
    optimizer: torch.optim.Optimizer, device: torch.device, is_sharded: bool = False, is_staged: bool = False
) -> None:
    """Try an optimizer on a few small tensors, and refuse one that cannot be saved or spread over the processes.

    Args:
        device: where this process trains; some optimizers work on GPUs only.
        is_sharded: each process keeps a part of every parameter (FSDP).
        is_staged: each process keeps some of the parameters (pipelines).

    Raises:
        ConfigError: its step fails, or its state does not fit checkpoints or this way to train.
    """
    if type(optimizer) in KNOWN:
        return
    name = f"train.optimizer: {type(optimizer).__name__}"
    if is_sharded and type(optimizer).__module__.startswith("bitsandbytes."):  # plain for tensors as small as those tried below
        raise ConfigError(f"{name} {UNSHARDED['adamw_8bit']}, which FSDP cannot shard. Train without FSDP.")
    if is_sharded and optimizer.state:
        raise ConfigError(f"{name} creates its state when it is built, before FSDP shards the parameters. Train without FSDP.")
    twin, parameters = _stepped_twin(optimizer, device)
    if other := next((key for key in twin.state if not isinstance(key, Tensor)), None):
        raise ConfigError(
            f"{name} keeps {other}, which belongs to no parameter. Checkpoints hold only the state of parameters."
        )
    state = [(parameter, key, value) for parameter in parameters for key, value in twin.state[parameter].items()]
    changed = [change for group in changed_options(twin, options_of(optimizer)) for change in group.items()]
    for key, value in [*((key, value) for _, key, value in state if not isinstance(value, Tensor)), *changed]:
        if not isinstance(value, PLAIN):
            raise ConfigError(
                f"{name} keeps {key}, a {type(value).__name__}, which checkpoints cannot hold: only a parameter's "
                "tensors, numbers and strings."
            )
    odd = [key for one, key, value in state if isinstance(value, Tensor) and value.ndim and value.shape != one.shape]
    if is_sharded and odd:
        raise ConfigError(
            f"{name} keeps {odd[0]} in a shape that differs from its parameter's, which FSDP cannot shard. Train without FSDP."
        )
    # A parameter's steps must depend on its own gradient only: to find out, those of the last one are changed.
    others = _stepped_twin(optimizer, device, last=-3.0)[1] if is_staged else parameters
    if is_staged and (changed or not all(map(torch.equal, parameters[:-1], others[:-1]))):
        raise ConfigError(
            f"{name} looks at all parameters together, and in a pipeline each process has only some of them. Set "
            "parallel.pipeline_stages=1."
        )


def _stepped_twin(
    optimizer: torch.optim.Optimizer, device: torch.device, last: float = 1.0
) -> tuple[torch.optim.Optimizer, list[nn.Parameter]]:
    """Build an optimizer of the same kind for small tensors, two for each number of dimensions in each group; take two steps.

    Args:
        last: factor of the last tensor's gradient.

    Raises:
        ConfigError: it cannot be built, or its step fails.
    """

    def small(ndim: int) -> nn.Parameter:  # whose dimensions all differ: (3, 4, 5) and so on
        shape = tuple(range(3, 3 + ndim))
        return nn.Parameter(torch.linspace(0.5, 1.0, math.prod(shape), device=device).reshape(shape))

    taken = inspect.signature(type(optimizer)).parameters
    arguments = {key: value for key, value in optimizer.defaults.items() if key in taken}
    groups = []
    for group in optimizer.param_groups:
        dimensions = sorted({parameter.ndim for parameter in group["params"]})
        groups.append({**group, "params": [small(ndim) for ndim in dimensions for _ in range(2)]})
    parameters = [parameter for group in groups for parameter in group["params"]]
    try:
        twin = type(optimizer)(groups, **arguments)
        to_training(twin)
        for scale in (1.0, 0.5):
            for parameter in parameters:
                factor = last if parameter is parameters[-1] else 1.0
                parameter.grad = (parameter.detach() - 0.7) * scale * factor
            twin.step(None)  # as Accelerate does
    except Exception as error:  # whatever the user's class raises
        raise ConfigError(
            f"train.optimizer: {type(optimizer).__name__} failed on a few small tensors: {first_line(error)}. It is called as "
            "step(closure=None)."
        ) from error
    return twin, parameters

"""The whole of a model of which a process holds a part: its shape without values, and how it is filled. Knows no process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from copy import deepcopy
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn


def hollow_copy(model: nn.Module) -> nn.Module:
    """Return a copy of a model whose parameters have no values and take no memory; shared ones stay shared."""
    empty = {
        id(parameter): nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
        for parameter in model.parameters()
    }
    return deepcopy(model, empty)


def filled_copy(hollow: nn.Module, values: Iterable[tuple[str, Tensor]]) -> nn.Module:
    """Return a copy of a hollow model with these parameters and buffers, by name; what is not among them stays as it is."""
    empty = dict(chain(hollow.named_parameters(), hollow.named_buffers()))
    filled: dict[int, Any] = {}
    for name, value in values:
        old = empty[name]
        filled[id(old)] = nn.Parameter(value, old.requires_grad) if isinstance(old, nn.Parameter) else value
    return deepcopy(hollow, filled)


def shared_weights(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that a model has under more than one name."""
    counts = Counter(parameter for _, parameter in model.named_parameters(remove_duplicate=False))
    return {parameter for parameter, count in counts.items() if count > 1}

"""What stands for a whole model that no process holds: one without values, or one that tells of its use. Knows no processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from copy import deepcopy
from itertools import chain
from typing import Any, NoReturn

import torch
from torch import Tensor, nn


def meta_copy(model: nn.Module) -> nn.Module:
    """Return a copy of a model whose parameters are on the meta device and take no memory. Tied ones stay tied."""
    empty = {
        id(parameter): nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
        for parameter in model.parameters()
    }
    return deepcopy(model, empty)


def materialize(meta_model: nn.Module, values: Iterable[tuple[str, Tensor]]) -> nn.Module:
    """Return a copy of a model with these values for its parameters and buffers, by name. Those not named stay as they are."""
    empty = dict(chain(meta_model.named_parameters(), meta_model.named_buffers()))
    replacements: dict[int, Any] = {}
    for name, value in values:
        old = empty[name]
        replacements[id(old)] = nn.Parameter(value, old.requires_grad) if isinstance(old, nn.Parameter) else value
    return deepcopy(meta_model, replacements)


def tied_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that a model has under more than one name."""
    counts = Counter(parameter for _, parameter in model.named_parameters(remove_duplicate=False))
    return {parameter for parameter, count in counts.items() if count > 1}


class ModelNeeded(BaseException):
    """A task has used the model that it was given for its predictions. Not an error: handlers of errors let it pass."""


USES = ("__getattribute__", "__setattr__", "__call__", "__getitem__", "__iter__", "__len__", "__bool__", "__contains__")


CALLS = ("generate", "config", "generation_config", "device", "dtype")
"""What a task that calls a model needs besides; none of it reads weights."""


def absent_model(note: Callable[[], None], model: nn.Module | None = None) -> Any:
    """Return what takes the place of the model: any use of it, even ``isinstance``, calls ``note`` and raises ModelNeeded.

    Args:
        model: is called instead, and gives what is in CALLS.
    """

    def use(*args: Any, **kwargs: Any) -> NoReturn:
        note()
        raise ModelNeeded("the whole model is used here, which this process has not gathered")

    uses: dict[str, Any] = dict.fromkeys(USES, use)
    if model is not None:
        uses["__getattribute__"] = lambda _, name: getattr(model, name) if name in CALLS else use()
        uses["__call__"] = lambda _, *args, **kwargs: model(*args, **kwargs)
    return type("AbsentModel", (), uses)()

"""Compiles a model: ``train.compile``. Knows neither processes nor tasks."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import MethodType
from typing import Any

import torch
from torch import nn

from hftune.models import dropout
from hftune.models.stacks import outermost_lists


def compile_model(model: nn.Module) -> None:
    """Compile a model in place, for inputs of any shape: each layer of its stacks of layers, or all of it if it has none.

    Layers of one class share their code, so it takes a fraction of the time. And the hooks between them stay outside: those
    that take out the padding, and those that seed dropout, which is therefore the same on any number of processes.

    ``nn.Module.compile`` is not used for layers: it would compile their hooks, too.
    """
    keep_masks_out_of_graphs()
    layers = repeated_layers(model)
    if not layers:
        model.compile(dynamic=True)
        return
    keep_packing_out_of_graphs()
    forwards: dict[type, Callable[..., Any]] = {}
    for layer in layers:
        kind = type(layer)
        if kind not in forwards:
            forwards[kind] = compiled_without_cache(kind.forward)
        layer.forward = MethodType(forwards[kind], layer)  # deepcopy binds it to the copy


def compiled_without_cache(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return the forward pass of a class of layers, compiled except when it is given a cache of keys and values.

    Generation lengthens the cache token by token, and each layer has a place of its own in it: one graph for each.
    """
    compiled = torch.compile(forward, dynamic=True)

    def forward_layer(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        has_cache = kwargs.get("past_key_values") is not None
        return (forward if has_cache else compiled)(self, *args, **kwargs)

    return forward_layer


def repeated_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers of the stacks of a model, which transformers marks as those to checkpoint one by one."""
    members = [layer for _, layers in outermost_lists(model) for layer in layers]
    return [layer for layer in members if any(kind.__name__ == "GradientCheckpointingLayer" for kind in type(layer).__mro__)]


@cache
def keep_masks_out_of_graphs() -> None:
    """Let a compiled model call what draws dropout masks on CPUs: numpy, which torch cannot compile.

    Not decorated where it is defined: ``torch.compiler.disable`` imports torch's compiler, which takes a second.
    """
    dropout.draw_mask = torch.compiler.disable(dropout.draw_mask)


@cache
def keep_packing_out_of_graphs() -> None:
    """Let compiled layers call the attention that depends on the length of each text: else each micro-batch had a graph."""
    from transformers import AttentionInterface

    from hftune.models.kinds import ATTENTION
    from hftune.models.packing import packed_attention

    AttentionInterface.register(ATTENTION, torch.compiler.disable(packed_attention))

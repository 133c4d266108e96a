"""Stacks of layers in a model, and which of its parameters lie below and above them. Independent of training."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def outermost_lists(module: nn.Module) -> Iterator[tuple[nn.Module, nn.ModuleList]]:
    """Yield the ModuleLists that are not inside another one, each with the module that holds it."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield module, child
        else:
            yield from outermost_lists(child)


def depths(model: nn.Module) -> dict[nn.Parameter, int]:
    """Return how many layers are above each parameter of a model whose layers are in ModuleLists; empty if it has none.

    What comes after a stack of layers, such as a final norm and a head, has 0; the last layer 1, the one before 2. Embeddings,
    and all that comes before the first stack, have one more than the first layer. An encoder and a decoder are counted on their
    own.
    """
    stacks = [layers for _, layers in outermost_lists(model) if [*layers.parameters()]]
    found: dict[nn.Parameter, int] = {}
    for layers in stacks:
        for index, layer in enumerate(layers):
            found |= {parameter: len(layers) - index for parameter in layer.parameters() if parameter not in found}
    if not found:
        return {}
    embedded, bottom, is_before = embeddings(model), max(map(len, stacks)) + 1, True
    for name, parameter in model.named_parameters():
        if parameter in found:
            is_before = False
        elif is_before or parameter in embedded or "embed" in name:
            found[parameter] = bottom
        else:
            found[parameter] = 0
    return found


def embeddings(model: nn.Module) -> set[nn.Parameter]:
    """Return the tables of a model's embeddings."""
    return {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Return the matrices between embeddings and head.

    The head is what predicts tokens. If nothing does, the last matrix counts as the head, also of a model without one.
    """
    tables = embeddings(model)
    matrices = [value for value in model.parameters() if value.ndim == 2 and value not in tables]
    output = getattr(model, "get_output_embeddings", lambda: None)()
    head = {*output.parameters()} if output is not None else {*matrices[-1:]}
    return [value for value in matrices if value not in head]

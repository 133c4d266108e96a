"""Cuts a model into stages that are called one after the other. Independent of processes: a stage is a module.

Two kinds of models can be cut: those with a method ``stage(index, count)``, which returns one of their parts; and, unchanged,
transformers' decoders, which have embeddings, one ``nn.ModuleList`` of layers, a norm and a head.

A stage is called ``stage(hidden, **inputs)`` with the model's own inputs, of which the first is (rows, length); ``hidden`` is
what the previous stage returned, (rows, length, width), and None for the first. The last one returns what the model returns.
Stages hold the model's own parameters, not copies; a parameter may be in several of them, as tied embeddings are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import cache
from itertools import accumulate, pairwise
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from hftune.errors import ConfigError, first_line
from hftune.models.stacks import outermost_lists
from hftune.models.trial import EXACT, alike, trying

HOW = (
    "A pipeline cuts models that have a method stage(index, count), which returns one of their parts, and transformers' "
    "decoders: embeddings, one ModuleList of layers, a norm and a head. parallel.pipeline_stages=1 trains the model uncut."
)


def cut(model: nn.Module, count: int, split: Sequence[int] | None = None) -> list[nn.Module]:
    """Return the ``count`` stages of a model.

    Args:
        split: layers of each stage. None: the largest stage has as few parameters as possible.

    Raises:
        ConfigError: the model cannot be cut, or not like this; the message says why.
    """
    if hasattr(model, "stage"):
        if split is not None:
            raise ConfigError(
                f"parallel.split={list(split)}: {type(model).__name__} is cut by its own method stage. Set it to null."
            )
        stages = [model.stage(index, count) for index in range(count)]
    else:
        body, name = _body_and_layers(model)
        if body is None:
            raise ConfigError(f"{type(model).__name__} cannot be cut into stages: {name}. {HOW}")
        stages = _cut_decoder(model, body, name, count, split)
    held = {parameter for stage in stages for parameter in stage.parameters()}
    if held - {*model.parameters()}:
        raise ConfigError(
            f"The stages of {type(model).__name__} have parameters that the model does not have: its method stage must return "
            "modules of the model itself, not copies."
        )
    if lost := [name for name, parameter in model.named_parameters() if parameter not in held]:
        raise ConfigError(
            f"The stages of {type(model).__name__} leave out {', '.join(lost[:3])}: each parameter must be in a stage."
        )
    return stages


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the layers between which a model can be cut, in order; none if it cannot."""
    if hasattr(model, "stage"):
        return [layer for _, members in outermost_lists(model) for layer in members]
    body, name = _body_and_layers(model)
    return [] if body is None else [*getattr(body, name)]


def check_stages(model: nn.Module, count: int, split: Sequence[int] | None, inputs: Mapping[str, Tensor]) -> None:
    """Make sure that the stages compute what the model does, on one batch.

    A model may change its embeddings outside of any module, for example multiply them: its later stages would do it again.

    Raises:
        ConfigError: they do not, or the model cannot be cut.
    """
    name, stages = type(model).__name__, cut(model, count, split)
    for index, stage in enumerate(stages, start=1):
        if not any(parameter.requires_grad for parameter in stage.parameters()):
            raise ConfigError(
                f"Stage {index} of {count} has no parameter to train: its part of {name} is frozen. Unfreeze some of it, "
                "or assign layers to stages with parallel.split."
            )
    with trying(model):
        expected, outputs = model(**inputs), None
        try:
            for index, stage in enumerate(stages, start=1):
                outputs = stage.eval()(outputs, **inputs)
                if index < count and outputs.shape[:2] != (given := next(iter(inputs.values()))).shape[:2]:
                    raise ValueError(
                        f"stage {index} returns {tuple(outputs.shape)} and should return (rows, length, width): its input is "
                        f"{tuple(given.shape)}"
                    )
        except (RuntimeError, TypeError, AttributeError, ValueError, IndexError) as error:
            raise ConfigError(f"{name} cannot be cut into stages: {first_line(error)}. {HOW}") from error
        # Kernels round differently if they see different strides. Layers compute with numbers around 1, which float32 rounds to
        # 1e-7: so 1e-6 is nothing, however small the outputs.
        if not alike(expected, outputs, 10 * EXACT, floor=0.01):
            raise ConfigError(
                f"{name} cannot be cut into stages: run one after the other, they do not return what the whole model returns. "
                f"{HOW}"
            )


def refuse_model() -> NoReturn:
    """Refuse a task whose evaluations use the model besides its outputs, as those do that generate texts."""
    raise ConfigError(
        "parallel.pipeline_stages: task.predictions uses the model, to generate texts for example, and no process of a "
        "pipeline has it as a whole. Set parallel.pipeline_stages=1 or eval.every=never; in your own task, use only outputs."
    )


def balanced(costs: Sequence[int], count: int) -> list[int]:
    """Cut a row of layers into ``count`` stages of one layer or more, the most expensive one as cheap as possible.

    Returns:
        Layers of each stage.
    """
    totals = [0, *accumulate(costs)]

    @cache
    def best(start: int, left: int) -> tuple[int, tuple[int, ...]]:
        if left == 1:
            return totals[-1] - totals[start], (len(costs) - start,)
        candidates = []
        for stop in range(start + 1, len(costs) - left + 2):
            rest, sizes = best(stop, left - 1)
            candidates.append((max(totals[stop] - totals[start], rest), (stop - start, *sizes)))
        return min(candidates)

    return [*best(0, count)[1]]


def _body_and_layers(model: nn.Module) -> tuple[nn.Module | None, str]:
    """Return the module of a decoder that holds embeddings, layers and norm, and the name of its layers; or None, and why."""
    if not hasattr(model, "get_output_embeddings") or not hasattr(model, "base_model"):
        return None, "it is not a transformers model and has no method stage"
    if model.get_output_embeddings() is None:
        return None, "it has no head that predicts tokens"
    lists = [*outermost_lists(model)]
    if len(lists) != 1:
        return None, f"it has {len(lists)} ModuleLists, but a decoder has exactly one, with its layers"
    body, layers = lists[0]
    if not any(child is model.get_input_embeddings() or isinstance(child, nn.Embedding) for child in body.children()):
        return None, "its embeddings and its layers are not in the same module"
    return body, next(name for name, child in body.named_children() if child is layers)


def _cut_decoder(
    model: nn.Module, body: nn.Module, layers_name: str, count: int, split: Sequence[int] | None
) -> list[nn.Module]:
    layers, children = getattr(body, layers_name), [name for name, _ in body.named_children()]
    position = children.index(layers_name)
    after = [name for name in children[position + 1 :] if _size(getattr(body, name))]
    before = children[:position]
    if split is not None and sum(split) != len(layers):
        raise ConfigError(
            f"parallel.split={list(split)} adds up to {sum(split)} layers, but {type(model).__name__} has {len(layers)}."
        )
    if len(layers) < count:
        raise ConfigError(
            f"{type(model).__name__} has {len(layers)} layers, too few for {count} stages: lower "
            "parallel.pipeline_stages or parallel.virtual_stages."
        )
    if split is None:
        costs = [_size(layer) for layer in layers]
        costs[0] += sum(_size(getattr(body, name)) for name in before)
        costs[-1] += sum(_size(getattr(body, name)) for name in after) + _size(model.get_output_embeddings())
        split = balanced(costs, count)
    bounds = [*pairwise([0, *accumulate(split)])]
    body_name = next(name for name, module in model.named_modules() if module is body)
    return [DecoderStage(model, body_name, layers_name, before, after, bounds, index) for index in range(count)]


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


class DecoderStage(nn.Module):
    """Some layers of a transformers decoder, run by its own forward: modules of other stages are replaced by placeholders.

    Later stages pass their hidden states to it as ``inputs_embeds``. The layers keep their positions, on which decoders rely.
    """

    def __init__(
        self,
        model: nn.Module,
        body_name: str,
        layers_name: str,
        before: Sequence[str],
        after: Sequence[str],
        bounds: Sequence[tuple[int, int]],
        index: int,
    ):
        super().__init__()
        (start, stop), self.is_first, self.is_last = bounds[index], index == 0, index == len(bounds) - 1
        shared = {id(value): value for value in (*model.parameters(), *model.buffers())}
        self.model = deepcopy(model, shared)
        body = self.model.get_submodule(body_name)
        layers = getattr(body, layers_name)
        for number, layer in enumerate(layers):
            if not start <= number < stop:
                layers[number] = Passthrough(layer)
        for name in () if self.is_first else before:
            child = getattr(body, name)
            is_table = isinstance(child, nn.Embedding) and child is not self.model.get_input_embeddings()
            setattr(body, name, Passthrough(is_table=is_table))
        for name in () if self.is_last else after:
            setattr(body, name, Passthrough())
        if not self.is_last:
            self.model.set_output_embeddings(None)

    def forward(self, hidden: Tensor | None, **inputs: Any) -> Any:
        inputs["use_cache"] = False
        if not self.is_first:
            inputs["inputs_embeds"] = hidden
            inputs.pop("input_ids", None)
        if self.is_last:
            return self.model(**inputs)
        return self.model.base_model(**inputs).last_hidden_state


class Passthrough(nn.Module):
    """Replaces a module of a different stage, and returns its input; of a table of positions, which the first stage adds, 0."""

    def __init__(self, layer: nn.Module | None = None, is_table: bool = False):
        """Take over a layer's plain attributes, such as the kind of its attention, which decoders read."""
        super().__init__()
        self.is_table = is_table
        for name, value in vars(layer).items() if layer is not None else ():
            if isinstance(value, str | int | float) and name != "training":
                setattr(self, name, value)

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return torch.zeros((), device=hidden.device) if self.is_table else hidden

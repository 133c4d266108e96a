"""Training without padding: how a micro-batch is collated, and how a model is called with it. Knows no processes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from hftune.models.kinds import TARGETS
from hftune.task import Task

if TYPE_CHECKING:
    from hftune.strategies.context import Context

PACKING = "packing"
"""Key of a batch's ``Packing``, and the keyword argument that models take it by."""
DECODED = "decoder_input_ids"
"""The tokens that a decoder reads, among a model's inputs."""


def collate_packed(
    task: Task, find: Callable[[Mapping[str, Tensor]], Any], shares: bool, examples: list[Any]
) -> dict[str, Any]:
    """Return the task's batch, and where its real tokens are, as ``find`` reads it from the model's inputs."""
    batch = task.collate(examples)
    packing = find(inputs := task.inputs(batch))
    if DECODED in inputs:
        from hftune.models.packing import find_decoded

        packing = find_decoded(inputs, head_targets(task.target(batch)), packing)
    if shares and (shared := task.shared_beginnings(batch)) is not None:
        packing = packing.sharing(*shared)
    return {**batch, PACKING: packing}


def collate_for(model: nn.Module, task: Task, context: int = 1) -> Callable[[list[Any]], dict[str, Any]]:
    """Return ``collate_packed`` of a model. Beginnings are shared, unless it has kinds of tokens, counts them for experts, or
    has other noise in each text (NEFTune).

    Args:
        context: ``parallel.context``; processes that share tokens out share no beginnings, nor does one in their place.
    """
    from hftune.models.packing import find_packing

    find = getattr(type(model), "find_packing", find_packing)
    shares = context == 1 and find is find_packing and not hasattr(model, "load_balancing") and not hasattr(model, "neftune")
    return partial(collate_packed, task, find, shares)


def inputs_of(task: Task, batch: Mapping[str, Any], scores_head: bool = False) -> dict[str, Any]:
    """Return the model's keyword arguments, the packing of the batch included if it has one.

    Args:
        scores_head: the model computes its loss together with its head, and is given the targets as well.
    """
    rest = {name: value for name, value in batch.items() if name != PACKING}
    inputs = task.inputs(rest)
    if scores_head:
        inputs = {**inputs, TARGETS: head_targets(task.target(rest))}
    return {**inputs, PACKING: batch[PACKING]} if PACKING in batch else inputs


def head_targets(target: Any) -> Tensor:
    """Return the labels among what a loss needs, whose cross-entropies the head computes."""
    return target if isinstance(target, Tensor) else target["labels"]


def given_to(
    task: Task, batch: dict[str, Any], scores_head: bool, context: Context | None
) -> tuple[dict[str, Any], Any, float]:
    """Return the model's keyword arguments in training, the target, and which part of the loss is this process's."""
    arguments, target = inputs_of(task, batch, scores_head), task.target(batch)
    if context is None:
        return arguments, target, 1
    packing = arguments[PACKING] = context.split(arguments[PACKING], gathers=not scores_head)
    if not scores_head or packing.context is None:  # all processes compute the same loss
        return arguments, target, 1 / context.size
    arguments[TARGETS] = target = context.own_targets(target, packing)
    return arguments, target, 1


def padding_of(inputs: Mapping[str, Any]) -> dict[tuple[int, ...], bool] | None:
    """Return whether the masks among a model's inputs on the host, (B, T) as layers see them, hide anything, by their shape.

    None: positions may tell texts of a row apart, and transformers has to look at them.
    """
    if "position_ids" in inputs:
        return None
    found: dict[tuple[int, ...], bool] = {}
    for name, mask in inputs.items():
        if name.endswith("attention_mask") and isinstance(mask, Tensor) and mask.ndim > 1:
            shape = tuple(mask.flatten(0, -2).shape)
            found[shape] = found.get(shape, False) or not mask.all()
    return found


def told_of_padding(padding: dict[tuple[int, ...], bool] | None) -> AbstractContextManager[None]:
    """Return a context in which transformers need not look at a GPU's masks; see ``padding_of``."""
    if padding is None or "transformers" not in sys.modules:
        return nullcontext()
    from hftune.models.packing import told_of_padding

    return told_of_padding(padding)


def compute(model: nn.Module, *args: Any, **inputs: Any) -> Any:
    """Call a model, or a stage of one, with or without packing."""
    if PACKING not in inputs:
        return model(*args, **inputs)
    from hftune.models.packing import without_masks

    with without_masks():
        return model(*args, **inputs)


def install_packing(model: nn.Module) -> list[nn.Module]:
    """Let a model, or a stage of one, take ``packing``; it has passed ``trial.packing_problem``. Return its layers."""
    from hftune.models.packing import install, stacks_of

    install(model)
    return [layer for layers in stacks_of(model) for layer in layers]


def seems_packable(model: nn.Module) -> bool:
    """Say whether a model can be tried without padding."""
    from hftune.models.packing import NotPackable, install

    try:
        install(model)()
    except NotPackable:
        return False
    return True


def reads_scores(task: Task) -> bool:
    """Say whether a task's predictions, too, can do without logits.

    A subclass that has other predictions, and does not say ``scored_head`` itself, may want them.
    """
    says, predicts = (
        next((kind for kind in type(task).__mro__ if name in vars(kind)), Task) for name in ("scored_head", "predictions")
    )
    return task.scored_head and issubclass(says, predicts)

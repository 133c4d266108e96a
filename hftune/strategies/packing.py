"""Training without padding: tried on a few samples, then used for each micro-batch. Independent of processes and steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from accelerate.utils import send_to_device
from accelerate.utils.memory import clear_device_cache
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hftune.errors import ConfigError, DataError
from hftune.models.kinds import TARGETS
from hftune.strategies.statistics import restored_buffers
from hftune.task import Task

PACKING = "packing"
"""Key of a batch's ``Packing``, and the keyword argument that models take it by."""
EXACT = 1e-5
"""Greatest difference of an output in float32, in units of the greatest output if that is above 1."""
ROUGH = 0.05
"""The same in bfloat16 and float16."""


def collate_packed(task: Task, find: Callable[[Mapping[str, Tensor]], Any], examples: list[Any]) -> dict[str, Any]:
    """Return the task's batch, and where its real tokens are, as ``find`` reads it from the model's inputs."""
    batch: dict[str, Any] = dict(task.collate(examples))
    batch[PACKING] = find(task.inputs(batch))
    return batch


def collate_for(model: nn.Module, task: Task) -> Callable[[list[Any]], dict[str, Any]]:
    """Return ``collate_packed`` of a model."""
    from hftune.models.packing import find_packing

    return partial(collate_packed, task, getattr(type(model), "find_packing", find_packing))


def inputs_of(task: Task, batch: Mapping[str, Any], scores_head: bool = False) -> dict[str, Any]:
    """Return the model's keyword arguments, the packing of the batch included if it has one.

    Args:
        scores_head: the model computes its loss together with its head, and is given the targets as well.
    """
    rest = {name: value for name, value in batch.items() if name != PACKING}
    inputs = task.inputs(rest)
    if scores_head:
        inputs = {**inputs, TARGETS: task.target(rest)}
    return {**inputs, PACKING: batch[PACKING]} if PACKING in batch else inputs


def compute(model: nn.Module, *args: Any, **inputs: Any) -> Any:
    """Call a model, or a stage of one, with or without packing."""
    if PACKING not in inputs:
        return model(*args, **inputs)
    from hftune.models.packing import without_masks

    with without_masks():
        return model(*args, **inputs)


def install_packing(model: nn.Module) -> None:
    """Let a model, or a stage of one, take ``packing``; it has passed ``reason_against``."""
    from hftune.models.packing import install, stack_of

    install(model, stack_of(model))


def seems_packable(model: nn.Module) -> bool:
    """Say whether a model can be tried without padding."""
    from hftune.models.packing import NotPackable, install, stack_of

    try:
        install(model, stack_of(model))()
    except NotPackable:
        return False
    return True


def trial_samples(lengths: np.ndarray) -> list[int]:
    """Return the longest, the shortest and the middle one of all samples."""
    order = np.argsort(lengths, kind="stable")
    return [int(order[place]) for place in sorted({len(order) - 1, 0, len(order) // 2}, reverse=True)]


def reason_against(
    model: nn.Module,
    task: Task,
    dataset: Any,
    samples: Sequence[int],
    device: torch.device,
    half: torch.dtype | None = None,
    needs_mask: bool = True,
) -> str | None:
    """Compute a few samples with and without padding, in evaluation mode, and compare; model and generators stay as they are.

    Args:
        half: the lower precision that training will use, if any; then it is tried, too.
        needs_mask: the samples differ in length, so that only a mask tells what is padding.

    Returns:
        Why training must compute padding, a part of a sentence; None if it need not.
    """
    from hftune.models.packing import MASK, NotPackable, attention_calls, install, stack_of

    try:
        layers = stack_of(model)
        undo = install(model, layers)
    except NotPackable as error:
        return str(error)
    home = next(model.parameters()).device
    try:
        batch = collate_for(model, task)([dataset[sample] for sample in samples])
        packing = batch.pop(PACKING).to(device)
        batch = send_to_device(batch, device)
        inputs, target = task.inputs(batch), task.target(batch)
        if needs_mask and MASK not in inputs:
            return f"its inputs have no {MASK}"
        with evaluating(model.to(device)), torch.no_grad():
            is_half = any(parameter.dtype == half for parameter in model.parameters())  # beside adapters, which stay float32
            for dtype in (half,) if is_half else (None, half) if half else (None,):
                with torch.autocast(device.type, dtype, enabled=dtype is not None), attention_calls() as calls:
                    padded, packed = model(**inputs), compute(model, **inputs, packing=packing)
                if len(calls) != len(layers):
                    return f"{len(calls)} of its {len(layers)} layers can"
                tolerance = tolerance_of(device, dtype)
                losses = [float(task.loss(outputs, target)) for outputs in (padded, packed)]
                if abs(losses[0] - losses[1]) > tolerance * max(1.0, abs(losses[0])) or not _alike(
                    padded, packed, inputs.get(MASK), tolerance
                ):
                    return "it computes something else then"
    except (ConfigError, DataError):  # of the task's: training would meet it, too
        raise
    except Exception as error:  # whatever a model or a kernel of others raises
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        return reason if isinstance(error, NotPackable) else f"it fails then ({type(error).__name__}: {reason})"
    finally:
        undo()
        model.to(home)
        if home != device:
            clear_device_cache()
    return None


def tolerance_of(device: torch.device, dtype: torch.dtype | None = None) -> float:
    """Return how far results of two ways to compute the same may lie apart. ``dtype``: of autocast, if it is on."""
    rounds_float32 = device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32
    return EXACT if dtype is None and not rounds_float32 else ROUGH


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode for a trial that leaves no trace in its modes, buffers and random generators."""
    modes = {module: module.training for module in model.modules()}
    with torch.random.fork_rng(), restored_buffers(model), torch.compiler.set_stance("force_eager"):
        model.eval()
        try:
            yield
        finally:
            for module, mode in modes.items():
                module.training = mode


def _alike(padded: Any, packed: Any, mask_BT: Tensor | None, tolerance: float) -> bool:
    """Compare what a model returned for each text; where it is a value for each token, that of the real ones."""
    one_by_one = [tree_leaves(_without_cache(outputs)) for outputs in (padded, packed)]
    pairs = [[value for value in leaves if isinstance(value, Tensor)] for leaves in one_by_one]
    if len(pairs[0]) != len(pairs[1]) or not pairs[0]:
        return False
    for one, other in zip(*pairs, strict=True):
        if one.shape != other.shape:
            return False
        if mask_BT is not None and one.shape[:2] == mask_BT.shape:
            one, other = (value[mask_BT.bool().to(value.device)] for value in (one, other))
        if one.numel():
            one, other = one.float(), other.float()
            if not bool((one - other).abs().max() <= tolerance * max(1.0, float(one.abs().max()))):
                return False
    return True


def _without_cache(outputs: Any) -> Any:
    """Leave out the keys and values that are kept for generation, which have no padding where the layers compute none."""
    if not isinstance(outputs, Mapping):
        return outputs
    return {name: value for name, value in outputs.items() if name != "past_key_values"}

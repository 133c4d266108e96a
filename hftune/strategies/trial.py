"""What training may leave out, tried on a few samples: padding, and the logits of a large vocabulary. Knows no steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import nn

from hftune.batch_plan import by_length
from hftune.errors import ConfigError, DataError, first_line
from hftune.models.kinds import TARGETS
from hftune.models.trial import alike, tolerance_of, trying
from hftune.strategies.packing import PACKING, collate_for, compute, head_targets
from hftune.task import Task

GROWN = 64.0
"""What the hidden states are multiplied by in a second comparison. A new model's logits are near 0, where soft-capping, as an
example, changes nothing yet."""


def trial_samples(lengths: Any) -> list[int]:
    """Return the longest, the shortest and the middle one of the samples whose lengths are known."""
    order = by_length(lengths)
    return [int(order[place]) for place in sorted({len(order) - 1, 0, len(order) // 2}, reverse=True)]


def autocast(device: torch.device, dtype: torch.dtype | None) -> torch.autocast:
    """Round weights as training does, and keep none of them: where they are sharded, that would be a copy of the whole."""
    return torch.autocast(device.type, dtype, enabled=dtype is not None, cache_enabled=False)


def packing_problem(
    model: nn.Module,
    task: Task,
    dataset: Any,
    samples: Sequence[int],
    device: torch.device,
    half: torch.dtype | None = None,
    needs_mask: bool = True,
) -> str | None:
    """Compute a few samples with and without padding, in evaluation mode, and compare; the model stays as it is.

    Args:
        half: the lower precision that training will use, if any; then it is tried, too.
        needs_mask: the samples differ in length, so that only a mask tells what is padding.

    Returns:
        Why training must compute padding, a part of a sentence; None if it need not.
    """
    from hftune.models.packing import MASK, NotPackable, Packing, attention_calls, install, stacks_of  # imports transformers

    try:
        undo = install(model)
    except NotPackable as error:
        return str(error)
    try:
        batch = collate_for(model, task)([dataset[sample] for sample in samples])
        packing, batch = batch.pop(PACKING).to(device), send_to_device(batch, device)
        inputs, target = task.inputs(batch), task.target(batch)
        if needs_mask and MASK not in inputs:
            return f"its inputs have no {MASK}"
        has_half = any(parameter.dtype == half for parameter in model.parameters())  # beside adapters, which stay float32
        with trying(model, device):
            for dtype in (half,) if has_half else (None, half) if half else (None,):
                with autocast(device, dtype), attention_calls() as calls:
                    padded, packed = model(**inputs), compute(model, **inputs, packing=packing)
                stacks = stacks_of(model)  # a decoder's layers attend twice, to targets and to sources
                if len(calls) != (count := len(stacks[0]) + sum(2 * len(layers) for layers in stacks[1:])):
                    return f"{len(calls)} of its {count} attention layers can"
                tolerance = tolerance_of(device, dtype)
                losses = task.loss(padded, target), task.loss(packed, target)
                masks = [inputs[MASK]] if MASK in inputs else []
                if isinstance(packing, Packing):
                    each = [packing, *filter(None, [packing.source])]
                    masks = [some.unpack(torch.ones(1, len(some.indices_N), device=device)) for some in each]
                if not alike(losses[0], losses[1], tolerance) or not alike(padded, packed, tolerance, masks):
                    return "it computes something else then"
    except (ConfigError, DataError):  # of the task's: training would meet it, too
        raise
    except NotPackable as error:
        return str(error)
    except Exception as error:  # whatever a model or a kernel of others raises
        return f"it fails then ({first_line(error)})"
    finally:
        undo()
    return None


def head_problem(
    model: nn.Module, task: Task, dataset: Any, sample: int, device: torch.device, half: torch.dtype | None = None
) -> str | None:
    """Compute the loss of a sample from its logits and in chunks, in evaluation mode, and compare; the model stays as it is.

    Args:
        half: the dtype of autocast in training, if it is on. A model with weights of it, as adapters may have beside others in
            float32, is tried like that.

    Returns:
        Why training must compute the logits as a whole, a part of a sentence; None if it need not.
    """
    from hftune.models.scored_head import Head, install  # imports transformers

    try:
        batch = send_to_device(task.collate([dataset[sample]]), device)
        inputs, target = task.inputs(batch), task.target(batch)
        dtype = half if any(value.dtype == half for value in model.parameters()) else None
        with trying(model, device), autocast(device, dtype):
            head, tolerance, labels = Head.of(model), tolerance_of(device, dtype), head_targets(target)
            for factor in (1.0, GROWN):
                growing = head.module.register_forward_pre_hook(lambda _, hidden, factor=factor: (hidden[0] * factor,))
                try:
                    expected = float(task.loss(model(**inputs), target))
                    undo = install(model, head.num_words * (labels.numel() // 3), task.scored_head == "each")  # several chunks
                    try:
                        found = float(task.loss(model(**inputs, **{TARGETS: labels}), target))
                    finally:
                        undo()
                finally:
                    growing.remove()
                if not abs(found - expected) <= tolerance * max(1.0, abs(expected)):
                    of_what = "a sample" if factor == 1.0 else f"a sample whose logits are {GROWN:g} times as large"
                    return f"chunks give another loss of {of_what}, {found:.6g} and not {expected:.6g}"
    except Exception as error:  # whatever a model or a task of others raises
        return f"chunks fail ({first_line(error)})"
    return None

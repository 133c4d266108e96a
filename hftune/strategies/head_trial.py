"""Whether a model's loss can be computed together with its head: tried on a sample. Independent of processes and steps."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.utils import send_to_device
from accelerate.utils.memory import clear_device_cache
from torch import nn

from hftune.models.kinds import TARGETS
from hftune.strategies.packing import evaluating, tolerance_of
from hftune.task import Task

GROWN = 64.0
"""What the hidden states are multiplied by in a second comparison. A new model's logits are near 0, where soft-capping, as an
example, changes nothing yet."""


def reason_against(
    model: nn.Module, task: Task, dataset: Any, sample: int, device: torch.device, half: torch.dtype | None = None
) -> str | None:
    """Compute the loss of a sample from its logits and in chunks, in evaluation mode, and compare; the model stays as it is.

    Args:
        half: the dtype of autocast in training, if it is on. A model with weights of it, as adapters may have beside others in
            float32, is tried like that.

    Returns:
        Why training must compute the logits as a whole, a part of a sentence; None if it need not.
    """
    from hftune.models.scored_head import Head, install

    home = next(model.parameters()).device
    try:
        batch = send_to_device(task.collate([dataset[sample]]), device)
        inputs, target = task.inputs(batch), task.target(batch)
        dtype = half if any(value.dtype == half for value in model.parameters()) else None
        autocast = torch.autocast(device.type, dtype, enabled=dtype is not None)
        head, tolerance = Head.of(model.to(device)), tolerance_of(device, dtype)
        for factor in (1.0, GROWN):
            growing = head.module.register_forward_pre_hook(lambda _, hidden, factor=factor: (hidden[0] * factor,))
            try:
                with evaluating(model), torch.no_grad(), autocast:
                    expected = float(task.loss(model(**inputs), target))
                    undo = install(model, at_once=head.num_words * (target.numel() // 3))  # so there are several chunks
                    try:
                        found = float(task.loss(model(**inputs, **{TARGETS: target}), target))
                    finally:
                        undo()
            finally:
                growing.remove()
            if not abs(found - expected) <= tolerance * max(1.0, abs(expected)):
                of_what = "a sample" if factor == 1.0 else f"a sample whose logits are {GROWN:g} times as large"
                return f"chunks give another loss of {of_what}, {found:.6g} and not {expected:.6g}"
    except Exception as error:  # whatever a model or a task of others raises
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        return f"chunks fail ({type(error).__name__}: {reason})"
    finally:
        model.to(home)
        if home != device:
            clear_device_cache()
    return None


def reads_scores(task: Task) -> bool:
    """Say whether a task's predictions, too, can do without logits.

    A subclass that has other predictions, and does not say ``scored_head`` itself, may want them.
    """
    says, predicts = (
        next((kind for kind in type(task).__mro__ if name in vars(kind)), Task) for name in ("scored_head", "predictions")
    )
    return task.scored_head and issubclass(says, predicts)

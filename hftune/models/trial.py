"""Trying two ways to compute the same thing: without leaving a trace, and what counts as the same. Knows no task.

Used before training for packing, the loss in chunks, pipeline stages, a task's sums, and attention kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from hftune.errors import first_line

EXACT = 1e-5
"""Largest difference of an output in float32, relative to the largest output if that is above 1."""
ROUGH = 0.05
"""The same in bfloat16 and float16."""

Place = tuple[nn.Module, str]
"""Where a buffer is: the module that has it, and its name there."""
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def named_buffers(model: nn.Module) -> dict[str, Place]:
    """Return where each buffer of the state dict is, by name.

    A buffer that is not in the state dict, such as a table of rotary embeddings, is a cache.
    """
    persistent = model.state_dict(keep_vars=True)
    places = {
        f"{prefix}.{name}" if prefix else name: (module, name)
        for prefix, module in model.named_modules()
        for name, _ in module.named_buffers(recurse=False, remove_duplicate=False)
    }
    return {name: place for name, place in places.items() if name in persistent}


@contextmanager
def restored_buffers(model: nn.Module) -> Iterator[dict[str, Place]]:
    """Restore the values of all buffers at the end. The dict yielded is then filled with the buffers that had changed."""
    places = named_buffers(model)
    buffers = {name: getattr(*place) for name, place in places.items()}
    values = {name: buffer.clone() for name, buffer in buffers.items()}
    changed: dict[str, Place] = {}
    try:
        yield changed
    finally:
        with torch.no_grad():
            for name, (module, key) in places.items():
                before, now = values[name], getattr(module, key)
                if now is None or now.shape != before.shape or now.dtype != before.dtype:
                    pass  # not a statistic, but something like a mask that has grown
                elif not isinstance(now, FakeTensor) and not torch.equal(now, before):
                    changed[name] = module, key
                buffers[name].copy_(before)
                setattr(module, key, buffers[name])


@contextmanager
def trying(model: nn.Module, device: torch.device | None = None, training: bool = False) -> Iterator[None]:
    """Compute without gradients on a device and in a mode; modes, buffers and random generators are restored at the end.

    Args:
        device: where the model is meanwhile. None: where it is.
    """
    modes = {module: module.training for module in model.modules()}
    home = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    device = device or home
    is_moved = device.type != home.type
    try:
        if is_moved:
            on_host = [(value, value.data) for value in model.parameters() if type(value) is nn.Parameter]
            model.to(device)
        generators = [device] if device.type == "cuda" else []
        with (
            torch.no_grad(),
            torch.random.fork_rng(generators),
            restored_buffers(model),
            torch.compiler.set_stance("force_eager"),
        ):
            model.train(training)
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        if is_moved:
            for value, data in on_host:  # nothing has changed them: no copy back, for each of which the host would wait
                value.data = data
            model.to(home)
            torch.accelerator.empty_cache()  # what the trial took on the device


def tolerance_of(device: torch.device, dtype: torch.dtype | None = None) -> float:
    """Return how far the results of two ways may lie apart. ``dtype``: of autocast, if it is on."""
    rounds_float32 = device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32
    return EXACT if dtype is None and not rounds_float32 else ROUGH


def alike(one: Any, other: Any, tolerance: float, masks: Sequence[Tensor] = (), floor: float = 1.0) -> bool:
    """Return whether two outputs of a model, of any structure, hold the same tensors but for rounding.

    Args:
        tolerance: largest difference, relative to the largest value of ``one``, or to ``floor`` if that is larger.
        masks: (B, T) each, not 0 for real tokens. Of tensors with a value for each token, only those of real ones are compared.
    """
    pairs = []
    for each in (one, other):
        if isinstance(each, Mapping):  # without what is kept for generation, which has no padding where the layers compute none
            each = {name: value for name, value in each.items() if name != "past_key_values"}
        pairs.append([value for value in tree_leaves(each) if isinstance(value, Tensor)])
    if len(pairs[0]) != len(pairs[1]) or not pairs[0]:
        return False
    for first, second in zip(*pairs, strict=True):
        if first.shape != second.shape:
            return False
        if fitting := [mask_BT.bool() for mask_BT in masks if first.shape[:2] == mask_BT.shape]:
            is_real = torch.stack(fitting).all(0).to(first.device)
            first, second = first[is_real], second[is_real]
        if first.numel():
            largest = max(floor, float(first.float().abs().max()))
            if not bool((first.float() - second.float()).abs().max() <= tolerance * largest):
                return False
    return True


def kernel_problem(
    kernel: Attention, reference: Attention, shape: Sequence[int], device: torch.device, dtype: torch.dtype
) -> str | None:
    """Return why an attention kernel cannot replace another one, a part of a sentence; None if both are equal, both ways.

    Draws no random numbers. May be called in the middle of a forward pass, whatever its modes, and leaves no trace there: a
    checkpoint counts the tensors that are saved for the backward pass, and would miss them when it computes again.

    Args:
        shape: of the queries, keys and values that are tried.
    """
    saved_here = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False), saved_here:
        count = torch.Size(shape).numel()
        wave = torch.arange(3 * count, device=device, dtype=torch.float32).mul(0.37).sin().to(dtype)
        inputs = [part.clone().requires_grad_() for part in wave.view(3, *shape)]

        def both_ways(attend: Attention) -> list[Tensor]:
            context = attend(*inputs)
            weight = torch.linspace(-1, 1, context.numel(), device=device).sin().view(context.shape)
            return [context, *torch.autograd.grad(context, inputs, weight.to(dtype))]

        try:
            found = both_ways(kernel)
        except Exception as error:  # compilers raise anything, and it only decides between two kernels
            return first_line(error)
        expected = both_ways(reference)
    tolerance = 0.05 if dtype.itemsize < 4 else 0.01  # of the largest value: a wrong token is far beyond
    pairs = zip(found, expected, strict=True)
    is_equal = all(bool((one - other).abs().max() <= tolerance * other.abs().max()) for one, other in pairs)
    return None if is_equal else "it computes something else"

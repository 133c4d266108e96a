"""How much memory a training step needs, without using it. Knows neither recipes nor processes.

In torch's FakeTensorMode tensors have shape, type and device but no values. A forward and backward pass of a terabyte model
takes milliseconds, and its tensors can be counted one by one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet, finalize

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from hftune.models.kinds import is_linear
from hftune.strategies.averages import averaged_names, to_training

NEEDS_VALUES = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
"""Raised when code asks a tensor without values for one of them, as ``tensor.item()`` does."""


@dataclass
class StepMemory:
    """Bytes of tensors on the device of a process at the peak of a step. Workspaces of kernels are not included."""

    peak_bytes: int
    """All of the following together, except ``frozen_bytes``."""
    weights_bytes: int
    """Parameters and buffers."""
    gradients_bytes: int
    """Those that exist at the peak, except in DDP's buckets."""
    optimizer_bytes: int
    """What the optimizer keeps for each parameter."""
    average_bytes: int
    """The moving average of ``train.ema_decay``."""
    activations_bytes: int
    """The rest: the batch, what the forward pass keeps for the backward pass, and intermediate results."""
    ddp_buckets_bytes: int = 0
    """DDP's buckets, which hold the gradients all the time."""
    receive_bytes: int = 0
    """In a pipeline: torch's receive buffers, one per micro-batch and direction, each as large as the largest micro-batch."""
    frozen_bytes: int = 0
    """Part of the weights: those that are not trained, as beside adapters; 0 if all parameters are."""
    gathered_bytes: int = 0
    """Under FSDP: weights that are whole while a block computes, and their gradients."""


def without_values(batch: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Return a batch whose tensors have no values; what is read on the host, such as the lengths of a packing, has them."""

    def without(value: Any) -> Any:
        if isinstance(value, Tensor):
            return torch.empty_like(value, device=device)
        return value.to(device) if hasattr(value, "to") else value

    return tree_map(without, dict(batch))


def as_fake(model: nn.Module, device: torch.device) -> None:
    """Put a model from the meta device on ``device``, in FakeTensorMode; shared tensors stay shared.

    Not built in FakeTensorMode: modules there cannot change their type, as ``model.double()`` does (torch 2.13).
    """
    made: dict[Tensor, Tensor] = {}
    own = {"recurse": False, "remove_duplicate": False}
    for module in model.modules():
        for name, value in [*module.named_parameters(**own), *module.named_buffers(**own)]:
            if value not in made:
                empty = torch.empty_like(value, device=device)
                made[value] = nn.Parameter(empty, value.requires_grad) if isinstance(value, nn.Parameter) else empty
            setattr(module, name, made[value])


@contextmanager
def experts_by_shape() -> Iterator[None]:
    """Let transformers' experts use their own operation in place of torch's, which (2.13) has shapes for bf16 alone."""
    experts: Any = sys.modules.get("transformers.integrations.moe")
    if experts is None:
        yield
        return
    original, experts._can_use_grouped_mm = experts._can_use_grouped_mm, lambda *arguments: False
    try:
        yield
    finally:
        experts._can_use_grouped_mm = original


class TensorBytes(TorchDispatchMode):
    """Count the bytes of all tensors created inside while they live, and the maximum at once.

    torch.distributed._tools.mem_tracker counts the same bytes ten times as slowly: at each operation it visits all
    modules (torch 2.13, a BERT of 12 layers: 14 s and 1.5 s).
    """

    def __init__(self):
        super().__init__()
        self.live, self.peak, self.gradients, self.gradients_at_peak = 0, 0, 0, 0
        self.given: set[Tensor] = set()
        """The parameters that a gradient has come to, in ``of_training``."""
        self._known: WeakSet[torch.UntypedStorage] = WeakSet()

    def add_all(self, tensors: Iterable[Tensor]) -> int:
        """Count tensors; return how many bytes they added."""
        before = self.live
        for tensor in tensors:
            self.add(tensor)
        return self.live - before

    def add(self, tensor: Tensor) -> None:
        """Count a tensor, unless it shares the storage of one that was counted."""
        storage = tensor.untyped_storage()
        if storage in self._known:
            return
        self._known.add(storage)
        size = storage.nbytes()
        finalize(storage, self._forget, size)
        self.live += size
        if self.live > self.peak:
            self.peak, self.gradients_at_peak = self.live, self.gradients

    def _forget(self, size: int) -> None:
        self.live -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                self.add(value)
        return result

    @contextmanager
    def of_training(self, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """Count what is computed inside; ``gradients`` are those of these parameters, there already or created inside."""
        trainable = [parameter for parameter in parameters if parameter.requires_grad]
        there = {parameter for parameter in trainable if parameter.grad is not None}
        self.gradients = self.add_all(parameter.grad for parameter in there)

        def came(parameter: Tensor) -> None:
            self.gradients += 0 if parameter in there else parameter.grad.nbytes
            self.given.add(parameter)

        hooks = [value.register_post_accumulate_grad_hook(came) for value in trainable]
        try:
            with self:
                yield
        finally:
            for hook in hooks:
                hook.remove()


def set_gradients(parameters: Iterable[nn.Parameter], exist: bool) -> None:
    """Let the gradients of the trainable parameters exist, as after an earlier pass or in DDP's buckets, or not."""
    for parameter in parameters:
        if parameter.requires_grad:
            parameter.grad = torch.empty_like(parameter) if exist else None


def average_bytes(model: nn.Module) -> int:
    """Return the bytes of a moving average of a model's weights, as ``train.ema_decay`` keeps it."""
    parameters, persistent = dict(model.named_parameters()), model.state_dict(keep_vars=True)
    tensors = parameters | {name: value for name, value in model.named_buffers() if name in persistent}
    return sum(tensors[name].nbytes for name in averaged_names(parameters, tensors))


PACKED = 1 / 2 + 1 / 64 + 4 / (64 * 256)
"""Bytes of a weight in 4 bits: these, a byte for each block of 64, and a float32 for each 256 blocks, in bitsandbytes."""


def packable_weights(model: nn.Module) -> list[nn.Parameter]:
    """Return the weights that ``adapter.quantize`` keeps in 4 bits: those of the frozen linear layers but the head."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    whole = {head, *(module.original_module for module in model.modules() if hasattr(module, "original_module"))}
    layers = [module for module in model.modules() if is_linear(module) and module not in whole]
    return [layer.weight for layer in layers if not layer.weight.requires_grad]


def make_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer all of its state: by a step, or, where a step asks tensors for values, as STATES says."""
    to_training(optimizer)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if (state_of := STATES.get(type(optimizer).__name__)) is not None:
        optimizer.state.update({parameter: state_of(parameter, optimizer) for parameter in parameters})
        return
    set_gradients(parameters, exist=True)
    optimizer.step()
    optimizer.zero_grad()


def _adafactor_state(parameter: Tensor, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return tensors like those that torch's Adafactor keeps: a number per row and per column of a matrix."""
    if parameter.ndim < 2:
        return {"variance": torch.empty_like(parameter)}
    *batch, rows, columns = parameter.shape
    return {"row_var": parameter.new_empty(*batch, rows, 1), "col_var": parameter.new_empty(*batch, 1, columns)}


def _8bit_state(parameter: Tensor, optimizer: Any) -> dict[str, Tensor]:
    """Return tensors like those that bitsandbytes' AdamW8bit keeps: two bytes per weight, and two scales per 256 of them."""
    if parameter.numel() < optimizer.args.min_8bit_size:
        return {f"state{index}": torch.empty_like(parameter, dtype=torch.float32) for index in (1, 2)}
    states = {f"state{index}": torch.empty_like(parameter, dtype=torch.uint8) for index in (1, 2)}
    blocks = -(-parameter.numel() // 256)
    return states | {f"absmax{index}": parameter.new_empty(blocks, dtype=torch.float32) for index in (1, 2)}


STATES: Mapping[str, Callable[[Tensor, Any], dict[str, Tensor]]] = {"Adafactor": _adafactor_state, "AdamW8bit": _8bit_state}
"""What the optimizers keep for each parameter whose steps ask tensors for values; by the names of their classes."""


def share_bytes(values: Iterable[Tensor], num_processes: int) -> int:
    """Return the bytes of the largest part of some tensors that a process has under FSDP, which cuts them by rows."""
    return sum(
        -(-len(value) // num_processes) * value[0].nbytes if value.numel() and value.ndim else value.nbytes for value in values
    )


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [value for value in tree_leaves([*optimizer.state.values()]) if isinstance(value, Tensor)]


def step_memory(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    forward_backward: Callable[[], None],
    has_gradients: bool,
    average_bytes: int = 0,
    counter: TensorBytes | None = None,
) -> StepMemory:
    """Measure one forward and backward pass of a model whose optimizer has its state; the gradients are kept.

    Args:
        has_gradients: memory for all gradients is taken before the pass, by an earlier pass or by DDP's buckets.
        average_bytes: of the moving average of the weights, which exists all the time.
        counter: a new one, which is left with the parameters that got a gradient.
    """
    counter = counter or TensorBytes()
    weights_bytes = counter.add_all([*model.parameters(), *model.buffers()])
    optimizer_bytes = counter.add_all(optimizer_tensors(optimizer))
    set_gradients(model.parameters(), has_gradients)
    with counter.of_training(model.parameters()):
        forward_backward()
    rest = counter.peak - weights_bytes - optimizer_bytes - counter.gradients_at_peak
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    has_frozen = len(trained) < len([*model.parameters()])
    return StepMemory(
        counter.peak + average_bytes,
        weights_bytes,
        counter.gradients_at_peak,
        optimizer_bytes,
        average_bytes,
        rest,
        frozen_bytes=weights_bytes - sum(parameter.nbytes for parameter in trained) if has_frozen else 0,
    )

"""Running statistics, as BatchNorm keeps them: found, averaged over a step, or frozen. Knows no process and no step.

A training forward pass updates them from the one micro-batch that it sees. Left alone, they would depend on which micro-batches
a process happened to compute, and in what order. Here every micro-batch starts from the statistics that the step started from,
and the results are averaged, weighted by samples: the same however the step is spread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase


def is_batch_norm(module: nn.Module) -> bool:
    """Say whether a module is one of torch's that keep running statistics."""
    return isinstance(module, _NormBase) and module.running_mean is not None


def named_buffers(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Return where each buffer of a state dict is, by name: the module that has it, and its name there.

    What is not in the state dict, such as a table of rotary embeddings, is a cache.
    """
    return {
        f"{prefix}.{name}" if prefix else name: (module, name)
        for prefix, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }


@contextmanager
def restored_buffers(model: nn.Module) -> Iterator[dict[str, tuple[nn.Module, str]]]:
    """Give all buffers their values back at the end; what is yielded fills with those that had changed by then."""
    found = named_buffers(model)
    kept = {name: (module._buffers[key], module._buffers[key].clone()) for name, (module, key) in found.items()}
    changed: dict[str, tuple[nn.Module, str]] = {}
    try:
        yield changed
    finally:
        with torch.no_grad():
            for name, (module, key) in found.items():
                (buffer, before), now = kept[name], module._buffers[key]
                if now is None or now.shape != before.shape or now.dtype != before.dtype:
                    pass  # something else than a statistic, such as a mask that has grown
                elif not torch.equal(now, before):
                    changed[name] = module, key
                buffer.copy_(before)
                module._buffers[key] = buffer


def buffer_versions(model: nn.Module) -> dict[str, int]:
    """Return how often each buffer has been written to."""
    return {name: module._buffers[key]._version for name, (module, key) in named_buffers(model).items()}


def written_buffers(model: nn.Module, before: Mapping[str, int]) -> list[tuple[nn.Module, str]]:
    """Return where the buffers are that were written to since ``buffer_versions``, or that torch writes to in training.

    For models without values, which cannot be compared.
    """
    now = buffer_versions(model)
    return [place for name, place in named_buffers(model).items() if is_batch_norm(place[0]) or now[name] != before.get(name)]


class RunningStatistics:
    """The buffers that a training forward pass changes, within one step.

    Each pass works on copies: what autograd has kept of them for the backward pass is never overwritten, and a pass that
    gradient checkpointing repeats in the backward starts from the same values and leaves no trace.
    """

    def __init__(self, places: Sequence[tuple[nn.Module, str]], exact: torch.dtype):
        self.places, self.exact = list(places), exact
        self._modules = list(dict.fromkeys(module for module, _ in self.places))
        self._start: list[Tensor] = []
        self._sums: list[Tensor] = []
        self._weight = 0.0

    def begin(self) -> None:
        """Note the statistics that the step starts from."""
        self._start = [module._buffers[key] for module, key in self.places]
        self._sums = [torch.zeros_like(buffer, dtype=self.exact) for buffer in self._start]
        self._weight = 0.0

    @contextmanager
    def micro_batch(self, weight: float) -> Iterator[None]:
        """Wrap the forward pass of one micro-batch that counts as so many samples; 0 for a stand-in."""
        self._use_copies()
        yield
        if weight:
            for total, (module, key) in zip(self._sums, self.places, strict=True):
                total.add_(module._buffers[key].detach().to(self.exact), alpha=weight)
            self._weight += weight
        self._use_copies()

    @contextmanager
    def at_rest(self, resting: bool) -> Iterator[None]:
        """Within a stand-in's passes, let the modules only use their statistics: a sample alone may have none of its own."""
        training = [module.training for module in self._modules]
        for module in self._modules if resting else ():
            module.training = False
        try:
            yield
        finally:
            for module, was_training in zip(self._modules, training, strict=True):
                module.training = was_training

    def _use_copies(self) -> None:
        for (module, key), buffer in zip(self.places, self._start, strict=True):
            module._buffers[key] = buffer.clone()

    @torch.no_grad()
    def finish(self, sum_up: Callable[[Tensor], Tensor]) -> None:
        """Put the average over the step's micro-batches in place; ``sum_up`` adds up a tensor over the processes."""
        if not self.places:
            return
        device = self._start[0].device
        own = [*self._sums, torch.tensor([self._weight], dtype=self.exact, device=device)]
        *sums, weight = sum_up(torch.cat([value.flatten() for value in own])).split([value.numel() for value in own])
        for (module, key), buffer, total in zip(self.places, self._start, sums, strict=True):
            mean = (total / weight).view_as(buffer)
            buffer.copy_(mean if buffer.is_floating_point() else mean.round())
            module._buffers[key] = buffer


def freeze(modules: Iterable[nn.Module]) -> None:
    """Keep modules in evaluation mode in every forward pass, whatever mode the model is put into."""
    for module in modules:
        module.register_forward_pre_hook(_stay_in_evaluation_mode)


def _stay_in_evaluation_mode(module: nn.Module, args: object) -> None:
    module.training = False


def class_names(places: Iterable[tuple[nn.Module, str]]) -> list[str]:
    """Return the names of the classes whose buffers these are, sorted."""
    return sorted({type(module).__name__ for module, _ in places})


def notice(kinds: Sequence[str], how: str, micro_batch_size: int | str | None) -> str | None:
    """Say what running statistics mean for the results.

    Args:
        kinds: classes of the modules that keep them.
        how: ``train.batch_norm``.
    """
    if not kinds:
        return "train.batch_norm=frozen: the model has no running statistics to freeze." if how == "frozen" else None
    if how == "frozen":
        return f"train.batch_norm=frozen: {', '.join(kinds)} uses its running statistics in training and keeps them."
    batch_norm = all("BatchNorm" in kind for kind in kinds)
    what = f"{'normalises' if batch_norm else 'takes running statistics from'} each micro-batch by itself"
    size = ", which auto chooses by the memory there is," if micro_batch_size == "auto" else ""
    return (
        f"{', '.join(kinds)} {what}: results depend on train.micro_batch_size{size} but not on the number of processes. Use "
        "GroupNorm or train.batch_norm=frozen if they should depend on neither."
    )

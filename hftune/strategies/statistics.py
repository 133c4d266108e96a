"""Running statistics, as BatchNorm keeps them: found, averaged over a step, or frozen. Independent of processes and steps.

A training forward pass updates them from the one micro-batch that it sees. Left alone, they would depend on which micro-batches
a process happened to compute, and in what order. Here every micro-batch starts from the statistics that the step started from,
and the results are averaged, weighted by samples: the same however the step is spread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hftune.config import TrainConfig
from hftune.models.trial import Place


def has_running_statistics(module: nn.Module) -> bool:
    """Return whether a module keeps running statistics, as torch's BatchNorm and InstanceNorm do."""
    return isinstance(getattr(module, "running_mean", None), Tensor)


class RunningStatistics:
    """The buffers that a training forward pass changes, within one step.

    Each pass works on copies. So what autograd keeps of them for the backward pass is never overwritten, and a pass that
    gradient checkpointing repeats in the backward pass starts from the same values and leaves no trace.
    """

    def __init__(self, places: Sequence[Place], exact: torch.dtype):
        self.places, self.exact = list(places), exact
        self._modules = list(dict.fromkeys(module for module, _ in self.places))
        self._start: list[Tensor] = []
        self._sums: list[Tensor] = []
        self._weight = 0.0

    def begin(self) -> None:
        """Record the statistics that the step starts from."""
        self._start = [getattr(*place) for place in self.places]
        self._sums = [torch.zeros_like(buffer, dtype=self.exact) for buffer in self._start]
        self._weight = 0.0

    @contextmanager
    def micro_batch(self, weight: float) -> Iterator[None]:
        """Wrap the forward pass of one micro-batch.

        Args:
            weight: samples that it counts as; 0 for a dummy.
        """
        self._use_copies()
        yield
        if weight:
            for total, place in zip(self._sums, self.places, strict=True):
                total.add_(getattr(*place).detach().to(self.exact), alpha=weight)
            self._weight += weight
        self._use_copies()

    @contextmanager
    def at_rest(self, resting: bool) -> Iterator[None]:
        """Let the modules use their statistics without updating them, if ``resting``.

        For dummies: a single sample may have no statistics of its own.
        """
        training = [module.training for module in self._modules]
        for module in self._modules if resting else ():
            module.training = False
        try:
            yield
        finally:
            for module, was_training in zip(self._modules, training, strict=True):
                module.training = was_training

    def _use_copies(self) -> None:
        for place, buffer in zip(self.places, self._start, strict=True):
            setattr(*place, buffer.clone())

    def own(self) -> list[Tensor]:
        """Return what this process adds to the sums of a step: flat tensors, none without statistics."""
        weight = [total.new_full((1,), self._weight) for total in self._sums[:1]]  # no copy to a GPU
        return [total.flatten() for total in self._sums] + weight

    @torch.no_grad()
    def finish(self, sums: Tensor) -> None:
        """Replace the statistics by their average over the step's micro-batches.

        Args:
            sums: over all processes, of their ``own`` one after the other.
        """
        *totals, weight = sums.split([*[buffer.numel() for buffer in self._start], len(self._start[:1])])
        for place, buffer, total in zip(self.places, self._start, totals, strict=True):
            mean = (total / weight).view_as(buffer)
            buffer.copy_(mean if buffer.is_floating_point() else mean.round())
            setattr(*place, buffer)


def freeze(modules: Iterable[nn.Module]) -> None:
    """Keep modules in evaluation mode in every forward pass, whatever mode the model is put into."""
    for module in modules:
        module.register_forward_pre_hook(lambda module, args: setattr(module, "training", False))


def class_names(places: Iterable[Place]) -> list[str]:
    """Return the names of the classes whose buffers these are, sorted."""
    return sorted({type(module).__name__ for module, _ in places})


def notice(classes: Sequence[str], config: TrainConfig) -> str | None:
    """Return what running statistics mean for the results, in a sentence; None if there is nothing to say.

    Args:
        classes: names of the modules' classes that keep them.
    """
    frozen = config.batch_norm == "frozen"
    if not classes:
        return "train.batch_norm=frozen: the model has no running statistics to freeze." if frozen else None
    names = ", ".join(classes)
    if frozen:
        return f"train.batch_norm=frozen: {names} uses its running statistics in training and does not update them."
    batch_norm = all("BatchNorm" in name for name in classes)
    what = "normalises each micro-batch by itself" if batch_norm else "takes running statistics from each micro-batch by itself"
    bounds = {f"train.{name}": getattr(config, name) for name in ("micro_batch_size", "micro_batch_tokens")}
    keys = " and ".join(key for key, value in bounds.items() if value is not None) or "train.micro_batch_size"
    if config.micro_batch_tokens == "auto":  # at most a process's share of a step
        rest = ", which auto chooses by the available memory and the number of processes"
    else:
        rest = ", which auto chooses by the available memory," if "auto" in bounds.values() else ""
        rest += " but not on the number of processes"
    return (
        f"{names} {what}: results depend on {keys}{rest}. Use GroupNorm or train.batch_norm=frozen if they should depend on "
        "neither."
    )

"""The contract between the loop and the way a step is spread over processes. Knows no recipe, no epoch and no metric."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hftune.batch_plan import MicroBatch
from hftune.distributed.progress import Progress
from hftune.errors import ElsewhereError
from hftune.task import Task


@dataclass
class StepBatch:
    """What one process computes of one optimizer step."""

    plan: list[MicroBatch]  # of the whole step, the same on every process
    mine: list[MicroBatch]
    weights: list[int]
    """1 for a micro-batch of mine, or 0 for a stand-in: a sample that another process computes, too, and counts. It is there
    because every process has to take part where they communicate."""
    batches: list[dict[str, Tensor]] = field(default_factory=list)  # one a micro-batch of mine, on the CPU


@dataclass(frozen=True)
class StepReport:
    """What one step came to; equal on all processes."""

    loss: float
    """Mean over the items of the global batch."""
    num_items: float
    num_samples: int
    digest: str
    """Of the samples that were computed, whatever their order and whoever computed them; see ``samples_digest``."""
    stop: bool
    """Whether any process was asked to stop."""


class Strategy(ABC):
    """Invariant: a global batch gives the same loss and the same gradient however it is spread.

    Every method is collective (all processes must call it, in the same order) unless it says otherwise.
    """

    task: Task
    process_index: int
    num_processes: int
    device: torch.device
    progress: Progress
    """Told of each micro-batch before it is loaded, and before it is computed."""
    model: nn.Module
    """For ``task.predictions`` to call while ``evaluation_batches`` are taken: whole, and its forward waits for no process."""

    @abstractmethod
    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Take over model and optimizer: move, wrap, make all processes start from the main process's weights."""

    def notices(self) -> list[str]:
        """Return what a user should know of how the work is spread; one sentence each, said once. Not collective."""
        return []

    @abstractmethod
    def fits(self, dataset: Any, samples: np.ndarray) -> bool:
        """Return whether all processes have the memory to train on these samples in one forward pass, beside the optimizer."""

    @abstractmethod
    def rehearse(self, dataset: Any, micro_batch: MicroBatch, frozen: bool = False) -> list[str]:
        """Before the first step of this process: do once whatever only the first one does, and leave no trace of it.

        Finds the buffers that a training forward pass changes, as BatchNorm's running statistics. From here on a step averages
        what its micro-batches make of them; or, where they are to be ``frozen``, their modules only use them.

        Returns:
            The classes of the modules that have such buffers, equal on all processes.
        """

    @abstractmethod
    def batches(
        self, dataset: Any, steps: Sequence[list[MicroBatch]], first_step: int, num_workers: int
    ) -> Iterator[StepBatch]:
        """Yield this process's part of each step from ``first_step`` on. Not collective."""

    @abstractmethod
    def evaluation_batches(
        self, dataset: Any, micro_batches: list[MicroBatch], num_workers: int, should_stop: Callable[[], bool]
    ) -> Iterator[tuple[MicroBatch, dict[str, Tensor]]]:
        """Yield this process's share of the micro-batches, on the device; shares may be empty.

        Until the last one is taken the model is in evaluation mode, the same on all processes (running statistics, too),
        and random draws, such as those of sampled generation, are keyed by micro-batch. They end early where ``should_stop``
        became true here, or on a process that this one computes together with.
        """

    @abstractmethod
    def forward_backward(self, batch: StepBatch, seed: int, step: int, stop: bool = False) -> StepReport:
        """Accumulate the gradient of the step's mean loss (float32 maths). ``stop``: this process was asked to stop."""

    @abstractmethod
    def not_finite(self, batch: StepBatch) -> list[str]:
        """Say which processes met a loss that is not finite in the last ``forward_backward``, and on which samples."""

    @abstractmethod
    def clip_grad_norm(self, max_norm: float | None) -> float:
        """Scale the gradient down to ``max_norm``; return its global norm before that, equal on all processes."""

    @abstractmethod
    def optimizer_step(self, lr: float) -> None:
        """Apply the gradient at this learning rate and forget it."""

    @abstractmethod
    def forward(self, batch: dict[str, Tensor]) -> Any:
        """Return the outputs for one of ``evaluation_batches``, without gradient. Not collective."""

    @abstractmethod
    def state(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]] | None:
        """Return what a checkpoint holds of model and optimizer on the main process, None elsewhere.

        Groups of tensors under parameter names, on the host, and plain values (the gradient scaler's). The tensors are
        copies, which the next call overwrites.
        """

    @abstractmethod
    def load_state(self, saved: tuple[dict[str, dict[str, Tensor]], dict[str, Any]] | None) -> None:
        """Take over what ``state`` returned, at any number of processes. Main process: the state; others: None.

        Raises:
            ValueError: on all processes, where names or shapes are not those of this model; the message names the first.
        """

    @abstractmethod
    def unwrap(self) -> nn.Module:
        """Return the plain, whole model with its current weights on the main process; elsewhere it may have none."""

    @abstractmethod
    def gather_to_main(self, rows: list, at_once: int = 1000) -> list | None:
        """Return all processes' rows, in process order, on the main process; None elsewhere.

        ``at_once`` rows of each process are sent together, from CPU to CPU.
        """

    @abstractmethod
    def broadcast(self, value: Any) -> Any:
        """Return the main process's value on all."""

    @abstractmethod
    def any_process(self, flag: bool) -> bool:
        """Return whether ``flag`` is true on any process, on all."""

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes. Guards output only, never a collective."""
        return self.process_index == 0

    def on_main(self, function: Callable[[], Any]) -> Any:
        """Run ``function`` on the main process and return its value on all; where it fails, fail on all, at once.

        Raises:
            ElsewhereError: on the other processes, with the main process's message; it raises its own error itself.
        """
        value, failure, error = None, None, None
        if self.is_main:
            try:
                value = function()
            except Exception as caught:
                error, failure = caught, f"{type(caught).__name__}: {caught}"
        value, failure = self.broadcast((value, failure))
        if error is not None:
            raise error
        if failure is not None:
            raise ElsewhereError(f"The main process failed: {failure}")
        return value


def seed_forward(seed: int, step: int, micro_batch_index: int, device: torch.device, layer: int = 0) -> None:
    """Key the random draws of one forward pass (dropout) by what is computed, not by who computes it.

    Hence dropout does not depend on the number of processes, and resuming needs no generator states. ``layer`` keys the part of
    the pass that begins with this layer, from 1.
    Source: numpy.random.SeedSequence, whose hash is fixed across numpy's versions.
    """
    what = [seed, step, micro_batch_index, layer] if layer else [seed, step, micro_batch_index]
    key = int(np.random.SeedSequence(what).generate_state(1, np.uint64)[0]) >> 1
    # torch.manual_seed would do both, and visit every backend there might be: half a millisecond, for each forward.
    torch.default_generator.manual_seed(key)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(key)


class LayerSeeds:
    """Keys the draws of each layer by itself, so that they do not depend on who computed the layers before it.

    Used for models that can be cut into stages, cut or not. A hook at the end of each layer seeds for the next: one at the
    beginning would run again, with another micro-batch's key, where gradient checkpointing computes a layer anew.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._forward = (0, 0, 0)

    def watch(self, layers: Sequence[nn.Module]) -> None:
        """Seed after each layer in training mode but the last."""
        for number, layer in enumerate(layers[:-1], start=1):
            layer.register_forward_hook(partial(self._seed_next, number))

    def begin(self, seed: int, step: int, micro_batch_index: int, layer: int = 0) -> None:
        """Seed for one forward pass, or for its part from ``layer`` on."""
        self._forward = seed, step, micro_batch_index
        seed_forward(*self._forward, self.device, layer)

    def _seed_next(self, layer: int, module: nn.Module, args: Any, output: Any) -> None:
        if module.training:  # sampled generation calls the layers for each token, and is seeded once
            seed_forward(*self._forward, self.device, layer)

    def __deepcopy__(self, memo: Any) -> LayerSeeds:
        return self  # the stages of a cut model are copies of it, hooks included

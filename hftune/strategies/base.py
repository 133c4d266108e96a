"""The contract between the loop and the way a step is spread over processes. Independent of recipes, epochs and metrics.

A strategy is a ``Collectives`` (hftune/distributed/collectives.py), by which processes talk to each other, and has a
``Sharding`` (hftune/strategies/sharding.py), which knows what each process holds of weights, gradient and optimizer state.
A new strategy is a subclass of ``Strategy`` with its own ``Sharding``, and implements the abstract methods.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import takewhile, tee
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from accelerate.utils.memory import should_reduce_batch_size
from torch import Tensor, nn

from hftune.batch_plan import MicroBatch, balance, format_digest, samples_digest
from hftune.distributed.collectives import Collectives
from hftune.distributed.progress import Progress
from hftune.errors import TrainingError
from hftune.strategies.loading import Loader, SideStream, read_ahead
from hftune.strategies.packing import PACKING, padding_of
from hftune.strategies.seeds import seed_forward
from hftune.strategies.sharding import Sharding
from hftune.strategies.statistics import RunningStatistics
from hftune.strategies.step_times import StepTimes
from hftune.task import Task

if TYPE_CHECKING:
    from hftune.strategies.teacher import Teacher


class Asks(NamedTuple):
    """What is to happen after a step that all processes finish. One process may ask for it: the step's sums tell the others."""

    interrupt: bool = False
    """A signal has asked to stop: write a checkpoint and leave."""
    end: bool = False
    """A callback has asked to end the training here, as if this were the last step."""
    evaluation: bool = False
    checkpoint: bool = False
    log: bool = False
    """By the clock, a line of metrics.jsonl is due."""


NOTHING_ASKED = Asks()


@dataclass
class StepBatch:
    """What one process computes of one optimizer step."""

    plan: list[MicroBatch]  # of the whole step, the same on every process
    mine: list[MicroBatch]
    weights: list[int]
    """1 for a micro-batch of mine; 0 for a dummy: a sample that another process computes as well, and counts. Dummies are
    there because every process has to take part in the collectives of a step."""
    batches: list[dict[str, Tensor]] = field(default_factory=list)
    """One for each micro-batch of mine: on the device already, or on the CPU."""
    counts: list[float] = field(default_factory=list)
    """See ``Strategy.counts``."""
    padding: list[Any] = field(default_factory=list)
    """See ``Strategy.padding``: one for each of ``batches``."""
    copied: torch.cuda.Event | None = None
    """When a GPU has the batches."""


@dataclass(frozen=True)
class StepReport:
    """The results of one step, equal on all processes."""

    loss: float
    """Mean over the items of the global batch."""
    grad_norm: float
    """Global norm of the gradient before it was clipped."""
    num_items: float
    num_samples: int
    digest: str
    """Of the samples that were computed, independent of their order and of who computed them; see ``samples_digest``."""
    asks: Asks
    """Of all processes together."""
    teacher_kl: float | None = None
    """Divergence from the teacher, mean over the items; None without one."""


class Strategy(Collectives, ABC):
    """How the processes compute one optimizer step, and one evaluation.

    Invariant: a global batch gives the same loss and the same gradient however it is spread. Every method is collective (all
    processes must call it, in the same order) unless it says otherwise.
    """

    model: nn.Module
    """What ``task.predictions`` is given in an evaluation: a full model, whose forward pass waits for no other process; or what
    stands for it if there is none."""
    sharding: Sharding
    computes_alone = False
    """Whether a process computes its part of a step without waiting for others until the gradient is summed; see StepTimes."""

    def __init__(self, accelerator: Accelerator, task: Task, progress: Progress | None = None):
        super().__init__(accelerator, progress)
        self.task = task
        self.dp_rank, self.dp_size = self.process_index, self.num_processes
        """Which of the ``dp_size`` shares of an evaluation this process computes. Several may compute one, in a pipeline."""
        self.together = 1
        """Of these shares, how many neighbouring ones are one share of a step; see ``parallel.context``."""
        self.counts_samples = True
        """Whether this process reports the samples of its share."""
        self.exact = torch.float32 if self.device.type == "mps" else torch.float64  # Metal has no float64
        self.times = StepTimes(self.device, self.process_index, self.num_processes, self.computes_alone)
        self.collate_packed: Callable[[list[Any]], dict[str, Any]] | None = None
        """Collates for training without padding; set before ``prepare``. Evaluations pad, as they are sorted."""
        self.scores_head = False
        """Whether the model computes the loss together with its head, given targets; set before ``prepare``."""
        self.teacher: Teacher | None = None
        """Of ``train.teacher``; set before ``prepare``."""
        self.statistics = RunningStatistics([], self.exact)
        """Which all processes average over a step; those of a pipeline's stages are the stages'."""
        self.most: tuple[int | None, int | None] = 0, 0
        """Bounds of a micro-batch: its samples, and its tokens; None: no bound. Set before the first step."""
        self._loaders: dict[str, Loader] = {}
        """Of training and evaluation."""
        # Of the last forward_backward. Tensors are on the device.
        self._counts: list[float] = []
        """What this process added to the sums."""
        self._sums = torch.zeros(())
        self._totals: Callable[[], Tensor] = lambda: self._sums
        """Waits for the sums of losses and running statistics, and returns them."""
        self._micro_losses: list[Tensor] = []
        self._is_finite = True
        """Whether the gradient was, in the last ``report``."""
        self._padding: dict[tuple[int, ...], bool] | None = None
        """Of the last of ``evaluation_batches``."""

    def tried(self, model: nn.Module, trial: Callable[[nn.Module], Any]) -> Any:
        """Return, on all processes, what a trial of a model says on the main process, before ``prepare``. Collective.

        The trial leaves the model as it is.
        """
        return self.on_main(lambda: trial(model))

    @abstractmethod
    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Take over model and optimizer: move, wrap, and start all processes from the main process's weights.

        Sets ``self.model``, and calls ``self.sharding.prepare``.
        """

    @abstractmethod
    def warm_up(self, dataset: Any, micro_batch: MicroBatch, frozen: bool = False) -> list[str]:
        """Before the first step of this process, run one backward pass for its side effects, and leave no trace of it.

        Refuses parameters that get no gradient. Finds the buffers that a training forward pass changes, such as BatchNorm's
        running statistics. From then on a step averages them over its micro-batches.

        Args:
            frozen: their modules only use these statistics, and never update them.

        Returns:
            The class names of the modules that have such buffers, equal on all processes.

        Raises:
            TrainingError: on all processes, for parameters without a gradient.
        """

    def fits(self, dataset: Any, samples: np.ndarray) -> bool:
        """Return, equal on all processes, whether each one has the memory to train on these samples in one forward pass.

        Raises:
            NotImplementedError: this strategy cannot find out.
        """
        raise NotImplementedError(
            f"{type(self).__name__} cannot find out what fits; recipes that ask for it are refused earlier"
        )

    @abstractmethod
    def num_dummies(self, step: Sequence[MicroBatch], num_mine: int, num_shares: int) -> int:
        """Return how many forward passes this process has to compute after its share of a step. Not collective.

        It may depend only on the step, on the number of shares that it is cut into, and on this process's rank.
        """

    def assign(self, step: list[MicroBatch]) -> StepBatch:
        """Return what this process computes of a step: its micro-batches, then dummies. Not collective.

        Together the processes compute each micro-batch with weight 1 exactly once.
        """
        mine = self.share(step, self.together)
        count = self.num_dummies(step, len(mine), self.dp_size // self.together)
        return StepBatch(step, [*mine, *[dummy_micro_batch(step)] * count], [1] * len(mine) + [0] * count)

    @abstractmethod
    def backward(self, batch: StepBatch, seed: int, step: int, items: Callable[[], Tensor]) -> list[Tensor]:
        """Accumulate the gradient of ``sum of losses / items`` over the whole step, on all processes.

        Args:
            items: waits for the other processes, and returns those of the global batch: a scalar on the device.

        Returns:
            The summed loss of each micro-batch of this process, times its weight: scalars on the device. Zeros on a process
            whose losses another one reports. The sum over all processes is the loss of the step.
        """

    @abstractmethod
    def clip_grad_norm(self, max_norm: float | None) -> Tensor:
        """Scale the gradient down to ``max_norm``, without waiting for the device.

        Args:
            max_norm: None: measure the norm and leave the gradient as it is.

        Returns:
            Its global norm before that, equal on all processes: a scalar on the device.
        """

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Let the model be in evaluation mode and the same on all processes."""
        self.sharding.share_statistics()
        self.sharding.wrapped.eval()
        try:
            yield
        finally:
            self.sharding.wrapped.train()

    @contextmanager
    def predicting(self, model: nn.Module) -> Iterator[tuple[nn.Module, Callable[[], None]]]:
        """Within ``with``, let this process use a finished model for itself, as often as it likes.

        Instead of ``prepare``. Collective.

        Yields:
            The model in evaluation mode, and a function that all have to call before they do anything together. Collective.
        """
        yield model.to(self.device).eval(), lambda: None

    @abstractmethod
    def forward(self, batch: dict[str, Tensor]) -> Any:
        """Return the outputs for one of ``evaluation_batches``, without gradient. To be called once for each of them."""

    def rounding_once(self) -> AbstractContextManager[None]:
        """Within ``with``: let autocast round each weight once, not once in each forward pass. Not collective.

        It keeps what it has rounded until its outermost context ends, which this one is; under FSDP it keeps nothing. No weight
        may change within, and no forward pass without gradient may come before one with it, which would find weights that lead
        to no parameter.
        """
        return torch.autocast(self.device.type, enabled=False)

    def notices(self) -> list[str]:
        """Return what a user should know about how the work is spread, one sentence each. Not collective."""
        return []

    @property
    def reads_ahead(self) -> bool:
        """Whether a thread loads the next step while this one is computed. A CPU that computes cannot spare one."""
        return self.device.type == "cuda"

    @property
    def precision(self) -> str:
        """Of forward and backward passes: no (float32), bf16 or fp16."""
        return self.accelerator.mixed_precision

    def share(self, micro_batches: Sequence[MicroBatch], together: int = 1) -> list[MicroBatch]:
        """Return the micro-batches that this process computes, balanced by cost. Not collective.

        Args:
            together: number of neighbouring shares that are one.
        """
        shares = balance([micro_batch.cost for micro_batch in micro_batches], self.dp_size // together)
        return [micro_batches[index] for index in shares[self.dp_rank // together]]

    def loader(self, dataset: Any, num_workers: int, is_packed: bool) -> Loader:
        """Return a new loader of collated batches. Not collective."""
        collate = self.collate_packed if self.collate_packed is not None and is_packed else self.task.collate
        return Loader(dataset, collate, num_workers, pin_memory=self.device.type == "cuda")

    def _kept_loader(self, use: str, dataset: Any, num_workers: int) -> Loader:
        """Return the loader of training or evaluation, whose workers live until another data set takes its place."""
        kept = self._loaders.get(use)
        if kept is None or kept.dataset is not dataset or kept.num_workers != num_workers:
            if kept is not None:
                kept.close()
            kept = self._loaders[use] = self.loader(dataset, num_workers, is_packed=use == "training")
        return kept

    def end_workers(self) -> None:
        """End the loaders' workers, which live between epochs and evaluations. Not collective."""
        for loader in self._loaders.values():
            loader.close()
        self._loaders.clear()

    def batches(
        self, dataset: Any, steps: Iterable[list[MicroBatch]], num_workers: int, epoch: int = 0
    ) -> Generator[StepBatch, None, None]:
        """Yield this process's part of each step, with its samples loaded. Not collective.

        The samples are augmented for ``epoch``. Close the iterator if it is not read to its end: it may have a thread.
        """
        # The loader may run ahead of the steps, so it needs an iterator of its own.
        assigned, ahead = tee(map(self.assign, steps))
        samples = (micro_batch.samples.tolist() for batch in ahead for micro_batch in batch.mine)
        side = self._side_stream() if self.reads_ahead else None
        loading = Progress() if self.reads_ahead else self.progress  # a thread has not come to this step yet
        with self.times.loading():
            loaded = self._kept_loader("training", dataset, num_workers).read(samples, epoch)
        in_order = self._filled(assigned, loaded, loading, side)
        with closing(read_ahead(in_order) if self.reads_ahead else in_order) as filled:
            while True:
                if side is not None:
                    side.await_computed()
                self.progress.samples(loading.current_samples)  # which are waited for, or could not be loaded
                try:
                    with self.times.loading():
                        batch = next(filled, None)
                except Exception:
                    self.progress.samples(loading.current_samples)
                    raise
                if batch is None:
                    return
                if side is not None:
                    side.await_copies(batch.copied)
                yield batch

    def _side_stream(self) -> SideStream | None:
        return SideStream(self.device) if self.device.type == "cuda" else None

    def _filled(
        self, assigned: Iterator[StepBatch], loaded: Iterator[dict[str, Tensor]], loading: Progress, side: SideStream | None
    ) -> Generator[StepBatch, None, None]:
        """Yield steps with their samples loaded and counted, and, with a side stream, on their way to the device."""
        for batch in assigned:
            with nullcontext() if side is None else side.current():
                for micro_batch in batch.mine:
                    loading.samples(micro_batch.samples)
                    self.progress.tick()  # slow loading is no stall
                    batch.batches.append(next(loaded))
                batch.counts = self.counts(batch)
                batch.padding = [*map(self.padding, batch.batches)]
                if side is not None:
                    batch.batches, batch.copied = side.copy(batch.batches)
            yield batch

    def evaluation_batches(
        self, dataset: Any, micro_batches: list[MicroBatch], num_workers: int, should_stop: Callable[[], bool]
    ) -> Iterator[tuple[MicroBatch, dict[str, Tensor], float]]:
        """Yield this process's share of the micro-batches, on the device, and the items of each; shares may be empty.

        Until the last one is taken, the model is in evaluation mode and the same on all processes, running statistics
        included. Random draws, such as those of sampled generation, are keyed by micro-batch. The batches end early if
        ``should_stop`` became true here, or on a process that computes the same micro-batches. A micro-batch may come twice,
        of which the second time counts: if a task turns out to use the model, see ``FullySharded``.
        """
        mine = self.share(micro_batches)
        loaded = self.evaluated(dataset, mine, num_workers)
        with self.evaluating():
            for micro_batch in takewhile(lambda _: not should_stop(), mine):
                self.progress.samples(micro_batch.samples)
                on_host = next(loaded)
                self._padding = self.padding(on_host)
                batch = send_to_device(on_host, self.device, non_blocking=True)
                seed_forward(0, 0, micro_batch.index, self.device)
                yield micro_batch, batch, float(self.task.num_items(self.task.target(on_host)))

    def padding(self, batch: dict[str, Tensor]) -> dict[tuple[int, ...], bool] | None:
        """Return what ``told_of_padding`` takes of a batch that is still on the host; None: a CPU may look itself."""
        return None if self.device.type != "cuda" or PACKING in batch else padding_of(self.task.inputs(batch))

    def evaluated(self, dataset: Any, mine: Sequence[MicroBatch], num_workers: int) -> Iterator[dict[str, Tensor]]:
        """Return the batches of an evaluation's micro-batches, on the CPU. Not collective."""
        lists = [micro_batch.samples.tolist() for micro_batch in mine]
        return self._kept_loader("evaluation", dataset, num_workers).read(lists)

    def forward_backward(self, batch: StepBatch, seed: int, step: int, asks: Asks = NOTHING_ASKED) -> None:
        """Accumulate the gradient of the step's mean loss, in float32. Does not wait for the device.

        What else the processes add up travels beside the forward pass, and beside clipping: ``report`` waits for the latter.

        Args:
            asks: what this process asks for. It travels with the sums of the step, and ``report`` has everybody's.
        """
        self._counts = [*batch.counts, *asks]
        told = torch.tensor([*self._counts, *self.times.told()], dtype=self.exact, pin_memory=self.device.type == "cuda")
        counted = self.sum_later(told.to(self.device, non_blocking=True))  # from pinned memory, without waiting

        def items() -> Tensor:
            with self.times.waiting():
                self._sums = counted()
            return self._sums[0]

        self._micro_losses = self.backward(batch, seed, step, items)
        own = [torch.stack(self._micro_losses).sum(dtype=self.exact)]
        if self.teacher is not None:
            own.append(self.teacher.total.to(self.exact))
        self._totals = self.sum_later(torch.cat([torch.stack(own), *self.statistics.own()]))

    def report(self, grad_norm: Tensor) -> StepReport:
        """Read the results of ``forward_backward`` and ``clip_grad_norm``: the only wait for the device in a step."""
        totals, statistics = self._totals().tensor_split([1 if self.teacher is None else 2])
        self.statistics.finish(statistics)
        norm, *sums = torch.cat([grad_norm.to(self.exact).view(1), self._sums, totals / self._sums[0]]).tolist()
        self._is_finite = math.isfinite(norm)
        loss, *others = sums[len(self._sums) :]
        counts, seconds = sums[: len(self._counts)], sums[len(self._counts) : len(self._sums)]
        if self.num_processes == 1:
            counts = self._counts  # exact even on a device without float64
        num_items, num_samples, low, high, *asked = counts
        self.times.add(seconds)
        asks = Asks(*(count > 0 for count in asked))
        return StepReport(loss, norm, num_items, int(num_samples), format_digest(low, high), asks, *others)

    def counts(self, batch: StepBatch) -> list[float]:
        """Return what this process adds to the step's number of items, number of samples, and two sums of their digest.

        The sums over all processes must be those of the global batch. The samples are on the CPU. Not collective.
        """
        if not self.counts_samples:
            return [0] * 4
        items = [float(self.task.num_items(self.task.target(loaded))) for loaded in batch.batches]
        num_items = sum(count * weight for count, weight in zip(items, batch.weights, strict=True))
        samples = [micro_batch.samples for micro_batch, weight in zip(batch.mine, batch.weights, strict=True) if weight]
        mine = np.concatenate(samples) if samples else np.array([], int)
        return [num_items, len(mine), *samples_digest(mine)]

    def not_finite(self, batch: StepBatch) -> list[str]:
        """Return on the main process and on all others which processes met a loss that is not finite, and on which samples.

        About the last ``report``, whose batch this was.
        """
        if self._sums[0] == 0:
            return ["task.num_items is 0 for all its samples"]
        culprits = [
            f"process {self.process_index}: samples {micro_batch.samples.tolist()}"
            for micro_batch, loss in zip(batch.mine, self._micro_losses, strict=True)
            if not torch.isfinite(loss)
        ]
        return self.broadcast(self.gather_to_main(culprits))

    def optimizer_step(self, lr: float) -> None:
        """Apply the gradient at this learning rate. It stays until ``clear_gradient``."""
        optimizer = self.sharding.optimizer
        for group in optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)  # see Task.parameter_groups
        optimizer.step()
        self.times.finish()
        scaler = self.accelerator.scaler
        # Halved at each of 30 skipped steps and more; a look at it waits for a GPU.
        if scaler is not None and not self._is_finite and scaler.get_scale() < 2.0**-14:
            raise TrainingError(
                "train.mixed_precision=fp16: the gradient overflows at every loss scale. Use train.mixed_precision=bf16 or no."
            )

    @contextmanager
    def explained_memory_errors(self, inputs: dict[str, Tensor], step: int) -> Iterator[None]:
        """Turn an out-of-memory error into one that names the micro-batch and the settings to change. Not collective."""
        try:
            yield
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not should_reduce_batch_size(error):
                raise
            tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
            shapes = ", ".join(f"{name} {tuple(value.shape)}" for name, value in tensors.items() if value.ndim > 1)
            raise TrainingError(
                f"Out of memory in step {step + 1} on process {self.process_index}, in a micro-batch of {shapes}. "
                "Lower train.micro_batch_size or train.micro_batch_tokens: the steps stay the same. "
                "train.micro_batch_size=auto finds what fits; train.gradient_checkpointing=true and "
                "train.mixed_precision=bf16 also save memory."
            ) from error


def dummy_micro_batch(step: Sequence[MicroBatch]) -> MicroBatch:
    """Return the shortest sample of a step as a micro-batch that costs next to nothing and does not count."""
    cheapest = step[-1]
    return MicroBatch(cheapest.index, cheapest.samples[-1:], length=1, tokens=0, cost=0)

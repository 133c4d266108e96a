"""How long each process loads and computes its part of a step, how long it waits for the slowest, and the memory it needs.

Shown, never acted on.

The processes of a data-parallel step meet when they sum the gradient, after their last backward pass. So a process waits
``max - own`` seconds, with ``max`` taken over all processes. They count the items of the step while they compute its first
forward pass: who loads for longer than that lets others wait before, which is left out. No clock is compared with one of
another machine, and what the sums themselves take is no waiting.

It costs neither a collective nor a wait for the device. The seconds of a step travel in the next step's sum of counts. On a
GPU they are those between two events in its queue, read after the loss has been read, which waits for the device anyway.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.autograd import Variable


class StepTimes:
    """The seconds of this process's current step, and what all processes told of their steps since the last ``take``.

    Args:
        computes_alone: whether a process computes without waiting for others until the gradient is summed; else the seconds
            of computing are left out, because waiting is part of them.
    """

    def __init__(self, device: torch.device, rank: int, num_processes: int, computes_alone: bool):
        self.device, self.rank, self.num_processes = device, rank, num_processes
        self._is_timed = computes_alone and num_processes > 1 and device.type in ("cpu", "cuda")
        self._computing: list[Any] = []
        """Begins and ends of computing: times, or events in the queue of a GPU, which computes later than it is called."""
        self._process = psutil.Process()
        self._told = [0.0, 0.0, 0.0]
        """Seconds of loading and of computing in the last finished step, and bytes after it. This process tells the others
        in the next one."""
        self._told_of_s = 0.0
        """Duration of that step."""
        self._began: float | None = None
        self._loading_s = 0.0
        self._forget()

    def _forget(self) -> None:
        self.seconds = self.loading_s = self.waiting_s = self.max_computing_s = self.mean_computing_s = 0.0
        self.num_steps, self.max_bytes = 0, 0.0
        self.busy_s = [0.0] * self.num_processes

    # Of this process, in the order of a step

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Time what this process waits for its samples; the first one begins a step."""
        began = time.perf_counter()
        self._began = self._began or began
        yield
        self._loading_s += time.perf_counter() - began

    def _now(self) -> Any:
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def begin_computing(self) -> None:
        self._computing = [self._now()] if self._is_timed else []

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Leave out what this process waits for the others while it computes."""
        if self._computing:
            self._computing.append(self._now())
        yield
        if self._computing:
            self._computing.append(self._now())

    def end_computing_after(self, loss: Tensor) -> None:
        """End it once the backward pass from this loss is computed here, and before it waits for the other processes.

        DDP waits for the sum in a callback at the end of the backward pass, which it adds when its last gradient is there.
        Callbacks run in the order in which they were added, and a hook of the loss is the first thing in a backward pass.
        """
        if self._is_timed and loss.requires_grad:
            queue = Variable._execution_engine.queue_callback
            loss.register_hook(lambda grad: queue(lambda: self._computing.append(self._now())))

    def finish(self) -> None:
        computing_s = 0.0
        spans = [*zip(self._computing[::2], self._computing[1::2], strict=False)]  # a loss that needs no gradient ends none
        if self.device.type == "cpu":
            computing_s = sum(ended - began for began, ended in spans)
        elif spans and spans[-1][1].query():  # the GPU is there, so that nothing waits for it
            computing_s = sum(began.elapsed_time(ended) for began, ended in spans) / 1000
        now = time.perf_counter()
        # The most that tensors took on a GPU since ``take``; on a CPU, what the process takes now.
        is_gpu = self.device.type == "cuda"
        num_bytes = torch.cuda.max_memory_allocated(self.device) if is_gpu else self._process.memory_info().rss
        self._told = [self._loading_s, computing_s, float(num_bytes)]
        self._told_of_s = now - (self._began or now)
        self.discard()

    def discard(self) -> None:
        self._began, self._loading_s = None, 0.0

    # Of all processes

    def told(self) -> list[float]:
        """Return a number for each process and kind, of which the other processes' are 0: their sum is what all told."""
        before, after = self.rank, self.num_processes - self.rank - 1
        return [0.0, 0.0, 0.0] * before + self._told + [0.0, 0.0, 0.0] * after

    def add(self, told: Sequence[float]) -> None:
        """Add what all processes told of the previous step, the sum of their ``told``; zeros if there was none."""
        loading_P, computing_P, bytes_P = told[0::3], told[1::3], told[2::3]
        self.num_steps += any(bytes_P)
        self.max_bytes = max(self.max_bytes, *bytes_P)
        busy_P = [sum(own) for own in zip(loading_P, computing_P, strict=True)]
        self.seconds += self._told_of_s
        self.loading_s += max(loading_P)
        self.max_computing_s += max(computing_P)
        self.mean_computing_s += sum(computing_P) / self.num_processes
        self.waiting_s += max(busy_P) - sum(busy_P) / self.num_processes
        self.busy_s = [before + own for before, own in zip(self.busy_s, busy_P, strict=True)]
        self._told, self._told_of_s = [0.0, 0.0, 0.0], 0.0

    def take(self) -> dict[str, float]:
        """Return what the steps since the last call were like, and begin anew; nothing if there was none.

        perf/data_wait_s: mean seconds in which the slowest process of each waited for its samples.
        perf/data_share: share of their time that this was.
        perf/memory_gb: most memory of any process, in 10^9 bytes: of tensors on a GPU, of the whole process on a CPU.
        perf/wait_share: mean share in which a process waited for the slowest one.
        perf/imbalance: computing of the slowest process over the mean of all; 1 is even.
        perf/slowest_rank: who loaded and computed longest.
        """
        if not self.seconds:
            return {}
        shares: dict[str, float] = {
            "perf/data_wait_s": self.loading_s / self.num_steps,
            "perf/data_share": min(self.loading_s / self.seconds, 1.0),
            "perf/memory_gb": self.max_bytes / 1e9,
        }
        if self.mean_computing_s:
            shares["perf/wait_share"] = min(self.waiting_s / self.seconds, 1.0)
            shares["perf/imbalance"] = self.max_computing_s / self.mean_computing_s
            shares["perf/slowest_rank"] = self.busy_s.index(max(self.busy_s))
        self._forget()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        return shares

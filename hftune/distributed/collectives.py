"""How processes exchange values: broadcasts, gathered rows, sums over all. Independent of models and steps."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor

from hftune.distributed.progress import Progress
from hftune.errors import ElsewhereError


class Collectives:
    """The processes of a run as a group.

    Every method is collective: all processes must call it, in the same order. Properties are local.
    """

    def __init__(self, accelerator: Accelerator, progress: Progress | None = None):
        self.accelerator = accelerator
        self.progress = progress or Progress()  # what this process is working on, for reports of stalls and failures
        self.process_index, self.num_processes = accelerator.process_index, accelerator.num_processes
        self.device = accelerator.device
        self._host_group: Any = None
        """Of all processes, from CPU to CPU; None is the default group."""
        self._has_host_group = False  # created when it is first needed

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes files. Guards output only, never a collective."""
        return self.process_index == 0

    def broadcast(self, value: Any) -> Any:
        """Return the main process's value on all processes. It must be picklable."""
        return broadcast_object_list([value])[0]

    def broadcast_tensor(self, value: Tensor) -> None:
        """Overwrite a tensor with the main process's. It must be on the device, of equal shape and type on all."""
        if self.num_processes > 1:
            torch.distributed.broadcast(value, src=0)

    def sum(self, value: Tensor) -> Tensor:
        """Return the sum over all processes of a tensor on the device."""
        return self.sum_later(value.clone())()

    def sum_later(self, value: Tensor) -> Callable[[], Tensor]:
        """Begin to replace a tensor on the device by its sum over all processes; return what waits for that and returns it."""
        if self.num_processes == 1:
            return lambda: value
        work = torch.distributed.all_reduce(value, async_op=True)

        def wait() -> Tensor:
            work.wait()
            return value

        return wait

    def any_process(self, flag: bool) -> bool:
        """Return, on all processes, whether ``flag`` is true on any of them."""
        if self.num_processes == 1:
            return bool(flag)
        return bool(self.sum(torch.full((), float(flag), device=self.device)))

    def least(self, values: list[int]) -> list[int]:
        """Return the least of each of some integers over all processes, from CPU to CPU: nobody waits for a GPU."""
        least = torch.tensor(values)
        torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN, group=self._from_cpu_to_cpu())
        return least.tolist()

    def gather_to_main(self, rows: list, at_once: int = 1000) -> list | None:
        """Return all processes' rows, in process order, on the main process; None elsewhere.

        Args:
            rows: of this process; picklable, as many as it has.
            at_once: rows of each process in one message, so that memory stays bounded. Messages travel from CPU to CPU.
        """
        if self.num_processes == 1:
            return rows
        group = self._from_cpu_to_cpu()  # NCCL would pickle the objects of all into the main process's GPU memory at once
        counts: list[Any] = [None] * self.num_processes
        torch.distributed.all_gather_object(counts, len(rows), group=group)
        gathered: list[list] = [[] for _ in counts]
        for start in range(0, max(counts), at_once):
            slices: list[Any] | None = [None] * self.num_processes if self.is_main else None
            torch.distributed.gather_object(rows[start : start + at_once], slices, group=group)
            for all_rows, some_rows in zip(gathered, slices or (), strict=False):
                all_rows.extend(some_rows)
            self.progress.tick()
        return [row for all_rows in gathered for row in all_rows] if self.is_main else None

    def _from_cpu_to_cpu(self) -> Any:
        if not self._has_host_group:
            if torch.distributed.get_backend() != "gloo":
                self._host_group = torch.distributed.new_group(backend="gloo", timeout=timedelta(hours=1))
            self._has_host_group = True
        return self._host_group

    def on_main(self, function: Callable[[], Any]) -> Any:
        """Run ``function`` on the main process and return its value on all. If it fails, all processes fail at once.

        Raises:
            ElsewhereError: on the other processes, with the main process's message. The main process raises its own error.
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

"""Traces of a few steps, ``train.profile``: what each process's CPU and GPU did when. Shown, never acted on."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from hftune.callbacks import Callback, Step, StepBegin
from hftune.tracking.console import note, warning

SHOWN_OPERATORS = 40
VIEWER = "https://ui.perfetto.dev"


class Profiler(Callback):
    """Profiles the steps from ``first`` to ``last``, or those of them that this process computes.

    A process that starts within them, because the run was resumed, profiles the rest. Files are named after the steps that
    they really hold, so that one part does not replace the other. What cannot be written is a warning.

    Args:
        steps: first and last step, from 1; None to profile nothing.
        folder: for the files, on the machine of each process.
        paused: returns a context whose time does not count as training.
    """

    on_all_processes = True

    def __init__(
        self,
        steps: Sequence[int] | None,
        folder: Path,
        rank: int,
        device: torch.device,
        paused: Callable[[], AbstractContextManager[None]] = nullcontext,
    ):
        self.first, self.last = (0, -1) if steps is None else steps
        self.folder, self.rank, self.device, self.paused = folder, rank, device, paused
        self._profile: Any = None
        self._steps: list[int] = []

    def on_step_begin(self, begin: StepBegin) -> None:
        """Begin if this step is to be profiled."""
        if self._profile is None and self.first <= begin.step <= self.last:
            with self.paused(), self._outliving_failures("started"):
                os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else it prints when it starts and stops (torch 2.13)
                from torch.profiler import ProfilerActivity, profile

                activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.device.type == "cuda" else [])]
                begun = profile(activities=activities, acc_events=True)  # else torch warns of cycles, of which this is one
                begun.start()
                self._profile, self._steps = begun, []

    def on_step(self, step: Step) -> None:
        """Write the files if this was the last step to be profiled, or the last one of all."""
        if self._profile is not None:
            self._steps.append(step.step)
            if step.step >= self.last or step.is_last:
                self.close()

    def close(self) -> None:
        """Write what was profiled so far, if anything was. By the thread that has begun it: torch's profiler belongs to it."""
        profile, self._profile = self._profile, None
        if profile is None:
            return
        with self.paused(), self._outliving_failures("written"):
            profile.stop()
            if not self._steps:
                return
            steps = f"{self._steps[0]}-{self._steps[-1]}"
            trace, table = (self.folder / f"steps_{steps}_process{self.rank}.{kind}" for kind in ("json.gz", "txt"))
            self.folder.mkdir(parents=True, exist_ok=True)
            by = "self_cuda_time_total" if self.device.type == "cuda" else "self_cpu_time_total"
            table.write_text(profile.key_averages().table(sort_by=by, row_limit=SHOWN_OPERATORS), encoding="utf-8")
            profile.export_chrome_trace(str(trace))
            if self.rank == 0:
                profiled = f"Steps {self._steps[0]} to {self._steps[-1]} were profiled: open {trace} at {VIEWER}"
                listed = f"{table.name} beside it lists the operators that took longest"
                print(note(f"{profiled}; {listed}. Each process has its own."), flush=True)

    @contextmanager
    def _outliving_failures(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of a driver or a disk; training has nothing to do with it
            self.first, self.last = 0, -1
            print(warning(f"The profile of process {self.rank} could not be {what}: {error}. Training continues."), flush=True)


def unreachable_steps(steps: Sequence[int] | None, num_steps: int) -> list[str]:
    """Say that a run ends before the steps to profile, or within them."""
    if steps is None or steps[1] <= num_steps:
        return []
    what = "nothing is" if steps[0] > num_steps else f"only steps {steps[0]} to {num_steps} are"
    return [f"train.profile={[*steps]}: {what} profiled, because the run has {num_steps:,} steps."]

"""What it takes to be one process of a job: being watched, checked, joined and compared. Independent of models."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from hftune.config import Recipe, TrainConfig
from hftune.distributed.accelerator import leave_group, start_accelerator
from hftune.distributed.consistency import EARLY_S, check_early, check_same, data_digests, fingerprint
from hftune.distributed.heartbeat import Heartbeat
from hftune.distributed.preflight import check_hardware, check_launch, check_launcher
from hftune.distributed.progress import Progress
from hftune.distributed.signals import StopRequest
from hftune.distributed.usage import Usage, by_host


class Session(Heartbeat):
    """A context around everything that a process does in a job; training, evaluation and the doctor each open one.

    Entering it starts the heartbeat, compares code and recipe with the main process as far as the launcher already has a
    store, and refuses what this machine or launcher cannot do. ``join`` then makes the process group, as late as possible:
    until then every process works alone, and a slow download times no collective out. If a process fails in between, all
    of them leave the context with an error that says which and why.

    Args:
        recipe: None for a doctor that examines the machines alone.
        dead_after_s: seconds of silence after which a process counts as gone; the recipe's by default.
        stall_after_s: seconds without progress after which all processes are ended; the recipe's by default.
        compares_early: False if the caller reports differences itself.

    Raises:
        ConfigError: the processes differ, or the recipe cannot run here.
        TrainingError: the launcher's store does not answer; an ElsewhereError if another process failed.
    """

    def __init__(
        self,
        recipe: Recipe | None,
        *,
        dead_after_s: float | None = None,
        stall_after_s: float | None = None,
        compares_early: bool = True,
    ):
        self.recipe, self.train = recipe, TrainConfig() if recipe is None else recipe.train
        super().__init__(
            Progress(),
            self.train.dead_after_s if dead_after_s is None else dead_after_s,
            self.train.stall_after_s if stall_after_s is None else stall_after_s,
        )
        self._compares_early = compares_early
        self._stack = ExitStack()

    def __enter__(self) -> Session:
        super().__enter__()
        with ExitStack() as stack:
            stack.push(super().__exit__)  # reports what fails below to the other processes, too
            if self._compares_early and self.recipe is not None:
                self.progress.stage("comparing code and recipe with the other processes")
                store = self._watch.store if self._watch is not None and self._watch.met.wait(EARLY_S) else None
                check_early(store, self.here.rank, fingerprint(self.recipe))
            self.progress.stage("checking this machine")
            if self.recipe is None:
                check_launch()
            else:
                check_launcher(self.recipe)
                check_hardware(self.recipe)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._stack.__exit__(kind, error, trace)

    def join(self) -> Accelerator:
        """Wait for the other processes, and make the process group. Collective.

        Raises:
            ConfigError: the launcher announced a different number of processes than joined.
        """
        self.progress.stage("joining the other processes")
        with self.waiting():
            accelerator = start_accelerator(self.train)
            self.watch_all()
        atexit.register(leave_group)
        return accelerator

    def compare(
        self,
        collectives: Any,
        datasets: Mapping[str, Any],
        commits: Mapping[str, str],
        weights: Mapping[str, str] | None = None,
    ) -> dict[str, str]:
        """Make sure that all processes run the same code and recipe on the same data. Collective.

        Args:
            collectives: the strategy, which can broadcast and gather.
            datasets: by split.
            commits: what was loaded from the Hub, by the key that names the repository.
            weights: digests of models besides the one that is trained.

        Returns:
            The digest of each split, such as ``{"train data": "all:..."}``, and those of ``weights``.

        Raises:
            ConfigError: on every process, naming those that differ from the main process, their host, and in what.
        """
        self.progress.stage("comparing recipe and data with the other processes")
        digests = {**data_digests(self.recipe.task, datasets), **(weights or {})}
        check_same(collectives, fingerprint(self.recipe) | {"data": digests, "commits": dict(commits)})
        return digests

    def accept_stop_requests(self) -> StopRequest:
        """From here on, take SIGTERM and the first Ctrl-C as requests to stop after the current step."""
        stop = self._stack.enter_context(StopRequest())
        if self._watch is not None:
            self._watch.reports_sigterm = False
        return stop

    def sample_usage(self, device: Any, folder: Path) -> Callable[[], dict[str, float]]:
        """From here on sample what training uses of its machines; return what tells the main process of all of them.

        Args:
            device: of this process.
            folder: on the file system whose free space is sampled.
        """
        watch, usage = self._watch, self._stack.enter_context(Usage(self.here, device, folder))
        if watch is not None:
            watch.usage = usage
        if not self.here.is_main:
            return dict
        if watch is None:
            return lambda: by_host({0: usage.last}, {0: 0})
        return lambda: watch.peers.usage_by_host(usage.last)

    def at_end(self, callback: Callable[[], None]) -> None:
        """Call this when the context is left, whatever happens, while the process is still watched."""
        self._stack.callback(callback)

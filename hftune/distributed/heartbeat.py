"""Ends all processes within seconds if one fails, vanishes or stalls, and says why. Independent of model and data.

Every process writes once a second where it is into the launcher's store, over a connection of its own, and looks there for
a report of a failure (watchdog.py).
"""

from __future__ import annotations

import secrets
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

from hftune.distributed.failure_report import (
    INTERRUPTED,
    PATIENCE_S,
    Report,
    code_location,
    exit_code,
    is_known,
    is_second_hand,
    with_report,
)
from hftune.distributed.peers import Limits
from hftune.distributed.process_info import ProcessInfo, check_environment
from hftune.distributed.progress import Progress
from hftune.distributed.rounds import Failure, note_failure
from hftune.distributed.watchdog import CLOSING_S, Watchdog
from hftune.errors import ElsewhereError, Interrupted, TrainingError

REMINDER_S = 15.0
"""Between two lines that name the missing processes."""


class Heartbeat:
    """A context around training. An exception leaves it with a ``report``, which says where it happened.

    If another process is the cause, the exception is an ElsewhereError with the report of that process. A main thread that
    does not return by itself, because it waits in a collective, is ended with its process.
    """

    def __init__(self, progress: Progress, dead_after_s: float, stall_after_s: float | None):
        check_environment()
        self.here = ProcessInfo.from_environment()
        self.progress, self.limits = progress, Limits(dead_after_s, stall_after_s)
        self.closers: list[Callable[[Report], None]] = []
        """Called if a process fails or is interrupted, before its last message."""
        self._closing: threading.Thread | None = None
        self._lock = threading.Lock()
        self._connection: Any = None
        self._watch: Watchdog | None = None

    def __enter__(self) -> Heartbeat:
        """Start beating before there is a process group, if the launcher already has a store.

        Raises:
            TrainingError: the store does not answer; the process group would wait an hour for it.
        """
        import torch.distributed as dist

        if self.here.world_size > 1 and self.here.agent_has_store and not dist.is_initialized():
            address, timeout = (self.here.main_address, self.here.main_port), timedelta(seconds=30)
            try:
                self._connection = dist.TCPStore(*address, is_master=False, timeout=timeout, wait_for_workers=False)
            except dist.DistError as error:
                where = f"The launcher's store at {self.here.store_address} does not answer"
                raise TrainingError(f"{where}: that launcher has ended, or its machine is down or cut off.") from error
            from hftune.distributed.rendezvous import Attempt  # only now: it imports torch

            early = dist.PrefixStore(f"hftune/{self.here.run_id}/early", self._connection)
            look = Attempt(self._connection, self.here.rank).look if self.here.may_restart else lambda: early
            self._watch = self._start_watchdog(look, has_group=False)
        return self

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Name the missing processes every REMINDER_S while the block waits for them."""
        over, began = threading.Event(), time.monotonic()

        def remind() -> None:
            while not over.wait(REMINDER_S):
                if missing := self._missing():
                    seconds = time.monotonic() - began
                    print(f"hftune: {self.here.name} has waited {seconds:.0f} s for {missing}.", file=sys.stderr, flush=True)

        if self.here.world_size > 1:
            threading.Thread(target=remind, name="hftune waiting", daemon=True).start()
        try:
            yield
        finally:
            over.set()

    def _missing(self) -> str | None:
        """Name the processes that have not arrived; None if another process does."""
        if self._watch is not None and (self.here.rank == 0 or 0 in self._watch.peers.beats):
            return self._watch.peers.missing() if self.here.rank == 0 else None
        if self.here.rank != self.here.node_ranks[0]:
            return None
        who = "process 0, which has not started" if self._watch is not None else "the other processes"
        where = self.here.store_address
        return f"{who}: all {self.here.world_size} must be started with the same command, and be able to reach {where}"

    def _start_watchdog(self, look: Callable[[], Any | None], has_group: bool, secret: str = "") -> Watchdog:
        return Watchdog(self.here, self.progress, self.limits, self.close_all, look, has_group, secret)

    def watch_all(self) -> None:
        """Watch all processes from here on, now that there is a process group (collective)."""
        if self.here.world_size == 1:
            return
        import torch.distributed as dist
        from torch.distributed.distributed_c10d import _get_default_store

        # A process may train several times, and any launcher may restart its group. The second word enters the store only with
        # a report: anyone who reaches its port can list its keys.
        run = [uuid.uuid4().hex, secrets.token_hex(16)]
        dist.broadcast_object_list(run, src=0)
        if self._watch is not None:
            self._watch.close("joined")
        if self._connection is None:  # process 0 holds the store, or whoever made the group
            if not _get_default_store().has_extended_api():
                return  # not on a network: such a group has only the timeout of its collectives
            self._connection = _get_default_store().clone()
        store = dist.PrefixStore(f"hftune/{run[0]}", self._connection)
        self._watch = self._start_watchdog(lambda: store, has_group=True, secret=run[1])

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self._watch is not None:
            self._watch.claim()
        if isinstance(error, Interrupted):  # which all processes have agreed on
            with_report(error, replace(self._describe(error), is_printed_here=self.here.rank == self.here.node_ranks[0]))
        is_failure = error is not None and not isinstance(error, Interrupted)
        try:
            if is_failure:
                self._fail(error)
        finally:
            if error is not None:
                self.close_all(getattr(error, "report", None) or self._describe(error))
            if self._watch is not None:
                self._watch.close("stopped" if is_failure else "done")

    def close_all(self, report: Report) -> None:
        """Run the closers once, in a thread of their own: one that waits for a network is abandoned."""
        with self._lock:  # two threads may find out at once
            if self._closing is None:
                self._closing = threading.Thread(target=self._close, args=(report,), name="hftune _close", daemon=True)
                self._closing.start()
        self._closing.join(CLOSING_S)

    def _close(self, report: Report) -> None:
        """Tell the agent of an elastic job that this round failed, and in which stage; run the closers."""
        if not report.is_interruption and report.is_printed_by(self.here):
            note_failure(Failure(self.progress.current_stage, report.text, report.code))
        for closer in self.closers:
            closer(report)

    def _fail(self, error: BaseException) -> None:
        """Attach a report to the error and tell the other processes; or learn from them what caused it.

        Raises:
            ElsewhereError: another process is the cause.
            TrainingError: the process called sys.exit, which must not look like success.
        """
        if is_second_hand(error) and self._watch is None:
            time.sleep(PATIENCE_S)
        elif is_second_hand(error) and (cause := self._watch.wait_for_cause()) is not None:
            raise with_report(ElsewhereError(cause.text), cause) from None
        if isinstance(error, SystemExit):
            place = code_location(*list(traceback.walk_tb(error.__traceback__))[-1])
            what = f"{self.here.name} called sys.exit({error.code!r}) in {self.progress.current_stage}"
            raise self._settled(TrainingError(f"{what}, before training was over: {place}.")) from None
        self._settled(error)

    def _settled(self, error: BaseException) -> BaseException:
        report = self._describe(error)
        return with_report(error, report if self._watch is None else self._watch.settle(report))

    def _describe(self, error: BaseException) -> Report:
        if isinstance(error, KeyboardInterrupt):
            who = self.here.name if self.here.world_size > 1 else "Training"
            text = f"hftune: {who} was interrupted from the keyboard in {self.progress.current_stage}."
            return Report(text, INTERRUPTED, self.here.rank, kind="KeyboardInterrupt")
        if is_known(error):
            return Report(f"hftune: {error}", exit_code(error), self.here.rank, kind=type(error).__name__)
        who = f"process {self.here.rank} of {self.here.world_size} on host {self.here.host}, "
        where = f"[{who if self.here.world_size > 1 else ''}{self.progress.describe()}]"
        return Report(f"{where}\n{''.join(traceback.format_exception(error)).rstrip()}", 1, self.here.rank)

"""Two threads beside training that end this process if another one of the job fails. Independent of training.

One talks to the launcher's store: it writes a sign of life once a second and looks for a report of a failure. The other one
acts, as a store on a dead machine may never answer. The first report wins; every machine prints it last.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache
from types import FrameType
from typing import Any

from hftune.distributed.failure_report import GOT_SIGTERM, PATIENCE_S, STOPPED, Report, say_last, stack_location
from hftune.distributed.peers import Limits, Peers
from hftune.distributed.process_info import ProcessInfo
from hftune.distributed.progress import Progress
from hftune.distributed.rounds import AGENT_S, REFUSED, agents_word, has_trained
from hftune.distributed.signals import StopRequest
from hftune.distributed.usage import Usage

BEAT_S = 1.0
"""Between two signs of life."""
RETURN_S = 3.0
"""For the main thread to return by itself: from a broken connection, or from the end of training."""
CLOSING_S = 5.0
"""For a tracker to take its last numbers."""
HEARD_S = CLOSING_S + 3.0
"""For all to read a report, once a second, before the launcher that ends takes the store along."""
MEET_S = 0.2
"""Between two looks for the other processes of this attempt."""
MAIN, WATCHDOG = "main thread", "watchdog"
"""Who may end a process after a failure: the main thread, if it returns within RETURN_S, or the thread that acts."""


class Watchdog:
    """The two threads, from the constructor to ``close``, and what the main thread asks of them.

    Args:
        here: this process.
        progress: of this process; what the others are told.
        limits: how long a process may be silent.
        close_all: called once a failure is known, before it is printed.
        look: returns the store that the processes of this attempt share, or None while it is not known.
        has_group: whether all processes have joined; else some may not have started yet.
        secret: names the key of the report, which outsiders at the launcher's port cannot guess.
    """

    def __init__(
        self,
        here: ProcessInfo,
        progress: Progress,
        limits: Limits,
        close_all: Callable[[Report], None],
        look: Callable[[], Any | None],
        has_group: bool,
        secret: str = "",
    ):
        self.here, self.progress, self.close_all, self.has_group = here, progress, close_all, has_group
        self._lost_at = 0.0
        self.dead_after_s = limits.dead_after_s
        self.peers = Peers(here, progress, limits, has_group)
        self.store: Any = None
        """Where the processes of this attempt meet; None until they have."""
        self.met = threading.Event()
        self.reports_sigterm = True
        self.usage: Usage | None = None
        """What this process uses of its machine, once it is sampled; only passed on."""
        self.report: Report | None = None
        """Why the job ends, as all processes have agreed."""
        self.loss: Report | None = None
        """That the store is lost: why this process ends if there is no report."""
        self.is_closed = False
        """Goodbye has been said, and both threads stop."""
        self._ender: str | None = None
        """Which thread ends this process, once one of them does: the main thread, or this watchdog's."""
        self._lock = threading.Lock()
        self._look, self._report_key = look, f"report/{secret}"
        self._own_report: Report | None = None
        self._has_trained = has_trained()
        self._bye: str | None = None
        self._connection_is_broken = self._got_sigterm = False  # facts, true in whatever state
        self._wake = threading.Event()
        self._failure_is_known, self._heard = threading.Event(), threading.Event()
        self._round_count, self._still_s, self._still_at = 0, 0.0, -1
        self._wakeup_r, self._wakeup_w = socket.socketpair()
        self._wakeup_w.setblocking(False)
        self._hears_sigterm = has_group and self._hear_sigterm()
        self._main = threading.get_ident()  # a notebook or Spark may train in another than the interpreter's main thread
        self._threads = [
            threading.Thread(target=run, name=f"hftune {run.__name__}", daemon=True) for run in (self._beat, self._act)
        ]
        for thread in self._threads:
            thread.start()

    def _may_end(self, who: str) -> bool:
        """Let the first one that asks end this process; return whether it is this one. Nobody once goodbye has been said."""
        with self._lock:
            if self._ender is None and not self.is_closed:
                self._ender = who
            return self._ender == who

    # For the main thread

    def claim(self) -> None:
        """Leave the end to the main thread; never return if this process is being ended."""
        if not self._may_end(MAIN) and self._ender == WATCHDOG:
            threading.Event().wait()

    def settle(self, report: Report) -> Report:
        """Report, and return the report that counts once the others know it."""
        self._own_report = report
        self._wake.set()
        self._failure_is_known.wait(PATIENCE_S)
        return self._to_be_printed(self.report or report)

    def wait_for_cause(self) -> Report | None:
        """Return the report of the process that a second-hand error comes from; None if no other process failed."""
        self._connection_is_broken = True
        self._wake.set()
        if not self._failure_is_known.wait(RETURN_S):
            if self.here.rank == self.here.node_ranks[0] and self.here.round is None:
                what = f"hftune: A connection to another process broke in {self.progress.current_stage}."
                wait = f"Waiting up to {self.dead_after_s:.0f} s to learn which one and why."
                print(what, wait, file=sys.stderr, flush=True)
            self._failure_is_known.wait(self.dead_after_s + 2 * BEAT_S)
        report = self.report or self.loss
        return None if report is None else self._to_be_printed(report)

    def close(self, bye: str) -> None:
        """Say goodbye and stop both threads."""
        if self._hears_sigterm:
            signal.set_wakeup_fd(-1)
            # A launcher sends SIGTERM to those that outlive a failed process; it must not cut off the last word.
            comes_yet = bye == "stopped" and not self._got_sigterm
            signal.signal(signal.SIGTERM, _let_one_pass if comes_yet else signal.SIG_DFL)
        self._bye = bye
        with self._lock:
            self.is_closed = self._ender != WATCHDOG
        self._wake.set()
        self._wakeup_w.send(b"\0")
        for thread in self._threads:
            thread.join(timeout=RETURN_S)  # longer only if the store does not answer
        if self._got_sigterm and self.report is not None and not self.report.is_printed_by(self.here):
            os._exit(self.report.code)  # its launcher waits for it, and another process prints the report
        if not any(thread.is_alive() for thread in self._threads):
            self._wakeup_r.close()
            self._wakeup_w.close()

    def _to_be_printed(self, report: Report) -> Report:
        here = report.is_printed_by(self.here)
        if here:
            self._heard.wait(HEARD_S)
        return replace(report, is_printed_here=here)

    # The thread that talks to the store

    def _beat(self) -> None:
        began = time.monotonic()
        try:
            while True:
                is_last = self._bye is not None
                now = time.monotonic()
                if (store := self._look()) is not self.store:
                    self.peers.use(store)
                    self.store = store
                if store is not None:
                    self.met.set()
                    # If this process itself was stopped for a while, its neighbours were not silent for so long.
                    self._round(min(now - began, 2 * BEAT_S))
                began, self._round_count = now, self._round_count + 1
                if is_last:
                    return
                self._pause()
        except RuntimeError:  # torch's DistError
            while not self.is_closed and self._is_outlived():
                time.sleep(BEAT_S / 10)
            self.loss = self._describe_loss()

    def _pause(self) -> None:
        """Wait for the next round; in short steps while processes that come look for process 0's invitation."""
        until = time.monotonic() + (BEAT_S / 10 if self.report is not None else BEAT_S)
        meets = not self.has_group and (self.here.is_main or self.store is None)
        while (left := until - time.monotonic()) > 0:
            if self._wake.wait(min(left, MEET_S) if meets else left) or (meets and self._look() is not self.store):
                break
        self._wake.clear()

    def _round(self, passed_s: float) -> None:
        self._still_s = self._still_s + passed_s if self._still_at == self.progress.marks else 0.0
        self._still_at = self.progress.marks
        self.peers.look_around()
        self.store.set(f"beat/{self.here.rank}", json.dumps(self._sign()))
        if self.report is None:
            found = self._find_report(passed_s)
            # Others may go on if a process is lost, which cannot say why, or if a recipe that was right here is wrong there.
            is_of_lost = found is not None and not found.can_print and not found.is_stall
            is_refusal = found is not None and found.code == REFUSED and self._own_report is None and self._has_trained
            if found is None or ((is_of_lost or is_refusal) and self._is_outlived()):
                return
            self.report = found
            if self.report.is_stall:
                stack = "".join(traceback.format_stack(sys._current_frames().get(self._main))).rstrip()
                who = f"process {self.here.rank} of {self.here.world_size} on host {self.here.host}"
                print(f"[{who}] is at\n{stack}", file=sys.stderr, flush=True)
            self._failure_is_known.set()
            self._wakeup_w.send(b"\0")
            self.close_all(self.report)  # a tracker may print, which should come before the report
            self.store.add("heard", 1)
        if self.store.add("heard", 0) >= self.here.world_size - (not self.report.can_print):
            self._heard.set()

    def _sign(self) -> dict[str, Any]:
        """Return this process's sign of life."""
        ranks = self.here.node_ranks
        return {
            "round": self._round_count,
            "who": self.here.name,
            "pid": os.getpid(),
            "machine": [ranks.start, ranks.stop],
            "living": self.peers.living,
            "stage": self.progress.current_stage,
            "position": self.progress.describe(),
            "code": stack_location(sys._current_frames().get(self._main)),
            "still_s": self._still_s,
            "hurt": self._connection_is_broken,
            "bye": self._bye,
            "usage": {} if self.usage is None else self.usage.last,
        }

    def _find_report(self, passed_s: float) -> Report | None:
        """Return the report in the store, putting there what this process reports if there is none."""
        report, key = self._own_report, self._report_key
        if report is None and self._bye is None and not self.store.check([key]):
            report = self._judge(passed_s)
        if report is not None:
            return Report.parse(self.store.compare_set(key, "", json.dumps(asdict(report))))
        return Report.parse(self.store.get(key)) if self.store.check([key]) else None

    def _judge(self, passed_s: float) -> Report | None:
        """Return a report if another process is gone or silent, this one got SIGTERM, or all are stalled."""
        if (report := self.peers.find_dead(passed_s, self._connection_is_broken)) is None:
            self._lost_at = 0.0
        elif not self._is_outlived():
            return report
        if self._got_sigterm and self.reports_sigterm:
            text = f"hftune: {self.here.name} received SIGTERM in {self.progress.current_stage}"
            return Report(f"{text}, from its launcher, a scheduler or a person.", rank=self.here.rank)
        return self.peers.find_stall(self._sign())

    def _is_outlived(self) -> bool:
        """Say whether to leave a loss to the agent of an elastic job: the others go on, in new processes.

        It has AGENT_S to say that the round is over. A process that ended before that would count as one that failed.
        """
        if self.here.round is None:
            return False
        self._lost_at = self._lost_at or time.monotonic()
        return agents_word() is not None or time.monotonic() - self._lost_at < AGENT_S

    def _describe_loss(self) -> Report:
        main = self.peers.beats.get(0)
        seen = "" if main is None else f" {main['who']} was last seen in {main['position']}."
        text = f"hftune: The launcher's store at {self.here.store_address} does not answer in {self.progress.current_stage}"
        why = "that launcher has ended, or its machine is down or cut off."
        return Report(f"{text}: {why}{seen}", rank=0, can_print=False)

    # The thread that acts

    def _act(self) -> None:
        """Wait for a report, the loss of the store or the end; end this process if the main thread does not.

        A thread that gets no answer for too long has lost the store. The main thread has RETURN_S to return by itself, and no
        time if it cannot, in a stall or after SIGTERM.
        """
        count, quiet_s = -1, 0.0
        while not self.is_closed and self.report is None and self.loss is None:
            self._listen(BEAT_S)
            if self._got_sigterm:
                self._leave_round()
            quiet_s = quiet_s + BEAT_S if count == self._round_count else 0.0
            count = self._round_count
            if quiet_s > self.dead_after_s and not self._is_outlived():
                self.loss = self._describe_loss()
        self._failure_is_known.set()
        until = time.monotonic() + RETURN_S
        is_stall = self.report is not None and self.report.is_stall
        while self._ender is None and not self.is_closed and time.monotonic() < until and not (is_stall or self._got_sigterm):
            self._listen(BEAT_S / 10)
        if self._may_end(WATCHDOG):
            self._end(self.report or self.loss)

    def _listen(self, seconds: float) -> None:
        """Wait; a signal or a change ends the wait."""
        if select.select([self._wakeup_r], [], [], seconds)[0] and signal.SIGTERM in self._wakeup_r.recv(4096):
            self._got_sigterm = True
            self._wake.set()

    def _leave_round(self) -> None:
        """End this process if its agent has asked for it, as the round of an elastic job is over, and nothing is to be saved.

        A step that a lost process was in cannot be finished, and before the first one there is nothing. In a step that can be
        finished, the main thread does so and ends the process itself.
        """
        if self.here.round is None or self.is_closed:
            return
        over = agents_word()
        is_lost = self._connection_is_broken or self._lost_at or (over is not None and not over.is_planned)
        if self.reports_sigterm or is_lost:
            self.close_all(Report("The round is over.", STOPPED))
            os._exit(STOPPED)

    def _end(self, report: Report) -> None:
        self.close_all(report)
        if report.is_printed_by(self.here):
            self._heard.wait(HEARD_S)
            say_last(report.text, report.kind)
        else:
            until = time.monotonic() + PATIENCE_S
            while time.monotonic() < until and not self._got_sigterm:
                self._listen(BEAT_S)
        os._exit(report.code)  # the main thread cannot be interrupted in a collective

    def _hear_sigterm(self) -> bool:
        """Hear it even while the main thread waits in a collective; a launcher sends it to those who outlive a killed one."""
        if threading.current_thread() is not threading.main_thread():
            return False
        if signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, _let_one_pass):
            return False
        others = signal.set_wakeup_fd(self._wakeup_w.fileno(), warn_on_full_buffer=False)
        if others != -1:
            signal.set_wakeup_fd(others)
            return False
        signal.signal(signal.SIGTERM, self._note_sigterm)
        _reset_sigterm_in_children()
        return True

    def _note_sigterm(self, number: int, frame: FrameType | None) -> None:
        self._got_sigterm = True  # if the main thread runs Python; the wake-up descriptor tells the acting thread


def _let_one_pass(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    GOT_SIGTERM.set()


@cache
def _reset_sigterm_in_children() -> None:
    """Let forked children, such as DataLoader workers, die of SIGTERM instead of passing it to their parent's handler."""

    def reset() -> None:
        if isinstance(getattr(signal.getsignal(signal.SIGTERM), "__self__", None), (Watchdog, StopRequest)):
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    os.register_at_fork(after_in_child=reset)

"""Watches the processes of a job from each of them, and ends this one if another fails. Independent of training.

Process 0 watches all, all watch process 0, and those of one machine watch each other's process ids: the work grows with the
number of processes, not with its square. A process that is silent but whose id is still there is alive: it may be in C code
that holds Python's lock, and is given more time. The first report wins; it is the last thing that every machine prints.
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
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from types import FrameType
from typing import Any

import psutil

from hftune.distributed.failure_report import PATIENCE_S, Report, say_last, stack_location
from hftune.distributed.process_info import ProcessInfo
from hftune.distributed.progress import Progress
from hftune.distributed.signals import StopRequest

BEAT_S = 1.0
HURT_S = 10.0  # a process is silent AND a connection is broken: it is gone, and dead_after_s need not pass
RETURN_S = 3.0  # for the main thread to come back by itself: from a broken connection, or from the end of training
CLOSING_S = 5.0  # for a dashboard to take its last numbers
HEARD_S = CLOSING_S + 3.0  # for all to read a report, once a second, before the launcher that ends takes the store along
FRESH_S = 3.0  # a sign of life no older than this can vouch for a neighbour
MEET_S = 0.2  # between two looks for the other processes of this attempt
SHOWN = 8  # processes to list; the rest are counted

HELD_UP = "C code holds Python's lock there, or it is stopped or swapping"


@dataclass(frozen=True)
class Limits:
    """How long a process may be silent."""

    dead_after_s: float
    """Without a sign of life."""
    stall_after_s: float | None
    """Without progress of any process; None: without a limit."""


class Watchdog:
    """Two threads: one talks to the store and judges, the other acts, as a store on a dead machine may never answer."""

    def __init__(
        self,
        here: ProcessInfo,
        progress: Progress,
        limits: Limits,
        close_all: Callable[[], None],
        look: Callable[[], Any | None],
        has_group: bool,
        secret: str = "",
    ):
        self.here, self.progress, self.close_all = here, progress, close_all
        self.dead_after_s, self.stall_after_s = limits.dead_after_s, limits.stall_after_s
        self.has_group = has_group
        self.store: Any = None
        """Where the processes of this attempt meet; None until they have."""
        self.met = threading.Event()
        self.reports_sigterm = True
        self.report: Report | None = None
        self.beats: dict[int, dict[str, Any]] = {}
        """The last sign of life of the processes that were looked at."""
        self._look, self._report_key = look, f"report/{secret}"
        self._own: Report | None = None  # to be reported by this process
        self._bye: str | None = None
        self._is_hurt = self._is_terminated = self._is_lost = self._main_is_back = self._ends = False
        self._lock, self._wake = threading.Lock(), threading.Event()
        self._decided, self._heard = threading.Event(), threading.Event()
        self._round_count, self._still_s, self._still_at = 0, 0.0, -1
        self._silent_s: dict[int, float] = defaultdict(float)
        self._living: list[int] = []
        self._awaited: set[int] = set()  # those that live but do not answer, which has been said
        self._ear, self._bell = socket.socketpair()
        self._bell.setblocking(False)
        self._hears_sigterm = has_group and self._hear_sigterm()
        self._main = threading.get_ident()  # a notebook or Spark may train in another than the interpreter's main thread
        self._threads = [
            threading.Thread(target=run, name=f"hftune {run.__name__}", daemon=True) for run in (self._beat, self._act)
        ]
        for thread in self._threads:
            thread.start()

    # For the main thread

    def claim(self) -> None:
        """Leave the end to the main thread, unless this process is being ended."""
        with self._lock:
            self._main_is_back = not self._ends
        if self._ends:
            threading.Event().wait()

    def settle(self, report: Report) -> Report:
        """Report, and return the report that counts once the others know it."""
        self._own = report
        self._wake.set()
        self._decided.wait(PATIENCE_S)
        return self._to_be_printed(self.report or report)

    def wait_for_cause(self) -> Report | None:
        """Return the report of the process that a second-hand error comes from; None where nobody else failed."""
        self._is_hurt = True
        self._wake.set()
        if not self._decided.wait(RETURN_S):
            if self.here.rank == self.here.node_ranks[0]:
                lost = f"hftune: A connection to another process broke in {self.progress.current_stage}. Waiting up to"
                print(f"{lost} {self.dead_after_s:.0f} s to learn which one and why.", file=sys.stderr, flush=True)
            self._decided.wait(self.dead_after_s + 2 * BEAT_S)
        report = self.report or (self._describe_loss() if self._is_lost else None)
        return None if report is None else self._to_be_printed(report)

    def close(self, bye: str) -> None:
        """Say goodbye and stop both threads."""
        if self._hears_sigterm:
            signal.set_wakeup_fd(-1)
            # A launcher sends SIGTERM to those that outlive a failed process; it must not cut off the last word.
            comes_yet = bye == "stopped" and not self._is_terminated
            signal.signal(signal.SIGTERM, _let_one_pass if comes_yet else signal.SIG_DFL)
        self._bye = bye
        self._wake.set()
        self._bell.send(b"\0")
        for thread in self._threads:
            thread.join(timeout=RETURN_S)  # longer only where the store does not answer
        if self._is_terminated and self.report is not None and not self.report.is_printed_by(self.here):
            os._exit(self.report.code)  # its launcher waits for it, and another process speaks
        if not any(thread.is_alive() for thread in self._threads):
            self._ear.close()
            self._bell.close()

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
                if self._meet():
                    # Where this process itself was stopped for a while, its neighbours were not silent for so long.
                    self._round(min(now - began, 2 * BEAT_S))
                began, self._round_count = now, self._round_count + 1
                if is_last:
                    return
                self._pause()
        except RuntimeError:  # torch's DistError
            self._is_lost = True

    def _meet(self) -> bool:
        """Find the store that the processes of this attempt share, and say whether it is known."""
        store = self._look()
        if store is not self.store:
            self.store = store
            self.beats.clear()
            self._silent_s.clear()
        if store is not None:
            self.met.set()
        return store is not None

    def _pause(self) -> None:
        """Wait for the next round; in short steps while processes that come wait for process 0 to confirm them."""
        until = time.monotonic() + (BEAT_S / 10 if self.report is not None else BEAT_S)
        meets = not self.has_group and (self.here.rank == 0 or self.store is None)
        while (left := until - time.monotonic()) > 0:
            if self._wake.wait(min(left, MEET_S) if meets else left) or (meets and self._look() is not self.store):
                break
        self._wake.clear()

    def _round(self, passed_s: float) -> None:
        self._still_s = self._still_s + passed_s if self._still_at == self.progress.marks else 0.0
        self._still_at = self.progress.marks
        self._living = [rank for rank in self._neighbours() & set(self.beats) if _is_running(self.beats[rank]["pid"])]
        self.store.set(f"beat/{self.here.rank}", json.dumps(self._sign()))
        if self.report is None:
            self.report = self._find_report(passed_s)
            if self.report is None:
                return
            if self.report.is_stall:
                print(self._stack(), file=sys.stderr, flush=True)
            self._decided.set()
            self._bell.send(b"\0")
            self.close_all()  # a dashboard may print, which should come before the last word
            self.store.add("heard", 1)
        if self.store.add("heard", 0) >= self.here.world_size - (not self.report.can_print):
            self._heard.set()

    def _sign(self) -> dict[str, Any]:
        frame = sys._current_frames().get(self._main)
        return {
            "round": self._round_count,
            "who": self.here.name,
            "pid": os.getpid(),
            "machine": [self.here.node_ranks.start, self.here.node_ranks.stop],
            "living": self._living,
            "doing": self.progress.current_stage,
            "place": self.progress.describe(),
            "code": stack_location(frame),
            "still_s": self._still_s,
            "hurt": self._is_hurt,
            "bye": self._bye,
        }

    def _stack(self) -> str:
        stack = "".join(traceback.format_stack(sys._current_frames().get(self._main))).rstrip()
        return f"[process {self.here.rank} of {self.here.world_size} on host {self.here.host}] stands at\n{stack}"

    def _find_report(self, passed_s: float) -> Report | None:
        own, key = self._own, self._report_key
        if own is None and self._bye is None and not self.store.check([key]):
            own = self._judge(passed_s)
        if own is not None:
            return Report.parse(self.store.compare_set(key, "", json.dumps(asdict(own))))
        return Report.parse(self.store.get(key)) if self.store.check([key]) else None

    def _neighbours(self) -> set[int]:
        """Return the other processes of this machine, if their process ids mean the same here."""
        return set(self.here.node_ranks) - {self.here.rank} if self.here.has_agent else set()

    def _judge(self, passed_s: float) -> Report | None:
        """Look at the others; return a report where one is gone or silent, or where all stand still."""
        neighbours = self._neighbours()
        watched = (set(range(self.here.world_size)) if self.here.rank == 0 else {0}) - {self.here.rank}
        gone = [rank for rank in sorted(neighbours & set(self.beats)) if rank not in self._living]
        self._read(watched | (neighbours - set(self.beats)), passed_s)
        for rank in gone:
            self._read([rank], 0.0)
            if self.beats[rank]["bye"] is None:
                return self._describe_missing(rank, "ended without a word", "It was killed, crashed, or exited.", "Last seen")
        is_hurt = self._is_hurt or any(beat["hurt"] for beat in self.beats.values())
        for rank in sorted(watched):
            if (report := self._judge_silence(rank, is_hurt, passed_s)) is not None:
                return report
        if self._is_terminated and self.reports_sigterm:
            text = f"hftune: {self.here.name} was told to end (SIGTERM) in {self.progress.current_stage}"
            return Report(f"{text}: by its launcher, a scheduler or a person.", rank=self.here.rank)
        return self._judge_stall() if self.here.rank == 0 and self.has_group and self.stall_after_s is not None else None

    def _judge_silence(self, rank: int, is_hurt: bool, passed_s: float) -> Report | None:
        """Return a report if a process has been silent for too long; for longer if its machine says that it lives."""
        beat, silent_s, dead_after_s = self.beats.get(rank), self._silent_s[rank], self.dead_after_s
        is_awaited = self.has_group if beat is None else beat["bye"] is None
        if not is_awaited or silent_s <= (min(dead_after_s, HURT_S) if is_hurt else dead_after_s):
            self._awaited.discard(rank)
            return None
        seen, key = f"Last seen {silent_s:.0f} s ago", f"train.dead_after_s={dead_after_s:g}"
        if beat is None or not self._lives(rank, beat["machine"], passed_s):
            why = "It was killed, or its machine is down or cut off."
            if not is_hurt:
                why += f" If it may be in C code that holds Python's lock for so long, raise {key}."
            return self._describe_missing(rank, f"has given no sign of life for {silent_s:.0f} s", why, seen)
        alive = f"is alive but has not answered for {silent_s:.0f} s"
        limit_s, name = (dead_after_s, key) if is_hurt else (self.stall_after_s, f"train.stall_after_s={self.stall_after_s}")
        if limit_s is not None and silent_s > limit_s:
            broke = ", as a connection broke meanwhile" if is_hurt else ""
            return self._describe_missing(rank, alive, f"{HELD_UP}. {name} is the limit{broke}.", seen)
        if silent_s > dead_after_s and rank not in self._awaited and self.here.rank == (1 if rank == 0 else 0):
            self._awaited.add(rank)
            limit = "without a limit" if self.stall_after_s is None else f"for up to {self.stall_after_s:g} s"
            what = f"{alive} ({key}). {HELD_UP}. {seen} in {beat['place']}. Waiting {limit} (train.stall_after_s)."
            print(f"hftune: {beat['who']} {what}", file=sys.stderr, flush=True)
        return None

    def _lives(self, rank: int, machine: Sequence[int], passed_s: float) -> bool:
        """Say whether a silent process is there: by its process id on this machine, or by the word of one beside it."""
        if rank in self._neighbours():
            return rank in self._living
        beside = [other for other in range(*machine) if other not in (rank, self.here.rank)]
        if self.here.rank != 0:  # which reads them all
            self._read(beside, passed_s)
        fresh = [self.beats[other] for other in beside if other in self.beats and self._silent_s[other] <= FRESH_S]
        return any(rank in beat["living"] for beat in fresh)

    def missing(self) -> str | None:
        """On process 0, before there is a group: say who has not come as far as this process. None if all have."""
        others, doing = range(1, self.here.world_size), self.progress.current_stage
        absent = [f"process {rank}, which has not begun" for rank in others if rank not in self.beats]
        behind = [
            f"process{beat['who'].removeprefix('Process')}, in {beat['place']}"
            for rank in others
            if (beat := self.beats.get(rank)) is not None and beat["doing"] != doing and beat["bye"] is None
        ]
        found = [*absent, *behind]
        more = [f"{len(found) - SHOWN} more"] if len(found) > SHOWN else []
        return "; ".join(found[:SHOWN] + more) or None

    def _judge_stall(self) -> Report | None:
        signs = {0: self._sign()} | self.beats
        present = {rank: sign for rank, sign in signs.items() if sign["bye"] is None}
        still_s = min((sign["still_s"] for sign in present.values()), default=0.0)  # all may just have ended
        if still_s <= self.stall_after_s:
            return None
        together = defaultdict(list)
        for rank, sign in sorted(present.items()):
            together[sign["doing"], sign["code"]].append((rank, sign))
        lines = [
            f"hftune: No process has moved on for {still_s:.0f} s (train.stall_after_s={self.stall_after_s:g}). They stand at:"
        ]
        for (doing, code), group in sorted(together.items(), key=lambda item: len(item[1])):
            (rank, sign), ranks = group[0], ", ".join(str(rank) for rank, _ in group)
            who = f"process {rank}{sign['who'].removeprefix(f'Process {rank}')}" if len(group) == 1 else f"processes {ranks}"
            lines.append(f"  {who}: {sign['place'] if len(group) == 1 else doing}, in {code}")
        return Report("\n".join(lines), rank=0, is_stall=True)

    def _read(self, ranks: Iterable[int], passed_s: float) -> None:
        """Take the beats of these processes, as far as there are any, and count how long each has been silent."""
        there = [rank for rank in ranks if rank in self.beats or self.store.check([f"beat/{rank}"])]
        values = self.store.multi_get([f"beat/{rank}" for rank in there]) if there else []
        for rank in ranks:
            self._silent_s[rank] += passed_s
        for rank, value in zip(there, values, strict=True):
            beat = json.loads(value)
            if rank not in self.beats or beat["round"] != self.beats[rank]["round"]:
                self._silent_s[rank] = 0.0
            self.beats[rank] = beat

    def _describe_missing(self, rank: int, what: str, why: str, seen: str) -> Report:
        beat = self.beats.get(rank)
        if beat is None:
            return Report(f"hftune: Process {rank} {what}, since the processes joined. {why}", rank=rank, can_print=False)
        text = f"hftune: {beat['who']} {what} and is missing in {self.progress.current_stage}. {why} {seen} in {beat['place']}."
        return Report(text, rank=rank, can_print=False)

    def _describe_loss(self) -> Report:
        address, beat = self.here.store_address, self.beats.get(0)
        seen = "" if beat is None else f" {beat['who']} was last seen in {beat['place']}."
        text = f"hftune: The launcher's store at {address} does not answer in {self.progress.current_stage}"
        why = "that launcher has ended, or its machine is down or cut off."
        return Report(f"{text}: {why}{seen}", rank=0, can_print=False)

    # The thread that acts

    def _act(self) -> None:
        count, quiet_s = -1, 0.0
        while self._bye is None and self.report is None and not self._is_lost:
            self._listen(BEAT_S)
            quiet_s = quiet_s + BEAT_S if count == self._round_count else 0.0
            count = self._round_count
            if quiet_s > self.dead_after_s:
                self._is_lost = True
        until = time.monotonic() + RETURN_S
        is_urgent = self.report is not None and self.report.is_stall
        while time.monotonic() < until and not (is_urgent or self._is_terminated or self._main_is_back or self._bye):
            self._listen(BEAT_S / 10)
        with self._lock:
            self._ends = not (self._main_is_back or self._bye)
        self._decided.set()
        if self._ends:
            self._end(self.report or self._describe_loss())

    def _listen(self, seconds: float) -> None:
        """Wait, but not when a signal comes or something has changed."""
        if select.select([self._ear], [], [], seconds)[0] and signal.SIGTERM in self._ear.recv(4096):
            self._is_terminated = True
            self._wake.set()

    def _end(self, report: Report) -> None:
        self.close_all()
        if report.is_printed_by(self.here):
            self._heard.wait(HEARD_S)
            say_last(report.text, report.kind)
        else:
            until = time.monotonic() + PATIENCE_S
            while time.monotonic() < until and not self._is_terminated:
                self._listen(BEAT_S)
        os._exit(report.code)  # the main thread cannot be interrupted in a collective

    def _hear_sigterm(self) -> bool:
        """Hear it even while the main thread waits in a collective; a launcher sends it to those who outlive a killed one."""
        if threading.current_thread() is not threading.main_thread():
            return False
        if signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, _let_one_pass):
            return False
        others = signal.set_wakeup_fd(self._bell.fileno(), warn_on_full_buffer=False)
        if others != -1:
            signal.set_wakeup_fd(others)
            return False
        signal.signal(signal.SIGTERM, self._note_sigterm)
        _make_children_deaf()
        return True

    def _note_sigterm(self, number: int, frame: FrameType | None) -> None:
        self._is_terminated = True  # where the main thread is in Python; the wake-up descriptor tells the acting thread


def _let_one_pass(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@cache
def _make_children_deaf() -> None:
    """Let forked children, such as those of a DataLoader, die of SIGTERM by themselves, not tell their parent of it."""

    def forget() -> None:
        if isinstance(getattr(signal.getsignal(signal.SIGTERM), "__self__", None), (Watchdog, StopRequest)):
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    os.register_at_fork(after_in_child=forget)


def _is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True

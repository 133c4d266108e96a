"""Ends all processes within seconds where one fails, vanishes or stands still, and says why. Knows no model and no data.

Every process writes once a second where it is into the launcher's store, over a connection of its own, and looks there for
a report of a failure. Process 0 watches all, all watch process 0, and those of one machine watch each other's process ids:
the work grows with the number of processes, not with its square. A process that is silent but whose id is still there is
alive: it may be in C code that holds Python's lock, and is given more time. The first report wins; it is the last thing that
every machine prints.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import socket
import sys
import threading
import time
import traceback
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from hftune.config.shipped_files import PACKAGE
from hftune.distributed.preflight import check_environment, number
from hftune.distributed.progress import Progress
from hftune.distributed.signals import StopRequest
from hftune.errors import ConfigError, DataError, ElsewhereError, Interrupted, TrainingError

BEAT_S = 1.0
HURT_S = 10.0  # a process is silent AND a connection is broken: it is gone, and dead_after_s need not pass
RETURN_S = 3.0  # for the main thread to come back by itself: from a broken connection, or from the end of training
INTERRUPTED = 130  # a shell's exit code for Ctrl-C
STOPPED = 75  # EX_TEMPFAIL of sysexits.h, "try again later": a signal asked to stop, and a checkpoint was written
CLOSING_S = 5.0  # for a dashboard to take its last numbers
HEARD_S = CLOSING_S + 3.0  # for all to read a report, once a second, before the launcher that ends takes the store along
PATIENCE_S = 15.0  # of those that are silent with the one that speaks; its launcher ends them meanwhile
FRESH_S = 3.0  # a sign of life no older than this can vouch for a neighbour
MEET_S = 0.2  # between two looks for the other processes of this attempt
REMINDER_S = 15.0  # between two lines that say who is waited for
SHOWN = 8  # processes to list; the rest are counted

SECOND_HAND = (
    *("Connection closed by peer", "Connection reset by peer", "Connection refused", "Broken pipe", "Socket Timeout"),
    *("Timed out waiting", "gloo", "Gloo", "NCCL", "ncclRemoteError", "Watchdog"),
)
"""What a healthy process says when another one has died: its connection is gone."""

HELD_UP = "C code holds Python's lock there, or it is stopped or swapping"


@dataclass(frozen=True)
class Report:
    """Why a run ended, ready to be printed."""

    text: str
    code: int = 1
    """The exit code: 2 where recipe or data are wrong."""
    rank: int = 0
    """The process that it is about."""
    can_speak: bool = True
    """That process prints it on its machine; on the others, and where it cannot, the first one that can."""
    is_stall: bool = False
    """Nothing has ended, so every process shows its stack first."""
    is_spoken_here: bool = True
    """This process prints it."""
    kind: str = "TrainingError"
    """The exception of hftune.errors that says the same."""

    @classmethod
    def parse(cls, text: str | bytes) -> Report:
        """Read a report from the launcher's store. Whoever reaches its port can write there: it never means success."""
        default = cls("hftune: The launcher's store holds a report that no process of this job has written. Who may reach it?")
        try:
            report = cls(**json.loads(text))
        except (ValueError, TypeError):
            return default
        if any(type(value) is not type(getattr(default, name)) for name, value in vars(report).items()):
            return default
        return report if report.code in (1, 2, STOPPED, INTERRUPTED) else replace(report, code=1)


@dataclass(frozen=True)
class Whereabouts:
    """This process among the others, as the launcher told it."""

    rank: int
    num_processes: int
    machine: range
    """The ranks on this machine."""
    has_agent: bool
    """torchrun's agent started the process, as it does for accelerate launch: process ids of a machine can be compared."""
    host: str

    @classmethod
    def from_environment(cls) -> Whereabouts:
        """Read it from the launcher's variables.

        Raises:
            ConfigError: they are none that a launcher sets.
        """
        check_environment()
        rank, count = number("RANK"), number("WORLD_SIZE")
        first = rank - number("LOCAL_RANK")
        machine = range(first, first + max(number("LOCAL_WORLD_SIZE"), rank - first + 1))
        return cls(rank, count, machine, "GROUP_RANK" in os.environ, socket.gethostname())

    def name(self) -> str:
        return f"Process {self.rank} (host {self.host}, pid {os.getpid()})"

    def speaks(self, report: Report) -> bool:
        """Say whether this process prints the report: exactly one of each machine does."""
        if report.can_speak and report.rank in self.machine:
            return self.rank == report.rank
        return self.rank == next((rank for rank in self.machine if report.can_speak or rank != report.rank), None)


class Heartbeat:
    """A context around training. An exception leaves it with a ``report``, which says where it happened.

    Where another process is the cause, the exception is an ElsewhereError with that one's report. A main thread that does
    not come back by itself, because it waits in a collective, is ended with its process.
    """

    def __init__(self, progress: Progress, dead_after_s: float, stall_after_s: float | None):
        self.progress, self.dead_after_s, self.stall_after_s = progress, dead_after_s, stall_after_s
        self.here = Whereabouts.from_environment()
        self.closers: list[Callable[[], None]] = []
        """What is still to be done where a process fails, before the last word."""
        self._closing = threading.Thread(target=self._close, name="hftune _close", daemon=True)
        self._lock = threading.Lock()
        self._connection: Any = None
        self._watch: _Watch | None = None

    def __enter__(self) -> Heartbeat:
        """Begin to beat before there is a process group, where the launcher has a store already.

        Raises:
            TrainingError: the store does not answer; the process group would wait for it for an hour.
        """
        import torch.distributed as dist

        agent_has_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if self.here.num_processes > 1 and agent_has_store and not dist.is_initialized():
            address, timeout = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), timedelta(seconds=30)
            try:
                self._connection = dist.TCPStore(*address, is_master=False, timeout=timeout, wait_for_workers=False)
            except dist.DistError as error:
                where = f"The launcher's store at {address[0]}:{address[1]} does not answer"
                raise TrainingError(f"{where}: that launcher has ended, or its machine is down or cut off.") from error
            from hftune.distributed.rendezvous import Attempt  # only now: it imports torch

            self._watch = _Watch(self, Attempt(self._connection, self.here.rank).look, has_group=False)
        return self

    def early_store(self, timeout_s: float) -> Any | None:
        """Return a store that the processes share before they have a process group.

        None if there is none, or if process 0 has not come within the time. It shares a connection with the thread that gives
        the signs of life: never wait in it.
        """
        return self._watch.store if self._watch is not None and self._watch.met.wait(timeout_s) else None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Say every REMINDER_S, as long as the block waits for the other processes, which of them are missing."""
        over, began = threading.Event(), time.monotonic()

        def remind() -> None:
            while not over.wait(REMINDER_S):
                if missing := self._missing():
                    seconds = time.monotonic() - began
                    print(f"hftune: {self.here.name()} has waited {seconds:.0f} s for {missing}.", file=sys.stderr, flush=True)

        if self.here.num_processes > 1:
            threading.Thread(target=remind, name="hftune waiting", daemon=True).start()
        try:
            yield
        finally:
            over.set()

    def _missing(self) -> str | None:
        """Say who has not come; None if another process says it."""
        if self._watch is not None and (self.here.rank == 0 or 0 in self._watch.beats):
            return self._watch.missing() if self.here.rank == 0 else None
        if self.here.rank != self.here.machine[0]:
            return None
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        who = "process 0, which has not begun" if self._watch is not None else "the other processes"
        return f"{who}: all {self.here.num_processes} must be started with the same command, and reach {place}"

    def join(self) -> None:
        """Watch all processes from here on, now that there is a process group (collective)."""
        if self.here.num_processes == 1:
            return
        import torch.distributed as dist
        from torch.distributed.distributed_c10d import _get_default_store

        # A process may train several times, and its group be restarted by whatever launcher. The second word never goes into
        # the store, whose keys anyone can list who reaches its port, until there is a report.
        run = [uuid.uuid4().hex, secrets.token_hex(16)]
        dist.broadcast_object_list(run, src=0)
        if self._watch is not None:
            self._watch.close("joined")
        if self._connection is None:  # process 0 holds the store, or whoever made the group
            if not _get_default_store().has_extended_api():
                return  # not on a network: such a group has its collectives' time-out, and nothing else
            self._connection = _get_default_store().clone()
        store = dist.PrefixStore(f"hftune/{run[0]}", self._connection)
        self._watch = _Watch(self, lambda: store, has_group=True, secret=run[1])

    def leave_sigterm(self) -> None:
        """Do not report SIGTERM any more: from here on training ends by itself when it comes, after its step."""
        if self._watch is not None:
            self._watch.reports_sigterm = False

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self._watch is not None:
            self._watch.claim()
        if isinstance(error, Interrupted):  # which all processes have agreed on
            _with_report(error, replace(self._describe(error), is_spoken_here=self.here.rank == self.here.machine[0]))
        is_failure = error is not None and not isinstance(error, Interrupted)
        try:
            if is_failure:
                self._fail(error)
        finally:
            if error is not None:
                self.close_all()
            if self._watch is not None:
                self._watch.close("stopped" if is_failure else "done")

    def close_all(self) -> None:
        """Run the closers, once, in a thread of their own: one that waits for a network is left behind."""
        with self._lock, suppress(RuntimeError):  # it has been started; two threads at once would break its start
            self._closing.start()
        self._closing.join(CLOSING_S)

    def _close(self) -> None:
        for closer in self.closers:
            closer()

    def _fail(self, error: BaseException) -> None:
        """Give the error its report, and let the others know; or learn from them what it comes from.

        Raises:
            ElsewhereError: another process is the cause.
            TrainingError: the process wanted to exit, which must not look like success.
        """
        if is_second_hand(error):
            report = self._watch.wait_for_cause() if self._watch is not None else time.sleep(PATIENCE_S)
            if report is not None:
                raise _with_report(ElsewhereError(report.text), report) from None
        if isinstance(error, SystemExit):
            place = spot(*list(traceback.walk_tb(error.__traceback__))[-1])
            what = f"{self.here.name()} called sys.exit({error.code!r}) in {self.progress.current_stage}"
            raise self._settled(TrainingError(f"{what}, before training was over: {place}.")) from None
        self._settled(error)

    def _settled(self, error: BaseException) -> BaseException:
        report = self._describe(error)
        return _with_report(error, report if self._watch is None else self._watch.settle(report))

    def _describe(self, error: BaseException) -> Report:
        if isinstance(error, KeyboardInterrupt):
            who = self.here.name() if self.here.num_processes > 1 else "Training"
            text = f"hftune: {who} was interrupted from the keyboard in {self.progress.current_stage}."
            return Report(text, INTERRUPTED, self.here.rank, kind="KeyboardInterrupt")
        if is_known(error):
            return Report(f"hftune: {error}", exit_code(error), self.here.rank, kind=type(error).__name__)
        who = f"process {self.here.rank} of {self.here.num_processes} on host {self.here.host}, "
        where = f"[{who if self.here.num_processes > 1 else ''}{self.progress.describe()}]"
        return Report(f"{where}\n{''.join(traceback.format_exception(error)).rstrip()}", 1, self.here.rank)


class _Watch:
    """Two threads: one talks to the store and judges, the other acts, as a store on a dead machine may never answer."""

    def __init__(self, heartbeat: Heartbeat, look: Callable[[], Any | None], has_group: bool, secret: str = ""):
        self.here, self.progress, self.close_all = heartbeat.here, heartbeat.progress, heartbeat.close_all
        self.dead_after_s, self.stall_after_s = heartbeat.dead_after_s, heartbeat.stall_after_s
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
        return self._to_be_spoken(self.report or report)

    def wait_for_cause(self) -> Report | None:
        """Return the report of the process that a second-hand error comes from; None where nobody else failed."""
        self._is_hurt = True
        self._wake.set()
        if not self._decided.wait(RETURN_S):
            if self.here.rank == self.here.machine[0]:
                lost = f"hftune: A connection to another process broke in {self.progress.current_stage}. Waiting up to"
                print(f"{lost} {self.dead_after_s:.0f} s to learn which one and why.", file=sys.stderr, flush=True)
            self._decided.wait(self.dead_after_s + 2 * BEAT_S)
        report = self.report or (self._describe_loss() if self._is_lost else None)
        return None if report is None else self._to_be_spoken(report)

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
        if self._is_terminated and self.report is not None and not self.here.speaks(self.report):
            os._exit(self.report.code)  # its launcher waits for it, and another process speaks
        if not any(thread.is_alive() for thread in self._threads):
            self._ear.close()
            self._bell.close()

    def _to_be_spoken(self, report: Report) -> Report:
        here = self.here.speaks(report)
        if here:
            self._heard.wait(HEARD_S)
        return replace(report, is_spoken_here=here)

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
        if self.store.add("heard", 0) >= self.here.num_processes - (not self.report.can_speak):
            self._heard.set()

    def _sign(self) -> dict[str, Any]:
        frame = sys._current_frames().get(self._main)
        return {
            "round": self._round_count,
            "who": self.here.name(),
            "pid": os.getpid(),
            "machine": [self.here.machine.start, self.here.machine.stop],
            "living": self._living,
            "doing": self.progress.current_stage,
            "place": self.progress.describe(),
            "code": whereabouts_in_code(frame),
            "still_s": self._still_s,
            "hurt": self._is_hurt,
            "bye": self._bye,
        }

    def _stack(self) -> str:
        stack = "".join(traceback.format_stack(sys._current_frames().get(self._main))).rstrip()
        return f"[process {self.here.rank} of {self.here.num_processes} on host {self.here.host}] stands at\n{stack}"

    def _find_report(self, passed_s: float) -> Report | None:
        own, key = self._own, self._report_key
        if own is None and self._bye is None and not self.store.check([key]):
            own = self._judge(passed_s)
        if own is not None:
            return Report.parse(self.store.compare_set(key, "", json.dumps(asdict(own))))
        return Report.parse(self.store.get(key)) if self.store.check([key]) else None

    def _neighbours(self) -> set[int]:
        """Return the other processes of this machine, if their process ids mean the same here."""
        return set(self.here.machine) - {self.here.rank} if self.here.has_agent else set()

    def _judge(self, passed_s: float) -> Report | None:
        """Look at the others; return a report where one is gone or silent, or where all stand still."""
        neighbours = self._neighbours()
        watched = (set(range(self.here.num_processes)) if self.here.rank == 0 else {0}) - {self.here.rank}
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
            text = f"hftune: {self.here.name()} was told to end (SIGTERM) in {self.progress.current_stage}"
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
        others, doing = range(1, self.here.num_processes), self.progress.current_stage
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
            return Report(f"hftune: Process {rank} {what}, since the processes joined. {why}", rank=rank, can_speak=False)
        text = f"hftune: {beat['who']} {what} and is missing in {self.progress.current_stage}. {why} {seen} in {beat['place']}."
        return Report(text, rank=rank, can_speak=False)

    def _describe_loss(self) -> Report:
        address, beat = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}", self.beats.get(0)
        seen = "" if beat is None else f" {beat['who']} was last seen in {beat['place']}."
        text = f"hftune: The launcher's store at {address} does not answer in {self.progress.current_stage}"
        why = "that launcher has ended, or its machine is down or cut off."
        return Report(f"{text}: {why}{seen}", rank=0, can_speak=False)

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
        if self.here.speaks(report):
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
        if isinstance(getattr(signal.getsignal(signal.SIGTERM), "__self__", None), (_Watch, StopRequest)):
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


def is_known(error: BaseException) -> bool:
    """Say whether the error is one of hftune's own, whose message says all."""
    return isinstance(error, (ConfigError, DataError, TrainingError, Interrupted))


def is_second_hand(error: BaseException) -> bool:
    """Say whether the error tells of another process. Of Python's own kinds, OSError is about files and other networks."""
    if isinstance(error, ElsewhereError):
        return True
    return isinstance(error, RuntimeError) and not is_known(error) and any(sign in str(error) for sign in SECOND_HAND)


def exit_code(error: BaseException) -> int:
    """Return 2 where the recipe or the data cannot be trained on, 1 where training failed; INTERRUPTED or STOPPED."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, Interrupted):
        return STOPPED
    return 2 if isinstance(error, (ConfigError, DataError)) else 1


def _with_report(error: BaseException, report: Report) -> BaseException:
    error.report = report
    return error


def say_last(text: str, kind: str) -> None:
    """Print what ends this process, and leave it to torchrun, which repeats it below its own table of failures.

    ``kind`` names the exception, for ``hftune.launch`` to raise it again.
    """
    if sys.stderr.isatty():
        text = f"\n{text}"  # there may be a progress bar
    print(text, file=sys.stderr, flush=True)
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        message = {"message": text, "extraInfo": {"timestamp": int(time.time()), "kind": kind}}
        Path(path).write_text(json.dumps({"message": message}))


def spot(frame: FrameType, line: int) -> str:
    """Name a place in the code."""
    return f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{line})"


def whereabouts_in_code(frame: FrameType | None) -> str:
    """Name the innermost frame, and the innermost one that is hftune's or the user's, not a library's."""
    if frame is None:
        return "no code"
    libraries, own = (str(Path(os.__file__).parent), "site-packages", "<frozen"), str(PACKAGE)
    innermost, said = frame, spot(frame, frame.f_lineno)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(own) or not any(library in name for library in libraries):
            return said if frame is innermost else f"{said}, called from {spot(frame, frame.f_lineno)}"
        frame = frame.f_back
    return said

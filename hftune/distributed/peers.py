"""The other processes as this one sees them: their signs of life, and who is missing, silent or stalled. Judges, never acts.

Process 0 watches all, all watch process 0, and those of one machine watch each other's process ids: the work grows with the
number of processes, not with its square. A process that is silent but whose id is still there is alive: it may be in C code
that holds Python's lock, and is given more time.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from hftune.distributed.failure_report import Report
from hftune.distributed.process_info import ProcessInfo
from hftune.distributed.progress import Progress
from hftune.distributed.usage import Sample, by_host

HURT_S = 10.0
"""Limit of silence if a connection is broken, too: the process is gone, and there is no need to wait for dead_after_s."""
FRESH_S = 3.0
"""Age up to which a sign of life can vouch for a process on the same machine, and its numbers are shown."""
SHOWN = 8
"""Processes to list; the rest are counted."""

HELD_UP = "C code in it may hold Python's lock, or it may be stopped or swapping"


@dataclass(frozen=True)
class Limits:
    """How long a process may be silent, in seconds."""

    dead_after_s: float
    """Without a sign of life."""
    stall_after_s: float | None
    """Without progress on any process; None: for ever."""


class Peers:
    """The last sign of life of each process that was looked at, and how long it has been silent."""

    def __init__(self, here: ProcessInfo, progress: Progress, limits: Limits, has_group: bool):
        self.here, self.progress, self.has_group = here, progress, has_group
        self.dead_after_s, self.stall_after_s = limits.dead_after_s, limits.stall_after_s
        self.beats: dict[int, dict[str, Any]] = {}
        self.silent_s: dict[int, float] = defaultdict(float)
        self.living: list[int] = []
        """Ranks on this machine whose process ids exist."""
        self.waited_for: set[int] = set()
        """Ranks that are alive but do not answer, for which a line was printed."""
        self._store: Any = None

    def use(self, store: Any) -> None:
        """Read from this store from now on, and forget what was read from another one."""
        self._store = store
        self.beats.clear()
        self.silent_s.clear()

    def look_around(self) -> None:
        """Update which processes of this machine are running."""
        self.living = [rank for rank in self._neighbours() & set(self.beats) if is_running(self.beats[rank]["pid"])]

    def find_dead(self, passed_s: float, connection_is_broken: bool) -> Report | None:
        """Read the signs of life, ``passed_s`` after the last call; return a report if a process is gone or silent."""
        neighbours = self._neighbours()
        watched = (set(range(self.here.world_size)) if self.here.is_main else {0}) - {self.here.rank}
        gone = [rank for rank in sorted(neighbours & set(self.beats)) if rank not in self.living]
        self._read(watched | (neighbours - set(self.beats)), passed_s)
        for rank in gone:
            self._read([rank], 0.0)
            if self.beats[rank]["bye"] is None:
                return self._missing_report(rank, "exited unexpectedly", "It was killed, crashed, or exited.", "Last seen")
        is_hurt = connection_is_broken or any(beat["hurt"] for beat in self.beats.values())
        reports = (self._judge_silence(rank, is_hurt, passed_s) for rank in sorted(watched))
        return next((report for report in reports if report is not None), None)

    def find_stall(self, own_sign: dict[str, Any]) -> Report | None:
        """On process 0: return a report that lists where all processes are if none has made progress for too long."""
        if not self.here.is_main or not self.has_group or self.stall_after_s is None:
            return None
        signs = {0: own_sign} | self.beats
        present = {rank: sign for rank, sign in signs.items() if sign["bye"] is None}
        still_s = min((sign["still_s"] for sign in present.values()), default=0.0)  # all may just have ended
        if still_s <= self.stall_after_s:
            return None
        together = defaultdict(list)
        for rank, sign in sorted(present.items()):
            together[sign["stage"], sign["code"]].append((rank, sign))
        limit = f"train.stall_after_s={self.stall_after_s:g}"
        lines = [f"hftune: No process has made progress for {still_s:.0f} s ({limit}). Current positions:"]
        for (stage, code), group in sorted(together.items(), key=lambda item: len(item[1])):
            (rank, sign), ranks = group[0], ", ".join(str(rank) for rank, _ in group)
            who = f"process {rank}{sign['who'].removeprefix(f'Process {rank}')}" if len(group) == 1 else f"processes {ranks}"
            lines.append(f"  {who}: {sign['position'] if len(group) == 1 else stage}, in {code}")
        return Report("\n".join(lines), rank=0, is_stall=True)

    def missing(self) -> str | None:
        """On process 0, before there is a group: list who is not as far as this process; None if all are."""
        others, stage = range(1, self.here.world_size), self.progress.current_stage
        absent = [f"process {rank}, which has not started" for rank in others if rank not in self.beats]
        behind = [
            f"process{beat['who'].removeprefix('Process')}, in {beat['position']}"
            for rank in others
            if (beat := self.beats.get(rank)) is not None and beat["stage"] != stage and beat["bye"] is None
        ]
        awaited = [*absent, *behind]
        more = [f"{len(awaited) - SHOWN} more"] if len(awaited) > SHOWN else []
        return "; ".join(awaited[:SHOWN] + more) or None

    def usage_by_host(self, own: Sample) -> dict[str, float]:
        """On process 0: return what is logged of all machines. Only this one while others have not been heard of.

        Called by another thread than the methods above.
        """
        samples, first_ranks, beats = {0: own}, {0: 0}, self.beats.copy()
        if len(beats) == self.here.world_size - 1:  # else machines would be numbered differently later
            first_ranks |= {rank: beat["machine"][0] for rank, beat in beats.items()}
            samples |= {rank: beat["usage"] for rank, beat in beats.items() if self.silent_s.get(rank, 0.0) <= FRESH_S}
        return by_host(samples, first_ranks)

    def _neighbours(self) -> set[int]:
        """Return the other processes of this machine, if their process ids mean the same here."""
        return set(self.here.node_ranks) - {self.here.rank} if self.here.has_agent else set()

    def _judge_silence(self, rank: int, is_hurt: bool, passed_s: float) -> Report | None:
        """Return a report if a process has been silent for too long; for longer if its machine says that it lives."""
        beat, silent_s, dead_after_s = self.beats.get(rank), self.silent_s[rank], self.dead_after_s
        is_expected = self.has_group if beat is None else beat["bye"] is None
        if not is_expected or silent_s <= (min(dead_after_s, HURT_S) if is_hurt else dead_after_s):
            self.waited_for.discard(rank)
            return None
        seen, key = f"Last seen {silent_s:.0f} s ago", f"train.dead_after_s={dead_after_s:g}"
        if beat is None or not self._lives(rank, beat["machine"], passed_s):
            why = "It was killed, or its machine is down or cut off."
            if not is_hurt:
                why += f" If C code in it may hold Python's lock for that long, raise {key}."
            return self._missing_report(rank, f"has given no sign of life for {silent_s:.0f} s", why, seen)
        what = f"is alive but has not answered for {silent_s:.0f} s"
        limit_s, name = (dead_after_s, key) if is_hurt else (self.stall_after_s, f"train.stall_after_s={self.stall_after_s}")
        if limit_s is not None and silent_s > limit_s:
            broke = ", because a connection broke in the meantime" if is_hurt else ""
            return self._missing_report(rank, what, f"{HELD_UP}. The limit is {name}{broke}.", seen)
        if silent_s > dead_after_s and rank not in self.waited_for and self.here.rank == (1 if rank == 0 else 0):
            self.waited_for.add(rank)
            limit = "without a limit" if self.stall_after_s is None else f"for up to {self.stall_after_s:g} s"
            text = f"{what} ({key}). {HELD_UP}. {seen} in {beat['position']}. Waiting {limit} (train.stall_after_s)."
            print(f"hftune: {beat['who']} {text}", file=sys.stderr, flush=True)
        return None

    def _lives(self, rank: int, machine: Sequence[int], passed_s: float) -> bool:
        """Say whether a silent process exists: by its process id on this machine, or by the word of one beside it."""
        if rank in self._neighbours():
            return rank in self.living
        beside = [other for other in range(*machine) if other not in (rank, self.here.rank)]
        if not self.here.is_main:  # which reads them all
            self._read(beside, passed_s)
        fresh = [self.beats[other] for other in beside if other in self.beats and self.silent_s[other] <= FRESH_S]
        return any(rank in beat["living"] for beat in fresh)

    def _read(self, ranks: Iterable[int], passed_s: float) -> None:
        """Read the beats of these processes, if there are any, and count how long each has been silent."""
        present = [rank for rank in ranks if rank in self.beats or self._store.check([f"beat/{rank}"])]
        values = self._store.multi_get([f"beat/{rank}" for rank in present]) if present else []
        for rank in ranks:
            self.silent_s[rank] += passed_s
        for rank, value in zip(present, values, strict=True):
            beat = json.loads(value)
            if rank not in self.beats or beat["round"] != self.beats[rank]["round"]:
                self.silent_s[rank] = 0.0
            self.beats[rank] = beat

    def _missing_report(self, rank: int, what: str, why: str, seen: str) -> Report:
        beat = self.beats.get(rank)
        if beat is None:
            return Report(f"hftune: Process {rank} {what}, since the processes joined. {why}", rank=rank, can_print=False)
        text = f"hftune: {beat['who']} {what} during {self.progress.current_stage}. {why} {seen} in {beat['position']}."
        return Report(text, rank=rank, can_print=False)


def is_running(pid: int) -> bool:
    """Say whether a process of this machine exists and has not ended; one of another user counts as running."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True

"""How an agent takes part in an elastic job: it gives signs of life, notices who is silent or cut off, advances the document.

Independent of torchrun and of what the rounds are for: rendezvous.py.
"""

from __future__ import annotations

import json
import secrets
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from hftune.distributed.consistency import differences, remedies
from hftune.distributed.network import family, interfaces
from hftune.elastic.copies import Copies
from hftune.elastic.membership import Machine, Membership, Phase, Silence, View, advance
from hftune.elastic.places import Place

BEAT_S = 0.5
KEEP_ALIVE_S = 3.0
LAST_CALL_S = 30.0
REGROUP_EVERY_S = 60.0
CONNECT_S = 10.0
"""For the machines of a round to reach its store."""
CUT_S = 2.0
"""A machine that is silent is lost: only later may another one say that it does not reach it."""
LEAVE_S = 5.0
"""For the last word to be written."""
PLACE_S = 20.0
"""For the meeting place to answer again. Who gets no answer for so long ends; only then do others replace a whole round."""
HANG_UP_S = 3.0
"""For the meeting place to answer before it is connected to anew, and again after each further time. Well below PLACE_S."""
RETURN_S = 2.0
"""For the machines of a job to bring its document back to a meeting place that was started again."""


@dataclass(frozen=True)
class Times:
    """How long to wait, in seconds."""

    join: float
    last_call: float = LAST_CALL_S
    keep_alive: float = KEEP_ALIVE_S
    regroup_every: float = REGROUP_EVERY_S


class Attendance:
    """A thread that takes part in the job for this agent: gives a sign of life, notices, and advances the document."""

    def __init__(self, place: Place, me: Machine, least: int, most: int, times: Times, facts: dict[str, Any]):
        self.place, self.least, self.most, self.times = place, least, most, times
        self.facts = facts
        """What all machines must have in common, see consistency.py."""
        self.refusal: str | None = None
        """Why this machine cannot be in the job."""
        self.return_s = 0.0
        """How long to see an empty meeting place before beginning a job there."""
        self._listener = socket.create_server((me.address, 0), family=family(me.address))
        self.me = replace(me, port=self._listener.getsockname()[1], token=secrets.token_hex(16))
        self.membership: Membership | None = None
        """As last seen; None before the first look."""
        self.earlier: Membership | None = None
        """The document that this agent has found, while it is unclear whether anybody is alive, or while it comes later."""
        self.comes_later = False
        """A job runs here, which can do without this machine until it has ``is_prepared``."""
        self.is_prepared = False
        self.job: str | None = None
        """The job that this agent is in; None before it has come."""
        self.error: Exception | None = None
        """Why the meeting place does not answer."""
        self.on_change: Callable[[Membership], None] = lambda membership: None
        self.copies: Copies | None = None
        """If the launcher trains a recipe, whose output folder is known. Who connects wants one, or only looks."""
        self.starts_over = False
        """See Membership."""
        self._view = View(self.me)
        self._changed, self._wake, self._ends = threading.Condition(), threading.Event(), False
        self.unanswered_s = 0.0
        """Since the meeting place last answered; without the time for which this machine itself stood still."""
        self._looked_at = time.monotonic()
        self._count, self._silence = 0, Silence(2 * BEAT_S)
        self._since: dict[Any, float] = {}
        self._unreached: str | None = None
        self._cut_s = 0.0
        self._checkpoint = ""
        self._threads = [
            threading.Thread(target=run, name=f"hftune {run.__name__}", daemon=True)
            for run in (self._attend, self._answer, self._probe)
        ]

    def start(self) -> None:
        """Come to the job."""
        for thread in self._threads:
            thread.start()

    def say(self, **changes: Any) -> None:
        """Change what this agent wants."""
        with self._changed:
            self._view = replace(self._view, **changes)
        self._wake.set()

    def wait(self, seconds: float) -> None:
        """Wait for the document to change."""
        with self._changed:
            self._changed.wait(seconds)

    def is_here(self, machine: str) -> bool:
        """Whether a machine is in the job, as far as this agent knows."""
        return self.membership is not None and machine in self.membership.machines and self.unanswered_s < PLACE_S

    def leave(self, reason: str) -> None:
        """Say goodbye, and wait for a moment until it is written."""
        self.say(has_left=reason)
        self._threads[0].join(LEAVE_S)

    def stop(self) -> None:
        """Stop without a word: the interpreter aborts if it ends while one of its threads comes back from torch's C++."""
        self._ends = True
        self._wake.set()
        if self._threads[0].is_alive():
            self._threads[0].join(LEAVE_S)

    # The thread that attends

    def _attend(self) -> None:
        while not self._ends:
            try:
                self._look()
                self.unanswered_s, self.error = 0.0, None
            except (OSError, RuntimeError, ValueError) as error:
                self.error = error
            with self._changed:
                self._changed.notify_all()
            is_quick = self.membership is None or self.membership.phase in (Phase.GATHERING, Phase.MEETING)
            self._wake.wait(BEAT_S / 5 if is_quick else BEAT_S)
            self._wake.clear()

    def _look(self) -> None:
        """Give a sign of life, read the document, and advance it."""
        own, now = self._view, time.monotonic()
        passed_s, self._looked_at = now - self._looked_at, now
        self._count += 1
        sign = {"count": self._count, "cut": self._is_cut}
        self.place.give_sign(self.me.id, json.dumps(sign))
        text = self.place.read()
        if not text and self.job is not None and self.membership is not None:  # the meeting place was started anew
            self.place.note(f"facts-{self.job}", json.dumps(self.facts))
            text = self.place.swap("", self.membership.to_text())
        while True:
            membership = Membership.parse(text) if text else None
            silence, cut = self._watch(membership, passed_s)
            passed_s = 0.0
            if self.job is None and (own.ready_after is None or not self._may_come(membership, silence)):
                self.earlier = membership
                return
            if self.job is None and self._comes_later(membership):
                return
            if self.job is None and (membership is None or self._is_over(membership, silence)):
                membership = Membership(uuid.uuid4().hex, self.least, self.most, starts_over=self.starts_over)
                self.place.note(f"facts-{membership.job}", json.dumps(self.facts))
            elif self.job is None and membership is not None and (refusal := self._refusal(membership)):
                self.refusal, self._ends = refusal, True
                return
            if membership is None or self.job not in (None, membership.job):
                break  # another job has begun here
            view = self._notice(own, membership, silence, cut)
            following = advance(membership, view)
            wanted = following.to_text()
            if wanted != text:
                found = self.place.swap(text, wanted)
                if found != wanted:
                    text = found
                    continue
            membership, self.job = following, following.job
            break
        if own.has_left is not None:
            self._ends = True
        if membership is not None:
            self.membership = membership
            self.on_change(membership)

    def _watch(self, membership: Membership | None, passed_s: float) -> tuple[dict[str, float], frozenset[str]]:
        """Return how long each machine has been silent, and the machines that say that they are cut off."""
        found = self.place.signs(list(membership.machines)) if membership is not None else {}
        signs = {}
        for name, text in found.items():
            with suppress(ValueError):  # it is being written
                signs[name] = json.loads(text)
        silence = self._silence.look({name: signs.get(name, {}).get("count") for name in found}, passed_s)
        first = membership.first if membership is not None else None
        # Who has not reached the first machine of an earlier round, which was lost, says nothing about the present one.
        return silence, frozenset(
            name for name, sign in signs.items() if sign["cut"] in (name, first and first.id) and sign["cut"]
        )

    def _may_come(self, membership: Membership | None, silence: dict[str, float]) -> bool:
        """Whether it is clear if anybody is alive in this job: it may have been left without a word, or be brought back."""
        empty_s = self._lasts("empty", membership is None)
        if membership is None:
            return empty_s >= self.return_s
        if self._is_over(membership, silence):
            return True
        return not self._silence.changed.isdisjoint(silence)

    def _comes_later(self, membership: Membership | None) -> bool:
        """Whether others train already, or have just ended: they would stop for this machine, and wait while it prepares."""
        if membership is None or self.is_prepared or self._refusal(membership):
            return False
        has_ended = membership.phase is Phase.ENDED
        self.comes_later = (
            self.comes_later if has_ended else membership.round >= 0 and len(membership.machines) >= membership.least
        )
        self.earlier = membership
        return self.comes_later

    def _refusal(self, membership: Membership) -> str | None:
        """Say why this machine does not fit into the job; None if it does."""
        remedy = "If it is to be a job of its own, give it another meeting place or another --rdzv-id."
        if (self.least, self.most) != (membership.least, membership.most):
            return (
                f"This machine was started for {self.least}:{self.most} machines, and the job that runs here for "
                f"{membership.least}:{membership.most}. Start all with the same numbers. {remedy}"
            )
        theirs = json.loads(self.place.note(f"facts-{membership.job}"))
        if not (different := differences(self.facts, theirs)):
            return None
        return (
            f"This machine is not let in. Compared with {theirs['host']}, which began the job that runs here, it has "
            f"{'; '.join(different.values())}. {remedies(different)} {remedy}"
        )

    def _is_over(self, membership: Membership, silence: dict[str, float]) -> bool:
        return membership.phase is Phase.ENDED or self._silent(membership, silence).keys() == membership.machines.keys()

    def _silent(self, membership: Membership, silence: dict[str, float]) -> dict[str, float]:
        """Return the machines that are lost. All of a round at once may be cut off from here only, until they notice it."""
        lost = {name: seconds for name, seconds in silence.items() if seconds > self.times.keep_alive}
        if membership.phase is Phase.RUNNING and set(membership.members) <= lost.keys():
            lost = {name: seconds for name, seconds in lost.items() if seconds > self.times.keep_alive + PLACE_S}
        return lost

    @property
    def _is_cut(self) -> str | None:
        """Id of the first machine if it has not been reached for a while, or of this one if it can reach none."""
        return self._unreached if self._cut_s > self.times.keep_alive + CUT_S else None

    def _notice(self, own: View, membership: Membership, silence: dict[str, float], cut: frozenset[str]) -> View:
        """Return what this agent wants, with what it has noticed."""
        enough = membership.round < 0 and len(membership.candidates) >= membership.least
        is_meeting, is_first = membership.phase is Phase.MEETING, membership.members[:1] == [self.me.id]
        return replace(
            own,
            run=self.copies.run() if is_first and self.copies is not None else "",
            silent=self._silent(membership, silence),
            cut=cut | {self.me.id} if self._is_cut == self.me.id else cut,
            lets_in=self._lets_in(membership, cut),
            last_call_is_over=self._lasts("last call", enough) > self.times.last_call,
            late=membership.attempt if self._lasts(("attempt", membership.attempt), is_meeting) > CONNECT_S else 0,
        )

    def _lets_in(self, membership: Membership, cut: frozenset[str]) -> bool:
        """Whether it is time to take newcomers in: at the next checkpoint, or once they have waited long enough."""
        decides = membership.phase is Phase.RUNNING and membership.members[:1] == [self.me.id]
        waits = decides and any(one.id not in cut for one in membership.newcomers)
        waited_s = self._lasts("newcomers", waits)
        if not waits:
            return False
        newest = "" if self.copies is None else self.copies.newest()
        if waited_s == 0.0:
            self._checkpoint = newest
        return waited_s > self.times.regroup_every or newest != self._checkpoint

    def _lasts(self, what: Any, is_so: bool) -> float:
        """Return for how many seconds something has been so."""
        if not is_so:
            self._since.pop(what, None)
            return 0.0
        now = time.monotonic()
        return now - self._since.setdefault(what, now)

    # The threads that see who is cut off

    def _answer(self) -> None:
        while True:
            with suppress(OSError):
                connection = self._listener.accept()[0]
                connection.close() if self.copies is None else self.copies.accept(connection)

    def _probe(self) -> None:
        """Try to reach the first machine of the round; the first one looks whether it has its own address still."""
        last = time.monotonic()
        while True:
            time.sleep(2 * BEAT_S)
            unreached, now = self._find_unreached(), time.monotonic()
            passed_s, last = min(now - last, 4 * BEAT_S), now
            is_known = unreached is not None and unreached == self._unreached
            self._cut_s = self._cut_s + passed_s if is_known else 0.0
            self._unreached = unreached
            self.unanswered_s += passed_s
            if self.unanswered_s // HANG_UP_S > (self.unanswered_s - passed_s) // HANG_UP_S:
                self.place.hang_up()

    def _find_unreached(self) -> str | None:
        """Return the id of the first machine if it is not reached, or that of this one if its cable was pulled."""
        if not any(self.me.address in addresses for addresses in interfaces().values()):
            return self.me.id
        membership = self.membership
        first = membership.first if membership is not None else None
        if first is None or first.id == self.me.id:
            return None
        try:
            socket.create_connection((first.address, first.port), timeout=2 * BEAT_S).close()
        except OSError:
            return first.id
        return None

"""How the machines of an elastic job meet, again and again, as torchrun's agent sees it. Independent of training.

torchrun and accelerate launch find this as the rendezvous backend "hftune" if the number of machines is a range: ``--nnodes
1:4``, or ``--num_machines 4 --rdzv_conf min_machines=1``. Who is in the job is decided in membership.py; here an agent attends:
it gives a sign of life, watches the others, opens or connects to the store of each round, and tells its processes.

torch's own backend c10d loses the job with rank 0 or with the machine of the store, and lets newcomers and survivors wait for
each other without end (torch 2.13: the address of the store is told in the first round only).
"""

from __future__ import annotations

import atexit
import json
import math
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

from torch.distributed import DistError, TCPStore
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from hftune.config import Recipe
from hftune.distributed import rounds
from hftune.distributed.consistency import differences, fingerprint, remedies
from hftune.distributed.failure_report import STOPPED
from hftune.distributed.meeting_places import FolderPlace, MeetingPlace, StorePlace
from hftune.distributed.membership import Machine, Membership, Phase, Silence, View, advance
from hftune.distributed.network import interfaces, is_own_address, outward_interfaces, resolve, route_to
from hftune.distributed.rendezvous_backend import (
    JOIN_TIMEOUT,
    PORT,
    REMINDER_S,
    Meeting,
    allow_open_files,
    join_timeout_s,
    leave,
    say,
)
from hftune.errors import ConfigError

BEAT_S = 0.5
KEEP_ALIVE_S = 3.0
LAST_CALL_S = 30.0
REGROUP_EVERY_S = 60.0
CONNECT_S = 10.0
"""For the machines of a round to reach its store."""
CUT_S = 2.0
"""A machine that is silent is lost: only later may another one say that it does not reach it."""
PLACE_S = 20.0
"""For the meeting place to answer again. Who gets no answer for so long ends; only then do others replace a whole round."""
FINISH_S = 300.0
"""For the other machines to finish, once this one has."""
LEAVE_S = 5.0
ROLE = "torchelastic/role_info/"
"""Beginning of the keys under which torchrun's agents tell each other their numbers of processes."""


@dataclass(frozen=True)
class Times:
    """How long to wait, in seconds."""

    join: float
    last_call: float = LAST_CALL_S
    keep_alive: float = KEEP_ALIVE_S
    regroup_every: float = REGROUP_EVERY_S


def create_elastic_handler(params: RendezvousParameters) -> ElasticRendezvous:
    """Read the launcher's parameters, and find the meeting place.

    Raises:
        SystemExit: a parameter is invalid, or nothing answers.
    """
    config, most = params.config, params.max_nodes
    least = _number(config, "min_machines", params.min_nodes)
    if not (least.is_integer() and 1 <= least <= most):
        refuse(f"--rdzv_conf min_machines={config['min_machines']} is no whole number from 1 to the most, {most}.")
    recipe = recipe_of_launcher()
    times = Times(
        join=join_timeout_s(config.get("join_timeout")),
        last_call=_number(config, "last_call", LAST_CALL_S),
        keep_alive=_number(config, "keep_alive", KEEP_ALIVE_S, least=BEAT_S),
        regroup_every=_number(config, "regroup_every", REGROUP_EVERY_S if recipe is None else recipe.parallel.regroup_every_s),
    )
    try:
        place, where, address, is_host = _find_place(params, times)
    except (ConfigError, OSError) as error:
        leave(str(error))
    me = Machine(uuid.uuid4().hex, socket.gethostname(), address)
    attendance = Attendance(place, me, int(least), most, times, fingerprint(recipe))
    if recipe is not None:
        folder = Path(recipe.output_dir) / "checkpoints"
        attendance.newest_checkpoint = lambda: max((path.name for path in folder.glob("step_*")), default="")
    return ElasticRendezvous(attendance, where, params.run_id, is_host)


def refuse(message: str) -> NoReturn:
    """End the launcher, which cannot be started like this."""
    say(message)
    sys.exit(2)


def recipe_of_launcher() -> Recipe | None:
    """Return the recipe in this launcher's command line; None if it does not train a recipe.

    Raises:
        SystemExit: the recipe is invalid.
    """
    modules = [index for index, (before, _) in enumerate(pairwise(sys.argv)) if before in ("-m", "--module")]
    if not modules or not sys.argv[modules[0] + 1].startswith("hftune."):
        return None
    words = [word for word in sys.argv[modules[0] + 2 :] if "=" in word and not word.startswith("-")]
    if not any(word.startswith("recipe=") for word in words):
        return None
    sys.path.insert(0, str(Path.cwd()))  # as for the processes, which are started with python -m
    try:
        return Recipe.from_argv(words)
    except ConfigError as error:
        refuse(str(error))
    finally:
        sys.path.pop(0)


def _number(config: dict[str, Any], name: str, default: float, least: float = 0.0) -> float:
    try:
        value = float(config.get(name, default))
    except ValueError:
        value = math.nan
    if not least <= value < math.inf:
        refuse(f"--rdzv_conf {name}={config.get(name, default)} is not a number of at least {least:g}.")
    return value


def _find_place(params: RendezvousParameters, times: Times) -> tuple[MeetingPlace, str, str, bool]:
    """Return the meeting place, its name, this machine's address, and whether this process serves the place."""
    where = params.config.get("meeting") or params.endpoint
    if not where:
        raise ConfigError(
            "rdzv_backend hftune needs a place where the machines meet: --rdzv-endpoint HOST:PORT of a machine that stays, or "
            "--rdzv_conf meeting=FOLDER on a file system that all share."
        )
    if "/" in where:
        return FolderPlace(Path(where), params.run_id), where, params.local_addr or own_address(), False
    try:
        host, port = parse_rendezvous_endpoint(where, PORT)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error
    meeting = Meeting(host, port, params.max_nodes, params.run_id, times.join, params.config)
    store, is_host = meeting.find_store()
    if not is_host and store.check([f"hftune/machines/{params.run_id}/joined"]):
        raise ConfigError(
            f"A job with a fixed number of machines meets at {host}:{port}. Give this one another port or another --rdzv-id."
        )
    address = params.local_addr or route_to(resolve(host)).address
    return StorePlace(store, params.run_id, lambda: connect(host, port, 2 * BEAT_S)), f"{host}:{port}", address, is_host


def connect(host: str, port: int, seconds: float) -> TCPStore:
    """Connect to a store that others serve, or raise OSError or DistError.

    torch itself prints its call stack if nobody answers, hence the first attempt.
    """
    until = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, port), timeout=max(until - time.monotonic(), BEAT_S)).close()
            break
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(BEAT_S / 5)
    timeout = timedelta(seconds=max(until - time.monotonic(), 1.0))
    store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
    store.set_timeout(timedelta(seconds=60))
    return store


def own_address() -> str:
    """Return the address at which other machines reach this one.

    Raises:
        ConfigError: it is unclear which one; the message says how to give it.
    """
    listed = outward_interfaces()
    if (name := os.environ.get("GLOO_SOCKET_IFNAME", "")) in listed:
        return listed[name][0]
    if len(listed) == 1:
        return next(iter(listed.values()))[0]
    with suppress(ConfigError):
        if not (address := resolve(socket.gethostname())).startswith("127.") and is_own_address(address):
            return address
    if not listed:
        return "127.0.0.1"
    raise ConfigError(
        f"This machine has several addresses: {', '.join(f'{one[0]} ({name})' for name, one in listed.items())}. Say at which "
        "the other machines reach it: torchrun --local-addr ADDRESS, or GLOO_SOCKET_IFNAME=INTERFACE."
    )


class Attendance:
    """A thread that takes part in the job for this agent: gives a sign of life, notices, and advances the document."""

    def __init__(self, place: MeetingPlace, me: Machine, least: int, most: int, times: Times, facts: dict[str, Any]):
        self.place, self.least, self.most, self.times = place, least, most, times
        self.facts = facts
        """What all machines must have in common, see consistency.py."""
        self.refusal: str | None = None
        """Why this machine cannot be in the job."""
        self._listener = socket.create_server((me.address, 0), family=_family(me.address))
        self.me = replace(me, port=self._listener.getsockname()[1])
        self.membership: Membership | None = None
        """As last seen; None before the first look."""
        self.earlier: Membership | None = None
        """The document that this agent has found, while it is unclear whether anybody is alive."""
        self.job: str | None = None
        """The job that this agent is in; None before it has come."""
        self.error: Exception | None = None
        """Why the meeting place does not answer."""
        self.on_change: Callable[[Membership], None] = lambda membership: None
        self.newest_checkpoint: Callable[[], Any] = lambda: None
        self._view = View(self.me)
        self._changed, self._wake, self._ends = threading.Condition(), threading.Event(), False
        self._looked_at = self._answered_at = time.monotonic()
        self._count, self._silence = 0, Silence(2 * BEAT_S)
        self._since: dict[Any, float] = {}
        self._unreached: str | None = None
        self._cut_s = 0.0
        self._checkpoint: Any = None
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

    @property
    def unanswered_s(self) -> float:
        """Seconds since the meeting place last answered."""
        return time.monotonic() - self._answered_at

    def leave(self, reason: str) -> None:
        """Say goodbye, and wait for a moment until it is written."""
        self.say(has_left=reason)
        self._threads[0].join(LEAVE_S)

    # The thread that attends

    def _attend(self) -> None:
        while not self._ends:
            try:
                self._look()
                self._answered_at, self.error = time.monotonic(), None
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
        text = self.place.read() or self._bring_back()
        while True:
            membership = Membership.parse(text) if text else None
            silence, cut = self._watch(membership, passed_s)
            passed_s = 0.0
            if self.job is None and (own.ready_after is None or not self._may_come(membership, silence)):
                self.earlier = membership
                return
            if self.job is None and (membership is None or self._is_over(membership, silence)):
                membership = Membership(uuid.uuid4().hex, self.least, self.most)
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
        self._ends = own.has_left is not None
        if membership is not None:
            self.membership = membership
            self.on_change(membership)

    def _bring_back(self) -> str:
        """Put the document, as last seen, into a meeting place that has been started anew; return what is there."""
        if self.job is None or self.membership is None:
            return ""
        self.place.note(f"facts-{self.job}", json.dumps(self.facts))
        return self.place.swap("", self.membership.to_text())

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
        """Whether it is clear if anybody is alive in this job: it may have been left without a word."""
        if membership is None or self._is_over(membership, silence):
            return True
        return any(self._silence.has_changed(name) for name in silence)

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
        is_meeting = membership.phase is Phase.MEETING
        return replace(
            own,
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
        if waited_s == 0.0:
            self._checkpoint = self.newest_checkpoint()
        return waited_s > self.times.regroup_every or self.newest_checkpoint() != self._checkpoint

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
                self._listener.accept()[0].close()

    def _probe(self) -> None:
        """Try to reach the first machine of the round; the first one looks whether it has its own address still."""
        last = time.monotonic()
        while True:
            time.sleep(2 * BEAT_S)
            now, unreached = time.monotonic(), self._find_unreached()
            is_known = unreached is not None and unreached == self._unreached
            self._cut_s = self._cut_s + min(time.monotonic() - last, 4 * BEAT_S) if is_known else 0.0
            self._unreached, last = unreached, now

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


class ElasticRendezvous(RendezvousHandler):
    """What torchrun's agent asks: to meet for a round, and whether a round is over."""

    def __init__(self, attendance: Attendance, where: str, run_id: str, is_host: bool):
        self.attendance, self.where, self.run_id, self.is_host = attendance, where, run_id, is_host
        self.round = -1
        """The round that this agent is in, or was in last."""
        self.folder = rounds.AgentFolder(Path(tempfile.mkdtemp(prefix="hftune-agent-")))
        self.local_world_size = 1
        self.store: Any = None
        """Of the round."""
        self._members: list[Machine] = []
        self._server: TCPStore | None = None
        self._earlier_server: TCPStore | None = None  # processes that stay leave it only when they join the new one
        self._told: rounds.Over | None = None
        self._has_left = self._is_leaving = self._misses_place = False
        self._inner_handlers: dict[int, Any] = {}
        os.environ[rounds.FOLDER] = str(self.folder.path)
        allow_open_files()
        atexit.register(self._end)
        sys.excepthook = _say_without_traceback
        attendance.on_change = self._tell_processes

    def get_backend(self) -> str:
        return "hftune"

    def get_run_id(self) -> str:
        return self.run_id

    @property
    def use_agent_store(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """The end is in the document."""

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other machines for the next round.

        Raises:
            SystemExit: they did not come in time, the job has ended, or no other round helps.
        """
        if (failure := self.folder.verdict()) is not None:
            say(failure.text.removeprefix("hftune: "))
            sys.exit(failure.code)
        self._hear_signals()
        if self.round < 0 and self.attendance.job is None:
            self.attendance.start()
        self._meet(stays=False)
        place = RendezvousStoreInfo(*self._address)
        return RendezvousInfo(RoundStore(self), self.machine_rank, len(self._members), place)

    def num_nodes_waiting(self) -> int:
        """Say whether the round is over: more than 0 lets the agent end its processes and meet for the next one."""
        self._hear_signals()
        if not self._has_place():
            return 0
        membership = self.attendance.membership
        assert membership is not None
        if self._goes_on(membership) or self._is_leaving or membership.phase is Phase.ENDED:
            return 0
        is_here = self.attendance.me.id in membership.machines
        can_stay = is_here and self.folder.will_stay(self.round, self.local_world_size)
        return 0 if can_stay and self._meet_in_place() else 1

    def shutdown(self) -> bool:
        """Leave by word. The others go on if this machine has failed."""
        self._end()
        return True

    def _meet_in_place(self) -> bool:
        """Meet for the next round while the processes wait for it; return False if they must be restarted for another one."""
        following = self.round + 1
        self._meet(stays=True)
        sizes = self.sizes({"local_world_size": self.local_world_size})
        if self.round != following or sizes is None:
            return False
        rank, (address, port) = self.machine_rank, self._address
        first = sum(sizes[:rank])
        self.folder.begin(rounds.Members(self.round, first, sum(sizes), len(sizes), rank, address, port))
        return True

    def sizes(self, own: dict[str, Any] | None = None) -> list[int] | None:
        """Exchange the machines' numbers of processes, by machine rank; None if the round is over before all have told.

        Args:
            own: to be told, in the words of torchrun's agent; None if it has told already.
        """
        store = self.store
        if own is not None:
            store.set(f"{ROLE}{self.machine_rank}", json.dumps(own))
        keys = [f"{ROLE}{rank}" for rank in range(len(self._members))]
        with suppress(DistError):
            while not store.check(keys):
                membership = self.attendance.membership
                if membership is None or not self._goes_on(membership) or self.attendance.unanswered_s > PLACE_S:
                    return None
                self.attendance.wait(BEAT_S / 10)
            return [json.loads(value)["local_world_size"] for value in store.multi_get(keys)]
        return None

    @property
    def machine_rank(self) -> int:
        """Of this machine in the round."""
        return [one.id for one in self._members].index(self.attendance.me.id)

    # Meeting

    def _meet(self, stays: bool) -> None:
        """Take part until a round has begun with this machine."""
        attendance, began, reminder_s, tried = self.attendance, time.monotonic(), REMINDER_S / 3, 0
        attendance.say(ready_after=self.round, stays=stays)
        while True:
            attendance.wait(BEAT_S / 10)
            self._check_place()
            if attendance.refusal is not None:
                refuse(f"{self.where}: {attendance.refusal}")
            membership, waited_s = attendance.membership, time.monotonic() - began
            if membership is None:
                if attendance.earlier is not None and waited_s > reminder_s:
                    names = ", ".join(map(str, attendance.earlier.machines.values()))
                    say(f"An earlier launch has left {names} here. Waiting for up to {PLACE_S:.0f} s to see who is alive.")
                    reminder_s += REMINDER_S
                continue
            self._check_job(membership)
            if self._is_in_new_round(membership):
                break
            is_chosen = membership.phase is Phase.MEETING and attendance.me.id in membership.chosen
            if is_chosen and membership.attempt > tried and self._connect(membership):
                tried = membership.attempt
            if membership.phase is Phase.GATHERING and waited_s > attendance.times.join and not membership.awaited:
                self._give_up(membership, waited_s)
            if waited_s > reminder_s:
                say(f"{self._situation(membership)}")
                reminder_s += REMINDER_S
        self._begin(membership)

    def _is_in_new_round(self, membership: Membership) -> bool:
        is_member = membership.phase is Phase.RUNNING and self.attendance.me.id in membership.members
        return is_member and membership.round > self.round

    def _connect(self, membership: Membership) -> bool:
        """Open this round's store, or connect to it; return False while nobody has opened it."""
        attendance = self.attendance
        if membership.chosen[0] == attendance.me.id:
            self._earlier_server = self._server
            self._server = self.store = TCPStore(attendance.me.address, 0, is_master=True, wait_for_workers=False)
            opened = (membership.attempt, attendance.me.address, self._server.port)
            attendance.say(opened=opened, connected=membership.attempt)
            return True
        if membership.store is None:
            return False
        with suppress(DistError, OSError):  # the others notice, and leave this machine or the first one out
            self.store = connect(*membership.store, CONNECT_S - 2)
            attendance.say(connected=membership.attempt)
        return True

    def _begin(self, membership: Membership) -> None:
        """Write down the round that has begun."""
        before, self._members = self._members, membership.here(membership.members)
        self.round, self._told = membership.round, None
        assert membership.store is not None
        self._address = membership.store
        self.attendance.say(ready_after=None, stays=False)
        os.environ[rounds.ROUND], os.environ[rounds.JOB] = str(self.round), membership.job  # the processes inherit them
        count = len(self._members)
        why = f" {membership.over.reason}." if membership.over is not None and before else ""
        say(f"Round {self.round}: {count} machine{'s' if count > 1 else ''}, {', '.join(map(str, self._members))}.{why}")

    def _goes_on(self, membership: Membership) -> bool:
        """Whether this agent's round runs, and it is in it."""
        is_here = self.attendance.me.id in membership.machines and membership.job == self.attendance.job
        return is_here and membership.phase is Phase.RUNNING and membership.round == self.round

    def _tell_processes(self, membership: Membership) -> None:
        """Tell the processes of this machine that their round is over. By the attending thread, as they wait for it."""
        if self.round < 0 or self._goes_on(membership) or membership.phase is Phase.ENDED or membership.round > self.round:
            return
        over = membership.over
        if over is None or self.attendance.me.id not in membership.machines:
            over = rounds.Over("The other machines go on without this one, which they did not reach for a while", False)
        if over != self._told:
            self.folder.end(self.round, over)
            self._told = over

    # Words, and ends

    def _situation(self, membership: Membership) -> str:
        """Say what this machine waits for."""
        me, here = self.attendance.me, membership.machines.values()
        if membership.phase is Phase.RUNNING:
            number = len(membership.members)
            why = (
                f"there are {number} already, as many as may train together: it steps in if one is lost"
                if number >= membership.most
                else "it is let in at the next checkpoint"
            )
            return f"{me} waits, as round {membership.round} runs: {why}."
        if membership.phase is Phase.MEETING:
            return f"{me} waits until {', '.join(map(str, membership.here(membership.chosen)))} have reached each other."
        if membership.awaited:
            return f"{me} waits for {', '.join(map(str, membership.awaited))} to end the last round."
        names, least = ", ".join(map(str, here)), membership.least
        count = f"{len(here)} machine{'s are' if len(here) != 1 else ' is'} here ({names})"
        if len(here) >= least and membership.round < 0:
            return f"{count}; waiting up to {self.attendance.times.last_call:.0f} s for more, {membership.most} at most."
        return f"{count}, and at least {least} are needed. Start the same command on more machines; they meet at {self.where}."

    def _give_up(self, membership: Membership, waited_s: float) -> None:
        leave(f"{self._situation(membership)} Waited {waited_s:.0f} s; {JOIN_TIMEOUT}={2 * waited_s:.0f} waits longer.")

    def _has_place(self) -> bool:
        """Whether the meeting place answers. If nothing serves it any more, the round goes on for as long as it lasts.

        But if this machine is cut off, others may begin a round without it.
        """
        if self.attendance.unanswered_s < PLACE_S:
            self._misses_place = False
            return True
        if not isinstance(self.attendance.error, ConnectionRefusedError):
            self._check_place()
        if not self._misses_place:
            say(f"{self._unanswered()} Training goes on, but no machine can be replaced.")
            self._misses_place = True
        return False

    def _check_place(self) -> None:
        """End the launcher if the meeting place, which it needs now, does not answer."""
        if self.attendance.unanswered_s > PLACE_S:
            say(f"{self._unanswered()} The same command goes on from the newest checkpoint.")
            sys.exit(STOPPED)

    def _unanswered(self) -> str:
        why = f" ({self.attendance.error})" if self.attendance.error is not None else ""
        return (
            f"The place where the machines meet, {self.where}, has not answered for {self.attendance.unanswered_s:.0f} s{why}: "
            "what serves it has ended, or this machine is cut off."
        )

    def _check_job(self, membership: Membership) -> None:
        """End the launcher if there is nothing left to do."""
        if membership.phase is Phase.ENDED or self.attendance.job not in (None, membership.job):
            say(f"The job at {self.where} has ended without this machine.")
            sys.exit(0)

    def finish(self) -> None:
        """Wait for the other machines to finish: this one may serve their store."""
        self.attendance.say(is_done=True)
        until = time.monotonic() + FINISH_S
        while time.monotonic() < until and self.attendance.unanswered_s < PLACE_S:
            membership = self.attendance.membership
            if membership is None or not self._goes_on(membership):
                return
            self.attendance.wait(BEAT_S)

    def _end(self) -> None:
        if self._has_left:
            return
        self._has_left = True
        membership = self.attendance.membership
        if membership is not None and self.attendance.unanswered_s < PLACE_S:
            is_done = membership.phase is Phase.ENDED
            self.attendance.leave("" if is_done else f"{self.attendance.me} has left")
            if self.is_host:
                self._outlast(membership)
        shutil.rmtree(self.folder.path, ignore_errors=True)

    def _outlast(self, membership: Membership) -> None:
        """Serve the meeting place until the others have read how the job ended."""
        until = time.monotonic() + LEAVE_S
        with suppress(OSError, RuntimeError, ValueError):
            while membership.machines and time.monotonic() < until:
                time.sleep(BEAT_S / 5)
                membership = Membership.parse(self.attendance.place.read())

    def _hear_signals(self) -> None:
        """Let the others know at once of a signal that ends this agent; torch's agent sets its handlers in each round."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGTERM, signal.SIGINT):
            handler = signal.getsignal(number)
            if handler != self._hear:
                self._inner_handlers[number] = handler
                signal.signal(number, self._hear)

    def _hear(self, number: int, frame: Any) -> None:
        self._is_leaving = True
        self.attendance.say(is_leaving=True)
        inner = self._inner_handlers[number]
        if not callable(inner):
            sys.exit(128 + number)
        inner(number, frame)


class RoundStore:
    """What torchrun's agent takes for its store: agents tell each other their numbers of processes there, and that they finish.

    An agent asks only in rounds for which it starts processes. Here, those whose processes stay take part as well.
    """

    def __init__(self, meeting: ElasticRendezvous):
        self._meeting = meeting
        self.timeout = timedelta(seconds=60)

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout

    def set(self, key: str, value: Any) -> None:
        if key.startswith(ROLE):
            self._meeting.local_world_size = json.loads(value)["local_world_size"]
        self._meeting.store.set(key, value)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return all machines' numbers of processes; of none if the round is over already."""
        sizes = self._meeting.sizes()
        role = {"role": "default", "rank": 0}
        return [json.dumps({**role, "local_world_size": size}).encode() for size in sizes or [0] * len(keys)]

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        """Ignore the ranks that the first machine's agent gives: each machine counts for itself."""

    def get(self, key: str) -> bytes:
        """Return the first rank of this machine's processes and the number of all processes, twice: there is one role."""
        rank, own = self._meeting.machine_rank, self._meeting.local_world_size
        sizes = self._meeting.sizes() or [own] * (rank + 1)  # if the round is over, so are these processes, at once
        first, total = sum(sizes[:rank]), sum(sizes)
        return json.dumps([first, total, first, total]).encode()

    def add(self, key: str, amount: int) -> int:
        """Ignore the count of machines that have finished; ``wait`` asks the document."""
        return 0

    def wait(self, keys: list[str]) -> None:
        """Wait for the other machines to finish, as nothing else is waited for."""
        self._meeting.finish()


def _say_without_traceback(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
    """Describe the end of an agent after a signal, which is nobody's mistake."""
    if kind is SignalException:
        say(f"This machine has left the job after {signal.Signals(error.sigval).name}.")  # type: ignore[attr-defined]
    else:
        sys.__excepthook__(kind, error, traceback)


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET

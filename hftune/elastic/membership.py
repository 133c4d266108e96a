"""Who is in an elastic job: its machines, and the rounds in which they train. Independent of torch, clocks, files, networks.

All agents of a job share one document, a ``Membership``. Each agent reads it twice a second, and calls ``advance`` with what it
wants and what it has noticed (a ``View``); if the result differs, the agent puts it in the document's place, provided that
nobody else has changed it meanwhile. So there is no leader whose loss would end the job, and no two agents can decide
differently.

    GATHERING   the machines of the last round return, newcomers come
    MEETING     the next round's machines are chosen; they connect to the store of the first of them
    RUNNING     they train, until one is lost, leaves or fails, or a newcomer is let in: GATHERING again
    ENDED       the first of them has trained to the end
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

from hftune.distributed.rounds import Over


class Phase(StrEnum):
    """What the machines of a job do."""

    GATHERING = "gathering"
    MEETING = "meeting"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(frozen=True)
class State:
    """What is in the output folder of a machine."""

    run: str = ""
    """Random word of the run; empty if there is no copy of it anywhere."""
    starts: int = 0
    """How often training has started or resumed. Of two folders, the run has gone on from the one with more."""
    step: int = 0
    """Of the newest checkpoint; 0 if there is none."""


@dataclass
class Machine:
    """One agent, as the others know it."""

    id: str
    """Random: an agent that is started again is another machine."""
    host: str
    address: str
    port: int = 0
    """Where its agent accepts connections, for others to see whether they reach it."""
    token: str = ""
    """What the agents of this job say to get a copy of its output folder."""
    arrival: int = 0
    """Counts the machines that have come to this job."""
    is_ready: bool = False
    """It can begin the next round at once."""
    is_leaving: bool = False
    """It got SIGTERM: it finishes the step, and is not in the next round."""
    is_done: bool = False
    """Its processes have trained to the end."""
    connected: int = 0
    """The newest attempt whose store it has reached."""
    state: State = State()
    looked: int = -1
    """When it looked into its folder for that, in departures; see Membership."""

    def __str__(self) -> str:
        return f"{self.host} ({self.address})"


@dataclass
class Membership:
    """The document that all agents of a job share."""

    job: str
    """Random: a job that is started again at the same place is another."""
    least: int
    most: int
    """How many machines may train together."""
    phase: Phase = Phase.GATHERING
    round: int = -1
    """The newest round that has begun; -1 before the first."""
    members: list[str] = field(default_factory=list)
    """Ids of the machines that began it and are still here, by machine rank."""
    machines: dict[str, Machine] = field(default_factory=dict)
    """Everybody who is here: members, newcomers, and those in reserve."""
    over: Over | None = None
    """Why the last round is over: this one, or, while it runs, the one before."""
    attempt: int = 0
    """Counts the attempts to begin a round."""
    chosen: list[str] = field(default_factory=list)
    """Ids of the machines of the next round, by machine rank, while they meet."""
    store: tuple[str, int] | None = None
    """Address and port of the store of the round that meets or runs."""
    num_arrivals: int = 0
    departures: int = 0
    """Counts the machines that have left, which may have written to a common disk or sent a copy before, and the rounds that
    have begun: what a machine has said of its folder holds until the next."""
    run: str = ""
    """The run that is trained, see State; empty before there is a copy of it."""
    starts_over: bool = False
    """What is in the output folders when the job begins does not count: resume=never, or a checkpoint by name."""
    conflict: str = ""
    """A sentence that says why no round can begin."""

    @classmethod
    def parse(cls, text: str) -> Membership:
        """Read the document."""
        values = json.loads(text)
        machines = {
            name: Machine(**{**value, "state": State(**value["state"])}) for name, value in values.pop("machines").items()
        }
        over = None if (told := values.pop("over")) is None else Over(**told)
        store = None if (place := values.pop("store")) is None else (place[0], place[1])
        return cls(**{**values, "phase": Phase(values["phase"])}, machines=machines, over=over, store=store)

    def to_text(self) -> str:
        """Write the document; equal for equal contents."""
        return json.dumps(asdict(self), sort_keys=True)

    def here(self, ids: list[str]) -> list[Machine]:
        """Return those of the machines that are still here."""
        return [self.machines[name] for name in ids if name in self.machines]

    @property
    def awaited(self) -> list[Machine]:
        """The members of the last round whose processes have not ended yet; one of them may write the checkpoint."""
        return [one for one in self.here(self.members) if one.is_leaving or not (one.is_ready or one.is_done)]

    @property
    def candidates(self) -> list[Machine]:
        """The machines that can begin the next round, by seniority; before them, the one with the newest state of the run."""
        rank = {name: index for index, name in enumerate(self.members)}
        ready = [one for one in self.machines.values() if one.is_ready and not one.is_leaving]
        ready.sort(key=lambda one: (rank.get(one.id, len(rank)), one.arrival))
        holders = [one for one in ready if one.state.step and (self.run or not self.starts_over)]
        run = self.run or next((one.state.run for one in holders), "")
        found = [one for one in holders if one.state.run == run]
        newest = max(found, key=lambda one: (one.state.starts, one.state.step), default=None)
        return sorted(ready, key=lambda one: one is not newest)

    @property
    def first(self) -> Machine | None:
        """The machine that all others must reach, as it serves the store of the round, or will."""
        chosen = {Phase.RUNNING: self.members, Phase.MEETING: self.chosen}.get(self.phase)
        return next(iter(self.candidates if chosen is None else self.here(chosen)), None)

    @property
    def newcomers(self) -> list[Machine]:
        """The machines that wait while a round runs."""
        return [one for one in self.machines.values() if one.id not in self.members and one.is_ready]


@dataclass(frozen=True)
class View:
    """What one agent wants, and what it has noticed."""

    me: Machine
    ready_after: int | None = None
    """The last round that it was in (-1: none), if it is ready for another; None while its processes train."""
    is_leaving: bool = False
    """It got a signal."""
    has_left: str | None = None
    """It ends now; a sentence that says why, empty after a signal."""
    is_done: bool = False
    silent: dict[str, float] = field(default_factory=dict)
    """Ids of machines that have given no sign of life for too long, with the seconds."""
    cut: frozenset[str] = frozenset()
    """Ids of machines that say that they do not reach the first machine of the round, or, for that one, any."""
    lets_in: bool = False
    """It is time to let newcomers in."""
    state: State = State()
    """What its output folder holds."""
    looked: int = -1
    """The departures of which it knew before it looked."""
    run: str = ""
    """Of the first machine of a round: the run that it trains, once there are copies of it."""
    last_call_is_over: bool = False
    """The first round need not wait for more machines."""
    opened: tuple[int, str, int] | None = None
    """Attempt, address and port of the store that it has opened."""
    connected: int = 0
    late: int = 0
    """The newest attempt that has taken too long."""


def advance(membership: Membership, view: View) -> Membership:
    """Return the document as this agent would have it; equal to ``membership`` if nothing is to be changed."""
    now = Membership.parse(membership.to_text())
    if now.phase is Phase.ENDED and view.has_left is None:
        if (me := now.machines.get(view.me.id)) is not None:
            me.is_done = view.is_done
        return now
    for name, seconds in view.silent.items():
        if name in now.machines and name != view.me.id:
            _remove(now, name, f"Lost {now.machines[name]}: no sign of life for {seconds:.0f} s")
    _place(now, view)
    _leave_out_the_cut(now, view)
    if now.members and now.machines[now.members[0]].is_done:
        # One of its processes writes the results. Nobody will train with a newcomer that has been let in meanwhile.
        now.phase, now.chosen = Phase.ENDED, []
    if now.phase is Phase.RUNNING and view.lets_in:
        room = max(now.most - len(now.members), 0)
        if come := [str(one) for one in now.newcomers if one.id not in view.cut][:room]:
            _over(now, f"{', '.join(come)} {'has' if len(come) == 1 else 'have'} come", is_planned=True)
    if now.phase is Phase.MEETING:
        _meet(now, view)
    if now.phase is Phase.GATHERING:
        _choose(now, view)
    return now


def _place(now: Membership, view: View) -> None:
    """Write down what this agent wants."""
    me = now.machines.get(view.me.id)
    if view.run and now.members[:1] == [view.me.id]:
        now.run = view.run
    if view.has_left is not None:
        if me is not None:
            _remove(now, me.id, view.has_left or f"{me} has left")
        return
    if me is None:
        if view.ready_after is None or view.is_leaving:
            return  # it was left out, and will come as a newcomer
        me = now.machines[view.me.id] = replace(view.me, arrival=now.num_arrivals)
        now.num_arrivals += 1
    is_member = me.id in now.members
    me.is_done, me.connected = view.is_done, max(me.connected, view.connected)
    if view.is_leaving and not me.is_leaving:
        me.is_leaving = True
        if is_member:
            _over(now, f"{me} leaves after a signal", is_planned=True)
        if me.id in now.chosen:
            _try_again(now)
    if view.ready_after is not None:
        if now.phase is Phase.RUNNING and is_member and view.ready_after >= now.round:
            _over(now, f"A process of {me} failed", is_planned=False)
        if now.phase is not Phase.RUNNING or not is_member:
            me.is_ready = True
        if view.looked == now.departures:
            me.state, me.looked = view.state, view.looked


def _remove(now: Membership, name: str, reason: str) -> None:
    """Take a machine out of the job."""
    gone = now.machines.pop(name)
    now.departures += 1
    if name in now.members:
        if not gone.is_done and not gone.is_leaving:  # else it is over already
            _over(now, reason, is_planned=False)
        now.members.remove(name)  # if it comes back, it is a newcomer
    if name in now.chosen:
        _try_again(now)


def _over(now: Membership, reason: str, *, is_planned: bool) -> None:
    """End the round that runs; or, if it is over already, add another reason."""
    if now.phase is Phase.RUNNING:
        now.phase, now.store, now.over = Phase.GATHERING, None, Over(reason, is_planned)
    elif now.over is not None:
        is_new = reason not in now.over.reason
        reasons = f"{now.over.reason}. {reason}" if is_new else now.over.reason
        now.over = Over(reasons, now.over.is_planned and is_planned)


def _leave_out_the_cut(now: Membership, view: View) -> None:
    """Leave out who is alive and cannot reach the others: the first machine if it says so or most do not reach it."""
    if now.phase is not Phase.RUNNING or len(now.members) < 2:
        return
    first, *others = (one for one in now.here(now.members) if not one.is_done or one.id == now.members[0])
    cut = [one for one in others if one.id in view.cut]
    if first.id in view.cut or (len(others) > 1 and 2 * len(cut) > len(others)):
        _remove(now, first.id, f"Lost {first}: the others do not reach it over the network")
        return
    for one in cut:
        _remove(now, one.id, f"Lost {one}: it does not reach {first} over the network")


def _choose(now: Membership, view: View) -> None:
    """Choose the machines of the next round, once all who are awaited are here and they are enough."""
    is_alone = len(now.machines) == 1  # then it does not matter whether it reaches others
    candidates = [one for one in now.candidates if is_alone or one.id not in view.cut]
    is_finishing = any(one.is_done for one in now.here(now.members))
    enough = len(candidates) >= (1 if is_finishing else now.least)
    if now.awaited or not candidates or not enough or any(one.looked != now.departures for one in candidates):
        return
    now.conflict = _conflict(now, candidates)
    if now.conflict:
        return
    if now.round >= 0 or len(candidates) >= now.most or view.last_call_is_over:
        now.phase, now.attempt, now.store = Phase.MEETING, now.attempt + 1, None
        now.chosen = [one.id for one in candidates[: now.most]]


def _conflict(now: Membership, candidates: list[Machine]) -> str:
    """Say why training cannot go on from the output folders of these machines; empty if it can."""
    first, holders = candidates[0], [one for one in candidates if one.state.step]
    if now.starts_over:
        return ""
    if now.run and first.state.step and first.state.run != now.run:
        return (
            f"output_dir on {first.host}, which is now the main machine, holds the checkpoints of another run. Remove that "
            "folder there, or take the machine out of the job."
        )
    if now.run or len({one.state.run for one in holders}) < 2 or min(candidates, key=lambda one: one.arrival).state.step:
        return ""
    listed = ", ".join(f"{one.host} (step {one.state.step})" for one in holders)
    return (
        f"The machines hold checkpoints of different runs in output_dir: {listed}. Remove those that are not to be resumed, "
        "set output_dir=... to a new folder, or start over with resume=never."
    )


def _meet(now: Membership, view: View) -> None:
    """Open the store, and begin the round once all of its machines have reached it. Who does not in time is left out."""
    if view.opened is not None and view.opened[0] == now.attempt and now.chosen[0] == view.me.id:
        now.store = (view.opened[1], view.opened[2])
    missing = [one for one in now.here(now.chosen) if one.connected != now.attempt]
    if now.store is not None and not missing:
        now.phase, now.round, now.members, now.chosen = Phase.RUNNING, now.round + 1, now.chosen, []
        now.departures += 1
        for one in now.here(now.members):
            one.is_ready = False
    elif view.late >= now.attempt:
        first = now.machines[now.chosen[0]]
        others = len(now.chosen) - 1
        is_first = now.store is None or (others > 1 and 2 * len(missing) > others)
        for one in [first] if is_first else missing:
            text = "the others do not reach it" if is_first else f"it does not reach {first}"
            _remove(now, one.id, f"Lost {one}: {text} over the network")
        _try_again(now)


def _try_again(now: Membership) -> None:
    """Give up the attempt to begin a round."""
    if now.phase is Phase.MEETING:
        now.phase, now.chosen, now.store = Phase.GATHERING, [], None


class Silence:
    """How long each machine has given no sign of life, by this agent's own clock: clocks of machines may differ."""

    def __init__(self, most_s: float):
        self.most_s = most_s
        """Of the time between two looks; more passed only if this agent itself was stopped meanwhile."""
        self._seen: dict[str, tuple[Any, float]] = {}
        self.changed: set[str] = set()
        """The machines that have given a sign of life since this agent first looked."""

    def look(self, signs: dict[str, Any], passed_s: float) -> dict[str, float]:
        """Return the seconds since each machine's sign last changed.

        Args:
            signs: the newest sign of each machine, None for one that has given none yet.
            passed_s: since the last look.
        """
        seen = {}
        for name, sign in signs.items():
            before, seconds = self._seen.get(name, (sign, 0.0))
            seen[name] = (sign, seconds + min(passed_s, self.most_s) if sign == before else 0.0)
            if sign != before:
                self.changed.add(name)
        self._seen = seen
        return {name: seconds for name, (_, seconds) in seen.items()}

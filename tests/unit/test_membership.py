"""The shared document of an elastic job, under random schedules: who comes, is lost, leaves, is cut off, in any order."""

from __future__ import annotations

import os
import random
import re
from dataclasses import replace

import pytest

from hftune.elastic.membership import Machine, Membership, Phase, Silence, State, View, advance

KEEP_ALIVE_S = 3.0


class World:
    """Agents without threads, files or networks, and the document they share."""

    def __init__(self, seed: int, least: int, most: int):
        self.random = random.Random(seed)
        self.text = Membership("job", least, most).to_text()
        self.now, self.signs, self.agents = 0.0, {}, {}
        self.rounds = {}

    @property
    def membership(self) -> Membership:
        return Membership.parse(self.text)

    def start(self, name: str) -> Agent:
        agent = self.agents[name] = Agent(self, name)
        return agent

    def pass_time(self, seconds: float) -> None:
        """Let all agents look twice a second, in random order, some of them with the reading of a moment ago."""
        until = self.now + seconds
        while self.now < until:
            self.now += 0.5
            agents = [agent for agent in self.agents.values() if agent.is_running]
            self.random.shuffle(agents)
            texts = [agent.read() for agent in agents] if self.random.random() < 0.3 else [None] * len(agents)
            for agent, text in zip(agents, texts, strict=True):
                agent.look(text)
            self.check()

    def check(self) -> None:
        """Who is in one round agrees on who is in it."""
        membership = self.membership
        if membership.phase is Phase.RUNNING:
            known = self.rounds.setdefault(membership.round, membership.members)
            assert (
                membership.members == [name for name in known if name in membership.machines] and len(known) <= membership.most
            )
            assert [*self.rounds] == sorted(self.rounds)


class Agent:
    """What ElasticRendezvous and Attendance do, in a few lines."""

    def __init__(self, world: World, name: str):
        self.world, self.is_running, self.is_cut = world, True, False
        self.view = View(Machine(name, name, f"10.0.0.{name}"), ready_after=-1)
        self.round, self.count, self.since = -1, 0, {}
        self.offset = world.random.uniform(-1e6, 1e6)  # of its clock
        self.silence, self.looked_at = Silence(1.0), self.clock

    @property
    def clock(self) -> float:
        return self.world.now + self.offset

    def read(self) -> str:
        return self.world.text

    def look(self, text: str | None = None) -> None:
        seen = self.world.text if text is None else text
        name, membership = self.view.me.id, Membership.parse(seen)
        self.count += 1
        self.world.signs[name] = self.count
        passed, self.looked_at = self.clock - self.looked_at, self.clock
        silence = self.silence.look({other: self.world.signs[other] for other in membership.machines}, passed)
        self.want(membership)
        self.view = replace(self.view, looked=membership.departures)
        agents = self.world.agents
        first = membership.members[0] if membership.members else None
        view = replace(
            self.view,
            silent={other: seconds for other, seconds in silence.items() if seconds > KEEP_ALIVE_S},
            cut=frozenset(other for other in membership.machines if agents[other].is_cut or (first and agents[first].is_cut)),
            lets_in=self.lasts("newcomers", bool(membership.newcomers)) > 2,
            last_call_is_over=self.lasts("call", len(membership.candidates) >= membership.least) > 5,
            late=membership.attempt if self.lasts(membership.attempt, membership.phase is Phase.MEETING) > 5 else 0,
        )
        following = advance(membership, view).to_text()
        if self.world.text == seen:
            self.world.text = following

    def want(self, membership: Membership) -> None:
        name = self.view.me.id
        is_member = name in membership.members and name in membership.machines
        if membership.phase is Phase.RUNNING and is_member and membership.round > self.round:
            self.round, self.view = membership.round, replace(self.view, ready_after=None)
        elif self.view.ready_after is None and not (membership.phase is Phase.RUNNING and is_member):
            self.view = replace(self.view, ready_after=self.round)
        if membership.phase is Phase.MEETING and name in membership.chosen and not self.is_cut:
            first = membership.chosen[0]
            if first == name:
                self.view = replace(self.view, opened=(membership.attempt, name, 1), connected=membership.attempt)
            elif membership.store is not None and not self.world.agents[first].is_cut:
                self.view = replace(self.view, connected=membership.attempt)

    def lasts(self, what: object, is_so: bool) -> float:
        if not is_so:
            self.since.pop(what, None)
            return 0.0
        return self.clock - self.since.setdefault(what, self.clock)


def started(count: int, seed: int = 0, least: int = 1, most: int = 4) -> World:
    world = World(seed, least, most)
    for index in range(count):
        world.start(str(index))
    world.pass_time(12)
    assert world.membership.phase is Phase.RUNNING and len(world.membership.members) == min(count, most)
    return world


@pytest.mark.parametrize("seed", range(int(os.environ.get("SEEDS", 6))))
def test_whatever_comes_and_goes_those_who_are_there_train_in_the_end(seed):
    world = started(3, seed)
    draw, number = world.random, 3
    for _ in range(30):
        living = [agent for agent in world.agents.values() if agent.is_running]
        event = draw.choice(("kill", "leave", "come", "come", "cut", "freeze", "thaw", "mend", "fail"))
        one = draw.choice(living) if living else None
        if event == "come":
            world.start(str(number))
            number += 1
        elif event == "thaw":
            for agent in world.agents.values():
                agent.is_running = agent.is_running or agent.view.has_left is None
        elif event == "mend":
            for agent in world.agents.values():
                agent.is_cut = False
        elif one is not None and event == "kill":
            one.is_running, one.view = False, replace(one.view, has_left="killed")  # not thawed any more
        elif one is not None and event == "leave":
            one.view = replace(one.view, is_leaving=True)
            world.pass_time(draw.choice((0.5, 1.0, 3.0)))
            one.view = replace(one.view, has_left="")
            one.look()
            one.is_running = False
        elif one is not None and event == "fail":
            one.view = replace(one.view, ready_after=one.round)
        elif one is not None:
            one.is_running, one.is_cut = event != "freeze", event == "cut" or one.is_cut
        world.pass_time(draw.choice((0.0, 0.5, 1.0, 5.0, 10.0)))
    for agent in world.agents.values():
        agent.is_cut = False
    world.start("last")
    world.pass_time(40)
    membership, living = world.membership, [name for name, agent in world.agents.items() if agent.is_running]
    assert membership.phase is Phase.RUNNING
    assert set(membership.members) <= set(living) and len(membership.members) == min(len(living), membership.most)
    assert set(membership.machines) == set(living)


def lose(world: World, name: str) -> Membership:
    world.agents[name].is_running = False
    world.pass_time(8)
    return world.membership


def test_ranks_go_by_seniority():
    world = started(3)
    first, second, third = world.membership.members
    membership = lose(world, first)
    assert membership.members == [second, third] and membership.round == 1
    assert (
        membership.over.reason == f"Lost {first} (10.0.0.{first}): no sign of life for 4 s" and not membership.over.is_planned
    )
    world.start("new")
    world.pass_time(8)
    assert world.membership.members == [second, third, "new"] and world.membership.over.is_planned


def test_too_few_machines_wait_and_too_many_are_kept_in_reserve():
    world = World(0, 2, 3)
    world.start("a")
    world.pass_time(60)
    assert world.membership.phase is Phase.GATHERING and world.membership.round == -1
    for name in "bcd":
        world.start(name)
    world.pass_time(12)
    assert len(world.membership.members) == 3 and len(world.membership.newcomers) == 1
    (spare,) = world.membership.newcomers
    world.pass_time(60)
    assert world.membership.round == 0
    assert spare.id in lose(world, world.membership.members[1]).members
    lose(world, world.membership.members[0])
    assert len(lose(world, world.membership.members[0]).members) < 2 or world.membership.phase is Phase.GATHERING


@pytest.mark.parametrize("cut", [0, 1])
def test_a_machine_that_is_alive_but_cut_off_is_left_out_and_comes_back(cut):
    world = started(3)
    name = world.membership.members[cut]
    world.agents[name].is_cut = True
    world.pass_time(8)
    assert name not in world.membership.members and len(world.membership.members) == 2
    assert "over the network" in world.membership.over.reason
    world.agents[name].is_cut = False
    world.pass_time(12)
    assert world.membership.members[-1] == name and len(world.membership.members) == 3


def test_the_round_waits_for_a_machine_that_leaves_after_a_signal():
    world = started(2)
    leaver = world.agents[world.membership.members[0]]
    leaver.view = replace(leaver.view, is_leaving=True)
    world.pass_time(20)
    membership = world.membership
    assert (
        membership.phase is Phase.GATHERING and membership.over.is_planned and "leaves after a signal" in membership.over.reason
    )
    leaver.view = replace(leaver.view, has_left="")
    leaver.look()
    leaver.is_running = False
    world.pass_time(2)
    assert world.membership.phase is Phase.RUNNING and leaver.view.me.id not in world.membership.machines


def test_a_loss_while_the_others_finish_their_step_makes_a_planned_end_unplanned():
    world = started(3)
    membership = world.membership
    over = advance(membership, replace(world.agents[membership.members[1]].view, is_leaving=True))
    assert over.over.is_planned
    lost = membership.members[2]
    over = advance(over, View(membership.machines[membership.members[0]], silent={lost: 4.0}))
    assert not over.over.is_planned and over.over.reason.endswith(f"Lost {lost} (10.0.0.{lost}): no sign of life for 4 s")


def test_the_job_ends_when_the_first_machine_is_done_whoever_has_come_meanwhile():
    world = started(2)
    first, second = (world.agents[name] for name in world.membership.members)
    second.view = replace(second.view, is_done=True)
    world.pass_time(10)
    assert world.membership.phase is Phase.RUNNING
    world.start("late")
    world.pass_time(1)
    first.view = replace(first.view, is_done=True)
    world.pass_time(10)
    assert world.membership.phase is Phase.ENDED and "late" not in world.membership.members
    first.view = replace(first.view, has_left="")
    first.look()
    assert set(world.membership.machines) == {second.view.me.id, "late"} and world.membership.over is None


def test_silence_is_counted_by_the_own_clock_and_not_while_this_machine_itself_stood_still():
    silence = Silence(most_s=1.0)
    assert silence.look({"a": 7, "b": None}, 0.5) == {"a": 0.5, "b": 0.5}
    assert silence.look({"a": 8, "b": None}, 0.5) == {"a": 0.0, "b": 1.0}
    assert silence.changed == {"a"}
    assert silence.look({"a": 8, "b": None}, 3600.0) == {"a": 1.0, "b": 2.0}


def ready(run: str = "", starts_over: bool = False, **states: State) -> Membership:
    """Machines that are ready for a round, by seniority, and what their folders hold."""
    machines = {
        name: Machine(name, name, "10.0.0.1", arrival=number, is_ready=True, state=state, looked=0)
        for number, (name, state) in enumerate(states.items())
    }
    return Membership("job", 1, 3, machines=machines, run=run, starts_over=starts_over)


A, OTHER = State("run", starts=1, step=10), State("other", starts=9, step=90)


@pytest.mark.parametrize(
    ("run", "states", "first"),
    [
        ("run", {"a": A, "b": A}, "a"),
        ("run", {"a": A, "b": replace(A, step=20)}, "b"),
        ("run", {"a": replace(A, step=70), "b": replace(A, starts=2, step=60)}, "b"),  # a was cut off, and b went on
        ("run", {"a": State(), "b": A, "c": A}, "b"),
        ("run", {"a": A, "b": OTHER}, "a"),
        ("run", {"a": State(), "b": State()}, "a"),
        ("", {"a": A, "b": replace(A, step=20), "c": OTHER}, "b"),  # a new job goes on with the run of the first that came
        ("", {"a": State("", 1, 10), "b": State()}, "a"),
        ("", {"a": State(), "b": A}, "b"),
    ],
)
def test_the_machine_with_the_newest_state_of_the_run_becomes_the_first(run, states, first):
    membership = ready(run, **states)
    following = advance(membership, View(membership.machines["a"], ready_after=-1, last_call_is_over=True))
    assert following.phase is Phase.MEETING and following.chosen[0] == first


def of_three(run: str = "", starts_over: bool = False) -> Membership:
    """A job whose first machine, a, leaves after a signal, while b and c are ready and had nothing when they said so."""
    membership = ready(run, starts_over, a=A, b=State(), c=State())
    membership.round, membership.members = 0, [*"abc"]
    membership.machines["a"].is_ready, membership.machines["a"].is_leaving = False, True
    return membership


@pytest.mark.parametrize("starts_over", [False, True])
def test_who_got_the_last_copy_of_a_machine_that_leaves_becomes_the_first(starts_over):
    """It came after both had said that they are ready. With resume=never, that run is the job's own."""
    membership = of_three(starts_over=starts_over)
    b, c = (View(membership.machines[name], ready_after=0) for name in "bc")
    assert advance(membership, replace(b, looked=0)).phase is Phase.GATHERING
    membership = advance(membership, View(membership.machines["a"], has_left="", run="run"))
    assert membership.run == "run"
    assert advance(membership, replace(b, looked=0)).phase is Phase.GATHERING
    membership = advance(membership, replace(b, looked=1))
    assert membership.phase is Phase.GATHERING
    membership = advance(membership, replace(c, state=A, looked=1))
    assert membership.phase is Phase.MEETING and membership.chosen == ["c", "b"] and not membership.conflict


def test_a_machine_in_reserve_goes_on_when_all_others_are_lost_at_once():
    """It saw a folder that all share before the run there had a name."""
    membership = of_three("run")
    membership.phase = Phase.RUNNING
    membership.machines["d"] = Machine("d", "d", "10.0.0.1", arrival=3, is_ready=True)
    view = View(membership.machines["d"], ready_after=-1, silent=dict.fromkeys("abc", 30.0), state=replace(A, run=""), looked=0)
    membership = advance(membership, view)
    assert membership.phase is Phase.GATHERING and [*membership.machines] == ["d"] and not membership.conflict
    membership = advance(membership, replace(view, state=A, looked=3))
    assert membership.phase is Phase.MEETING and membership.chosen == ["d"]


@pytest.mark.parametrize(("run", "first"), [("", "a"), ("run", "c")])
def test_a_job_that_starts_over_goes_on_with_nothing_but_its_own_run(run, first):
    membership = ready(run, starts_over=True, a=State(), b=OTHER, c=A)
    following = advance(membership, View(membership.machines["a"], ready_after=-1, last_call_is_over=True))
    assert following.phase is Phase.MEETING and following.chosen[0] == first


@pytest.mark.parametrize(
    ("run", "states", "says"),
    [
        ("run", {"a": OTHER}, "output_dir on a, which is now the main machine, holds the checkpoints of another run"),
        ("", {"a": State(), "b": A, "c": OTHER}, r"different runs in output_dir: b \(step 10\), c \(step 90\)"),
    ],
)
def test_machines_with_different_runs_begin_nothing(run, states, says):
    membership = ready(run, **states)
    view = View(membership.machines["a"], ready_after=-1, last_call_is_over=True)
    following = advance(membership, view)
    assert following.phase is Phase.GATHERING and re.search(says, following.conflict)

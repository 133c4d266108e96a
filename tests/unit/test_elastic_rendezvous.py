"""Agents of an elastic job in threads of this process: what torchrun's agent asks and is told. Machines: tests/multiprocess."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from unittest.mock import Mock

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousParameters

from hftune import cli
from hftune.distributed import rounds
from hftune.elastic import attendance, parameters, rendezvous
from hftune.elastic.attendance import Attendance, Times
from hftune.elastic.copies import Copies
from hftune.elastic.handler import get_handler, range_problem
from hftune.elastic.membership import Machine, Membership, Phase, State
from hftune.elastic.places import FolderPlace, StorePlace
from hftune.elastic.places import connect as connect_to
from hftune.elastic.rendezvous import ElasticRendezvous

TIMES = {"keep_alive": 0.6, "regroup_every": 0.1, "last_call": 0.1, "join_timeout": 20}


@pytest.fixture
def start(monkeypatch, tmp_path):
    """Make agents that meet in a folder; end them all after the test."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    for name in (rounds.FOLDER, rounds.ROUND, rounds.JOB):
        monkeypatch.setenv(name, "")
    for module in (attendance, parameters, rendezvous):
        monkeypatch.setattr(module, "BEAT_S", 0.1)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    begun: list[ElasticRendezvous] = []

    def make(least: int = 1, most: int = 2, **config: object) -> ElasticRendezvous:
        place = str(tmp_path / "place")
        params = RendezvousParameters("hftune", place, "job", least, most, "127.0.0.1", **{**TIMES, **config})
        begun.append(get_handler()(params))
        return begun[-1]

    yield make
    with ThreadPoolExecutor() as pool:
        list(pool.map(ElasticRendezvous.shutdown, begun))
    for number, handler in handlers.items():
        signal.signal(number, handler)


def meet(*agents: ElasticRendezvous) -> list[list[int]]:
    """Let agents meet as torchrun's do; return each one's first rank and the number of processes."""

    def one(agent: ElasticRendezvous) -> list[int]:
        info = agent.next_rendezvous()
        info.store.set(f"torchelastic/role_info/{info.rank}", json.dumps({"local_world_size": agent.local_world_size}))
        return json.loads(info.store.get(f"torchelastic/assigned_ranks/{info.rank}"))[:2]

    with ThreadPoolExecutor() as pool:
        return list(pool.map(one, agents))


def until(condition) -> None:
    limit = time.monotonic() + 15
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.02)


@contextmanager
def cable_to(port: int) -> Iterator[tuple[int, Callable[[], None]]]:
    """Yield a port that leads to another one, and what cuts its present connections so that neither end notices."""
    cuts, opened = [threading.Event()], []

    def carry(source: socket.socket, target: socket.socket, is_cut: threading.Event) -> None:
        with suppress(OSError):
            while (data := source.recv(4096)) and not is_cut.is_set():
                target.sendall(data)

    def accept() -> None:
        with suppress(OSError):
            while True:
                ends = server.accept()[0], socket.create_connection(("127.0.0.1", port))
                opened.extend(ends)
                for each in (ends, ends[::-1]):
                    threading.Thread(target=carry, args=[*each, cuts[-1]], daemon=True).start()

    def cut() -> None:
        cuts.append(threading.Event())
        cuts[-2].set()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=accept, daemon=True).start()
        try:
            yield server.getsockname()[1], cut
        finally:
            for one in opened:
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)


def test_rounds_with_a_loss_a_newcomer_and_an_end(start, capsys):
    first, second = start(), start()
    second.local_world_size = 2
    assert sorted(meet(first, second)) in ([[0, 3], [1, 3]], [[0, 3], [2, 3]])
    assert first.num_nodes_waiting() == 0 and os.environ[rounds.ROUND] == "0"
    second.attendance._ends = True  # it gives no more signs of life

    until(lambda: first.num_nodes_waiting() == 1)
    assert not first.folder.over(0).is_planned and "no sign of life" in first.folder.over(0).reason
    assert meet(first) == [[0, 1]] and first.round == 1
    assert first.folder.path.stat().st_mode & 0o777 == 0o700

    third = start()
    with ThreadPoolExecutor() as pool:
        comes = pool.submit(meet, third)
        until(lambda: first.num_nodes_waiting() == 1)
        assert first.folder.over(1).is_planned and first.folder.over(1).reason.endswith("has come")
        assert (meet(first), comes.result()) == ([[0, 2]], [[1, 2]])
        ends = pool.submit(first.finish)
        time.sleep(0.3)
        assert not ends.done()  # it serves the store of the others
        third.finish()
        ends.result(timeout=5)
    assert first.attendance.membership.phase is Phase.ENDED and first.num_nodes_waiting() == 0
    said = capsys.readouterr().err
    assert "hftune: Round 0: 2 machines, " in said and "hftune: Round 1: 1 machine, " in said and "Lost " in said


def holding(*agents: ElasticRendezvous) -> dict[ElasticRendezvous, State]:
    """Return what the agents say that their folders hold: nothing, until it is changed."""
    held = dict.fromkeys(agents, State())
    for agent in held:
        agent.attendance.copies = Mock(moved_at=0.0)
        agent.attendance.copies.configure_mock(**{"run.return_value": "", "newest.return_value": ""})
        agent.attendance.copies.state.side_effect = lambda agent=agent: held[agent]
    return held


def test_who_comes_back_last_says_what_it_holds_now_and_not_at_the_start_of_the_round(start):
    held = holding(start(most=2), start(most=2))
    meet(*held)
    main, other = sorted(held, key=lambda agent: agent.machine_rank)
    held[main], held[other] = State("run", 1, 20), State("run", 1, 10)  # an older copy
    with ThreadPoolExecutor() as pool:
        failed = pool.submit(meet, other)  # one of its processes did
        until(lambda: main.attendance.membership.machines[other.attendance.me.id].is_ready)
        assert (meet(main), failed.result()) == ([[0, 2]], [[1, 2]])


def test_a_copy_that_arrives_while_machines_wait_for_the_one_that_leaves_counts(start):
    held = holding(*(start(most=3) for _ in range(3)))
    meet(*held)
    leaves, *others = sorted(held, key=lambda agent: agent.machine_rank)
    held[leaves] = State("run", 1, 10)
    leaves.attendance.say(is_leaving=True)
    with ThreadPoolExecutor() as pool:
        meets = [pool.submit(meet, agent) for agent in others]
        until(lambda: all(one.is_ready and one.looked > 0 for one in others[0].attendance.membership.here(ids(others))))
        held[others[1]] = held[leaves]  # the one that came last
        leaves.shutdown()
        assert [each.result() for each in meets] == [[[1, 2]], [[0, 2]]]


def ids(agents: list[ElasticRendezvous]) -> list[str]:
    return [agent.attendance.me.id for agent in agents]


def test_who_does_not_fit_is_refused_and_the_others_go_on(start, capsys):
    agent = start()
    meet(agent)
    other = start()
    other.attendance.facts = {**other.attendance.facts, "recipe": {"train.lr": 2.0}, "host": "elsewhere"}
    for stranger, what in ((other, "a different recipe: train.lr"), (start(most=3), "for 1:3 machines")):
        with pytest.raises(SystemExit) as caught, ThreadPoolExecutor() as pool:
            pool.submit(stranger.next_rendezvous).result()
        said = capsys.readouterr().err
        assert caught.value.code == 2 and what in said and "another --rdzv-id" in said
    assert agent.num_nodes_waiting() == 0


def test_too_few_machines_end_with_who_is_here(start, capsys, monkeypatch):
    monkeypatch.setattr(rendezvous, "REMINDER_S", 0.6)
    with pytest.raises(SystemExit) as caught, ThreadPoolExecutor() as pool:
        pool.submit(start(least=2, most=3, join_timeout=1.0).next_rendezvous).result()
    said = capsys.readouterr().err
    assert caught.value.code == 75  # a scheduler may start it again
    assert "1 machine is here" in said and "at least 2 are needed" in said and "HFTUNE_JOIN_TIMEOUT_S=" in said
    assert "needed. Start the same command on more machines; they meet at" in said and " Waiting for 1 s more." in said


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({"min_machines": 3}, "min_machines=3 is no whole number from 1 to the most, 2."),
        ({"min_machines": 0}, "min_machines=0 is no whole number from 1 to the most, 2."),
        ({"keep_alive": "soon"}, "keep_alive=soon is not a number of at least 0.1."),
        ({"keep_alive": 60}, "keep_alive=60 is more than 15 s: the processes would give up before their launcher knows"),
    ],
)
def test_bad_numbers_are_refused(start, capsys, config, what):
    with pytest.raises(SystemExit) as caught:
        start(**config)
    assert caught.value.code == 2 and f"hftune: --rdzv_conf {what}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ("--nnodes 3:1 --rdzv-backend hftune", "--nnodes 3:1 is no range of machines"),
        ("--nnodes=0:2 --rdzv_backend=hftune", "--nnodes 0:2 is no range of machines"),
        ("--nnodes 1:3 --rdzv-backend c10d", "Use --rdzv-backend hftune with --rdzv-endpoint FOLDER"),
        ("--nnodes 1:3", "with --rdzv-backend static does not work"),
        ("--nnodes 1:3 --rdzv_backend hftune", None),
        ("--nnodes 2", None),
    ],
)
def test_ranges_that_do_not_work_are_refused_before_anything(monkeypatch, words, what):
    command = ["torchrun", *words.split(), "-m", "hftune.run", "recipe=yelp", "--nnodes", "5:1"]
    found = range_problem(command)
    assert (found is None) if what is None else (what in found)
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    assert (range_problem(command) is None) == ("no range" not in (what or ""))


def test_an_agent_that_ends_before_it_is_let_in_takes_its_thread_along(start):
    """Else the interpreter might abort, with an exit code that is nobody's."""
    agent = start()
    agent.attendance.start()
    until(lambda: agent.attendance._count)
    agent.shutdown()
    assert agent.attendance.membership is None and not agent.attendance._threads[0].is_alive()


def test_newcomers_are_let_in_at_a_checkpoint_or_after_a_while(tmp_path):
    attendance = Attendance(FolderPlace(tmp_path, "job"), Machine("a", "a", "127.0.0.1"), 1, 2, Times(9, regroup_every=0.2), {})
    attendance.copies = Copies(tmp_path, 1, "auto", attendance.is_here)
    (tmp_path / "checkpoints/step_00000010").mkdir(parents=True)
    machines = {"a": attendance.me, "b": Machine("b", "b", "127.0.0.1", is_ready=True)}
    membership = Membership("job", 1, 2, Phase.RUNNING, 0, ["a"], machines)
    assert not attendance._lets_in(membership, frozenset({"b"}))  # it cannot be reached
    assert not attendance._lets_in(membership, frozenset())
    (tmp_path / "checkpoints/step_00000020").mkdir()
    assert attendance._lets_in(membership, frozenset())
    attendance._lets_in(Membership("job", 1, 2), frozenset())
    assert not attendance._lets_in(membership, frozenset())
    time.sleep(0.25)
    assert attendance._lets_in(membership, frozenset())


def test_only_one_of_those_who_have_read_the_same_changes_the_document(tmp_path):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for place in (FolderPlace(tmp_path, "my/job"), StorePlace(store, "job", lambda: store)):
        assert place.read() == "" and place.note("facts") == ""
        won = []

        def write(name: str, place=place, won=won) -> None:
            if place.swap("", name) == name:
                won.append(name)

        threads = [threading.Thread(target=write, args=[f"agent {index}"]) for index in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert won == [place.read()]
        assert place.swap("something else", "mine") != "mine" and place.swap(won[0], "") == ""
        assert (place.note("facts", "one"), place.note("facts", "two"), place.note("facts")) == ("one", "one", "one")
        place.give_sign("a", "longer than")
        place.give_sign("a", "this")
        assert place.signs(["a", "b"]) == {"a": "this", "b": ""}


def test_jobs_of_different_names_may_meet_at_the_same_place(tmp_path):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for one, other in (
        (FolderPlace(tmp_path, "one"), FolderPlace(tmp_path, "other")),
        (StorePlace(store, "one", lambda: store), StorePlace(store, "other", lambda: store)),
    ):
        one.swap("", "document")
        one.give_sign("a", "sign")
        assert (one.read(), other.read(), other.signs(["a"])) == ("document", "", {"a": ""})


def test_a_meeting_place_that_is_started_again_gets_its_document_back():
    stores = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
    port = stores[0].port
    connect = partial(connect_to, "127.0.0.1", port, 0.2)
    place = StorePlace(connect(), "job", connect)
    attendance = Attendance(place, Machine("a", "a", "127.0.0.1"), 1, 1, Times(9), {"host": "a"})
    attendance.say(ready_after=-1)
    attendance.start()
    until(lambda: attendance.membership is not None and attendance.membership.machines)
    stores.clear()
    until(lambda: attendance.error is not None)
    stores.append(TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False))
    again = StorePlace(stores[0], "job", lambda: stores[0])
    until(lambda: again.read() != "")
    assert Membership.parse(again.read()).job == attendance.job
    assert json.loads(again.note(f"facts-{attendance.job}")) == {"host": "a"}
    attendance.leave("")


def test_a_request_that_gets_no_answer_is_made_again_over_a_new_connection(monkeypatch):
    """As after a cut cable: TCP waits for twice the time that it was cut."""
    for name, value in {"BEAT_S": 0.05, "HANG_UP_S": 0.3}.items():
        monkeypatch.setattr(attendance, name, value)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with cable_to(store.port) as (port, cut):
        connect = Mock(side_effect=partial(connect_to, "127.0.0.1", port, 1.0))
        agent = Attendance(StorePlace(connect(), "job", connect), Machine("a", "a", "127.0.0.1"), 1, 1, Times(9), {})
        agent.say(ready_after=-1)
        agent.start()
        until(lambda: agent.membership is not None)
        assert connect.call_count == 1
        cut()
        until(lambda: connect.call_count == 2 and agent.unanswered_s == 0.0)
        agent.leave("")


def test_an_agent_does_not_wait_for_the_store_of_a_machine_that_is_lost(start):
    agent = start()
    meet(agent)
    own, server = {"local_world_size": 1}, TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with ThreadPoolExecutor() as pool, cable_to(server.port) as (port, cut):
        agent.store, agent._address = connect_to("127.0.0.1", port, 1.0), ("127.0.0.1", port)
        cut()
        asks = pool.submit(agent.sizes)
        time.sleep(0.1)
        assert not asks.done()
        agent._tell_processes(replace(agent.attendance.membership, phase=Phase.GATHERING, over=rounds.Over("Lost b", False)))
        assert asks.result(timeout=5) is None and agent.sizes() is None
        rendezvous.RoundStore(agent).set("torchelastic/role_info/0", json.dumps(own))


def test_who_serves_the_place_serves_it_whatever_becomes_of_its_own_connection():
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    connect = partial(connect_to, "127.0.0.1", server.port, 1.0)
    place, other = StorePlace(server, "job", connect), StorePlace(connect(), "job", connect)
    del server
    place.swap("", "document")
    place.hang_up()  # of this process, so of both
    for each in (place, other):
        with pytest.raises(RuntimeError):
            each.read()
        each.give_sign("a", "sign")
        assert each.read() == "document"


def test_a_newcomer_does_not_begin_a_job_where_another_one_is_about_to_be_brought_back(tmp_path):
    place = FolderPlace(tmp_path, "job")
    first, second = (Attendance(place, Machine(name, name, "127.0.0.1"), 1, 2, Times(9), {"host": name}) for name in "ab")
    second.return_s = 1.0
    for each in (first, second):
        each.say(ready_after=-1)
    first._look()
    (place._folder / "membership.json").unlink()
    second._look()  # it is the first one to come to the place that was started again
    until(lambda: first._look() or second._look() or second.membership is not None)
    assert second.job == first.job and len(second.membership.machines) == 2


def test_who_finds_another_job_has_not_trained_to_the_end(start, capsys):
    agent = start()
    meet(agent)
    agent.attendance._ends = True
    agent.attendance._threads[0].join()
    another = [Membership("another", 1, 2, phase) for phase in (Phase.RUNNING, Phase.ENDED)]
    for membership in another:
        agent.attendance.membership = membership
        assert agent.num_nodes_waiting() == 1  # its processes end
        with pytest.raises(SystemExit) as caught:
            agent.next_rendezvous()
        assert caught.value.code == 75 and "Another job has begun" in capsys.readouterr().err
    for membership in (Membership(agent.attendance.job, 1, 2, Phase.ENDED), *another):
        agent.attendance.membership = membership
        assert agent.num_nodes_waiting() == 0  # its processes come to their end
    with pytest.raises(SystemExit) as caught:
        agent.next_rendezvous()
    assert caught.value.code == 0


@pytest.mark.parametrize("port", [0, 70000])
def test_a_port_that_is_none_is_refused(capsys, port):
    assert cli.main(["meeting", str(port)]) == 2
    assert f"port {port} must be between 1 and 65535" in capsys.readouterr().err

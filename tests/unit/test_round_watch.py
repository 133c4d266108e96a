"""A process that outlives a round: what it hears, whom it hangs up on, and which errors it takes for the loss of another one."""

import os
import socket
import threading
import time

import pytest
import torch
from torch import nn

from hftune.checkpoints.memory import LAST, in_memory
from hftune.checkpoints.train_state import Provenance, TrainState
from hftune.distributed import regroup
from hftune.distributed.regroup import Environment, RoundOver, RoundWatch, connections, hang_up
from hftune.distributed.rounds import FOLDER, ROUND, AgentFolder, Members, Over
from hftune.errors import ConfigError, DataError, Interrupted, TrainingError
from hftune.strategies.statistics import RunningStatistics
from hftune.tracking.ledger import Ledger, holds_step, read_ledger

BROKEN = "Connection closed by peer [10.0.0.2]:1234"


@pytest.fixture
def agent(tmp_path, monkeypatch):
    monkeypatch.setenv(ROUND, "3")
    monkeypatch.setenv(FOLDER, str(tmp_path))
    return AgentFolder(tmp_path)


def connected():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        return one, listener.accept()[0]


def until(condition):
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < 5
        time.sleep(0.005)


def test_who_waits_for_another_process_is_woken_and_other_connections_stay():
    before = connections()
    ours, theirs = connected()
    to_hang_up = connections() - before
    tracker, server = connected()
    heard = []
    waiting = threading.Thread(target=lambda: heard.append(theirs.recv(1)))
    waiting.start()
    hang_up(to_hang_up)
    waiting.join(5)
    assert heard == [b""]
    tracker.sendall(b"loss")
    assert server.recv(4) == b"loss"
    for one in (ours, theirs, tracker, server):
        one.close()


def test_the_store_is_no_other_process():
    before, (ours, theirs) = connections(), connected()
    assert len(connections() - before) == 2
    assert connections(but_port=theirs.getsockname()[1]) - before == set()
    ours.close()
    theirs.close()


def test_a_planned_end_asks_to_leave_and_a_loss_after_it_hangs_up(agent, monkeypatch):
    hung_up = []
    monkeypatch.setattr(RoundWatch, "hang_up", lambda watch: hung_up.append(watch))
    with RoundWatch() as watch:
        agent.end(3, Over("A machine has come", is_planned=True))
        until(lambda: watch.over)
        assert not watch.asks_to_leave, "it has promised nothing, and its agent ends it"
        watch.promise()
        assert watch.asks_to_leave and not hung_up and agent.will_stay(3, 1)
        agent.end(3, Over("Lost a", is_planned=False))
        until(lambda: hung_up)
        assert not watch.asks_to_leave


def test_outside_elastic_jobs_nothing_is_watched_or_changed(monkeypatch):
    monkeypatch.delenv(ROUND, raising=False)
    with RoundWatch(promises=True) as watch, pytest.raises(RuntimeError, match="Connection closed"), watch.outlived():
        assert not watch.is_elastic and not watch.has_promised
        raise RuntimeError(BROKEN)


def test_a_broken_connection_is_a_loss_if_the_agent_says_so(agent):
    agent.end(3, Over("Lost a", is_planned=False))
    with RoundWatch(promises=True) as watch, pytest.raises(RoundOver, match="Lost a"), watch.outlived():
        raise RuntimeError(BROKEN)


def test_who_is_asked_to_stop_when_the_others_are_gone_ends_at_once(agent):
    with RoundWatch(promises=True) as watch, pytest.raises(Interrupted, match="cannot be finished") as raised:
        with watch.outlived(is_to_stop=lambda: True):
            raise RuntimeError(BROKEN)
    assert type(raised.value) is Interrupted


def test_a_store_that_does_not_answer_is_a_loss_too(agent):
    agent.end(3, Over("Lost a", is_planned=False))
    with RoundWatch(promises=True) as watch, pytest.raises(RoundOver), watch.outlived():
        raise TrainingError("no answer") from torch.distributed.DistNetworkError("recv")


def settled():
    error = RuntimeError(BROKEN)
    error.report = "of all processes"
    return error


@pytest.mark.parametrize("error", [TrainingError("The loss is nan"), ValueError("own"), MemoryError(), settled()])
def test_an_error_of_its_own_ends_the_job_at_once(agent, error):
    with RoundWatch(promises=True) as watch, pytest.raises(type(error)) as raised, watch.outlived():
        raise error
    assert raised.value is error


@pytest.mark.parametrize("error", [ConfigError("train.csv is another file there."), DataError("There is no train.csv.")])
def test_what_was_right_before_is_wrong_on_a_newcomer_which_leaves(agent, error):
    agent.end(3, Over("b has left", is_planned=False))
    with RoundWatch(promises=True) as watch, pytest.raises(RoundOver, match="b has left"), watch.outlived():
        raise error
    with RoundWatch() as watch, pytest.raises(type(error)), watch.outlived():  # its first round
        watch.promise()
        raise error


@pytest.mark.parametrize("why", ["no promise", "forbidden", "the agent is silent", "another process has failed"])
def test_a_broken_connection_is_a_failure_otherwise(agent, monkeypatch, why):
    if why == "forbidden":
        monkeypatch.setenv("HFTUNE_REGROUP", "restart")
    if why != "the agent is silent":
        agent.end(3, Over("Lost a", is_planned=False))
    monkeypatch.setattr(regroup, "wait_for_agent", lambda has_failed: None if has_failed() else agent.over(3))
    watch = RoundWatch(promises=why != "no promise")
    with watch, pytest.raises(RuntimeError, match="Connection closed"), watch.outlived(lambda: why.startswith("another")):
        raise RuntimeError(BROKEN)


def test_a_round_that_is_over_is_not_joined(agent):
    with RoundWatch(promises=True) as watch:
        agent.end(3, Over("Lost a", is_planned=False))
        until(lambda: watch.over)
        with pytest.raises(RoundOver), watch.joining():
            pass


def test_the_next_round_is_told_by_the_agent(agent, monkeypatch):
    before = {"RANK": "5", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "NCCL_DEBUG": "INFO", FOLDER: str(agent.path)}
    monkeypatch.setattr(os, "environ", before)
    environment = Environment()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # by the last round, whose processes were all on this machine
    agent.begin(Members(4, first_rank=2, world_size=6, num_machines=3, machine_rank=1, address="10.0.0.1", port=29500))
    environment.next_round(4)
    told = {"RANK": "3", "WORLD_SIZE": "6", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "3", "MASTER_ADDR": "10.0.0.1"}
    told |= {"MASTER_PORT": "29500", ROUND: "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "NCCL_DEBUG": "INFO"}
    assert {name: os.environ[name] for name in told} == told
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    monkeypatch.setattr(os, "getppid", lambda: 1)
    environment._parent = 2
    with pytest.raises(TrainingError, match="ended before round 5 began"):
        environment.next_round(5)


@pytest.mark.parametrize("is_summed", [False, True])
def test_running_statistics_return_to_what_a_broken_step_started_from(is_summed):
    module = nn.BatchNorm1d(3)
    statistics = RunningStatistics([(module, "running_mean"), (module, "running_var")], torch.float64)
    module(torch.randn(4, 3))
    buffers = module.running_mean, module.running_var
    before = [buffer.clone() for buffer in buffers]
    statistics.begin()
    with statistics.micro_batch(4):
        module(torch.randn(4, 3))
    if is_summed:  # and then the sum of the losses breaks
        statistics.finish(lambda value: value)
        assert not torch.equal(module.running_mean, before[0])
    statistics.undo()
    assert module.running_mean is buffers[0] and module.running_var is buffers[1]
    assert all(torch.equal(buffer, value) for buffer, value in zip(buffers, before, strict=True))


def step(number, **values):
    return {"step": number, "epoch": 0, "step_in_epoch": number - 1, **values}


def computed(number):
    return step(number, num_samples=2, digest="d", loss=1.0, grad_norm=1.0, lr=0.1, items=2.0)


@pytest.mark.parametrize("last", [computed(3), step(3)])
def test_a_new_main_process_notes_the_step_that_the_lost_one_did_not(tmp_path, last):
    path, facts = tmp_path / "ledger.jsonl", {"world_size": 3, "plan": {}}
    assert not holds_step(path, 1)
    old = Ledger(path)
    old.begin(0, facts)
    for number in (1, 2):
        old.note(**computed(number))
    assert holds_step(path, 3) and not holds_step(path, 4)
    for _ in range(2):  # the second time it is there
        Ledger(path).begin(3, facts, last)
        assert [line["step"] for line in read_ledger(tmp_path).taken] == [1, 2, 3]
    assert read_ledger(tmp_path).problems() == []


def test_a_state_in_memory_is_a_checkpoint_of_live_tensors(tmp_path):
    weight = torch.ones(2)
    saved = {"model": {"w": weight}, "optimizer": {}}, {"scaler": 1}
    found = in_memory(tmp_path, saved, TrainState(step=7), Provenance({}, {}), computed(7))
    assert found.tensors["model"]["w"] is weight and found.path == tmp_path / "checkpoints" / "step_00000007"
    assert found.progress["state"]["step"] == 7 and found.progress[LAST]["step"] == 7
    found.tensors["model"].clear()
    assert saved[0]["model"], "the state itself stays"

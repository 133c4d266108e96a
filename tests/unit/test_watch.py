"""Who says what when a process is gone, on stores without a launcher. What real processes do is in tests/multiprocess."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import pytest
import torch.distributed as dist

from hftune import heartbeat as module
from hftune.errors import ConfigError, ElsewhereError, TrainingError
from hftune.heartbeat import Heartbeat, Report, Whereabouts, _Watch, is_second_hand
from hftune.progress import Progress
from hftune.rendezvous import agree


def whereabouts(rank: int, num_processes: int = 2, machine: range = range(1)) -> Whereabouts:
    return Whereabouts(rank, num_processes, machine, has_agent=False, host=f"host{machine.start}")


@pytest.fixture
def store():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=5))


@pytest.fixture
def watch(monkeypatch, store):
    """Return a function that starts the watch of one of two processes, which beats every hundredth of a second."""
    for name, seconds in (("BEAT_S", 0.01), ("HURT_S", 10.0), ("HEARD_S", 0.5), ("RETURN_S", 0.1)):
        monkeypatch.setattr(module, name, seconds)
    watches = []

    def start(rank: int, dead_after_s: float = 0.3, stall_after_s: float | None = None) -> _Watch:
        own = Heartbeat(Progress(), dead_after_s, stall_after_s)
        own.here = whereabouts(rank, machine=range(rank, rank + 1))
        own.progress.at(f"step {rank + 3}")
        watches.append(_Watch(own, dist.PrefixStore("run", store.clone()), has_group=True))
        watches[-1].claim()  # or its thread would end this process
        return watches[-1]

    yield start
    for one in watches:
        if one._bye is None:
            one.close("done")


def test_exactly_one_process_of_each_machine_speaks():
    machines = [range(4), range(4, 8)]
    for rank in range(8):
        for can_speak in (True, False):
            report = Report("", rank=rank, can_speak=can_speak)
            speakers = [[one for one in machine if whereabouts(one, 8, machine).speaks(report)] for machine in machines]
            assert [len(some) for some in speakers] == [1, 1]
            assert ([rank] in speakers) == can_speak


def test_a_process_alone_on_its_machine_that_is_gone_leaves_nobody_to_speak_there():
    assert not whereabouts(1, 2, range(1, 2)).speaks(Report("", rank=1, can_speak=False))


def test_processes_that_end_at_different_times_are_not_missed(watch):
    first, second = watch(0), watch(1)
    time.sleep(0.1)
    second.close("done")
    time.sleep(0.6)
    assert first.report is None and not first._is_lost


@pytest.mark.parametrize("gone", [0, 1])
def test_a_silent_process_is_missed_in_the_step_where_the_others_wait(watch, gone):
    watches = [watch(0), watch(1)]
    time.sleep(0.1)
    watches[gone]._round = lambda passed_s: time.sleep(0.01)
    report = watches[1 - gone].wait_for_cause()
    assert report.text.startswith(f"hftune: Process {gone} (host host{gone}, pid ")
    assert report.text.endswith(
        f"and is missing in step {4 - gone}. It was killed, or its machine is down or cut off. Last seen in step {gone + 3}."
    )
    assert (report.code, report.rank, report.is_spoken_here) == (1, gone, True)


def test_a_process_that_marks_progress_is_not_hung_and_then_is(watch, capfd):
    watches = [watch(0, 60, 0.3), watch(1, 60, 0.3)]
    for _ in range(10):
        time.sleep(0.06)
        watches[1].progress.on([1, 2])
    assert watches[0].report is None
    report = watches[1].wait_for_cause()
    assert report.is_stall and report.text.startswith("hftune: No process has moved on for 0 s (train.stall_after_s=0.3).")
    assert "step 3, in" in report.text and "step 4, samples 1, 2, in" in report.text
    assert "stands at" in capfd.readouterr().err


def test_the_first_report_counts_on_all_processes(watch):
    watches = [watch(0), watch(1)]
    own = [Report("hftune: one", rank=0), Report("hftune: other", code=2, rank=1)]
    with ThreadPoolExecutor() as pool:
        settled = list(pool.map(lambda pair: pair[0].settle(pair[1]), zip(watches, own, strict=True)))
    assert replace(settled[0], is_spoken_here=True) == replace(settled[1], is_spoken_here=True)
    assert replace(settled[0], is_spoken_here=True) in own


def test_a_store_that_is_gone_is_named_with_who_was_there(watch, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    watches = [watch(0), watch(1)]
    time.sleep(0.1)

    def broken(passed_s: float) -> None:
        raise dist.DistNetworkError("Broken pipe")

    watches[1]._round = broken
    text = watches[1].wait_for_cause().text
    assert text.startswith(
        "hftune: The launcher's store at 10.0.0.1:29500 does not answer in step 4: that launcher has ended, or its machine is "
        "down or cut off. Process 0 (host host0, pid "
    )
    assert text.endswith(") was last seen in step 3.")


def test_one_process_adds_to_an_error_where_it_happened(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    progress = Progress()
    with pytest.raises(ValueError, match="bad") as caught, Heartbeat(progress, 60, 1800):
        progress.at("step 3")
        progress.on([7])
        raise ValueError("bad")
    head, *_, last = caught.value.report.text.splitlines()
    assert (head, last, caught.value.report.code) == ("[step 3, sample 7]", "ValueError: bad", 1)


def test_leaving_training_is_an_error_even_with_code_0(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(TrainingError, match=r"called sys\.exit\(0\) in the start, before training was over: test_leaving"):
        with Heartbeat(Progress(), 60, 1800):
            raise SystemExit(0)


def test_known_errors_are_messages_with_their_exit_code(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for error, code in ((ConfigError("train.lr=1"), 2), (TrainingError("nan"), 1)):
        with pytest.raises(type(error)) as caught, Heartbeat(Progress(), 60, 1800):
            raise error
        assert caught.value.report == Report(f"hftune: {error}", code, kind=type(error).__name__)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1"), True),
        (dist.DistBackendError("NCCL error: remote process exited"), True),
        (ElsewhereError("The main process failed"), True),
        (RuntimeError("CUDA out of memory"), False),
        (ConnectionResetError("Connection reset by peer"), False),  # a download's, or a pipe's
        (TrainingError("NCCL"), False),
    ],
)
def test_an_error_is_second_hand_where_torch_tells_of_a_connection(error, expected):
    assert is_second_hand(error) == expected


def test_many_samples_are_cut():
    progress = Progress()
    progress.at("step 1")
    assert progress.place() == "step 1"
    progress.on(range(20))
    assert progress.place() == f"step 1, samples {', '.join(map(str, range(16)))} and 4 more"


def test_a_group_does_not_meet_the_one_that_ended_in_the_same_store(store):
    def meet(rank: int) -> str:
        if rank == 0:
            time.sleep(0.2)  # the others come first, and find the old invitation
        return agree(store.clone(), rank, 3, timedelta(seconds=10))

    names = []
    for _ in range(2):
        with ThreadPoolExecutor(3) as pool:
            (name,) = set(pool.map(meet, range(3)))
        names.append(name)
    assert names[0] != names[1]

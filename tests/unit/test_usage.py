"""Who is slow and how even the work is, and the numbers of several machines. What real processes log is in multiprocess."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hftune.distributed import peers, usage
from hftune.distributed.peers import Limits, Peers
from hftune.distributed.process_info import ProcessInfo
from hftune.distributed.progress import Progress
from hftune.distributed.usage import Usage
from hftune.strategies import step_times
from hftune.strategies.step_times import StepTimes
from hftune.tracking.console import Console
from tests.support.events import logged

CPU = torch.device("cpu")


class Clock:
    """Stands still unless a test moves it."""

    now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(step_times, "time", clock)
    return clock


def take_step(clock: Clock, times: StepTimes, loading_s: float, computing_s: float, waiting_s: float) -> None:
    """Load, compute, wait for the sum of the gradient within the backward pass, and apply it."""
    with times.loading():
        clock.now += loading_s
    times.begin_computing()
    loss = torch.ones(1, requires_grad=True) * 2
    loss.register_hook(lambda _: setattr(clock, "now", clock.now + computing_s))
    times.end_computing_after(loss)

    def wait() -> None:
        clock.now += waiting_s

    loss.register_hook(lambda _: torch.autograd.Variable._execution_engine.queue_callback(wait))  # as DDP does
    loss.backward()
    times.finish()


def test_a_process_tells_its_own_seconds_in_its_own_places_without_those_it_waited(clock):
    times = StepTimes(CPU, rank=1, num_processes=3, computes_alone=True)
    take_step(clock, times, loading_s=1, computing_s=4, waiting_s=3)
    *others, loading_s, computing_s, memory, after, _, _ = times.told()
    assert (others, loading_s, computing_s, after) == ([0, 0, 0], 1, 4, 0)
    assert 1e7 < memory < 1e12  # bytes of this very process


def test_what_a_process_waits_while_it_computes_is_no_computing(clock):
    times = StepTimes(CPU, rank=0, num_processes=2, computes_alone=True)
    times.begin_computing()
    for seconds, waited in ((1, 5), (2, 0)):
        clock.now += seconds
        with times.waiting():
            clock.now += waited
    loss = torch.ones(1, requires_grad=True) * 2
    times.end_computing_after(loss)
    loss.backward()
    times.finish()
    assert times.told()[1] == 3


def test_shares_are_taken_over_the_slowest_process_of_each_step(clock):
    """Two steps of ten seconds in which the processes take turns at being slow: even in total, and yet half is waited."""
    times = StepTimes(CPU, rank=0, num_processes=2, computes_alone=True)
    for own, other in (([2, 6, 1e9], [0, 2, 7e9]), ([0, 2, 1e9], [2, 6, 3e9])):
        take_step(clock, times, own[0], own[1], 10 - own[0] - own[1])
        assert times.told()[:2] == own[:2]
        times.add([*own, *other])
    # Of 10 s each, loading takes 2 and computing 6 on the slow process; on average processes wait 3.
    shares = {"perf/data_share": 0.2, "perf/wait_share": 0.3, "perf/imbalance": 1.5, "perf/slowest_rank": 0}
    assert times.take() == {"perf/data_wait_s": 2, "perf/memory_gb": 7, **shares}
    assert times.take() == {}
    take_step(clock, times, 0, 2, 1)
    times.add([0, 2, 1, 0, 3, 1])
    assert times.take()["perf/slowest_rank"] == 1


def test_a_process_alone_and_one_that_waits_while_it_computes_only_know_their_loading(clock):
    for times in (StepTimes(CPU, 0, 1, computes_alone=True), StepTimes(CPU, 0, 2, computes_alone=False)):
        take_step(clock, times, loading_s=1, computing_s=2, waiting_s=1)
        times.add(times.told())
        found = times.take()
        assert found.pop("perf/memory_gb") > 0.01 and found == {"perf/data_share": 0.25, "perf/data_wait_s": 1}


def test_what_was_loaded_for_no_step_is_not_counted(clock):
    times = StepTimes(CPU, 0, 1, computes_alone=True)
    with times.loading():
        clock.now += 50
    times.discard()
    take_step(clock, times, 1, 3, 0)
    times.add(times.told())
    assert times.take()["perf/data_share"] == 0.25


def test_a_step_that_no_process_told_of_yet_is_not_one():
    """The first step of a run sums up zeros."""
    times = StepTimes(CPU, 0, 2, computes_alone=True)
    times.add([0.0] * 6)
    assert times.take() == {}


def sample(rank: int) -> dict[str, float]:
    own = {"process_memory_gib": 1.5, f"gpu{rank % 2}_percent": 90.0 + rank}
    return own | ({"cpu_percent": 10.0 * rank} if rank % 2 == 0 else {})


def test_the_numbers_of_two_machines_are_told_apart_and_the_memory_of_their_processes_added():
    info = ProcessInfo(rank=0, world_size=4, local_rank=0, local_world_size=2)
    seen = Peers(info, Progress(), Limits(60, None), has_group=True)
    first = {"perf/host0/process_memory_gib": 1.5, "perf/host0/gpu0_percent": 90.0, "perf/host0/cpu_percent": 0.0}
    seen.beats = {rank: {"usage": sample(rank), "machine": [rank // 2 * 2, rank // 2 * 2 + 2]} for rank in (2, 3)}
    assert seen.usage_by_host(sample(0)) == first  # with one unknown, which may be of a machine between the two
    seen.beats[1] = {"usage": sample(1), "machine": [0, 2]}
    both = {
        "perf/host0/process_memory_gib": 3.0,
        "perf/host0/gpu0_percent": 90.0,
        "perf/host0/cpu_percent": 0.0,
        "perf/host0/gpu1_percent": 91.0,
        "perf/host1/process_memory_gib": 3.0,
        "perf/host1/gpu0_percent": 92.0,
        "perf/host1/cpu_percent": 20.0,
        "perf/host1/gpu1_percent": 93.0,
    }
    assert seen.usage_by_host(sample(0)) == both
    seen.silent_s[3] = peers.FRESH_S + 1
    assert "perf/host1/gpu1_percent" not in seen.usage_by_host(sample(0))


def test_a_machine_is_sampled_and_a_source_that_fails_is_left_alone(tmp_path, monkeypatch):
    calls = []

    def broken(*_: object) -> dict[str, float]:
        calls.append(1)
        raise OSError("the driver is gone")

    monkeypatch.setattr(usage, "FIRST_S", 0.0)
    monkeypatch.setattr(usage, "EVERY_S", 0.01)
    for name in ("memory_reserved", "max_memory_allocated", "utilization", "power_draw"):
        monkeypatch.setattr(torch.cuda, name, broken)
    here, gpu = ProcessInfo(), SimpleNamespace(type="cuda")
    with Usage(here, gpu, tmp_path) as sampled:
        until = time.monotonic() + 10
        while not sampled.last and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(0.05)
        assert set(sampled.last) == {"process_memory_gib", "cpu_percent", "memory_gib", "disk_free_gib"}
        assert 0 < sampled.last["process_memory_gib"] < sampled.last["memory_gib"] and sampled.last["disk_free_gib"] > 0
    assert len(calls) == 4


def test_only_the_first_process_of_a_machine_samples_the_machine():
    other = Usage(ProcessInfo(rank=3, world_size=4, local_rank=1, local_world_size=2), CPU, Path("/"))
    assert set(other.sample()) == {"process_memory_gib"}


def test_a_driver_that_hangs_holds_nobody_up(tmp_path, monkeypatch):
    released = threading.Event()
    monkeypatch.setattr(usage, "FIRST_S", 0.0)
    monkeypatch.setattr(usage.shutil, "disk_usage", lambda folder: released.wait(10))
    with Usage(ProcessInfo(), CPU, tmp_path) as sampled:
        assert sampled.last == {}
    released.set()


def test_a_terminal_line_has_none_of_these_numbers(capsys):
    values = {"train/loss": 0.5, "train/lr": 0.001, "perf/host0/cpu_percent": 3.0, "perf/wait_share": 0.1}
    Console(True, num_steps=5).on_log(logged(1, 0.5, values))
    assert capsys.readouterr().out == "step 1/5  epoch 0.50  loss 0.500  lr 0.00100\n"

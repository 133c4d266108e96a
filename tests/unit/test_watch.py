"""Who says what when a process is gone, on stores without a launcher. What real processes do is in tests/multiprocess."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from hftune import run
from hftune.distributed import failure_report, heartbeat, peers, rounds, watchdog
from hftune.distributed.failure_report import Report, is_second_hand, stack_location, with_report
from hftune.distributed.heartbeat import Heartbeat
from hftune.distributed.peers import Limits
from hftune.distributed.process_info import ProcessInfo
from hftune.distributed.progress import Progress
from hftune.distributed.rendezvous import Attempt, agree
from hftune.distributed.watchdog import MAIN, WATCHDOG, Watchdog
from hftune.errors import DataError, ElsewhereError, TrainingError

FRESH = 0.3


def whereabouts(rank: int, num_processes: int = 2, machine: range = range(1)) -> ProcessInfo:
    return ProcessInfo(
        rank,
        num_processes,
        rank - machine.start,
        len(machine),
        f"host{machine.start}",
        main_address="10.0.0.1",
        main_port=29500,
    )


@pytest.fixture
def store():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=5))


@pytest.fixture
def watch(monkeypatch, store):
    """Return a function that starts the watch of one of two processes, which beats every hundredth of a second."""
    for name, seconds in (("BEAT_S", 0.01), ("HEARD_S", 0.5), ("RETURN_S", 0.1)):
        monkeypatch.setattr(watchdog, name, seconds)
    monkeypatch.setattr(peers, "FRESH_S", FRESH)
    watches = []

    def start(
        rank: int,
        dead_after_s: float = 0.3,
        stall_after_s: float | None = None,
        here: ProcessInfo | None = None,
        has_group: bool = True,
        look: Callable[[], Any] | None = None,
    ) -> Watchdog:
        progress, shared = Progress(), dist.PrefixStore("run", store.clone())
        progress.stage(f"step {rank + 3}")
        here = here or whereabouts(rank, machine=range(rank, rank + 1))
        limits = Limits(dead_after_s, stall_after_s)
        watches.append(
            Watchdog(here, progress, limits, lambda report: None, look or (lambda: shared), has_group, secret="word")
        )
        watches[-1].claim()  # or its thread would end this process
        return watches[-1]

    yield start
    for one in watches:
        if not one.is_closed:
            one.close("done")


def test_either_the_main_thread_or_the_watchdog_ends_a_process_and_neither_after_goodbye(watch):
    """The main thread may come back while the watchdog waits for it; once it does not, it never continues."""
    assert not watch(0)._may_end(WATCHDOG)  # the main thread was first, see above
    one = watch(0)
    one._ender = WATCHDOG
    waiting = threading.Thread(target=one.claim, daemon=True)
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive() and not one._may_end(MAIN)
    one._ender = None
    one.close("done")
    assert not one._may_end(WATCHDOG)


def test_exactly_one_process_of_each_machine_speaks():
    machines = [range(4), range(4, 8)]
    for rank in range(8):
        for can_print in (True, False):
            report = Report("", rank=rank, can_print=can_print)
            speakers = [[one for one in machine if report.is_printed_by(whereabouts(one, 8, machine))] for machine in machines]
            assert [len(some) for some in speakers] == [1, 1]
            assert ([rank] in speakers) == can_print


def test_a_process_alone_on_its_machine_that_is_gone_leaves_nobody_to_speak_there():
    assert not Report("", rank=1, can_print=False).is_printed_by(whereabouts(1, 2, range(1, 2)))


def test_what_a_newcomer_cannot_train_on_is_left_to_the_agent_of_a_machine_that_can(watch, monkeypatch, tmp_path):
    monkeypatch.setenv(rounds.ROUND, "1")
    monkeypatch.setenv(rounds.FOLDER, str(tmp_path))
    newcomer = watch(1)
    rounds.AgentFolder(tmp_path).note(0, rounds.Over("host1 has come", is_planned=True))
    first = watch(0, here=replace(whereabouts(0, machine=range(1)), round=1))
    newcomer.settle(Report("hftune: There is no file train.csv.", code=2, rank=1))
    assert not first._failure_is_known.wait(0.3) and first.report is None
    monkeypatch.setattr(watchdog, "AGENT_S", 0.0)
    assert first._failure_is_known.wait(5) and first.report.code == 2


def silence(watch: Watchdog) -> None:
    """Let a process fall silent, as C code does that holds Python's lock."""
    watch._round = lambda passed_s: time.sleep(0.01)


def on_one_machine(rank: int, num_processes: int = 2) -> ProcessInfo:
    return replace(whereabouts(rank, num_processes, range(num_processes)), has_agent=True)


@pytest.mark.parametrize("silent", [0, 1])
def test_a_silent_process_that_lives_on_this_machine_is_given_the_time_of_a_stall(watch, capfd, silent):
    watches = [watch(rank, 0.3, 1.5, on_one_machine(rank)) for rank in (0, 1)]
    time.sleep(0.1)
    silence(watches[silent])
    time.sleep(0.8)
    other = watches[1 - silent]
    assert other.report is None
    warning = capfd.readouterr().err
    assert warning.startswith(f"hftune: Process {silent} (host host0, pid ") and warning.count("\n") == 1
    assert ") is alive but has not answered for 0 s (train.dead_after_s=0.3). C code in it may hold Python's lock, " in warning
    assert (
        f"or it may be stopped or swapping. Last seen 0 s ago in step {silent + 3}. Waiting for up to 1.5 s (train." in warning
    )
    assert other._failure_is_known.wait(5)
    assert other.report.text.endswith(
        f"is alive but has not answered for 2 s during step {4 - silent}. C code in it may hold Python's lock, or it may "
        f"be stopped or swapping. The limit is train.stall_after_s=1.5. Last seen 2 s ago in step {silent + 3}."
    )


def test_a_silent_process_that_comes_back_was_never_dead(watch):
    watches = [watch(rank, 0.2, 60, on_one_machine(rank)) for rank in (0, 1)]
    time.sleep(0.1)
    round_ = watches[1]._round
    silence(watches[1])
    time.sleep(0.5)
    watches[1]._round = round_
    time.sleep(0.2)
    assert watches[0].report is None and watches[0].peers.silent_s[1] < 0.2 and not watches[0].peers.waited_for


def test_a_broken_connection_bounds_the_wait_for_a_process_that_lives(watch):
    watches = [watch(rank, 0.5, 60, on_one_machine(rank)) for rank in (0, 1)]
    time.sleep(0.1)
    silence(watches[1])
    report = watches[0].wait_for_cause()
    assert "is alive but has not answered" in report.text
    assert "The limit is train.dead_after_s=0.5, because a connection broke in the meantime." in report.text


@pytest.mark.parametrize("silent", [0, 1])
def test_a_process_of_another_machine_lives_if_one_beside_it_says_so(watch, silent):
    """Processes 0 and 1 are on one machine, 2 and 3 on the other; two of one machine watch, and one of the other is silent."""
    machines = [range(2), range(2, 4)]
    here = {rank: replace(whereabouts(rank, 4, machines[rank // 2]), has_agent=True) for rank in range(4)}
    watches = {rank: watch(rank, 0.4, None, here[rank]) for rank in range(4)}
    time.sleep(0.2)
    silence(watches[2 * silent])  # process 0, which all watch, or process 2, which process 0 watches
    time.sleep(1.0)
    assert [one.report for one in watches.values()] == [None] * 4
    silence(watches[2 * silent + 1])  # and now nobody vouches for it
    judge = watches[2 - 2 * silent]
    assert judge._failure_is_known.wait(FRESH + 3)
    assert re.search(
        r" has given no sign of life for \d s during step \d\. It was killed, or its machine is down or cut off\. If C "
        r"code in it may hold Python's lock for that long, raise train\.dead_after_s=0\.4\. Last seen \d s ago in step \d\.$",
        judge.report.text,
    )


def test_a_process_that_has_ended_and_was_not_collected_is_not_running():
    child = subprocess.Popen(["true"])
    time.sleep(0.2)
    assert not peers.is_running(child.pid)
    child.wait()
    assert peers.is_running(os.getpid())


def test_a_report_that_no_process_has_written_ends_nothing_and_none_means_success(watch, store):
    """Anyone who reaches the launcher's port can list the keys of its store, and write there."""
    one = watch(0, dead_after_s=60)
    time.sleep(0.1)
    store.set("run/report", json.dumps({"text": "hftune: ended by an outsider", "code": 0}))
    time.sleep(0.2)
    assert one.report is None
    assert Report.parse(json.dumps({"text": "over", "code": 0})) == Report("over", code=1)
    assert Report.parse(json.dumps({"text": "over", "code": 137})).code == 1
    own = Report("hftune: stopped", code=75, rank=3, kind="Interrupted")
    assert Report.parse(json.dumps(asdict(own))) == own
    for broken in ("", "[]", '{"text": 1}', '{"txt": "over"}', '{"text": "over", "rank": "0"}'):
        assert "a report that no process of this job has written" in Report.parse(broken).text


def test_who_has_not_come_is_said_while_the_others_wait(watch, capfd, monkeypatch, store):
    monkeypatch.setattr(heartbeat, "REMINDER_S", 0.2)
    own = Heartbeat(Progress(), 60, None)
    own.here = whereabouts(0, 3)
    own._watch = watch(0, 60, None, whereabouts(0, 3), has_group=False)
    own._watch.progress.stage("joining the others")
    watch(2, 60, None, whereabouts(2, 3, range(2, 3)), has_group=False)
    with own.waiting():
        time.sleep(0.35)
    said = capfd.readouterr().err
    assert re.fullmatch(
        r"hftune: Process 0 \(host \S+, pid \d+\) has waited 0 s for process 1, which has not started; process 2 \(host host2, "
        r"pid \d+\), in step 5\.\n",
        said,
    )


def test_a_process_without_a_launchers_store_says_that_it_waits_and_where(capfd, monkeypatch):
    monkeypatch.setattr(heartbeat, "REMINDER_S", 0.1)
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    own = Heartbeat(Progress(), 60, None)
    message, until = "", time.monotonic() + 30
    with own.waiting():
        while not message and time.monotonic() < until:
            time.sleep(0.02)
            message = capfd.readouterr().err
    assert message.endswith(
        "for the other processes: all 2 must be started with the same command, and be able to reach 10.0.0.1:29500.\n"
    )


def test_processes_that_end_at_different_times_are_not_missed(watch):
    first, second = watch(0), watch(1)
    time.sleep(0.1)
    second.close("done")
    time.sleep(0.6)
    assert first.report is None and first.loss is None


@pytest.mark.parametrize("gone", [0, 1])
def test_a_silent_process_is_missed_in_the_step_where_the_others_wait(watch, gone):
    watches = [watch(0), watch(1)]
    time.sleep(0.1)
    watches[gone]._round = lambda passed_s: time.sleep(0.01)
    report = watches[1 - gone].wait_for_cause()
    assert report.text.startswith(f"hftune: Process {gone} (host host{gone}, pid ")
    assert report.text.endswith(
        f" during step {4 - gone}. It was killed, or its machine is down or cut off. Last seen 0 s ago in step {gone + 3}."
    )
    assert (report.code, report.rank, report.is_printed_here) == (1, gone, True)


def test_a_process_that_marks_progress_is_not_hung_and_then_is(watch, capfd):
    watches = [watch(0, 60, 0.3), watch(1, 60, 0.3)]
    for _ in range(10):
        time.sleep(0.06)
        watches[1].progress.samples([1, 2])
    assert watches[0].report is None
    report = watches[1].wait_for_cause()
    assert report.is_stall and report.text.startswith("hftune: No process has made progress for 0 s (train.stall_after_s=0.3).")
    assert "step 3, in" in report.text and "step 4, samples 1, 2, in" in report.text
    assert "] is at\n" in capfd.readouterr().err


def test_the_first_report_counts_on_all_processes(watch):
    watches = [watch(0), watch(1)]
    own = [Report("hftune: one", rank=0), Report("hftune: other", code=2, rank=1)]
    with ThreadPoolExecutor() as pool:
        settled = list(pool.map(lambda pair: pair[0].settle(pair[1]), zip(watches, own, strict=True)))
    assert replace(settled[0], is_printed_here=True) == replace(settled[1], is_printed_here=True)
    assert replace(settled[0], is_printed_here=True) in own


def test_a_store_that_is_gone_is_named_with_who_was_there(watch):
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
        progress.stage("step 3")
        progress.samples([7])
        raise ValueError("bad")
    head, *_, last = caught.value.report.text.splitlines()
    assert (head, last, caught.value.report.code) == ("[step 3, sample 7]", "ValueError: bad", 1)
    with pytest.raises(DataError) as known, Heartbeat(progress, 60, 1800):
        raise DataError("bad")
    assert known.value.report == Report("hftune: bad", code=2, rank=0, kind="DataError")


@pytest.mark.parametrize(
    ("file", "error", "expected"),
    [
        ("torch/distributed/c10d.py", RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer"), True),
        (heartbeat.__file__, RuntimeError("Connection reset by peer"), True),
        ("torch/distributed/c10d.py", dist.DistBackendError("NCCL error: remote process exited"), True),
        ("task.py", ElsewhereError("The main process failed"), True),
        ("task.py", RuntimeError("The index of documents: Connection refused"), False),  # of a server that a task asks
        ("torch/nn/modules/module.py", RuntimeError("CUDA out of memory"), False),
        ("torch/hub.py", ConnectionResetError("Connection reset by peer"), False),  # a download's, or a pipe's
        ("task.py", TrainingError("NCCL"), False),
    ],
)
def test_an_error_is_second_hand_where_torch_tells_of_a_connection(file, error, expected):
    with pytest.raises(type(error)) as caught:
        exec(compile("raise error", file, "exec"), {"error": error})
    assert is_second_hand(caught.value) == expected


def test_a_stall_in_a_library_is_located_in_the_hftune_code_that_called_it(monkeypatch):
    """An installed hftune lies in site-packages, as libraries do."""
    monkeypatch.setattr(failure_report, "PACKAGE", Path("/venv/site-packages/hftune"))
    names = {}
    exec(compile("def wait(sys):\n return sys._getframe()", "/venv/site-packages/torch/comm.py", "exec"), names)
    exec(compile("def fit(sys):\n return wait(sys)", "/venv/site-packages/hftune/loop.py", "exec"), names)
    assert stack_location(names["fit"](sys)) == "wait (comm.py:2), called from fit (loop.py:2)"


def test_many_samples_are_cut():
    progress = Progress()
    progress.stage("step 1")
    assert progress.describe() == "step 1"
    progress.samples(range(20))
    assert progress.describe() == f"step 1, samples {', '.join(map(str, range(16)))} and 4 more"


@pytest.fixture
def attempts(store, monkeypatch):
    """Return a function that makes one attempt's processes of a job which its launcher may restart."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    return lambda *ranks: [Attempt(store.clone(), rank) for rank in ranks]


def meet(main: Attempt, *others: Attempt) -> list[Any]:
    """Let them look until all have found the store of their attempt, and a little longer; return it for each."""
    for _ in range(20):
        found = [one.look() for one in (main, *others)]
        time.sleep(0.01)
    return found


def test_processes_of_an_attempt_find_each_other_and_nothing_that_an_earlier_one_left(attempts):
    first, second = meet(*attempts(0, 1))
    first.set("report", "of the attempt that failed")
    assert second.get("report")
    late = attempts(1, 2)  # process 0 is not there yet; the old one has ended
    assert meet(*late) == [None, None]
    main, *found = meet(*attempts(0), *late)
    assert not any(one.check(["report"]) for one in found)
    main.set("report", "of this attempt")
    assert [one.get("report") for one in found] == [b"of this attempt"] * 2


def test_a_process_follows_to_a_newer_attempt(attempts):
    old_main, other = attempts(0, 1)
    old = meet(old_main, other)[1]
    old.set("where", "old")
    assert old.get("where")
    new = meet(*attempts(0), other)[1]
    assert new is not old and not new.check(["where"])


def test_an_early_watch_of_a_restarted_group_does_not_read_the_last_beats_of_the_group_before(watch, attempts):
    dead = meet(*attempts(0, 1))[1]
    dead.set("beat/1", json.dumps({"round": 7, "who": "Process 1", "pid": 1, "position": "x", "bye": None, "hurt": False}))
    assert dead.get("beat/1")
    (again,) = attempts(0)
    early = watch(0, 0.2, None, whereabouts(0), has_group=False, look=again.look)
    time.sleep(0.6)
    assert early.report is None and early.peers.beats == {}


def test_a_group_does_not_meet_the_one_that_ended_in_the_same_store(store):
    def meet(rank: int) -> Any:
        if rank == 0:
            time.sleep(0.2)  # the others come first, and find the old invitation
        return agree(store.clone(), rank, 3, timedelta(seconds=10))

    for number in range(2):
        with ThreadPoolExecutor(3) as pool:
            shared = list(pool.map(meet, range(3)))
        assert not any(one.check(["here"]) for one in shared)
        shared[number].set("here", "")
        assert all(one.check(["here"]) for one in shared)


def test_a_silent_process_waits_for_the_one_that_reports_only_until_its_launcher_ends_it(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    silent = with_report(ElsewhereError("elsewhere"), Report("elsewhere", code=2, is_printed_here=False))
    before = signal.signal(signal.SIGTERM, watchdog._let_one_pass)
    launcher = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM))
    launcher.start()
    began = time.monotonic()
    try:
        assert run.fail(silent) == 2
    finally:
        launcher.join()
        signal.signal(signal.SIGTERM, before)
        failure_report.GOT_SIGTERM.clear()
    assert time.monotonic() - began < failure_report.PATIENCE_S / 2

"""What the processes of an elastic job make of its rounds: when one is over, whose the output folder is, what ends the job."""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from hftune import ConfigError, Recipe, TrainingError, run
from hftune.checkpoints import lock
from hftune.checkpoints.checkpointer import Checkpointer, steps
from hftune.checkpoints.lock import only_writer
from hftune.checkpoints.resume import find_start, is_restarted, member, note_begun
from hftune.config.every import Every
from hftune.config.sections import CheckpointConfig
from hftune.distributed import rounds, watchdog
from hftune.distributed.failure_report import STOPPED, Report
from hftune.distributed.heartbeat import Heartbeat
from hftune.distributed.process_info import ProcessInfo
from hftune.distributed.progress import Progress
from hftune.distributed.rendezvous import await_all
from hftune.distributed.rounds import FOLDER, JOB, ROUND, AgentFolder, Failure, Over, wait_for_agent
from hftune.distributed.watchdog import Watchdog
from hftune.loop import is_late
from hftune.tracking import ledger as ledger_module
from hftune.tracking.ledger import Ledger, last_step
from tests.support.events import step_taken

LOST = Over("Lost node2 (10.0.0.2): no sign of life for 4 s", is_planned=False)
COME = Over("node3 (10.0.0.3) has come", is_planned=True)
JOINING = Failure("joining the other processes", "RuntimeError: no route", 1)
STEP_12 = Failure("step 12", "ValueError: bad sample 17", 1)


@pytest.fixture
def in_round(monkeypatch, tmp_path):
    """Return a function that puts this process into a round of a job; it returns the folder of the agent."""
    (tmp_path / "agent").mkdir()

    def enter(number: int, job: str | None = "one") -> AgentFolder:
        monkeypatch.setenv(ROUND, str(number))
        monkeypatch.setenv(FOLDER, str(tmp_path / "agent"))
        monkeypatch.delenv(JOB, raising=False)
        if job is not None:
            monkeypatch.setenv(JOB, job)
        return AgentFolder(tmp_path / "agent")

    return enter


def write_checkpoint(folder, recipe: Recipe, step: int = 4, **options) -> Checkpointer:
    writer = Checkpointer(folder / "checkpoints", CheckpointConfig(), **options)
    progress = {"state": {}, "values": {}, "digests": {}, "run_ids": {}, "micro_batch_size": {}}
    writer.write(step, {"model": {"weight": torch.zeros(2)}}, progress, recipe.to_yaml(), None, [])
    writer.wait()
    return writer


def test_a_later_round_resumes_although_resume_never_started_the_job(in_round, tmp_path):
    recipe = Recipe.load("mnist_demo", f"output_dir={tmp_path / 'out'}", "resume=never")
    in_round(0)
    write_checkpoint(tmp_path / "out", recipe)
    note_begun(tmp_path / "out", member())
    assert find_start(recipe).checkpoint is None  # the same processes train a second time, as in a notebook
    in_round(1)
    assert find_start(recipe).checkpoint.step == 4
    in_round(1, job="two")  # the first round ended before it had opened the folder of another job
    assert find_start(recipe).checkpoint is None


def test_an_agent_that_names_no_job_deletes_nothing_in_a_later_round(in_round, tmp_path, monkeypatch):
    note_begun(tmp_path, [("some launcher", 1)])
    for number, expected in ((0, False), (1, True)):
        in_round(number, job=None)
        assert is_restarted(tmp_path, []) == expected


def test_a_later_round_takes_the_folder_over_from_a_main_process_that_hangs(in_round, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(lock, "RETURN_S", 0.1)
    in_round(0)
    with only_writer(tmp_path) as was_ours:
        in_round(1, job="two")
        with pytest.raises(ConfigError, match=rf"in use by process {os.getpid()} on \S+, in round 0 of job one\."):
            only_writer(tmp_path).__enter__()
        in_round(1)
        with only_writer(tmp_path) as is_ours:
            assert is_ours() and not was_ours()
            assert "in round 0 of job one still holds" in capsys.readouterr().err
            writer = write_checkpoint(tmp_path, Recipe.load("mnist_demo", "output_dir=out"), is_ours=was_ours)
            assert writer.failure == "another process has taken over the folder"
            assert steps(tmp_path / "checkpoints") == []
            ledger = Ledger(tmp_path / "ledger.jsonl", is_ours=was_ours)
            ledger.start(0, {})
            monkeypatch.setattr(ledger_module, "AWAY_S", 0.0)
            with pytest.raises(TrainingError, match="is another process's by now: this one was stopped for a while"):
                ledger.on_step(step_taken(1))
            assert last_step(ledger.path) == 0
            with pytest.raises(ConfigError):  # of its own round
                only_writer(tmp_path).__enter__()
    assert (tmp_path / ".lock").exists() and not (tmp_path / ".owner").exists()


@pytest.mark.parametrize(
    ("failures", "losses", "expected"),
    [
        ({}, (), None),
        ({0: STEP_12, 1: STEP_12}, (), None),
        ({0: STEP_12, 1: STEP_12, 3: STEP_12}, (2,), "ends"),
        ({0: STEP_12, 1: STEP_12, 2: Failure("step 13", "", 1)}, (), None),
        ({0: JOINING, 1: JOINING, 3: JOINING}, (2,), None),  # it has trained in between, perhaps for days
        ({1: JOINING, 2: JOINING, 3: JOINING}, (0,), "ends"),
        ({0: Failure("loading the data", "hftune: no such file", 2)}, (), "stays out"),
        ({4: Failure("loading the data", "hftune: no such file", 2)}, (4,), "stays out"),  # a newcomer
        ({4: Failure("loading the data", "hftune: no such file", 2)}, (3,), None),  # that trained before
    ],
)
def test_a_machine_goes_on_unless_rounds_fail_in_the_same_step_or_it_never_could(in_round, failures, losses, expected):
    folder = in_round(0)
    for number in losses:
        folder.note(number, LOST)
    for number, failure in failures.items():
        folder.note(number, failure)
    verdict = folder.verdict()
    if expected == "ends":
        last = failures[max(failures)]
        assert verdict.text == f"{last.text}\nhftune: 3 rounds have failed in {last.stage}: the job ends."
    else:
        assert verdict == (failures[max(failures)] if expected else None)


def test_a_failure_is_recorded_once_a_machine_unless_a_lost_machine_caused_it(in_round):
    folder = in_round(2)
    progress = Progress()
    progress.stage("step 12")
    for over, report, expected in (
        (None, Report("stopped", STOPPED), []),
        (None, Report("elsewhere", 1, rank=1, is_printed_here=False), [2]),  # this machine has no other process
        (COME, Report("bad", 1), [2]),
        (LOST, Report("broken", 1), []),
    ):
        for path in folder.path.iterdir():
            path.unlink()
        if over is not None:
            folder.note(2, over)
        Heartbeat(progress, 5, None).close_all(report)
        assert folder.rounds("failure") == expected, report
    folder.note(3, STEP_12)
    assert folder.verdict() is None


@pytest.mark.parametrize(
    ("number", "over", "has_begun", "is_hurt", "leaves"),
    [
        (None, None, False, False, False),  # not elastic: a report says that the process got SIGTERM
        (1, None, False, False, True),  # nothing is to be saved yet
        (1, None, True, False, False),  # the machine is asked to stop, and finishes its step
        (1, None, True, True, True),  # another process of this machine was killed
        (1, COME, True, False, False),
        (1, LOST, True, False, True),
    ],
)
def test_sigterm_ends_a_process_at_once_if_its_step_cannot_be_finished(
    monkeypatch, in_round, number, over, has_begun, is_hurt, leaves
):
    codes = []
    monkeypatch.setattr(watchdog.os, "_exit", codes.append)
    folder = in_round(number or 0)
    if over is not None:
        folder.note(1, over)
    process = SimpleNamespace(
        here=ProcessInfo(round=number),
        is_closed=False,
        reports_sigterm=not has_begun,
        close_all=lambda report: None,
        _lost_at=1.0 if is_hurt else 0.0,
        _connection_is_broken=False,
    )
    Watchdog._leave_round(process)
    assert codes == ([STOPPED] if leaves else [])


def test_a_process_leaves_a_round_once_its_agent_knows_that_it_is_over(in_round, monkeypatch):
    monkeypatch.setattr(rounds, "LOOK_S", 0.001)
    monkeypatch.delenv(ROUND, raising=False)
    assert wait_for_agent(lambda: False) is None  # not elastic
    folder = in_round(1)
    assert wait_for_agent(lambda: True) is None  # its own machine is asked to stop
    assert wait_for_agent(lambda: False, timeout_s=0.01) is None
    timer = threading.Timer(0.05, folder.note, (1, COME))
    timer.start()
    assert wait_for_agent(lambda: False) == COME


def test_the_clock_of_the_main_process_decides_when_a_checkpoint_is_late():
    def late(every="5 s", is_main=True, since=-100.0):
        return is_late(SimpleNamespace(strategy=SimpleNamespace(is_main=is_main)), Every.read(every), since)

    assert late() and not late(every="never") and not late(every=5) and not late(is_main=False)
    assert not late(since=float("inf"))


def test_the_processes_of_a_round_wait_for_each_other_before_they_connect():
    store = torch.distributed.HashStore()
    with pytest.raises(torch.distributed.DistStoreError):
        await_all(store, 0, 2, timedelta(seconds=0.1))
    await_all(store, 1, 2, timedelta(seconds=0.1))
    await_all(store, 0, 2, timedelta(seconds=0.1))


def test_who_has_trained_waits_for_the_newcomer_that_its_recipe_is_wrong_on(in_round, monkeypatch):
    folder, waited = in_round(1), []
    monkeypatch.setattr(run, "wait_for_agent", lambda was_told: waited.append("word") or LOST)
    monkeypatch.setattr(run, "GOT_SIGTERM", SimpleNamespace(is_set=bool, wait=lambda seconds: waited.append("SIGTERM")))
    assert run.fail(ConfigError("There is no file train.csv.")) == 2 and waited == []
    folder.note(0, COME)
    assert run.fail(TrainingError("The loss is nan.")) == 1 and waited == []
    assert run.fail(ConfigError("There is no file train.csv.")) == 2 and waited == ["word", "SIGTERM"]

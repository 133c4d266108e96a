"""When a group of processes is a restarted one, which resumes whatever ``resume`` says; and what a resumed run takes over."""

import os

import pytest

from hftune import Recipe
from hftune.checkpoints.checkpointer import Checkpoint
from hftune.checkpoints.output_dir import OutputDir
from hftune.checkpoints.resume import Start, is_restarted, member, note_begun
from hftune.checkpoints.train_state import TrainState
from hftune.distributed.process_info import launcher


@pytest.fixture
def under_torchrun(monkeypatch):
    """Return a function that makes this process one that torchrun has started, in an attempt of its log folder."""

    def start(attempt: int, logs: str = "/tmp/torchelastic_x/job_y") -> None:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", f"{logs}/attempt_{attempt}/0/error.json")

    return start


def test_a_launcher_is_known_again_in_its_next_attempt_and_differs_from_all_others(under_torchrun, monkeypatch):
    names = []
    for attempt, logs in ((0, "/tmp/a"), (1, "/tmp/a"), (0, "/tmp/b")):
        under_torchrun(attempt, logs)
        names.append(launcher())
    assert names[0] == names[1] != names[2]
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE")  # then it is the parent process
    assert launcher().startswith(f"{os.uname().nodename} job {os.getppid()} since ")


def test_a_process_without_a_launcher_is_never_a_restarted_one(monkeypatch, tmp_path):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert launcher() is None and member() == []
    note_begun(tmp_path, member())
    assert not is_restarted(tmp_path, member())


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        ([("a", 3), ("b", 4)], True),
        ([("c", 3), ("b", 4)], True),  # a machine has left, another one has come
        ([("c", 3), ("d", 4)], False),  # the same command, started again
        ([("a", 1), ("b", 2)], False),  # the same processes train a second time
        ([], False),
    ],
)
def test_a_group_is_restarted_if_a_launcher_of_the_run_has_started_new_processes(tmp_path, group, expected):
    note_begun(tmp_path, [("a", 1), ("b", 2)])
    assert is_restarted(tmp_path, group) == expected


def test_a_folder_of_an_earlier_version_holds_no_run_of_this_job(tmp_path):
    assert not is_restarted(tmp_path, [("a", 1)])


def test_history_of_a_run_killed_before_its_first_checkpoint_does_not_stay_before_another(tmp_path):
    """The checkpoint was copied without its run, so there is no history to bring along."""
    copied = tmp_path / "copies" / "checkpoints" / "step_00000003"
    output = OutputDir(Recipe.load("mnist_demo", f"output_dir={tmp_path / 'run'}"))
    output.path.mkdir()
    (output.path / "ledger.jsonl").write_text('{"after_step": 0}\n')
    output.start = Start(Checkpoint(copied, 3, {}, {}))
    output.open(TrainState(step=3))
    assert not (output.path / "ledger.jsonl").exists()

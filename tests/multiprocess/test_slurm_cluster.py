"""The batch script that `hftune slurm` writes, unedited, on a real SLURM of two or three nodes (without GPUs, cgroups and accounting).

Skipped if SLURM is not installed; tests/support/slurm_cluster.py says what it takes. HFTUNE_TEST_SLURM=all runs every case.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from safetensors.torch import load_file

from hftune.replay.audit import audit
from tests.support.runs import Run, train_on
from tests.support.slurm_cluster import Cluster, NotAllowed, slurm_cluster

ROOT = Path(__file__).parents[2]
FAULTY = f"{ROOT}/tests/support/faulty.yaml"
SLOW = (f"recipe={FAULTY}", "task.pause_s=0.4", "output_dir=out", "--cpu", "--nodes")
"""Sixteen steps that take six seconds; the number of nodes follows."""
WAIT_S = 200.0
BARE = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"}
"""What a shell has in which no environment is activated."""
long = pytest.mark.skipif(os.environ.get("HFTUNE_TEST_SLURM") != "all", reason="takes long: HFTUNE_TEST_SLURM=all runs it")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    try:
        with slurm_cluster() as running:
            yield running
    except NotAllowed as error:
        pytest.skip(str(error))


@pytest.fixture
def three_nodes() -> Iterator[Cluster]:
    try:
        with slurm_cluster(3) as running:
            yield running
    except NotAllowed as error:
        pytest.skip(str(error))


@pytest.fixture
def submit(cluster, tmp_path) -> Iterator[Callable[..., Job]]:
    """Return a function that writes a script with `hftune slurm` and hands it to sbatch; jobs left at the end are cancelled."""
    with submitting(cluster, tmp_path) as submit:
        yield submit


@contextmanager
def submitting(cluster: Cluster, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs = []

    def submit(*words: str, folder: Path = tmp_path, options: tuple[str, ...] = ()) -> Job:
        folder.mkdir(exist_ok=True)
        jobs.append(Job(cluster, folder, words, options))
        return jobs[-1]

    yield submit
    for job in jobs:
        cluster.run("scancel", job.number)
        job.wait()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Run:
    """The run of two processes that nobody stopped."""
    return train_on(2, {"undisturbed": ()}, tmp_path_factory.mktemp("undisturbed"), recipe=FAULTY)["undisturbed"]


class Job:
    """A job in the queue. Its log is in ``folder``, and so is what it trains."""

    def __init__(self, cluster: Cluster, folder: Path, words: tuple[str, ...], options: tuple[str, ...] = ()):
        self.cluster, self.folder = cluster, folder
        command = [sys.executable, "-m", "hftune.cli", "slurm", *words]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        (folder / "a job.sbatch").write_text(
            subprocess.run(command, cwd=folder, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout
        )
        # The job gets no variables but the one that finds this checkout: as under --export=NONE.
        given = ("--parsable", f"--export=PYTHONPATH={ROOT}", f"--output={folder}/job.log", *options)
        self.number = cluster.run("sbatch", *given, folder / "a job.sbatch", env={**BARE, "PYTHONPATH": str(ROOT)}).strip()

    @property
    def log(self) -> str:
        path = self.folder / "job.log"
        return path.read_text() if path.is_file() else ""

    def state(self) -> dict[str, str]:
        """Return what SLURM knows of it."""
        return self.cluster.job(self.number)

    def until(self, is_so: Callable[[], bool]) -> None:
        until = time.monotonic() + WAIT_S
        while not is_so():
            assert time.monotonic() < until, f"{self.state()}\n{self.log}"
            time.sleep(0.2)

    def says(self, words: str) -> None:
        """Wait until its log has these words."""
        self.until(lambda: words in self.log)

    def stop(self) -> None:
        """Send what SLURM itself sends near the time limit."""
        self.cluster.run("scancel", "--signal=USR1", "--batch", self.number)

    def wait(self) -> tuple[str, str, int]:
        """Wait for its end; return state, exit code and how often it was requeued."""
        self.until(lambda: self.state()["JobState"] not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"))
        state = self.state()
        return state["JobState"], state["ExitCode"], int(state["Restarts"])


def assert_whole(folder: Path, world_sizes: list[int]) -> None:
    """Every sample once, on these numbers of processes one after the other, the later ones from a checkpoint."""
    found = audit(folder)
    assert (found.problems, found.steps, found.whole_epochs) == ([], 16, 1)
    assert [start["world_size"] for start in found.starts] == world_sizes
    assert all(0 < start["after_step"] < 16 for start in found.starts[1:])


def assert_close(folder: Path, expected: Path) -> None:
    weights, others = (load_file(path / "model_last" / "model.safetensors") for path in (folder, expected))
    assert all(weights[key].numpy() == pytest.approx(others[key].numpy(), rel=1e-5) for key in others)


def assert_bit_equal(folder: Path, expected: Path) -> None:
    for name in ("model", "model_last"):
        weights, others = (load_file(path / name / "model.safetensors") for path in (folder, expected))
        assert weights.keys() == others.keys() and all(weights[key].equal(others[key]) for key in others)


def test_job_stopped_at_the_time_limit_is_requeued_and_ends_bit_equal_to_an_undisturbed_run(submit, undisturbed, tmp_path):
    """On CPUs, submitted from a shell in which no environment is activated."""
    job = submit(*SLOW, "2")
    job.says("step 4/16")
    job.stop()
    assert job.wait() == ("COMPLETED", "0:0", 1), job.log
    assert_whole(tmp_path / "out", [2, 2])
    assert_bit_equal(tmp_path / "out", undisturbed.folder)
    last = f"hftune: job {job.number} stopped at the time limit: back into the queue, to resume from the newest checkpoint.\n"
    first_turn, second_turn = job.log.split(last)
    assert first_turn and second_turn
    assert "Traceback" not in job.log and "node_rank" not in job.log


def test_failed_job_is_not_requeued_and_its_log_ends_with_the_reason(submit):
    job = submit(f"recipe={FAULTY}", "task.fault=raise", "task.sample=17", "--nodes", "2", "--cpu")
    assert job.wait() == ("FAILED", "1:0", 0), job.log
    found = re.search(r"(?s)(.*)\n=+\n((?:srun: error: [^\n]*\n)+)(.*)", job.log)
    assert found, job.log
    reason, errors, last = found.groups()
    assert reason.endswith("ValueError: bad sample 17") and "accelerate/commands" not in reason, job.log
    assert errors.count("Exited with exit code 1") == 2
    assert last == (
        f"hftune: job {job.number} failed: the message is above. Not requeued; sbatch resumes from the newest checkpoint.\n"
    )


@long
def test_job_on_one_to_two_nodes_starts_on_the_free_one_and_resumes_on_both(cluster, submit, tmp_path):
    other = cluster.run("sbatch", "--parsable", "--nodelist=node2", "--exclusive", "--wrap", "sleep 1000").strip()
    job = submit(*SLOW, "1-2")
    job.says("step 4/16")
    assert "1 process on cpu" in job.log
    cluster.run("scancel", other)
    job.stop()
    assert job.wait() == ("COMPLETED", "0:0", 1), job.log
    assert_whole(tmp_path / "out", [1, 2])


@long
def test_four_processes_on_two_nodes_get_a_core_each_and_train_as_two(submit, undisturbed, tmp_path):
    job = submit(*SLOW, "2", "--processes", "2")
    job.says("step 1/16")
    assert job.state()["NumCPUs"] == "4"
    assert job.wait() == ("COMPLETED", "0:0", 0), job.log
    run = Run(tmp_path / "out")
    assert run.result["world_size"] == 4
    assert run.logged("train/loss") == pytest.approx(undisturbed.logged("train/loss"), rel=1e-5)


@long
def test_job_that_is_requeued_by_hand_saves_and_resumes(cluster, submit, undisturbed, tmp_path):
    job = submit(*SLOW, "2")
    job.says("step 4/16")
    cluster.run("scontrol", "requeue", job.number)
    assert job.wait() == ("COMPLETED", "0:0", 1), job.log
    assert_whole(tmp_path / "out", [2, 2])
    assert_bit_equal(tmp_path / "out", undisturbed.folder)


@long
def test_cancelled_job_saves_and_a_later_one_resumes(cluster, submit, undisturbed, tmp_path):
    job = submit(*SLOW, "2")
    job.says("step 4/16")
    cluster.run("scancel", job.number)
    state, _, requeued = job.wait()
    assert (state, requeued) == ("CANCELLED", 0)
    assert submit(*SLOW, "2").wait() == ("COMPLETED", "0:0", 0), job.log
    assert_whole(tmp_path / "out", [2, 2])
    assert_bit_equal(tmp_path / "out", undisturbed.folder)


@long
@pytest.mark.parametrize(
    ("nodes", "says", "world_sizes"),
    [("1", "step 4/16", [1, 1]), ("2", "loading libraries", [2])],
    ids=["one process, without a launcher", "before the first step"],
)
def test_job_that_is_stopped_is_requeued_and_trains(submit, tmp_path, nodes, says, world_sizes):
    job = submit(*SLOW, nodes)
    job.says(says)
    job.stop()
    assert job.wait() == ("COMPLETED", "0:0", 1), job.log
    assert_whole(tmp_path / "out", world_sizes)


@long
def test_real_time_limit_stops_the_job_in_time(submit, undisturbed, tmp_path):
    """The signal comes up to a minute early, so the whole takes about two."""
    job = submit(*(word.replace("0.4", "9") for word in SLOW), "2", "--time", "3:00", "--grace-s", "40")
    job.says("back into the queue")
    assert job.wait() == ("COMPLETED", "0:0", 1), job.log
    assert_whole(tmp_path / "out", [2, 2])
    assert_bit_equal(tmp_path / "out", undisturbed.folder)


@long
def test_second_job_with_the_same_output_folder_is_refused_and_the_first_is_undisturbed(submit, tmp_path):
    first = submit(*(word.replace("0.4", "4") for word in SLOW), "1")  # for longer than the second takes to start
    first.says("step 1/16")
    second = submit(*SLOW, "1", options=(f"--output={tmp_path}/second.log",))
    assert second.wait() == ("FAILED", "2:0", 0)
    assert "output_dir=out is in use by process" in (tmp_path / "second.log").read_text()
    assert first.wait() == ("COMPLETED", "0:0", 0), first.log


# Nodes that are lost


@long
@pytest.mark.parametrize(("loses", "nodes", "requeued"), [(3, "node[1-2]", 0), (1, "node[2-3]", 1)])
def test_job_outlives_a_lost_node(three_nodes, undisturbed, tmp_path, loses, nodes, requeued):
    """With the first node it loses its batch script, and the others requeue it; SLURM itself would keep them until the time limit."""
    with submitting(three_nodes, tmp_path) as submit:
        job = submit(*SLOW, "1-3", "checkpoint.every=4")
        job.says("step 6/16")
        three_nodes.power_off(1) if loses == 1 else three_nodes.cut(loses)
        assert job.wait() == ("COMPLETED", "0:0", requeued), job.log
        assert job.state()["NodeList"] == nodes
    assert_whole(tmp_path / "out", [3, 2])
    assert_close(tmp_path / "out", undisturbed.folder)


@long
def test_job_with_too_few_nodes_left_is_requeued(three_nodes, tmp_path):
    with submitting(three_nodes, tmp_path) as submit:
        job = submit(*SLOW, "3-4", "checkpoint.every=4")
        job.says("step 6/16")
        three_nodes.cut(3)
        job.says(f"job {job.number} has lost too many nodes: back into the queue")
        three_nodes.mend(3)
        assert job.wait() == ("COMPLETED", "0:0", 1), job.log
    assert_whole(tmp_path / "out", [3, 3])

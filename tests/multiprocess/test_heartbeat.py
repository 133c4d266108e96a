"""What a person reads where a process fails, is killed, hangs or leaves, on one machine and on two; and that all end soon."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from hftune.replay.audit import audit
from tests.support.machines import NotAllowed, two_machines
from tests.support.runs import Command, all_ended, started, warm_python

RECIPE = str(Path(__file__).parents[1] / "support" / "faulty.yaml")
# Of 64 samples in 16 steps, two processes meet 17 in step 15, in a micro-batch of process 1 with sample 35.
STRIKE = "task.sample=17"
END_S = 60  # from a fault to the end of the launcher, seconds on an idle machine; left to themselves, they would wait for half an hour


@dataclass
class Job:
    """A job that has ended on one machine."""

    code: int
    out: str
    err: str
    seconds: float
    """From the fault to the launcher's end."""

    @property
    def said(self) -> list[str]:
        """What the processes themselves wrote, without the launcher's words."""
        own = self.err.split("torch.distributed.elastic.multiprocessing.errors.ChildFailedError")[0]
        lines = own.split('Traceback (most recent call last):\n  File "<frozen runpy>"')[0].splitlines()
        return [line for line in lines if not re.match(r"\[?[WE]\d{4} |\[rank\d\]:\[[WE]", line)]


@pytest.fixture
def launch(tmp_path) -> Callable[..., list[Job]]:
    """Return a function that starts one launcher a machine, waits for all and returns what became of them."""
    note = tmp_path / "struck"

    def run(*words: str, machines: tuple[tuple[str, ...], ...] = ((),), options: tuple[tuple[str, ...], ...]) -> list[Job]:
        jobs = [
            started(
                *(*place, warm_python(), "-m", "torch.distributed.run", *option, "-m", "hftune.run", f"recipe={RECIPE}"),
                *(f"output_dir={tmp_path / 'out'}", f"task.note={note}", *words),
            )
            for place, option in zip(machines, options, strict=True)
        ]
        ended = all_ended(*jobs)
        seconds = time.time() - float(note.read_text()) if note.exists() else 0.0
        return [Job(*found, seconds) for found in ended]

    return run


def on_one(launch: Callable[..., list[Job]], num_processes: int, *words: str, restarts: int = 0) -> Job:
    option = ("--standalone", "--nproc_per_node", str(num_processes), "--max-restarts", str(restarts))
    return launch(STRIKE, *words, options=(option,))[0]


def forked(tmp_path: Path, *words: str) -> Job:
    """What two processes do, whatever launcher started them."""
    note = tmp_path / "struck"
    fixed = (f"recipe={RECIPE}", f"output_dir={tmp_path / 'out'}", f"task.note={note}", STRIKE)
    done = Command(2, *fixed, *words)
    out, err = done.communicate()
    return Job(done.returncode, out, err, time.time() - float(note.read_text()))


def test_a_process_that_fails_says_where_and_why(tmp_path):
    job = forked(tmp_path, "task.fault=raise")
    heads = [line for line in job.said if line.startswith("[process")]
    assert heads == [f"[process 1 of 2 on host {socket.gethostname()}, step 15, samples 35, 17]"]
    assert job.said[-1] == "ValueError: bad sample 17"
    assert job.code != 0
    assert job.seconds < END_S


def test_a_killed_process_is_named_by_one_that_outlives_it_and_the_restarted_group_goes_on(launch, tmp_path):
    job = on_one(launch, 2, "task.fault=kill", "task.pause_s=0.1", "checkpoint.every=2", restarts=1)
    assert len(job.said) == 1, job.err
    assert re.fullmatch(
        r"hftune: Process 1 \(host \S+, pid \d+\) exited unexpectedly during step 15\. It was killed, crashed, or "
        r"exited\. Last seen in .+\.",
        job.said[0],
    )
    assert re.search(r"failed \(exitcode: (-9|1)\)", job.err)  # the launcher's own words, of the one that it looks at first
    assert job.code == 0, job.err
    assert re.search(r"Resuming from step \d+ of 16", job.out) and "step 16/16" in job.out
    assert audit(tmp_path / "out").problems == [] and len(audit(tmp_path / "out").starts) == 2
    assert (tmp_path / "out" / "result.json").exists()
    assert job.seconds < 2 * END_S  # with the second attempt


def test_a_process_that_hangs_is_found_by_where_it_stands(tmp_path):
    job = forked(tmp_path, "task.fault=hang", "train.stall_after_s=8")  # longer than imports take on a loaded machine
    first, *places = job.said[-3:]
    assert re.fullmatch(r"hftune: No process has made progress for \d+ s \(train.stall_after_s=8\)\. Current positions:", first)
    assert re.fullmatch(r"  process 1 \(host \S+, pid \d+\): step 15, samples 35, 17, in strike \(tasks.py:\d+\)", places[1])
    assert " step 15, samples " in places[0] and "called from backward (data_parallel.py:" in places[0]
    assert "    time.sleep(1000)" in job.said  # the stack of process 1
    assert job.code != 0
    assert 8 < job.seconds < 8 + END_S


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("leave", r"exited unexpectedly during step 15\. It was killed, crashed, or exited\. Last seen in .*\."),
        ("exit", r"called sys\.exit\(0\) in step 15, before training was over: strike \(tasks\.py:\d+\)\."),
    ],
)
def test_a_process_that_leaves_too_early_is_no_success(tmp_path, fault, said):
    job = forked(tmp_path, f"task.fault={fault}")
    assert job.code != 0
    assert len(job.said) == 1, job.err
    assert re.fullmatch(r"hftune: Process 1 \(host \S+, pid \d+\) " + said, job.said[0])
    assert job.seconds < END_S


def test_a_crash_in_native_code_shows_where_each_thread_was(tmp_path):
    job = forked(tmp_path, "task.fault=abort")
    assert "Fatal Python error: Aborted" in job.said
    assert re.search(r'File ".*tasks\.py", line \d+ in strike', job.err)
    assert job.code != 0
    assert job.seconds < END_S


def test_an_error_in_the_data_of_one_process_is_one_message(tmp_path):
    job = forked(tmp_path, "task.fault=data error")
    assert job.said == ["hftune: Sample 17 has no label."]
    assert job.code == 2
    assert job.seconds < END_S


@pytest.fixture
def machines() -> Iterator[tuple[tuple[str, ...], ...]]:
    """Yield what to put before a command to run it on one of two machines, 10.77.0.1 and 10.77.0.2."""
    try:
        with two_machines() as pair:
            yield tuple(machine.prefix for machine in pair)
    except NotAllowed as error:
        pytest.skip(str(error))


def on_two(launch: Callable[..., list[Job]], machines: tuple[tuple[str, ...], ...], *words: str) -> list[Job]:
    shared = ("--nnodes", "2", "--nproc_per_node", "1", "--master_addr", "10.77.0.1", "--master_port", "29617")
    return launch(*words, machines=machines, options=tuple((*shared, "--node_rank", rank) for rank in "01"))


def test_two_machines_end_with_the_traceback_of_the_one_that_failed(launch, machines):
    # Process 0: its machine's launcher ends with it and takes the store along, but not before the other one has read why.
    for job in on_two(launch, machines, "task.sample=46", "task.rank=0", "task.fault=raise"):
        assert job.said[0] == "[process 0 of 2 on host machineA, step 15, samples 46, 6]"
        assert job.said[-1] == "ValueError: bad sample 17"
        assert job.err.rstrip().splitlines()[-2].strip() == "ValueError: bad sample 17"
        assert job.code != 0
        assert job.seconds < END_S


def test_a_process_killed_on_another_machine_is_missed_within_the_bound(launch, machines):
    here, there = on_two(launch, machines, STRIKE, "task.fault=kill", "train.dead_after_s=4")
    assert re.fullmatch(
        r"hftune: Process 1 \(host machineB, pid \d+\) has given no sign of life for \d+ s during step 15\. It was "
        r"killed, or its machine is down or cut off\. Last seen \d+ s ago in .*\.",
        here.said[-1],
    )
    assert not any("Connection closed" in line or "Traceback" in line for line in here.said)
    assert "Signal 9 (SIGKILL)" in there.err
    assert here.code != 0 and there.code != 0
    assert here.seconds < 4 + END_S

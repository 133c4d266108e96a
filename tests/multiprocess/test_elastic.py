"""Machines that come and go in mid-run: a job goes on by itself, and its training is that of a run that was left alone."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from hftune.replay.audit import audit
from tests.support.elastic import PORT, Agent, ElasticJob, Resumption
from tests.support.machines import Machine, NotAllowed, several_machines
from tests.support.runs import Run, train_on, warm_python

CONFIG = str(Path(__file__).parents[2] / "accelerate_configs" / "2node.yaml")
TAGGING = str(Path(__file__).parents[1] / "support" / "tagging.yaml")
WORDS = (
    *("task.type=tests.support.tasks.BrakedTagging", "task.dropout=0.1", "train.epochs=1000", "train.max_steps=400"),
    *("eval.every=200", "checkpoint.every=4", "train.schedule=constant", "train.dead_after_s=20"),
)
QUICK = "last_call=1,join_timeout=60"
"""To begin soon once the least number is there."""


@pytest.fixture(scope="module")
def machines() -> Iterator[list[Machine]]:
    try:
        with several_machines(4) as four:
            yield four
    except NotAllowed as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Run:
    return train_on(1, {"alone": WORDS}, tmp_path_factory.mktemp("alone"), TAGGING)["alone"]


@pytest.fixture
def begin(tmp_path, machines) -> Iterator:
    """Return a function that begins a job, whose processes end with the test."""
    jobs = []

    def begin(endpoint: str, **settings) -> ElasticJob:
        words = (f"recipe={TAGGING}", *WORDS)
        jobs.append(ElasticJob(tmp_path, endpoint, words, conf=QUICK, python=warm_python(), **settings))
        return jobs[-1]

    yield begin
    for machine in machines:
        machine.mend()
    for job in jobs:
        job.end()


def struck(job: ElasticJob, what, world_size: int) -> Resumption:
    """Let training take some steps, do something, and return how it goes on with so many processes."""
    job.wait_for_step(job.step + 3)
    began = time.monotonic()
    what()
    return job.wait_for_resumption(began, world_size)


def finish(job: ElasticJob, *agents: Agent) -> None:
    """Let training run to its end."""
    job.brake.unlink()
    assert job.wait_for_end(*agents) == [0] * len(agents), job.words_of_all()


def assert_as_undisturbed(job: ElasticJob, undisturbed: Run, *world_sizes: int) -> None:
    """Float64: what the order of additions makes is 1e-12, and a single wrong sample does not hide."""
    run, found = Run(job.output_dir), audit(job.output_dir)
    assert found.problems == [] and found.steps == 400
    assert [start["world_size"] for start in found.starts] == list(world_sizes), job.words_of_all()
    for metric in ("train/loss", "train/grad_norm", "train/lr", "eval/loss"):
        assert run.logged(metric) == pytest.approx(undisturbed.logged(metric), rel=1e-9), metric


def test_a_job_outlives_each_of_its_machines(machines, begin, undisturbed, tmp_path):
    """They meet in a folder. machineA, the main one, has no power; so nobody hears that its connections are closed."""
    one, two, three, _ = machines
    job = begin(str(tmp_path / "meeting"), nodes="1:3")
    first = job.start(one)
    job.wait_for_step(1)
    job.start(two)
    assert struck(job, lambda: None, 2).lost_steps == 0
    killed = struck(job, two.kill, 1)
    assert killed.lost_steps <= 5
    third = job.start(three)
    assert struck(job, lambda: None, 2).lost_steps == 0
    struck(job, one.power_off, 1)
    struck(job, third.kill_worker, 1)  # counts as a failure; its launcher starts another
    finish(job, third)
    assert_as_undisturbed(job, undisturbed, 1, 2, 1, 2, 1, 1)
    assert re.search(r"hftune: Round 2: 1 machine, machineA \(10\.77\.0\.1\)\. Lost machineB \(10\.77\.0\.2\)", first.said)
    assert re.search(
        r"Round 2, 1 process on 1 machine: going on from step \d+ of 400 .*, from .*/checkpoints/step_", first.said
    )


def test_a_job_goes_on_without_a_machine_that_is_cut_off_hangs_or_leaves(machines, begin, undisturbed):
    """They meet at machineD, which stays. The cut machine still sees the disk; both it and the one that hangs come back."""
    one, two, three, stays = machines
    job = begin(f"{stays.address}:{PORT}", nodes="2:3")
    job.run(stays, "-m", "hftune.cli", "meeting", str(PORT))
    agents = [job.start(machine) for machine in (one, two, three)]
    job.wait_for_step(1)
    assert job.seen[0].values["world_size"] == 3, job.words_of_all()
    other, another = job.start(stays, "train.lr=0.5"), job.start(stays, f"output_dir={job.output_dir}-2")
    assert job.wait_for_end(other, another) == [2, 2], other.said + another.said
    assert "train.lr 0.5 instead of 0.01" in other.said and "Traceback" not in other.said
    assert "output_dir" in another.said and "--rdzv-id" in another.said and "Traceback" not in another.said

    assert struck(job, one.cut, 2).lost_steps <= 5
    assert struck(job, one.mend, 3).lost_steps == 0
    assert struck(job, lambda: two.signal(signal.SIGSTOP), 2).lost_steps <= 5
    assert struck(job, lambda: two.signal(signal.SIGCONT), 3).lost_steps == 0
    assert struck(job, lambda: agents[2].process.send_signal(signal.SIGTERM), 2).lost_steps == 0
    finish(job, *agents[:2])
    assert_as_undisturbed(job, undisturbed, 3, 2, 3, 2, 3, 2)
    assert "has left the job after SIGTERM" in agents[2].said and "Traceback" not in agents[2].said


def test_accelerate_launch_is_told_the_least_number_of_machines(machines, begin, undisturbed):
    one, two, _, stays = machines
    job = begin(f"{stays.address}:{PORT}")
    job.run(stays, "-m", "hftune.cli", "meeting", str(PORT))
    launch = (
        *("-m", "accelerate.commands.launch", "--config_file", CONFIG, "--num_machines", "2", "--num_processes", "2"),
        *("--rdzv_conf", f"min_machines=1,{QUICK}", "--main_process_ip", stays.address, "--main_process_port", str(PORT)),
    )
    first = job.run(one, *launch, *job.training)
    job.wait_for_step(1)
    second = job.run(two, *launch, *job.training)
    assert struck(job, lambda: None, 2).lost_steps == 0
    assert struck(job, lambda: second.process.send_signal(signal.SIGTERM), 1).lost_steps == 0
    finish(job, first)
    assert_as_undisturbed(job, undisturbed, 1, 2, 1)


FOR_EVER = "1000"


def has_begun(job: ElasticJob, first: Agent, number: int) -> None:
    """Wait until the machines have met for a round, whose processes then start."""
    job.wait_for_words(first, rf"Round {number}: \d")


@pytest.mark.parametrize("deed", [signal.SIGTERM, signal.SIGKILL])
def test_a_newcomer_that_leaves_before_it_has_joined_costs_a_restart(machines, begin, undisturbed, tmp_path, deed):
    one, two, three, _ = machines
    job = begin(str(tmp_path / "meeting"), nodes="2:3")
    agents = [job.start(one), job.start(two)]
    job.wait_for_step(1)
    newcomer = job.start(three, SLOW_WITHIN=FOR_EVER)
    has_begun(job, agents[0], 1)
    time.sleep(2)
    began = time.monotonic()
    if deed is signal.SIGKILL:
        three.kill()
    else:
        newcomer.process.send_signal(deed)
    assert job.wait_for_resumption(began, 2, timeout_s=30).lost_steps == 0
    finish(job, *agents)
    assert_as_undisturbed(job, undisturbed, 2, 2)


@pytest.mark.parametrize("event", ["another comes", "the first one leaves"])
def test_a_change_while_a_newcomer_starts_begins_another_round(machines, begin, undisturbed, tmp_path, event):
    """The first machine serves the store in which the others wait."""
    job = begin(str(tmp_path / "meeting"), nodes="2:4")
    one, two = job.start(machines[0]), job.start(machines[1])
    job.wait_for_step(1)
    three = job.start(machines[2], SLOW_WITHIN="6")
    first = one if "machineA" in job.wait_for_words(one, r"Round 0: .*").split(",")[1] else two
    has_begun(job, first, 1)
    time.sleep(2)
    began = time.monotonic()
    if event == "another comes":
        agents, size = [one, two, three, job.start(machines[3])], 4
    else:
        first.process.send_signal(signal.SIGTERM)
        agents, size = [agent for agent in (one, two, three) if agent is not first], 2
    assert job.wait_for_resumption(began, size, timeout_s=60).lost_steps == 0
    finish(job, *agents)
    if event == "another comes":  # with the checkpoint, or the rhythm, of the round with the third one, or instead of it
        assert audit(job.output_dir).problems == []
    else:
        assert_as_undisturbed(job, undisturbed, 2, 2)


def test_a_newcomer_prepares_before_it_asks_and_holds_nobody_up(machines, begin, undisturbed, tmp_path):
    one, two, three, _ = machines
    job = begin(str(tmp_path / "meeting"), nodes="1:3")
    first = job.start(one)
    job.wait_for_step(1)
    sick, slow = job.start(two, SLOW_BEFORE=FOR_EVER), job.start(three, SLOW_BEFORE="5")
    job.wait_for_words(slow, "prepares data and model")
    began, step = time.monotonic(), job.step
    assert job.wait_for_resumption(began, 2).pause_s < 20
    before = [line for line in job.seen if line.is_step and began < line.at < began + 5]
    assert len(before) > 10 and max(later.at - line.at for line, later in pairwise(before)) < 2, step
    sick.process.send_signal(signal.SIGTERM)
    assert job.wait_for_end(sick, timeout_s=10) != [0]
    ended = time.monotonic()
    while two.processes:  # what the ended one had started hears of it through closed pipes
        assert time.monotonic() - ended < 10
    finish(job, first, slow)
    assert_as_undisturbed(job, undisturbed, 1, 2)

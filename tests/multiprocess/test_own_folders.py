"""Machines that come and go without a common file system: whoever becomes the main one has the run."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from hftune.checkpoints.checkpointer import steps
from hftune.replay.audit import audit
from tests.multiprocess.test_elastic import TAGGING, WORDS
from tests.support.elastic import PORT, Agent, ElasticJob
from tests.support.machines import Machine, NotAllowed, several_machines
from tests.support.runs import Run, train_on, warm_python


@pytest.fixture
def machines() -> Iterator[list[Machine]]:
    try:
        with several_machines(4) as four:
            yield four
    except NotAllowed as error:
        pytest.skip(str(error))


def names(folder: Path) -> set[str]:
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()} - {".lock"}


def test_who_becomes_the_main_machine_has_the_run_and_ends_it_as_without(machines, tmp_path):
    """A leaves by word, and B has its copy. C comes, and B has no power. A comes back with an older state than C's."""
    reference = train_on(1, {"alone": WORDS}, tmp_path, TAGGING)["alone"]
    *workers, stays = machines
    words, folders = (
        (f"recipe={TAGGING}", *WORDS, "checkpoint.keep=1"),
        {machine.name: tmp_path / machine.name for machine in workers},
    )
    for folder in folders.values():
        folder.mkdir()
    conf, python = "last_call=1,join_timeout=60", warm_python()
    job = ElasticJob(tmp_path, f"{stays.address}:{PORT}", words, conf=conf, python=python, homes=folders)

    def start(machine: Machine) -> Agent:
        return job.start(machine, "output_dir=out")

    def newest(machine: Machine) -> int:
        return max(steps(folders[machine.name] / "out/checkpoints"), default=0)

    def goes_on(first: Machine, copy: Machine) -> None:
        """Wait for a checkpoint of the present round that is on both machines."""
        before = newest(first)
        job.wait_for(lambda: newest(copy) >= before + 8, f"step {before + 8} on {copy.name}")

    try:
        job.run(stays, "-m", "hftune.cli", "meeting", str(PORT))
        first = start(workers[0])
        goes_on(workers[0], workers[0])
        second = start(workers[1])
        job.wait_for_words(first, "machineB keeps a copy of output_dir")
        goes_on(workers[0], workers[1])
        first.process.send_signal(signal.SIGTERM)
        job.wait_for_words(second, r"Round 2: 1 machine, machineB")
        job.wait_for_words(second, r"Round 2, .* going on from step \d+ .* No step is lost\.")
        third = start(workers[2])
        job.wait_for_words(third, r"Round 3: 2 machines, machineB .*, machineC")
        job.wait_for_words(second, "machineC keeps a copy")
        goes_on(workers[1], workers[2])
        workers[1].power_off()
        job.wait_for_words(third, r"Round 4: 1 machine, machineC .* Lost machineB")
        job.wait_for_words(third, r"Round 4, 1 process on 1 machine: going on from step \d+")
        again = start(workers[0])  # with an older state
        job.wait_for_words(third, r"Round 5: 2 machines, machineC .*, machineA")
        job.brake.unlink()
        assert job.wait_for_end(third, again) == [0, 0], job.words_of_all()
    finally:
        job.end()
    run, copy = folders["machineC"] / "out", folders["machineA"] / "out"
    found = audit(run)
    assert not found.problems and found.steps == 400
    assert [start["world_size"] for start in found.starts] == [1, 2, 1, 2, 1, 2], job.words_of_all()
    for metric in ("train/loss", "train/lr", "eval/loss"):
        assert Run(run).logged(metric) == pytest.approx(reference.logged(metric), rel=1e-9), metric
    assert names(copy) == names(run) and not audit(copy).problems
    assert (copy / "result.json").read_bytes() == (run / "result.json").read_bytes()
    assert not any("Traceback" in agent.said for agent in (first, third, again))

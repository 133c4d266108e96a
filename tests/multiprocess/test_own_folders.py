"""Machines that come and go without a common file system: whoever becomes the main one has the run."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from hftune.checkpoints.checkpointer import steps
from hftune.replay.audit import audit
from tests.multiprocess.test_elastic import TAGGING, WORDS
from tests.support.elastic import PORT, Agent, ElasticJob
from tests.support.machines import Machine, NotAllowed, several_machines
from tests.support.runs import Run, train_on, warm_python


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> Run:
    return train_on(1, {"alone": WORDS}, tmp_path_factory.mktemp("alone"), TAGGING)["alone"]


class OwnFolders(ElasticJob):
    """A job whose machines have nothing in common, and meet at one that does not train."""

    def __init__(self, folder: Path, machines: list[Machine], *words: str):
        *workers, stays = machines
        self.names = {machine.name: folder / machine.name for machine in workers}
        for path in self.names.values():
            path.mkdir()
        words = (f"recipe={TAGGING}", *WORDS, "checkpoint.keep=1", *words)
        super().__init__(
            folder, f"{stays.address}:{PORT}", words, conf="last_call=1,join_timeout=60", python=warm_python(), homes=self.names
        )
        self.run(stays, "-m", "hftune.cli", "meeting", str(PORT))

    def come(self, machine: Machine) -> Agent:
        return self.start(machine, "output_dir=out")

    def out(self, machine: Machine) -> Path:
        return self.names[machine.name] / "out"

    def newest(self, machine: Machine) -> int:
        return max(steps(self.out(machine) / "checkpoints"), default=0)

    def goes_on(self, first: Machine, copy: Machine) -> None:
        """Wait for a checkpoint of the present round that is on both machines."""
        before = self.newest(first)
        self.wait_for(lambda: self.newest(copy) >= before + 8, f"step {before + 8} on {copy.name}")


@pytest.fixture
def begin(tmp_path) -> Iterator:
    """Return a function that makes a job of three machines."""
    jobs = []

    def begin(*words: str) -> tuple[OwnFolders, list[Machine]]:
        jobs.append(OwnFolders(tmp_path, four, *words))
        return jobs[0], four[:3]

    try:
        with several_machines(4) as four:
            yield begin
            for job in jobs:
                job.end()
    except NotAllowed as error:
        pytest.skip(str(error))


def names(folder: Path) -> set[str]:
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()} - {".lock"}


def assert_as_alone(run: Path, copy: Path, reference: Run, *world_sizes: int) -> None:
    """The copy has the main machine's bits. Against one process, the order of additions makes 1e-12 in float64."""
    found = audit(run)
    assert not found.problems and found.steps == 400
    assert [start["world_size"] for start in found.starts] == [*world_sizes]
    for metric in ("train/loss", "train/lr", "eval/loss"):
        assert Run(run).logged(metric) == pytest.approx(reference.logged(metric), rel=1e-9), metric
    best = reference.result["best"]
    assert Run(run).result["best"] == best | {"value": pytest.approx(best["value"], rel=1e-9)}
    for name in ("model/model.safetensors", "model_last/model.safetensors"):
        ours, alone = load_file(run / name), load_file(reference.folder / name)
        assert ours.keys() == alone.keys()
        assert all((ours[key] - alone[key]).abs().max() < 1e-9 * alone[key].abs().max() for key in alone), name
        assert (copy / name).read_bytes() == (run / name).read_bytes()
    assert names(copy) == names(run) and not audit(copy).problems
    assert (copy / "result.json").read_bytes() == (run / "result.json").read_bytes()


def test_who_becomes_the_main_machine_has_the_run_and_ends_it_as_without(begin, reference):
    """A leaves by word, and B has its copy. C comes, and B has no power. A comes back with an older state than C's."""
    job, (a, b, c) = begin()
    first = job.come(a)
    job.goes_on(a, a)
    second = job.come(b)
    job.wait_for_words(first, "machineB keeps a copy of output_dir")
    job.goes_on(a, b)
    first.process.send_signal(signal.SIGTERM)
    job.wait_for_words(second, r"Round 2: 1 machine, machineB")
    job.wait_for_words(second, r"Round 2, .* going on from step \d+ .* No step is lost\.")
    third = job.come(c)
    job.wait_for_words(third, r"Round 3: 2 machines, machineB .*, machineC")
    job.wait_for_words(second, "machineC keeps a copy")
    job.goes_on(b, c)
    b.power_off()
    job.wait_for_words(third, r"Round 4: 1 machine, machineC .* Lost machineB")
    job.wait_for_words(third, r"Round 4, 1 process on 1 machine: going on from step \d+")
    again = job.come(a)  # with an older state
    job.wait_for_words(third, r"Round 5: 2 machines, machineC .*, machineA")
    job.brake.unlink()
    assert job.wait_for_end(third, again) == [0, 0], job.words_of_all()
    assert_as_alone(job.out(c), job.out(a), reference, 1, 2, 1, 2, 1, 2)
    assert not any("Traceback" in agent.said for agent in (first, third, again))


def test_a_main_machine_that_leaves_before_its_first_checkpoint_hands_the_run_on(begin, reference):
    """One of the two others gets the only copy, while both wait for the one that leaves."""
    job, (a, b, c) = begin("checkpoint.every=1000")
    agents = [job.come(machine) for machine in (a, b, c)]
    joined = job.wait_for_words(agents[0], r"Round \d+: 3 machines, (machine.)")
    leaves = agents.pop("ABC".index(joined[-1]))
    job.wait_for_words(leaves, r"step 5/400")
    leaves.process.send_signal(signal.SIGTERM)
    kept = job.wait_for_words(leaves, r"common file system: (machine.) keeps a copy").split(" keeps")[0][-8:]
    machines = {agent.machine.name: agent.machine for agent in agents}
    first = next(agent for agent in agents if agent.machine.name == kept)
    job.wait_for_words(first, rf"Round \d+: 2 machines, {kept}")
    job.wait_for_words(first, r"going on from step \d+ .* No step is lost\.")
    job.brake.unlink()
    assert job.wait_for_end(*agents) == [0, 0], job.words_of_all()
    copy = next(machine for name, machine in machines.items() if name != kept)
    sizes = [start["world_size"] for start in audit(job.out(first.machine)).starts]
    assert sizes[-2:] == [3, 2] and sizes == [*sorted(sizes[:-1]), 2]
    assert_as_alone(job.out(first.machine), job.out(copy), reference, *sizes)

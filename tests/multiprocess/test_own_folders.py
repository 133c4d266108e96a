"""Machines that come and go without a common file system: whoever becomes the main one has the run."""

import json
import signal
from pathlib import Path

import pytest

from hftune.checkpoints.checkpointer import steps
from hftune.tracking.ledger import audit
from tests.support.agents import Agents
from tests.support.runs import Group, Run, train_on

SCRIPT = str(Path(__file__).parents[1] / "support" / "own_folders.py")
DIGITS = (
    *("task.dataset=tests.support.tasks:few_digits", "train.epochs=1", "train.log_every=1", "train.batch_size=16"),
    "train.micro_batch_size=8",
    *("checkpoint.every=4", "checkpoint.keep=1", "eval.every=6"),
)


@pytest.fixture(scope="module")
def story(tmp_path_factory) -> tuple[Path, list[list[int]]]:
    """Round 0: a and b, a leaves. Round 1: b and c, both die. Round 2: d, which has nothing, and c go on to the end."""
    folder = tmp_path_factory.mktemp("machines")

    def job(number: int, deed: str, machines: str) -> list:
        return [SCRIPT, [str(number), deed, ",".join(str(folder / name) for name in machines.split(",")), *DIGITS], None, {}]

    log, found = folder / "log", []
    found.append(Group(2, [job(0, "go", "e,f"), job(0, "leave-3", "a,b"), job(1, "die-12-8", "b,c")], log).wait())
    found.append(steps(folder / "a/out/checkpoints"))
    found.append(Group(2, [job(2, "go", "d,c")], log).wait())
    print(log.read_text())
    return folder, found


def test_who_becomes_the_main_machine_has_the_run_and_ends_it_bit_by_bit_as_without(story):
    folder, (killed, left, ended) = story
    assert killed == [-signal.SIGKILL] * 2 and ended == [0, 0] and left == [3]
    run, reference = Run(folder / "d/out"), Run(folder / "e/out")
    found = audit(run.folder)
    assert not found.problems and [start["after_step"] for start in found.starts] == [0, 3, 8]
    assert run.logged("train/loss") == reference.logged("train/loss")
    assert run.result["best"] == reference.result["best"]
    for name in ("model", "model_last"):
        assert (run.folder / name / "model.safetensors").read_bytes() == (
            reference.folder / name / "model.safetensors"
        ).read_bytes()


def test_the_copy_has_what_the_main_machine_has(story):
    folder, _ = story
    main, copy = folder / "d/out", folder / "c/out"

    def names(path: Path) -> set[str]:
        return {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()} - {".lock"}

    assert names(main) == names(copy)
    assert json.loads((copy / "result.json").read_text()) == json.loads((main / "result.json").read_text())
    assert not audit(copy).problems


def test_processes_that_live_on_have_the_copy_when_the_main_machine_is_lost(tmp_path):
    words = (*DIGITS, "train.epochs=14", "train.lr=1e-5", "checkpoint.every=20", "eval.every=100")
    agents = Agents(4, ("recipe=mnist_demo", *words, "output_dir=out"), tmp_path, OWN_FOLDERS="1")
    folders = [agent.path / "out" for agent in agents.folders]

    def wait_for_copy(of: int, step: int) -> None:
        agents.wait_for(lambda: steps(folders[of] / "checkpoints")[-1:] >= [step], f"copy of step {step} on machine {of}")

    agents.meet(0, 1, 2)
    wait_for_copy(1, 40)
    agents.lose(0, signal.SIGKILL)
    wait_for_copy(2, 80)
    agents.lose(1, signal.SIGKILL)
    wait_for_copy(2, 120)
    agents.take_in(3)
    agents.wait_for(lambda: all((folders[number] / "result.json").is_file() for number in (2, 3)), "end")
    agents.group.kill()
    words_said = agents.log.read_text()
    assert words_said.count("Steps that only the lost machine had are computed again.") == 2, words_said
    run, alone = Run(folders[2]), train_on(1, {"alone": words}, tmp_path, "mnist_demo")["alone"]
    found = audit(run.folder)
    assert not found.problems and [start["world_size"] for start in found.starts] == [3, 2, 1, 2]
    assert run.logged("train/loss") == pytest.approx(alone.logged("train/loss"), rel=1e-5)
    assert audit(folders[3]).end == found.end

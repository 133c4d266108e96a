"""Machines that come and go without a common file system: whoever becomes the main one has the run."""

import json
import signal
from pathlib import Path

import pytest

from hftune.checkpoints.checkpointer import steps
from hftune.replay.audit import audit
from tests.support.runs import Group, Run

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
    print(said := log.read_text())
    assert said.count("Steps that only the lost machine had are computed again.") == 1
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

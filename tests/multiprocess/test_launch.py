"""`hftune.launch`: what its caller gets where training fails or is interrupted. That it trains the same is in test_routes.py."""

import os
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from hftune import ConfigError, DataError, Interrupted, Recipe, TrainingError, launch
from hftune.cli import main
from hftune.replay.audit import audit
from tests.support.runs import warm_python
from tests.support.tasks import Faulty

FAULTY = Path(__file__).parents[1] / "support" / "faulty.yaml"


@pytest.fixture(autouse=True)
def somewhere_else(monkeypatch, tmp_path):
    """On CPUs, in a folder from which the tests' own tasks can be found through sys.path alone."""
    monkeypatch.setattr(sys, "executable", warm_python())
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.chdir(tmp_path)


class Terminal:
    """What is shown; interrupts the program, as Ctrl-C does, when some words are shown for the first time."""

    def __init__(self, words):
        self.words, self.shown = words, ""

    def write(self, text):
        self.shown += text
        if self.words is not None and self.words in text:
            self.words = None
            os.kill(os.getpid(), signal.SIGINT)

    def flush(self):
        pass


def test_interrupted_launch_saves_and_the_next_one_goes_on_on_any_number_of_processes(monkeypatch, tmp_path):
    recipe = Recipe.load(FAULTY, "task.pause_s=0.1", "output_dir=out")
    monkeypatch.setattr(sys, "stdout", terminal := Terminal("step 4/16"))
    with pytest.raises(Interrupted) as caught:
        launch(recipe, num_processes=2)
    (checkpoint,) = (tmp_path / "out" / "checkpoints").iterdir()
    step = int(checkpoint.name.removeprefix("step_"))
    assert str(caught.value) == (
        f"SIGINT: stopped after step {step}. The same command resumes from out/checkpoints/{checkpoint.name}."
    )
    result = launch(recipe, num_processes=1)
    assert f"Resuming from step {step} of 16" in terminal.shown
    assert (result.steps, result.world_size, result.model_dir) == (16, 1, Path("out/model"))
    assert (audit("out").problems, audit("out").whole_epochs) == ([], 1)


def test_exception_of_a_task_comes_with_the_traceback_of_its_process(capsys):
    with pytest.raises(TrainingError) as caught:
        launch(Recipe.load(FAULTY, "task.fault=raise", "task.sample=17"), num_processes=2)
    head, *trace, last = str(caught.value).splitlines()
    assert head.startswith(f"[process 1 of 2 on host {socket.gethostname()}, step ") and last == "ValueError: bad sample 17"
    assert trace[-1].strip() == 'raise ValueError("bad sample 17")'
    shown = capsys.readouterr().out
    assert "step 1/16" in shown and "torch.distributed.elastic" not in shown


def test_own_errors_come_as_what_they_are():
    with pytest.raises(DataError) as caught:
        launch(Recipe.load(FAULTY, "task.fault=data error", "task.sample=17"), num_processes=2)
    assert str(caught.value) == "Sample 17 has no label."


def test_the_command_shows_the_message_of_a_process_once(capsys):
    """A ConfigError that the process finds itself; it is alone, without torchrun."""
    assert main(["train", "--processes", "1", f"recipe={FAULTY}", "train.mixed_precision=fp16"]) == 2
    shown = capsys.readouterr()
    assert shown.err == "hftune: train.mixed_precision=fp16 needs a GPU, and this runs on CPUs. Use bf16 or no.\n"
    assert "fp16" not in shown.out


def refused(recipe, num_processes):
    with pytest.raises(ConfigError) as caught:
        launch(recipe, num_processes)
    return str(caught.value)


def test_what_cannot_be_launched_is_refused_at_once(monkeypatch):
    recipe = Recipe.load(FAULTY)
    assert refused(recipe, 0) == "num_processes=0 must be at least 1."
    monkeypatch.delenv("ACCELERATE_USE_CPU")
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 2)
    assert refused(recipe, 3).startswith(
        "num_processes=3 exceeds the number of this machine's GPUs, 2: each process takes one."
    )
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert refused(recipe, 2).endswith("this is one of several that a launcher has started: call train(recipe).")


def test_task_of_a_notebook_cell_is_refused():
    @dataclass
    class Moons(Faulty):
        pass

    Moons.__module__, Moons.__qualname__ = "__main__", "Moons"
    said = refused(Recipe(task=Moons()), 2)
    assert said.startswith("task.type=__main__.Moons is defined in this notebook") and "moons.py, and import Moons" in said

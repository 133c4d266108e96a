"""`hftune.launch(recipe, num_processes=(1, 2))`: processes that are killed are replaced, and the run is the same."""

import re
import sys
from pathlib import Path

import pytest

from hftune import Interrupted, Recipe, launch
from hftune.replay.audit import audit
from tests.multiprocess.test_launch import Terminal
from tests.support.runs import Run, train_on, warm_python

FAULTY = Path(__file__).parents[1] / "support" / "faulty.yaml"


def test_a_killed_process_is_replaced_and_an_interruption_still_saves(monkeypatch, tmp_path):
    """The main process of two is killed in the first round; the second one is interrupted; then training goes on to its end."""
    monkeypatch.setattr(sys, "executable", warm_python())
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdout", terminal := Terminal("step 8/16 "))
    monkeypatch.setattr(sys, "stderr", errors := Terminal(None))
    words = ("task.fault=kill", "task.rank=0", "task.sample=27", "task.pause_s=0.1", "checkpoint.every=1", "output_dir=out")
    with pytest.raises(Interrupted):
        launch(Recipe.load(FAULTY, *words), num_processes=(1, 2))
    said = re.search(
        r"hftune: Process 0 \(pid \d+\) was killed by SIGKILL after step (\d+)\. "
        r"Round 1: 2 processes\.\nhftune: SIGINT: stopped after step \d+\..*\n$",
        errors.shown,
    )
    assert said, errors.shown
    assert re.search(r"Round 1, 2 processes on 1 machine: going on from step \d+ of 16 .*, from \S+step_", terminal.shown)
    result = launch(Recipe.load(FAULTY, *words), num_processes=(1, 2))
    assert (result.steps, result.world_size) == (16, 2)
    record = audit("out")
    assert (record.problems, record.whole_epochs) == ([], 1)
    assert [start["world_size"] for start in record.starts] == [2, 2, 2]
    plain = train_on(1, {"plain": ()}, tmp_path, recipe=str(FAULTY))["plain"]
    assert Run(tmp_path / "out").logged("train/loss") == pytest.approx(plain.logged("train/loss"), rel=1e-5)

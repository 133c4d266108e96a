"""One example for each extension point: the recipe names code that lies beside it by a dotted path."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from hftune import Recipe, train
from tests.support.runs import Run

EXAMPLES = Path(__file__).parents[2] / "examples"
SHORT = ("train.epochs=4", "eval.every=2 epochs", "train.log_every=1", "checkpoint.every=never")


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """Returns a function that trains one of the examples, as a user would from its folder."""
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    monkeypatch.chdir(tmp_path / "examples" / "extending")
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = {*sys.modules}
    monkeypatch.delitem(sys.modules, "moons", raising=False)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")

    def run(name: str, *overrides: str) -> Run:
        return Run(train(Recipe.load(f"{name}.yaml", *SHORT, *overrides)).output_dir)

    yield run
    for name in {*sys.modules} - before:  # the same modules lie in other folders in other tests
        if str(tmp_path) in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]


def test_an_optimizer_of_ones_own_steps_by_the_sign_of_its_momentum(trained):
    run = trained("lion")
    assert run.result["metrics"]["loss"] < run.logged("train/loss")[0]


def test_a_schedule_of_ones_own_is_what_the_log_shows(trained):
    rates = trained("restarts", "train.epochs=12").logged("train/lr")
    assert rates[0] == 1e-2 and rates[100] == 1e-2 and rates[99] < 1e-5  # 500 samples in batches of 50: 10 steps an epoch


def test_a_metric_of_ones_own_picks_the_best_model(trained):
    run = trained("balanced")
    assert run.result["best"]["metric"] == "balanced_accuracy"
    assert run.result["best"]["value"] == max(run.logged("eval/balanced_accuracy"))


def test_a_tracker_of_ones_own_gets_what_metrics_jsonl_gets(trained):
    run = trained("csv_tracker")
    rows = [line.split(",") for line in (run.folder / "metrics.csv").read_text().splitlines()]
    assert rows[0] == ["step", "name", "value"]
    assert [float(value) for _, name, value in rows[1:] if name == "train/loss"] == run.logged("train/loss")


def test_a_network_of_ones_own_restores_images(trained):
    few = ("task.max_train_samples=16", "task.max_eval_samples=4", "train.epochs=1")
    run = trained("inpainter", *few)
    assert run.logged("eval/l1") and json.loads((run.folder / "model" / "config.json").read_text())["network_args"] == {
        "width": 8
    }

"""Whichever way a recipe is started, it trains the same and leaves the same behind."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hftune import Recipe, launch
from tests.support.runs import Run, environment, warm_python

ROOT = Path(__file__).parents[2]
WORDS = ("task.dataset=tests.support.tasks:few_digits", "train.epochs=1", "train.log_every=1", "train.batch_size=48")
"""Digits, whose network needs no transformers: importing it takes half of the time of a process."""
ROUTES = {
    "python": ["-m", "hftune.run"],
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "hftune.run"],
    "accelerate": ["-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/2cpu.yaml", "-m", "hftune.run"],
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder, found = tmp_path_factory.mktemp("routes"), {}
    for name, route in ROUTES.items():
        python = sys.executable if name == "python" else warm_python()  # one from a cold start; see also test_launched.py
        command = [python, *route, "recipe=mnist_demo", *WORDS, f"output_dir={folder / name}"]
        done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stdout + done.stderr
        found[name] = Run(folder / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        launch(Recipe.load("mnist_demo", *WORDS, f"output_dir={folder / 'launch'}"), num_processes=2)
    found["launch"] = Run(folder / "launch")
    return found


def test_each_route_starts_as_many_processes_as_asked(runs):
    sizes = {name: run.result["world_size"] for name, run in runs.items()}
    assert sizes == {"python": 1, "torchrun": 2, "accelerate": 2, "launch": 2}


def test_two_processes_train_bit_equal_by_any_route_and_like_one(runs):
    expected = runs["torchrun"]
    losses = expected.logged("train/loss")
    assert len(losses) == 7
    weights = load_file(expected.folder / "model" / "model.safetensors")
    for name in ("accelerate", "launch"):
        assert runs[name].logged("train/loss") == losses
        assert runs[name].predictions == expected.predictions
        other = load_file(runs[name].folder / "model" / "model.safetensors")
        assert other.keys() == weights.keys() and all(torch.equal(other[key], weights[key]) for key in weights)
    assert runs["python"].logged("train/loss") == pytest.approx(losses, rel=1e-5)
    assert [row["prediction"] for row in runs["python"].predictions] == [row["prediction"] for row in expected.predictions]


def test_each_route_leaves_the_same_files(runs):
    files = {name: {str(path.relative_to(run.folder)) for path in run.folder.rglob("*")} for name, run in runs.items()}
    assert {"result.json", "model/model.safetensors", "predictions.jsonl", "ledger.jsonl"} <= files["python"]
    for name in runs:
        assert files[name] == files["python"]

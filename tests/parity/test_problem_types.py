"""Several labels, numbers, pairs with weights, and tags keep the promises of a single class, and equal transformers' Trainer."""

import pytest
import torch

from hftune import Recipe, train
from hftune.build import load_datasets
from tests.parity.test_trainer import OVERRIDES
from tests.support.runs import SMALL, Run, train_on
from tests.support.trainer import losses_of_trainer, planned_batches

JOBS = {
    "labels": ("recipe=multi_label_demo", "task.class_weights=balanced", "task.focal_gamma=2"),
    "numbers": ("recipe=regression_demo",),
    "pairs": ("recipe=pairs_demo", "task.class_weights={fits: 3}", "task.label_smoothing=0.1"),
    "tags": ("recipe=token_classification_demo",),
}
ON_FOUR = ("pairs", "tags")
"""Weights of samples, and several items a sample: what a mean over four processes may get wrong."""
STEPS = 7


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    jobs = {name: (*words, *SMALL, "train.micro_batch_size=4", "train.epochs=1") for name, words in JOBS.items()}
    again = (*jobs["labels"], "checkpoint.every=2", f"output_dir={folder}/labels again")
    two = train_on(2, {**jobs, "stopped": again, "resumed": again}, folder, stops={"stopped": (3, 1)})
    one, four = train_on(1, jobs, folder), train_on(4, {name: jobs[name] for name in ON_FOUR}, folder)
    return {(name, size): run for size, found in ((1, one), (2, two), (4, four)) for name, run in found.items()}


@pytest.mark.parametrize(("name", "size"), [*((name, 2) for name in JOBS), *((name, 4) for name in ON_FOUR)])
def test_losses_and_metrics_do_not_depend_on_processes_with_dropout(runs, name, size):
    expected, run = runs[name, 1], runs[name, size]
    assert len(expected.logged("train/loss")) == STEPS
    for metric in ("train/loss", "train/grad_norm", "eval/loss"):
        assert run.logged(metric) == pytest.approx(expected.logged(metric), rel=1e-5)
    for metric, value in expected.result["metrics"].items():
        if isinstance(value, float):
            assert run.result["metrics"][metric] == pytest.approx(value, rel=1e-5)


def test_a_resumed_run_ends_with_the_same_bits(runs):
    """One is enough: the way of resuming is the same for all problems."""
    whole, resumed = runs["labels", 2], runs["resumed", 2]
    assert resumed.logged("train/loss") == whole.logged("train/loss")
    weights = [(run.folder / "model_last" / "model.safetensors").read_bytes() for run in (whole, resumed)]
    assert weights[0] == weights[1]


@pytest.mark.parametrize("name", ["multi_label_demo", "regression_demo", "pairs_demo", "token_classification_demo"])
def test_twenty_steps_equal_those_of_trainer(tmp_path, name):
    recipe = Recipe.load(name, *OVERRIDES, f"output_dir={tmp_path}/ours")
    ours = Run(train(recipe).output_dir).logged("train/loss")
    theirs = losses_of_trainer(recipe, tmp_path / "theirs", planned_batches(recipe, load_datasets(recipe)["train"]))
    assert len(ours) == 20 and torch.tensor(ours).std() > 0.005
    assert ours == pytest.approx(theirs, rel=1e-5)

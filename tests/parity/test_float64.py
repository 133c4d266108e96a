"""The same promise in float64 and with items that are tokens: what differs there is a mistake, not rounding."""

from pathlib import Path

import numpy as np
import pytest

from hftune import Recipe
from hftune.build import plan_batches
from tests.support.runs import train_on

RECIPE = str(Path(__file__).parents[1] / "support" / "tagging.yaml")
JOBS = {
    "micro1": ("train.micro_batch_size=1",),
    "micro3": (),
    "whole": ("train.micro_batch_size=12",),
    "tokens": ("train.micro_batch_size=null", "train.micro_batch_tokens=30"),
    "dropout": ("task.dropout=0.3",),
    "every4": ("train.log_every=4",),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return {(name, size): run for size in (1, 2, 4) for name, run in train_on(size, JOBS, folder, RECIPE).items()}


@pytest.mark.parametrize("world_size", (1, 2, 4))
@pytest.mark.parametrize("name", [name for name in JOBS if name not in ("dropout", "every4")])
def test_losses_and_gradient_norms_are_equal_to_rounding(runs, name, world_size):
    for metric in ("train/loss", "train/grad_norm", "eval/loss"):
        expected = runs["whole", 1].logged(metric)
        assert len(expected) == (15 if metric.startswith("train") else 3)
        assert runs[name, world_size].logged(metric) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("world_size", (2, 4))
def test_dropout_is_equal_to_rounding(runs, world_size):
    expected = runs["dropout", 1].logged("train/loss")
    assert expected != pytest.approx(runs["micro3", 1].logged("train/loss"), rel=1e-3)
    assert runs["dropout", world_size].logged("train/loss") == pytest.approx(expected, rel=1e-10)


def test_short_last_batch_is_not_overweighted(runs):
    # 50 samples in batches of 12 end with 2: on 4 processes two of them have nothing to do in that step.
    assert runs["micro3", 4].logged("train/loss")[4::5] == pytest.approx(runs["whole", 1].logged("train/loss")[4::5], rel=1e-10)


@pytest.mark.parametrize("world_size", (1, 2, 4))
def test_logged_loss_is_the_mean_over_the_items_of_all_steps_since_the_last_line(runs, world_size):
    recipe = Recipe.load(RECIPE)
    data = recipe.task.datasets()["train"]
    lengths, plan = recipe.task.lengths(data), plan_batches(recipe, data)
    items = [sum(lengths[micro.samples].sum() for micro in step) for epoch in range(3) for step in plan.epoch(epoch)]
    losses, run = runs["whole", 1].logged("train/loss"), runs["every4", world_size]
    spans = [(0, 1), (1, 4), (4, 8), (8, 12), (12, 15)]  # lines are of steps 1, 4, 8, 12 and the last
    means = [np.average(losses[start:stop], weights=items[start:stop]) for start, stop in spans]
    assert run.logged("train/loss") == pytest.approx(means, rel=1e-10)
    assert run.logged("train/loss_step") == pytest.approx([losses[stop - 1] for _, stop in spans], rel=1e-10)


def test_a_single_steps_mean_is_its_loss_to_the_last_bit(runs):
    assert runs["micro3", 1].logged("train/loss") == runs["micro3", 1].logged("train/loss_step")


def test_logged_loss_survives_an_interruption_between_two_lines(runs, tmp_path):
    jobs = {f"stopped-{step}": JOBS["every4"] for step in (1, 5, 10)}
    train_on(2, jobs, tmp_path, RECIPE, stops={name: (int(name[8:]), 1) for name in jobs})
    for run in train_on(2, jobs, tmp_path, RECIPE).values():
        assert run.logged("train/loss") == runs["every4", 2].logged("train/loss")

"""checkpoint.keep_every keeps some of the older checkpoints, so that no step is far from one."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from hftune import Recipe
from hftune.checkpoints.checkpointer import Checkpointer, steps
from hftune.config.sections import CheckpointConfig
from hftune.planning.plan import disk


def kept_after(last, config, every=500):
    """The steps that are kept after the last checkpoint, having been thinned out after each one."""
    kept = []
    for step in range(every, last + 1, every):
        kept = sorted(config.kept([*kept, step]))
    return kept


def test_the_newest_are_kept_and_by_default_nothing_else():
    assert kept_after(10_000, CheckpointConfig(keep=3)) == [9_000, 9_500, 10_000]


def test_one_in_so_many_steps_is_kept_for_good():
    config = CheckpointConfig(keep=2, keep_every=2_000)
    assert kept_after(9_500, config) == [2_000, 4_000, 6_000, 8_000, 9_000, 9_500]
    assert kept_after(9_380, config, every=938) == [2_814, 4_690, 6_566, 8_442, 9_380]  # ends of epochs, no multiples of it


@pytest.mark.parametrize("every", [1, 3, 500, 938])
def test_distances_double_with_age(every):
    config = CheckpointConfig(keep=2, keep_every="doubling")
    for count in (2, 5, 63, 64, 100, 777):
        kept = kept_after(count * every, config, every)
        assert {*kept} == config.kept(range(every, count * every + 1, every)), "Thinning out step by step loses nothing."
        assert len(kept) <= 2 + count.bit_length()
        ages = [count * every - step for step in [0, *kept]]
        assert all(older - newer <= 2 * (newer + every) for older, newer in pairwise(ages)), "Replaying a step is never far."


def test_checkpoints_on_disk_are_thinned_out_but_never_the_best(tmp_path):
    writer = Checkpointer(tmp_path, CheckpointConfig(keep=1, keep_every=4))
    for step in range(1, 12):
        writer.write(step, {"model": {"weight": torch.zeros(2)}}, {}, "recipe: a", 3, [])
    writer.wait()
    assert writer.failure is None and steps(tmp_path) == [3, 4, 8, 11]


@pytest.mark.parametrize(("kept", "count"), [("keep=2", 4), ("keep_every=20", 8), ("keep_every=doubling", 10), ("keep=99", 25)])
def test_a_plan_counts_them(kept, count):
    """Besides those that are kept, the best one and the one being written; for doubling, two more, as their number varies."""
    planned = SimpleNamespace(evaluations=[], checkpoints=[*range(4, 101, 4)])
    recipe, model = Recipe.load("yelp_demo", f"checkpoint.{kept}"), torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    assert disk(recipe, planned, model, optimizer).checkpoints == count
    evaluated = SimpleNamespace(evaluations=planned.checkpoints, checkpoints=[100])
    assert disk(recipe, evaluated, model, optimizer).checkpoints == count, (
        "Each evaluation may be the best so far, and be kept."
    )

"""The recipes keep the values of the articles that they replace; docs/articles.md lists where they do not."""

import pytest

from hftune import Recipe
from hftune.planning.plan import make_plan


@pytest.mark.parametrize(
    ("name", "expected"),
    {
        "yelp": {"batch_size": 128, "epochs": 3, "lr": 5e-5, "weight_decay": 0.01, "schedule": "linear", "clip_norm": None},
        "bigbird": {"batch_size": 80, "epochs": 10, "lr": 1e-5, "weight_decay": 1e-2, "schedule": "constant", "clip_norm": 2.0},
        "mnist": {"batch_size": 100, "epochs": 3, "lr": 1e-3, "momentum": 0.5, "schedule": "constant", "log_every": 100},
        "restoration": {"batch_size": 6, "epochs": 30, "lr": 1e-4, "betas": (0.9, 0.95), "min_lr": 1e-6, "schedule": "cosine"},
        "wikitext2": {"batch_size": 40, "epochs": 3, "lr": 5.0, "gamma": 0.95, "schedule": "step", "clip_norm": 0.5},
    }.items(),
)
def test_recipe_has_its_articles_optimization(name, expected):
    train = Recipe.load(name).train
    found = {key: getattr(train, key) for key in expected}
    assert found == expected, f"docs/articles.md says what differs from {name}'s article, and why"


def test_pipeline_command_of_the_tutorial_waits_no_more_than_the_tutorials_own():
    """The tutorial's 8 chunks on 2 stages idle 1/9 of the time; the recipe once had 2 micro-batches a pipeline, and 33 %."""
    words = ("task.dataset=hftune.data.demo:paragraphs", "task.model_config.hidden_size=32")
    sizes = ("task.model_config.intermediate_size=32", "task.model_config.num_hidden_layers=2")
    plan = make_plan(Recipe.load("wikitext2", *words, *sizes, "parallel.pipeline_stages=2"), num_processes=4)
    assert plan.pipeline.micro_batches >= 8
    assert plan.pipeline.idle_share <= 1 / 9

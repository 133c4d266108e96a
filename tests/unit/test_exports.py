"""What ``import hftune`` offers, and that a recipe can be made in Python without a file."""

import pytest

import hftune
from hftune import EvalConfig, Recipe, TrainConfig, train
from tests.support.tasks import Tagging


@pytest.mark.parametrize("name", hftune.__all__)
def test_each_public_name_can_be_imported_and_has_a_docstring(name):
    assert getattr(hftune, name).__name__ == name and getattr(hftune, name).__doc__


def count_rows(rows):
    """Return the number of rows."""
    return {"num_rows": len(rows)}


def test_a_recipe_made_in_python_trains(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    recipe = Recipe(
        task=Tagging(),
        train=TrainConfig(max_steps=2, batch_size=10, lr=1e-2),
        eval=EvalConfig(metrics=[f"{__name__}.count_rows"]),
        output_dir=str(tmp_path),
    )
    result = train(recipe)
    assert result.steps == 2 and result.metrics["num_rows"] == 23

"""Folders of runs to predict with, made without training."""

from __future__ import annotations

from pathlib import Path

from hftune import Recipe


def untrained(name: str, folder: Path, *overrides: str) -> Path:
    """Return the folder of a run whose model has learned nothing yet."""
    few = ("task.max_train_samples=100", "task.max_eval_samples=9")
    recipe = Recipe.load(name, *few, *overrides, f"output_dir={folder}")
    recipe.task.datasets()
    (folder / "model").mkdir(parents=True)
    recipe.task.save(recipe.task.build_model(), folder / "model")
    (folder / "recipe.yaml").write_text(recipe.to_yaml())
    return folder

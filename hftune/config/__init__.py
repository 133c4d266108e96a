"""Recipes: their sections and keys, how they are read and checked, and the files that ship with the package."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["AdapterConfig", "CheckpointConfig", "EvalConfig", "ParallelConfig", "Recipe", "TrackConfig", "TrainConfig"]

if TYPE_CHECKING:
    from hftune.config.recipe import Recipe
    from hftune.config.sections import AdapterConfig, CheckpointConfig, EvalConfig, ParallelConfig, TrackConfig, TrainConfig


def __getattr__(name: str) -> Any:
    """Import a name when it is first asked for (PEP 562): --help reads the sections alone."""
    if name not in __all__:
        raise AttributeError(f"module 'hftune.config' has no attribute {name!r}")
    from hftune.config import recipe

    return getattr(recipe, name)

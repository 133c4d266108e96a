"""hftune: fine-tuning whose mathematics does not depend on how many processes compute it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.3.0"
__all__ = [
    "ConfigError",
    "DataError",
    "Interrupted",
    "Recipe",
    "Task",
    "TrainResult",
    "TrainedModel",
    "TrainingError",
    "launch",
    "load_model",
    "train",
]

if TYPE_CHECKING:
    from hftune.checkpoints.output_dir import TrainResult
    from hftune.config import Recipe
    from hftune.errors import ConfigError, DataError, Interrupted, TrainingError
    from hftune.inference import TrainedModel, load_model
    from hftune.launchers.local import launch
    from hftune.task import Task
    from hftune.training import train

_HOME = {
    "ConfigError": "hftune.errors",
    "DataError": "hftune.errors",
    "Interrupted": "hftune.errors",
    "Recipe": "hftune.config.recipe",
    "Task": "hftune.task",
    "TrainResult": "hftune.checkpoints.output_dir",
    "TrainedModel": "hftune.inference",
    "TrainingError": "hftune.errors",
    "launch": "hftune.launchers.local",
    "load_model": "hftune.inference",
    "train": "hftune.training",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for (PEP 562): ``import hftune`` itself costs no torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'hftune' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value

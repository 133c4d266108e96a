"""hftune: fine-tuning whose mathematics does not depend on how many processes compute it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.3.0"
__all__ = [
    "BatchPlan",
    "Callback",
    "CheckpointConfig",
    "ConfigError",
    "DataError",
    "EvalConfig",
    "Interrupted",
    "ParallelConfig",
    "Recipe",
    "Task",
    "TrackConfig",
    "TrackerBackend",
    "TrainConfig",
    "TrainResult",
    "TrainedModel",
    "TrainingError",
    "batches",
    "evaluate",
    "launch",
    "load_model",
    "make_plan",
    "rows_file",
    "train",
]

if TYPE_CHECKING:
    from hftune.batch_plan import BatchPlan
    from hftune.callbacks import Callback
    from hftune.checkpoints.output_dir import TrainResult
    from hftune.config import CheckpointConfig, EvalConfig, ParallelConfig, Recipe, TrackConfig, TrainConfig
    from hftune.data.cells import rows_file
    from hftune.errors import ConfigError, DataError, Interrupted, TrainingError
    from hftune.inference import TrainedModel, load_model
    from hftune.launchers.local import launch
    from hftune.planning.plan import make_plan
    from hftune.reevaluation import evaluate
    from hftune.strategies.own_loop import batches
    from hftune.task import Task
    from hftune.tracking.backend import TrackerBackend
    from hftune.training import train

_HOME = {
    **dict.fromkeys(
        ("CheckpointConfig", "EvalConfig", "ParallelConfig", "TrackConfig", "TrainConfig"), "hftune.config.sections"
    ),
    **dict.fromkeys(("ConfigError", "DataError", "Interrupted", "TrainingError"), "hftune.errors"),
    "BatchPlan": "hftune.batch_plan",
    "Callback": "hftune.callbacks",
    "Recipe": "hftune.config.recipe",
    "Task": "hftune.task",
    "TrackerBackend": "hftune.tracking.backend",
    "TrainResult": "hftune.checkpoints.output_dir",
    "TrainedModel": "hftune.inference",
    "batches": "hftune.strategies.own_loop",
    "evaluate": "hftune.reevaluation",
    "launch": "hftune.launchers.local",
    "load_model": "hftune.inference",
    "make_plan": "hftune.planning.plan",
    "rows_file": "hftune.data.cells",
    "train": "hftune.training",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for (PEP 562): ``import hftune`` alone does not import torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'hftune' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value

"""Evaluates a finished model, or a checkpoint, on the processes of this job, as its own run did. Trains and writes nothing.

The scoring is evaluation.py, which the loop calls, too: the numbers are the run's own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hftune.build import build_model, choose_strategy, load_datasets
from hftune.checkpoints.checkpointer import BrokenCheckpoint, Checkpoint, open_checkpoint
from hftune.checkpoints.run_folder import check_checkpoint, check_model
from hftune.config import Recipe, TrackConfig
from hftune.distributed.process_info import ProcessInfo
from hftune.distributed.session import Session
from hftune.errors import ConfigError
from hftune.evaluation import evaluate as score
from hftune.inference import load_export
from hftune.optim import build_optimizer
from hftune.strategies.base import Strategy


@dataclass
class Score:
    """The outcome of an evaluation; the same on every process."""

    metrics: dict[str, Any]
    model: str
    """Folder of the model or the checkpoint."""
    num_samples: int
    world_size: int
    is_main: bool
    """Whether this is the main process, which prints and writes."""


def evaluate(recipe: Recipe, model: Path, checkpoint: Path | None = None, split: str = "eval") -> Score:
    """Evaluate on one of the recipe's splits. Every process of the job calls it with the same arguments.

    Args:
        model: folder of the finished model, on every node. Ignored if there is a checkpoint.
        checkpoint: folder of a checkpoint, on the main node. It is loaded as resuming would: data, model, then its weights.
        split: "eval" or "test".

    Raises:
        ConfigError: the recipe cannot be run here; or there is no such model, checkpoint or split, or it does not fit.
        DataError: the data cannot be evaluated on.
    """
    recipe = replace(recipe, track=TrackConfig())  # trackers are for training
    recipe.validate()
    with Session(recipe) as session:
        session.progress.stage("loading data and model")
        if checkpoint is None:
            check_model(model)
        saved = None if checkpoint is None else read_checkpoint(checkpoint)
        # A finished model first: it brings its tokenizer along, which would otherwise be trained again.
        built = load_export(recipe.task, model) if checkpoint is None else None
        datasets = load_datasets(recipe)
        if split not in datasets:
            raise ConfigError(f"--split {split}: this recipe's data has no such split. It has: {', '.join(datasets)}.")
        if built is None:
            built = build_model(recipe)
        elif recipe.train.compile:
            built.compile(dynamic=True)
        strategy = choose_strategy(session.join(), recipe, session.progress)
        digests = session.compare(strategy, datasets, {})
        strategy.prepare(built, build_optimizer(built, recipe))
        if checkpoint is not None:
            load_weights(strategy, checkpoint, saved, digests)
        session.progress.stage("the evaluation")
        config = recipe.eval
        evaluation = score(strategy, datasets[split], config.batch_size, recipe.train.num_workers, metrics=config.metrics)
    folder = str(model if checkpoint is None else checkpoint)
    return Score(evaluation.metrics, folder, len(datasets[split]), strategy.num_processes, strategy.is_main)


def read_checkpoint(path: Path) -> Checkpoint | None:
    """On the main process: verify and read a checkpoint, or raise ConfigError."""
    if not ProcessInfo.from_environment().is_main:
        return None
    check_checkpoint(path)
    try:
        return open_checkpoint(path)
    except BrokenCheckpoint as error:
        raise ConfigError(f"--checkpoint {path} is not a readable checkpoint: {error}.") from error


def load_weights(strategy: Strategy, path: Path, saved: Checkpoint | None, digests: dict[str, str]) -> None:
    """Give the model the weights of a checkpoint, which the main process has read. Collective.

    Raises:
        ConfigError: it belongs to a different model, or to different training data, which the model may have been built from.
    """
    trained_on = strategy.broadcast(saved and saved.progress["digests"]["train data"])
    if trained_on != digests["train data"]:
        raise ConfigError(f"--checkpoint {path} was trained on different training data. Give the recipe of its run.")
    try:
        strategy.load_state(None if saved is None else ({"model": saved.tensors["model"], "optimizer": {}}, {}))
    except ValueError as error:
        raise ConfigError(f"--checkpoint {path} belongs to a different model: {error}.") from error

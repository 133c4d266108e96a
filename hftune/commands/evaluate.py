"""Evaluates a finished model, or a checkpoint, on the processes there are, as its own run did. Trains and writes nothing.

What counts and adds up is evaluation.py, which the loop calls, too: the numbers are the run's own.
"""

from __future__ import annotations

import atexit
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hftune.checkpoints.checkpointer import BrokenCheckpoint, Checkpoint, open_checkpoint
from hftune.checkpoints.run_folder import check_checkpoint, check_model
from hftune.config import Recipe
from hftune.config.sections import TrackConfig
from hftune.distributed.accelerator import check_hardware, check_launcher, leave_group, start_accelerator
from hftune.distributed.consistency import EARLY_S, check_early, facts
from hftune.distributed.heartbeat import Heartbeat
from hftune.distributed.progress import Progress
from hftune.errors import ConfigError
from hftune.evaluation import evaluate
from hftune.inference import load_export
from hftune.optim import build_optimizer
from hftune.strategies.base import Strategy
from hftune.training import build_model, check_agreement, choose_strategy, load_datasets


@dataclass
class Score:
    """What an evaluation came to; the same on every process."""

    metrics: dict[str, Any]
    model: str
    """Folder of the model or the checkpoint."""
    num_samples: int
    world_size: int
    is_main: bool
    """Whether this process is the one that prints and writes."""


def score(recipe: Recipe, model: Path, checkpoint: Path | None = None, split: str = "eval") -> Score:
    """Evaluate on the recipe's evaluation data, or on its test data. Every process of the job calls it with the same arguments.

    Args:
        model: folder of the finished model, on every machine. Not looked at where there is a checkpoint.
        checkpoint: folder of a checkpoint, on the main machine. It is loaded as resuming would: data, model, then its weights.
        split: "eval" or "test".

    Raises:
        ConfigError: the recipe cannot be run here, there is no such model, checkpoint or split, or it does not fit.
        DataError: the data cannot be evaluated on.
    """
    recipe = replace(recipe, track=TrackConfig())  # dashboards are for training
    recipe.validate()
    progress = Progress()
    with Heartbeat(progress, recipe.train.dead_after_s, recipe.train.stall_after_s) as heartbeat:
        check_early(heartbeat.early_store(EARLY_S), heartbeat.here.rank, facts(recipe))
        check_launcher(recipe)
        check_hardware(recipe)
        progress.stage("loading data and model")
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
        progress.stage("joining the others")
        with heartbeat.waiting():
            accelerator = start_accelerator(recipe.train)
        heartbeat.join()
        atexit.register(leave_group)
        strategy = choose_strategy(accelerator, recipe, progress)
        digests = check_agreement(strategy, recipe, datasets)
        strategy.prepare(built, build_optimizer(built, recipe.train))
        if checkpoint is not None:
            take_over(strategy, checkpoint, saved, digests)
        progress.stage("the evaluation")
        found = evaluate(strategy, datasets[split], recipe.eval.batch_size, recipe.train.num_workers)
    where = str(model if checkpoint is None else checkpoint)
    return Score(found.metrics, where, len(datasets[split]), strategy.num_processes, strategy.is_main)


def read_checkpoint(path: Path) -> Checkpoint | None:
    """On the main process: verify and read a checkpoint, or raise ConfigError."""
    if int(os.environ.get("RANK", 0)) != 0:
        return None
    check_checkpoint(path)
    try:
        return open_checkpoint(path)
    except BrokenCheckpoint as error:
        raise ConfigError(f"--checkpoint {path} is no checkpoint that can be read: {error}.") from error


def take_over(strategy: Strategy, path: Path, saved: Checkpoint | None, digests: dict[str, str]) -> None:
    """Give the model the weights of a checkpoint, which the main process has read. Collective.

    Raises:
        ConfigError: it is of another model, or of other training data, which the model may have been built from.
    """
    trained_on = strategy.broadcast(saved and saved.progress["digests"]["train data"])
    if trained_on != digests["train data"]:
        raise ConfigError(f"--checkpoint {path} was trained on another train data. Give the recipe of its run.")
    try:
        strategy.load_state(saved and ({"model": saved.tensors["model"], "optimizer": {}}, {}))
    except ValueError as error:
        raise ConfigError(f"--checkpoint {path} is of another model: {error}.") from error

"""Evaluates a finished model, or a checkpoint, on the processes of this job, as its own run did. Trains nothing.

The scoring is evaluation.py, which the loop calls, too: the numbers are the run's own.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hftune.build import build_model, choose_strategy, load_datasets, load_reference, may_leave_weights
from hftune.checkpoints.checkpointer import BrokenCheckpoint, Checkpoint, open_checkpoint
from hftune.checkpoints.export import read_about
from hftune.checkpoints.output_dir import check_base, check_reference
from hftune.checkpoints.run_folder import check_checkpoint, check_model
from hftune.config import Recipe, TrackConfig
from hftune.config.sections import FORWARD
from hftune.distributed.accelerator import start_accelerator
from hftune.distributed.session import Session
from hftune.errors import ConfigError
from hftune.evaluation import Evaluation
from hftune.evaluation import evaluate as evaluate_split
from hftune.inference import load_for_all
from hftune.models.adapters import base_digest, has_adapter
from hftune.optim import build_optimizer
from hftune.settle import add_references, references_of_another, settle_head, unread_names
from hftune.strategies.averages import averages_itself
from hftune.strategies.base import Strategy
from hftune.strategies.compilation import compile_model
from hftune.strategies.sharding import SavedState


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
    step: int | None
    """Training step that the model comes from, on the main process."""
    evaluation: Evaluation = field(repr=False)
    """With the rows of all samples, on the main process."""
    notices: list[str] = field(default_factory=list, repr=False)
    """What a user should know, one sentence each."""


def evaluate(
    recipe: Recipe,
    model: str | Path,
    checkpoint: str | Path | None = None,
    split: str = "eval",
    show_samples: int = 0,
    instead: Callable[[nn.Module, Any], nn.Module] | None = None,
) -> Score:
    """Evaluate on one of the recipe's splits. Every process of the job calls it with the same arguments.

    Args:
        model: folder of the finished model, on every node. Ignored if there is a checkpoint.
        checkpoint: folder of a checkpoint, on the main node. It is loaded as resuming would: data, model, then its weights.
        split: "eval", "eval/NAME" for one of ``eval.sets``, or "test".
        show_samples: number of samples to draw, see ``Evaluation.images``.
        instead: called with the finished model and the split; what it returns is evaluated in the model's place.

    Raises:
        ConfigError: the recipe cannot be run here; or there is no such model, checkpoint or split, or it does not fit.
        DataError: the data cannot be evaluated on.
    """
    model, checkpoint = Path(model), None if checkpoint is None else Path(checkpoint)
    # Trackers are those of the training. Neither they nor what FORWARD has matter to the result, so any launcher will do.
    training, parallel = replace(recipe.train, **FORWARD), replace(recipe.parallel, replicas=1, context=1)
    recipe = replace(recipe, track=TrackConfig(), train=training, parallel=parallel)
    recipe.validate()
    with Session(recipe) as session:
        session.progress.stage("loading data and model")
        if checkpoint is None:
            check_model(model)
        saved = None
        if checkpoint is not None and session.here.is_main:
            check_checkpoint(checkpoint)
            try:
                saved = open_checkpoint(checkpoint)
            except BrokenCheckpoint as error:
                raise ConfigError(f"--checkpoint {checkpoint} is not a readable checkpoint: {error}.") from error
        # A finished model first: it brings its tokenizer along, which would otherwise be trained again.
        built = load_for_all(recipe, model) if checkpoint is None else None
        datasets = load_datasets(recipe)
        if split not in datasets:
            raise ConfigError(f"--split {split}: this recipe's data has no such split. It has: {', '.join(datasets)}.")
        if built is None:
            built = build_model(recipe, leaves_weights=may_leave_weights(recipe))
        elif recipe.train.compile:
            compile_model(built)
        if instead is not None:
            session.progress.stage("exporting the model")
            built = instead(built, datasets[split])
        accelerator = session.join()
        reference, named = None, recipe.train.reference is not None
        if recipe.task.reference_fields and (named or checkpoint is None):
            other = load_reference(recipe)[0] if named else build_model(recipe, leaves_weights=may_leave_weights(recipe))
            optimizer = torch.optim.SGD(other.parameters()) if named else build_optimizer(other, recipe)
            reference = references_of_another(recipe, session.progress, other, optimizer, [datasets[split]])
            if checkpoint is None:
                check_reference(str(model), read_about(model).get("reference"), reference)
            accelerator = start_accelerator(recipe.train)
            del other, optimizer
        strategy = choose_strategy(accelerator, recipe, session.progress)
        unread = unread_names(strategy, built)
        base = base_digest(built) if saved is not None and has_adapter(built) and not unread else None
        session.at_end(strategy.end_workers)
        digests = session.compare(strategy, datasets, {})
        notices = settle_head(recipe, strategy, built, datasets[split], recipe.eval.batch_size)
        # Nothing is trained; a checkpoint's optimizer may have other weights to evaluate. An export is not frozen, as a task's
        # parameter groups may take for granted.
        strategy.prepare(built, torch.optim.SGD(built.parameters()) if checkpoint is None else build_optimizer(built, recipe))
        if checkpoint is not None:
            base = strategy.sharding.base_digest() if unread else base
            reference = reference or add_references(recipe, strategy, built, base, [datasets[split]])
            load_weights(strategy, checkpoint, saved, digests, base, reference)
        session.progress.stage("the evaluation")
        config = replace(recipe.eval, show_samples=show_samples)
        with strategy.sharding.averaged() if checkpoint is not None else nullcontext():
            evaluation = evaluate_split(strategy, datasets[split], config, recipe.train.num_workers)
    step = None
    if strategy.is_main:
        step = read_about(model).get("step", 0) if saved is None else saved.step
    folder = str(model if checkpoint is None else checkpoint)
    score = Score(evaluation.metrics, folder, len(datasets[split]), strategy.num_processes, strategy.is_main, step, evaluation)
    score.notices += [*notices, *strategy.notices()]
    return score


def load_weights(
    strategy: Strategy,
    path: Path,
    saved: Checkpoint | None,
    digests: dict[str, str],
    base: str | None,
    reference: str | None,
) -> None:
    """Give the model the weights of a checkpoint, which the main process has read. Collective.

    Args:
        base: digest of the weights that adapters were put beside, on the main process.
        reference: what ``add_references`` returns.

    Raises:
        ConfigError: it belongs to a different model, or to different training data, which the model may have been built from;
            or it holds adapters of another base, or was trained with another reference.
    """

    def check() -> None:
        progress = {} if saved is None else saved.progress
        check_base(f"--checkpoint {path}", progress.get("base"), base)
        check_reference(f"--checkpoint {path}", progress.get("reference"), reference)

    strategy.on_main(check)
    trained_on = strategy.broadcast(saved and saved.progress["digests"]["train data"])
    if trained_on != digests["train data"]:
        raise ConfigError(f"--checkpoint {path} was trained on different training data. Give the recipe of its run.")
    state: SavedState | None = None
    if saved is not None:
        # What the training evaluated: its moving average, or what its optimizer needs to average the weights
        state = {"model": {**saved.tensors["model"], **saved.tensors.get("ema", {})}, "optimizer": {}}, {}
        if averages_itself(strategy.sharding.bare_optimizer):
            options = {name: value for name, value in saved.progress["values"].items() if name.startswith("optimizer")}
            state = {"model": state[0]["model"], "optimizer": saved.tensors["optimizer"]}, options
    try:
        strategy.sharding.load_state(state)
    except ValueError as error:
        raise ConfigError(f"--checkpoint {path} belongs to a different model: {error}.") from error

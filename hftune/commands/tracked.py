"""Evaluations and predictions as runs at the trackers, in the group of the training that the model comes from."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hftune.callbacks import Failure
from hftune.commands.arguments import writing
from hftune.config import Recipe
from hftune.distributed.process_info import ProcessInfo
from hftune.errors import ConfigError
from hftune.secrecy import without_secrets
from hftune.task import ask
from hftune.tracking.jsonl import write_rows
from hftune.tracking.tracker import Tracker, check_trackers

if TYPE_CHECKING:
    from hftune.reevaluation import Score


def as_run(recipe: Recipe, folder: Path, job_type: str) -> Recipe:
    """Return the recipe of a run with files of its own, in a folder ``job_type`` of a training's output folder.

    Raises:
        ConfigError: the recipe names no tracker, or one that cannot be reached.
    """
    track = recipe.track
    if not track.with_:
        raise ConfigError("--track: the recipe names no tracker. Add one to hftune evaluate, such as track.with=[wandb].")
    own = replace(
        track,
        job_type=job_type,
        run_name=track.run_name or recipe.recipe,
        group=track.group or os.environ.get("WANDB_RUN_GROUP") or recipe.folder.resolve().name,
        upload="none",
        register=None,
    )
    run = replace(recipe, track=own, output_dir=str(folder / job_type))
    if ProcessInfo.from_environment().is_main:  # it alone talks to trackers
        check_trackers(run)
    return run


@contextmanager
def tracked(recipe: Recipe, facts: Mapping[str, Any]) -> Iterator[tuple[Tracker, Path]]:
    """Open the trackers of ``as_run``, and close them when everything has been logged. Main process only.

    Yields them with the folder for the run's files, whose name the run bears: that of an earlier evaluation stays as it is.

    Raises:
        ConfigError: the folder cannot be written, or a tracker does not start.
    """
    with writing(f"--track: {recipe.output_dir}"):
        first = recipe.folder
        for number in count(1):
            folder = first.with_name(f"{first.name}-{number}") if number > 1 else first
            with suppress(FileExistsError):
                folder.mkdir(parents=True)
                break
        track = replace(recipe.track, run_name=f"{recipe.track.run_name} {folder.name}")
        recipe = replace(recipe, track=track, output_dir=str(folder))
        (folder / "recipe.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
    tracker = Tracker(recipe)
    try:
        tracker.start(0, facts)
        yield tracker, folder
    except BaseException as error:
        tracker.on_failure(Failure(reason=without_secrets(f"{type(error).__name__}: {error}"), is_interruption=False))
        raise
    tracker.close(f"{recipe.track.job_type} of {facts['model']}")


def track_evaluation(recipe: Recipe, score: Score, split: str) -> None:
    """Record an evaluation at the trackers, at the training step that its model comes from. Main process only."""
    evaluation, step, task = score.evaluation, score.step, recipe.task
    vars(task)["described"] = split
    rows = ask(task, "describe", evaluation.rows, evaluation.rows) if split != "test" else evaluation.rows
    images, labels = evaluation.images, ask(task, "labels", None)
    facts = {"model": score.model, "split": split, "samples": score.num_samples, "processes": score.world_size}
    with tracked(recipe, facts) as (tracker, folder):
        tracker.log(step, None, {f"{split}/{name}": value for name, value in evaluation.metrics.items()})
        tracker.show(
            step,
            f"{split}/",
            rows=rows,
            counts=evaluation.metrics.get("confusion_matrix", ()),
            labels=() if labels is None else labels,
            images=images,
            captions=[ask(task, "caption", "", row) for row in rows[: len(images)]],
        )
        write_rows(folder / "predictions.jsonl", rows, lambda: None)


def track_predictions(
    recipe: Recipe, facts: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], images: Sequence[Any]
) -> None:
    """Record predictions for raw inputs as a run.

    Args:
        rows: plain data, all with the same fields.
        images: pairs of pixels (H, W, 3) uint8 and caption.
    """
    with tracked(recipe, facts) as (tracker, folder):
        tracker.log(0, None, {"predict/samples": len(rows)})
        pixels, captions = zip(*images, strict=True) if images else ((), ())
        tracker.show(0, "", rows=rows, images=pixels, captions=captions)
        write_rows(folder / "predictions.jsonl", rows, lambda: None)

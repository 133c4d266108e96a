"""Decides where a run begins: anew, at a checkpoint, or not at all because it is done. Knows no model and no process.

Main process only: the others are told what it found.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from hftune.checkpoints.atomic_files import write_text
from hftune.checkpoints.checkpointer import BrokenCheckpoint, Checkpoint, newest, open_checkpoint, steps, tidy
from hftune.config.recipe import Recipe, flat
from hftune.distributed.preflight import launcher
from hftune.errors import ConfigError, did_you_mean, format_value

FIXED = ("task.", "seed", "train.batch_size", "train.optimizer")
"""Keys (or their beginnings) that a run cannot change: they decide which samples form a step, or what is learned from them."""
FREE = ("recipe", "output_dir", "resume")
"""Keys that say nothing about the training itself; their changes are not worth a word."""
HARMLESS = (
    *("train.log_every", "train.num_workers", "train.dead_after_s", "train.stall_after_s", "train.cudnn_benchmark"),
    *("train.micro_batch_size", "train.micro_batch_tokens", "train.gradient_checkpointing", "train.compile", "parallel."),
    *("eval.batch_size", "eval.show_samples", "checkpoint.", "track."),
)
"""Keys (or their beginnings) that change how a run is computed or shown, and not what comes out."""
LENGTH = ("train.epochs", "train.max_steps")
"""Keys that matter only where they change the number of steps."""

BEGUN = ".begun"
"""File in the output folder: the launchers, with their processes, of the job that its checkpoints belong to."""

Member = tuple[str, int]
"""The launcher of a process, and the process's own id."""


@dataclass
class Start:
    """Where a run begins."""

    checkpoint: Checkpoint | None = None
    """None: anew."""
    notices: list[str] = field(default_factory=list)
    """What to tell the user, one sentence each."""
    changed: dict[str, str] = field(default_factory=dict)
    """Keys of the recipe that differ from the checkpoint's, each spelled with both values: "train.lr=0.1 (it was 0.2)"."""
    group: Sequence[Member] = ()
    """The processes that begin here, if they have launchers."""


def find_start(recipe: Recipe, group: Sequence[Member] | None = None) -> Start:
    """Look for the checkpoint that ``resume`` means, and compare recipes.

    A group of processes that a launcher restarts after a failure resumes, whatever ``resume`` said the first time.

    Args:
        group: all processes that take part, as far as they have launchers. None: only this one is known yet.

    Raises:
        ConfigError: the checkpoint that was named does not verify, or a key that cannot change has changed.
    """
    folder, resume = Path(recipe.output_dir) / "checkpoints", recipe.resume
    tidy(folder)
    group = member() if group is None else group
    if steps(folder) and is_restarted(Path(recipe.output_dir), group):
        resume = "auto"
    if resume == "never":
        return Start(group=group)
    if resume == "auto":
        checkpoint, skipped = newest(folder)
        if checkpoint is None and skipped:
            raise ConfigError(f"{' '.join(skipped)} No whole one is left. resume=never starts anew, and removes them.")
        if checkpoint is None:
            return Start(group=group)
    else:
        checkpoint, skipped = _named(Path(resume).expanduser(), folder), []
    changed = _changes(checkpoint, recipe)
    notices = [*skipped, *(f"Changed: {text}." for text in changed.values())]
    return Start(checkpoint, notices, changed, group)


def member() -> list[Member]:
    """Return this process as a member of its group; nothing if no launcher started it, which could restart it."""
    own = launcher()
    return [] if own is None else [(own, os.getpid())]


def is_restarted(output_dir: Path, group: Sequence[Member]) -> bool:
    """Say whether the run in this folder was begun by the same job: by one of these launchers, in processes that have ended.

    One is enough: between two attempts, machines may have joined or left. A process that trains twice is not a restart.
    """
    path = output_dir / BEGUN
    if not path.is_file():
        return False
    begun = json.loads(path.read_text(encoding="utf-8"))
    return any(own in begun and pid not in begun[own] for own, pid in group)


def note_begun(output_dir: Path, group: Sequence[Member]) -> None:
    """Write down whose checkpoints are in this folder from now on, once those of other jobs have been removed."""
    begun: dict[str, list[int]] = {}
    for own, pid in group:
        begun.setdefault(own, []).append(pid)
    write_text(output_dir / BEGUN, json.dumps(begun))


def check_finished(start: Start, recipe: Recipe, num_steps: int) -> None:
    """Refuse a recipe that asks for another training than the one that is finished here. Main process only.

    Raises:
        ConfigError: no step is left to take, and keys have changed on which the result depends.
    """
    if start.checkpoint is None or start.checkpoint.step != num_steps:
        return
    if differing := [text for key, text in start.changed.items() if not key.startswith((*HARMLESS, *LENGTH))]:
        raise ConfigError(
            f"{recipe.output_dir} holds a finished run of {num_steps} steps, and this recipe differs from it: "
            f"{', '.join(differing)}. Nothing would be trained. Set output_dir=... to a new folder; or resume=never, which "
            "replaces that run."
        )


def leads_elsewhere(start: Start) -> bool:
    """Say whether steps that are taken again may lead to other weights, or to another choice of the best model, than before."""
    free = (*HARMLESS, *LENGTH, "eval.every")
    return any(not key.startswith(free) for key in start.changed)


def _named(path: Path, folder: Path) -> Checkpoint:
    if not path.is_dir():
        raise ConfigError(
            f"resume={path}: there is no such folder.{did_you_mean(str(path), ('auto', 'never'))} Name a checkpoint, such as "
            f"{folder}/step_00000500, or say auto or never."
        )
    try:
        checkpoint = open_checkpoint(path)
    except BrokenCheckpoint as error:
        raise ConfigError(
            f"resume={path} is no checkpoint to go on from: {error}. Name a folder such as {folder}/step_00000500, or say "
            "resume=auto for the newest whole one."
        ) from error
    if path.resolve().parent != folder.resolve() and steps(folder):
        raise ConfigError(f"resume={path}: {folder} holds checkpoints of another run. Set output_dir=... to a new folder.")
    later = [step for step in steps(folder) if step > checkpoint.step]
    if later:
        raise ConfigError(
            f"resume={path}: {folder} already holds a later checkpoint, of step {later[-1]}. Two histories do not fit into one "
            "folder: set output_dir=... to a new one, or remove the later checkpoints."
        )
    return checkpoint


def _changes(checkpoint: Checkpoint, recipe: Recipe) -> dict[str, str]:
    """Say which keys have changed, by key.

    Raises:
        ConfigError: naming every changed key that is FIXED, with both values.
    """
    recipes = OmegaConf.load(checkpoint.path / "recipe.yaml"), OmegaConf.create(recipe.to_yaml())
    old, new = (flat(OmegaConf.to_container(either)) for either in recipes)
    differing = [key for key in {**old, **new} if old.get(key) != new.get(key) and key not in FREE]
    said = {key: f"{key}={_spell(new, key)} (it was {_spell(old, key)})" for key in differing}
    pins = {f"{key}_revision" for key in checkpoint.progress.get("commits", {})}  # what they mean is compared once it is loaded
    if fixed := [said[key] for key in differing if key.startswith(FIXED) and key not in pins]:
        raise ConfigError(
            f"{checkpoint.path} cannot go on with {', '.join(fixed)}. Set it back; or start anew with resume=never, which "
            "replaces that run, or with another output_dir."
        )
    return {key: text for key, text in said.items() if key not in pins}


def _spell(values: Mapping[str, Any], key: str) -> str:
    value = values.get(key)
    return value if isinstance(value, str) else format_value(value)

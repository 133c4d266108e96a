"""Decides where a run starts: at the beginning, at a checkpoint, or not at all because it is finished. Independent of models.

Main process only; the result is broadcast to the others.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from hftune.atomic import write_text
from hftune.checkpoints.checkpointer import BrokenCheckpoint, Checkpoint, newest, open_checkpoint, steps, tidy
from hftune.checkpoints.copying import BEGUN
from hftune.checkpoints.run_folder import here
from hftune.config.addresses import is_address
from hftune.config.recipe import Recipe, flat
from hftune.config.reference import all_keys, resume_rule
from hftune.distributed.process_info import launcher
from hftune.distributed.rounds import present_job, present_round
from hftune.errors import ConfigError, did_you_mean, format_value

Member = tuple[str, int]
"""The launcher of a process, and the process id."""


@dataclass
class Start:
    """Where a run starts."""

    checkpoint: Checkpoint | None = None
    """None: at the beginning."""
    notices: list[str] = field(default_factory=list)
    """Messages for the user, one sentence each."""
    changed: dict[str, str] = field(default_factory=dict)
    """Keys of the recipe that differ from the checkpoint's, with both values: "train.lr=0.1 (it was 0.2)"."""
    telling: Sequence[str] = ()
    """Those of them that change the result, and not only the number of steps."""
    group: Sequence[Member] = ()
    """The processes of this job that have launchers."""


def keep_settled(recipe: Recipe) -> None:
    """Take over what the run that is resumed has settled: fields of ``Task.settled_fields`` that are null in the recipe."""
    if not any(getattr(recipe.task, name) is None for name in recipe.task.settled_fields):
        return
    folder = recipe.folder if recipe.resume in ("auto", "never") else named_folder(recipe)
    if recipe.resume == "never" and not is_restarted(folder, member()):
        return
    if is_address(str(recipe.output_dir)) and not (folder / "recipe.yaml").is_file():  # of a machine that has not trained it
        with suppress(ConfigError):  # no run is there, or the main process says what is wrong
            folder = here(str(recipe.output_dir))
    if not (folder / "recipe.yaml").is_file():
        return
    before = OmegaConf.to_container(OmegaConf.load(folder / "recipe.yaml"))
    for name in recipe.task.settled_fields:
        if getattr(recipe.task, name) is None:
            setattr(recipe.task, name, before.get("task", {}).get(name))


def named_folder(recipe: Recipe) -> Path:
    """Return the checkpoint that ``resume`` names as a folder of this machine, or raise ConfigError if it cannot be fetched."""
    inside = f"{str(recipe.output_dir).rstrip('/')}/"
    if is_address(inside) and recipe.resume.startswith(inside):
        return recipe.folder / recipe.resume.removeprefix(inside)
    return here(recipe.resume, key="resume")


def find_start(recipe: Recipe, group: Sequence[Member] | None = None, callbacks: Sequence[str] = ()) -> Start:
    """Find the checkpoint that ``resume`` asks for, and compare recipes.

    A job that its launcher restarts after a failure resumes, even with resume=never.

    Args:
        group: all processes of the job that have launchers. None: only this one is known yet.
        callbacks: how those were made that ``train`` is given besides the recipe's.

    Raises:
        ConfigError: the named checkpoint does not verify, or a key that cannot change has changed.
    """
    folder, resume = recipe.folder / "checkpoints", recipe.resume
    tidy(folder)
    group = member() if group is None else group
    if steps(folder) and is_restarted(recipe.folder, group):
        resume = "auto"
    if resume == "never":
        return Start(group=group)
    if resume == "auto":
        checkpoint, skipped = newest(folder)
        if checkpoint is None and skipped:
            raise ConfigError(f"{' '.join(skipped)} No intact checkpoint is left. resume=never removes them and starts over.")
        if checkpoint is None:
            return Start(group=group)
    else:
        checkpoint, skipped = _named(named_folder(recipe), folder), []
    changed = _changes(checkpoint, recipe)
    before = checkpoint.progress.get("callbacks", [])
    if checkpoint.progress["state"].get("ended_by") is not None and before != [*callbacks]:
        changed.setdefault("callbacks", "the callbacks that train was given, or their arguments")
    notices = [*skipped, *(f"Changed: {text}." for text in changed.values())]
    telling = [key for key in changed if resume_rule(key, type(recipe.task)) not in ("harmless", "length")]
    return Start(checkpoint, notices, changed, telling, group)


def member() -> list[Member]:
    """Return this process as a member of its job; empty if it has no launcher that could restart it.

    Of an elastic job all machines may be replaced in time: the job stands for its launchers, and the round for the processes.
    """
    if (job := present_job()) is not None and (number := present_round()) is not None:
        return [(f"job {job}", number)]
    name = launcher()
    return [] if name is None else [(name, os.getpid())]


def is_restarted(output_dir: Path, group: Sequence[Member]) -> bool:
    """Return whether the same job started the run in this folder: one of these launchers, in a process that has ended.

    One is enough, as nodes may join or leave between two attempts. A process that trains twice is not a restart.
    """
    path = output_dir / BEGUN
    if present_round() and present_job() is None:
        return True
    if not path.is_file():
        return False
    begun = json.loads(path.read_text(encoding="utf-8"))
    return any(name in begun and pid not in begun[name] for name, pid in group)


def note_begun(output_dir: Path, group: Sequence[Member]) -> None:
    """Record that the checkpoints in this folder are this job's, after those of other jobs have been removed."""
    begun: dict[str, list[int]] = {}
    for name, pid in group:
        begun.setdefault(name, []).append(pid)
    write_text(output_dir / BEGUN, json.dumps(begun))


def check_finished(start: Start, recipe: Recipe, num_steps: int) -> None:
    """Refuse a recipe that differs from the finished run in its output folder. Main process only.

    Raises:
        ConfigError: no step is left to train, and keys that affect the result have changed.
    """
    if start.checkpoint is None:
        return
    patience, state = recipe.eval.patience, start.checkpoint.progress["state"]
    is_out = patience is not None and state.get("evaluations_since", 0) >= patience
    is_ended = state.get("ended_by") is not None and "callbacks" not in start.changed
    if start.telling and (start.checkpoint.step == num_steps or is_out or is_ended):
        raise ConfigError(
            f"{recipe.output_dir} holds a finished run of {start.checkpoint.step} steps, and this recipe differs from it: "
            f"{', '.join(start.changed[key] for key in start.telling)}. Nothing would be trained. Set output_dir=... to a new "
            "folder, or resume=never to replace that run."
        )


def _named(path: Path, folder: Path) -> Checkpoint:
    if not path.is_dir():
        raise ConfigError(
            f"resume={path}: there is no such folder.{did_you_mean(str(path), ('auto', 'never'))} Name a checkpoint, such as "
            f"{folder}/step_00000500, or use auto or never."
        )
    try:
        checkpoint = open_checkpoint(path)
    except BrokenCheckpoint as error:
        raise ConfigError(
            f"resume={path} is not a usable checkpoint: {error}. Name a folder such as {folder}/step_00000500, or use "
            "resume=auto for the newest intact checkpoint."
        ) from error
    if path.resolve().parent != folder.resolve() and steps(folder):
        raise ConfigError(f"resume={path}: {folder} holds checkpoints of a different run. Set output_dir=... to a new folder.")
    later = [step for step in steps(folder) if step > checkpoint.step]
    if later:
        raise ConfigError(
            f"resume={path}: {folder} already holds a later checkpoint, of step {later[-1]}. Set output_dir=... to a new "
            "folder, or remove the later checkpoints."
        )
    return checkpoint


def _changes(checkpoint: Checkpoint, recipe: Recipe) -> dict[str, str]:
    """Describe each changed key, with both values.

    Raises:
        ConfigError: keys have changed that a resumed run may not change.
    """
    recipes = OmegaConf.load(checkpoint.path / "recipe.yaml"), OmegaConf.create(recipe.to_yaml())
    old, new = (flat(OmegaConf.to_container(either)) for either in recipes)
    rules = {key: resume_rule(key, type(recipe.task)) for key in {**old, **new}}

    def is_same(one: Any, other: Any) -> bool:  # a key that a task did not have before is None, and may now be empty
        return one == other or (one in (None, []) and other in (None, []))

    unread = {
        key
        for key, (described, *_) in all_keys(type(recipe.task)).items()
        if (needs := described.rule.needs) is not None
        and {either.get(f"{key.rpartition('.')[0]}.{needs[0]}") for either in (old, new)}.isdisjoint(needs[1])
    }
    if old.get("adapter.type") is new.get("adapter.type") is None:  # the others mean nothing
        unread |= {key for key in rules if key.startswith("adapter.")}
    differing = [
        key for key, rule in rules.items() if rule != "own" and key not in unread and not is_same(old.get(key), new.get(key))
    ]
    texts = {key: f"{key}={_spell(new, key)} (it was {_spell(old, key)})" for key in differing}
    pins = {f"{key}_revision" for key in checkpoint.progress.get("commits", {})}  # compared once data and model are loaded
    if fixed := [texts[key] for key in differing if rules[key] == "fixed" and key not in pins]:
        raise ConfigError(
            f"{checkpoint.path} cannot resume with {', '.join(fixed)}. Restore the earlier values; or start over with "
            "resume=never, which replaces that run, or with a different output_dir."
        )
    check_skip(checkpoint, old.get("train.skip") or [], new.get("train.skip") or [])
    return {key: text for key, text in texts.items() if key not in pins}


def check_skip(checkpoint: Checkpoint, old: Sequence[int], new: Sequence[int]) -> None:
    """Refuse to leave out steps that are taken, or to take those that were left out, or raise ConfigError."""
    past = sorted(step for step in {*old} ^ {*new} if step <= checkpoint.step)
    if not past:
        return
    was = "left out" if past[0] in old else "taken"
    raise ConfigError(
        f"{checkpoint.path} cannot resume with train.skip={format_value([*new])} (it was {format_value([*old])}): "
        f"step {past[0]} was {was}. Change only what comes after step {checkpoint.step}; or resume from a checkpoint before "
        f"step {past[0]}: resume=FOLDER/checkpoints/step_..., with a different output_dir."
    )


def _spell(values: Mapping[str, Any], key: str) -> str:
    value = values.get(key)
    return value if isinstance(value, str) else format_value(value)

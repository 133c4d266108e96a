"""The past of a run, from its folder: the recipe that was in force at each step, and the checkpoints to start from.

Imports no torch, so that a mistyped step is refused at once; only ``checkpoint_before`` does, to read tensors.
"""

from __future__ import annotations

import copy
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from hashlib import sha256
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from hftune.batch_plan import BatchPlan
from hftune.checkpoints.run_folder import here
from hftune.config import Recipe
from hftune.config.reference import resume_rule
from hftune.distributed.process_info import ProcessInfo
from hftune.errors import ConfigError
from hftune.replay.ledger import LedgerRecord, read_ledger
from hftune.replay.spikes import EARLIER, losses_of, suspect_of
from hftune.tracking.jsonl import read_lines

if TYPE_CHECKING:
    from hftune.checkpoints.checkpointer import Checkpoint
    from hftune.config import TrainConfig

BOUNDS = ("micro_batch_size", "micro_batch_tokens")
"""Keys of the section train, and of a start line, that say how a step is cut into micro-batches."""


Override = str | Mapping[str, Any]
"""Of keys of a recipe: a word such as train.lr=1e-5, or their values by their names."""


@dataclass(frozen=True)
class Change:
    """What a replay does differently from the run, from ``from_step`` on."""

    overrides: tuple[Override, ...] = ()
    without: frozenset[int] = frozenset()
    """Rows of the training data that stay in the forward passes, but add nothing to the loss."""
    skip: frozenset[int] = frozenset()
    """Skipped steps: no update, and the schedule moves on."""
    from_step: int = 1

    def __bool__(self) -> bool:
        return bool(self.overrides or self.without or self.skip)

    def overrides_at(self, step: int) -> tuple[Override, ...]:
        """Return the overrides that are in force at a step."""
        return self.overrides if step >= self.from_step else ()


NO_CHANGE = Change()


@dataclass(frozen=True)
class History:
    """A run's folder, opened for looking back; nothing is ever written into it."""

    folder: Path
    ledger: LedgerRecord
    trust_code: bool = False
    data: tuple[str, ...] = ()
    """Where the data are now, if they have moved: see ``moved_data``."""

    @classmethod
    def open(cls, folder: str | Path, *, trust_code: bool = False, data: Sequence[str] = ()) -> History:
        """Open the output folder of a run.

        Raises:
            ConfigError: it holds no ledger, or one without a step.
        """
        folder = here(folder, "checkpoints")
        history = cls(folder, read_ledger(folder), trust_code, tuple(data))
        if not history.ledger.steps:
            raise ConfigError(f"{folder} has not finished a step yet: there is nothing to replay.")
        return history

    @property
    def last(self) -> int:
        """The last step that the run has taken so far."""
        return max(self.ledger.steps)

    @cached_property
    def falls(self) -> dict[int, int]:
        """How often ``train.schedule=plateau`` had made the learning rate fall before each step, and before the one to come.

        These are the fewest falls that make the rates in the ledger, at most one after each step. In a warmup, at
        ``train.min_lr`` and in skipped steps none can be seen; they count from the first step whose rate shows them.
        """
        from hftune.optim.schedules import lr_at  # imports torch

        found: dict[int, int] = {}
        trains: dict[int, TrainConfig] = {}
        known, num_falls = 1, 0  # all falls before the step ``known`` are counted
        for step, line in self.ledger.steps.items():
            start = self.ledger.starts_of[step]
            if start["recipe"]["train"]["schedule"] != "plateau":
                known = step
            elif not line.get("skipped"):
                if id(start) not in trains:
                    trains[id(start)] = self.recipe_at(step, to_run=False).train
                own = partial(lr_at, step - 1, start["num_steps"], trains[id(start)], start["steps_per_epoch"])
                lr, seen = line.get("lr") or 0.0, num_falls
                while seen < num_falls + step - known and own(seen) > lr * (1 + 1e-12):
                    seen += 1
                if math.isclose(own(seen), lr, rel_tol=1e-12):
                    num_falls = seen
                if own(num_falls + 1) < own(num_falls):
                    known = step
            found[step] = num_falls
        found[self.last + 1] = num_falls
        return found

    @property
    def aside(self) -> Path:
        """The folder beside the run's own in which replays are put."""
        folder = self.folder.resolve()
        return folder.with_name(f"{folder.name}_replay")

    def start_of(self, step: int) -> dict[str, Any]:
        """Return the line that training wrote when it last started before a step; of steps to come, the last one."""
        return self.ledger.starts_of[min(step, self.last)]

    def check_step(self, step: int) -> None:
        """Refuse a step that the run never took, nor was about to take, or raise ConfigError."""
        is_next = step == self.last + 1 <= self.start_of(step).get("num_steps", 0)  # at which it stopped, as by a loss of nan
        if step not in self.ledger.steps and not is_next:
            raise ConfigError(f"{self.folder} has no step {step:,}: it has {min(self.ledger.steps):,} to {self.last:,}.")

    def samples_of(self, step: int) -> np.ndarray:
        """Return the numbers of the training samples that a step uses, after the plan in its start line and its own line."""
        plan = BatchPlan(**self.start_of(step)["plan"])
        epoch, place = divmod(step - 1, plan.num_steps)
        samples, left_out = plan.epoch(epoch).samples(place), self.ledger.steps.get(step, {}).get("left_out", [])
        return samples[~np.isin(samples, left_out)]

    def check_change(self, change: Change) -> None:
        """Refuse to change in the middle of a run what its weights have been trained with from the first step on.

        Raises:
            ConfigError: naming the key.
        """
        if change.from_step <= 1:
            return
        for key in sorted(keys_of(change.overrides)):
            if resume_rule(key) == "fixed":
                raise ConfigError(
                    f"{key} decides which samples form a step, or what is learned from them. Changed at step "
                    f"{change.from_step:,}, it would be another run than before. Change it from the start: --from 1."
                )

    def recipe_at(self, step: int, *overrides: Override, to_run: bool = True) -> Recipe:
        """Return the recipe that was in force at a step, with what training resolved when it started put in.

        It names a folder of its own for output and no trackers, and the data where they are now.

        Args:
            to_run: whether it must be possible to run it here. False: it is only read, so its data may be gone.

        Raises:
            ConfigError: the recipe cannot be read here; a file of the data is not where it was.
        """
        start = self.start_of(step)
        nested = as_replayed(copy.deepcopy(start["recipe"]), start, overrides)
        nested["output_dir"] = str(self.aside)
        moved = moved_data(nested["task"], self.data)
        recipe = Recipe.of_run(self.folder, nested, moved, *overrides, trust_code=self.trust_code)
        try:
            if to_run:
                recipe.validate()
        except ConfigError as error:
            if "there is no such f" not in str(error):
                raise
            between = "\n  " if len(error.problems) > 1 else " "
            raise ConfigError(
                f"{error}{between}If the data have moved since the run, say where they are: --data FOLDER, or --data "
                "SPLIT=FILE for one file, such as --data train=reviews.csv."
            ) from error
        return recipe

    def checkpoint_steps(self) -> list[int]:
        """List the steps of the checkpoints that belong to the run's history, ascending. Their tensors are not verified."""
        found = set()
        for folder in (self.folder / "checkpoints", self.aside / "checkpoints"):
            for path in folder.glob("step_*"):
                if re.fullmatch(r"step_\d{8,}", path.name) and self._belongs(path, int(path.name[5:])):
                    found.add(int(path.name[5:]))
        return sorted(found)

    def checkpoint_path(self, step: int) -> Path:
        """Return the folder of a checkpoint of ``checkpoint_steps``: the run's own, or one that a replay has filled in."""
        own = path_of(self.folder, step)
        return own if self._belongs(own, step) else path_of(self.aside, step)

    def line_digest(self, step: int) -> str:
        """Return the SHA-256 of a step's line in the ledger, by which a checkpoint from a replay knows its run."""
        return sha256(json.dumps(self.ledger.steps.get(step), sort_keys=True).encode()).hexdigest()

    def _belongs(self, path: Path, step: int) -> bool:
        """Say whether a checkpoint is of this history, and not of steps that were taken back or of an earlier run."""
        try:
            files = json.loads((path / "manifest.json").read_text(encoding="utf-8"))["files"]
            model = files["model.safetensors"]["sha256"]
            if path.parent.parent == self.aside:
                progress = json.loads((path / "progress.json").read_text(encoding="utf-8"))
                return progress.get("replayed") == self.line_digest(step)
        except (OSError, ValueError, KeyError, TypeError):
            return False
        noted = self.ledger.checkpoints.get(step, {}).get("model", model)
        return step <= self.last and model == noted

    def nearest(self, step: int) -> int:
        """Return the step of the checkpoint from which to replay this step; 0: from the start. It is not verified."""
        return max((number for number in self.checkpoint_steps() if number < step), default=0)

    def checkpoint_before(self, step: int, skipped: list[str] | None = None) -> tuple[int, Checkpoint | None]:
        """Read the newest intact checkpoint of an earlier step; (0, None): replay from the start.

        Args:
            skipped: gets a sentence for each newer one that is not intact.
        """
        for number in reversed(self.checkpoint_steps()):
            if number < step and (checkpoint := self.checkpoint_at(number, skipped)) is not None:
                return number, checkpoint
        return 0, None

    def checkpoint_at(self, step: int, skipped: list[str] | None = None) -> Checkpoint | None:
        """Read the checkpoint of a step; None if it is not intact, or gone by now. ``skipped``: see ``checkpoint_before``."""
        from hftune.checkpoints.checkpointer import BrokenCheckpoint, open_checkpoint  # imports torch

        path = self.checkpoint_path(step)
        try:
            return open_checkpoint(path)
        except BrokenCheckpoint as error:
            if skipped is not None:
                skipped.append(f"Skipped {path}: {error}.")
            return None

    def seconds_per_step(self) -> float | None:
        """Return how long a step of the run took, as its metrics say; None if they do not."""
        seconds = [line["perf/step_s"] for line in read_lines(self.folder / "metrics.jsonl") if line.get("perf/step_s")]
        return median(seconds) if seconds else None


@dataclass(frozen=True)
class Job:
    """What ``hftune replay`` is asked for."""

    history: History
    first: int
    last: int
    change: Change
    output: Path
    save_every: int | None = None
    as_json: bool = False
    worst: int = 0
    """How many samples to show, those with the greatest loss."""
    why: bool = False
    """Whether to find out if batch or update is to blame."""
    must_look: bool = False
    """Whether the user has asked for samples or for why, and wants an error where that cannot be had."""

    @property
    def steps(self) -> str:
        """The steps that are asked for, in words."""
        return f"step {self.first:,}" if self.first == self.last else f"steps {self.first:,} to {self.last:,}"

    @property
    def begin(self) -> int:
        """The first step that must be right for what is asked for."""
        if self.why:
            suspect = suspect_of(losses_of(self.history.ledger.steps), self.first, self.last)
            return max(1, min(self.first, suspect - EARLIER))
        return min(self.first, self.change.from_step) if self.change else self.first


def keys_of(overrides: Iterable[Override]) -> set[str]:
    """Return the keys that overrides change, or replace."""
    found: set[str] = set()
    for override in overrides:
        pairs = override.items() if isinstance(override, Mapping) else [override.partition("=")[::2]]
        for name, value in pairs:
            found |= {name} if name != "replace" else {*(re.findall(r"[\w.]+", value) if isinstance(value, str) else value)}
    return found


def path_of(folder: Path, step: int) -> Path:
    """Return the path of a step's checkpoint in a run's folder. The same as in ``checkpoints``, which imports torch."""
    return folder / "checkpoints" / f"step_{step:08d}"


def as_replayed(nested: dict[str, Any], start: Mapping[str, Any], overrides: Iterable[Override] = ()) -> dict[str, Any]:
    """Return a run's recipe as a replay needs it: with what training resolved at its start, and without what only shows.

    Args:
        nested: the recipe by section, which is changed.
        start: the line of the ledger that training wrote when it started.
        overrides: keys that they name are left as they are.
    """
    changed = keys_of(overrides)
    for key in ("track", "resume", "callbacks"):
        nested.pop(key, None)
    train = nested.setdefault("train", {})
    train["profile"] = None
    if not changed & {f"train.{name}" for name in BOUNDS}:
        train |= {name: start.get(name) for name in BOUNDS}
    if train.get("mixed_precision") == "auto" and "precision" in start:
        train["mixed_precision"] = start["precision"]
    if train.get("packing") == "auto" and start.get("packed") is False:
        train["packing"] = "off"  # as training found out then
    adapter, device = nested.get("adapter") or {}, start.get("hardware", {}).get("device", "cpu")
    if adapter.get("base_dtype") == "auto" and train.get("mixed_precision") == "bf16" and device != "cpu":
        adapter["base_dtype"] = "bf16"
    if ProcessInfo.from_environment().world_size != start["world_size"]:
        nested.pop("parallel", None)  # a pipeline is replayed as one process, or some, that have the whole model
    (nested.get("parallel") or {}).pop("context", None)  # losses of single samples need all of their tokens
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() not in ("1", "true", "yes", "y", "on", "t"):
        train["fsdp_gather"] = "float32"
        (nested.get("parallel") or {}).pop("replicas", None)
    return nested


def moved_data(task: Mapping[str, Any], words: Sequence[str]) -> dict[str, Any]:
    """Return the overrides that name the data where they are now.

    Args:
        task: the section of the recipe.
        words: of ``--data``: SPLIT=FILE for one of the data files, or a folder that has all of them, under their names.

    Raises:
        ConfigError: the recipe names no files; a word names nothing that is there.
    """
    overrides: dict[str, Any] = {}
    for word in words:
        split, equals, path = word.rpartition("=")
        if not Path(path).expanduser().exists():
            raise ConfigError(f"--data {word}: there is no {path}.")
        if equals:
            overrides[split if split.startswith("task.") else f"task.data_files.{split}"] = path
        elif task.get("data_dir") is not None:
            overrides["task.data_dir"] = path
        elif files := task.get("data_files"):
            for name, value in files.items():
                moved = [str(Path(path) / Path(file).name) for file in ([value] if isinstance(value, str) else value)]
                moved = [path] if Path(path).expanduser().is_file() else moved
                overrides[f"task.data_files.{name}"] = moved[0] if isinstance(value, str) else moved
        else:
            raise ConfigError(f"--data {word}: this run read no files of its own, so there is nothing to look for.")
    return overrides

"""The output folder of one run: its lock, where training starts from, and the results."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from hftune.atomic import restore, write_text
from hftune.checkpoints.bucket import Bucket
from hftune.checkpoints.checkpointer import path_of, remove_checkpoint, steps
from hftune.checkpoints.copying import CHECKPOINTS, GROWING, MODELS
from hftune.checkpoints.export import read_about
from hftune.checkpoints.lock import only_writer
from hftune.checkpoints.resume import Member, Start, check_finished, find_start, member, note_begun
from hftune.checkpoints.run_folder import OUT_OF_FOLD, PROFILE, REPORT, SAMPLE_IMAGES
from hftune.checkpoints.train_state import Provenance, TrainState
from hftune.config import Recipe
from hftune.config.addresses import is_address
from hftune.distributed.preflight import check_writable
from hftune.distributed.process_info import ProcessInfo
from hftune.errors import ConfigError, format_value
from hftune.strategies.base import Strategy

HISTORY = ("metrics.jsonl", "ledger.jsonl")
"""Files that a run resumed into a new folder brings along."""


@dataclass(kw_only=True)
class TrainResult:
    """The outcome of a run: result.json, and the folders. The same on every process, except for ``seconds``."""

    metrics: dict[str, Any]
    """Those of the last evaluation."""
    test: dict[str, Any] = field(default_factory=dict)
    """Metrics of the best model on the test split; empty if the task has none."""
    stopped_early: str | None = None
    """Why training ended before the last step of its schedule, if ``eval.patience`` was exhausted."""
    best: dict[str, Any]
    """metric, value and step of the model in model_dir; of a run that never evaluates, only the step, the last one."""
    commits: dict[str, str] = field(default_factory=dict)
    """Of what was loaded from the Hub, by the key that names the repository, such as task.model."""
    steps: int
    seconds: float
    """From the opening of the output folder to the end of training, evaluations included."""
    world_size: int
    versions: dict[str, str]
    output_dir: Path
    model_dir: Path
    """The best model by ``eval.metric``; the last one is in model_last beside it. The last one, if the run never evaluates."""

    @classmethod
    def read(cls, output_dir: Path) -> TrainResult:
        """Read the result of a finished run from its folder."""
        values = json.loads((output_dir / "result.json").read_text(encoding="utf-8"))
        return cls(**values, output_dir=output_dir, model_dir=output_dir / "model")

    def to_json(self) -> dict[str, Any]:
        """Return the contents of result.json."""
        return {key: value for key, value in asdict(self).items() if not isinstance(value, Path)}


class OutputDir:
    """A context that locks ``output_dir`` against other runs, from ``claim`` until everything that needs it is done.

    Only the main process reads or writes the folder. ``confirm`` and ``restore`` are collective; what the main process
    finds reaches the others through them.

    Args:
        callbacks: how those were made that ``train`` is given besides the recipe's.
    """

    def __init__(self, recipe: Recipe, callbacks: Sequence[str] = ()):
        self.recipe, self.path, self.callbacks = recipe, recipe.folder, [*callbacks]
        self.start = Start()
        """Where training starts; empty on the other processes."""
        self.bucket: Bucket | None = None
        """On the main process that has claimed it: where the folder is kept, if ``output_dir`` is an address."""
        self.is_ours: Callable[[], bool] = lambda: False
        """On the main process that has claimed it: whether it still has the folder, or a later round has taken it over."""
        self._held = ExitStack()
        self.before_release: Callable[[Callable[[], None]], Any] = self._held.callback
        """Takes what to call before the folder is released, when no process watches this one any more."""

    def __enter__(self) -> OutputDir:
        return self

    def __exit__(self, *error: Any) -> bool | None:
        return self._held.__exit__(*error)

    def claim(self) -> None:
        """On the main process: lock the folder, and find where training starts.

        Raises:
            ConfigError: the folder cannot be written, another run holds it, or a checkpoint in it does not fit the recipe.
        """
        if ProcessInfo.from_environment().is_main:
            check_writable(self.path)
            self.is_ours = self._held.enter_context(only_writer(self.path))
            if is_address(address := str(self.recipe.output_dir)):
                self.bucket = Bucket(address, self.path, self.is_ours)
                self._held.push(self.bucket.finish)
            self._find_start()

    def _find_start(self, group: Sequence[Member] | None = None) -> None:
        """See ``Bucket.claim`` and ``find_start``."""
        notices = [] if self.bucket is None else self.bucket.claim(self.recipe.resume, group)
        self.start = find_start(self.recipe, group, self.callbacks)
        self.start.notices[:0] = notices

    def check_finished(self, num_steps: int) -> None:
        """See ``resume.check_finished``."""
        check_finished(self.start, self.recipe, num_steps)

    def confirm(self, strategy: Strategy) -> None:
        """Look again, now that all processes are known: one on another node may know that this is a restart. Collective.

        Raises:
            ConfigError: as ``claim``.
        """
        group = strategy.gather_to_main(member())
        self.start = replace(self.start, group=group or ())

        def look() -> None:
            if self.recipe.resume == "never" and self.start.checkpoint is None:
                self._find_start(group)

        strategy.on_main(look)

    def restore(self, strategy: Strategy, provenance: Provenance, num_steps: int) -> tuple[TrainState, dict[str, Any]]:
        """Load model, optimizer and state from the checkpoint that training starts from, if any. Collective.

        Returns:
            The state, and what else the checkpoint has recorded, see Provenance; nothing of a run that begins.

        Raises:
            ConfigError: the checkpoint belongs to other commits of the Hub, different data, a different model or different
                frozen weights; or it is beyond the last step.
        """
        checkpoint = self.start.checkpoint
        progress, path, changed = strategy.broadcast(
            (checkpoint.progress, str(checkpoint.path), [*self.start.changed]) if checkpoint else (None, "", [])
        )
        if progress is None:
            return TrainState(), {}
        strategy.on_main(lambda: self.check_finished(num_steps))  # ``confirm`` may have found it
        check_commits(path, progress.get("commits", {}), provenance.commits)
        # Without evaluation from here on (eval.every=never), there are no evaluation data to differ.
        now = provenance.digests
        if different := [name for name, digest in progress["digests"].items() if now.get(name, digest) != digest]:
            raise ConfigError(f"{path} was trained on different {' and different '.join(different)}. resume=never starts over.")
        check_base(path, progress.get("base"), provenance.base, "; resume=never starts over")
        check_reference(path, progress.get("reference"), provenance.reference, "; resume=never starts over")
        try:
            strategy.sharding.load_state((checkpoint.tensors, progress["values"]) if checkpoint else None)
        except ValueError as error:
            raise ConfigError(f"{path} belongs to a different model: {error}.") from error
        if checkpoint:
            checkpoint.tensors.clear()  # they take as much memory as model and optimizer
        state = read_state(path, progress["state"])
        if state.step > num_steps:
            raise ConfigError(
                f"The checkpoint is of step {state.step}, and train.epochs={self.recipe.train.epochs} with "
                f"train.max_steps={format_value(self.recipe.train.max_steps)} ends after step {num_steps}. Raise them, "
                "or set resume=never."
            )
        # If the task declares the metric's direction, only the metric decides which model is the best.
        declares = self.recipe.declared_direction is not None
        if "eval.metric" in changed or ("eval.greater_is_better" in changed and not declares):
            state.forget_scores()
        if "callbacks" in changed:  # one that is not there any more may have ended the training
            state.ended_by = None
        return state, progress

    def finished_result(self, strategy: Strategy, state: TrainState, num_steps: int) -> TrainResult | None:
        """Return the result of a run that has no step left to take; None if it has, or never wrote its result. Collective."""

        def read() -> TrainResult | None:
            is_there = (self.path / "result.json").is_file() and (self.path / "model").is_dir()
            if is_there and self.bucket is not None:  # it may not have everything
                self.bucket.begin(self.recipe.checkpoint)
            return TrainResult.read(self.path) if is_there else None

        return strategy.on_main(read) if state.has_ended(num_steps, self.recipe.eval.patience) else None

    def find_best(self, strategy: Strategy, state: TrainState) -> None:
        """Set the state's best step and value to those of the model in the folder, or to none if it holds none. Collective."""
        if state.step == 0:
            return
        if self.recipe.eval.is_off:  # from here on; what was evaluated were other weights
            state.forget_best()
            state.metrics = {}
        elif best := strategy.on_main(lambda: self._best(state)):
            state.best_step, state.best = best
        else:
            state.forget_best()

    def _best(self, state: TrainState) -> tuple[int, float] | None:
        """Return step and value of the best model in the folder, if it belongs to this run.

        It does not if the checkpoint comes from another folder. A model that was written after the checkpoint and before a
        kill is better than the one the checkpoint knows of; unless the resumed training would not lead to it. It may be of the
        checkpoint's own step: a request to stop writes one before the evaluation.
        """
        restore(self.path / "model")
        about = read_about(self.path / "model")
        if about.get("metric") != self.recipe.eval.metric:
            return None
        best = about["step"], about["value"]
        if best == (state.best_step, state.best):
            return best
        is_ours = self.start.checkpoint.path.resolve().parents[1] == self.path.resolve()
        leads_there = all(key == "eval.every" for key in self.start.telling)
        return best if is_ours and leads_there and about["step"] >= state.step else None

    def open(self, state: TrainState) -> None:
        """Bring the folder to where training starts. Main process only; ``start_folder`` removes an earlier run."""
        if state.step == 0:
            start_folder(self.path)
        elif (origin := self.start.checkpoint.path.resolve().parents[1]) != self.path.resolve():
            for name in HISTORY:
                (self.path / name).unlink(missing_ok=True)  # of a run that was killed before its first checkpoint
                if (origin / name).is_file():
                    shutil.copyfile(origin / name, self.path / name)
        else:
            remove_samples(self.path / SAMPLE_IMAGES, after=state.step)
            for step in steps(self.path / CHECKPOINTS):
                if step > state.step:  # broken, or it would start there
                    remove_checkpoint(path_of(self.path / CHECKPOINTS, step))
        evaluated = ("predictions.jsonl", OUT_OF_FOLD) if self.recipe.eval.is_off else ()
        # Of a finished run, or of other weights:
        for name in ("result.json", "receipt.json", REPORT, "model/README.md", *evaluated):
            (self.path / name).unlink(missing_ok=True)
        note_begun(self.path, self.start.group)
        write_text(self.path / "recipe.yaml", self.recipe.to_yaml())
        if self.bucket is not None:
            self.bucket.begin(self.recipe.checkpoint)


def start_folder(path: Path) -> None:
    """Remove an earlier run from the folder; its model, too, which would be taken for the new recipe's."""
    path.mkdir(parents=True, exist_ok=True)
    if (path / "result.json").exists() or steps(path / CHECKPOINTS):
        print(f"note: {path} holds an earlier run; this run replaces it.", flush=True)
    for name in MODELS:
        restore(path / name)  # a kill may have left it under its other name
    for name in (
        *MODELS,
        "model_merged",  # by hftune merge
        CHECKPOINTS,
        PROFILE,
        *GROWING,  # tensorboard would draw both runs in one plot
    ):
        shutil.rmtree(path / name, ignore_errors=True)
    predictions = (file.name for file in path.glob("predictions*.jsonl"))
    for name in ("result.json", "receipt.json", *predictions, OUT_OF_FOLD, REPORT, *HISTORY):
        (path / name).unlink(missing_ok=True)


def remove_samples(folder: Path, after: int) -> None:
    """Remove the images of evaluations after a step, which a resumed run may never make again."""
    for path in folder.glob("step_*"):
        if (number := path.stem.removeprefix("step_")).isdecimal() and int(number) > after:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def read_state(path: str, values: Mapping[str, Any]) -> TrainState:
    """Return the loop's state as a checkpoint has it.

    Raises:
        ConfigError: a different version of hftune wrote it, whose state has other fields.
    """
    known = {item.name for item in fields(TrainState)}
    if odd := sorted(values.keys() ^ known):
        raise ConfigError(
            f"{path} was written by a different version of hftune: its state differs in {', '.join(odd)}. Resume with that "
            "version; or start over with resume=never or a different output_dir."
        )
    return TrainState(**values)


def check_commits(path: str, before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Refuse to resume with commits of the Hub other than the checkpoint's, or raise ConfigError; older ones name none."""
    for key, commit in before.items():
        if now.get(key, commit) != commit:
            raise ConfigError(
                f"{path} was trained with commit {commit} of {key}, and commit {now[key]} was loaded now: the repository has "
                f"changed on the Hub. {key}_revision={commit} resumes with the old one; resume=never starts over."
            )


def check_base(path: str, before: str | None, now: str | None, hint: str = "") -> None:
    """Refuse to go on with adapters on other frozen weights than they were trained on, or raise ConfigError."""
    if before != now:
        raise ConfigError(
            f"{path} holds adapters of another base model: the frozen weights that are loaded now have other values or "
            f"another precision. Restore task.model as it was when the run began{hint}."
        )


def check_reference(path: str, before: str | None, now: str | None, hint: str = "") -> None:
    """Refuse to compare with another starting model than the training did, or raise ConfigError; older files name none."""
    if None not in (before, now) and before != now:
        raise ConfigError(
            f"{path} was trained with another reference, whose weights are others now. Restore task.model, task.weights, "
            f"adapter and train.reference as they were when the run began{hint}."
        )

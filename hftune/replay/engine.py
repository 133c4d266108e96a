"""Computes past steps of a run again, as training did: the same set-up, the same batches, from the nearest checkpoint.

What is written here is how to get to a step; how a step is computed is in the strategies, as for training.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hftune.batch_plan import BatchPlan
from hftune.build import Parts, build, choose_strategy, load_datasets
from hftune.checkpoints.checkpointer import Checkpoint, Checkpointer
from hftune.checkpoints.output_dir import check_base
from hftune.checkpoints.train_state import Provenance, TrainState
from hftune.config import CheckpointConfig, Recipe
from hftune.data.augmentation import augmented
from hftune.distributed.accelerator import start_accelerator
from hftune.distributed.collectives import Collectives
from hftune.distributed.consistency import fingerprint
from hftune.distributed.session import Session
from hftune.errors import ConfigError, TrainingError
from hftune.optim import ema_decay_at, lr_at
from hftune.replay.history import NO_CHANGE, Change, History, keys_of
from hftune.replay.samples import LeavingOut
from hftune.settle import PARTS, default_parts, prepare, settle_micro_batches, warm_up_strategy
from hftune.strategies.base import StepBatch, StepReport, Strategy
from hftune.strategies.data_parallel import DataParallel
from hftune.strategies.sharding import SavedState
from hftune.task import Task
from hftune.tracking.facts import hardware

Look = Callable[["Replayer", StepBatch, StepReport], None]


@dataclass(frozen=True)
class ReplayedStep:
    """What one step gave when it was computed again."""

    step: int
    """Counted from 1."""
    epoch: int
    """Counted from 0, as is ``step_in_epoch``."""
    step_in_epoch: int
    loss: float
    grad_norm: float
    lr: float
    items: float
    num_samples: int
    digest: str
    samples: np.ndarray
    """Numbers of the rows in the training data, in the order of the step's micro-batches."""


@dataclass(frozen=True)
class Terms:
    """Under what a step is computed. Steps of equal terms follow each other without a new set-up."""

    recipe: Recipe = field(compare=False)
    start: Mapping[str, Any] = field(compare=False)
    """The line of the ledger that training wrote when it last started before the step."""
    text: str


class Replayer:
    """A context in which past steps of a run are computed again. Every method is collective: all processes call it alike.

    It joins the other processes of the job, or works alone in a process without launcher. The run's folder has to be readable
    on all nodes; checkpoints are read on the main process alone.

    Args:
        history: of the run.
        step: the first step to look at; the replay begins at the checkpoint before it.
        change: what is done differently.

    Raises:
        ConfigError: the recipe cannot be run here, the data are others than the run's, or a key cannot be changed.
        DataError: the data cannot be trained on.
    """

    strategy: Strategy
    parts: Parts
    task: Task
    datasets: Mapping[str, Any]
    digests: dict[str, str]
    """Of the data here, such as {"train data": "all:..."}."""
    step: int
    """The last step that was computed; at first, that of the checkpoint. While one is looked at, that one."""

    def __init__(self, history: History, step: int, change: Change = NO_CHANGE):
        history.check_change(change)
        self.history, self.change = history, change
        self.notices: list[str] = []
        """What a user should know, one sentence each; on the main process."""
        self._first = step
        self._known: dict[tuple[int, bool], Terms] = {}  # by the start line in force, and whether the change is
        self._terms: Terms | None = None
        self._data_of: dict[str, Any] = {}
        self._num_threads = torch.get_num_threads()

    @property
    def terms(self) -> Terms:
        """Under what the present step is computed."""
        assert self._terms is not None
        return self._terms

    @property
    def recipe(self) -> Recipe:
        """The recipe of the present step."""
        return self.terms.recipe

    @property
    def plan(self) -> BatchPlan:
        return self.parts.plan

    def __enter__(self) -> Replayer:
        recipe = self.history.recipe_at(self._first, *self.change.overrides_at(self._first))
        with ExitStack() as stack:
            self.session = stack.enter_context(Session(recipe))
            self._load_data(recipe)
            self.group = Collectives(self.session.join(), self.session.progress)
            stack.callback(torch.set_num_threads, self._num_threads)
            stack.callback(self._end_workers)
            self._begin(recipe)
            self._stack = stack.pop_all()
        return self

    def restart(self, change: Change) -> None:
        """Begin again at the checkpoint before the first step, with another change. Data are loaded again only if they differ.

        Raises:
            ConfigError, DataError: as when a replay is begun.
        """
        self.history.check_change(change)
        self.change, self._known, self._terms = change, {}, None
        recipe = self.history.recipe_at(self._first, *change.overrides_at(self._first))
        self._load_data(recipe)
        self._begin(recipe)

    def _begin(self, recipe: Recipe) -> None:
        recipe.task, self.session.recipe = self.task, recipe  # whose data are compared
        self.digests = self.session.compare(self.group, self.datasets, self.task.commits())
        self.rewind(self._first)

    def __exit__(self, *error: Any) -> bool | None:
        return self._stack.__exit__(*error)

    def rewind(self, step: int) -> None:
        """Go to the newest intact checkpoint before a step; to the first weights if there is none."""
        self._go_to(lambda: self.history.checkpoint_before(step, self.notices))

    def load(self, checkpoint_step: int) -> None:
        """Go to exactly this checkpoint; 0: the first weights.

        Raises:
            ConfigError: it is not there, or not intact.
        """

        def find() -> tuple[int, Checkpoint | None]:
            checkpoint = self.history.checkpoint_at(checkpoint_step) if checkpoint_step else None
            if checkpoint_step and checkpoint is None:
                raise ConfigError(f"{self.history.folder} has no intact checkpoint of step {checkpoint_step:,}.")
            return checkpoint_step, checkpoint

        self._go_to(find)

    def advance(self, last: int, look: Look | None = None) -> Iterator[ReplayedStep]:
        """Compute the steps up to ``last``, one each time the iterator is asked for the next. Skipped ones are not yielded.

        Args:
            look: called on every process in each step, once the gradient is there and clipped and before the optimizer's step.
                It may use model and gradient, and must leave both as they were.
        """
        while self.step < last:
            terms = self._terms_of(self.step + 1)
            if terms != self._terms:
                self._set_up(terms, self.strategy.sharding.state(), self.step)
            if self.step >= self.parts.num_steps:
                raise ConfigError(
                    f"With this change the run ends after step {self.parts.num_steps:,}: there is no step {self.step + 1:,}. "
                    "Leave train.max_steps and train.epochs as they are, or ask for earlier steps."
                )
            epoch, place = divmod(self.step, self.plan.num_steps)
            if self._skips(self.step + 1):
                self.step += 1
                continue
            if isinstance(self.strategy, LeavingOut):  # before the samples are loaded, and their items counted
                self.strategy.left_out = self.change.without if self.step + 1 >= self.change.from_step else frozenset()
            order, workers = self.plan.epoch(epoch), self.recipe.train.num_workers
            steps = (order[index] for index in range(place, len(order)))
            with closing(self.strategy.batches(self._augmented, steps, workers, epoch)) as batches:
                for batch in batches:
                    yield self._compute(batch, look)
                    following = self.step + 1  # from the same pass over the data, if nothing changes
                    if self.step >= last or following == self.change.from_step or self._skips(following):
                        break
                    if self._terms_of(following) != self._terms:
                        break

    def batch_of(self, step: int) -> StepBatch:
        """Return this process's part of any step, loaded, without computing anything. Not collective."""
        epoch, place = divmod(step - 1, self.plan.num_steps)
        strategy, batch = self.strategy, self.strategy.assign(self.plan.epoch(epoch)[place])
        loader = strategy.loader(self._augmented, num_workers=0, is_packed=True)
        batch.batches = [*loader.read([micro_batch.samples.tolist() for micro_batch in batch.mine], epoch)]
        batch.counts = strategy.counts(batch)
        return batch

    def environment(self) -> dict[str, Any]:
        """Return what decides the last bits here, by the names of a start line of the ledger."""
        own = fingerprint(self.recipe)
        return {
            "world_size": self.strategy.num_processes,
            "strategy": type(self.strategy).__name__,
            "hardware": json.loads(json.dumps(hardware(self.strategy.device))),
            "code": own["code"],
            "packages": own["packages"],
        }

    def weights(self) -> dict[str, dict[str, Tensor]]:
        """Return copies of the present weights, and of their averages, as in checkpoints; none but on the main process."""
        saved = self.strategy.sharding.state()
        groups = {} if saved is None else {group: tensors for group, tensors in saved[0].items() if group != "optimizer"}
        return {group: {name: value.clone() for name, value in tensors.items()} for group, tensors in groups.items()}

    def save(self, folder: Path) -> None:
        """Write a checkpoint of the present step into a folder beside the run, from which later replays may start."""
        saved = self.strategy.sharding.state()
        if saved is None:
            return
        tensors, values = saved
        epoch, place = divmod(self.step, self.plan.num_steps)
        state = asdict(TrainState(self.step, epoch, place))
        commits = self.task.commits() | self.parts.commits
        provenance = Provenance(self.digests, commits, self.strategy.precision)
        provenance.base, provenance.reference = self.parts.base, self.parts.reference
        progress = {"state": state, "values": values, **asdict(provenance), "replayed": self.history.line_digest(self.step)}
        writer = Checkpointer(folder, CheckpointConfig(keep=sys.maxsize))
        writer.write(self.step, tensors, progress, self.recipe.to_yaml(), None, [])
        writer.wait()
        if writer.failure is not None:
            raise TrainingError(f"The checkpoint of step {self.step:,} could not be written: {writer.failure}.")

    def _load_data(self, recipe: Recipe) -> None:
        """Load the data of a recipe, unless they are those that are there."""
        what = {key: value for key, value in recipe.to_dict().items() if key in ("seed", "task")} | {"off": recipe.eval.is_off}
        if what == self._data_of:
            return
        self.session.progress.stage("preparing the data")
        self._data_of = {}
        self.task, self.datasets = recipe.task, load_datasets(recipe)
        self._augmented = augmented(self.datasets["train"], self.task, recipe.seed, 0)
        then, now = self.history.start_of(self._first)["plan"]["num_samples"], len(self.datasets["train"])
        if then != now and not self._changes_data:
            raise ConfigError(
                f"The training data have {now:,} rows, and had {then:,} when {self.history.folder} was trained: they are "
                "others. Restore them, or say where they are: --data FOLDER."
            )
        self._data_of = what

    @property
    def _changes_data(self) -> bool:
        return any(key.partition(".")[0] == "task" for key in keys_of(self.change.overrides))

    def _terms_of(self, step: int) -> Terms:
        start = self.history.start_of(step)
        is_changed = bool(self.change.overrides_at(step))
        key = id(start), is_changed
        if key not in self._known:
            recipe = self.history.recipe_at(step, *self.change.overrides_at(step))
            text = recipe.to_yaml()
            recipe.task = self.task  # it knows what was found in the data
            if self.change.without:
                recipe.train.head_loss = "whole"  # otherwise no sample has a loss of its own
            self._known[key] = Terms(recipe, start, text)
        return self._known[key]

    def _go_to(self, find: Callable[[], tuple[int, Checkpoint | None]]) -> None:
        """Start from what ``find`` returns on the main process: a step, and its checkpoint."""
        found: list[Checkpoint] = []

        def read() -> tuple[int, str | None]:
            step, checkpoint = find()
            found.extend([checkpoint] if checkpoint else [])
            return step, checkpoint.progress.get("base") if checkpoint else None

        self.session.progress.stage("reading the checkpoint")
        step, base = self.group.on_main(read)
        saved = (found[0].tensors, found[0].progress["values"]) if found else None
        terms = self._terms_of(step + 1)
        if step and hasattr(self, "strategy") and terms == self._terms:
            optimizer = self.strategy.sharding.bare_optimizer  # back to before its first step, but for the weights
            optimizer.state.clear()
            for group, options in zip(optimizer.param_groups, self.strategy.sharding.initial_options, strict=True):
                group.update(options)
            self._load(saved, step)
        else:
            self._set_up(terms, saved, step)
        if step:
            check_base(f"The checkpoint of step {step:,}", base, self.parts.base)

    def _set_up(self, terms: Terms, saved: SavedState | None, step: int) -> None:
        """Build model and optimizer as training did, with the weights after a step. Collective."""
        if hasattr(self, "strategy"):  # free its memory
            self._end_workers()
            del self.strategy, self.parts
        self._terms, recipe = terms, terms.recipe
        threads, world_size = terms.start.get("hardware", {}).get("threads"), terms.start["world_size"]
        if threads and world_size == self.group.num_processes and self.group.device.type == "cpu":
            torch.set_num_threads(threads)  # their number changes the last bits
        parts = build(recipe, self.session.progress, self.datasets)
        accelerator = start_accelerator(recipe.train)
        self.strategy = strategy = choose_strategy(accelerator, recipe, self.session.progress)
        if self.change.without:
            if parts.teacher is not None:
                raise ConfigError("--without does not work with train.teacher.")
            if type(strategy) is not DataParallel:
                name = type(strategy).__name__
                raise ConfigError(f"--without does not work under {name}. Replay on one process, without a launcher.")
            self.strategy = strategy = LeavingOut(accelerator, self.task, self.session.progress)
        self.parts = parts
        prepare(recipe, strategy, parts)
        noted = None if step or self._changes_data else terms.start.get("weights")
        # Otherwise they were drawn differently, or this is another model.
        if noted is not None and strategy.sharding.digest() != noted and strategy.is_main:
            self.notices.append("The first weights differ from those that the run began with.")
        if parts.teacher is not None and parts.teacher.digest != terms.start.get("teacher") and strategy.is_main:
            self.notices.append("The weights of the teacher differ from those of the run.")
        if step:
            self._load(saved, step)
        self.step = step
        settle_micro_batches(recipe, strategy, parts, {})
        self._keep_parts(terms)
        warm_up_strategy(recipe, strategy, parts.plan, self.datasets)

    def _load(self, saved: SavedState | None, step: int) -> None:
        try:
            self.strategy.sharding.load_state(saved)
        except ValueError as error:
            raise ConfigError(f"The checkpoint of step {step:,} belongs to a different model: {error}.") from error
        self.step = step

    def _keep_parts(self, terms: Terms) -> None:
        """Cut steps into the micro-batches of the run: a pipeline's are more, and the dropout of each is keyed by it."""
        plan, stages = self.parts.plan, terms.start.get("recipe", {}).get("parallel", {}).get("pipeline_stages", 1)
        if plan.packed and stages > 1 and self.recipe.train.parts is None:
            self.parts.plan = replace(plan, parts=default_parts(plan, PARTS[0]))
        then = terms.start.get("packed", plan.packed)
        if then != plan.packed and not self.change.overrides:
            now, before = ("no padding", "padding") if plan.packed else ("padding", "no padding")
            self.notices.append(f"{before.capitalize()} was computed in the run, and {now} is here: dropout differs.")

    def _skips(self, step: int) -> bool:
        return step in self.change.skip or step in (getattr(self.recipe.train, "skip", None) or ())

    def _compute(self, batch: StepBatch, look: Look | None) -> ReplayedStep:
        strategy, config, index = self.strategy, self.recipe.train, self.step
        strategy.progress.stage(f"step {index + 1}")
        num_falls = self.history.falls.get(index + 1, 0)  # they follow from the run's evaluations, which are not made again
        lr = lr_at(index, self.parts.num_steps, config, self.plan.num_steps, num_falls)
        strategy.forward_backward(batch, self.recipe.seed, index)
        report = strategy.report(strategy.clip_grad_norm(config.clip_norm))
        self.step += 1
        if look is not None:
            look(self, batch, report)
        strategy.optimizer_step(lr)
        strategy.sharding.clear_gradient()
        strategy.sharding.average_weights(ema_decay_at(index, config))
        return ReplayedStep(
            self.step,
            *divmod(index, self.plan.num_steps),
            report.loss,
            report.grad_norm,
            lr,
            report.num_items,
            report.num_samples,
            report.digest,
            np.concatenate([micro_batch.samples for micro_batch in batch.plan]),
        )

    def _end_workers(self) -> None:
        if hasattr(self, "strategy"):
            self.strategy.end_workers()

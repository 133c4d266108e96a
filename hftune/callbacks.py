"""What happens in a training, and who hears of it: callbacks, ours and yours. They see everything and change nothing.

The whole of a training, with the events that callbacks hear of:

    # All processes have joined, and the checkpoint is loaded, if there is one.
    on_begin
    for each epoch:
        for each step of it:
            on_step_begin                       # its samples are not loaded yet
            # forward and backward passes of all micro-batches, on all processes
            # clip the gradient, take the optimizer step
            on_step                             # weights are new, the gradient is still there
            if train.log_every asks for it, or a callback has logged a value:
                on_log                          # one line of metrics.jsonl
            if eval.every asks for it, or a callback has, or this was the last step:
                # score the eval split
                on_log                          # the line with its metrics
                # export the model, if it is the best so far
                on_evaluation
            if checkpoint.every asks for it, or a callback has, or this was the last step:
                # copy model and optimizer; a thread writes the copy
                on_checkpoint                   # in that thread, once the checkpoint is complete
    # export the last model, score the best one on the test split
    on_end
    # write result.json
    # or else, wherever it happens: an error, a lost process, or a request to stop
    on_failure

Our own callbacks are listed in hftune/opening.py, in the order in which they run; the user's come after them. Of a failure
they hear in reverse: trackers, which may wait for a network, come last.
It knows no process, no file and no tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from pprint import pformat
from typing import TYPE_CHECKING, Any, Self

from hftune.config.importing import import_named
from hftune.errors import ConfigError, first_line, format_value

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import nn

    from hftune.batch_plan import BatchPlan, MicroBatch
    from hftune.checkpoints.output_dir import TrainResult
    from hftune.config import Recipe

EVENTS = ("on_begin", "on_step_begin", "on_step", "on_log", "on_evaluation", "on_checkpoint", "on_end", "on_failure")
OWN_VALUES = ("train/", "eval/", "test/")
"""How the names of values begin that hftune alone logs."""


class Wishes:
    """What callbacks have asked for and logged, and the loop has not done yet. Of one process.

    Args:
        pending: part of the loop's state, so that a checkpoint keeps what the next step is to tell all processes.
    """

    def __init__(self, pending: dict[str, str]):
        self.pending = pending
        self.values: dict[str, float] = {}

    def take_values(self) -> dict[str, float]:
        """Return the values that were logged since the last call."""
        values, self.values = self.values, {}
        return values


@dataclass(frozen=True, slots=True, kw_only=True)
class _Moment:
    """A moment between two steps, in which callbacks may log values and ask for something."""

    step: int
    """Optimizer steps so far, this one included."""
    epoch: float
    """Passes over the training data so far, with a fraction."""
    wishes: Wishes = field(repr=False)

    def log(self, name: str, value: float) -> None:
        """Add a value to metrics.jsonl and the trackers, at this step. On the main process; ignored on the others.

        Args:
            name: with a section of your own, such as "grads/embedding".
            value: a number, or a tensor with one element.

        Raises:
            ValueError: the name has no section, or one that is hftune's.
        """
        if "/" not in name or name.startswith(OWN_VALUES):
            raise ValueError(f"A callback cannot log {name!r}: choose a name such as my_values/{name.rpartition('/')[2]}.")
        self.wishes.values[name] = value if isinstance(value, (int, float)) else float(value)

    def ask_for_evaluation(self) -> None:
        """Ask for an evaluation. The sums of the next step tell all processes, so it is made after that step."""
        self.wishes.pending["evaluation"] = ""

    def ask_for_checkpoint(self) -> None:
        """Ask for a checkpoint, which is written after the next step; see ``ask_for_evaluation``."""
        self.wishes.pending["checkpoint"] = ""

    def ask_to_stop(self, reason: str) -> None:
        """Ask to end the training after the next step, as if it were the last one: it is evaluated, saved and finished.

        Args:
            reason: for result.json and whoever reads the output, as a part of a sentence: "the loss is below 0.1".
        """
        self.wishes.pending["stop"] = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """Training is about to begin, or to go on from a checkpoint."""

    recipe: Recipe
    model: nn.Module
    """The model in training: whole on each process, except under FSDP and in pipelines. Look at it, don't change it."""
    plan: BatchPlan
    datasets: Mapping[str, Any]
    """By split: train, eval and test, as far as there are such."""
    output_dir: Path
    step: int
    """Steps taken so far; 0 unless the run is resumed."""
    num_steps: int
    """Of the whole run."""
    process_index: int
    num_processes: int
    device: torch.device
    facts: Mapping[str, Any] = field(repr=False)
    """The contents of run.json. Empty on other processes than the main one."""


@dataclass(frozen=True, slots=True)
class StepBegin:
    """A step is about to be taken. Its samples have not been loaded yet, unless a worker or a thread reads ahead."""

    step: int
    """From 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step(_Moment):
    """An optimizer step was taken, or skipped because ``train.skip`` says so. The gradient is still in the parameters."""

    loss: float | None = None
    """Mean over the items of the global batch; None of a skipped step, which has none of the values below either."""
    grad_norm: float | None = None
    """Of the global gradient, before it was clipped."""
    lr: float | None = None
    teacher_kl: float | None = None
    """KL(teacher || student) at ``train.teacher_temperature``, mean over the items; None without ``train.teacher``."""
    num_items: float = 0.0
    """Number of items that the loss is the mean of: samples, tokens or pixels."""
    num_samples: int = 0
    digest: str = ""
    """Of the numbers of the samples; see ``samples_digest``."""
    seconds: float = 0.0
    """Since the previous step, without evaluations and checkpoints."""
    place: tuple[int, int] = (0, 0)
    """The epoch, and the step in it, both from 0."""
    is_logged: bool = False
    """Whether ``train.log_every`` asks for a line of metrics.jsonl of this step."""
    is_last: bool = False
    """Whether no step follows in this process: the run ends here, or was asked to stop. After an evaluation that exhausts
    ``eval.patience`` none follows either."""
    micro_batches: Sequence[MicroBatch] = field(default=(), repr=False)
    """The whole global batch, with the numbers of its samples."""

    @property
    def is_skipped(self) -> bool:
        return self.loss is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """A line of metrics.jsonl."""

    step: int
    epoch: float
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationDone(_Moment):
    """The eval split was scored, then each of ``eval.sets``; or at the end the test split, by the best model."""

    split: str
    """eval; eval/NAME for one of ``eval.sets``; or test."""
    metrics: Mapping[str, Any]
    """By their names; of the eval split, those of each of ``eval.sets`` follow as NAME/metric."""
    rows: Sequence[Mapping[str, Any]] = field(repr=False)
    """The lines of predictions.jsonl, one a sample, in the order of the data. Empty on other processes than the main one."""
    samples: Sequence[Mapping[str, Any]] = field(default=(), repr=False)
    """The first rows, with the fields that show a sample: ``eval.show_samples`` and the task decide. On the main process."""
    images: Sequence[np.ndarray] = field(default=(), repr=False)
    """(H, W, 3) uint8, of the first samples, if the task draws any; and a caption for each. On the main process."""
    captions: Sequence[str] = field(default=(), repr=False)
    labels: Sequence[str] | None = field(default=None, repr=False)
    """Class names, if the task has any."""
    best: float | None = None
    """The best value of ``eval.metric`` so far."""
    best_step: int | None = None

    @property
    def is_best(self) -> bool:
        """Whether this is the best evaluation so far; ``model/`` then holds its model."""
        return self.split == "eval" and self.step == self.best_step


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointDone:
    """A checkpoint is complete, or could not be written."""

    step: int
    path: Path
    hashes: Mapping[str, str] = field(default_factory=dict, repr=False)
    """SHA-256 of the files of tensors: model and optimizer."""
    waited_s: float = 0.0
    """For which training had to wait; the rest of the time, it went on."""
    failure: str | None = None
    """Why it could not be written, in words. None: it is complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """Training has ended, and everything is saved but result.json, which is written once all have heard of it; and, if
    ``on_checkpoint`` has said so, the last checkpoint: then ``on_failure`` follows."""

    result: TrainResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The run ends before its last step. The process ends within seconds, whether or not callbacks have returned."""

    reason: str
    """In one sentence."""
    is_interruption: bool
    """The run was asked to stop, by a signal for example; the same command resumes it. Otherwise it failed."""


class Callback:
    """Hears of what happens in a training. Subclass it and override the events you want to hear of.

    Name it in a recipe, ``callbacks: [my_module.Watch]``, or pass it to ``train(recipe, callbacks=[Watch()])``. Training waits
    until a method returns, so return soon. A callback must not change model, optimizer or data: then the losses are the same
    with it and without it. Use no collective operation in it.

    If a method raises an exception, a warning says so, and the callback hears of nothing more; training goes on.
    """

    on_all_processes = False
    """Whether all processes call it. By default only the main one does. ``on_checkpoint`` is the main process's in any case."""
    must_not_fail = False
    """Whether an exception in it ends the run."""

    def __new__(cls, *arguments: Any, **named: Any) -> Self:
        if cls.__init__ is object.__init__ and (arguments or named):  # which does not look, where there is a __new__
            raise TypeError(f"{cls.__qualname__} takes no arguments")
        made = super().__new__(cls)
        given = re.sub(r" at 0x[0-9a-f]+", "", pformat([arguments, named], width=1))  # which sorts sets
        name = f"{cls.__module__}.{cls.__qualname__} {sha256(given.encode()).hexdigest()[:16]}"
        object.__setattr__(made, "made_as", name)  # frozen dataclasses, too
        return made

    made_as: str
    """Its class and a digest of its arguments, which may be secrets: a run that it has ended goes on if that changes."""

    def on_begin(self, begin: Begin) -> None:
        """Training is about to begin or to go on."""

    def on_step_begin(self, begin: StepBegin) -> None:
        """A step is about to be taken."""

    def on_step(self, step: Step) -> None:
        """A step was taken. Parameters hold the new weights, and ``parameter.grad`` the clipped gradient of the global batch;
        of FSDP and pipelines, this process's part of both."""

    def on_log(self, log: Log) -> None:
        """A line of metrics.jsonl was written."""

    def on_evaluation(self, evaluation: EvaluationDone) -> None:
        """A split was scored."""

    def on_checkpoint(self, checkpoint: CheckpointDone) -> None:
        """A checkpoint is complete. This is called by the thread that has written it, while training goes on."""

    def on_end(self, end: End) -> None:
        """The run is finished. result.json is written once all callbacks have heard of it: ``end.result`` has what it says."""

    def on_failure(self, failure: Failure) -> None:
        """The run ends early; perhaps in a thread of its own, and at most once."""


class Callbacks:
    """All callbacks of this process, in the order in which they hear of each event."""

    def __init__(self, callbacks: Iterable[Callback], is_main: bool):
        self._all = [callback for callback in callbacks if is_main or callback.on_all_processes]
        # Only what is overridden is called: an event that nobody wants to hear of costs nothing.
        self._listening = {
            event: [callback for callback in self._all if getattr(type(callback), event) is not getattr(Callback, event)]
            for event in EVENTS
        }
        self._listening["on_failure"].reverse()
        self._kept: Exception | None = None

    def tell(self, event: str, record: Any, keep: bool = False) -> None:
        """Let all callbacks hear of an event.

        Args:
            keep: keep what would be raised for the next call, as this thread is not the one that trains.

        Raises:
            Exception: one that must not fail has failed, now or in the other thread before.
        """
        if event != "on_failure" and not keep:
            self.raise_kept()
        for callback in [*self._listening[event]]:
            try:
                getattr(callback, event)(record)
            except Exception as error:
                if callback.must_not_fail and event != "on_failure":
                    if not keep:
                        raise
                    self._kept = error
                    continue
                for listening in self._listening.values():
                    if callback in listening:
                        listening.remove(callback)
                name = f"{type(callback).__module__}.{type(callback).__qualname__}"
                said = f"{name}.{event} failed: {first_line(error)}. It is not called again; training continues."
                print(f"warning: {said}", flush=True)

    def raise_kept(self) -> None:
        """Raise what a callback that must not fail has raised in the thread that writes checkpoints, if anything."""
        if self._kept is not None:
            raise self._kept


def make_callbacks(named: Sequence[str | Mapping[str, Any]]) -> list[Callback]:
    """Make the callbacks that the key ``callbacks`` of a recipe names.

    Raises:
        ConfigError: one cannot be imported, is no Callback, or does not take these arguments.
    """
    made = []
    for entry in named:
        arguments = {"type": entry} if isinstance(entry, str) else dict(entry)
        name = arguments.pop("type")
        module, _, attribute = name.rpartition(".")
        found = import_named("callbacks", name, module, attribute)
        if not (isinstance(found, type) and issubclass(found, Callback)):
            raise ConfigError(f"callbacks: {name} is not a subclass of hftune.Callback.")
        try:
            made.append(found(**arguments))
        except TypeError as error:
            given = format_value(arguments) if arguments else "no arguments"
            raise ConfigError(f"callbacks: {name} cannot be made from {given}: {error}.") from error
    return made

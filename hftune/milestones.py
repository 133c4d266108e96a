"""A run, and what some of its steps end with: a line of the log, an evaluation, a checkpoint. It knows no forward pass."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NoReturn

from hftune.atomic import GrowingFile
from hftune.batch_plan import BatchPlan
from hftune.callbacks import Callbacks, CheckpointDone, EvaluationDone, Log, Wishes
from hftune.checkpoints.checkpointer import Checkpointer, path_of
from hftune.checkpoints.export import export
from hftune.checkpoints.train_state import Provenance, TrainState
from hftune.config import Recipe
from hftune.distributed.progress import marked_while_moving
from hftune.distributed.signals import StopRequest
from hftune.errors import Interrupted
from hftune.evaluation import Evaluation, evaluate, score_of
from hftune.optim import num_warmup_steps
from hftune.strategies.base import Strategy
from hftune.task import ask
from hftune.tracking.throughput import Stopwatch


@dataclass
class Run:
    """What one training run works with."""

    recipe: Recipe
    strategy: Strategy
    plan: BatchPlan
    datasets: Mapping[str, Any]
    num_steps: int
    """Optimizer steps from the first to the last, those before an interruption included."""
    state: TrainState
    provenance: Provenance
    callbacks: Callbacks
    checkpointer: Checkpointer
    stop: StopRequest
    clock: Stopwatch
    """What it measures is training; evaluations and checkpoints do not count."""
    on_scored: Callable[[int, int], None]
    """Shows the progress of an evaluation."""
    logs: Callable[[], Sequence[GrowingFile]] = tuple
    """Returns the files that a checkpoint must not be ahead of."""
    began: float = field(default_factory=time.monotonic)
    saved: float = field(default_factory=time.monotonic)
    """When the last checkpoint was begun, or training; and likewise:"""
    evaluated: float = field(default_factory=time.monotonic)
    logged: float = field(default_factory=time.monotonic)
    waited_s: float = 0.0
    """How long training waited for the last checkpoint."""
    wishes: Wishes = field(init=False)

    def __post_init__(self):
        self.wishes = Wishes(self.state.pending)

    @cached_property
    def recipe_text(self) -> str:
        """The recipe as YAML, for checkpoints."""
        return self.recipe.to_yaml()

    def seconds(self) -> float:
        """Return the seconds of training, those before an interruption included."""
        return self.state.seconds + time.monotonic() - self.began

    def has_ended(self) -> bool:
        """Return whether no step is left to take; equal on all processes."""
        return self.state.has_ended(self.num_steps, self.recipe.eval.patience)

    def epoch(self) -> float:
        """Return the number of finished passes over the training data, with a fraction."""
        return self.state.progress(self.plan.num_steps)

    def tell_while_waiting(self, event: str, record: Callable[[], Any]) -> None:
        """Let callbacks hear of something that may take them long, while the other processes wait. Collective."""

        def tell() -> None:
            with marked_while_moving(self.strategy.progress):
                self.callbacks.tell(event, record())

        self.strategy.on_main(tell)
        if not self.strategy.is_main:
            tell()


def evaluation_is_due(run: Run) -> bool:
    """Say whether an evaluation after this step is to be made and has not been made yet."""
    config, state = run.recipe.eval, run.state
    if config.is_off or state.evaluated_step == state.step:
        return False
    is_time = config.falls_on(state.step, run.num_steps, run.plan.num_steps)
    return is_time or state.evaluation_is_asked or run.has_ended()


def checkpoint_is_due(run: Run) -> bool:
    """Say whether to write a checkpoint after this step; see CheckpointConfig."""
    state = run.state
    is_best = state.best_step == state.step  # so that the best model's checkpoint is one of those that are kept
    return is_best or run.has_ended() or run.recipe.checkpoint.falls_on(state.step, run.num_steps, run.plan.num_steps)


def log_mean_loss(run: Run, values: Mapping[str, float]) -> None:
    """Log the mean loss since the last line, and values of the present step. Equal on all processes."""
    run.logged = time.monotonic()
    log(run, {"train/loss": run.state.take_mean_loss(), **values})


def log(run: Run, values: Mapping[str, Any]) -> None:
    """Log values at the present step, and with them what callbacks have logged; nothing if there are none of both."""
    if values := {**values, **run.wishes.take_values()}:
        run.callbacks.tell("on_log", Log(step=run.state.step, epoch=run.epoch(), values=values))


def interrupt(run: Run) -> NoReturn:
    """Write a checkpoint and leave. Collective.

    Raises:
        Interrupted: always, on all processes.
    """
    save_checkpoint(run)
    raise Interrupted(f"{run.stop.name or 'Another process was asked to stop'}: stopped after step {run.state.step}.")


def save_checkpoint(run: Run) -> None:
    """Copy the state to the host and leave the writing to another thread. Collective.

    A checkpoint that cannot be written does not end the run: earlier ones are intact, and the next one is tried when it is due.
    """
    state, began = run.state, time.monotonic()
    with run.clock.paused():
        wait_for_checkpoint(run, " Training continues; the next one is due later.")  # the host's copies may be overwritten then
        asked = run.strategy.gather_to_main([run.wishes.pending])
        saved = run.strategy.sharding.snapshot()
        if saved is not None:
            tensors, values = saved
            pending = {name: reason for wishes in asked or () for name, reason in wishes.items()}
            loop = {**asdict(state), "seconds": run.seconds(), "pending": pending}
            progress = {"state": loop, "values": values, **asdict(run.provenance)}
            run.waited_s = time.monotonic() - began
            run.checkpointer.write(state.step, tensors, progress, run.recipe_text, state.best_step, run.logs())
    run.saved = began


def wait_for_checkpoint(run: Run, then: str = "") -> None:
    """Wait until the last checkpoint is complete; if it could not be written, let callbacks hear of it. Collective.

    Args:
        then: what follows, for the message.

    Raises:
        Exception: a callback that must not fail did, when it heard of the checkpoint.
    """
    writer = run.checkpointer

    def wait() -> None:
        writer.wait()
        run.callbacks.raise_kept()
        if writer.failure is not None:
            left = f"The last intact one is of step {writer.last}." if writer.last else "This run has no intact one yet."
            text = f"A checkpoint could not be written: {writer.failure}. {left}{then}"
            run.callbacks.tell(
                "on_checkpoint", CheckpointDone(step=writer.begun, path=path_of(writer.folder, writer.begun), failure=text)
            )

    run.strategy.on_main(wait)


def evaluate_and_keep(run: Run) -> None:
    """Evaluate, log, and export the model if it is the best so far (the earlier one of equals). Collective.

    Raises:
        Interrupted: a process was asked to stop; a resumed run starts with this evaluation.
        TrainingError: the task did not compute ``eval.metric``, or it is not a finite number.
    """
    with run.clock.paused():
        run.strategy.progress.stage(f"the evaluation after step {run.state.step}")
        with run.strategy.sharding.averaged():
            found = evaluations(run, lambda: bool(run.stop))
            if found is not None:
                keep(run, found)
        run.evaluated = time.monotonic()
        if found is None:  # with the weights in training, which the checkpoint needs
            interrupt(run)


def evaluate_at_start(run: Run) -> None:
    """Evaluate and log the model that training begins with, which is not the best of those that are trained. Collective.

    A request to stop waits: nothing has been trained that a checkpoint could hold.
    """
    with run.clock.paused():
        run.strategy.progress.stage("the evaluation before the first step")
        found = evaluations(run, lambda: False)
        assert found is not None  # nothing stops it
        log(run, {f"eval/{name}": value for name, value in found["eval"].metrics.items()})
        tell_evaluations(run, found)


def evaluations(run: Run, should_stop: Callable[[], bool]) -> dict[str, Evaluation] | None:
    """Evaluate on the eval split and on each of ``eval.sets``, or return None as ``evaluate`` does. Collective."""
    found = {}
    for split in run.recipe.eval.splits:
        config = run.recipe.eval if split == "eval" else replace(run.recipe.eval, show_samples=0)
        workers = run.recipe.train.num_workers
        evaluation = evaluate(run.strategy, run.datasets[split], config, workers, should_stop, on_scored=run.on_scored)
        if evaluation is None:
            return None
        found[split] = evaluation
    found["eval"].metrics |= {
        f"{split.removeprefix('eval/')}/{name}": value
        for split in run.recipe.eval.splits[1:]
        for name, value in found[split].metrics.items()
    }
    return found


def keep(run: Run, found: Mapping[str, Evaluation]) -> None:
    """Log what ``evaluations`` returns, export the model if it is the best so far, and let callbacks hear of it. Collective.

    Raises:
        TrainingError: as ``evaluate_and_keep``.
    """
    recipe, state, strategy, metrics = run.recipe, run.state, run.strategy, found["eval"].metrics
    log(run, {f"eval/{name}": value for name, value in metrics.items()})
    score = score_of(metrics, recipe.eval.metric, state.step)
    is_best = state.best is None or (score > state.best if recipe.greater_is_better else score < state.best)
    if is_best:
        state.best, state.best_step = score, state.step
    is_past_peak = state.step > num_warmup_steps(run.num_steps, recipe.train)  # what falls earlier would never be reached
    plateau = recipe.train.plateau_patience if recipe.train.schedule == "plateau" and is_past_peak else None
    state.note_score(score, recipe.greater_is_better, recipe.eval.min_improvement, plateau)
    strategy.progress.stage(f"saving after step {state.step}")
    if is_best:
        export_model(run, "model", {"step": state.step, "metric": recipe.eval.metric, "value": score})
    tell_evaluations(run, found)
    state.evaluated_step, state.evaluation_is_asked, state.metrics = state.step, False, metrics


def export_model(run: Run, name: str, about: Mapping[str, Any] | None = None) -> None:
    """Write the model as it is now into a folder of the output folder. Collective.

    Args:
        about: its step and score, for a model that others load.
    """
    recipe, folder = run.recipe, run.recipe.folder / name
    model = run.strategy.sharding.unwrap(recipe.folder)
    more = {"columns": dict(ask(recipe.task, "read_columns", {})), "reference": run.provenance.reference}
    known = None if about is None else {**about, **{name: value for name, value in more.items() if value is not None}}

    def write() -> None:
        if run.strategy.device.type == "cuda":
            run.checkpointer.wait()  # the host's copies may be overwritten then
        with run.strategy.sharding.on_host(model):
            export(recipe.task, model, folder, known, recipe.adapter.export)

    run.strategy.on_main(write)


def tell_evaluations(run: Run, found: Mapping[str, Evaluation]) -> None:
    """Let callbacks hear of each evaluation, by split, and log what they log. Collective."""
    for split, evaluation in found.items():
        run.tell_while_waiting("on_evaluation", partial(evaluation_done, run, split, evaluation))
    log(run, {})


def evaluation_done(run: Run, split: str, evaluation: Evaluation) -> EvaluationDone:
    """Return what callbacks hear of an evaluation of the eval split, or of one of ``eval.sets``."""
    task, state = run.recipe.task, run.state
    vars(task)["described"] = split
    rows = ask(task, "describe", evaluation.rows, evaluation.rows) if run.strategy.is_main else []
    samples = [{name: row[name] for name in task.sample_fields} for row in rows[: run.recipe.eval.show_samples]]
    return EvaluationDone(
        step=state.step,
        epoch=run.epoch(),
        wishes=run.wishes,
        split=split,
        metrics=evaluation.metrics,
        rows=rows,
        samples=samples,
        images=evaluation.images,
        captions=[ask(task, "caption", "", row) for row in rows[: len(evaluation.images)]],
        labels=ask(task, "labels", None),
        best=state.best if split == "eval" else None,
        best_step=state.best_step if split == "eval" else None,
    )

"""The loop: global batches in, optimizer steps out. Independent of how a step is spread and of what is learned."""

from __future__ import annotations

import gc
import math
import shutil
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from hftune.batch_plan import BatchPlan, SomeSteps
from hftune.checkpoints.checkpointer import Checkpointer
from hftune.checkpoints.export import export
from hftune.checkpoints.output_dir import OUT_OF_FOLD, SAMPLE_IMAGES
from hftune.checkpoints.train_state import Provenance, TrainState
from hftune.config import Recipe
from hftune.data.augmentation import augmented
from hftune.distributed.pulse import marked_while_moving
from hftune.distributed.signals import StopRequest
from hftune.errors import Interrupted, TrainingError, format_value
from hftune.evaluation import Evaluation, evaluate
from hftune.optim import ema_decay_at, lr_at
from hftune.reporting.page import Reporter
from hftune.strategies.base import StepBatch, StepReport, Strategy
from hftune.task import ask
from hftune.tracking.console import Console, is_number, warning
from hftune.tracking.image_grid import grid, write_image
from hftune.tracking.jsonl import write_rows
from hftune.tracking.ledger import Ledger
from hftune.tracking.profiler import StepProfiler
from hftune.tracking.throughput import Throughput
from hftune.tracking.tracker import Tracker


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
    tracker: Tracker
    console: Console
    ledger: Ledger
    checkpointer: Checkpointer
    stop: StopRequest
    usage: Callable[[], dict[str, float]]
    """Returns what training uses of all machines, on the main process."""
    profiler: StepProfiler
    throughput: Throughput = field(default_factory=Throughput)
    reporter: Reporter = field(default_factory=Reporter)
    began: float = field(default_factory=time.monotonic)
    saved: float = field(default_factory=time.monotonic)
    """When the last checkpoint was begun, or training."""

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

    def stopped_early(self) -> str | None:
        """Return why training ends before the last step of its schedule, as a sentence; None if it does not."""
        state, config = self.state, self.recipe.eval
        if state.step == self.num_steps or not state.is_out_of(config.patience):
            return None
        least = f" by more than {config.min_improvement:g}" if config.min_improvement else ""
        count = f"{config.patience} evaluations" if config.patience > 1 else "the last evaluation"
        return (
            f"Stopped after step {state.step:,} of {self.num_steps:,}: {count} did not improve eval/{config.metric}{least} "
            f"(eval.patience={config.patience})."
        )

    def epoch(self) -> float:
        """Return the number of finished passes over the training data, with a fraction."""
        return self.state.progress(self.plan.num_steps)


def fit(run: Run) -> None:
    """Train from the state's step to the last one, or until ``eval.patience`` is exhausted. Collective.

    Raises:
        Interrupted: a process was asked to stop; the step was finished and a checkpoint written.
    """
    state, strategy = run.state, run.strategy
    if state.step and evaluation_is_due(run):  # an earlier attempt was stopped in the middle of it
        evaluate_and_keep(run)
        if run.has_ended() and state.mean_items:  # eval.patience is exhausted between two lines of metrics.jsonl
            log(run, {"train/loss": state.take_mean_loss()})
        if checkpoint_is_due(run):
            save_checkpoint(run)
    dataset = augmented(run.datasets["train"], run.recipe.task, run.recipe.seed, state.epoch)
    with frozen_garbage() as freeze:
        while not run.has_ended():
            strategy.progress.stage(f"step {state.step + 1}")
            run.profiler.before(state.step + 1)
            with closing(rest_of_epoch(run, dataset)) as batches:
                for batch in batches:
                    if batch is None:
                        skip_step(run)
                    else:
                        take_step(run, batch)
                    if run.has_ended():
                        return
                    strategy.progress.stage(f"step {state.step + 1}")
                    with run.throughput.paused():
                        freeze()
                        run.profiler.before(state.step + 1)
            state.epoch, state.step_in_epoch = state.epoch + 1, 0


def rest_of_epoch(run: Run, dataset: Any) -> Generator[StepBatch | None, None, None]:
    """Yield this process's part of each step that is left of an epoch; None for one that ``train.skip`` leaves out."""
    config, state = run.recipe.train, run.state
    before = state.step - state.step_in_epoch
    left = range(state.step_in_epoch, run.plan.num_steps)
    skipped = {step - before - 1 for step in config.skip}
    steps = SomeSteps(run.plan.epoch(state.epoch), [place for place in left if place not in skipped])
    with closing(run.strategy.batches(dataset, steps, 0, config.num_workers, state.epoch)) as batches:
        for place in left:
            yield None if place in skipped else next(batches)
        next(batches, None)  # it is at its end, and a loader's workers should know


@contextmanager
def frozen_garbage() -> Iterator[Callable[[], None]]:
    """Yield a function that, once called, hides all present objects from Python's garbage collector until the end.

    After a step these are libraries, model and data, 440,000 for yelp_demo: a full collection, which strikes any process at any
    time while the others wait, took 0.5 s and then 0.1 ms. The collector itself stays on, because steps leave cycles:
    collections of our own instead, every 50 steps, took longer (0.7 ms a step and not 0.3).
    """
    is_theirs = gc.get_freeze_count() > 0  # a program that trains may have frozen objects; it counts them one by one
    is_ours = False

    def freeze() -> None:
        nonlocal is_ours
        if not is_ours and not is_theirs:
            gc.collect()
            gc.freeze()
            is_ours = True

    try:
        yield freeze
    finally:
        if is_ours:
            gc.unfreeze()


def take_step(run: Run, batch: StepBatch) -> None:
    """Take one optimizer step; then log, evaluate and save if it is time to. Collective.

    Raises:
        Interrupted: a process was asked to stop; a checkpoint is written.
    """
    config, state, strategy = run.recipe.train, run.state, run.strategy
    lr = lr_at(state.step, run.num_steps, config, run.plan.num_steps)
    strategy.forward_backward(batch, run.recipe.seed, state.step, stop=bool(run.stop), save=checkpoint_is_late(run))
    report = strategy.report(strategy.clip_grad_norm(config.clip_norm))
    stop_unless_finite(run, batch, report)
    strategy.optimizer_step(lr)
    strategy.average_weights(ema_decay_at(state.step, config))

    state.step += 1
    state.step_in_epoch += 1
    state.add_loss(report.loss, report.num_items)
    if strategy.is_main:
        run.ledger.note(
            state.step,
            state.epoch,
            state.step_in_epoch - 1,
            num_samples=report.num_samples,
            digest=report.digest,
            loss=report.loss,
            grad_norm=report.grad_norm,
            lr=lr,
            items=report.num_items,
        )
    run.throughput.count(batch.plan, run.plan.lengths, report.num_items)
    run.console.advance(state.step, report.loss)
    with run.throughput.paused():
        run.profiler.after(state.step)
    is_logged = is_log_due(run)
    if is_logged:
        log_step(run, report.loss, report.grad_norm, lr)
    if report.stop:
        stop(run)
    if evaluation_is_due(run):
        evaluate_and_keep(run)
    if run.has_ended() and not is_logged:
        log_step(run, report.loss, report.grad_norm, lr)
    if report.save or checkpoint_is_due(run):
        save_checkpoint(run)


def skip_step(run: Run) -> None:
    """Leave one step out, and evaluate and save if it is time to. Its loss is in no line of metrics.jsonl. Collective."""
    state = run.state
    state.step += 1
    state.step_in_epoch += 1
    if run.strategy.is_main:
        run.ledger.note_skipped(state.step, state.epoch, state.step_in_epoch - 1)
    run.console.advance(state.step)
    with run.throughput.paused():
        run.profiler.after(state.step)
    if evaluation_is_due(run):
        evaluate_and_keep(run)
    if run.has_ended() and state.mean_items:
        log(run, {"train/loss": state.take_mean_loss()})
    if checkpoint_is_due(run):
        save_checkpoint(run)


def is_log_due(run: Run) -> bool:
    """Say whether ``train.log_every`` asks for a record of this step."""
    step = run.state.step
    return step in (1, run.num_steps) or run.recipe.train.log_interval.falls_on(step, run.plan.num_steps)


def log_step(run: Run, loss: float, grad_norm: float, lr: float) -> None:
    """Record the present step, and the mean loss since the last record. Collective."""
    losses = {"train/loss": run.state.take_mean_loss(), "train/loss_step": loss}
    values = {**losses, "train/lr": lr, "train/grad_norm": grad_norm, **performance(run)}
    log(run, values)
    run.console.logged(run.state.step, run.epoch(), values)


def stop(run: Run) -> NoReturn:
    """Write a checkpoint and end training here. Collective.

    Raises:
        Interrupted: always, on all processes.
    """
    save_checkpoint(run)
    raise Interrupted(f"{run.stop.name or 'Another process was asked to stop'}: stopped after step {run.state.step}.")


def evaluation_is_due(run: Run) -> bool:
    """Say whether ``eval.every`` asks for an evaluation after this step that has not been made yet."""
    state = run.state
    return state.evaluated_step != state.step and run.recipe.eval.falls_on(state.step, run.num_steps, run.plan.num_steps)


def checkpoint_is_due(run: Run) -> bool:
    """Say whether to write a checkpoint after this step; see CheckpointConfig."""
    state = run.state
    is_best = state.best_step == state.step  # so that the best model's checkpoint is one of those that are kept
    return is_best or run.has_ended() or run.recipe.checkpoint.falls_on(state.step, run.num_steps, run.plan.num_steps)


def checkpoint_is_late(run: Run) -> bool:
    """Say whether a time in ``checkpoint.every`` has passed. The main process decides; its sums tell the others."""
    seconds = run.recipe.checkpoint.interval.seconds
    if seconds is None or not run.strategy.is_main:
        return False
    return time.monotonic() - run.saved >= seconds and not run.checkpointer.is_writing


def save_checkpoint(run: Run) -> None:
    """Copy the state to the host and leave the writing to another thread. Collective.

    A checkpoint that cannot be written does not end the run: earlier ones are intact, and the next one is tried when it is due.
    """
    state, began = run.state, time.monotonic()
    with run.throughput.paused():
        run.strategy.on_main(run.checkpointer.wait)  # the host's copies may be overwritten from here on
        say_failed_checkpoint(run)
        saved = run.strategy.state()
        if saved is not None:
            tensors, values = saved
            progress = {"state": {**asdict(state), "seconds": run.seconds()}, "values": values, **asdict(run.provenance)}
            logs = [run.tracker.file, run.ledger.file]
            run.checkpointer.write(state.step, tensors, progress, run.recipe_text, state.best_step, logs)
    run.throughput.checkpoint_seconds += time.monotonic() - began
    run.saved = began


def say_failed_checkpoint(run: Run) -> None:
    """Print a warning if the last checkpoint could not be written. Main process only."""
    failure, last = run.checkpointer.failure, run.checkpointer.last
    if failure is not None:
        left = f"The last intact one is of step {last}." if last else "This run has no intact one yet."
        text = f"A checkpoint could not be written: {failure}. {left} Training continues; the next one is due later."
        run.console.line(warning(text))
        run.tracker.alert("Checkpoint failed", text, "warning")
        run.checkpointer.failure = None


def evaluate_and_keep(run: Run) -> None:
    """Evaluate, log, write the predictions, and export the model if it is the best so far (the earlier one of equals).

    Raises:
        Interrupted: a process was asked to stop; a resumed run starts with this evaluation.
        TrainingError: the task did not compute ``eval.metric``, or it is not a finite number.
    """
    config, state = run.recipe.eval, run.state
    with run.throughput.paused():
        run.strategy.progress.stage(f"the evaluation after step {state.step}")
        workers = run.recipe.train.num_workers
        with run.strategy.averaged():
            evaluation = evaluate(
                run.strategy,
                run.datasets["eval"],
                config.batch_size,
                workers,
                lambda: bool(run.stop),
                config.show_samples,
                config.metrics,
                run.console.scored,
                config.batch_tokens,
            )
            if evaluation is not None:
                keep(run, evaluation)
        if evaluation is None:  # with the weights in training, which the checkpoint needs
            stop(run)


def keep(run: Run, evaluation: Evaluation) -> None:
    """Log an evaluation, write its predictions, and export the model if it is the best so far. Collective.

    Raises:
        TrainingError: as ``evaluate_and_keep``.
    """
    config, state, output_dir = run.recipe.eval, run.state, Path(run.recipe.output_dir)
    log(run, {f"eval/{name}": value for name, value in evaluation.metrics.items()})
    score = score_of(evaluation.metrics, config.metric, state.step)
    is_best = state.best is None or (score > state.best if run.recipe.greater_is_better else score < state.best)
    if is_best:
        state.best, state.best_step = score, state.step
    state.note_score(score, run.recipe.greater_is_better, config.min_improvement)
    run.console.evaluated(state.step, run.epoch(), evaluation.metrics, state.best, state.best_step)
    model = run.strategy.unwrap() if is_best else None

    def write() -> None:
        if is_best:
            about = {"step": state.best_step, "metric": config.metric, "value": state.best}
            about["columns"] = dict(ask(run.recipe.task, "read_columns", {}))
            export(run.recipe.task, model, output_dir / "model", about, run.recipe.adapter.export)
        with marked_while_moving(run.strategy.progress):  # the other processes wait, however long it takes
            rows = ask(run.recipe.task, "describe", evaluation.rows, evaluation.rows)
            show_evaluation(run, evaluation, rows)
            write_rows(output_dir / "predictions.jsonl", rows, run.strategy.progress.tick)
            if state.best_step == state.step:  # also when it is evaluated again after an interruption
                write_fold(run, rows)
            run.reporter.write(output_dir, run.console.line)

    run.strategy.progress.stage(f"saving after step {state.step}")
    run.strategy.on_main(write)
    state.evaluated_step, state.metrics = state.step, evaluation.metrics


def write_fold(run: Run, rows: list[dict[str, Any]]) -> None:
    """Write the predictions of the best model with the numbers of their rows, for `hftune folds`, if there are folds.

    Args:
        rows: of all samples, as ``Task.describe`` returns them.
    """
    if (numbers := run.recipe.task.fold_rows) is not None:
        numbered = [{"row": number, **row} for number, row in zip(numbers, rows, strict=True)]
        write_rows(Path(run.recipe.output_dir) / OUT_OF_FOLD, numbered, run.strategy.progress.tick)


def score_of(metrics: Mapping[str, Any], name: str, step: int) -> float:
    """Return the metric that picks the best model.

    Raises:
        TrainingError: the task did not compute it, or it is not a finite number.
    """
    if name not in metrics:
        raise TrainingError(f"eval.metric={name!r} was not computed. The task computed: {', '.join(metrics)}.")
    score = metrics[name]
    if not is_number(score):
        numbers = ", ".join(other for other, value in metrics.items() if is_number(value))
        raise TrainingError(
            f"After step {step} the evaluation's {name} is {format_value(score)}, which cannot pick a best model: it has no "
            f"value on this data. Set eval.metric to one of: {numbers}."
        )
    if not (math.isfinite(score) and math.isfinite(metrics["loss"])):
        value = "" if name == "loss" else f" and its {name} {score}"
        raise TrainingError(
            f"After step {step} the evaluation's loss is {metrics['loss']}{value}: training has diverged. "
            "Lower train.lr or set train.clip_norm."
        )
    return score


def log(run: Run, values: dict[str, Any]) -> None:
    """Record values at the present step, in metrics.jsonl and the trackers. Collective."""
    run.strategy.on_main(lambda: run.tracker.log(run.state.step, run.epoch(), values))


def performance(run: Run) -> dict[str, float]:
    """Return how fast training was since the last call, how even the work, and how busy the machines are."""
    return run.throughput.rates() | run.strategy.times.take() | run.usage()


def show_evaluation(run: Run, evaluation: Evaluation, rows: list[dict[str, Any]]) -> None:
    """Show samples, images, confusion matrix and best value in terminal, samples folder and trackers. Main process only.

    Args:
        rows: of all samples, as ``Task.describe`` returns them.
    """
    recipe, step, metrics = run.recipe, run.state.step, evaluation.metrics
    task, labels = recipe.task, ask(recipe.task, "labels", None)
    samples = [{name: row[name] for name in task.sample_fields} for row in rows[: recipe.eval.show_samples]]
    run.console.samples(samples)
    run.tracker.log_samples(step, samples)
    run.tracker.log_predictions(step, rows)
    if "confusion_matrix" in metrics and labels is not None:
        run.tracker.log_confusion_matrix(step, metrics["confusion_matrix"], labels)
    if images := evaluation.images:
        captions = [ask(task, "caption", "", row) for row in rows[: len(images)]]
        folder = Path(recipe.output_dir) / SAMPLE_IMAGES
        shutil.rmtree(folder / f"step_{step:08d}", ignore_errors=True)  # of this step before an interruption
        write_image(folder / f"step_{step:08d}.png", grid(images))
        for index, image_HWC in enumerate(images):
            write_image(folder / f"step_{step:08d}" / f"{index}.png", image_HWC)
        run.tracker.log_images(step, images, captions)
    run.tracker.log_best(run.state.best_step, recipe.eval.metric, run.state.best)


def stop_unless_finite(run: Run, batch: StepBatch, report: StepReport) -> None:
    """Stop before a NaN reaches the weights. Collective if it stops, because the report is equal on all processes.

    An infinite gradient under fp16 is no error: the scaler skips that step and lowers its scale.

    Raises:
        TrainingError: naming step, processes and samples.
    """
    step, way_out = run.state.step + 1, "Lower train.lr, set train.clip_norm, or look at these samples."
    if not math.isfinite(report.loss):
        culprits = "; ".join(run.strategy.not_finite(batch)) or "every sample's own loss was finite: their sum overflowed"
        raise TrainingError(f"The loss of step {step} is {report.loss} ({culprits}). {way_out}")
    if not math.isfinite(report.grad_norm) and run.recipe.train.mixed_precision != "fp16":
        samples = sorted(int(sample) for micro_batch in batch.plan for sample in micro_batch.samples)
        raise TrainingError(f"The gradient norm of step {step} is {report.grad_norm} (samples {samples}). {way_out}")

"""The loop: global batches in, optimizer steps out. It does not know how a step is spread, what is learned, or who listens.

hftune/callbacks.py tells the same story with the events that callbacks hear of.
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Mapping
from contextlib import closing
from typing import Any

from hftune.callbacks import Step, StepBegin
from hftune.config.every import Every
from hftune.data.augmentation import augmented
from hftune.distributed.garbage import frozen_garbage
from hftune.errors import TrainingError
from hftune.milestones import (
    Run,
    checkpoint_is_due,
    evaluate_and_keep,
    evaluate_at_start,
    evaluation_is_due,
    interrupt,
    log,
    log_mean_loss,
    save_checkpoint,
)
from hftune.optim import ema_decay_at, lr_at
from hftune.strategies.base import Asks, StepBatch, StepReport


def fit(run: Run) -> None:
    """Train from the state's step to the last one, or until ``eval.patience`` or a callback ends it. Collective.

    Raises:
        Interrupted: a process was asked to stop; the step was finished and a checkpoint written.
    """
    if run.recipe.eval.on_start and not run.state.step:
        evaluate_at_start(run)
    if run.state.step and evaluation_is_due(run):  # an earlier attempt was stopped in the middle of it
        finish_step(run)
    with frozen_garbage() as freeze, closing(batches_to_come(run)) as batches:
        while not run.has_ended():
            run.strategy.progress.stage(f"step {run.state.step + 1}")
            run.callbacks.tell("on_step_begin", StepBegin(run.state.step + 1))
            batch = next(batches)
            if batch is None:  # as train.skip says; its loss is in no line
                place = run.state.advance()
                tell_step(run, place, is_last=run.has_ended())
                finish_step(run)
            else:
                take_step(run, batch)
            with run.clock.paused():
                freeze()


def take_step(run: Run, batch: StepBatch) -> None:
    """Take one optimizer step; then log, evaluate and save if it is time to. Collective.

    Raises:
        Interrupted: a process was asked to stop; a checkpoint is written.
    """
    config, state, strategy = run.recipe.train, run.state, run.strategy
    lr = lr_at(state.step, run.num_steps, config, run.plan.num_steps, state.num_falls)
    strategy.forward_backward(batch, run.recipe.seed, state.step, what_is_asked(run))
    report = strategy.report(strategy.clip_grad_norm(config.clip_norm))
    stop_unless_finite(run, batch, report)
    strategy.optimizer_step(lr)
    strategy.sharding.average_weights(ema_decay_at(state.step, config))
    place = state.advance()
    state.add_loss(report.loss, report.num_items)
    grant(run, report.asks)

    is_logged = state.step == 1 or run.has_ended() or config.log_interval.falls_on(state.step, run.plan.num_steps)
    is_logged, is_last = is_logged or report.asks.log, report.asks.interrupt or run.has_ended()
    tell_step(run, place, report, lr=lr, is_logged=is_logged, is_last=is_last, micro_batches=batch.plan)
    strategy.sharding.clear_gradient()
    values = {"train/loss_step": report.loss, "train/lr": lr, "train/grad_norm": report.grad_norm}
    if report.teacher_kl is not None:
        values["train/teacher_kl"] = report.teacher_kl
    if is_logged:
        log_mean_loss(run, values)
    if report.asks.interrupt:
        log(run, {})
        interrupt(run)
    finish_step(run, values, report.asks.checkpoint)


def tell_step(run: Run, place: tuple[int, int], report: StepReport | None = None, **values: Any) -> None:
    """Let callbacks hear of a step; without a report, of one that was skipped."""
    if report is not None:
        values |= {name: value for name, value in vars(report).items() if name != "asks"}
    step, epoch, seconds = run.state.step, run.epoch(), run.clock.lap()
    run.callbacks.tell("on_step", Step(step=step, epoch=epoch, seconds=seconds, place=place, wishes=run.wishes, **values))


def finish_step(run: Run, values: Mapping[str, float] | None = None, save: bool = False) -> None:
    """Evaluate and save, if it is time to. After the last step, log what no line has yet. Collective.

    Args:
        values: of the step, besides the mean loss.
        save: a process asks for a checkpoint.
    """
    log(run, {})
    if evaluation_is_due(run):
        evaluate_and_keep(run)
    if run.has_ended() and run.state.mean_items:
        log_mean_loss(run, values or {})
    if save or checkpoint_is_due(run):
        save_checkpoint(run)


def batches_to_come(run: Run) -> Generator[StepBatch | None, None, None]:
    """Yield this process's part of each step, epoch after epoch; None for one to skip."""
    state = run.state
    dataset = augmented(run.datasets["train"], run.recipe.task, run.recipe.seed, state.epoch)
    while True:
        with closing(rest_of_epoch(run, dataset)) as batches:
            yield from batches
        state.epoch, state.step_in_epoch = state.epoch + 1, 0


def rest_of_epoch(run: Run, dataset: Any) -> Generator[StepBatch | None, None, None]:
    """Yield this process's part of each step that is left of an epoch; None for one that ``train.skip`` leaves out."""
    config, state = run.recipe.train, run.state
    before = state.step - state.step_in_epoch
    left = range(state.step_in_epoch, run.plan.num_steps)
    skipped = {step - before - 1 for step in config.skip}
    epoch = run.plan.epoch(state.epoch)
    steps = (epoch[place] for place in left if place not in skipped)
    with closing(run.strategy.batches(dataset, steps, config.num_workers, state.epoch)) as batches:
        for place in left:
            yield None if place in skipped else next(batches)
        next(batches, None)  # it is at its end, and a loader's workers should know


def what_is_asked(run: Run) -> Asks:
    """Return what this process asks all for after the coming step: by a signal, by a callback, or by the clock."""
    pending, recipe = run.wishes.pending, run.recipe
    return Asks(
        interrupt=bool(run.stop),
        end="stop" in pending,
        evaluation="evaluation" in pending or is_late(run, recipe.eval.interval, run.evaluated),
        checkpoint="checkpoint" in pending
        or (is_late(run, recipe.checkpoint.interval, run.saved) and not run.checkpointer.is_writing),
        log=is_late(run, recipe.train.log_interval, run.logged),
    )


def is_late(run: Run, interval: Every, since: float) -> bool:
    """Say whether the time of an interval has passed. The main process decides; the sums of the step tell the others."""
    return interval.seconds is not None and run.strategy.is_main and time.monotonic() - since >= interval.seconds


def grant(run: Run, asks: Asks) -> None:
    """Take over what processes have asked for. Collective if one asks to end the training."""
    state = run.state
    state.evaluation_is_asked |= asks.evaluation
    if asks.end and state.step < run.num_steps:  # else it ends by itself, and may be prolonged
        reasons = [run.wishes.pending["stop"]] if "stop" in run.wishes.pending else []
        state.ended_by = run.strategy.broadcast((run.strategy.gather_to_main(reasons) or [None])[0])
    run.wishes.pending.clear()


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

"""The loop: global batches in, optimizer steps out. Knows neither how a step is spread nor what is learned."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hftune.batch_plan import BatchPlan, MicroBatch
from hftune.checkpoint import export, write_text
from hftune.config import Recipe
from hftune.console import Console
from hftune.errors import TrainingError
from hftune.evaluation import evaluate
from hftune.optim import lr_at
from hftune.sections import EvalConfig, TrainConfig
from hftune.strategies.base import StepBatch, Strategy
from hftune.tracking import Tracker


@dataclass
class TrainState:
    """All that changes in training beside model and optimizer. ``(epoch, step_in_epoch)`` is the whole data order."""

    step: int = 0
    epoch: int = 0
    step_in_epoch: int = 0
    best: float | None = None
    best_step: int | None = None

    def progress(self, steps_per_epoch: int) -> float:
        """Epochs done, with a fraction."""
        return self.epoch + self.step_in_epoch / steps_per_epoch


@dataclass
class Run:
    """What one training run works with."""

    recipe: Recipe
    strategy: Strategy
    plan: BatchPlan
    datasets: Mapping[str, Any]
    num_steps: int
    tracker: Tracker
    console: Console
    state: TrainState = field(default_factory=TrainState)
    speed: Speed = field(default_factory=lambda: Speed())


def total_steps(config: TrainConfig, plan: BatchPlan) -> int:
    """Optimizer steps of the whole run."""
    steps = config.epochs * plan.num_steps
    return steps if config.max_steps is None else min(steps, config.max_steps)


def fit(run: Run) -> dict[str, Any]:
    """Train to the end, evaluating on the way; return the metrics of the last evaluation. Collective."""
    config, state, strategy, metrics = run.recipe.train, run.state, run.strategy, {}
    while state.step < run.num_steps:
        strategy.progress.at(f"step {state.step + 1}")
        steps = run.plan.epoch(state.epoch)
        for batch in strategy.batches(run.datasets["train"], steps, state.step_in_epoch, config.num_workers):
            lr = lr_at(state.step, run.num_steps, config)
            loss = strategy.forward_backward(batch, run.recipe.seed, state.step)
            grad_norm = strategy.clip_grad_norm(config.clip_norm)
            stop_unless_finite(run, batch, loss, grad_norm)
            strategy.optimizer_step(lr)

            state.step += 1
            state.step_in_epoch += 1
            run.speed.count(batch.plan, run.plan.lengths)
            run.console.advance(state.step, loss)
            is_last = state.step == run.num_steps
            if state.step == 1 or state.step % config.log_every == 0 or is_last:
                log(run, {"train/loss": loss, "train/lr": lr, "train/grad_norm": grad_norm, **run.speed.rates()})
            if is_last or evaluation_is_due(run.recipe.eval, state, run.plan.num_steps):
                metrics = evaluate_and_keep(run)
            if is_last:
                break
            strategy.progress.at(f"step {state.step + 1}")
        state.epoch, state.step_in_epoch = state.epoch + 1, 0
    return metrics


def evaluation_is_due(config: EvalConfig, state: TrainState, steps_per_epoch: int) -> bool:
    """Say whether ``eval.every`` asks for an evaluation after this step."""
    if config.every_epochs is None:
        return state.step % config.every == 0
    return state.step_in_epoch == steps_per_epoch and (state.epoch + 1) % config.every_epochs == 0


def evaluate_and_keep(run: Run) -> dict[str, Any]:
    """Evaluate, log, write the predictions, and keep the model where it is the best so far (the earlier one of equals).

    Raises:
        TrainingError: the task did not compute ``eval.metric``, or it is not finite.
    """
    config, state, output_dir = run.recipe.eval, run.state, Path(run.recipe.output_dir)
    with run.speed.paused():
        run.strategy.progress.at(f"the evaluation after step {state.step}")
        evaluation = evaluate(run.strategy, run.datasets["eval"], config.batch_size, run.recipe.train.num_workers)
        log(run, {f"eval/{name}": value for name, value in evaluation.metrics.items()})
        show_samples(run, evaluation.rows[: config.show_samples])
        if config.metric not in evaluation.metrics:
            computed = ", ".join(evaluation.metrics)
            raise TrainingError(f"eval.metric={config.metric!r} was not computed. The task computed: {computed}.")
        score = evaluation.metrics[config.metric]
        if not (math.isfinite(score) and math.isfinite(evaluation.metrics["loss"])):
            raise TrainingError(
                f"After step {state.step} the evaluation's loss is {evaluation.metrics['loss']}, its {config.metric} {score}: "
                "the model is lost. Lower train.lr or set train.clip_norm."
            )
        is_best = state.best is None or (score > state.best if config.greater_is_better else score < state.best)
        if is_best:
            state.best, state.best_step = score, state.step
        model = run.strategy.unwrap()

        def write() -> None:
            write_predictions(output_dir / "predictions.jsonl", evaluation.rows)
            if is_best:
                export(run.recipe.task, model, output_dir / "model")

        run.strategy.progress.at(f"the saving after step {state.step}")
        run.strategy.on_main(write)
    return evaluation.metrics


def write_predictions(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write one JSON object a sample, in dataset order; nothing where the task predicts no rows."""
    if any(rows):
        write_text(path, "".join(json.dumps({"index": i, **row}, ensure_ascii=False) + "\n" for i, row in enumerate(rows)))


def log(run: Run, values: dict[str, Any]) -> None:
    """Record values at the present step, in the files and on the terminal. Collective."""
    epoch = run.state.progress(run.plan.num_steps)
    run.strategy.on_main(lambda: run.tracker.log(run.state.step, epoch, values))
    run.console.logged(run.state.step, epoch, values)


def show_samples(run: Run, rows: list[dict[str, Any]]) -> None:
    """Show what the task wants to be seen of some predictions, on terminal and dashboards. Collective."""
    samples = [{name: row[name] for name in run.recipe.task.shown} for row in rows]
    run.strategy.on_main(lambda: run.tracker.log_samples(run.state.step, samples))
    run.console.samples(samples)


def stop_unless_finite(run: Run, batch: StepBatch, loss: float, grad_norm: float) -> None:
    """Stop before a NaN reaches the weights; collective where it stops, because the loss is equal on all processes.

    An infinite gradient under fp16 is no fault: the scaler skips that step and lowers its scale.

    Raises:
        TrainingError: naming step, processes and samples.
    """
    step, way_out = run.state.step + 1, "Lower train.lr, set train.clip_norm, or look at these samples."
    if not math.isfinite(loss):
        culprits = "; ".join(run.strategy.not_finite(batch)) or "every sample's own loss was finite: their sum overflowed"
        raise TrainingError(f"The loss of step {step} is {loss} ({culprits}). {way_out}")
    if not math.isfinite(grad_norm) and run.recipe.train.mixed_precision != "fp16":
        samples = sorted(int(sample) for micro_batch in batch.plan for sample in micro_batch.samples)
        raise TrainingError(f"The gradient norm of step {step} is {grad_norm} (samples {samples}). {way_out}")


class Speed:
    """Counts samples and tokens against the time spent in training; evaluations do not count."""

    def __init__(self):
        self.total_samples, self.total_seconds = 0, 0.0
        self._restart()

    def _restart(self) -> None:
        self.samples, self.tokens, self.padded, self.since = 0, 0, 0, time.monotonic()

    def count(self, plan: list[MicroBatch], lengths: Any) -> None:
        """Add one global batch."""
        self.samples += sum(len(micro_batch.samples) for micro_batch in plan)
        if lengths is not None:
            self.tokens += sum(int(lengths[micro_batch.samples].sum()) for micro_batch in plan)
            self.padded += sum(micro_batch.cost for micro_batch in plan)

    def rates(self) -> dict[str, float]:
        """Return samples (and tokens, padding not counted) a second and the share of padding since the last call."""
        seconds = max(time.monotonic() - self.since, 1e-9)
        rates = {"perf/samples_per_s": self.samples / seconds}
        if self.tokens:
            rates |= {"perf/tokens_per_s": self.tokens / seconds, "perf/padding_share": 1 - self.tokens / self.padded}
        self.total_samples, self.total_seconds = self.total_samples + self.samples, self.total_seconds + seconds
        self._restart()
        return rates

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time spent inside."""
        began = time.monotonic()
        yield
        self.since += time.monotonic() - began

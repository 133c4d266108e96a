"""Evaluation: every sample once, whatever the batch size and the number of processes. Independent of steps and files."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate.utils.memory import should_reduce_batch_size

from hftune.batch_plan import BatchPlan, MicroBatch
from hftune.config import EvalConfig
from hftune.distributed.progress import marked_while_moving
from hftune.errors import DataError, TrainingError, format_value, is_number
from hftune.metrics.named import compute, load_metrics
from hftune.strategies.base import Strategy
from hftune.strategies.whole_model import ModelNeeded
from hftune.task import Task, ask

ROWS = 1000
"""Rows of each process that go to the main process together."""


@dataclass
class Evaluation:
    """``metrics`` is equal on all processes; ``rows`` and ``images``, in dataset order, are empty on the other processes."""

    metrics: dict[str, Any]
    rows: list[dict[str, Any]]
    """One a sample."""
    images: list[np.ndarray]
    """(H, W, 3) uint8, of the first samples, if the task draws any."""


@dataclass
class _Scored:
    """One micro-batch as its process scored it; with numbers for its tensor, ready to be gathered."""

    index: int
    samples: list[int]
    loss_sum: Any
    """A scalar on the device, until all are read at once."""
    num_items: float
    rows: list[dict[str, Any]]
    images: dict[int, np.ndarray]
    """By sample."""

    def look(self, task: Task) -> None:
        """Wait for the rows, which may be late: see ``late_rows``."""
        self.rows = [*self.rows]
        if len(self.rows) != len(self.samples):
            kind, count = type(task).__name__, len(self.samples)
            raise RuntimeError(f"{kind}.predictions returned {len(self.rows)} rows for {count} samples.")


def evaluate(
    strategy: Strategy,
    dataset: Any,
    config: EvalConfig,
    num_workers: int = 0,
    should_stop: Callable[[], bool] = lambda: False,
    on_scored: Callable[[int, int], None] = lambda count, total: None,
) -> Evaluation | None:
    """Score the whole data set. Collective. Return None if ``should_stop`` has become true on any process.

    The evaluation is one step whose global batch is the data set: sorted by length, cut into micro-batches, assigned by cost.
    The loss is the sum of all item losses over the number of all items, added up in the plan's order on the main process,
    and so the same for any number of processes.

    Args:
        config: decides on the metrics in addition to the task's, on batches and on the images that are drawn.
        on_scored: called with the number of micro-batches that this process has scored, and of those that it has to.

    Raises:
        RuntimeError: a sample came back twice or not at all.
        TrainingError: one of ``eval.metrics`` fails, or clashes with another one.
    """
    task = strategy.task
    micro_batches = plan_evaluation(task, dataset, config.batch_size, config.batch_tokens)
    total, scored = len(strategy.share(micro_batches)), dict[int, _Scored]()
    last: _Scored | None = None
    with strategy.rounding_once():
        for micro_batch, batch, num_items in strategy.evaluation_batches(dataset, micro_batches, num_workers, should_stop):
            with suppress(ModelNeeded):  # then they come again, with the model
                before, last = last, _score(strategy, micro_batch, batch, num_items, config.show_samples)
                scored[micro_batch.index] = last
                if before is not None:  # a GPU computes the next one meanwhile
                    before.look(task)
            on_scored(len(scored), total)
        if last is not None:
            last.look(task)
    sums = torch.stack([one.loss_sum for one in scored.values()]).tolist() if scored else []
    for one, loss_sum in zip(scored.values(), sums, strict=True):
        one.loss_sum = loss_sum
    if strategy.any_process(should_stop()):
        return None
    gathered = strategy.gather_to_main([*scored.values()], at_once=max(1, ROWS // config.batch_size))
    rows: list[dict[str, Any]] = []

    def summarise() -> dict[str, Any]:
        placed = {sample: row for part in gathered for sample, row in zip(part.samples, part.rows, strict=True)}
        if len(placed) != len(dataset) or sum(len(part.rows) for part in gathered) != len(dataset):
            raise RuntimeError(f"The evaluation returned {len(placed)} different samples of {len(dataset)}.")
        rows.extend(placed[sample] for sample in range(len(dataset)))
        num_items = math.fsum(part.num_items for part in gathered)
        if num_items == 0:
            raise DataError("The evaluation data has no items: task.num_items is 0 for all samples.")
        loss = math.fsum(part.loss_sum for part in gathered) / num_items
        with marked_while_moving(strategy.progress):  # the other processes wait, however long it takes
            own = {"loss": loss, **task.metrics(rows)}
            found = {**own, **compute(load_metrics(config.metrics), rows, taken=own)}
            # Scalars of numpy and torch as Python's, which JSON can hold
            return {name: value.item() if getattr(value, "ndim", None) == 0 else value for name, value in found.items()}

    summary = strategy.on_main(summarise)
    images = {sample: image for part in gathered or [] for sample, image in part.images.items()}
    return Evaluation(summary, rows, [images[sample] for sample in sorted(images)])


def plan_evaluation(task: Task, dataset: Any, batch_size: int, batch_tokens: int | None = None) -> list[MicroBatch]:
    """Sort a data set by length and cut it into micro-batches; the same on every process.

    Args:
        batch_size: maximum number of samples in one.
        batch_tokens: maximum number of padded tokens in one, times ``task.rows_per_sample``, or what the longest sample has
            alone if that is more: its memory is needed anyway. None: no maximum. It needs a task whose samples have lengths.
    """
    lengths, sizes, max_tokens = task.lengths(dataset), task.sizes(dataset), None
    if batch_tokens is not None and lengths is not None:
        different = [] if sizes is None else np.unique(sizes[np.arange(len(dataset))], axis=0).tolist()
        longest = max(map(task.padded_length, different), default=int(lengths.max()))
        max_tokens = max(batch_tokens // task.rows_per_sample, longest)
    plan = BatchPlan(
        len(dataset),
        len(dataset),
        micro_batch_size=batch_size,
        micro_batch_tokens=max_tokens,
        lengths=lengths,
        shuffle=False,
        sizes=sizes,
        padded_length=task.padded_length,
    )
    return plan.epoch(0)[0]


def _score(
    strategy: Strategy, micro_batch: MicroBatch, batch: dict[str, torch.Tensor], num_items: float, num_images: int
) -> _Scored:
    task, samples = strategy.task, micro_batch.samples.tolist()
    indices = [index for index, sample in enumerate(samples) if sample < num_images]
    try:
        outputs, target = strategy.forward(batch), task.target(batch)
        with torch.no_grad():
            loss_sum = task.loss(outputs, target).to(strategy.exact).reshape(())
            rows = task.predictions(outputs, strategy.model, batch)
            images = ask(task, "sample_images", [], outputs, strategy.model, batch, indices) if indices else []
    except (torch.OutOfMemoryError, RuntimeError) as error:
        if not should_reduce_batch_size(error):
            raise
        raise TrainingError(
            f"Out of memory in the evaluation of {len(samples)} samples at a time. "
            "Lower eval.batch_size or eval.batch_tokens; no result depends on them."
        ) from error
    shown = dict(zip([samples[index] for index in indices], images, strict=False))
    return _Scored(micro_batch.index, samples, loss_sum, num_items, rows, shown)


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

"""``batches``: the steps of a batch plan for a loop of one's own, with an Accelerator. It knows no recipe, task or strategy."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from itertools import tee
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from accelerate.utils import send_to_device
from torch import Tensor, nn

from hftune.batch_plan import BatchPlan, MicroBatch, balance
from hftune.errors import ConfigError, TrainingError
from hftune.strategies.base import dummy_micro_batch
from hftune.strategies.loading import Loader
from hftune.strategies.seeds import seed_forward

SUPPORTED = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


@dataclass(frozen=True)
class GlobalBatch:
    """What this process computes of one optimizer step."""

    step: int
    """Counted from 0 over all epochs."""
    weight: float
    """Of the loss of each micro-batch, a sum over items: so the gradient is that of the mean over the items of the step. 0 if
    this process has nothing to compute; its backward pass is there because the others wait for it."""
    seed: int
    accelerator: Accelerator
    mine: list[tuple[MicroBatch, Any]]
    """Micro-batches and their samples, collated."""

    def micro_batches(self, model: nn.Module) -> Iterator[Any]:
        """Yield each micro-batch on the device. Collective: take all of them, with one backward pass each.

        Draws of a forward pass, such as dropout, are seeded by seed, step and micro-batch. ``model`` is what
        ``accelerator.prepare`` returned; the processes exchange its gradient in the last backward pass.
        """
        for place, (micro_batch, batch) in enumerate(self.mine, start=1):
            seed_forward(self.seed, self.step, micro_batch.index, self.accelerator.device)
            with nullcontext() if place == len(self.mine) else self.accelerator.no_sync(model):
                yield send_to_device(batch, self.accelerator.device)

    def mean(self, weighted: Tensor) -> float:
        """Return the step's mean loss, given the sum of ``weight * loss`` over this process's micro-batches. Collective."""
        return self.accelerator.reduce(weighted.detach().clone(), reduction="mean").item()


def batches(
    plan: BatchPlan,
    dataset: Any,
    collate: Callable[[list], Any],
    accelerator: Accelerator,
    num_items: Callable[[Any], float],
    steps: Iterable[int],
    num_workers: int = 0,
) -> Generator[GlobalBatch, None, None]:
    """Yield this process's part of each step: the same steps on any number of processes. Collective.

    Args:
        plan: says which samples of the data set a step has, and how they are cut into micro-batches.
        dataset: has a length, and a sample at each integer index.
        collate: makes a batch of a list of samples.
        num_items: counts what the loss of a batch sums over, such as samples or label tokens.
        steps: those to take, such as ``range(3 * plan.num_steps)``, three epochs; once some are done, ``range(done, ...)``.
        num_workers: processes that load and collate in advance.

    Raises:
        ConfigError: the accelerator shards or accumulates by itself, or the plan is of a different number of samples.
        TrainingError: a step has no items.
    """
    kind, rank, count = accelerator.distributed_type, accelerator.process_index, accelerator.num_processes
    if kind not in SUPPORTED or accelerator.gradient_accumulation_steps != 1:
        raise ConfigError(
            f"hftune.batches works on one process and under DDP, with gradient_accumulation_steps=1; this Accelerator has "
            f"{kind.value} and {accelerator.gradient_accumulation_steps}. The plan decides how a step is accumulated."
        )
    if len(dataset) != plan.num_samples:
        raise ConfigError(f"The plan is for {plan.num_samples} samples, and the data set has {len(dataset)}.")
    epoch = lru_cache(1)(plan.epoch)

    def shares() -> Iterator[tuple[int, list[MicroBatch], bool]]:
        for step in steps:
            parts = epoch(step // plan.num_steps)[step % plan.num_steps]
            mine = [parts[index] for index in balance([part.cost for part in parts], count)[rank]]
            yield step, mine or [dummy_micro_batch(parts)], bool(mine)

    planned, ahead = tee(shares())
    lists = (micro_batch.samples.tolist() for _, mine, _ in ahead for micro_batch in mine)
    loaded = Loader(dataset, collate, num_workers, pin_memory=accelerator.device.type == "cuda").read(lists)
    for step, mine, counts in planned:
        own = [(micro_batch, next(loaded)) for micro_batch in mine]
        items = torch.tensor(float(sum(num_items(batch) for _, batch in own)) * counts, device=accelerator.device)
        if not (total := accelerator.reduce(items, reduction="sum").item()):
            raise TrainingError(f"num_items is 0 for all samples of step {step}, so that its loss has no mean.")
        weight = counts * count / total  # DDP averages the gradients of the processes: times their number it is the sum
        yield GlobalBatch(step, weight, plan.seed, accelerator, own)

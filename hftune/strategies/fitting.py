"""Finds how many samples fit into the memory of every process at once. Knows no steps."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from hftune.batch_plan import BatchPlan, by_length, known_lengths
from hftune.config import Recipe
from hftune.errors import ConfigError
from hftune.strategies.base import Strategy


def find_micro_batch_size(strategy: Strategy, plan: BatchPlan, dataset: Any, key: str = "micro_batch_size") -> int:
    """Halve the size until the longest samples fit on every process, starting from a process's share. Collective.

    accelerate's find_executable_batch_size does the same for one process: the others would not hear of its failures.

    Args:
        key: of the recipe's train section, which is auto. micro_batch_tokens: as many short samples as have the tokens of so
            many long ones have to fit as well.

    Raises:
        ConfigError: not even one sample fits.
    """
    size = largest_micro_batch_size(plan, strategy.num_processes)

    def fits() -> bool:
        if not strategy.fits(dataset, plan.longest(size)):
            return False
        return key == "micro_batch_size" or strategy.fits(dataset, shortest(plan, size * plan.most_padded))

    while not fits():
        if size == 1:
            raise ConfigError(
                f"train.{key}=auto: not even the longest sample alone fits into memory. Lower the task's maximum "
                "length, or set train.gradient_checkpointing=true or train.mixed_precision=bf16."
            )
        size = -(-size // 2)
    return size


def largest_micro_batch_size(plan: BatchPlan, num_processes: int) -> int:
    """Return a process's share of the global batch, or fewer if ``train.micro_batch_tokens`` bounds the longest samples."""
    share = -(-plan.batch_size // num_processes)
    return share if plan.micro_batch_tokens is None else min(share, max(1, plan.micro_batch_tokens // plan.most_padded))


def largest_micro_batch_tokens(plan: BatchPlan, size: int, num_processes: int) -> int:
    """Return the tokens of ``size`` of the longest samples, so that a step has micro-batches for all processes.

    Unless ``plan.parts`` sees to that: at most a process's share of a mean step, but the longest sample.
    """
    largest = size * plan.most_padded
    if plan.packed and (plan.parts or 1) >= num_processes:
        return largest
    share = math.ceil(plan.batch_size * float(known_lengths(plan.lengths)[1].mean()) / num_processes)
    return max(plan.most_padded, min(largest, share))


def shortest(plan: BatchPlan, tokens: int) -> np.ndarray:
    """Return as many of the shortest samples as a micro-batch of so many tokens can hold, at most those of a step."""
    order_N = by_length(plan.lengths)[: plan.batch_size]
    count = int(np.searchsorted(plan.lengths[order_N].cumsum(), tokens, side="right"))
    return order_N[: max(1, count)]


def memory_conditions(recipe: Recipe, strategy: Strategy) -> dict[str, Any]:
    """Return what decides how many samples fit, as far as it may change when a run is resumed. Collective."""
    keys = ("gradient_checkpointing", "compile", "deterministic", "batch_norm", "micro_batch_tokens", "packing", "head_loss")
    device = strategy.device.type
    if device == "cuda":
        properties = torch.cuda.get_device_properties(strategy.device)
        device = f"{properties.name} with {properties.total_memory} bytes"
    devices = strategy.broadcast(sorted({*(strategy.gather_to_main([device]) or ())}))
    shared = {"processes": strategy.num_processes, "device": ", ".join(devices)}
    return shared | {key: getattr(recipe.train, key) for key in keys} | {"mixed_precision": strategy.precision}

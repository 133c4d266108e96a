"""The first and the last lines that a run prints. Works on plain values only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hftune import __version__
from hftune.batch_plan import BatchPlan
from hftune.config import Recipe
from hftune.tracking.console import is_number, short, table


def print_start(recipe: Recipe, plan: BatchPlan, num_processes: int, device: torch.device, notices: Sequence[str]) -> None:
    """Print one line that says what is about to happen, and how; then notices, one a line."""
    config = recipe.train
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    bounds = [f"{plan.micro_batch_size} samples"] if plan.micro_batch_size else []
    bounds += [f"{config.micro_batch_tokens} tokens"] if config.micro_batch_tokens else []
    print(
        f"hftune {__version__}  {recipe.recipe}  {processes(num_processes)} on {name}  "
        f"global batch {config.batch_size} in micro-batches of at most {' and '.join(bounds)}  "
        f"precision {config.mixed_precision}  {plan.num_samples:,} samples",
        *notices,
        sep="\n",
        flush=True,
    )


def print_summary(
    metrics: Mapping[str, Any], test: Mapping[str, Any], best: Mapping[str, Any], rows: Mapping[str, str]
) -> None:
    """Print a short table: the metrics, the best model, and ``rows`` such as speed and folders."""
    numbers = {name: short(value) for name, value in metrics.items() if is_number(value)}
    numbers |= {f"test {name}": short(value) for name, value in test.items() if is_number(value)}
    print(table({**numbers, "best": f"{best['metric']} {short(best['value'])} at step {best['step']}", **rows}), flush=True)


def processes(count: int) -> str:
    """Say how many processes there are."""
    return f"{count} process{'es' if count > 1 else ''}"

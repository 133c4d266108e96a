"""Collects what is known of a run before its first step: for run.json, and for the ledger's line about the start.

Main process only; it knows no loop.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from hftune import __version__
from hftune.atomic import explain_write_errors
from hftune.build import Parts
from hftune.checkpoints.checkpointer import Checkpoint
from hftune.checkpoints.train_state import Provenance
from hftune.config import Recipe
from hftune.data.digest import cached_row_hashes
from hftune.data.row_hashes import NAME as ROWS
from hftune.data.row_hashes import root, write_rows
from hftune.distributed.consistency import fingerprint, users_code
from hftune.distributed.progress import Progress
from hftune.strategies.base import Strategy
from hftune.task import ask
from hftune.tracking.facts import command, git_state
from hftune.tracking.ledger import plan_facts


def run_facts(recipe: Recipe, strategy: Strategy, parts: Parts, provenance: Provenance, num_nodes: int) -> dict[str, Any]:
    """Collect what run.json says: where a run comes from and how it is computed. A resumed run writes it anew."""
    labels, mixed = ask(recipe.task, "labels", None), getattr(recipe.task, "mixed", None)
    return {
        "recipe": recipe.recipe,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),  # this attempt
        "command": command(),
        "processes": strategy.num_processes,
        "nodes": num_nodes,
        "device": torch.cuda.get_device_name(strategy.device) if strategy.device.type == "cuda" else strategy.device.type,
        "precision": strategy.precision,  # no, bf16 or fp16: what train.mixed_precision means here
        "model": parts.model_name,  # of its class
        "parameters": parts.num_parameters,
        "trainable_parameters": parts.num_trainable,
        "data": {
            split: {"samples": len(rows), "digest": provenance.digests.get(f"{split} data")}
            for split, rows in parts.datasets.items()
        },
        "mixture": None if mixed is None else mixed.use(parts.plan.mixture, parts.plan.lengths),  # of task.datasets, an epoch
        "labels": None if labels is None else list(map(str, labels)),
        "commits": provenance.commits,  # of what was loaded from the Hub, by the key that names the repository
        "versions": versions(),
        "git": git_state(),  # of the current folder's repository
        "num_steps": parts.num_steps,
        "steps_per_epoch": parts.plan.num_steps,
        "notices": parts.notices,
        "code": users_code(recipe),  # SHA-256 of the user's own files that are computed with, by name
        "fold_data": ask(recipe.task, "fold_data", None),  # of a fold: the digest of the data that all folds are made of
    }


def start_facts(
    recipe: Recipe,
    strategy: Strategy,
    parts: Parts,
    provenance: Provenance,
    checkpoint: Checkpoint | None,
    computed_on: Mapping[str, Any],
    rows_root: str | None,
) -> dict[str, Any]:
    """Collect what the ledger says of a start: everything that the steps from here on follow from.

    No times, and no folder of the run: nothing in which equal runs would differ.

    Args:
        checkpoint: that the run is resumed from.
        computed_on: the hardware of all processes.
        rows_root: stands for all rows of the training data.
    """
    own, roots = fingerprint(recipe), {"train": rows_root}
    if checkpoint is None:
        origin: dict[str, Any] = {"weights": parts.first_weights}
    else:
        origin = {"checkpoint": {"step": checkpoint.step, **checkpoint.hashes}}
    return {
        "world_size": strategy.num_processes,
        **plan_facts(parts.plan),
        "strategy": type(strategy).__name__,
        "precision": strategy.precision,
        "num_steps": parts.num_steps,
        "steps_per_epoch": parts.plan.num_steps,
        "recipe": {key: value for key, value in recipe.to_dict().items() if key not in ("output_dir", "resume")},
        "code": own["code"],
        "packages": own["packages"],
        "hardware": computed_on,
        "commits": provenance.commits,
        "base": provenance.base,
        **({} if parts.teacher is None else {"teacher": parts.teacher.digest}),
        "data": {
            split: {"rows": len(rows), "digest": provenance.digests.get(f"{split} data"), "root": roots.get(split)}
            for split, rows in parts.datasets.items()
        },
        **origin,
    }


def keep_rows(folder: Path, dataset: Any, digest: str, progress: Progress) -> str | None:
    """Write rows.bin, and return the hash that stands for all rows of the training data, if there is one."""
    progress.stage("hashing the rows of the training data")
    hashes = cached_row_hashes(dataset, digest)
    with explain_write_errors(folder / ROWS):
        write_rows(folder, hashes)
    return None if hashes is None else root(hashes)


@functools.cache  # finding them takes longer than a short step
def versions() -> dict[str, str]:
    """Return the versions that the result depends on."""
    packages = ("torch", "accelerate", "transformers", "datasets")
    return {"hftune": __version__, "python": platform.python_version(), **{name: version(name) for name in packages}}

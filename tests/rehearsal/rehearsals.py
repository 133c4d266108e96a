"""Trains on simulated GPUs, and says what made the host wait."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.runs import Group, Run, train_on

FEW = (
    *(
        "task.max_train_samples=48",
        "task.max_eval_samples=13",
        "train.batch_size=12",
        "train.micro_batch_size=4",
        "train.max_steps=4",
    ),
    *("train.log_every=1", "checkpoint.every=2", "eval.batch_size=4", "train.mixed_precision=no"),
)
"""Four steps of three micro-batches; an evaluation of four batches at the end."""
NO_DROPOUT = ("task.model_config.hidden_dropout_prob=0", "task.model_config.attention_probs_dropout_prob=0")


ONCE = ("torch/nn/parallel/distributed.py:", "_warmup_forward_vote", "_warmup_p2p")


class Rehearsal(Group):
    """A group of processes that each have a simulated GPU."""

    program = "tests.rehearsal.process"


@dataclass
class Waits:
    """What one process noted of a run."""

    of: Counter[tuple[str, str, str]]
    """By part of the training, what was waited for, and where."""
    looks: list[int]
    """Of each wait of evaluations, how many batches had been begun."""
    counts: dict[str, int]
    """How often each part was come by."""

    @classmethod
    def read(cls, run: Run, rank: int = 0) -> Waits:
        found = json.loads(run.folder.with_name(f"{run.folder.name}-waits-{rank}.json").read_text())
        return cls(Counter({tuple(key): count for *key, count in found["waits"]}), found["looks"], found["counts"])

    def number(self, part: str) -> int:
        return sum(count for (of, _, _), count in self.of.items() if of == part)

    def places(self, *parts: str) -> str:
        """Return a line for each place of some parts, for messages."""
        lines = [(of, count, what, where) for (of, what, where), count in self.of.items() if of in parts]
        return "\n".join(f"{of}: {count} {what} @ {where}" for of, count, what, where in sorted(lines))

    @property
    def in_steps(self) -> list[str]:
        """What steps waited for besides their report, and where; but for what DDP and pipelines of torch do once."""
        return [place for place in self.places("step").splitlines() if not any(name in place for name in ONCE)]

    @property
    def races(self) -> list[str]:
        return [f"{what} @ {where}" for _, what, where in self.of if "before its copy" in what]


def rehearse(world_size: int, jobs: dict[str, tuple[str, ...]], folder: Path, recipe: str, **options: Any) -> dict[str, Run]:
    """Do what ``train_on`` does, on as many simulated GPUs as processes."""
    folder = folder / "gpu"
    folder.mkdir(exist_ok=True)
    return train_on(world_size, jobs, folder, recipe, group=Rehearsal, **options)

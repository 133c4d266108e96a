"""Trains on simulated GPUs, and says what made the host wait."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from hftune import Callback
from tests.support.runs import FSDP, TIMEOUT_S, Group, Run, train_on

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


class KilledAfterCheckpoint(Callback):
    """Ends the main process with SIGKILL in the third step, when the checkpoint of the second one is complete."""

    def on_begin(self, begin: Any) -> None:
        self.checkpoint = begin.output_dir / "checkpoints" / "step_00000002"

    def on_step(self, step: Any) -> None:
        until = time.monotonic() + TIMEOUT_S
        while step.step == 3:
            if self.checkpoint.exists() or time.monotonic() > until:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.01)


def rehearse_killed(world_size: int, words: tuple[str, ...], folder: Path, recipe: str, sharded: bool = False) -> Run:
    """Train on simulated GPUs until the main process is killed after a step that no checkpoint has; then train to the end."""
    name, callback = "resumed", f"callbacks=[{__name__}.{KilledAfterCheckpoint.__name__}]"
    where = folder / "gpu" / f"{name}-on-{world_size}"
    where.parent.mkdir(exist_ok=True)
    killed = [recipe, [*words, callback, f"output_dir={where}"], None, FSDP if sharded else {}]
    log = folder / "killed.log"
    codes = Rehearsal(world_size, [killed], log).wait()
    assert codes[0] == -signal.SIGKILL and all(codes), f"{codes}\n{log.read_text()}"  # the others notice
    run = rehearse(world_size, {name: words}, folder, recipe, sharded={name} if sharded else ())[name]
    from hftune.replay.audit import audit

    assert [start["after_step"] for start in audit(run.folder).starts] == [0, 2]
    return run


def assert_bit_equal(resumed: Run, whole: Run) -> None:
    """Compare what was logged, the metrics, and all weights."""
    assert resumed.logged("train/loss") == whole.logged("train/loss")
    assert resumed.result["metrics"] == whole.result["metrics"]
    found, expected = weights(resumed), weights(whole)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def weights(run: Run) -> dict[str, torch.Tensor]:
    files = [load_file(path) for path in sorted((run.folder / "model_last").glob("*.safetensors"))]
    return {name: value for file in files for name, value in file.items()}

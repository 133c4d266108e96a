"""Computes parts of a run again to verify its receipt: rows, exported weights, and segments from checkpoint to checkpoint.

Every method is collective: all processes call it alike. What it finds is complete on the main process, and empty elsewhere.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from hftune.checkpoints.checkpointer import Checkpoint
from hftune.checkpoints.export import export, read_about
from hftune.data.digest import row_hashes
from hftune.data.row_hashes import read_rows
from hftune.errors import ConfigError
from hftune.models.weights import weights_digest
from hftune.replay.differences import row_difference
from hftune.replay.distances import SpeedLimit, is_near, measure, why_unlimited
from hftune.replay.engine import Replayer
from hftune.replay.file_checks import Check, first_few
from hftune.replay.history import History, path_of
from hftune.replay.receipt import Hashes, Receipt, changed_checkpoints
from hftune.replay.tolerance import difference
from hftune.tracking.console import one_line

OPTIMIZER_KEYS = ("optimizer", "optimizer_args", "betas", "weight_decay", "momentum", "groups", "layer_decay", "clip_norm")
"""Keys of the section train on which the speed limit stands, beside the learning rate, which the ledger has."""
RUNS_CODE = {".py", ".so", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"}
"""Files that can run code when a model is loaded."""
NOT_COMPUTED = {"transformers_version", "_name_or_path", "dtype", "torch_dtype"}
"""Keys of an exported config.json that may differ with versions and places, and decide nothing that a model computes."""


# Which parts are computed again: drawn after the owner has given the receipt away, so nobody can know which need to be true.


@dataclass(frozen=True, order=True)
class Segment:
    """The steps after one checkpoint, up to and including that of another."""

    start: int
    """Step of the checkpoint that it starts from; 0 for the first weights."""
    end: int

    def __str__(self) -> str:
        return f"{self.start + 1}-{self.end}" if len(self) > 1 else str(self.end)

    @property
    def title(self) -> str:
        """The segment in words, such as "steps 11-20"."""
        return f"step{'s' if len(self) > 1 else ''} {self}"

    def __len__(self) -> int:
        return self.end - self.start


def draw(segments: Sequence[Segment], count: int | None, seed: str) -> tuple[list[Segment], list[Segment], list[Segment]]:
    """Draw the segments to compute again.

    Args:
        count: how many in all; at least the first and the last. None: all of them.
        seed: equal seeds draw equal segments.

    Returns:
        Those that are always computed, the first, which pins the first weights, and the last, which makes the model; those that
        were drawn at random among all others; and those that are left.
    """
    always = sorted({segments[0], segments[-1]})
    middle = [segment for segment in segments if segment not in always]
    wanted = len(middle) if count is None else min(len(middle), max(0, count - len(always)))
    drawn = sorted(random.Random(seed).sample(middle, wanted))
    return always, drawn, [segment for segment in middle if segment not in drawn]


@dataclass(frozen=True)
class PinnedHistory(History):
    """A run of whose checkpoints only those count that a receipt pins, in the run's own folder: no replay's, and no others."""

    pins: Mapping[int, Hashes] = field(default_factory=dict)

    def checkpoint_path(self, step: int) -> Path:
        return path_of(self.folder, step)

    def checkpoint_at(self, step: int, skipped: list[str] | None = None) -> Checkpoint | None:
        checkpoint = super().checkpoint_at(step, skipped)
        return checkpoint if checkpoint is not None and checkpoint.hashes == self.pins.get(step) else None


class Verification:
    """Computes parts of a run again and compares them with its receipt.

    Args:
        replayer: within its context, of a ``PinnedHistory``.
    """

    def __init__(self, receipt: Receipt, replayer: Replayer):
        self.receipt, self.replayer, self.history = receipt, replayer, replayer.history
        self.checkpoints = [
            step
            for step, hashes in sorted(receipt.checkpoints.items())
            if not any(changed_checkpoints({step: hashes}, self.history.folder))
        ]
        self.segments = [Segment(start, end) for start, end in pairwise([0, *self.checkpoints])]

    def check_data(self) -> Check:
        """Compare the rows of the training data, as they are here, with the hashes that the run noted."""
        if not self.replayer.strategy.is_main:
            return Check("data")
        noted = read_rows(self.history.folder)
        found = None if noted is None else row_hashes(self.replayer.datasets["train"])
        start = self.receipt.starts[0]
        if noted is None or found is None:
            text = "rows not compared one by one: their digest, of all lengths and a few rows, is the run's"
            is_same = start["data"]["train"]["digest"] == self.replayer.digests["train data"]
            return Check("data", text, [] if is_same else ["they are not those of the run: their digest differs"])
        rows = row_difference(noted, found, start["plan"], 1, self.history.last, ("in the run", "here"))
        return Check("data", f"{len(found):,} rows here, each the same as in the run", [rows.text] if rows else [])

    def check_weights(self) -> Check:
        """Export the models again from their checkpoints, and compare each tensor."""
        told, problems = [], []
        for name in self.receipt.models:
            step = int(read_about(self.history.folder / name).get("step", self.history.last))
            if step not in self.checkpoints:
                problems.append(f"{name} is of step {step}, of which there is no intact checkpoint")
                continue
            try:
                self.replayer.load(step)
            except ConfigError as error:  # its tensors are those of the receipt, but not its manifest
                problems.append(str(error).rstrip("."))
                continue
            problems += self._different_export(name, step)
            told.append(f"{name} is checkpoint {step}")
        return Check("weights", ", ".join(told), problems)

    def _different_export(self, name: str, step: int) -> list[str]:
        strategy, recipe = self.replayer.strategy, self.replayer.recipe
        with strategy.sharding.averaged():
            model = strategy.sharding.unwrap(Path(gettempdir()))

            def compare() -> list[str]:
                with TemporaryDirectory(prefix="hftune-verify-") as scratch:
                    again = Path(scratch) / name
                    export(self.replayer.task, model, again, kind=recipe.adapter.export)
                    return first_few(different_files(self.history.folder / name, again, step))

            return strategy.on_main(compare)

    def check_speed(self) -> Check:
        """Check that no weight moved further between two checkpoints than the optimizer can move it."""
        strategy, clip = self.replayer.strategy, self.replayer.recipe.train.clip_norm
        if not strategy.is_main:
            return Check("speed limit")
        optimizer = strategy.sharding.bare_optimizer
        trained = [start["recipe"].get("train", {}) for start in self.receipt.starts]
        keys = [(*OPTIMIZER_KEYS, *(["lr"] if train.get("groups") else [])) for train in trained]
        reason = why_unlimited(optimizer)
        if len({json.dumps([train.get(key) for key in own]) for train, own in zip(trained, keys, strict=True)}) > 1:
            reason = "the optimizer was changed on the way, so no single limit holds for all segments"
        if reason or len(self.segments) < 2:
            return Check("speed limit", f"not checked: {reason or 'there is one segment only'}")
        limit = SpeedLimit(optimizer, strategy.sharding.parameters(), self.history.ledger.steps, clip)
        problems, largest, kind = [], 0.0, type(optimizer).__name__
        before = self._claimed(self.segments[0].end)["model"]
        for segment in self.segments[1:]:
            after = self._claimed(segment.end)["model"]
            share, name = limit.largest_share(segment, before, after)
            largest, before = max(largest, share), after
            if share > 1:
                problems.append(f"{segment.title} moved a weight of {name} {share:.3g} times as far as {kind} can move it")
        text = (
            f"{len(self.segments) - 1} segments; no weight moved further than {100 * largest:.0f} % of what {kind} can move it"
        )
        return Check("speed limit", text, problems)

    def _claimed(self, step: int) -> dict[str, dict[str, Tensor]]:
        """Read the tensors of a checkpoint, whether it is what the receipt says or not."""
        return {path.stem: load_file(path) for path in sorted(path_of(self.history.folder, step).glob("*.safetensors"))}

    def check_segment(self, segment: Segment) -> Check:
        """Compute a segment again: each step must be as the ledger says, and its end as the next checkpoint."""
        try:
            self.replayer.load(segment.start)
        except ConfigError as error:  # its tensors are those of the receipt, but not its manifest
            return Check(segment.title, problems=[str(error).rstrip(".")])
        before, noted = self.replayer.weights(), self.receipt.starts[0].get("weights")
        # Drawn by other CPU kernels, the first weights may have other last bits.
        is_as_noted = segment.start > 0 or not before or noted in (None, weights_digest(before["model"].items()))
        furthest, wrong = self._replay_steps(segment)
        saved = self.replayer.strategy.sharding.state()
        if saved is None:
            return Check(segment.title)
        tensors, values = saved
        wrong += self._different_values(segment.end, values)
        distances = [*measure(before, tensors, self._claimed(segment.end))]
        worst = max(distances, key=lambda distance: distance.share)
        here, is_cpu = self.replayer.environment(), self.replayer.strategy.device.type == "cpu"
        starts = [self.history.ledger.starts_of[step] for step in range(segment.start + 1, segment.end + 1)]
        must_be_same = is_cpu and all({key: start.get(key) for key in here} == here for start in starts)  # to the bit
        problems = []
        if not is_as_noted and must_be_same:
            problems.append("the first weights are not those that the ledger says")
        if wrong:
            problems.append(wrong[0] + (f"; so do {len(wrong) - 1} more of this segment" if len(wrong) > 1 else ""))
        is_inexact = must_be_same and furthest == 0 and worst.off > 0
        if is_inexact or any(distance.is_too_far(len(segment)) for distance in distances):
            problems.append(
                f"they do not lead to checkpoint {segment.end}: it lies {worst.share:.2g} of the way off, most of it in "
                f"{worst.where}"
            )
        if is_as_noted and furthest == worst.off == 0:
            return Check(segment.title, "bit-equal", problems)
        text = f"losses within {furthest:.1e}, weights within {worst.share:.1e} of the way"
        first = "" if is_as_noted else "; drawn on this machine, the first weights have other last bits"
        return Check(segment.title, text + first, problems)

    def _replay_steps(self, segment: Segment) -> tuple[float, list[str]]:
        """Compute the steps of a segment; return the largest relative difference, and what is wrong in which step."""
        lines, furthest, wrong = self.history.ledger.steps, 0.0, []
        found = {replayed.step: replayed for replayed in self.replayer.advance(segment.end)}
        for step in range(segment.start + 1, segment.end + 1):
            line, replayed = lines[step], found.get(step)
            if replayed is None or line.get("skipped"):
                if bool(line.get("skipped")) != (replayed is None):
                    by = "ledger, not by the recipe" if replayed else "recipe, not by the ledger"
                    wrong.append(f"step {step} was skipped by the {by}")
                continue
            differs = difference(replayed, line)
            furthest = max(furthest, differs.largest)
            if not differs.same_samples:
                wrong.append(f"step {step} was computed from other samples than the ledger says")
                continue
            names = ("loss", "grad_norm", "lr", "items")  # those that were not finite are null
            is_stated = all(line.get(name) is not None or not math.isfinite(getattr(replayed, name)) for name in names)
            if not is_stated or not differs.is_equal or replayed.items != line.get("items"):
                loss, norm = ("none" if line.get(name) is None else f"{line[name]:.8g}" for name in ("loss", "grad_norm"))
                wrong.append(
                    f"step {step} gives loss {replayed.loss:.8g} and gradient norm {replayed.grad_norm:.8g}, and not {loss} "
                    f"and {norm} as in the ledger"
                )
        return furthest, wrong

    def _different_values(self, step: int, values: Mapping[str, Any]) -> list[str]:
        """Say which values of a checkpoint that are no tensors, such as changed options of the optimizer, were not computed."""
        try:
            claimed = json.loads((path_of(self.history.folder, step) / "progress.json").read_text(encoding="utf-8"))["values"]
        except (OSError, ValueError, KeyError, TypeError):
            return [f"progress.json of checkpoint {step} cannot be read"]
        names = sorted((claimed.keys() | values.keys()) - {"scaler"})
        different = [name for name in names if not is_near(claimed.get(name), values.get(name))]
        return [f"checkpoint {step} states another {name} than its steps lead to" for name in different]


def different_files(folder: Path, again: Path, step: int) -> Iterator[str]:
    """Say which tensors of an export are not those of its checkpoint, exported again, and which keys of its config differ.

    Other files, such as a tokenizer's, may differ with the versions of libraries; the receipt pins them. So may keys of a
    config that only one of them has; but for ``auto_map``, which names the code that would be loaded.
    """
    for path in sorted(again.rglob("config.json")):
        name = path.relative_to(again)
        if not (folder / name).is_file():
            yield f"{folder.name}/{name} is missing"
            continue
        then, now = (json.loads((root / name).read_text(encoding="utf-8")) for root in (folder, again))
        for key in sorted((then.keys() & now.keys()) - NOT_COMPUTED | ({"auto_map"} & then.keys())):
            if then[key] != now.get(key):
                told, own = (one_line(str(value), 60) for value in (then[key], now.get(key)))
                yield f"{folder.name}/{name}: {key} is {told}, the run's is {own}"
    for path in sorted(path for path in folder.rglob("*") if path.suffix in RUNS_CODE):
        if not (again / path.relative_to(folder)).is_file():
            yield f"{folder.name}/{path.relative_to(folder)} is not an export of this run"
    names = {path.relative_to(root) for root in (folder, again) for path in root.rglob("*.safetensors")}
    for name in sorted(names):
        if not (folder / name).is_file() or not (again / name).is_file():
            yield f"{folder.name}/{name} is {'missing' if (again / name).is_file() else 'not an export of this run'}"
            continue
        then, now = load_file(folder / name), load_file(again / name)
        for key in sorted(then.keys() | now.keys()):
            if key not in then or key not in now:
                yield f"{folder.name}: {key} is {'missing' if key in now else 'not a tensor of this model'}"
            elif then[key].dtype != now[key].dtype or not torch.equal(then[key], now[key]):
                yield f"{folder.name}: {key} is not that of checkpoint {step}"

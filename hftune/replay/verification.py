"""Computes parts of a run again to verify its receipt: rows, exported weights, and segments from checkpoint to checkpoint.

Every method is collective: all processes call it alike. What it finds is complete on the main process, and empty elsewhere.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from hftune.checkpoints.checkpointer import Checkpoint
from hftune.checkpoints.export import export, read_about
from hftune.data.digest import row_hashes
from hftune.data.row_hashes import read_rows
from hftune.distributed.consistency import fingerprint
from hftune.errors import ConfigError
from hftune.models.weights import weights_digest
from hftune.replay.differences import first_use
from hftune.replay.engine import ReplayedStep, Replayer
from hftune.replay.file_checks import Check, first_few
from hftune.replay.history import History, path_of
from hftune.replay.receipt import Hashes, Receipt, changed_checkpoints
from hftune.replay.segments import Segment, segments_between
from hftune.replay.speed_limit import SpeedLimit, why_unlimited
from hftune.replay.tolerance import difference
from hftune.tracking.console import hide_progress_bars, one_line
from hftune.tracking.hardware import hardware

OF_THE_WAY = 1e-4
"""How far the weights at the end of a segment may lie from its checkpoint, as a share of the way that they went in it. Across
numbers of processes 1.6e-5 was met."""
NOISE = 1e-5
"""The gradient of a weight, relative to that of all weights, below which it may be only rounding, as that of a key's bias in
attention is. Adam moves such a weight as far as any other, and no two machines agree where to: 2e-3 of the way was met."""
OPTIMIZER_KEYS = ("optimizer", "optimizer_args", "betas", "weight_decay", "momentum", "groups", "layer_decay", "clip_norm")
"""Keys of the section train on which the speed limit stands, beside the learning rate, which the ledger has."""
RUNS_CODE = {".py", ".so", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"}
"""Files that can run code when a model is loaded."""
NOT_COMPUTED = {"transformers_version", "_name_or_path", "dtype", "torch_dtype"}
"""Keys of an exported config.json that may differ with versions and places, and decide nothing that a model computes."""

Tensors = Mapping[str, Tensor]
Groups = Mapping[str, Tensors]
"""As in checkpoints."""


@dataclass(frozen=True)
class PinnedHistory(History):
    """A run of whose checkpoints only those count that a receipt pins, in the run's own folder: no replay's, and no others."""

    pins: Mapping[int, Hashes] = field(default_factory=dict)
    """By step, as in a receipt."""

    def checkpoint_path(self, step: int) -> Path:
        return path_of(self.folder, step)

    def checkpoint_at(self, step: int, skipped: list[str] | None = None) -> Checkpoint | None:
        checkpoint = super().checkpoint_at(step, skipped)
        return checkpoint if checkpoint is not None and checkpoint.hashes == self.pins.get(step) else None


class Verification:
    """A context in which parts of a run are computed again and compared with its receipt.

    Raises:
        ConfigError: the recipe cannot be run here, or the data have another number of rows than the run's.
        DataError: the data cannot be trained on.
    """

    def __init__(self, receipt: Receipt, history: History):
        self.receipt = receipt
        self.history = PinnedHistory(history.folder, history.ledger, history.trust_code, history.data, receipt.checkpoints)
        self.checkpoints = [
            step
            for step, hashes in sorted(receipt.checkpoints.items())
            if not any(changed_checkpoints({step: hashes}, history.folder))
        ]
        self.segments = segments_between(self.checkpoints)

    def __enter__(self) -> Verification:
        hide_progress_bars()  # exports would draw one each
        with ExitStack() as stack:
            self.replayer = stack.enter_context(Replayer(self.history, 1))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> bool | None:
        return self._stack.__exit__(*error)

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
        if len(noted) != len(found):
            return Check("data", problems=[f"there are {len(found):,} rows here, the run had {len(noted):,}"])
        changed = np.flatnonzero((noted != found).any(axis=1))
        problems = [
            f"row {row} is not the one that the run was trained on; first used in step "
            f"{first_use(np.array([row]), start['plan'], self.history.last) or 'none'}"
            for row in changed
        ]
        return Check("data", f"{len(found):,} rows here, each the same as in the run", first_few(problems))

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
        with strategy.averaged():
            model = strategy.unwrap()

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
        before = self.replayer.weights()
        is_as_noted = segment.start > 0 or self._begins_as_noted(before)
        furthest, wrong = self._replay_steps(segment)
        saved = self.replayer.strategy.state()
        if saved is None:
            return Check(segment.title)
        tensors, values = saved
        wrong += self._different_values(segment.end, values)
        distances = [*measure(before, tensors, self._claimed(segment.end))]
        worst = max(distances, key=lambda distance: distance.share)
        must_be_exact = furthest == 0 and self._computes_the_same(segment)
        problems = []
        if not is_as_noted and self._computes_the_same(segment):
            problems.append("the first weights are not those that the ledger says")
        if wrong:
            problems.append(wrong[0] + (f"; so do {len(wrong) - 1} more of this segment" if len(wrong) > 1 else ""))
        if (must_be_exact and worst.off > 0) or any(distance.is_too_far(len(segment)) for distance in distances):
            problems.append(
                f"they do not lead to checkpoint {segment.end}: it lies {worst.share:.2g} of the way off, most of it in "
                f"{worst.where}"
            )
        if is_as_noted and furthest == worst.off == 0:
            return Check(segment.title, "bit-equal", problems)
        first = "" if is_as_noted else "; drawn on this machine, the first weights have other last bits"
        return Check(
            segment.title, f"losses within {furthest:.1e}, weights within {worst.share:.1e} of the way{first}", problems
        )

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
            elif not differs.is_equal or not is_stated(replayed, line) or replayed.items != line.get("items"):
                wrong.append(
                    f"step {step} gives loss {_shown(replayed.loss)} and gradient norm {_shown(replayed.grad_norm)}, and not "
                    f"{_shown(line.get('loss'))} and {_shown(line.get('grad_norm'))} as in the ledger"
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

    def _begins_as_noted(self, weights: Groups) -> bool:
        """Say whether the first weights are those of the run, to the bit. Other CPU kernels may draw other last bits."""
        noted = self.receipt.starts[0].get("weights")
        return noted is None or not weights or weights_digest(weights["model"]) == noted

    def _computes_the_same(self, segment: Segment) -> bool:
        """Say whether this machine has to compute the same bits as the run: equal processes, CPUs, code and packages."""
        strategy, own = self.replayer.strategy, fingerprint(self.replayer.recipe)
        here = {
            "world_size": strategy.num_processes,
            "strategy": type(strategy).__name__,
            "hardware": json.loads(json.dumps(hardware(strategy.device))),
            "code": own["code"],
            "packages": own["packages"],
        }
        starts = (self.history.ledger.starts_of[step] for step in range(segment.start + 1, segment.end + 1))
        return strategy.device.type == "cpu" and all({key: start.get(key) for key in here} == here for start in starts)


# How far computed tensors lie from those of a checkpoint


@dataclass(frozen=True)
class Distance:
    """How far tensors that were computed lie from those that a checkpoint claims."""

    off: float
    way: float
    """From the segment's start to the checkpoint; of moments, their norm."""
    rounding: float
    """The most that one rounding of every claimed number comes to."""
    where: str
    """The tensor that is furthest off."""

    @property
    def share(self) -> float:
        """Of the way."""
        return 0.0 if self.off == 0 else self.off / self.way if self.way else math.inf

    def is_too_far(self, num_steps: int) -> bool:
        """Say whether it is more than machines differ in. Where the learning rate is almost 0, every step's rounding counts."""
        return self.off > OF_THE_WAY * self.way + self.rounding * num_steps


def measure(before: Groups, now: Groups, claimed: Groups) -> Iterator[Distance]:
    """Yield how far what was computed lies from a checkpoint: weights, their moving averages, and each kind of moment.

    Weights whose gradient may be rounding do not count. Moments do, since they decide the steps that follow.
    """
    noise = _gradients_of_rounding(now.get("optimizer", {}))
    for group in sorted(now.keys() | claimed.keys()):
        ours, theirs = now.get(group, {}), claimed.get(group, {})
        if unpaired := sorted(ours.keys() ^ theirs.keys()):
            yield Distance(math.inf, 0.0, 0.0, f"{unpaired[0]}, which only one of them has")
            continue
        kinds = sorted({name.rpartition("/")[2] for name in ours}) if group == "optimizer" else [""]
        for kind in kinds:
            names = [name for name in ours if not kind or name.endswith(f"/{kind}")]
            yield _distance(names, ours, theirs, before.get(group, {}), noise)


def _gradients_of_rounding(moments: Tensors) -> dict[str, Tensor]:
    """Say of each weight whether its gradients may have been nothing but rounding, for optimizers that step as far for them.

    Args:
        moments: of Adam, whose second moment tells the size of a gradient; of Lion, the first.
    """
    firsts, seconds = (
        {name.removesuffix(f"/{kind}"): value for name, value in moments.items() if name.endswith(f"/{kind}")}
        for kind in ("exp_avg", "exp_avg_sq")
    )
    sizes = {name: value.abs() for name, value in firsts.items()} | {name: value.sqrt() for name, value in seconds.items()}
    count = sum(value.numel() for value in sizes.values())
    typical = (sum(_squared(value.double()) for value in sizes.values()) / max(1, count)) ** 0.5
    return {name: (value > 0) & (value < NOISE * typical) for name, value in sizes.items()}


def _distance(names: list[str], now: Tensors, then: Tensors, start: Tensors, noise: Tensors) -> Distance:
    """Measure the distance of two sets of tensors.

    Args:
        start: where the way begins; empty: at zero.
        noise: by name, which elements do not count.
    """
    off, way, rounding, worst, where = 0.0, 0.0, 0.0, 0.0, ""
    for name in names:
        if (now[name].shape, now[name].dtype) != (then[name].shape, then[name].dtype):
            return Distance(math.inf, 0.0, 0.0, f"{name}, whose shape or type differs")
        ours, theirs = now[name].double(), then[name].double()
        begin = start[name].double() if name in start else torch.zeros((), dtype=torch.float64)
        apart = torch.where((ours == theirs) | (ours.isnan() & theirs.isnan()), 0.0, ours - theirs).nan_to_num(nan=torch.inf)
        moved, size = (theirs - begin).nan_to_num(0, 0, 0), theirs.nan_to_num(0, 0, 0)
        if name in noise:
            apart, moved, size = (value.masked_fill(noise[name], 0) for value in (apart, moved, size))
        own = _squared(apart)
        off, way = off + own, way + _squared(moved)
        if then[name].is_floating_point():
            rounding += _squared(size) * torch.finfo(then[name].dtype).eps ** 2
        if own > worst:
            worst, where = own, name
    return Distance(off**0.5, way**0.5, rounding**0.5, where)


def _squared(value: Tensor) -> float:
    return float(value.square().sum())


def is_stated(replayed: ReplayedStep, line: Mapping[str, Any]) -> bool:
    """Say whether a line has the numbers of its step; those that were not finite are null."""
    names = ("loss", "grad_norm", "lr", "items")
    return all(line.get(name) is not None or not math.isfinite(getattr(replayed, name)) for name in names)


def is_near(one: Any, other: Any) -> bool:
    """Compare nested JSON values, numbers up to what machines differ in."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(is_near(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(is_near, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=OF_THE_WAY)
    return bool(one == other)


def _shown(value: float | None) -> str:
    """Format a loss, or a norm that the ledger may lack because it was not finite."""
    return "none" if value is None else f"{value:.8g}"


# Exported models


def different_files(folder: Path, again: Path, step: int) -> Iterator[str]:
    """Say which tensors of an export are not those of its checkpoint, exported again, and which keys of its config differ.

    Other files, such as a tokenizer's, may differ with the versions of libraries; the receipt pins them.
    """
    yield from _different_config(folder, again)
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


def _different_config(folder: Path, again: Path) -> Iterator[str]:
    """Say which keys of an exported model's config differ, such as the names of its labels, and what code it would load.

    Keys that only one of them has may come from other versions of libraries; but for ``auto_map``, which names code.
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

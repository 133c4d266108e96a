"""Verifies a receipt by computing parts of the run again: rows, exported weights, and segments from checkpoint to checkpoint.

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

from hftune.batch_plan import BatchPlan
from hftune.checkpoints.checkpointer import Checkpoint
from hftune.checkpoints.export import export, read_about
from hftune.data.digest import row_hashes
from hftune.data.row_hashes import read_rows
from hftune.distributed.consistency import fingerprint
from hftune.errors import ConfigError
from hftune.models.weights import weights_digest
from hftune.replay.engine import ReplayedStep, Replayer
from hftune.replay.file_checks import Check, exported, first
from hftune.replay.history import History
from hftune.replay.receipt import Hashes, Receipt, intact_checkpoints, path_of
from hftune.replay.segments import Segment, segments_between
from hftune.replay.speed_limit import SpeedLimit
from hftune.replay.tolerance import difference
from hftune.tracking.console import hide_progress_bars, one_line
from hftune.tracking.hardware import hardware

OF_THE_WAY = 1e-4
"""How far the weights at the end of a segment may lie from its checkpoint, as a share of the way that they went in it. Across
numbers of processes 1.6e-5 was met."""
ROUNDING = 1e-5
"""The gradient of a weight, relative to that of all weights, below which it may be only rounding, as that of a key's bias
in attention is. Adam moves such a weight as far as any other, and no two machines agree where to: 2e-3 of the way was met."""
OPTIMIZER_KEYS = ("optimizer", "optimizer_args", "betas", "weight_decay", "momentum", "groups", "layer_decay", "clip_norm")
"""Keys of the section train on which the speed limit stands; other than the learning rate, which the ledger has."""

RUNS_CODE = {".py", ".so", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"}
"""Files that can run code when a model is loaded."""
IN_CONFIG = ("transformers_version", "_name_or_path", "dtype", "torch_dtype")
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
        self.checkpoints = intact_checkpoints(receipt, history.folder)
        self.segments = segments_between(self.checkpoints)

    def __enter__(self) -> Verification:
        hide_progress_bars()  # exports would draw one each
        with ExitStack() as stack:
            self.replayer = stack.enter_context(Replayer(self.history, 1))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> bool | None:
        return self._stack.__exit__(*error)

    @property
    def is_main(self) -> bool:
        return self.replayer.strategy.is_main

    def check_data(self) -> Check:
        """Compare the rows of the training data, as they are here, with the hashes that the run noted."""
        return self.replayer.strategy.on_main(self._data)

    def _data(self) -> Check:
        dataset, noted = self.replayer.datasets["train"], read_rows(self.history.folder)
        found = None if noted is None else row_hashes(dataset)
        if noted is None or found is None:
            return self._compare_digest()
        if len(noted) != len(found):
            return Check("data", problems=[f"there are {len(found):,} rows here, the run had {len(noted):,}"])
        other = np.flatnonzero((noted != found).any(axis=1))
        problems = [
            f"row {row} is not the one that the run was trained on; first used in {self._first_use(int(row))}" for row in other
        ]
        return Check("data", f"{len(found):,} rows here, each the same as in the run", first(problems))

    def _compare_digest(self) -> Check:
        """Compare the data as a whole, of which only some rows are looked at."""
        then, now = self.receipt.starts[0]["data"]["train"]["digest"], self.replayer.digests["train data"]
        if then != now:
            return Check("data", problems=["they are not those that the run was trained on: their digest is another"])
        return Check("data", "rows not compared one by one: their digest, of all lengths and a few rows, is the run's")

    def _first_use(self, row: int) -> str:
        start = self.receipt.starts[0]
        plan = BatchPlan(**start["plan"])
        places = np.flatnonzero(plan.epoch(0).order_N == row)
        return f"step {places[0] // plan.batch_size + 1}" if len(places) else "a later epoch"

    def check_weights(self) -> Check:
        """Export the models again from their checkpoints, and compare each tensor."""
        told, problems = [], []
        for name in exported(self.receipt):
            step = self._step_of(name)
            if step not in self.checkpoints:
                problems.append(f"{name} is of step {step}, of which there is no intact checkpoint")
                continue
            try:
                problems += self._compare_export(name, step)
            except ConfigError as error:  # its tensors are those of the receipt, but not its manifest
                problems.append(str(error).rstrip("."))
            told.append(f"{name} is checkpoint {step}")
        return Check("weights", ", ".join(told), problems)

    def _step_of(self, name: str) -> int:
        """Return the step of an exported model: what it says itself, or the last one."""
        return int(read_about(self.history.folder / name).get("step", self.history.last))

    def _compare_export(self, name: str, step: int) -> list[str]:
        self.replayer.load(step)
        strategy, recipe = self.replayer.strategy, self.replayer.recipe
        with strategy.averaged():
            model = strategy.unwrap()

            def compare() -> list[str]:
                with TemporaryDirectory(prefix="hftune-verify-") as scratch:
                    again = Path(scratch) / name
                    export(self.replayer.task, model, again, kind=recipe.adapter.export)
                    return first(different_files(self.history.folder / name, again, step))

            return strategy.on_main(compare)

    def check_speed(self) -> Check:
        """Check that no weight moved further between two checkpoints than the optimizer can move it."""
        return self._speed_check() if self.is_main else Check("speed limit")

    def _speed_check(self) -> Check:
        strategy, clip = self.replayer.strategy, self.replayer.recipe.train.clip_norm
        optimizer = strategy.sharding.bare_optimizer
        if reason := SpeedLimit.why_not(optimizer) or self._changed_optimizer():
            return Check("speed limit", f"not checked: {reason}")
        limit = SpeedLimit(optimizer, strategy.sharding.parameters(), self.history.ledger.steps, clip)
        problems, largest, before, kind = [], 0.0, None, type(optimizer).__name__
        for segment in self.segments:
            after = self._claimed(segment.end)["model"]
            if before is not None:
                share, name = limit.largest_share(segment, before, after)
                largest = max(largest, share)
                if share > 1:
                    problems.append(f"{segment.title} moved a weight of {name} {share:.3g} times as far as {kind} can move it")
            before = after
        count = len(self.segments) - 1
        text = f"{count} segments; no weight moved further than {100 * largest:.0f} % of what {kind} can move it"
        return Check("speed limit", text if count else "not checked: there is one segment only", problems)

    def _changed_optimizer(self) -> str | None:
        """Say if the run changed its optimizer on the way, so that no single limit holds for all segments."""
        found = []
        for start in self.receipt.starts:
            train = start["recipe"].get("train", {})
            found.append([train.get(key) for key in OPTIMIZER_KEYS] + [train.get("lr") if train.get("groups") else None])
        return "the optimizer was changed on the way" if any(values != found[0] for values in found) else None

    def _claimed(self, step: int) -> dict[str, dict[str, Tensor]]:
        """Read the tensors of a checkpoint, whether it is what the receipt says or not."""
        folder = path_of(self.history.folder, step)
        return {path.stem: load_file(path) for path in sorted(folder.glob("*.safetensors"))}

    def check_segment(self, segment: Segment) -> Check:
        """Compute a segment again: each step must be as the ledger says, and its end as the next checkpoint."""
        try:
            self.replayer.load(segment.start)
        except ConfigError as error:  # its tensors are those of the receipt, but not its manifest
            return Check(segment.title, problems=[str(error).rstrip(".")])
        before = self._copied_weights()
        is_as_noted = segment.start > 0 or self._begins_as_noted(before)
        furthest, wrong = self._replay_steps(segment)
        saved = self.replayer.strategy.state()
        if saved is None:
            return Check(segment.title)
        wrong += self._other_values(segment.end, saved[1])
        found = [*distances(before, saved[0], self._claimed(segment.end))]
        worst = max(found, key=lambda one: one.share)
        is_exact = is_as_noted and not furthest and not worst.off
        problems = []
        if not is_as_noted and self._computes_the_same(segment):
            problems.append("the first weights are not those that the ledger says")
        if wrong:
            problems.append(wrong[0] + (f"; so do {len(wrong) - 1} more of this segment" if len(wrong) > 1 else ""))
        must_be_exact = not furthest and worst.off > 0 and self._computes_the_same(segment)
        if must_be_exact or any(one.is_too_far(len(segment)) for one in found):
            problems.append(
                f"they do not lead to checkpoint {segment.end}: it lies {worst.share:.2g} of the way off, most of it in "
                f"{worst.where}"
            )
        text = f"losses within {furthest:.1e}, weights within {worst.share:.1e} of the way"
        first_weights = "" if is_as_noted else "; drawn on this machine, the first weights have other last bits"
        return Check(segment.title, "bit-equal" if is_exact else text + first_weights, problems)

    def _replay_steps(self, segment: Segment) -> tuple[float, list[str]]:
        """Compute the steps of a segment; return the largest relative difference, and what is wrong in which step."""
        lines, furthest, wrong = self.history.ledger.steps, 0.0, []
        expected = [step for step in range(segment.start + 1, segment.end + 1) if not lines[step].get("skipped")]
        found = {replayed.step: replayed for replayed in self.replayer.advance(segment.end)}
        for step in sorted(found.keys() ^ set(expected)):
            by = "ledger, not by the recipe" if step in found else "recipe, not by the ledger"
            wrong.append(f"step {step} was left out by the {by}")
        for step in found.keys() & set(expected):
            replayed, line = found[step], lines[step]
            differs = difference(replayed, line)
            furthest = max(furthest, differs.loss or 0.0, differs.grad_norm or 0.0)
            if not differs.same_samples:
                wrong.append(f"step {step} was computed from other samples than the ledger says")
            elif not (differs.is_equal and is_stated(replayed, line)) or replayed.items != line.get("items"):
                wrong.append(
                    f"step {step} gives loss {shown(replayed.loss)} and gradient norm {shown(replayed.grad_norm)}, and not "
                    f"{shown(line.get('loss'))} and {shown(line.get('grad_norm'))} as in the ledger"
                )
        return furthest, wrong

    def _other_values(self, step: int, values: Mapping[str, Any]) -> list[str]:
        """Say which values of a checkpoint that are no tensors, such as changed options of the optimizer, were not computed."""
        try:
            claimed = json.loads((path_of(self.history.folder, step) / "progress.json").read_text(encoding="utf-8"))["values"]
        except (OSError, ValueError, KeyError, TypeError):
            return [f"progress.json of checkpoint {step} cannot be read"]
        other = [name for name in sorted(claimed.keys() | values.keys()) if not is_near(claimed.get(name), values.get(name))]
        return [f"checkpoint {step} states another {name} than its steps lead to" for name in other if name != "scaler"]

    def _copied_weights(self) -> dict[str, dict[str, Tensor]]:
        """Return copies of the present weights, and of their moving averages, on the main process; nothing elsewhere."""
        saved = self.replayer.strategy.state()
        if saved is None:
            return {}
        groups = {group: tensors for group, tensors in saved[0].items() if group != "optimizer"}
        return {group: {name: value.clone() for name, value in tensors.items()} for group, tensors in groups.items()}

    def _begins_as_noted(self, weights: Groups) -> bool:
        """Say whether the first weights are those of the run, to the bit. Other CPU kernels may draw other last bits."""
        noted = self.receipt.starts[0].get("weights")
        return noted is None or not weights or weights_digest(weights["model"]) == noted

    def _computes_the_same(self, segment: Segment) -> bool:
        """Say whether this machine has to compute the same bits as the run: equal processes, CPUs, code and packages."""
        strategy, ledger, own = self.replayer.strategy, self.history.ledger, fingerprint(self.replayer.recipe)
        here = {
            "world_size": strategy.num_processes,
            "strategy": type(strategy).__name__,
            "hardware": json.loads(json.dumps(hardware(strategy.device))),
            "code": own["code"],
            "packages": own["packages"],
        }
        # A run that was resumed may have computed parts of a segment elsewhere.
        starts = {id(start): start for start in map(ledger.starts_of.__getitem__, range(segment.start + 1, segment.end + 1))}
        equal = all(start.get(key) == value for start in starts.values() for key, value in here.items())
        return equal and strategy.device.type == "cpu"


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
        return 0.0 if self.off == 0 else self.off / self.way if self.way else float("inf")

    def is_too_far(self, num_steps: int) -> bool:
        """Say whether it is more than machines differ in. Where the learning rate is almost 0, every step's rounding counts."""
        return self.off > OF_THE_WAY * self.way + self.rounding * num_steps


def distances(before: Groups, now: Groups, claimed: Groups) -> Iterator[Distance]:
    """Yield how far what was computed lies from a checkpoint: weights, their moving averages, and each kind of moment.

    Weights whose gradient may be rounding do not count. Moments do, since they decide the steps that follow.
    """
    rounded = of_rounding(now.get("optimizer", {}))
    for group in sorted(now.keys() | claimed.keys()):
        ours, theirs = now.get(group, {}), claimed.get(group, {})
        if odd := sorted(ours.keys() ^ theirs.keys()):
            yield Distance(float("inf"), 0.0, 0.0, f"{odd[0]}, which only one of them has")
            continue
        for part in kinds(group, ours):
            names = [name for name in ours if not part or name.endswith(f"/{part}")]
            yield distance(names, ours, theirs, before.get(group, {}), rounded)


def of_rounding(moments: Tensors) -> dict[str, Tensor]:
    """Say of each weight whether its gradients may have been nothing but rounding, for optimizers that step as far for them.

    Args:
        moments: of the optimizer, by parameter and kind. Adam's second moment tells the size of a gradient; of Lion, the first.
    """
    firsts, seconds = (
        {name.removesuffix(f"/{kind}"): value for name, value in moments.items() if name.endswith(f"/{kind}")}
        for kind in ("exp_avg", "exp_avg_sq")
    )
    sizes = {name: value.abs() for name, value in firsts.items()} | {name: value.sqrt() for name, value in seconds.items()}
    count = sum(value.numel() for value in sizes.values())
    typical = (sum(float(value.double().square().sum()) for value in sizes.values()) / max(1, count)) ** 0.5
    return {name: (value > 0) & (value < ROUNDING * typical) for name, value in sizes.items()}


def kinds(group: str, tensors: Tensors) -> list[str]:
    """Return the parts of a group that are compared as one: each kind of moment, or all weights."""
    return sorted({name.rpartition("/")[2] for name in tensors}) if group == "optimizer" else [""]


def distance(names: list[str], now: Tensors, then: Tensors, start: Tensors, rounded: Tensors) -> Distance:
    """Measure the distance of two sets of tensors.

    Args:
        start: where the way begins; empty: at zero.
        rounded: by name, which elements do not count.
    """
    off, way, rounding, worst, where = 0.0, 0.0, 0.0, 0.0, ""
    for name in names:
        if (now[name].shape, now[name].dtype) != (then[name].shape, then[name].dtype):
            return Distance(float("inf"), 0.0, 0.0, f"{name}, whose shape or type is another")
        ours, theirs = now[name].double(), then[name].double()
        begin = start[name].double() if name in start else torch.zeros((), dtype=torch.float64)
        apart = torch.where((ours == theirs) | (ours.isnan() & theirs.isnan()), 0.0, ours - theirs).nan_to_num(nan=torch.inf)
        moved, size = (theirs - begin).nan_to_num(0, 0, 0), theirs.nan_to_num(0, 0, 0)
        if name in rounded:
            apart, moved, size = (value.masked_fill(rounded[name], 0) for value in (apart, moved, size))
        own = squared(apart)
        off, way = off + own, way + squared(moved)
        if then[name].is_floating_point():
            rounding += squared(size) * torch.finfo(then[name].dtype).eps ** 2
        if own > worst:
            worst, where = own, name
    return Distance(off**0.5, way**0.5, rounding**0.5, where)


def squared(value: Tensor) -> float:
    """Return the sum of the squares."""
    return float(value.square().sum())


def is_stated(replayed: ReplayedStep, line: Mapping[str, Any]) -> bool:
    """Say whether a line has the numbers of its step; those that were not finite are null."""
    return all(
        line.get(name) is not None or not math.isfinite(getattr(replayed, name))
        for name in ("loss", "grad_norm", "lr", "items")
    )


def is_near(one: Any, other: Any) -> bool:
    """Compare nested JSON values, numbers up to what machines differ in."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(is_near(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(is_near, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return one == other or abs(one - other) <= OF_THE_WAY * abs(other)
    return bool(one == other)


def shown(value: float | None) -> str:
    """Format a loss, or a norm that the ledger may lack because it was not finite."""
    return "none" if value is None else f"{value:.8g}"


def different_files(folder: Path, again: Path, step: int) -> Iterator[str]:
    """Say which tensors of an export are not those of its checkpoint, exported again, and which keys of its config differ.

    Other files, such as a tokenizer's, may differ with the versions of libraries; the receipt pins them.
    """
    yield from different_config(folder, again)
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


def different_config(folder: Path, again: Path) -> Iterator[str]:
    """Say which keys of an exported model's config differ, such as the names of its labels, and what code it would load.

    Keys that only one of them has may come from other versions of libraries; but for ``auto_map``, which names code.
    """
    for path in sorted(again.rglob("config.json")):
        name = path.relative_to(again)
        if not (folder / name).is_file():
            yield f"{folder.name}/{name} is missing"
            continue
        then, now = (json.loads((root / name).read_text(encoding="utf-8")) for root in (folder, again))
        for key in sorted((then.keys() & now.keys()) - set(IN_CONFIG) | ({"auto_map"} & then.keys())):
            if then[key] != now.get(key):
                told, own = (one_line(str(value), 60) for value in (then[key], now.get(key)))
                yield f"{folder.name}/{name}: {key} is {told}, the run's is {own}"

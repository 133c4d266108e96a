"""Runs beside each other: where they diverge and why, and how sure the differences of their losses and metrics are.

Knows not how it is shown: ``findings`` puts it into words and tables, for the terminal and the report.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

import numpy as np

from hftune.data.row_hashes import read_rows, root
from hftune.errors import ConfigError
from hftune.replay.differences import OWN_KEYS, differences_between
from hftune.replay.divergence import Divergence, find_divergence
from hftune.replay.ledger import LedgerRecord, read_ledger, stretches
from hftune.replay.paired import (
    MIN_SEEDS,
    Interval,
    PairedEvaluation,
    TrainingLoss,
    evaluation,
    of_independent,
    of_unpaired,
    training_loss,
)
from hftune.replay.run_record import RunRecord, plain


@dataclass
class Pair:
    """Two runs."""

    a: str
    b: str
    divergence: Divergence
    training: TrainingLoss | None
    evaluation: PairedEvaluation


@dataclass
class RunFacts:
    """What is said of one run."""

    name: str
    folder: str
    title: str
    num_steps: int
    processes: Any
    is_finished: bool
    changes: list[tuple[int, list[str]]]
    """What it changed when it was resumed: from which step on, and what."""
    has_several_recipes: bool
    """Whether recipe or data are among the changes, beyond keys that do not change the training."""
    missing: list[str]
    """What cannot be compared, a sentence each."""
    problems: list[str]
    can_be_replayed: bool
    metrics: dict[str, float]
    """The best metric, the metrics of the last evaluation, and those of the test."""


@dataclass
class Method:
    """Runs of one recipe with several seeds."""

    name: str
    """A letter, and the keys that tell it from the others."""
    runs: list[str]
    seeds: list[Any]
    metrics: dict[str, list[float]]
    """The values of its runs, in their order."""


@dataclass(frozen=True)
class MethodDifference:
    """A metric of one method less that of the first."""

    method: str
    metric: str
    mean: float
    interval: Interval | None
    """Over the seeds; None with fewer than 3."""
    is_paired: bool
    """Whether both methods had the same seeds, so that runs are compared in pairs."""


@dataclass
class Comparison:
    """Several runs. All but the first are compared with the first."""

    runs: list[RunFacts]
    pairs: list[Pair]
    methods: list[Method]
    """Empty unless there are more than two runs, and some recipe was trained with several seeds."""
    method_differences: list[MethodDifference]


def compare(runs: Sequence[RunRecord]) -> Comparison:
    """Compare runs with the first of them."""
    first, rows, facts = _read(runs[0])
    found = Comparison([facts], [], [], [])
    for run in runs[1:]:
        record, own_rows, facts = _read(run)  # one at a time: a ledger of 100,000 steps takes 150 MB
        found.runs.append(facts)
        both = None if rows is None or own_rows is None else (rows, own_rows)
        divergence = find_divergence(first, record, both)
        found.pairs.append(Pair(runs[0].name, run.name, divergence, training_loss(first, record), evaluation(runs[0], run)))
    if len(runs) > 2:
        found.methods = _methods(runs, found.runs)
        found.method_differences = [
            _method_difference(found.methods[0], method, name)
            for method in found.methods[1:]
            for name in method.metrics
            if name in found.methods[0].metrics
        ]
    return found


def _read(run: RunRecord) -> tuple[LedgerRecord, np.ndarray | None, RunFacts]:
    """Return a run's ledger, empty if there is none, the hashes of its training rows, if they are known, and its facts."""
    record, rows, missing = LedgerRecord(), None, []
    try:
        record = read_ledger(run.folder)
    except ConfigError as error:
        missing.append(f"The steps of {run.name} are not compared: {error}")
    roots = {start.get("data", {}).get("train", {}).get("root") for start in record.starts}
    if len(roots) > 1:
        missing.append(f"The data of {run.name} changed on its way: of the rows, only the digests are compared.")
    elif roots - {None}:
        rows = read_rows(run.folder)
        if rows is None or root(rows) not in roots:
            rows = None
            missing.append(f"{run.name} has no rows.bin that fits its ledger: which rows differ is not known.")
    pieces = [
        (now.steps[0], [*differences_between(before.starts[0], now.starts[0], now.steps[0])])
        for before, now in pairwise(stretches(record, record))
    ]
    changes = [one for _, differences in pieces for one in differences]
    metrics = {f"best {point[0]}": point[2]} if (point := run.best_point()) else {}
    for split, prefix in (("eval/", ""), ("test/", "test ")):
        for key, curve in run.log.curves.items():
            if key.startswith(split) and (value := curve.last()) is not None:
                metrics[prefix + key.removeprefix(split)] = value
    facts = RunFacts(
        name=run.name,
        folder=str(run.folder),
        title=run.title,
        num_steps=record.last or run.log.last_step,
        processes=record.starts_of[record.last].get("world_size") if record.steps else run.facts.get("processes"),
        is_finished=run.is_finished,
        changes=[(step, [one.text.replace(" | ", " -> ") for one in found]) for step, found in pieces if found],
        has_several_recipes=any(one.kind in ("recipe", "data") and one.effects for one in changes),
        missing=missing,
        problems=record.problems,
        can_be_replayed=bool(record.steps),
        metrics=metrics,
    )
    return record, rows, facts


def _methods(runs: Sequence[RunRecord], facts: Sequence[RunFacts]) -> list[Method]:
    """Group the runs whose recipes differ by their seeds alone; empty if no recipe has several seeds. A seed counts once."""
    recipes = [
        {key: value for key, value in run.recipe.items() if key not in (*OWN_KEYS, "seed") and not key.startswith("track.")}
        | ({"changed on its way": run.name} if own.has_several_recipes else {})  # a method of its own
        for run, own in zip(runs, facts, strict=True)
    ]
    groups: dict[str, dict[str, int]] = {}
    for index, (run, recipe) in enumerate(zip(runs, recipes, strict=True)):
        group = groups.setdefault(json.dumps(recipe, sort_keys=True, default=str), {})
        group.setdefault(plain(run.recipe.get("seed")), index)
    if all(len(group) == 1 for group in groups.values()) or not all(recipes):
        return []
    firsts = [recipes[min(group.values())] for group in groups.values()]
    keys = dict.fromkeys(key for recipe in firsts for key in recipe)
    telling = [key for key in keys if len({plain(recipe.get(key)) for recipe in firsts}) > 1]
    methods = []
    for number, (group, recipe) in enumerate(zip(groups.values(), firsts, strict=True)):
        values = {key: recipe[key] for key in telling if key in recipe}
        ends = {key: value.rpartition("/")[2] or value for key, value in values.items() if isinstance(value, str)}  # of paths
        shown = ", ".join(f"{key}={plain(value)}" for key, value in (values | ends).items())
        own = [facts[index].metrics for index in group.values()]
        metrics = {name: [one[name] for one in own] for name in own[0] if all(name in one for one in own)}
        letter = chr(ord("A") + number) if number < 26 else f"A{number}"
        members = [runs[index] for index in group.values()]
        seeds = [run.recipe.get("seed") for run in members]
        methods.append(Method(f"{letter}: {shown or 'all'}", [run.name for run in members], seeds, metrics))
    return methods


def _method_difference(a: Method, b: Method, name: str) -> MethodDifference:
    """Compare a metric of two methods, in pairs if both have the same seeds."""
    by_seed = [dict(zip(map(plain, method.seeds), method.metrics[name], strict=True)) for method in (a, b)]
    is_paired = by_seed[0].keys() == by_seed[1].keys()
    if is_paired:
        interval = of_independent([by_seed[1][seed] - value for seed, value in by_seed[0].items()], MIN_SEEDS)
    else:
        interval = of_unpaired(a.metrics[name], b.metrics[name], MIN_SEEDS)
    return MethodDifference(b.name, name, fmean(b.metrics[name]) - fmean(a.metrics[name]), interval, is_paired)

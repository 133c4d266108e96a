"""Methods: runs of one recipe with several seeds, and what their metrics differ by over the seeds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from hftune.replay.causes import OWN
from hftune.replay.intervals import FEWEST_SEEDS, Interval, of_independent, of_unpaired
from hftune.replay.run_record import RunRecord, plain


@dataclass
class Method:
    """Runs of one recipe with several seeds."""

    name: str
    """A letter, and the keys that tell it from the others."""
    runs: list[str]
    """Their names."""
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
    """Over the seeds; None of fewer than 3."""
    is_paired: bool
    """Whether both methods had the same seeds, so that runs are compared in pairs."""


def methods_of(
    runs: Sequence[RunRecord], metrics: Sequence[Mapping[str, float]], has_several_recipes: Sequence[bool]
) -> list[Method]:
    """Group the runs whose recipes differ by their seeds alone; empty if no recipe has several. A seed counts once.

    Args:
        metrics: of each run.
        has_several_recipes: of each run; one that changed its recipe on its way is a method of its own.
    """
    recipes = [
        {key: value for key, value in run.recipe.items() if key not in (*OWN, "seed") and not key.startswith("track.")}
        | ({"changed on its way": run.name} if changed else {})
        for run, changed in zip(runs, has_several_recipes, strict=True)
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
    return [
        Method(
            name=f"{letter_of(place)}: {', '.join(f'{key}={named(recipe[key])}' for key in telling if key in recipe) or 'all'}",
            runs=[runs[index].name for index in members],
            seeds=[runs[index].recipe.get("seed") for index in members],
            metrics={
                name: [metrics[index][name] for index in members]
                for name in metrics[members[0]]
                if all(name in metrics[index] for index in members)
            },
        )
        for place, (members, recipe) in enumerate(zip(([*group.values()] for group in groups.values()), firsts, strict=True))
    ]


def letter_of(place: int) -> str:
    """Return A, B, ... Z, then A26 and so on."""
    return chr(ord("A") + place) if place < 26 else f"A{place}"


def named(value: Any) -> str:
    """Return a value of a recipe in short: of a path, its end."""
    return (value.rpartition("/")[2] or value) if isinstance(value, str) else plain(value)


def method_differences(methods: Sequence[Method]) -> list[MethodDifference]:
    """Compare each method with the first, metric by metric, over the seeds."""
    return [
        compare_metric(methods[0], method, name)
        for method in methods[1:]
        for name in method.metrics
        if name in methods[0].metrics
    ]


def compare_metric(a: Method, b: Method, name: str) -> MethodDifference:
    """Compare a metric of two methods, in pairs if both have the same seeds."""
    by_seed = [dict(zip(map(plain, method.seeds), method.metrics[name], strict=True)) for method in (a, b)]
    is_paired = by_seed[0].keys() == by_seed[1].keys()
    if is_paired:
        interval = of_independent([by_seed[1][seed] - value for seed, value in by_seed[0].items()], FEWEST_SEEDS)
    else:
        interval = of_unpaired(a.metrics[name], b.metrics[name], FEWEST_SEEDS)
    return MethodDifference(b.name, name, fmean(b.metrics[name]) - fmean(a.metrics[name]), interval, is_paired)

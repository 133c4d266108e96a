"""What a sweep tries: lists of values with commas between, or ranges, read from its words; and its trials. Runs nothing."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import Any

from hftune.errors import ConfigError
from hftune.tracking.jsonl import read_object

NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
RANGE = re.compile(rf"({NUMBER})\.\.({NUMBER})")
SHARED = ("replace", "task.type", "eval.metric", "eval.greater_is_better")
"""Keys that cannot vary, besides those of which each run has its own: trials are compared by one metric."""
MAX_NAME = 100
LOG_FROM = 10
"""Ratio of its ends from which a range is searched by orders of magnitude."""


@dataclass
class Space:
    """The words of a sweep."""

    recipe: str = ""
    fixed: list[str] = field(default_factory=list)
    """Overrides that all trials have."""
    lists: dict[str, list[str]] = field(default_factory=dict)
    """Values by key, as they were typed."""
    ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Both ends, which are included: whole numbers if both were typed as such."""

    @property
    def keys(self) -> list[str]:
        """The keys that vary; the order of the words does not count, and the seed comes last."""
        return sorted([*self.lists, *self.ranges], key=lambda key: (key == "seed", key))

    def words(self, values: Mapping[str, str]) -> list[str]:
        """Return the recipe and the overrides of a trial."""
        return [f"recipe={self.recipe}", *self.fixed, *(f"{key}={value}" for key, value in values.items())]

    def grid(self) -> list[dict[str, str]]:
        """Return the values of each trial, by key: all combinations of the lists."""
        keys = [key for key in self.keys if key in self.lists]
        return [dict(zip(keys, values, strict=True)) for values in product(*(self.lists[key] for key in keys))]

    def corners(self) -> Iterator[dict[str, str]]:
        """Yield a few trials that have each value of each list, and each end of each range."""
        columns = {**self.lists, **{key: [*map(spell, ends)] for key, ends in self.ranges.items()}}
        for index in range(max(map(len, columns.values()))):
            yield {key: columns[key][min(index, len(columns[key]) - 1)] for key in self.keys}

    def distribution(self, key: str, known: str | None = None) -> Any:
        """Return what Optuna draws a key from; ``known``: a value drawn earlier, which another range may have had."""
        from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

        if key in self.lists:
            return CategoricalDistribution(self.lists[key])
        ends = [*self.ranges[key], *([] if known is None else [number(known)])]
        kind = IntDistribution if all(isinstance(end, int) for end in ends) else FloatDistribution
        return kind(min(ends), max(ends), log=min(ends) > 0 and max(ends) / min(ends) >= LOG_FROM)


def parse(words: Sequence[str]) -> Space:
    """Read ``recipe=NAME key=value key=value,value key=low..high``.

    A comma inside brackets, braces or quotes belongs to a value.

    Raises:
        ConfigError: no recipe is named, or several; a value or a key is named twice; or nothing varies.
    """
    space, recipes = Space(), []
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            raise ConfigError(f"{word} is not KEY=VALUE.")
        if key == "recipe":
            recipes.append(text)
            continue
        if key in (*space.keys, *(other.partition("=")[0] for other in space.fixed)):
            raise ConfigError(f"{key} is given twice. List its values with commas: {key}=A,B.")
        values = split(text)
        if found := RANGE.fullmatch(text):
            low, high = map(number, found.groups())
            if not low < high:
                raise ConfigError(f"{word}: the first end must be below the second.")
            space.ranges[key] = low, high
        elif len(values) == 1:
            space.fixed.append(word)
        elif len(set(values)) < len(values) or "" in values:
            raise ConfigError(f"{word}: a value is {'missing' if '' in values else 'given twice'}.")
        else:
            space.lists[key] = values
    if len(recipes) != 1 or len(split(recipes[0])) != 1:
        raise ConfigError("Name one recipe, such as recipe=yelp_demo. To compare recipes, sweep each and use hftune report.")
    from hftune.config.reference import resume_rule

    if clash := [key for key in space.keys if key in SHARED or resume_rule(key) == "own"]:
        raise ConfigError(f"{clash[0]} cannot vary in a sweep.")
    if not space.keys:
        raise ConfigError("Nothing varies. List values with commas, such as train.lr=1e-5,3e-5 seed=1,2.")
    space.recipe = recipes[0]
    return space


def split(text: str) -> list[str]:
    """Split at the commas that are not inside brackets, braces or quotes."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        else:
            depth += (letter in "[{(") - (letter in "]})")
        if letter == "," and not quote and depth <= 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def number(text: str) -> float:
    """Read a number: an int if it is written as one."""
    return int(text) if re.fullmatch(r"[+-]?\d+", text) else float(text)


def spell(value: float) -> str:
    """Write a number as a recipe has it, with at most four digits of a fraction's value."""
    return str(value) if isinstance(value, int) else repr(float(f"{value:.4g}")) if math.isfinite(value) else str(value)


def trial_name(values: Mapping[str, str]) -> str:
    """Return a readable name for a folder: "lr_1e-5_seed_1"; a long one ends in a digest instead."""
    lasts = [key.rpartition(".")[2] for key in values]
    names = lasts if len(set(lasts)) == len(lasts) else values
    words = "_".join(f"{name}_{value}" for name, value in zip(names, values.values(), strict=True))
    name = re.sub(r"[^\w.+-]+", "-", words).strip("-")
    return name if name == words and len(name) <= MAX_NAME else f"{name[:MAX_NAME]}-{sha256(words.encode()).hexdigest()[:6]}"


@dataclass
class Trial:
    """One training of the sweep."""

    name: str
    values: dict[str, str]
    state: str = "waiting"
    """waiting, running, finished, failed or stopped."""
    value: float | None = None
    """Of the objective."""
    step: int | None = None
    seconds: float | None = None
    error: str | None = None

    def read_result(self, folder: Path) -> bool:
        """Take over the result of a finished run, and return whether there is one."""
        if not (result := read_object(folder / "result.json")):
            return False
        best = result.get("best") or {}
        if not isinstance(best.get("value"), (int, float)):
            why = "its eval.metric is not finite" if "value" in best else "it was never evaluated"
            self.state, self.error = "failed", f"{why}, so there is nothing to compare"
            return True
        self.state, self.value, self.step, self.seconds = "finished", best["value"], best.get("step"), result.get("seconds")
        return True

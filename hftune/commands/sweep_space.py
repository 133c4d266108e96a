"""What a sweep tries: lists of values with commas between, or ranges, and a readable name for each trial. Runs nothing."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import product

from hftune.errors import ConfigError

NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
RANGE = re.compile(rf"({NUMBER})\.\.({NUMBER})")
SHARED = ("output_dir", "resume", "replace", "task.type", "eval.metric", "eval.greater_is_better")
"""Keys that cannot vary: trials have folders of their own, and are compared by one metric."""
LONGEST_NAME = 100
LOG_FROM = 10
"""Ratio of its ends from which a range is searched by orders of magnitude."""


@dataclass(frozen=True)
class Range:
    """Numbers between two ends, both included."""

    low: float
    high: float

    @property
    def is_whole(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)

    @property
    def is_log(self) -> bool:
        return self.low > 0 and self.high / self.low >= LOG_FROM

    def __str__(self) -> str:
        scale = "whole numbers" if self.is_whole else "log" if self.is_log else "linear"
        return f"{self.low:g}..{self.high:g} ({scale}{', log' if self.is_whole and self.is_log else ''})"


@dataclass
class Space:
    """The words of a sweep."""

    recipe: str
    fixed: list[str]
    """Overrides that all trials have."""
    lists: dict[str, list[str]] = field(default_factory=dict)
    """Values by key, as they were typed."""
    ranges: dict[str, Range] = field(default_factory=dict)

    @property
    def keys(self) -> list[str]:
        return [*self.lists, *self.ranges]

    def sort_like(self, keys: Sequence[str]) -> None:
        """Put the keys into this order, if they are the same."""
        if set(keys) == set(self.keys):
            self.lists = {key: self.lists[key] for key in keys if key in self.lists}
            self.ranges = {key: self.ranges[key] for key in keys if key in self.ranges}

    def grid(self) -> list[dict[str, str]]:
        """Return the values of each trial, by key: all combinations of the lists."""
        return [dict(zip(self.lists, values, strict=True)) for values in product(*self.lists.values())]

    def corners(self) -> Iterator[dict[str, str]]:
        """Yield a few trials that have each value of each list, and each end of each range."""
        ends = {key: [spell(part.low), spell(part.high)] for key, part in self.ranges.items()}
        columns = {**self.lists, **ends}
        for index in range(max(map(len, columns.values()))):
            yield {key: values[min(index, len(values) - 1)] for key, values in columns.items()}


def parse(words: Sequence[str]) -> Space:
    """Read ``recipe=NAME key=value key=value,value key=low..high``.

    A comma inside brackets, braces or quotes belongs to a value.

    Raises:
        ConfigError: no recipe is named, or several; a value or a key is named twice; or nothing varies.
    """
    space = Space("", [])
    recipes = []
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
            space.ranges[key] = read_range(key, *found.groups())
        elif len(values) == 1:
            space.fixed.append(word)
        elif len(set(values)) < len(values) or "" in values:
            raise ConfigError(f"{word}: a value is {'missing' if '' in values else 'given twice'}.")
        else:
            space.lists[key] = values
    if len(recipes) != 1 or len(split(recipes[0])) != 1:
        raise ConfigError("Name one recipe, such as recipe=yelp_demo. To compare recipes, sweep each and use hftune report.")
    if clash := [key for key in SHARED if key in space.keys]:
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
        elif letter in "[{(":
            depth += 1
        elif letter in "]})":
            depth -= 1
        if letter == "," and not quote and depth <= 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def read_range(key: str, low: str, high: str) -> Range:
    """Return a range, or raise ConfigError if its ends are the wrong way round."""
    ends = [int(text) if re.fullmatch(r"[+-]?\d+", text) else float(text) for text in (low, high)]
    if not ends[0] < ends[1]:
        raise ConfigError(f"{key}={low}..{high}: the first end must be below the second.")
    return Range(*ends)


def spell(value: float) -> str:
    """Write a number as a recipe has it, with at most four digits of a fraction's value."""
    return str(value) if isinstance(value, int) else repr(float(f"{value:.4g}")) if math.isfinite(value) else str(value)


def trial_name(values: Mapping[str, str], keys: Sequence[str]) -> str:
    """Return a readable name for a folder: "lr_1e-5_seed_1"; a long one ends in a digest instead.

    Args:
        keys: those of the whole sweep. The last parts of their names are enough if these differ.
    """
    lasts = [key.rpartition(".")[2] for key in keys]
    short = len(set(lasts)) == len(lasts)
    words = [f"{key.rpartition('.')[2] if short else key}_{value}" for key, value in values.items()]
    name = re.sub(r"[^\w.+-]+", "-", "_".join(words)).strip("-")
    plain = re.sub(r"[^\w.+-]+", "", "_".join(words))
    is_exact = plain == "_".join(words) and len(name) <= LONGEST_NAME
    return name if is_exact else f"{name[:LONGEST_NAME]}-{sha256('_'.join(words).encode()).hexdigest()[:6]}"

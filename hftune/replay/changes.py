"""What differs between two runs, as changes that can be made one by one: keys of their recipes, lines of their data files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hftune.data.files import FORMAT_OF, format_of
from hftune.errors import ConfigError, format_value
from hftune.replay.differences import ROUNDING, effects_of


class _Missing:
    def __str__(self) -> str:
        return "missing"


MISSING = _Missing()
"""In the place of the value of a key that a recipe does not have."""
LINE_FORMATS = ("json", "csv", "text")
"""Formats that have a row a line."""


@dataclass(frozen=True)
class KeyChange:
    """A key of the recipe that has another value in the bad run."""

    key: str
    good: Any
    bad: Any
    replaces: bool = False
    """Whether the good value, or a part of it, must not be inherited: the bad one is a mapping that lacks it, or is missing."""

    def __str__(self) -> str:
        return f"{self.key}={spell(self.bad)}"


def spell(value: Any) -> str:
    """Return a value as one would type it."""
    return str(value) if isinstance(value, (str, _Missing)) else format_value(value)


def override(changes: Iterable[KeyChange]) -> dict[str, Any]:
    """Return the values that make these changes to the good run's recipe."""
    changes = list(changes)
    replaced = [change.key for change in changes if change.replaces]
    values = {change.key: change.bad for change in changes if change.bad is not MISSING}
    return {"replace": replaced, **values} if replaced else values


def changed_keys(good: Mapping[str, Any], bad: Mapping[str, Any]) -> list[KeyChange]:
    """Return the keys that differ between two recipes and can change a loss, in the order of the good one.

    Args:
        good: a recipe as plain nested data, as ``Recipe.to_dict`` returns it.
    """
    if good.get("task", {}).get("type") != bad.get("task", {}).get("type"):  # their keys mean different things
        whole = KeyChange("task", good.get("task", MISSING), bad.get("task", MISSING), replaces=True)
        good, bad = ({key: value for key, value in recipe.items() if key != "task"} for recipe in (good, bad))
        return [whole, *_differing("", good, bad)]
    return [*_differing("", good, bad)]


def _differing(prefix: str, good: Mapping[str, Any], bad: Mapping[str, Any]) -> Iterator[KeyChange]:
    for name in dict.fromkeys([*good, *bad]):
        key, one, other = f"{prefix}{name}", good.get(name, MISSING), bad.get(name, MISSING)
        if one == other or effects_of(key) <= ROUNDING:
            continue
        are_mappings = isinstance(one, Mapping) and isinstance(other, Mapping)
        # Each key of a mapping is a change of its own if none goes, and all can be typed.
        if are_mappings and (not prefix or ({*one} <= {*other} and all(re.fullmatch(r"\w+", str(word)) for word in other))):
            yield from _differing(f"{key}.", one, other)
        else:
            yield KeyChange(key, one, other, replaces=other is MISSING or isinstance(one, Mapping))


@dataclass(frozen=True)
class LineChange:
    """A line of a data file that is different in the bad one."""

    number: int
    """Counted from 1, as editors do."""
    good: str = field(repr=False)
    bad: str = field(repr=False)

    def __str__(self) -> str:
        return str(self.number)


class DataFiles:
    """Two data files, of which a third one can be mixed: the good one with some of the bad one's lines.

    Args:
        good: with a row a line.
        bad: with as many lines.

    Raises:
        ConfigError: they cannot be mixed line by line.
    """

    def __init__(self, good: Path, bad: Path):
        self.suffix = good.suffix
        kind = format_of(good.name)
        for path in (good, bad):
            if format_of(path.name) != kind or kind not in LINE_FORMATS or path.suffix.lower() not in FORMAT_OF:
                raise ConfigError(
                    f"{good} and {bad}: a search over rows needs two files of one format: .jsonl, .csv, .tsv, .txt."
                )
        self._lines, bad_lines = (_lines(path, kind) for path in (good, bad))
        if (count := len(self._lines)) != (other := len(bad_lines)):
            raise ConfigError(
                f"{good} has {count:,} lines and {bad} has {other:,}. Then no step has the samples it had, so no line can be "
                "blamed."
            )
        pairs = enumerate(zip(self._lines, bad_lines, strict=True), start=1)
        self.changes = [LineChange(number, one, other) for number, (one, other) in pairs if one != other]
        if kind == "csv" and self.changes and self.changes[0].number == 1:
            raise ConfigError(f"{good} and {bad} have different columns: a search over rows needs the same header.")

    def write(self, changes: Sequence[LineChange], path: Path) -> None:
        """Write the good file with these lines of the bad one."""
        lines = [*self._lines]
        for change in changes:
            lines[change.number - 1] = change.bad
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="")


def _lines(path: Path, kind: str) -> list[str]:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from error
    lines = text.removesuffix("\n").split("\n")
    spread = next((n for n, line in enumerate(lines, 1) if kind == "csv" and line.count('"') % 2), None)
    if spread is not None or (kind == "json" and text.lstrip().startswith("[")):
        where = f"line {spread} has a cell of several lines" if spread else "it is one JSON list"
        raise ConfigError(f"{path} does not have a row a line: {where}. Write it as .jsonl, then search over its rows.")
    return lines

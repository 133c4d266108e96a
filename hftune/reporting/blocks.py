"""What pages are made of: sections of tables, texts and images as plain data, which templates turn into HTML. Knows no run."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from hftune.errors import is_number
from hftune.replay.run_record import plain

SHORT_TEXT = 40
"""Characters of a text that has room beside others on a phone."""
SIZES = ((1e12, "T", "trillion"), (1e9, "G", "billion"), (1e6, "M", "million"), (1e3, "k", ""))
Block = dict[str, Any]
"""A piece of a section: its ``kind`` is that of a macro in templates/blocks.html, which gets it."""


@dataclass(frozen=True)
class Cell:
    """A value of a table with a form of its own, see ``cell`` in templates/blocks.html. Others are shown by their type."""

    form: str
    text: str
    title: str = ""
    mark: str = ""


@dataclass
class Section:
    """A part of the page with a heading, which the list of sections leads to."""

    title: str
    blocks: Sequence[Block]
    note: str = ""
    class_: str = ""

    @property
    def anchor(self) -> str:
        return re.sub(r"\W+", "-", self.title.lower())


def section(title: str, *blocks: Block | None, note: str = "", class_: str = "") -> Section | None:
    """Return a section; None if it has no content."""
    found = [block for block in blocks if block]
    return Section(title, found, note, class_) if found else None


def text(value: str, class_: str = "") -> Block:
    return {"kind": "paragraph", "text": value, "class_": class_}


def table(
    head: Sequence[Any], rows: Sequence[Sequence[Any]], class_: str = "", title: str = "", fold: str = ""
) -> Block | None:
    """Return a table; None without rows. Numbers are right-aligned; of the class "rows", on a phone each row becomes a card.

    Args:
        title: a heading above it.
        fold: what unfolds it.
    """
    kinds = []
    for values in zip(*rows, strict=True):
        are_numbers = all(value is None or getattr(value, "form", "") == "figure" or is_number(value) for value in values)
        is_long = any(isinstance(value, str) and len(value) > SHORT_TEXT for value in values)
        kinds.append("number" if are_numbers else "long" if is_long else "")
    found = {"kind": "table", "head": head, "rows": rows, "kinds": kinds, "class_": class_, "title": title, "fold": fold}
    return found if rows else None


def facts(title: str, values: Mapping[str, Any]) -> Block | None:
    """Return names and values; those without a value are left out."""
    shown = {name: value for name, value in values.items() if value not in (None, "", [], {})}
    return {"kind": "facts", "values": shown, "title": title} if shown else None


def bullets(lines: Iterable[Any]) -> Block | None:
    lines = [line if isinstance(line, str) else plain(line) for line in lines]
    return {"kind": "bullets", "lines": lines} if lines else None


def code(value: Any) -> Cell | None:
    return Cell("code", str(value)) if value else None


def figure(value: str) -> Cell:
    """Return a text that belongs in a column of numbers, such as "35.6 %"."""
    return Cell("figure", value)


def number(value: float) -> str:
    """Format a number for reading, with four digits, since runs are compared: 0.8312, 0.7500, 31.50, 1,234, 2.40e-05."""
    size = abs(value)
    if size == 0 or (isinstance(value, int) and size < 10**15):
        return f"{value:,.0f}"
    if size >= 1e6 or size < 1e-3 or not math.isfinite(value):
        return f"{value:.2e}"
    return f"{value:,.0f}" if size >= 1000 else f"{value:#.4g}".rstrip(".")


def quantity(value: float | None, unit: str) -> Cell | None:
    """Format a number with its unit; "%" is of a share, and bytes are counted in GB and the like, as in the curves."""
    if value is None:
        return None
    if unit == "B":
        size, prefix, _ = next((known for known in SIZES if abs(value) >= known[0]), (1.0, "", ""))
        return figure(f"{value / size:.3g} {prefix}B")
    return figure(f"{100 * value:.3g} %" if unit == "%" else f"{number(value)} {unit}".rstrip())


def moment(value: Any) -> str | None:
    """Format a time as run.json has it: 2026-11-22 18:30 UTC; None if it is none."""
    try:
        then = datetime.fromisoformat(str(value))
    except ValueError:
        return None
    return f"{then:%Y-%m-%d %H:%M %Z}".rstrip()


def millions(count: float) -> str:
    """Format a great number for reading: 109.5 million."""
    size, _, name = next((known for known in SIZES if count >= known[0]), (1.0, "", ""))
    return f"{count / size:.4g} {name}" if name else f"{count:,.0f}"

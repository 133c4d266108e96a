"""JSON that every parser accepts, and files of one JSON object a line that grow with a run. Independent of metrics."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hftune.atomic import explain_write_errors, write_lines


def strict_json(value: Any, **settings: Any) -> str:
    """Format a value as JSON, with null for numbers that JSON does not have: infinity and NaN."""
    return json.dumps(finite(value), allow_nan=False, **settings)


def finite(value: Any) -> Any:
    """Return plain data with None instead of numbers that are not finite."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]], tick: Callable[[], None]) -> None:
    """Write one JSON object a sample, in dataset order; nothing if all rows are empty.

    Args:
        tick: called now and then, as a sign that the process is making progress.
    """
    if not any(rows):
        return

    def lines() -> Iterator[str]:
        for index, row in enumerate(rows):
            if index % 1000 == 0:
                tick()
            yield strict_json({"index": index, **row}, ensure_ascii=False) + "\n"

    with explain_write_errors(path):
        write_lines(path, lines())


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a file; empty if there is none, as a kill can leave only a part of it."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return what ``lines_of`` yields."""
    return [*lines_of(path)]


def lines_of(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file, if it exists, without lines that are none, as a kill or a power failure can leave them."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for text in file:
            try:
                line = json.loads(text)
            except (ValueError, RecursionError):  # of what is nested too deep
                continue
            if isinstance(line, dict):
                yield line

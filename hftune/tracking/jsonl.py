"""JSON as every reader takes it, and files of one JSON object a line that grow with a run. Knows no metric."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hftune.checkpoints.atomic_files import named_where_it_fails, write_lines, write_text


def strict_json(value: Any, **settings: Any) -> str:
    """Spell a value as JSON, with null for numbers that JSON does not have: infinite ones and NaN."""
    return json.dumps(finite(value), allow_nan=False, **settings)


def finite(value: Any) -> Any:
    """Return plain data with None in place of numbers that are not finite."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class LineFile:
    """Appends lines; each is handed to the system whole before ``append`` returns."""

    def __init__(self, path: Path, lines: Iterable[Mapping[str, Any]] = ()):
        """Replace what the file holds by ``lines``, and append from there on."""
        self.path = path
        with named_where_it_fails(path):
            write_text(path, "".join(map(_spell, lines)))
            self._file = path.open("a", encoding="utf-8", buffering=1)

    def append(self, line: Mapping[str, Any]) -> None:
        with named_where_it_fails(self.path):
            self._file.write(_spell(line))

    def close(self) -> None:
        self._file.close()


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

    with named_where_it_fails(path):
        write_lines(path, lines())


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a file, if it is there, up to the first that a kill or a loss of power left as no JSON."""
    lines: list[dict[str, Any]] = []
    if not path.is_file():
        return lines
    *texts, _ = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for text in texts:
        try:
            lines.append(json.loads(text))
        except ValueError:
            break
    return lines


def _spell(line: Mapping[str, Any]) -> str:
    return f"{strict_json(line)}\n"

"""Files of one JSON object a line that grow with a run, and go on where a checkpoint left them. Knows no metric."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hftune.disk import named_where_it_fails, write_text


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
    return json.dumps(line, allow_nan=False) + "\n"

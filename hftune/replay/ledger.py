"""Reads a run's ledger: which of its lines count, and whether its chain is whole. ``tracking/ledger.py`` writes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hftune.errors import ConfigError
from hftune.tracking.ledger import FORMAT, NAME, NOTHING, Line, hash_of, parse_line, whole_lines


@dataclass
class LedgerRecord:
    """A ledger as it was read. Steps that were taken again after a resume are superseded: only their last lines count."""

    lines: list[Line]
    """All that can be read, in order, superseded ones included."""
    starts: list[Line]
    """Where training started and resumed, in order."""
    taken: list[Line]
    """The lines of steps that count, in the order of the file: ascending, unless somebody has changed it."""
    steps: dict[int, Line]
    """The same by step; those that were left out have ``skipped``."""
    checkpoints: dict[int, Line]
    """By step: the hashes of the checkpoints that belong to the steps that count."""
    end: str
    """SHA-256 of the last line, which stands for all lines."""
    starts_of: dict[int, Line]
    """See ``start_of``."""
    found: list[str]
    """See ``problems``."""

    def start_of(self, step: int) -> Line:
        """Return the line of the start under which this step was computed as it counts.

        Raises:
            KeyError: there is no such step.
        """
        return self.starts_of[step]

    def problems(self) -> list[str]:
        """Return what shows that lines were changed, removed or added, as sentences. Empty if the chain is whole."""
        return self.found


def read_ledger(folder: str | Path) -> LedgerRecord:
    """Read the ledger in an output folder, also of a run that is still going on.

    Raises:
        ConfigError: there is none, it has no start, or a different version of hftune wrote it.
    """
    path = Path(folder).expanduser() / NAME
    if not path.is_file():
        raise ConfigError(f"{folder} holds no ledger.jsonl: name the output folder of a run.")
    texts = whole_lines(path)
    parsed = [parse_line(text) for text in texts]
    lines = [line for line in parsed if line is not None]
    starts = [line for line in lines if "after_step" in line]
    if not starts:
        raise ConfigError(f"{path} does not say how a training started: no run has written it.")
    if odd := {start.get("format") for start in starts} - {FORMAT}:
        raise ConfigError(f"{path} has format {odd.pop()}, and this hftune reads format {FORMAT}: a different one wrote it.")
    taken, checkpoints, exchanged = _counting(lines)
    return LedgerRecord(
        lines=lines,
        starts=starts,
        taken=[line for line, _ in taken],
        steps={line["step"]: line for line, _ in taken},
        checkpoints=checkpoints,
        end=hash_of(texts[-1]),
        starts_of={line["step"]: start for line, start in taken},
        found=[*_breaks(texts, parsed), *exchanged],
    )


def _counting(lines: Sequence[Line]) -> tuple[list[tuple[Line, Line]], dict[int, Line], list[str]]:
    """Return the lines of steps that count, each with its start; the checkpoints that belong to them, by step; and problems."""
    start: Line = {}
    taken: list[tuple[Line, Line]] = []
    checkpoints: dict[int, Line] = {}
    problems = []
    for line in lines:
        if "after_step" in line:
            start, after = line, line["after_step"]
            taken = [pair for pair in taken if pair[0]["step"] <= after]
            checkpoints = {step: hashes for step, hashes in checkpoints.items() if step <= after}
            if hashes := start.get("checkpoint"):
                written = checkpoints.setdefault(after, hashes)  # its own line is missing if a kill came before it
                if any(written[group] != hashes[group] for group in hashes.keys() & written.keys() - {"step"}):
                    problems.append(f"Training resumed after step {after} from another checkpoint than was written there.")
        elif "step" in line:
            taken.append((line, start))
        else:
            checkpoints[line["checkpoint"]] = line
    return taken, checkpoints, problems


def _breaks(texts: Sequence[bytes], lines: Sequence[Mapping[str, Any] | None]) -> Iterator[str]:
    """Yield a sentence for each line that cannot be read, or does not hold the hash of the one before it."""
    before, places = NOTHING, {}
    for number, (text, line) in enumerate(zip(texts, lines, strict=True), start=1):
        if line is None:
            yield f"Line {number} cannot be read."
        elif (prev := line.get("prev")) != before:
            if number == 1:
                yield "Line 1 is not the first: lines before it were removed."
            elif prev in places:
                yield f"Line {number} does not follow line {number - 1}: it was written after line {places[prev]}."
            else:
                yield f"Line {number} does not follow: line {number - 1} was changed, or a line between them was removed."
        before = hash_of(text)
        places[before] = number

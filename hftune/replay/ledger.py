"""Reads a run's ledger: which of its lines count, and whether its chain is whole. ``tracking/ledger.py`` writes it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from hftune.errors import ConfigError
from hftune.tracking.ledger import FORMAT, NAME, NOTHING, Line, hash_of, parse_line, whole_lines


@dataclass
class LedgerRecord:
    """A ledger as it was read. Steps that were taken again after a resume are superseded: only their last lines count."""

    lines: list[Line] = field(default_factory=list)
    """All that can be read, in order, superseded ones included."""
    starts: list[Line] = field(default_factory=list)
    """Where training started and resumed, in order."""
    taken: list[Line] = field(default_factory=list)
    """The lines of steps that count, in the order of the file: ascending, unless somebody has changed it."""
    steps: dict[int, Line] = field(default_factory=dict)
    """The same by step; skipped ones have ``skipped``."""
    starts_of: dict[int, Line] = field(default_factory=dict)
    """The start under which each step was computed as it counts."""
    checkpoints: dict[int, Line] = field(default_factory=dict)
    """By step: the hashes of the checkpoints that belong to the steps that count."""
    end: str = NOTHING
    """SHA-256 of the last line, which stands for all lines."""
    problems: list[str] = field(default_factory=list)
    """What shows that lines were changed, removed or added, as sentences. Empty if the chain is whole."""

    @property
    def last(self) -> int:
        return max(self.steps, default=0)


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
    record = LedgerRecord([line for line in parsed if line is not None], end=hash_of(texts[-1]) if texts else NOTHING)
    record.starts = [line for line in record.lines if "after_step" in line]
    if not record.starts:
        raise ConfigError(f"{path} does not say how a training started: no run has written it.")
    if others := {start.get("format") for start in record.starts} - {FORMAT}:
        raise ConfigError(f"{path} has format {others.pop()}, and this hftune reads format {FORMAT}: a different one wrote it.")
    record.problems = [*_broken_links(texts, parsed)]
    start: Line = {}
    counting: list[tuple[Line, Line]] = []
    for line in record.lines:
        if "after_step" in line:
            start, after = line, line["after_step"]
            counting = [pair for pair in counting if pair[0]["step"] <= after]
            record.checkpoints = {step: hashes for step, hashes in record.checkpoints.items() if step <= after}
            if hashes := start.get("checkpoint"):
                written = record.checkpoints.setdefault(after, hashes)  # its own line is missing if a kill came before it
                if any(written[group] != hashes[group] for group in hashes.keys() & written.keys() - {"step"}):
                    told = f"Training resumed after step {after} from another checkpoint than was written there."
                    record.problems.append(told)
        elif "step" in line:
            counting.append((line, start))
        else:
            record.checkpoints[line["checkpoint"]] = line
    record.taken = [line for line, _ in counting]
    record.steps = {line["step"]: line for line, _ in counting}
    record.starts_of = {line["step"]: start for line, start in counting}
    return record


def _broken_links(texts: Sequence[bytes], lines: Sequence[Mapping[str, Any] | None]) -> Iterator[str]:
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


class Stretch(NamedTuple):
    """Successive steps of two runs, each of which computed them under one start."""

    steps: Sequence[int]
    starts: tuple[Line, Line]


def stretches(a: LedgerRecord, b: LedgerRecord) -> Iterator[Stretch]:
    """Cut the steps that both runs have at the resumes of either, ascending."""
    common = sorted(a.steps.keys() & b.steps.keys())
    resumes = {start["after_step"] for run in (a, b) for start in run.starts}
    cuts = sorted({bisect_right(common, step) for step in resumes} - {0, len(common)})
    for begin, end in pairwise([0, *cuts, len(common)]):
        if begin < end:
            yield Stretch(common[begin:end], (a.starts_of[common[begin]], b.starts_of[common[begin]]))

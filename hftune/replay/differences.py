"""What two runs were computed from: ``diff`` lists each difference, what it can change, and from which step on.

Knows nothing of whether a difference explains anything. Shape suffix: N rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from hftune.batch_plan import BatchPlan
from hftune.config import reference
from hftune.config.keys import Effect, effects
from hftune.replay.ledger import LedgerRecord, stretches
from hftune.replay.run_record import cut, flat, plain

NOTHING: frozenset[Effect] = frozenset()
RATE, UPDATE, ROUNDING = frozenset({Effect.LR}), frozenset({Effect.UPDATE}), frozenset({Effect.ROUNDING})
CONTENT = frozenset({Effect.ITEMS, Effect.FORWARD, Effect.BACKWARD})
MODEL, DATA = effects("model"), effects("data")
ANYTHING = frozenset(Effect) - {Effect.OUTPUT}
UNKNOWN = ANYTHING - RATE
"""Of a key whose effects nobody has listed: a task's fields cannot touch the schedule."""
KINDS = ("recipe", "data", "code", "versions", "hardware", "processes")
"""The kinds of differences, in the order in which they are worth a look."""
MAX_NAMED = 5
"""How many rows, files or packages are named; the others are counted."""
MAX_VALUE_LENGTH = 60
PARTS = (
    ("code", "code", ANYTHING),
    ("versions", "packages", ANYTHING),
    ("versions", "commits", MODEL | DATA),
    ("versions", "base", MODEL),
    ("hardware", "hardware", ROUNDING),
)
"""Kind, name in the start line, and effects of what may differ beside recipe and data."""
DOES_NOT_TRAIN = tuple(
    f"hftune/{name}" for name in ("cli", "commands/", "doctor", "launchers/", "planning/", "replay/", "reporting/")
)
"""Code that starts runs or looks at them, and computes no step."""
OWN_KEYS = ("recipe", "output_dir", "resume")
"""Keys of which each run has its own value, as it has of those of ``track``."""
RESOLVED_KEYS = {
    "micro_batch_size": "train.micro_batch_size",
    "micro_batch_tokens": "train.micro_batch_tokens",
    "packed": "train.packing",
    "precision": "train.mixed_precision",
}
"""Values of a start line that training found for keys that left them open."""

Rows = tuple[np.ndarray, np.ndarray]
"""Hashes of the training rows of two runs, (N, 16) uint8 each."""


@dataclass(frozen=True)
class Difference:
    """Something that two runs were computed from, and that is not the same."""

    kind: str
    """One of KINDS."""
    name: str
    """The key of the recipe; of other kinds what it is, such as "hardware"."""
    text: str
    """Names it, with both values."""
    effects: frozenset[Effect]
    from_step: int = 1
    """The first step that it can change."""
    shows_at_once: bool = False
    """Whether it shows in ``from_step`` or not at all: an epoch uses a row in one step, and in no other."""
    values: tuple[Any, Any] | None = None
    """Of a key."""
    verdict: str = ""
    """Whether it explains where the runs diverge, see ``divergence.VERDICTS``; empty before that is judged."""
    reason: str = ""
    """Why it has no sign."""

    @property
    def is_likely(self) -> bool:
        return self.verdict == "likely"


def effects_of(key: str) -> frozenset[Effect]:
    """Return what a recipe key can change in the steps of a training."""
    return reference.effects_of(key) - {Effect.OUTPUT}


def diff(a: LedgerRecord, b: LedgerRecord, rows: Rows | None = None) -> list[Difference]:
    """Return the differences of two runs in the order of KINDS; one that begins with a resume counts from the step after it.

    Args:
        rows: the training rows, if they are known. Otherwise only their digests are compared.
    """
    found: dict[tuple[str, str], Difference] = {}
    pieces = [*stretches(a, b)]
    for steps, starts in pieces:
        for difference in differences_between(*starts, steps[0], has_rows=rows is not None):
            found.setdefault((difference.kind, difference.name), difference)
    if rows is not None and pieces:
        plan = pieces[0].starts[0].get("plan", {})
        if (difference := row_difference(*rows, plan, pieces[0].steps[0], pieces[-1].steps[-1])) is not None:
            found["data", "rows"] = difference
    return sorted(found.values(), key=lambda difference: KINDS.index(difference.kind))


def differences_between(a: Mapping[str, Any], b: Mapping[str, Any], step: int, has_rows: bool = False) -> Iterator[Difference]:
    """Yield the differences of two start lines that are in force from a step on.

    Args:
        has_rows: whether the training rows are compared one by one, elsewhere.
    """
    yield from _recipe_differences(a, b, step, has_rows)
    splits = [start.get("data", {}) for start in (a, b)]
    for split in dict.fromkeys([*splits[0], *splits[1]]):
        about = [one.get(split, {}) for one in splits]
        counts = [one.get("rows") for one in about]
        is_same = all(about[0].get(name) == about[1].get(name) for name in ("rows", "root", "digest"))
        if is_same or (split == "train" and has_rows):
            continue
        text = f"{split}: other rows" if counts[0] == counts[1] else f"{split}: {counts[0]} | {counts[1]} rows"
        yield Difference("data", split, text, DATA if split == "train" else NOTHING, step)
    for kind, name, changes in PARTS:
        sides = [start.get(name) for start in (a, b)]
        parts = dict(_unequal(*(flat(side) if isinstance(side, Mapping) else {name: side} for side in sides)))
        idle = {file: parts.pop(file) for file in [*parts] if kind == "code" and file.startswith(DOES_NOT_TRAIN)}
        if parts:
            yield Difference(kind, name, _listed(parts, has_values=kind != "code"), changes, step)
        if idle:
            text = f"{_listed(idle, has_values=False)} (which do{'es' if len(idle) == 1 else ''} not train)"
            yield Difference(kind, "code that does not train", text, NOTHING, step)
    of_processes = {"processes": "world_size", "strategy": "strategy"}
    parts = dict(_unequal(*({name: start.get(key) for name, key in of_processes.items()} for start in (a, b))))
    if parts:
        yield Difference("processes", "processes", _listed(parts), ROUNDING, step)


def _recipe_differences(a: Mapping[str, Any], b: Mapping[str, Any], step: int, has_rows: bool) -> Iterator[Difference]:
    changed = dict(_unequal(*(flat(start.get("recipe")) for start in (a, b))))
    for name, key in RESOLVED_KEYS.items():
        if a.get(name) != b.get(name):
            changed.setdefault(key, (a.get(name), b.get(name)))
    for key, values in changed.items():
        if key in OWN_KEYS or key.startswith("track."):
            continue
        changes, remark = effects_of(key), ""
        if changes == DATA and has_rows:
            changes, remark = NOTHING, " (the rows themselves are compared)"
        yield Difference("recipe", key, f"{key}: {_both(values)}{remark}", changes, step, values=values)


def row_difference(a: np.ndarray, b: np.ndarray, plan: Mapping[str, Any], first_step: int, last_step: int) -> Difference | None:
    """Compare training rows by their hashes, (N, 16) uint8; None if they are the same.

    Args:
        plan: of the start line, by which the step is found that uses a changed row first.
        first_step, last_step: the steps that both runs have.
    """
    a_N, b_N = (np.ascontiguousarray(rows).view("S16").ravel() for rows in (a, b))
    if len(a_N) != len(b_N):
        texts = [f"train: {len(a_N):,} | {len(b_N):,} rows"]
        for name, own, other in (("A", a_N, b_N), ("B", b_N, a_N)):
            if len(found := np.flatnonzero(~np.isin(own, other))):
                texts.append(f"{len(found):,} only in {name} ({_numbers(found)})")
        return Difference("data", "rows", ", ".join(texts), DATA, first_step)
    changed = np.flatnonzero(a_N != b_N)
    if not len(changed):
        return None
    if np.array_equal(np.sort(a_N), np.sort(b_N)):
        text = f"train: the same rows in another order, from row {changed[0]:,} on"
        return Difference("data", "rows", text, DATA, first_step)
    is_one = len(changed) == 1
    text = f"train: {'row' if is_one else f'{len(changed):,} rows:'} {_numbers(changed)} differ{'s' if is_one else ''}"
    step = first_use(changed, plan, last_step)
    if step is None:
        return Difference("data", "rows", f"{text}; not used in these steps", NOTHING, first_step)
    text = f"{text}; {'it is' if is_one else 'the first of them is'} first used in step {step:,}"
    return Difference("data", "rows", text, DATA, step, shows_at_once=True)


def first_use(rows: np.ndarray, plan: Mapping[str, Any], last_step: int) -> int | None:
    """Return the first step that uses one of these rows, up to ``last_step``; None if there is none."""
    batches = BatchPlan(**plan)
    for epoch in range(-(-last_step // batches.num_steps)):
        places = np.flatnonzero(np.isin(batches.epoch(epoch).order_N, rows))
        if len(places):
            step = epoch * batches.num_steps + int(places[0]) // batches.batch_size + 1
            return step if step <= last_step else None
    return None


def changes_on_resume(record: LedgerRecord) -> list[tuple[int, list[Difference]]]:
    """Return what a run changed when it was resumed: the first step that has the change, and each difference."""
    pieces = [*stretches(record, record)]
    found = []
    for before, now in pairwise(pieces):
        if changes := [*differences_between(before.starts[0], now.starts[0], now.steps[0])]:
            found.append((now.steps[0], changes))
    return found


def _numbers(rows: np.ndarray) -> str:
    """Name the first few of some rows."""
    named = ", ".join(f"{row:,}" for row in rows[:MAX_NAMED].tolist())
    return named if len(rows) <= MAX_NAMED else f"{named}, ..."


def _unequal(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[tuple[str, tuple[Any, Any]]]:
    for key in dict.fromkeys([*a, *b]):
        if a.get(key) != b.get(key):
            yield key, (a.get(key), b.get(key))


def _listed(parts: Mapping[str, tuple[Any, Any]], has_values: bool = True) -> str:
    """Name what differs, with both values or without."""
    named = [f"{name} {_both(values)}" if has_values else name for name, values in parts.items()]
    more = f" and {len(named) - MAX_NAMED} more" if len(named) > MAX_NAMED else ""
    return ", ".join(named[:MAX_NAMED]) + more


def _both(values: tuple[Any, Any]) -> str:
    """Format two values; of paths in one folder, only what differs."""
    texts = ["none" if value is None else plain(value) or "empty" for value in values]
    if all(isinstance(value, str) for value in values):
        parts = [text.split("/") for text in texts]
        shared = next((index for index, (a, b) in enumerate(zip(*parts, strict=False)) if a != b), 0)
        texts = ["/".join(words[shared:]) for words in parts]
    return " | ".join(cut(text, MAX_VALUE_LENGTH) for text in texts)

"""What two runs were computed from: ``diff`` lists each difference, what it can change, and from which step on.

Knows nothing of whether a difference explains anything. Shape suffix: N rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hftune.batch_plan import BatchPlan
from hftune.config import reference
from hftune.config.keys import Effect, effects
from hftune.errors import cut, first_few
from hftune.replay.ledger import LedgerRecord, stretches
from hftune.replay.run_record import flat, plain

NOTHING: frozenset[Effect] = frozenset()
RATE, UPDATE, ROUNDING = frozenset({Effect.LR}), frozenset({Effect.UPDATE}), frozenset({Effect.ROUNDING})
CONTENT = frozenset({Effect.ITEMS, Effect.FORWARD, Effect.BACKWARD})
MODEL, DATA = effects("model"), effects("data")
ANYTHING = frozenset(Effect) - {Effect.OUTPUT}
UNKNOWN = ANYTHING - RATE
"""Of a key whose effects nobody has listed: a task's fields cannot touch the schedule."""
KINDS = ("recipe", "data", "code", "versions", "hardware", "processes")
"""The kinds of differences, in the order in which they are worth a look."""
MAX_VALUE_LENGTH = 60
PARTS = (
    ("code", "code", ANYTHING),
    ("versions", "packages", ANYTHING),
    ("versions", "commits", MODEL | DATA),
    ("versions", "base", MODEL),
    ("versions", "teacher", effects("forward backward")),
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
    effects: frozenset[Effect]
    from_step: int = 1
    """The first step that it can change."""
    shows_at_once: bool = False
    """Whether it shows in ``from_step`` or not at all: an epoch uses a row in one step, and in no other."""
    values: tuple[Any, Any] | None = None
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
    changed = _unequal(flat(a.get("recipe")), flat(b.get("recipe")))
    for name, key in RESOLVED_KEYS.items():
        if a.get(name) != b.get(name):
            changed.setdefault(key, (a.get(name), b.get(name)))
    for key, values in changed.items():
        if key not in OWN_KEYS and not key.startswith("track."):
            changes, remark = effects_of(key), ""
            if changes == DATA and has_rows:
                changes, remark = NOTHING, " (the rows themselves are compared)"
            yield Difference("recipe", key, f"{key}: {_both(values)}{remark}", changes, step, values=values)
    for split, (one, other) in _unequal(a.get("data", {}), b.get("data", {})).items():
        one, other = ({name: (side or {}).get(name) for name in ("rows", "root", "digest")} for side in (one, other))
        if one == other or (split == "train" and has_rows):
            continue
        rows = "other rows" if one["rows"] == other["rows"] else f"{one['rows']} | {other['rows']} rows"
        yield Difference("data", split, f"{split}: {rows}", DATA if split == "train" else NOTHING, step)
    for kind, name, changes in PARTS:
        parts = _unequal(*(flat(side) if isinstance(side := start.get(name), Mapping) else {name: side} for start in (a, b)))
        idle = {file: parts.pop(file) for file in [*parts] if kind == "code" and file.startswith(DOES_NOT_TRAIN)}
        if parts:
            named = parts if kind == "code" else [f"{part} {_both(values)}" for part, values in parts.items()]
            yield Difference(kind, name, first_few(named), changes, step)
        if idle:
            text = f"{first_few(idle)} (which do{'es' if len(idle) == 1 else ''} not train)"
            yield Difference(kind, "code that does not train", text, NOTHING, step)
    parts = _unequal(*({"processes": start.get("world_size"), "strategy": start.get("strategy")} for start in (a, b)))
    if parts:
        text = ", ".join(f"{name} {_both(values)}" for name, values in parts.items())
        yield Difference("processes", "processes", text, ROUNDING, step)


def row_difference(
    a: np.ndarray,
    b: np.ndarray,
    plan: Mapping[str, Any],
    first_step: int,
    last_step: int,
    sides: tuple[str, str] = ("in A", "in B"),
) -> Difference | None:
    """Compare training rows by their hashes, (N, 16) uint8; None if they are the same.

    Args:
        plan: of the start line, by which the step is found that uses a changed row first.
        first_step, last_step: the steps that both runs have.
        sides: where the rows are, in words.
    """
    a_N, b_N = (np.ascontiguousarray(rows).view("S16").ravel() for rows in (a, b))
    if len(a_N) != len(b_N):
        texts = [f"train: {len(a_N):,} | {len(b_N):,} rows"]
        for side, own, other in zip(sides, (a_N, b_N), (b_N, a_N), strict=True):
            if len(found := np.flatnonzero(~np.isin(own, other))):
                texts.append(f"{len(found):,} only {side} ({_numbers(found)})")
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


def count(number: int, noun: str) -> str:
    """Format a number of things: "1 step", "1,200 steps"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _numbers(rows: np.ndarray) -> str:
    return first_few(f"{row:,}" for row in rows.tolist())


def _unequal(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {key: (a.get(key), b.get(key)) for key in dict.fromkeys([*a, *b]) if a.get(key) != b.get(key)}


def _both(values: tuple[Any, Any]) -> str:
    """Format two values; of paths in one folder, only what differs."""
    texts = ["none" if value is None else plain(value) or "empty" for value in values]
    if all(isinstance(value, str) for value in values):
        parts = [text.split("/") for text in texts]
        shared = next((index for index, (a, b) in enumerate(zip(*parts, strict=False)) if a != b), 0)
        texts = ["/".join(words[shared:]) for words in parts]
    return " | ".join(cut(text, MAX_VALUE_LENGTH) for text in texts)

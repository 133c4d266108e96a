"""What two runs were computed from: each difference, what it can change, and from which step on.

Independent of whether the runs part. Shape suffix: N rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Any

import numpy as np

from hftune.batch_plan import BatchPlan
from hftune.replay.run_record import cut, flat, mapping, plain
from hftune.replay.traces import Segment, are_unequal, is_whole

KINDS = ("recipe", "data", "code", "versions", "hardware", "processes")
"""Of differences, in the order in which they are worth a look."""
MOST_NAMED = 5
"""Rows, files or packages that are named; of more, their number."""
LONGEST_VALUE = 60
"""Characters of a value that are shown."""


class Effect(StrEnum):
    """What a difference changes first."""

    WEIGHTS = "the first weights"
    SAMPLES = "the samples of a step"
    SKIPPED = "a step that is left out"
    ITEMS = "the number of items"
    LR = "the learning rate"
    FORWARD = "the loss of equal weights"
    BACKWARD = "the gradient of an equal loss"
    UPDATE = "the update"
    ROUNDING = "rounding"


NOTHING: frozenset[Effect] = frozenset()
RATE, UPDATE, ROUNDING = frozenset({Effect.LR}), frozenset({Effect.UPDATE}), frozenset({Effect.ROUNDING})
CONTENT = frozenset({Effect.ITEMS, Effect.FORWARD, Effect.BACKWARD})
MODEL = CONTENT | {Effect.WEIGHTS}
DATA = CONTENT | {Effect.SAMPLES, Effect.UPDATE}
ANYTHING = frozenset(Effect)
UNKNOWN = ANYTHING - RATE
"""Of a key whose effects nobody has listed: a task's fields cannot touch the schedule."""
KEYS: Mapping[frozenset[Effect], str] = {
    NOTHING: (
        "recipe output_dir resume track eval checkpoint adapter.export task.eval_split task.test_split task.max_eval_samples "
        "task.max_test_samples task.data_files.eval task.data_files.test task.generation task.scores task.sample_fields "
        "train.num_workers train.log_every train.profile train.dead_after_s train.stall_after_s train.ema_decay"
    ),
    frozenset({Effect.WEIGHTS, Effect.SAMPLES, Effect.FORWARD}): "seed",
    frozenset({Effect.SAMPLES, Effect.LR}): "train.batch_size",
    frozenset({Effect.SKIPPED}): "train.skip",
    RATE: (
        "train.lr train.epochs train.max_steps train.schedule train.min_lr train.warmup_ratio train.decay_ratio train.cycles "
        "train.power train.gamma train.step_size"
    ),
    UPDATE: (
        "train.optimizer train.optimizer_args train.betas train.eps train.momentum train.weight_decay train.clip_norm "
        "train.groups train.layer_decay"
    ),
    UPDATE | {Effect.BACKWARD}: "train.freeze",
    frozenset({Effect.FORWARD, Effect.BACKWARD}): "task.label_smoothing task.focal_gamma",
    frozenset({Effect.FORWARD, Effect.BACKWARD, Effect.ROUNDING}): (
        "train.micro_batch_size train.micro_batch_tokens train.packing train.parts train.head_loss train.mixed_precision "
        "train.fsdp_gather train.tf32 train.batch_norm train.compile train.deterministic "
        "train.gradient_checkpointing"
    ),
    MODEL | UPDATE: "adapter",
    MODEL: (
        "task.type task.weights task.model task.model_revision task.model_config task.network task.network_args task.tokenizer"
    ),
    DATA: (
        "task.data_files task.data_dir task.dataset task.dataset_config task.dataset_revision task.datasets task.train_split "
        "task.max_train_samples task.eval_share task.eval_fold"
    ),
    ROUNDING: "parallel train.cudnn_benchmark",
}
"""What recipe keys can change, they and the keys below them; see UNKNOWN for any other."""
EFFECTS = {key: effects for effects, keys in KEYS.items() for key in keys.split()}
PARTS = (
    ("code", "code", ANYTHING),
    ("versions", "packages", ANYTHING),
    ("versions", "commits", MODEL | DATA),
    ("versions", "base", MODEL),
    ("hardware", "hardware", ROUNDING),
)
"""Kind, name in the start line, and effects of what may differ beside recipe and data."""
ONLOOKERS = tuple(
    f"hftune/{name}" for name in ("cli", "commands/", "doctor", "launchers/", "planning/", "replay/", "reporting/")
)
"""Code that looks at runs, or starts them, and does not compute them."""
OWN = ("recipe", "output_dir", "resume")
"""Keys that each run has its own of."""
SETTLED = {
    "micro_batch_size": "train.micro_batch_size",
    "micro_batch_tokens": "train.micro_batch_tokens",
    "packed": "train.packing",
    "precision": "train.mixed_precision",
}
"""What a start line says beside the recipe, by the key that it settles."""


@dataclass(frozen=True)
class Difference:
    """Something that two runs were computed from, and that is not the same."""

    kind: str
    """One of KINDS."""
    text: str
    """Names it, with both values."""
    effects: frozenset[Effect]
    from_step: int = 1
    """The first step that it can change."""
    is_exact: bool = False
    """Whether it must show in ``from_step`` itself, if it shows at all: a row is used in one step of an epoch, and no other."""
    key: str | None = None
    """Of a recipe."""
    values: tuple[Any, Any] | None = None

    @property
    def is_specific(self) -> bool:
        """Whether its effects are known; code and libraries may do anything."""
        return not self.effects >= UNKNOWN


@dataclass(frozen=True)
class RowChange:
    """How the training rows of two runs differ."""

    text: str
    changed: np.ndarray | None
    """Numbers of the rows that have other contents; None if the rows do not correspond to each other."""


def effects_of(key: str) -> frozenset[Effect]:
    """Return what a recipe key can change."""
    if "dropout" in key.rpartition(".")[2] or "drop_path" in key:
        return frozenset({Effect.FORWARD, Effect.BACKWARD})
    parts = key.split(".")
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((EFFECTS[prefix] for prefix in prefixes if prefix in EFFECTS), UNKNOWN)


def find_differences(
    runs: Sequence[Segment], rows: tuple[np.ndarray | None, np.ndarray | None] = (None, None)
) -> tuple[list[Difference], dict[str, bool]]:
    """Return the differences of two runs in the order of KINDS; and of each kind that is known, whether all is the same.

    Args:
        runs: their common steps. A difference that begins later, after a resume, begins with the segment that it is in.
        rows: hashes of the training rows, if they are known.
    """
    change = row_change(*rows) if rows[0] is not None and rows[1] is not None else None
    knows_rows = rows[0] is not None and rows[1] is not None
    found: dict[tuple[str, str], Difference] = {}
    known: set[str] = {"data"} if knows_rows else set()
    for segment in runs:
        for name, difference in _differences_of(segment, knows_rows):
            found.setdefault((difference.kind, name), difference)
        known |= _known_kinds(segment)
    if change is not None and runs:
        found["data", "rows"] = _difference_of_rows(change, runs)
    listed = sorted(found.values(), key=lambda difference: KINDS.index(difference.kind))
    kinds = {difference.kind for difference in listed}
    return listed, {kind: kind not in kinds for kind in KINDS if kind in known | kinds}


def _differences_of(segment: Segment, knows_rows: bool) -> Iterator[tuple[str, Difference]]:
    """Yield the differences in force in one segment, each with a name that is unique for its kind."""
    first, (start_a, start_b) = segment.steps[0], segment.starts
    recipes = [flat(start.get("recipe") or {}) for start in segment.starts]
    changed = dict(_unequal(*recipes)) if all(recipes) else {}
    for name, key in SETTLED.items():
        if key not in changed and start_a.get(name) != start_b.get(name) and name in start_a and name in start_b:
            changed[key] = start_a[name], start_b[name]
    for key, values in changed.items():
        effects, remark = effects_of(key), ""
        if effects == DATA and knows_rows:
            effects, remark = NOTHING, " (the rows themselves are compared)"
        elif key in OWN or key.startswith("track."):
            continue  # two runs never share them, and nothing depends on them
        text = f"{key}: {_both(values)}{remark}"
        yield key, Difference("recipe", text, effects, first, key=key, values=values)
    yield from _data_differences(segment, knows_rows)
    for kind, name, effects in PARTS:
        if any(name not in start for start in segment.starts):
            continue
        sides = [flat(mapping(start[name])) for start in segment.starts]
        parts = dict(_unequal(*sides))
        if not all(map(is_whole, segment.starts)):
            parts = {part: both for part, both in parts.items() if all(part in side for side in sides)}
        onlookers = {file: parts.pop(file) for file in [*parts] if kind == "code" and file.startswith(ONLOOKERS)}
        if parts:
            yield name, Difference(kind, _listed(parts, with_values=kind != "code"), effects, first)
        if onlookers:
            text = f"{_listed(onlookers, with_values=False)} (which do{'es' if len(onlookers) == 1 else ''} not train)"
            yield "onlookers", Difference(kind, text, NOTHING, first)
    parts = {
        name.replace("world_size", "processes"): (start_a[name], start_b[name])
        for name in ("world_size", "strategy")
        if name in start_a and name in start_b and start_a[name] != start_b[name]
    }
    if parts:
        yield "processes", Difference("processes", _listed(parts), ROUNDING, first)


def _data_differences(segment: Segment, knows_rows: bool) -> Iterator[tuple[str, Difference]]:
    """Yield the splits whose digests differ; of training rows that are compared one by one, none."""
    splits = [mapping(start.get("data")) for start in segment.starts]
    for split in dict.fromkeys(name for one in splits for name in one):
        about = [mapping(one.get(split)) for one in splits]
        if not all(about) or (split == "train" and knows_rows):
            continue
        counts = [one.get("rows") for one in about]
        has_other_count = None not in counts and counts[0] != counts[1]
        if has_other_count or any(are_unequal(*(one.get(name) for one in about)) for name in ("root", "digest")):
            text = f"{split}: {counts[0]:,} | {counts[1]:,} rows" if has_other_count else f"{split}: other rows"
            yield split, Difference("data", text, DATA if split == "train" else NOTHING, segment.steps[0])


def _difference_of_rows(change: RowChange, runs: Sequence[Segment]) -> Difference:
    """Return the difference of the training rows, with the step that uses the first of them."""
    if change.changed is None:
        return Difference("data", change.text, DATA, runs[0].steps[0])
    step = first_use(change.changed, mapping(runs[0].starts[0].get("plan")), runs[-1].steps[-1])
    if step is None:
        return Difference("data", f"{change.text}; not used in these steps", NOTHING, runs[0].steps[0])
    named = "it is" if len(change.changed) == 1 else "the first of them is"
    return Difference("data", f"{change.text}; {named} first used in step {step:,}", DATA, step, is_exact=True)


def row_change(rows_a: np.ndarray, rows_b: np.ndarray) -> RowChange | None:
    """Compare training rows by their hashes, (N, 16) uint8 each; None if they are the same."""
    a_N, b_N = (np.ascontiguousarray(rows).view("S16").ravel() for rows in (rows_a, rows_b))
    if len(a_N) == len(b_N):
        changed = np.flatnonzero(a_N != b_N)
        if not len(changed):
            return None
        if np.array_equal(np.sort(a_N), np.sort(b_N)):
            return RowChange(f"train: the same rows in another order, from row {changed[0]:,} on", None)
        noun = "row" if len(changed) == 1 else f"{len(changed):,} rows:"
        return RowChange(f"train: {noun} {numbers(changed)} {'differs' if len(changed) == 1 else 'differ'}", changed)
    only = [(name, np.flatnonzero(~np.isin(own, other))) for name, own, other in (("A", a_N, b_N), ("B", b_N, a_N))]
    parts = [f"{len(found):,} only in {name} ({numbers(found)})" for name, found in only if len(found)]
    return RowChange(", ".join([f"train: {len(a_N):,} | {len(b_N):,} rows", *parts]), None)


def first_use(rows: np.ndarray, plan: Mapping[str, Any], last_step: int) -> int | None:
    """Return the first step that uses one of these rows, up to ``last_step``; None if there is none."""
    try:
        batches = BatchPlan(**plan)
    except (TypeError, ValueError):  # there is none, or it is damaged
        return None
    for epoch in range(-(-last_step // batches.num_steps)):
        places = np.flatnonzero(np.isin(batches.epoch(epoch).order_N, rows))
        if len(places):
            step = epoch * batches.num_steps + int(places[0]) // batches.batch_size + 1
            return step if step <= last_step else None
    return None


def changes_on_the_way(starts: Sequence[tuple[int, Mapping[str, Any]]]) -> list[tuple[int, list[Difference]]]:
    """Return what a run changed when it was resumed: the first step it is in force, and each difference.

    Args:
        starts: the start lines that its steps were computed under, each with the first of these steps.
    """
    found = []
    for (_, before), (step, after) in pairwise(starts):
        if changed := [difference for _, difference in _differences_of(Segment([step], (before, after)), knows_rows=False)]:
            found.append((step, changed))
    return found


def numbers(rows: np.ndarray) -> str:
    """Name the first of some rows."""
    named = ", ".join(f"{row:,}" for row in rows[:MOST_NAMED].tolist())
    return named if len(rows) <= MOST_NAMED else f"{named}, ..."


def _known_kinds(segment: Segment) -> set[str]:
    """Return the kinds that both start lines say enough about to call them the same."""
    names = dict(zip(KINDS, ("recipe", "data", "code", "packages", "hardware", "world_size"), strict=True))
    if not all(map(is_whole, segment.starts)):
        names = {kind: name for kind, name in names.items() if kind not in ("data", "code", "hardware")}
    return {kind for kind, name in names.items() if all(start.get(name) for start in segment.starts)}


def _unequal(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[tuple[str, tuple[Any, Any]]]:
    for key in dict.fromkeys([*a, *b]):
        if a.get(key) != b.get(key):
            yield key, (a.get(key), b.get(key))


def _listed(parts: Mapping[str, tuple[Any, Any]], with_values: bool = True) -> str:
    """Name what differs, with both values or without."""
    shown = [f"{name} {_both(values)}" if with_values else name for name, values in parts.items()]
    more = f" and {len(shown) - MOST_NAMED} more" if len(shown) > MOST_NAMED else ""
    return ", ".join(shown[:MOST_NAMED]) + more


def _both(values: tuple[Any, Any]) -> str:
    """Format two values; of paths in one folder, only what differs."""
    texts = ["none" if value is None else value if isinstance(value, str) and value else plain(value) for value in values]
    if all(isinstance(value, str) for value in values):
        parts = [text.split("/") for text in texts]
        shared = next((index for index, (a, b) in enumerate(zip(*parts, strict=False)) if a != b), 0)
        texts = ["/".join(words[shared:]) for words in parts]
    return " | ".join(cut(text, LONGEST_VALUE) for text in texts)

"""Where two runs diverge, and why: the first step that differs by more than rounding, and which differences explain it.

What differs first tells the cause. Other samples in a step come from the seed or the batch size, a different learning rate from
its schedule, a different first loss from model, dropout, data or libraries, and a loss that differs only later from the update
before it. A difference is likely only if it can have that effect, and in that step: a different ``train.eps`` cannot change the
first loss, nor a row any step before the first that uses it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from hftune.config.keys import Effect
from hftune.replay.differences import (
    CONTENT,
    DOES_NOT_TRAIN,
    KINDS,
    RATE,
    RESOLVED_KEYS,
    ROUNDING,
    UNKNOWN,
    UPDATE,
    Difference,
    Rows,
    diff,
    effects_of,
)
from hftune.replay.ledger import LedgerRecord, stretches
from hftune.replay.run_record import flat
from hftune.replay.tolerance import TOLERANCE, relative

JUMP = 10.0
"""A difference that exceeds all earlier ones by less than this factor has grown from them, as rounding does."""
ARITHMETIC = ("world_size", "strategy", "hardware", "packages", *RESOLVED_KEYS)
"""Where these, the code and the keys that round are the same, equal steps are equal to the bit."""
VERDICTS = ("likely", "possible", "rounding only", "no sign")
PASSES = frozenset({Effect.FORWARD, Effect.BACKWARD})
VALUES = ("num_samples", "digest", "items", "lr", "loss", "grad_norm")
"""What a ledger has of each step that was not skipped."""


@dataclass
class Divergence:
    """Where and why two runs diverge."""

    step: int | None = None
    """The first that differs by more than rounding; None if there is none."""
    values: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """What differs in this step, by its name in the ledger."""
    causes: list[Difference] = field(default_factory=list)
    """All differences, the likeliest first."""
    num_steps: int = 0
    """How many steps both runs have."""
    last_equal: int | None = None
    """The last of them before ``step``."""
    rounding_step: int | None = None
    """The first step that differs by rounding, if it is before ``step``."""
    rounding: float = 0.0
    """Largest relative difference before ``step``."""
    tolerance: float = 0.0
    """What rounding may make of a step here; 0 where runs are equal to the bit."""
    has_drifted: bool = False
    """Whether the runs diverge by rounding that has grown, not by a jump."""
    same: list[str] = field(default_factory=list)
    """Kinds of which nothing differs."""


class Sign(NamedTuple):
    """Something that differs first in one step and that no earlier difference explains."""

    effect: Effect
    step: int
    size: float
    """Relative difference of the values."""


def find_divergence(a: LedgerRecord, b: LedgerRecord, rows: Rows | None = None) -> Divergence:
    """Find the first step at which two runs differ, and why.

    Args:
        rows: hashes of the training rows of both, if they are known.
    """
    walk = _Walk(a, b)
    signs = sorted(walk.signs(), key=lambda sign: sign.step)
    found = Divergence(num_steps=len(walk.steps), tolerance=walk.tolerance)
    if signs:
        found.step = max(signs[0].step, walk.steps[0])
        found.has_drifted = signs[0].effect is Effect.ROUNDING
        one, other = a.steps[found.step], b.steps[found.step]
        is_skipped_by_one = one.get("skipped") != other.get("skipped")  # which has nothing else of it
        names = ("skipped",) if is_skipped_by_one else VALUES
        found.values = {name: (one.get(name), other.get(name)) for name in names if one.get(name) != other.get(name)}
    place = len(walk.steps) if found.step is None else bisect_left(walk.steps, found.step)
    found.last_equal = walk.steps[place - 1] if place else None
    if walk.roundings:
        found.rounding_step, found.rounding = walk.roundings[0][0], walk.largest_rounding
        if found.has_drifted or not signs:
            signs.insert(0, Sign(Effect.ROUNDING, *walk.roundings[0]))
    found.causes = _judge(diff(a, b, rows), signs, found, walk)
    found.same = [kind for kind in KINDS if kind not in {cause.kind for cause in found.causes}]
    return found


class _Walk:
    """What is met on the way through the common steps of two runs."""

    def __init__(self, a: LedgerRecord, b: LedgerRecord):
        self.steps: list[int] = []
        self.heads: set[int] = set()
        """First steps of the stretches, in which something may have changed."""
        self.computed: list[int] = []
        """Steps that neither run skipped."""
        self.updates: list[int] = []
        """Steps that move the weights: those with a learning rate that is not 0."""
        self.found: dict[str, tuple[int, float]] = {}
        """Step and size of the first difference above the tolerance of samples, skipped, items, lr, loss and grad_norm."""
        self.roundings: list[tuple[int, float]] = []
        """Steps and sizes of all smaller differences of loss or norm before the first above the tolerance."""
        self.tolerance = 0.0
        """The largest of the steps before anything differed."""
        self.has_other_weights = False
        """Whether the runs began with different weights."""
        for steps, starts in stretches(a, b):
            if not self.steps:
                self.has_other_weights = starts[0].get("weights") != starts[1].get("weights")
            tolerance = 0.0 if _arithmetic(starts[0]) == _arithmetic(starts[1]) else TOLERANCE
            self.heads.add(steps[0])
            for step in steps:
                self.steps.append(step)
                self.tolerance = self.tolerance if self.found else max(self.tolerance, tolerance)
                self._take(step, a.steps[step], b.steps[step], tolerance)

    def _take(self, step: int, a: Mapping[str, Any], b: Mapping[str, Any], tolerance: float) -> None:
        if a.get("skipped") or b.get("skipped"):
            if a.get("skipped") != b.get("skipped"):
                self.found.setdefault("skipped", (step, math.inf))
            return
        self.computed.append(step)
        if (a["digest"], a["num_samples"]) != (b["digest"], b["num_samples"]):
            self.found.setdefault("samples", (step, math.inf))
        for name in ("items", "lr"):
            if a[name] != b[name]:
                self.found.setdefault(name, (step, relative(a[name], b[name])))
        for name in ("loss", "grad_norm"):
            size = relative(a[name], b[name])
            if size > tolerance:
                self.found.setdefault(name, (step, size))
            elif size and not self.found.keys() & {"loss", "grad_norm"}:
                self.roundings.append((step, size))
        if a["lr"] != 0 or b["lr"] != 0:
            self.updates.append(step)

    @property
    def largest_rounding(self) -> float:
        return max((size for _, size in self.roundings), default=0.0)

    def first(self, *names: str) -> float:
        """Return the first step in which one of these values differs, infinite if there is none."""
        return min(self.found[name][0] if name in self.found else math.inf for name in names)

    def shown_at(self, difference: Difference, effect: Effect) -> float:
        """Return the step in which an effect shows first: of an update, one after it; infinite if there is none."""
        step: float = difference.from_step
        if effect is Effect.UPDATE and not difference.shows_at_once:
            step = next((update + 1 for update in self.updates if update >= step), math.inf)
        place = bisect_left(self.computed, step)
        return self.computed[place] if place < len(self.computed) else math.inf

    def signs(self) -> Iterator[Sign]:
        """Yield the differences that no earlier one explains: other samples or another rate change all later losses."""
        for name, effect in (("samples", Effect.SAMPLES), ("skipped", Effect.SKIPPED), ("lr", Effect.LR)):
            if name in self.found:
                yield Sign(effect, *self.found[name])
        if self.has_other_weights and self.first("loss") == self.steps[0]:
            yield Sign(Effect.WEIGHTS, 0, math.inf)
            return
        name = min(("items", "loss", "grad_norm"), key=self.first)
        if self.first(name) >= min(self.first("samples"), self.first("skipped", "lr") + 1):
            return
        step, size = self.found[name]
        if name == "items":
            yield Sign(Effect.ITEMS, step, size)
        elif step == self.steps[0]:
            yield Sign(Effect.FORWARD if name == "loss" else Effect.BACKWARD, step, size)
        else:
            has_grown = step not in self.heads and size < JUMP * self.largest_rounding
            yield Sign(Effect.ROUNDING if has_grown else Effect.UPDATE, step, size)


def _arithmetic(start: Mapping[str, Any]) -> dict[str, Any]:
    """Return what decides the last bits of a step."""
    code = {file: digest for file, digest in start.get("code", {}).items() if not file.startswith(DOES_NOT_TRAIN)}
    keys = {key: value for key, value in flat(start.get("recipe")).items() if ROUNDING <= effects_of(key) < UNKNOWN}
    return {**{name: start.get(name) for name in ARITHMETIC}, "code": code, "keys": keys}


def _judge(differences: Sequence[Difference], signs: Sequence[Sign], divergence: Divergence, walk: _Walk) -> list[Difference]:
    """Return the differences with their verdicts, the likeliest first.

    Of those that can explain the same sign, one that must show in just this step goes before one that merely could, and both
    before code and libraries, of which nobody knows what they change.
    """
    strengths = [[_strength(difference, sign, walk) for sign in signs] for difference in differences]
    best = [max(of_sign) for of_sign in zip(*strengths, strict=True)]
    likely = [any(own == most > 0 for own, most in zip(row, best, strict=True)) for row in strengths]
    judged = []
    for difference, own, is_likely in zip(differences, strengths, likely, strict=True):
        reason = ""
        if is_likely:
            verdict = "likely"
        elif any(own) or _may_be_hidden(difference, divergence, walk, any(likely)):
            verdict = "possible"
        elif difference.effects == ROUNDING and walk.roundings:
            verdict = "rounding only"
        else:
            verdict, reason = "no sign", _why_not(difference, divergence, walk)
        judged.append((VERDICTS.index(verdict), -max(own, default=0), replace(difference, verdict=verdict, reason=reason)))
    return [difference for _, _, difference in sorted(judged, key=lambda entry: entry[:2])]


def _strength(difference: Difference, sign: Sign, walk: _Walk) -> int:
    """Return how well a difference explains a sign: 3 in just this step, 2 by its kind, 1 as code may, 0 not at all."""
    possible = difference.effects & ({sign.effect} | (PASSES if sign.effect is Effect.UPDATE else set()))
    if not possible or difference.from_step > max(sign.step, walk.steps[0]):
        return 0
    if difference.effects >= UNKNOWN:  # code and libraries may do anything
        return 1
    if sign.effect in (Effect.SAMPLES, Effect.LR, Effect.SKIPPED, Effect.WEIGHTS) and not difference.shows_at_once:
        return 3
    shown = [walk.shown_at(difference, effect) for effect in possible]
    if sign.step in shown:  # micro-batches and their like may only round, as without dropout: they go before nothing
        return 1 if Effect.ROUNDING in difference.effects and sign.effect is not Effect.ROUNDING else 3
    # Without equal bits an update may show later than it acts, and clipping acts once a gradient is large enough.
    may_be_late = walk.tolerance > 0 or difference.name == "train.clip_norm"
    is_late = Effect.UPDATE in possible and may_be_late and min(shown) < sign.step
    is_vague = sign.effect in (Effect.ITEMS, Effect.ROUNDING) and not difference.shows_at_once
    return 2 if is_late or is_vague else 0


def _may_be_hidden(difference: Difference, divergence: Divergence, walk: _Walk, is_explained: bool) -> bool:
    """Return whether a difference may be at work without a sign, since losses already differed when it would show."""
    if divergence.step is None or not difference.effects or difference.from_step > divergence.step:
        return False
    if difference.effects == ROUNDING:  # as tf32 on a GPU
        return not is_explained
    hidden = difference.effects & (CONTENT | UPDATE | {Effect.WEIGHTS})
    return any(walk.first("loss", "grad_norm") <= walk.shown_at(difference, effect) < math.inf for effect in hidden)


def _why_not(difference: Difference, divergence: Divergence, walk: _Walk) -> str:
    """Say why a difference has no sign; empty if the runs do not diverge, or its text has said it."""
    if not difference.effects:
        return "it does not change the training" if difference.kind == "recipe" and "(" not in difference.text else ""
    if divergence.step is None:
        return ""
    if difference.from_step > divergence.step:
        return "after the runs have diverged"
    if difference.effects == RATE:
        return "the learning rates are the same"
    if difference.effects == ROUNDING:
        return "it only makes rounding"
    effects = difference.effects - RATE - ROUNDING
    shown = min((walk.shown_at(difference, effect) for effect in effects), default=math.inf)
    return f"it would have shown in step {shown:,.0f}" if shown < math.inf else ""

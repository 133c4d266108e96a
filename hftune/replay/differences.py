"""Where two runs part, and why: the first step that differs by more than rounding, and what of the differences explains it.

The kind of the first difference tells the cause. Other samples in a step come from the seed or the batch size, another learning
rate from its schedule, another first loss from model, dropout, data or libraries, and a loss that parts a step later from the
update before it. A difference is likely only if it can have that effect, and in that step: another ``train.eps`` cannot change
the first loss, nor a row any step before the first that uses it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from hftune.replay import TOLERANCE
from hftune.replay.causes import (
    CONTENT,
    KINDS,
    ONLOOKERS,
    RATE,
    ROUNDING,
    SETTLED,
    UNKNOWN,
    UPDATE,
    Difference,
    Effect,
    effects_of,
    find_differences,
)
from hftune.replay.metrics_log import is_number
from hftune.replay.run_record import flat, mapping
from hftune.replay.traces import Segment, Steps, segments

JUMP = 10.0
"""A difference that exceeds all earlier ones by less than this factor has grown from them, as rounding does."""
ARITHMETIC = ("world_size", "strategy", "hardware", "code", "packages", "recipe")
"""Where these are the same, as far as they decide the last bits, equal steps are equal to the bit."""
VERDICTS = ("likely", "possible", "rounding only", "no sign")


@dataclass(frozen=True)
class Sign:
    """Something that differs first in one step and that no earlier difference explains."""

    effect: Effect
    step: int
    size: float | None = None
    """Relative difference of the values; None where they have none."""


@dataclass(frozen=True)
class Cause:
    """A difference between two runs, and whether it explains where they part."""

    kind: str
    text: str
    verdict: str
    """One of VERDICTS."""
    reason: str = ""
    """Why it has no sign."""
    key: str | None = None
    """Of a recipe."""
    values: tuple[Any, Any] | None = None

    @property
    def is_likely(self) -> bool:
        return self.verdict == "likely"


@dataclass
class Parting:
    """Where and why two runs part."""

    step: int | None = None
    """The first that differs by more than rounding; None if there is none."""
    values: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """What differs in this step, by its name in the ledger."""
    causes: list[Cause] = field(default_factory=list)
    """All differences, the likeliest first."""
    signs: list[Sign] = field(default_factory=list)
    num_steps: int = 0
    """Steps that were compared."""
    num_losses: int = 0
    """Those of which both runs have the loss; of the others, only the samples are known."""
    last_equal: int | None = None
    """The last of these before ``step``. It may be many before, if losses are known only where they were logged."""
    last_before: int | None = None
    """The last step before ``step`` in which what differs there was recorded."""
    rounding_step: int | None = None
    """The first step with another last bit, if it is before ``step``."""
    rounding: float = 0.0
    """Largest relative difference before ``step``."""
    tolerance: float = 0.0
    """What rounding may make of a step here; 0 where runs are equal to the bit."""
    has_drifted: bool = False
    """Whether the runs part by rounding that has grown, not by a jump."""
    same: list[str] = field(default_factory=list)
    """Kinds of which everything is the same."""
    unknown: list[str] = field(default_factory=list)
    """Kinds that a run does not record."""

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)


def part(a: Steps, b: Steps, rows: tuple[np.ndarray | None, np.ndarray | None] | None = None) -> Parting:
    """Find the first step at which two runs part, and why.

    Args:
        rows: hashes of the training rows of each; by default those that the runs bring along.
    """
    if rows is None:
        rows = getattr(a, "rows", None), getattr(b, "rows", None)
    pieces = list(segments(a, b))
    firsts = find_firsts(a, b, pieces)
    parting = parting_of(firsts, a, b)
    differences, is_same = find_differences(pieces, rows)
    parting.causes = judge(differences, parting, firsts)
    parting.same = [kind for kind in KINDS if is_same.get(kind)]
    parting.unknown = [kind for kind in KINDS if kind not in is_same]
    return parting


@dataclass
class Firsts:
    """The first step of each kind of difference."""

    order: list[int] = field(default_factory=list)
    """All common steps."""
    heads: list[int] = field(default_factory=list)
    """First steps of the segments, in which something may have changed."""
    found: dict[str, tuple[int, float | None]] = field(default_factory=dict)
    """Step and size of the first difference above the tolerance of samples, items, lr, loss, grad_norm, and skipped."""
    roundings: list[tuple[int, float]] = field(default_factory=list)
    """Steps and sizes of all smaller differences of loss or norm before the first above the tolerance."""
    tolerance: float = 0.0
    """Greatest of the steps before anything differed."""
    updates: list[int] = field(default_factory=list)
    """Steps that move the weights: those with a learning rate that is not 0."""
    has_other_weights: bool = False
    """Whether the runs began with different weights."""
    recorded: list[int] = field(default_factory=list)
    """Steps of which both runs have the loss, or which both left out."""

    def step_of(self, name: str) -> float:
        """Return the first step with another value, infinite if there is none."""
        return self.found[name][0] if name in self.found else math.inf

    def before(self, step: int) -> int:
        """Return the step with a loss before one; 0 if there is none."""
        return step_before(self.recorded, step) or 0


def step_before(steps: Sequence[int], step: float) -> int | None:
    """Return the last of ascending steps that is before ``step``; None if there is none."""
    index = bisect_left(steps, step)
    return steps[index - 1] if index else None


def find_firsts(a: Steps, b: Steps, pieces: Sequence[Segment]) -> Firsts:
    """Go through the common steps of two runs."""
    firsts = Firsts()
    if pieces:
        weights = [start.get("weights") for start in pieces[0].starts]
        firsts.has_other_weights = None not in weights and weights[0] != weights[1]
    for piece in pieces:
        is_exact = arithmetic(piece.starts[0]) == arithmetic(piece.starts[1]) is not None
        firsts.heads.append(piece.steps[0])
        for step in piece.steps:
            if firsts.order and step > firsts.order[-1] + 1:
                firsts.updates.append(firsts.order[-1] + 1)  # not recorded, and hence perhaps one
            firsts.order.append(step)
            _compare_step(firsts, step, a.steps[step], b.steps[step], 0.0 if is_exact else TOLERANCE)
    return firsts


def arithmetic(start: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what decides the last bits of a step; None if a part of it is not known."""
    if any(start.get(name) is None for name in ARITHMETIC):
        return None
    code = {file: digest for file, digest in mapping(start["code"]).items() if not file.startswith(ONLOOKERS)}
    keys = {key: value for key, value in flat(start["recipe"]).items() if ROUNDING <= effects_of(key) < UNKNOWN}
    layout = {name: start.get(name) for name in SETTLED}
    return {**{name: start[name] for name in ARITHMETIC if name != "recipe"}, "code": code, "keys": keys, "layout": layout}


def _compare_step(firsts: Firsts, step: int, a: Mapping[str, Any], b: Mapping[str, Any], tolerance: float) -> None:
    if not firsts.found:
        firsts.tolerance = max(firsts.tolerance, tolerance)
    if a.get("skipped") or b.get("skipped"):
        if a.get("skipped") != b.get("skipped"):
            firsts.found.setdefault("skipped", (step, None))
        else:
            firsts.recorded.append(step)
        return
    common = a.keys() & b.keys()
    if "loss" in common:
        firsts.recorded.append(step)
    if any(name in common and a[name] != b[name] for name in ("digest", "num_samples")):
        firsts.found.setdefault("samples", (step, None))
    for name in ("items", "lr"):
        if name in common and a[name] != b[name]:
            firsts.found.setdefault(name, (step, relative(a[name], b[name])))
    for name in ("loss", "grad_norm"):
        size = relative(a[name], b[name]) if name in common else 0.0
        if size > tolerance:
            firsts.found.setdefault(name, (step, size))
        elif size and not firsts.found.keys() & {"loss", "grad_norm"}:
            firsts.roundings.append((step, size))
    if a.get("lr") != 0 or b.get("lr") != 0:
        firsts.updates.append(step)


def relative(a: Any, b: Any) -> float:
    """Return the relative difference of two values; infinite if only one of them is a finite number."""
    values = [value if is_number(value) and math.isfinite(value) else None for value in (a, b)]
    if values[0] == values[1]:
        return 0.0
    if None in values:
        return math.inf
    return abs(a - b) / max(abs(a), abs(b))


def parting_of(firsts: Firsts, a: Steps, b: Steps) -> Parting:
    """Return where the runs part: at the first sign that is more than rounding."""
    signs = sorted(signs_of(firsts), key=lambda sign: sign.step)
    within = [sign for sign in signs if sign.effect is Effect.ROUNDING and sign.size <= firsts.tolerance]
    step = next((max(sign.step, firsts.order[0]) for sign in signs if sign not in within), None)
    found = Parting(step, signs=signs, num_steps=len(firsts.order), num_losses=len(firsts.recorded), tolerance=firsts.tolerance)
    found.last_equal = step_before(firsts.recorded, math.inf if step is None else step)
    if within:
        found.rounding_step, found.rounding = within[0].step, max(size for _, size in firsts.roundings)
    if step is not None:
        found.values = unequal_values(a.steps[step], b.steps[step])
        is_of_loss = not found.values.keys() & {"skipped", "num_samples", "digest"}
        found.last_before = step_before(firsts.recorded if is_of_loss else firsts.order, step)
        found.has_drifted = any(sign.effect is Effect.ROUNDING and sign.step == step for sign in signs if sign not in within)
    return found


def unequal_values(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return what differs of a step, of what both runs have recorded."""
    if a.get("skipped") != b.get("skipped"):
        return {"skipped": (a.get("skipped"), b.get("skipped"))}  # one run has nothing else of it
    names = [name for name in ("num_samples", "digest", "items", "lr", "loss", "grad_norm") if name in a and name in b]
    return {name: (a[name], b[name]) for name in names if a[name] != b[name]}


def signs_of(firsts: Firsts) -> Iterator[Sign]:
    """Yield the differences that no earlier one explains: other samples or another learning rate change all later losses."""
    for name, effect in (("samples", Effect.SAMPLES), ("skipped", Effect.SKIPPED), ("lr", Effect.LR)):
        if name in firsts.found:
            yield Sign(effect, *firsts.found[name])
    if firsts.roundings:
        yield Sign(Effect.ROUNDING, *firsts.roundings[0])
    samples, skipped, lr, items, loss, norm = map(firsts.step_of, ("samples", "skipped", "lr", "items", "loss", "grad_norm"))
    if firsts.has_other_weights and loss == firsts.order[0]:
        yield Sign(Effect.WEIGHTS, 0)
        return
    explained = min(samples, skipped + 1, lr + 1)  # from this step on
    if items < explained:
        yield Sign(Effect.ITEMS, *firsts.found["items"])
        return
    first, name = min((loss, "loss"), (norm, "grad_norm"))
    if first < explained:
        step, size = firsts.found[name]
        largest = max((size for _, size in firsts.roundings), default=0.0)
        if step == firsts.order[0]:
            yield Sign(Effect.FORWARD if name == "loss" else Effect.BACKWARD, step, size)
        else:
            has_grown = step not in firsts.heads and size < JUMP * largest
            yield Sign(Effect.ROUNDING if has_grown else Effect.UPDATE, step, size)


def judge(differences: Sequence[Difference], parting: Parting, firsts: Firsts) -> list[Cause]:
    """Return the differences as causes, the likeliest first.

    Of those that can explain the same sign, one that must show in just this step goes before one that merely could, and both
    before code and libraries, of which nobody knows what they change.
    """
    real = [sign for sign in parting.signs if sign.effect is not Effect.ROUNDING or parting.has_drifted] or parting.signs
    strengths = [[strength(difference, sign, firsts) for sign in real] for difference in differences]
    best = [max(of_sign) for of_sign in zip(*strengths, strict=True)]
    likely = [any(own == most > 0 for own, most in zip(row, best, strict=True)) for row in strengths]
    found = []
    for difference, own, is_likely in zip(differences, strengths, likely, strict=True):
        reason = ""
        if is_likely:
            verdict = "likely"
        elif any(own) or may_be_hidden(difference, parting, firsts, any(likely)):
            verdict = "possible"
        elif difference.effects == ROUNDING and firsts.roundings:
            verdict = "rounding only"
        else:
            verdict, reason = "no sign", why_not(difference, parting, firsts)
        cause = Cause(difference.kind, difference.text, verdict, reason, difference.key, difference.values)
        found.append((VERDICTS.index(verdict), -max(own, default=0), cause))
    return [cause for _, _, cause in sorted(found, key=lambda entry: entry[:2])]


def strength(difference: Difference, sign: Sign, firsts: Firsts) -> int:
    """Return how well a difference explains a sign: 3 in just this step, 2 by its kind, 1 as code may, 0 not at all.

    Micro-batches and their like may only round, as without dropout, so that they go before nothing.
    """
    if difference.from_step > max(sign.step, firsts.order[0]):
        return 0
    effects = {sign.effect} | ({Effect.FORWARD, Effect.BACKWARD} if sign.effect is Effect.UPDATE else set())
    possible = effects & difference.effects
    if not possible:
        return 0
    if not difference.is_specific:
        return 1
    if sign.effect in (Effect.SAMPLES, Effect.LR, Effect.SKIPPED, Effect.WEIGHTS) and not difference.is_exact:
        return 3
    steps = [shows_in(difference, effect, firsts) for effect in possible]
    if any(firsts.before(sign.step) < step <= sign.step for step in steps):
        return 3 if sign.effect is Effect.ROUNDING or Effect.ROUNDING not in difference.effects else 1
    # Without equal bits an update may show later than it acts, and clipping acts once a gradient is large enough.
    is_late = Effect.UPDATE in possible and (firsts.tolerance > 0 or difference.key == "train.clip_norm")
    is_vague = sign.effect in (Effect.ITEMS, Effect.ROUNDING) and not difference.is_exact
    return 2 if is_vague or (is_late and min(steps) < sign.step) else 0


def shows_in(difference: Difference, effect: Effect, firsts: Firsts) -> float:
    """Return the step in which an effect shows first: of an update, the one after it; infinite if there is none."""
    if effect is not Effect.UPDATE or difference.is_exact:
        return difference.from_step
    return next((step + 1 for step in firsts.updates if step >= difference.from_step), math.inf)


def may_be_hidden(difference: Difference, parting: Parting, firsts: Firsts, is_explained: bool) -> bool:
    """Return whether a difference may be at work without a sign, since losses already differed when it would show."""
    if parting.step is None or not difference.effects or difference.from_step > parting.step:
        return False
    if difference.effects == ROUNDING:  # as tf32 on a GPU
        return not is_explained
    differs_from = min(firsts.step_of("loss"), firsts.step_of("grad_norm"))
    hidden = difference.effects & (CONTENT | UPDATE | {Effect.WEIGHTS})
    return any(differs_from <= shows_in(difference, effect, firsts) <= firsts.order[-1] for effect in hidden)


def why_not(difference: Difference, parting: Parting, firsts: Firsts) -> str:
    """Say why a difference has no sign; empty if the runs do not part, or its text has said it."""
    if difference.key is not None and not difference.effects and "(" not in difference.text:
        return "it does not change the training"
    if parting.step is None or not difference.effects:
        return ""
    if difference.from_step > parting.step:
        return "after the runs have parted"
    if difference.effects == RATE:
        return "the learning rates are the same"
    if difference.effects == ROUNDING:
        return "it only makes rounding"
    steps = [shows_in(difference, effect, firsts) for effect in difference.effects - RATE - ROUNDING]
    return f"it would have shown in step {min(steps):,.0f}" if steps and min(steps) < math.inf else ""

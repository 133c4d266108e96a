"""What a comparison says, in sentences that the terminal and the report share."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean, stdev
from typing import Any

from hftune.replay.comparison import MethodDifference
from hftune.replay.divergence import Divergence
from hftune.replay.intervals import MIN_ROWS, MIN_STEPS, MIN_UNEQUAL_STEPS, Interval
from hftune.replay.paired import PairedEvaluation, PairedMetric, TrainingLoss
from hftune.replay.tolerance import TOLERANCE, relative

NAMES = {"items": "items", "lr": "learning rate", "loss": "loss", "grad_norm": "gradient norm"}
"""Values of a step by their names in the ledger."""


def divergence_sentences(divergence: Divergence) -> str:
    """Say up to where two runs are equal, and what differs first."""
    if not divergence.num_steps:
        return "The runs have no step in common."
    until = f"in all {count(divergence.num_steps, 'step')}"
    if divergence.step is not None:
        until = f"up to step {divergence.last_equal:,}" if divergence.last_equal else ""
    agreement = f"Equal to the bit {until}. "
    if divergence.rounding_step is not None:
        size = f"{small(divergence.rounding)} at most, from step {divergence.rounding_step:,} on"
        agreement = f"No difference above rounding {until} ({size}). "
    if divergence.step is None:
        return f"{agreement}The runs do not diverge."
    text = f"{agreement if until else ''}They diverge in step {divergence.step:,}: {_values_of(divergence)}."
    if divergence.has_drifted:
        text += " The difference has grown from earlier ones, as rounding does: no step stands out."
    return text


def divergence_step(divergence: Divergence) -> str:
    """Name the step in which two runs diverge, for a table."""
    if divergence.step is None:
        return "never" if divergence.num_steps else "no common step"
    return f"{divergence.step:,}"


def kinds_sentences(divergence: Divergence) -> Iterator[str]:
    """Yield what is the same in both runs, and that nothing explains where they diverge, if so."""
    if not divergence.num_steps:
        return
    if divergence.same:
        yield f"The same in both: {', '.join(divergence.same)}."
    if divergence.step is not None and not any(cause.verdict in ("likely", "possible") for cause in divergence.causes):
        yield (
            "Nothing that is recorded explains it. Not recorded are files that code reads, the environment, and kernels that "
            "do not repeat their own bits (train.deterministic=true turns those of GPUs off)."
        )


def _values_of(divergence: Divergence) -> str:
    """Name what differs in the step in which two runs diverge, with both values."""
    values = divergence.values
    if "skipped" in values:
        return f"skipped by {'A' if values['skipped'][0] else 'B'} alone"
    has_other_samples = bool(values.keys() & {"digest", "num_samples"})
    named = ["other samples"] if has_other_samples else []
    named += [f"{noun} {_pair(*values[name])}" for name, noun in NAMES.items() if name in values]
    size = max((relative(*values[name]) for name in ("loss", "grad_norm") if name in values), default=0.0)
    if not has_other_samples and 0 < size < math.inf:
        remark = f"; rounding would be below {small(TOLERANCE)}" if size > TOLERANCE else ""
        named[-1] += f" ({small(size)}{remark})"
    return ", ".join(named) or "the weights before it"


def small(size: float) -> str:
    """Format a relative difference: "2.4e-2"."""
    return re.sub("e([+-])0", r"e\1", f"{size:.1e}").replace(".0e", "e")


def _pair(a: Any, b: Any) -> str:
    """Format two values with as many digits as tell them apart."""
    if a is None or b is None:
        return f"{'not finite' if a is None else a} | {'not finite' if b is None else b}"
    texts = next(texts for digits in range(5, 18) if len(texts := [f"{value:.{digits}g}" for value in (a, b)]) == len({*texts}))
    return " | ".join(texts)


def training_sentence(training: TrainingLoss) -> str:
    """Say how much the training losses differ."""
    where = f"Training loss, B less A, steps {training.first_step:,} to {training.last_step:,}"
    if training.num_not_finite:
        where += f" without the {training.num_not_finite:,} whose loss is not finite"
    if training.interval is None:
        takes = f"it takes {MIN_STEPS} steps that both runs have, {MIN_UNEQUAL_STEPS} of them from where they diverge on"
        return f"{where}: {training.mean:+.4g}. No interval: {takes}."
    how = "95 %, 8 batch means, of these two runs alone" + ("" if training.is_paired else "; samples differ from step to step")
    return f"{where}: {plus_minus(training.interval)} ({how}): {_reading(training.interval.is_significant, training.mean)}."


def evaluation_sentence(evaluation: PairedEvaluation) -> str:
    """Say what the rows of the last evaluations are."""
    steps = " | ".join("none" if step is None else f"{step:,}" for step in evaluation.steps)
    if evaluation.reason:
        return f"Last evaluations (steps {steps}) are not paired: {evaluation.reason}."
    return f"Last evaluations (steps {steps}), {count(evaluation.num_rows, 'row')} in pairs, B less A:"


def metric_reading(metric: PairedMetric) -> str:
    """Say what a metric of the rows shows."""
    if metric.interval is None:
        return f"no interval: it takes {MIN_ROWS} rows"
    if metric.interval.mean == metric.interval.half_width == 0:
        return "the same in every row"
    reading = _reading(metric.is_significant, metric.interval.mean)
    if metric.p_value is None:
        return reading
    p_value = f"{metric.p_value:.2g}" if metric.p_value >= 1e-4 else f"{metric.p_value:.0e}"
    return f"B alone right {metric.won:,} times, A alone {metric.lost:,}, McNemar p = {p_value}: {reading}"


def method_reading(difference: MethodDifference) -> str:
    """Say what the seeds show of a difference with an interval."""
    pairing = "paired by seed" if difference.is_paired else "other seeds"
    is_significant = difference.interval is not None and difference.interval.is_significant
    return f"{pairing}: {_reading(is_significant, difference.mean).removeprefix('B is ')}"


def _reading(is_significant: bool, mean: float) -> str:
    if not is_significant:
        return "no difference shown"
    return "B is higher" if mean > 0 else "B is lower"


def plus_minus(interval: Interval) -> str:
    """Format a difference with its interval, of two digits: "-0.045 +- 0.061"."""
    mean, width = interval.mean, interval.half_width
    if 0 < width < 1e-4:
        return f"{mean:+.1e} +- {width:.1e}"
    digits = max(0, 1 - math.floor(math.log10(width))) if width else 4
    return f"{mean:+.{digits}f} +- {width:.{digits}f}"


def mean_and_deviation(values: Sequence[float], form: Callable[[float], str]) -> str:
    """Format a mean, and the standard deviation of several values in brackets."""
    return form(fmean(values)) + (f" ({form(stdev(values))})" if len(values) > 1 else "")


def count(number: int, noun: str) -> str:
    """Format a number of things: "1 step", "1,200 steps"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"

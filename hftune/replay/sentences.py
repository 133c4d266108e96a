"""What a comparison says, in sentences that the terminal and the page share."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean, stdev
from typing import Any

from hftune.replay import TOLERANCE
from hftune.replay.differences import Parting, relative
from hftune.replay.intervals import FEWEST_ROWS, FEWEST_STEPS, FEWEST_UNEQUAL, Interval
from hftune.replay.paired import Evaluation, Measure, TrainingLoss
from hftune.replay.seeds import MethodDifference

NAMES = {"items": "items", "lr": "learning rate", "loss": "loss", "grad_norm": "gradient norm"}
"""Values of a step by their names in the ledger."""


def parting_sentences(parting: Parting) -> str:
    """Say up to where two runs are equal, and what differs first."""
    if not parting.num_steps:
        return "The runs have no step in common."
    if parting.step is None and not parting.num_losses:
        return f"The same samples in all {count(parting.num_steps, 'step')}. Their losses are not recorded."
    if parting.step is None:
        return f"{agreement(parting)}. The runs do not part."
    text = f"They part {place(parting)}: {values_of(parting)}."
    if parting.last_equal is not None:
        text = f"{agreement(parting)}. {text}"
    if parting.has_drifted:
        text += " The difference has grown from earlier ones, as rounding does: no step stands out."
    return text


def parting_step(parting: Parting) -> str:
    """Name the step in which two runs part, for a table."""
    if parting.step is None:
        return "never" if parting.num_steps else "no common step"
    return f"{parting.step:,}"


def agreement(parting: Parting) -> str:
    """Say how equal the steps are before the runs part."""
    every = f"in all {count(parting.num_losses, 'step')}"
    if parting.last_equal != parting.num_losses:
        every += " that both have recorded"
    steps = every if parting.step is None else f"up to step {parting.last_equal:,}"
    if parting.rounding_step is None:
        return f"Equal to the bit {steps}"
    return f"No difference above rounding {steps} ({small(parting.rounding)} at most, from step {parting.rounding_step:,} on)"


def place(parting: Parting) -> str:
    """Say in which step two runs part, or between which, if not all are known."""
    if parting.step == (parting.last_before or 0) + 1:
        return f"in step {parting.step:,}"
    if parting.last_before is None:
        return f"in step {parting.step:,} or before, the first that both have recorded"
    return f"between steps {parting.last_before:,} and {parting.step:,}, the next that both have recorded"


def values_of(parting: Parting) -> str:
    """Name what differs in the step in which two runs part, with both values."""
    values = parting.values
    named = ["other samples"] if values.keys() & {"digest", "num_samples"} else []
    if "skipped" in values:
        named.append(f"left out by {'A' if values['skipped'][0] else 'B'} alone")
    named += [f"{noun} {pair(*values[name])}" for name, noun in NAMES.items() if name in values]
    sizes = [relative(*values[name]) for name in ("loss", "grad_norm") if name in values]
    if sizes and not values.keys() & {"digest", "num_samples", "skipped"} and (size := max(sizes)) < math.inf:
        remark = f"; rounding would be below {small(TOLERANCE)}" if size > TOLERANCE else ""
        named[-1] += f" ({small(size)}{remark})"
    return ", ".join(named) or "the weights before it"


def small(size: float) -> str:
    """Format a relative difference: "2.4e-2"."""
    return re.sub("e([+-])0", r"e\1", f"{size:.1e}").replace(".0e", "e")


def pair(a: Any, b: Any) -> str:
    """Format two values with as many digits as tell them apart."""
    if not all(isinstance(value, float | int) for value in (a, b)):
        return f"{'not finite' if a is None else a} | {'not finite' if b is None else b}"
    for digits in range(5, 17):
        texts = [f"{value:.{digits}g}" for value in (a, b)]
        if texts[0] != texts[1]:
            break
    return " | ".join(texts)


def kinds_sentences(parting: Parting) -> Iterator[str]:
    """Yield what is the same in both runs, and what is not known of them."""
    if not parting.num_steps:
        return
    if parting.same:
        yield f"The same in both: {', '.join(parting.same)}."
    if parting.unknown:
        yield f"Not recorded: {', '.join(parting.unknown)}."
    if parting.step is not None and not any(cause.verdict in ("likely", "possible") for cause in parting.causes):
        yield (
            "Nothing that is recorded explains it. Not recorded are files that code reads, the environment, and kernels that "
            "do not repeat their own bits (train.deterministic=true turns those of GPUs off)."
        )


def training_sentence(training: TrainingLoss) -> str:
    """Say how much the training losses differ."""
    where = f"Training loss, B less A, steps {training.first_step:,} to {training.last_step:,}"
    if training.num_without:
        where += f" without the {training.num_without:,} whose loss is not finite"
    if training.interval is None:
        takes = f"it takes {FEWEST_STEPS} steps that both runs have, {FEWEST_UNEQUAL} of them from where they part on"
        return f"{where}: {training.mean:+.4g}. No interval: {takes}."
    how = "95 %, 8 batch means, of these two runs alone" + ("" if training.is_paired else "; samples differ from step to step")
    return f"{where}: {plus_minus(training.interval)} ({how}): {reading(training.interval.is_shown, training.mean)}."


def evaluation_sentence(evaluation: Evaluation) -> str:
    """Say what the rows of the last evaluations are."""
    steps = " | ".join("none" if step is None else f"{step:,}" for step in evaluation.steps)
    if evaluation.reason:
        return f"Last evaluations (steps {steps}) are not paired: {evaluation.reason}."
    return f"Last evaluations (steps {steps}), {count(evaluation.num_rows, 'row')} in pairs, B less A:"


def measure_reading(measure: Measure) -> str:
    """Say what a metric of the rows shows."""
    if measure.interval is None:
        return f"no interval: it takes {FEWEST_ROWS} rows"
    if measure.interval.mean == measure.interval.half_width == 0:
        return "the same in every row"
    parts = []
    if measure.p_value is not None:
        parts.append(f"B alone right {measure.won:,} times, A alone {measure.lost:,}, McNemar p = {p_value(measure.p_value)}")
    parts.append(reading(measure.is_shown, measure.interval.mean))
    return ": ".join(parts)


def method_reading(difference: MethodDifference) -> str:
    """Say what the seeds show."""
    pairing = "paired by seed" if difference.is_paired else "other seeds"
    shown = "no difference shown" if not difference.interval.is_shown else "higher" if difference.mean > 0 else "lower"
    return f"{pairing}: {shown}"


def reading(is_shown: bool, mean: float) -> str:
    """Say whether a difference is more than chance."""
    if not is_shown:
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


def p_value(value: float) -> str:
    return f"{value:.2g}" if value >= 1e-4 else f"{value:.0e}"


def count(number: int, noun: str) -> str:
    """Format a number of things: "1 step", "1,200 steps"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"

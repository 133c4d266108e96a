"""What a comparison says: sentences and tables that the terminal and the report share."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from hftune.replay.comparison import Comparison, Pair
from hftune.replay.differences import count
from hftune.replay.divergence import Divergence
from hftune.replay.paired import (
    MIN_ROWS,
    MIN_SEEDS,
    MIN_STEPS,
    MIN_UNEQUAL_STEPS,
    Interval,
    PairedMetric,
    TrainingLoss,
)
from hftune.replay.tolerance import TOLERANCE, relative
from hftune.tracking.console import aligned, note, short
from hftune.tracking.summary import processes

NAMES = {"items": "items", "lr": "learning rate", "loss": "loss", "grad_norm": "gradient norm"}
"""Values of a step by their names in the ledger."""
MAX_BISECTED_STEPS = 100
"""How many steps hftune bisect computes by itself; what happens later needs --from."""

Table = list[list[str]]
"""Rows of texts; the first one is the head."""


@dataclass
class Finding:
    """Something that a comparison says, under a title."""

    title: str
    parts: list[str | Table]


def describe(comparison: Comparison) -> str:
    """Describe runs for a terminal: where they diverge and why, and what differs beyond chance."""
    runs = comparison.runs
    names = ["A", "B"] if len(runs) == 2 else [run.name for run in runs]
    cells = [
        [
            *(name, run.folder, run.title, count(run.num_steps, "step")),
            processes(run.processes) if run.processes else "",
            "" if run.is_finished else "not finished",
        ]
        for name, run in zip(names, runs, strict=True)
    ]
    blocks = [[*aligned(cells), *map(note, remarks(comparison))]]
    for finding in findings(comparison):
        blocks.append([line for part in finding.parts for line in ([part] if isinstance(part, str) else aligned(part))])
    if len(comparison.pairs) == 1:
        blocks.append([*next_commands(comparison)])
    else:
        metrics = list(dict.fromkeys(name for run in runs for name in run.metrics))
        rows = [
            [name, *(short(run.metrics[metric]) if metric in run.metrics else "" for metric in metrics)]
            for name, run in zip(names, runs, strict=True)
        ]
        blocks.insert(2, aligned([["", *metrics], *rows]))
    return "\n\n".join("\n".join(block) for block in blocks if block)


def remarks(comparison: Comparison) -> Iterator[str]:
    """Yield what runs changed on their way, and what is not known of them."""
    for run in comparison.runs:
        for step, changes in run.changes:
            yield f"{run.name}, from step {step:,} on, after a resume: {'; '.join(changes)}"
        yield from run.missing
        yield from (f"The ledger of {run.name} is not what was written. {problem}" for problem in run.problems[:1])


def findings(comparison: Comparison) -> Iterator[Finding]:
    """Yield where runs diverge and why; of two, how losses and evaluations differ; and the means over the seeds."""
    if len(comparison.pairs) == 1:
        yield from pair_findings(comparison.pairs[0])
    else:
        rows = [["", "diverges in step", "likely cause", f"training loss, less that of {comparison.runs[0].name}"]]
        for pair in comparison.pairs:
            causes = [cause for cause in pair.divergence.causes if cause.is_likely and pair.divergence.step]
            likely = [one.text if one.text.startswith(one.kind) else f"{one.kind}: {one.text}" for one in causes]
            interval = pair.training.interval if pair.training else None
            loss = plus_minus(interval) if interval else f"{pair.training.mean:+.4g}" if pair.training else ""
            step = f"{pair.divergence.step:,}" if pair.divergence.step else "never"
            step = step if pair.divergence.num_steps else "no common step"
            rows.append([pair.b, step, "; ".join(likely[:2]) + (", ..." if likely[2:] else ""), loss])
        yield Finding("Where the runs diverge", [rows])
    if methods := comparison.methods:
        names = list(dict.fromkeys(name for method in methods for name in method.metrics))
        rows = [["mean (deviation) over the seeds", "seeds", *names]]
        for method in methods:
            row = [method.name, str(len(method.runs))]
            for values in (method.metrics.get(name, []) for name in names):
                deviation = f" ({short(stdev(values))})" if len(values) > 1 else ""
                row.append(short(fmean(values)) + deviation if values else "")
            rows.append(row)
        yield Finding("Over the seeds", [rows])
        rows = [["", "", "95 % interval", ""]]
        for one in comparison.method_differences:
            if one.interval is not None:
                pairing = "paired by seed" if one.is_paired else "other seeds"
                reading = _reading(one.interval.is_significant, one.mean).removeprefix("B is ")
                rows.append([one.method, one.metric, plus_minus(one.interval), f"{pairing}: {reading}"])
        parts: list[str | Table] = [f"Less {methods[0].name}:", rows] if rows[1:] else []
        if few := [method for method in methods if len(method.runs) < MIN_SEEDS]:
            counts = [f"{method.name.partition(':')[0]} has {len(method.runs)}" for method in few]
            parts.append(f"An interval over the seeds takes {MIN_SEEDS} of each: {', '.join(counts)}.")
        if parts:
            yield Finding("Differences over the seeds", parts)


def pair_findings(pair: Pair) -> Iterator[Finding]:
    """Yield where two runs diverge and why, their losses, and their evaluations."""
    causes = [
        [cause.verdict, cause.kind, f"{cause.text} ({cause.reason})" if cause.reason else cause.text]
        for cause in pair.divergence.causes
    ]
    table = [[["verdict", "kind", "difference"], *causes]] if causes else []
    yield Finding("Where the runs diverge", [divergence_sentences(pair.divergence), *table, *kinds_sentences(pair.divergence)])
    if pair.training is not None and pair.divergence.step is not None:
        rows = [["training loss", "A", "B", "B less A"]]
        for first, last, a, b in pair.training.stretches:
            steps = f"steps {first:,} to {last:,}" if first < last else f"step {first:,}"
            rows.append([steps, f"{a:.4f}", f"{b:.4f}", f"{round(b - a, 4) + 0.0:+.4f}"])
        yield Finding("Training losses", [rows, training_sentence(pair.training)])
    evaluation = pair.evaluation
    steps = " | ".join("none" if step is None else f"{step:,}" for step in evaluation.steps)
    paired = f", {count(evaluation.num_rows, 'row')} in pairs:"
    if evaluation.reason:
        paired = f" are not paired: {evaluation.reason}."
    rows = [
        [one.name, short(one.a), short(one.b), plus_minus(one.interval) if one.interval else "", metric_reading(one)]
        for one in evaluation.metrics
    ]
    table = [[["", "A", "B", "B less A, 95 %", ""], *rows]] if rows else []
    yield Finding("Last evaluations", [f"Last evaluations (steps {steps}){paired}", *table])


def next_commands(comparison: Comparison) -> Iterator[str]:
    """Yield the commands that compute steps again to prove the likeliest cause, if these runs can be computed again."""
    divergence, (a, b) = comparison.pairs[0].divergence, (shlex.quote(run.folder) for run in comparison.runs)
    if divergence.step is None or not all(run.can_be_replayed for run in comparison.runs):
        return
    likely = {cause.kind for cause in divergence.causes if cause.is_likely}
    if likely & {"recipe", "data"}:
        late = f" --from {divergence.step}" if likely == {"data"} and divergence.step > MAX_BISECTED_STEPS else ""
        yield f"Prove the cause:   hftune bisect {a} {b}{late}"
    elif likely & {"code", "versions"}:
        yield f"Find the commit:   git bisect run hftune bisect-step {a} --step {divergence.step}"
    folder = a if divergence.values.get("skipped", (False, False))[1] else b  # B has nothing of a step that it skipped
    yield f"Look at the step:  hftune replay {folder} --step {divergence.step} --worst 5"


# Sentences


def divergence_sentences(divergence: Divergence) -> str:
    """Say up to where two runs are equal, and what differs first."""
    if not divergence.num_steps:
        return "The runs have no step in common."
    until = f"in all {count(divergence.num_steps, 'step')}"
    if divergence.step is not None:
        until = f"up to step {divergence.last_equal:,}" if divergence.last_equal else ""
    agreement = f"Equal to the bit {until}. "
    if divergence.rounding_step is not None:
        most = f"{small(divergence.rounding)} at most, from step {divergence.rounding_step:,} on"
        agreement = f"No difference above rounding {until} ({most}). "
    if divergence.step is None:
        return f"{agreement}The runs do not diverge."
    values = divergence.values
    if "skipped" in values:
        named = [f"skipped by {'A' if values['skipped'][0] else 'B'} alone"]
    else:
        has_other_samples = bool(values.keys() & {"digest", "num_samples"})
        named = ["other samples"] if has_other_samples else []
        named += [f"{noun} {_pair(*values[name])}" for name, noun in NAMES.items() if name in values]
        size = max((relative(*values[name]) for name in ("loss", "grad_norm") if name in values), default=0.0)
        if not has_other_samples and 0 < size < math.inf:
            remark = f"; rounding would be below {small(TOLERANCE)}" if size > TOLERANCE else ""
            named[-1] += f" ({small(size)}{remark})"
    differs = ", ".join(named) or "the weights before it"
    text = f"{agreement if until else ''}They diverge in step {divergence.step:,}: {differs}."
    if divergence.has_drifted:
        text += " The difference has grown from earlier ones, as rounding does: no step stands out."
    return text


def kinds_sentences(divergence: Divergence) -> Iterator[str]:
    """Yield what is the same in both runs, and that nothing explains where they diverge, if so."""
    if divergence.num_steps and divergence.same:
        yield f"The same in both: {', '.join(divergence.same)}."
    if divergence.step is not None and not any(cause.verdict in ("likely", "possible") for cause in divergence.causes):
        yield (
            "Nothing that is recorded explains it. Not recorded are files that code reads, the environment, and kernels that "
            "do not repeat their own bits (train.deterministic=true turns those of GPUs off)."
        )


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


def _reading(is_significant: bool, mean: float) -> str:
    if not is_significant:
        return "no difference shown"
    return "B is higher" if mean > 0 else "B is lower"


def _pair(a: Any, b: Any) -> str:
    if a is None or b is None:
        return f"{'not finite' if a is None else a} | {'not finite' if b is None else b}"
    texts = next(texts for digits in range(5, 18) if len(texts := [f"{value:.{digits}g}" for value in (a, b)]) == len({*texts}))
    return " | ".join(texts)


def small(size: float) -> str:
    """Format a relative difference: "2.4e-2"."""
    return re.sub("e([+-])0", r"e\1", f"{size:.1e}").replace(".0e", "e")


def plus_minus(interval: Interval) -> str:
    """Format a difference with its interval, of two digits: "-0.045 +- 0.061"."""
    mean, width = interval.mean, interval.half_width
    if 0 < width < 1e-4:
        return f"{mean:+.1e} +- {width:.1e}"
    digits = max(0, 1 - math.floor(math.log10(width))) if width else 4
    return f"{mean:+.{digits}f} +- {width:.{digits}f}"

"""A comparison of runs as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean, stdev

from hftune.reporting.compared import Comparison, Pair, RunFacts
from hftune.reporting.paired import TrainingLoss
from hftune.reporting.seeds import Method, MethodDifference
from hftune.reporting.sentences import (
    count,
    evaluation_sentence,
    kinds_sentence,
    measure_reading,
    method_reading,
    parting_sentences,
    plus_minus,
    training_sentence,
)
from hftune.tracking.console import note, short, warning
from hftune.tracking.summary import column_widths, processes


def describe(comparison: Comparison) -> str:
    """Describe runs, where they part and why, and what differs beyond chance."""
    blocks = ["\n".join(run_lines(comparison.runs))]
    for pair in comparison.pairs:
        blocks += pair_blocks(pair, comparison)
    if len(comparison.runs) > 2:
        blocks.append(metrics_table(comparison.runs))
    if comparison.methods:
        blocks.append(methods_table(comparison.methods))
        blocks += (
            [differences_table(comparison.methods[0], comparison.method_differences)] if comparison.method_differences else []
        )
    return "\n\n".join(filter(None, blocks))


def run_lines(runs: Sequence[RunFacts]) -> Iterator[str]:
    """Yield a line for each run, what it changed on its way, and what is not known of it."""
    names = letters(runs)
    cells = [
        [name, run.folder, run.title, count(run.num_steps, "step"), processes(run.processes) if run.processes else ""]
        for name, run in zip(names, runs, strict=True)
    ]
    lines = aligned(cells)
    for name, run, line in zip(names, runs, lines, strict=True):
        yield line
        for step, changes in run.changes:
            yield f"  {' ' * len(name)}  from step {step:,} on, after a resume: {'; '.join(changes)}"
    for run in runs:
        yield from map(note, run.missing)
        yield from (warning(f"the ledger of {run.name} is not what was written. {problem}") for problem in run.problems[:1])


def letters(runs: Sequence[RunFacts]) -> list[str]:
    """Return A and B for two runs, the numbers of more."""
    return ["A", "B"] if len(runs) == 2 else [f"{number}" for number in range(1, len(runs) + 1)]


def pair_blocks(pair: Pair, comparison: Comparison) -> Iterator[str]:
    """Yield where two runs part and why; of two runs alone also their losses and metrics."""
    is_alone = len(comparison.pairs) == 1
    causes = pair.parting.causes if is_alone else [cause for cause in pair.parting.causes if cause.verdict == "likely"]
    head = "" if is_alone else f"{pair.a} (A) and {pair.b} (B). "
    lines = [head + parting_sentences(pair.parting), *aligned([[c.verdict, c.kind, remark(c.text, c.reason)] for c in causes])]
    yield "\n".join([*lines, *(f"  {sentence}" for sentence in kinds_sentence(pair.parting))])
    if is_alone and pair.training is not None and pair.training.mean != 0:
        yield stretches_table(pair.training)
        yield training_sentence(pair.training)
    elif pair.training is not None and pair.parting.step is not None:
        yield training_sentence(pair.training)
    if is_alone:
        yield "\n".join([evaluation_sentence(pair.evaluation), *measure_lines(pair)])
        if pair.parting.step is not None:
            yield f"Prove the cause: hftune bisect {comparison.runs[0].folder} {comparison.runs[1].folder}"


def remark(text: str, reason: str) -> str:
    return f"{text} ({reason})" if reason else text


def stretches_table(training: TrainingLoss) -> str:
    """Return the curves beside each other: the mean training losses of a few stretches."""
    cells = [["training loss", "A", "B", "B less A"]]
    cells += [
        [f"steps {first:,} to {last:,}" if first < last else f"step {first:,}", f"{a:.4f}", f"{b:.4f}", f"{b - a:+.4f}"]
        for first, last, a, b in training.stretches
    ]
    return "\n".join(aligned(cells))


def measure_lines(pair: Pair) -> list[str]:
    """Return a line for each metric of paired rows."""
    return aligned(
        [
            [
                one.name,
                f"{short(one.a)} | {short(one.b)}",
                plus_minus(one.interval) if one.interval else "",
                measure_reading(one),
            ]
            for one in pair.evaluation.measures
        ]
    )


def metrics_table(runs: Sequence[RunFacts]) -> str:
    """Return the metrics of runs, a row each."""
    names = list(dict.fromkeys(name for run in runs for name in run.metrics))
    cells = [["run", *names]]
    cells += [[run.name, *(short(run.metrics[name]) if name in run.metrics else "" for name in names)] for run in runs]
    return "\n".join(aligned(cells))


def methods_table(methods: Sequence[Method]) -> str:
    """Return mean and deviation of each method over its seeds."""
    names = list(dict.fromkeys(name for method in methods for name in method.metrics))
    cells = [["method (mean and deviation over seeds)", "seeds", *names]]
    for method in methods:
        values = [method.metrics.get(name) for name in names]
        cells.append([method.name, str(len(method.runs)), *(mean_and_deviation(found) if found else "" for found in values)])
    return "\n".join(aligned(cells))


def mean_and_deviation(values: Sequence[float]) -> str:
    return short(fmean(values)) + (f" ({short(stdev(values))})" if len(values) > 1 else "")


def differences_table(first: Method, differences: Sequence[MethodDifference]) -> str:
    """Return what the metrics of methods differ by, over the seeds."""
    cells = [
        [one.method, one.metric, plus_minus(one.interval) if one.interval else f"{one.mean:+.4g}", method_reading(one)]
        for one in differences
    ]
    return "\n".join([f"Less {first.name} (A), 95 % intervals over the seeds:", *aligned(cells)])


def aligned(cells: Sequence[Sequence[str]]) -> list[str]:
    """Align columns, two spaces apart."""
    widths = column_widths(cells) if cells else []
    return ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]

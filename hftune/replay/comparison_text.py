"""A comparison of runs as text for a terminal."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from hftune.replay.comparison import Comparison, Method, MethodDifference, Pair, RunFacts
from hftune.replay.intervals import MIN_SEEDS
from hftune.replay.sentences import (
    count,
    divergence_sentences,
    divergence_step,
    evaluation_sentence,
    kinds_sentences,
    mean_and_deviation,
    method_reading,
    metric_reading,
    plus_minus,
    training_sentence,
)
from hftune.tracking.console import aligned, note, short, warning
from hftune.tracking.summary import processes

MAX_BISECTED_STEPS = 100
"""How many steps hftune bisect computes by itself; what happens later needs --from."""


def describe(comparison: Comparison) -> str:
    """Describe runs, where they diverge and why, and what differs beyond chance."""
    return "\n\n".join("\n".join(block) for block in blocks(comparison))


def blocks(comparison: Comparison) -> Iterator[Sequence[str]]:
    """Yield the paragraphs, as lines."""
    yield [*run_lines(comparison.runs)]
    if len(comparison.pairs) == 1:
        yield from pair_blocks(comparison.pairs[0])
        if commands := [*next_commands(comparison)]:
            yield commands
    else:
        yield divergences_table(comparison)
        yield metrics_table(comparison)
    if comparison.methods:
        yield from methods_blocks(comparison.methods, comparison.method_differences)


def run_lines(runs: Sequence[RunFacts]) -> Iterator[str]:
    """Yield a line for each run, what it changed on its way, and what is not known of it."""
    names = ["A", "B"] if len(runs) == 2 else [f"{number}" for number in range(1, len(runs) + 1)]
    lines = aligned(
        [
            [
                *(name, run.folder, run.title, count(run.num_steps, "step")),
                processes(run.processes) if run.processes else "",
                "" if run.is_finished else "not finished",
            ]
            for name, run in zip(names, runs, strict=True)
        ]
    )
    for name, run, line in zip(names, runs, lines, strict=True):
        yield line
        for step, changes in run.changes:
            yield f"  {' ' * len(name)}  from step {step:,} on, after a resume: {'; '.join(changes)}"
    for run in runs:
        yield from map(note, run.missing)
        yield from (warning(f"the ledger of {run.name} is not what was written. {problem}") for problem in run.problems[:1])


def pair_blocks(pair: Pair) -> Iterator[Sequence[str]]:
    """Yield where two runs diverge and why, their losses, and their evaluations."""
    causes = [
        [cause.verdict, cause.kind, f"{cause.text} ({cause.reason})" if cause.reason else cause.text]
        for cause in pair.divergence.causes
    ]
    remarks = [f"  {sentence}" for sentence in kinds_sentences(pair.divergence)]
    yield [divergence_sentences(pair.divergence), *aligned(causes), *remarks]
    if pair.training is not None and pair.divergence.step is not None:
        cells = [["training loss", "A", "B", "B less A"]]
        for first, last, a, b in pair.training.stretches:
            steps = f"steps {first:,} to {last:,}" if first < last else f"step {first:,}"
            cells.append([steps, f"{a:.4f}", f"{b:.4f}", f"{b - a:+.4f}"])
        yield aligned(cells)
        yield [training_sentence(pair.training)]
    metrics = [
        [
            metric.name,
            f"{short(metric.a)} | {short(metric.b)}",
            plus_minus(metric.interval) if metric.interval else "",
            metric_reading(metric),
        ]
        for metric in pair.evaluation.metrics
    ]
    yield [evaluation_sentence(pair.evaluation), *aligned(metrics)]


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


def divergences_table(comparison: Comparison) -> list[str]:
    """Return where several runs diverge from the first, why, and what their losses differ by: a row each."""
    cells = [["", "diverges in step", "likely cause", "training loss, less 1"]]
    for number, pair in enumerate(comparison.pairs, start=2):
        likely = [f"{cause.kind}: {cause.text}" for cause in pair.divergence.causes if cause.is_likely]
        interval = pair.training.interval if pair.training else None
        loss = plus_minus(interval) if interval else f"{pair.training.mean:+.4g}" if pair.training else ""
        cause = "; ".join(likely[:2]) + (", ..." if likely[2:] else "")
        cells.append([str(number), divergence_step(pair.divergence), cause, loss])
    return aligned(cells)


def metrics_table(comparison: Comparison) -> list[str]:
    """Return the metrics of several runs, a row each."""
    names = list(dict.fromkeys(name for run in comparison.runs for name in run.metrics))
    cells = [["", *names]]
    for number, run in enumerate(comparison.runs, start=1):
        cells.append([str(number), *(short(run.metrics[name]) if name in run.metrics else "" for name in names)])
    return aligned(cells)


def methods_blocks(methods: Sequence[Method], differences: Sequence[MethodDifference]) -> Iterator[Sequence[str]]:
    """Yield the means over the seeds, and what they differ by where there are seeds enough."""
    names = list(dict.fromkeys(name for method in methods for name in method.metrics))
    cells = [["mean (deviation) over the seeds", "seeds", *names]]
    for method in methods:
        values = [method.metrics.get(name) for name in names]
        found = [mean_and_deviation(one, short) if one else "" for one in values]
        cells.append([method.name, str(len(method.runs)), *found])
    yield aligned(cells)
    known = [[one.method, one.metric, plus_minus(one.interval), method_reading(one)] for one in differences if one.interval]
    if known:
        yield [f"Less {methods[0].name}, with the 95 % interval over the seeds:", *aligned(known)]
    if few := [method for method in methods if len(method.runs) < MIN_SEEDS]:
        counts = ", ".join(f"{method.name.partition(':')[0]} has {len(method.runs)}" for method in few)
        yield [f"An interval over the seeds takes {MIN_SEEDS} of each: {counts}."]

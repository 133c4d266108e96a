"""A comparison of runs as text for a terminal."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from hftune.replay.compared import Comparison, Pair, RunFacts
from hftune.replay.intervals import FEWEST_SEEDS
from hftune.replay.paired import TrainingLoss
from hftune.replay.seeds import Method, MethodDifference
from hftune.replay.sentences import (
    count,
    evaluation_sentence,
    kinds_sentences,
    mean_and_deviation,
    measure_reading,
    method_reading,
    parting_sentences,
    parting_step,
    plus_minus,
    training_sentence,
)
from hftune.tracking.console import note, short, warning
from hftune.tracking.summary import column_widths, processes

MOST_BISECTED = 100
"""Steps that a try of hftune bisect takes at most by itself."""


def describe(comparison: Comparison) -> str:
    """Describe runs, where they part and why, and what differs beyond chance."""
    blocks = ["\n".join(run_lines(comparison.runs))]
    if len(comparison.pairs) == 1:
        blocks += pair_blocks(comparison.pairs[0])
        blocks += ["\n".join(lines)] if (lines := [*next_commands(comparison)]) else []
    else:
        blocks += [partings_table(comparison), metrics_table(comparison)]
    if comparison.methods:
        blocks += methods_blocks(comparison.methods, comparison.method_differences)
    return "\n\n".join(blocks)


def run_lines(runs: Sequence[RunFacts]) -> Iterator[str]:
    """Yield a line for each run, what it changed on its way, and what is not known of it."""
    names = letters(runs)
    cells = [
        [
            *(name, run.folder, run.title, count(run.num_steps, "step")),
            processes(run.processes) if run.processes else "",
            "" if run.is_finished else "not finished",
        ]
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


def pair_blocks(pair: Pair) -> Iterator[str]:
    """Yield where two runs part and why, their losses, and their evaluations."""
    causes = aligned([[cause.verdict, cause.kind, remark(cause.text, cause.reason)] for cause in pair.parting.causes])
    remarks = [f"  {sentence}" for sentence in kinds_sentences(pair.parting)]
    yield "\n".join([parting_sentences(pair.parting), *causes, *remarks])
    if pair.training is not None and pair.parting.step is not None:
        yield stretches_table(pair.training)
        yield training_sentence(pair.training)
    yield "\n".join([evaluation_sentence(pair.evaluation), *measure_lines(pair)])


def partings_table(comparison: Comparison) -> str:
    """Return where several runs part from the first, why, and what their losses differ by: a row each."""
    cells = [["", "parts in step", "likely cause", "training loss, less 1"]]
    for number, pair in enumerate(comparison.pairs, start=2):
        likely = [f"{cause.kind}: {cause.text}" for cause in pair.parting.causes if cause.is_likely]
        interval = pair.training.interval if pair.training else None
        loss = plus_minus(interval) if interval else f"{pair.training.mean:+.4g}" if pair.training else ""
        cells.append([str(number), parting_step(pair.parting), "; ".join(likely[:2]) + (", ..." if likely[2:] else ""), loss])
    return "\n".join(aligned(cells))


def remark(text: str, reason: str) -> str:
    return f"{text} ({reason})" if reason else text


def next_commands(comparison: Comparison) -> Iterator[str]:
    """Yield the commands that compute steps again to prove the likeliest cause, if these runs can be computed again."""
    parting, (a, b) = comparison.pairs[0].parting, (shlex.quote(run.folder) for run in comparison.runs)
    if parting.step is None or not all(run.can_be_replayed for run in comparison.runs):
        return
    likely = {cause.kind for cause in parting.causes if cause.is_likely}
    if likely & {"recipe", "data"}:
        late = f" --from {parting.step}" if parting.step > MOST_BISECTED and likely == {"data"} else ""
        yield f"Prove the cause:   hftune bisect {a} {b}{late}"
    elif likely & {"code", "versions"}:
        yield f"Find the commit:   git bisect run hftune bisect-step {a} --step {parting.step}"
    folder = a if parting.values.get("skipped", (False, False))[1] else b  # B has nothing of a step that it left out
    yield f"Look at the step:  hftune replay {folder} --step {parting.step} --worst 5"


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


def metrics_table(comparison: Comparison) -> str:
    """Return the metrics of several runs, a row each."""
    runs = comparison.runs
    names = list(dict.fromkeys(name for run in runs for name in run.metrics))
    cells = [["", *names]]
    for number, run in enumerate(runs, start=1):
        cells.append([str(number), *(short(run.metrics[name]) if name in run.metrics else "" for name in names)])
    return "\n".join(aligned(cells))


def methods_blocks(methods: Sequence[Method], differences: Sequence[MethodDifference]) -> Iterator[str]:
    """Yield the means over the seeds, and what they differ by where there are seeds enough."""
    yield methods_table(methods)
    if known := [one for one in differences if one.interval is not None]:
        yield differences_table(methods[0], known)
    if few := [method for method in methods if len(method.runs) < FEWEST_SEEDS]:
        counts = ", ".join(f"{method.name.partition(':')[0]} has {len(method.runs)}" for method in few)
        yield f"An interval over the seeds takes {FEWEST_SEEDS} of each: {counts}."


def methods_table(methods: Sequence[Method]) -> str:
    """Return mean and deviation of each method over its seeds."""
    names = list(dict.fromkeys(name for method in methods for name in method.metrics))
    cells = [["mean (deviation) over the seeds", "seeds", *names]]
    for method in methods:
        values = [method.metrics.get(name) for name in names]
        cells.append(
            [method.name, str(len(method.runs)), *(mean_and_deviation(found, short) if found else "" for found in values)]
        )
    return "\n".join(aligned(cells))


def differences_table(first: Method, differences: Sequence[MethodDifference]) -> str:
    """Return what the metrics of methods differ by, over the seeds."""
    cells = [[one.method, one.metric, plus_minus(one.interval), method_reading(one)] for one in differences if one.interval]
    return "\n".join([f"Less {first.name}, with the 95 % interval over the seeds:", *aligned(cells)])


def aligned(cells: Sequence[Sequence[str]]) -> list[str]:
    """Align columns, two spaces apart."""
    widths = column_widths(cells) if cells else []
    return ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]

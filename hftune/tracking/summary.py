"""What a run prints before the first and after the last step. Works on plain values only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hftune import __version__
from hftune.batch_plan import BatchPlan
from hftune.config import Recipe
from hftune.tracking.console import aligned, is_number, note, one_line, printed_width, short, table
from hftune.tracking.facts import Facts

MAX_LABELS = 10
"""Labels to list; of more, only the rarest and the most frequent one are named."""
PRECISIONS = {"no": "float32", "bf16": "bf16 and float32", "fp16": "fp16 and float32"}
"""In words, as run.json names them."""


def print_start(recipe: Recipe, plan: BatchPlan, facts: Facts, class_counts: Mapping[str, int]) -> None:
    """Print what is about to be trained, on what and how; then notices, one a line.

    Args:
        class_counts: of the training split; see ``Task.class_counts``.
    """
    precision = PRECISIONS[facts.precision]
    trained = f", {facts.trainable_parameters:,} of them trained" if facts.trainable_parameters != facts.parameters else ""
    rows = {
        "recipe": f"{recipe.recipe} (hftune {__version__})",
        "model": f"{facts.model}, {facts.parameters:,} parameters{trained}",
        "labels": describe_classes(class_counts),
        "samples": ", ".join(f"{data['samples']:,} {split}" for split, data in facts.data.items()),
        "steps": f"{facts.num_steps:,}, {facts.steps_per_epoch:,} an epoch",
        "batch": describe_batch(recipe, plan),
        "runs on": f"{processes(facts.processes)}, {facts.device}, {precision}",
        "output": recipe.output_dir,
    }
    said = table({name: value for name, value in rows.items() if value}, printed_width())
    print(said, *map(note, facts.notices), sep="\n", flush=True)


def describe_classes(counts: Mapping[str, int]) -> str:
    """List the classes with their samples; of many, the extremes."""
    if len(counts) <= MAX_LABELS:
        return ", ".join(f"{one_line(name, 24)}: {count:,}" for name, count in counts.items())
    ordered = sorted(counts.items(), key=lambda item: item[1])
    rarest, commonest = (f"{count:,} ({one_line(name, 24)})" for name, count in (ordered[0], ordered[-1]))
    return f"{len(counts):,}, with {rarest} to {commonest} samples"


def describe_batch(recipe: Recipe, plan: BatchPlan) -> str:
    """Say how many samples a step has, and how many a forward pass."""
    bounds = [f"{plan.micro_batch_size} samples"] if plan.micro_batch_size else []
    bounds += [f"{plan.micro_batch_tokens:,} tokens"] if plan.micro_batch_tokens else []
    packed = ", without padding" if plan.packed else ""
    return f"{recipe.train.batch_size} samples, in micro-batches of at most {' and '.join(bounds)}{packed}"


def print_summary(evaluations: Mapping[str, Mapping[str, Any]], best: Mapping[str, Any], rows: Mapping[str, str]) -> None:
    """Print the metrics as a table with a column for each evaluation; then the best value, and rows such as speed and folders.

    Args:
        evaluations: metrics by what to call them, such as "best (step 375)".
    """
    if evaluations:
        print(metric_table(evaluations), "", sep="\n")
    print(table({"best": describe_best(best), **rows}, printed_width()), flush=True)


def describe_best(best: Mapping[str, Any]) -> str:
    """Say which model is the best; ``best``: as result.json has it."""
    if "metric" not in best:
        return "not evaluated (eval.every=never)"
    return f"{best['metric']} {short(best['value'])} at step {best['step']}"


def metric_table(evaluations: Mapping[str, Mapping[str, Any]]) -> str:
    """Format metrics, a row each, with a column for each evaluation."""
    names = dict.fromkeys(name for metrics in evaluations.values() for name, value in metrics.items() if is_number(value))
    cells = [["", *evaluations]]
    for name in names:
        values = (metrics.get(name) for metrics in evaluations.values())
        cells.append([name, *(short(value) if is_number(value) else "" for value in values)])
    return "\n".join(aligned(cells))


def best_and_last(lines: Iterable[Mapping[str, Any]], best_step: int, last_step: int) -> dict[str, dict[str, Any]]:
    """Return the metrics of the best and the last evaluation by what to call them.

    Args:
        lines: of metrics.jsonl.
    """
    at = {line["step"]: line for line in lines if "eval/loss" in line}
    names = {best_step: f"best (step {best_step})", last_step: f"last (step {last_step})"}
    if best_step == last_step:
        names = {last_step: f"best and last (step {last_step})"}
    return {
        name: {key.removeprefix("eval/"): value for key, value in at[step].items() if key.startswith("eval/")}
        for step, name in names.items()
        if step in at
    }


def processes(count: int) -> str:
    """Say how many processes there are."""
    return f"{count} process{'es' if count > 1 else ''}"

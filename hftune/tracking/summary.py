"""Prints what is about to be trained, and what came out. Works on plain values only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hftune import __version__
from hftune.callbacks import Begin, Callback, End, Step
from hftune.checkpoints.run_folder import REPORT
from hftune.task import ask
from hftune.tracking.console import aligned, duration, is_number, note, one_line, printed_width, short, table
from hftune.tracking.jsonl import read_lines

MAX_LABELS = 10
"""Labels to list; of more, only the rarest and the most frequent one are named."""
PRECISIONS = {"no": "float32", "bf16": "bf16 and float32", "fp16": "fp16 and float32"}
"""In words, as run.json names them."""


class Summary(Callback):
    """Prints what is about to be trained; and at the end metrics, speed and folders."""

    must_not_fail = True

    def on_begin(self, begin: Begin) -> None:
        """Print what is about to be trained, on what and how; then notices, one a line."""
        recipe, plan, facts = begin.recipe, begin.plan, begin.facts
        self.recipe, self.samples, self.seconds = recipe, 0, 0.0
        trained = f", {facts['trainable_parameters']:,} of them trained"
        bounds = [f"{plan.micro_batch_size} samples"] if plan.micro_batch_size else []
        bounds += [f"{plan.micro_batch_tokens:,} tokens"] if plan.micro_batch_tokens else []
        rows = {
            "recipe": f"{recipe.recipe} (hftune {__version__})",
            "model": f"{facts['model']}, {facts['parameters']:,} parameters"
            f"{trained if facts['trainable_parameters'] != facts['parameters'] else ''}",
            "labels": describe_classes(ask(recipe.task, "class_counts", {}, begin.datasets["train"])),
            "samples": ", ".join(f"{data['samples']:,} {split}" for split, data in facts["data"].items()),
            "steps": f"{facts['num_steps']:,}, {facts['steps_per_epoch']:,} an epoch",
            "batch": f"{recipe.train.batch_size} samples, in micro-batches of at most {' and '.join(bounds)}"
            f"{', without padding' if plan.packed else ''}",
            "runs on": f"{processes(facts['processes'])}, {facts['device']}, {PRECISIONS[facts['precision']]}",
            "output": recipe.output_dir,
        }
        said = table({name: value for name, value in rows.items() if value}, printed_width())
        print(said, *map(note, facts["notices"]), sep="\n", flush=True)

    def on_step(self, step: Step) -> None:
        self.samples += step.num_samples
        self.seconds += step.seconds

    def on_end(self, end: End) -> None:
        """Print the metrics as a table with a column for each evaluation; then the best value, speed and folders."""
        result, log_file, report = end.result, end.result.output_dir / "metrics.jsonl", end.result.output_dir / REPORT
        evaluations = best_and_last(read_lines(log_file), result.best["step"], result.steps)
        evaluations |= {"test": result.test} if result.test else {}
        if evaluations:
            print(metric_table(evaluations), "", sep="\n")
        speed, where = self.samples / max(self.seconds, 1e-9), processes(result.world_size)
        rows = {
            "best": describe_best(result.best),
            "steps": f"{result.steps:,} in {duration(result.seconds)} on {where}, {speed:,.0f} samples/s in training",
            "stopped": result.stopped_early,
            "model": f"{result.model_dir} ({'the last one' if self.recipe.eval.is_off else 'the last one: model_last'})",
            "report": str(report) if report.is_file() else f"none, see above; {log_file} has all numbers",
        }
        print(table({name: text for name, text in rows.items() if text}, printed_width()), flush=True)


def describe_classes(counts: Mapping[str, int]) -> str:
    """List the classes with their samples; of many, the extremes."""
    if len(counts) <= MAX_LABELS:
        return ", ".join(f"{one_line(name, 24)}: {count:,}" for name, count in counts.items())
    ordered = sorted(counts.items(), key=lambda item: item[1])
    rarest, commonest = (f"{count:,} ({one_line(name, 24)})" for name, count in (ordered[0], ordered[-1]))
    return f"{len(counts):,}, with {rarest} to {commonest} samples"


def describe_best(best: Mapping[str, Any]) -> str:
    """Say which model is the best; ``best``: as result.json has it."""
    if "metric" not in best:
        return "not evaluated (eval.every=never)"
    return f"{best['metric']} {short(best['value'])} at step {best['step']}"


def metric_table(evaluations: Mapping[str, Mapping[str, Any]]) -> str:
    """Format metrics, a row each, with a column for each evaluation; ``evaluations``: by what to call them."""
    names = dict.fromkeys(name for metrics in evaluations.values() for name, value in metrics.items() if is_number(value))
    cells = [["", *evaluations]]
    for name in names:
        values = (metrics.get(name) for metrics in evaluations.values())
        cells.append([name, *(short(value) if is_number(value) else "" for value in values)])
    return "\n".join(aligned(cells))


def best_and_last(lines: Iterable[Mapping[str, Any]], best_step: int, last_step: int) -> dict[str, dict[str, Any]]:
    """Return the metrics of the best and the last evaluation by what to call them; ``lines``: of metrics.jsonl."""
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

"""Prints what is about to be trained, and what came out. How it looks is in summary.py."""

from __future__ import annotations

from hftune.callbacks import Begin, Callback, End, Step
from hftune.checkpoints.output_dir import OutputDir
from hftune.checkpoints.run_folder import REPORT
from hftune.checkpoints.train_state import TrainState
from hftune.distributed.process_info import ProcessInfo
from hftune.distributed.rounds import agents_word
from hftune.task import ask
from hftune.tracking.console import duration
from hftune.tracking.facts import Facts
from hftune.tracking.jsonl import read_lines
from hftune.tracking.ledger import NAME as LEDGER
from hftune.tracking.ledger import last_step
from hftune.tracking.summary import best_and_last, print_start, print_summary, processes


class Printout(Callback):
    """Prints what is about to be trained; and at the end metrics, speed and folders."""

    must_not_fail = True

    def on_begin(self, begin: Begin) -> None:
        self.recipe = begin.recipe
        self.samples, self.seconds = 0, 0.0
        counts = ask(begin.recipe.task, "class_counts", {}, begin.datasets["train"])
        print_start(begin.recipe, begin.plan, Facts(**begin.facts), counts)

    def on_step(self, step: Step) -> None:
        self.samples += step.num_samples
        self.seconds += step.seconds

    def on_end(self, end: End) -> None:
        result, log_file, report = end.result, end.result.output_dir / "metrics.jsonl", end.result.output_dir / REPORT
        evaluations = best_and_last(read_lines(log_file), result.best["step"], result.steps)
        speed, where = self.samples / max(self.seconds, 1e-9), processes(result.world_size)
        rows = {
            "steps": f"{result.steps:,} in {duration(result.seconds)} on {where}, {speed:,.0f} samples/s in training",
            "stopped": result.stopped_early,
            "model": f"{result.model_dir} ({'the last one' if self.recipe.eval.is_off else 'the last one: model_last'})",
            "report": str(report) if report.is_file() else f"none, see above; {log_file} has all numbers",
        }
        shown = {name: text for name, text in rows.items() if text}
        print_summary(evaluations | ({"test": result.test} if result.test else {}), result.best, shown)


def where_it_goes_on(num_steps: int, state: TrainState, epoch: float, output: OutputDir, here: ProcessInfo) -> str | None:
    """Say which checkpoint a run is resumed from; in a later round of an elastic job also on what, and what is lost.

    None: the run begins.
    """
    if not state.step and not here.round:
        return None
    step, place = state.step, "the beginning"
    if step:
        place = f"step {step} of {num_steps} (epoch {epoch:.2f}), from {output.start.checkpoint.path}"
    if not here.round:
        return f"Resuming from {place}."
    machines = "1 machine" if here.num_nodes == 1 else f"{here.num_nodes} machines"
    taken = last_step(output.path / LEDGER)
    again = f"Step {taken} is" if taken == step + 1 else f"Steps {step + 1} to {taken} are"
    over = agents_word(rounds_ago=1)
    lost = f" {again} computed again." if taken > step else " No step is lost." if over and over.is_planned else ""
    return f"Round {here.round}, {processes(here.world_size)} on {machines}: going on from {place}.{lost}"

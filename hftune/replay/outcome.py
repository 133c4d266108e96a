"""Computes the steps that ``hftune replay`` is asked for, compares them with the ledger, prints and writes what it finds."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hftune.atomic import write_lines, write_text
from hftune.data.digest import row_hashes
from hftune.data.row_hashes import read_rows
from hftune.replay.differences import KINDS, Difference, count, differences_between, row_difference
from hftune.replay.engine import ReplayedStep, Replayer
from hftune.replay.history import Job
from hftune.replay.inspection import Inspection
from hftune.replay.samples import can_look_inside
from hftune.replay.tolerance import StepDifference, difference
from hftune.tracking.console import aligned, duration, hide_progress_bars, hide_reports, note, printed_width, short
from hftune.tracking.jsonl import strict_json
from hftune.tracking.summary import processes

RESULTS = ("loss", "grad_norm", "lr")
NEXT = 10
"""How many steps after those that were asked for would show a change."""


@dataclass
class Outcome:
    """What a replay found; the same on every process."""

    job: Job
    replayer: Replayer
    start: int
    """Step of the checkpoint that it began with; 0: the first weights."""
    steps: list[ReplayedStep] = field(default_factory=list)
    """All that were computed, those on the way included."""
    differences: list[Difference] = field(default_factory=list)
    """What is not as it was. On the main process."""
    seconds: float = 0.0
    inspection: Inspection | None = None

    @property
    def lines(self) -> Mapping[int, Mapping[str, Any]]:
        return self.job.history.ledger.steps

    def compared(self) -> list[tuple[ReplayedStep, StepDifference]]:
        """Return the steps that should be as they were: those before a change."""
        end = self.job.change.from_step if self.job.change else self.job.last + 1
        steps = (step for step in self.steps if step.step < end and step.step in self.lines)
        return [(step, difference(step, self.lines[step.step])) for step in steps]

    @property
    def is_equal(self) -> bool:
        """Whether what should be as it was is so, but for rounding."""
        return all(found.is_equal for _, found in self.compared())


def replay(job: Job) -> bool:
    """Replay, print what was found on the main process, and write it. Collective.

    Returns:
        Whether the steps that should be as they were are so.

    Raises:
        ConfigError, DataError, TrainingError: see ``Replayer``; a file cannot be written.
    """
    hide_progress_bars()
    began = time.monotonic()
    with Replayer(job.history, job.begin, job.change) as replayer:
        if not replayer.strategy.is_main:
            hide_reports()
        outcome = Outcome(job, replayer, replayer.step)
        inspection = None
        if (job.worst or job.why) and (job.must_look or can_look_inside(replayer.strategy)):
            inspection = Inspection(job.history, job.first, job.last, job.worst, job.why)
        elif job.worst:
            teaches, where = replayer.strategy.teacher is not None, "where each process holds the whole model: on one process"
            where = "without train.teacher, which their own losses leave out" if teaches else where
            replayer.notices.append(f"The samples of a step can be shown {where}.")
        for step in replayer.advance(job.last, None if inspection is None else inspection.look):
            outcome.steps.append(step)
            if not job.save_every or step.step % job.save_every:
                continue
            if job.change:
                replayer.save(job.output / "checkpoints")
            elif outcome.is_equal and step.step not in replayer.strategy.on_main(job.history.checkpoint_steps):
                replayer.save(job.history.aside / "checkpoints")  # every later replay will rely on it
        outcome.seconds = time.monotonic() - began
        if replayer.strategy.is_main:
            if inspection is not None:
                inspection.finish(replayer)
                outcome.inspection = inspection
            outcome.differences = environment_differences(replayer)
            job.output.mkdir(parents=True, exist_ok=True)
            write_text(job.output / "replay.json", strict_json(summary(outcome), indent=2) + "\n")
            write_lines(job.output / "steps.jsonl", (strict_json(row) + "\n" for row in rows_of(outcome)))
            if inspection is not None:
                inspection.write(job.output)
            report(outcome)
    return outcome.is_equal


def environment_differences(replayer: Replayer) -> list[Difference]:
    """Return the differences between the run, at the present step, and this replay of it. Main process only.

    Their texts have both values: "torch 2.12.0 | 2.13.0".
    """
    start, now = (
        dict(replayer.terms.start),
        replayer.environment() | {"commits": replayer.task.commits() | replayer.parts.commits},
    )
    if (teacher := replayer.strategy.teacher) is not None:
        now["teacher"] = teacher.digest
    start["hardware"] = {**start.get("hardware", {})}
    start["hardware"].pop("others", None)  # of processes on other machines
    if replayer.change.without:
        now["strategy"] = start.get("strategy")
    now["data"] = {
        split: {**about, "digest": replayer.digests.get(f"{split} data", about.get("digest"))}
        for split, about in start.get("data", {}).items()
    }
    step, noted, here = max(replayer.step, 1), None, None
    if start.get("data", {}).get("train", {}).get("digest") not in (None, replayer.digests["train data"]):
        noted = read_rows(replayer.history.folder)
        here = None if noted is None else row_hashes(replayer.datasets["train"])
    found = [*differences_between(start, {**start, **now}, step, has_rows=here is not None)]
    if noted is not None and here is not None and (other := row_difference(noted, here, start["plan"], step, step)) is not None:
        found.append(other)
    return sorted(found, key=lambda difference: KINDS.index(difference.kind))


def summary(outcome: Outcome) -> dict[str, Any]:
    job, change, compared = outcome.job, outcome.job.change, [found for _, found in outcome.compared()]
    changed = {"from": change.from_step, "set": [*change.overrides], "without": sorted(change.without)}
    return {
        "run": str(job.history.folder),
        "first": job.first,
        "last": job.last,
        "from_checkpoint": outcome.start,
        "processes": outcome.replayer.strategy.num_processes,
        "change": changed | {"skip": sorted(change.skip)} if change else None,
        "equal": outcome.is_equal,
        "bit_equal": all(found.is_bit_equal for found in compared),
        "compared_steps": len(compared),
        "largest_difference": {
            name: max((getattr(found, name) for found in compared), default=None) for name in ("loss", "grad_norm")
        },
        "differences": [{"kind": found.kind, "text": found.text} for found in outcome.differences],
        "notices": outcome.replayer.notices,
        "seconds": round(outcome.seconds, 3),
        "folder": str(job.output),
        **({} if outcome.inspection is None else outcome.inspection.summary()),
    }


def rows_of(outcome: Outcome) -> list[dict[str, Any]]:
    """Return a row for each step that was computed: what it gave here, and what the ledger says of it."""
    return [
        {
            **{name: getattr(step, name) for name in ("step", "epoch", "step_in_epoch", *RESULTS, "items", "num_samples")},
            "then": {name: outcome.lines.get(step.step, {}).get(name) for name in RESULTS},
            "samples": step.samples.tolist(),
        }
        for step in outcome.steps
    ]


def report(outcome: Outcome) -> None:
    """Print what was found, as sentences and a table, or as JSON. Main process only."""
    job, inspection = outcome.job, outcome.inspection
    if job.as_json:
        samples = {} if inspection is None else {"samples": inspection.rows}
        print(strict_json({**summary(outcome), "steps": rows_of(outcome), **samples}), flush=True)
        return
    for text in outcome.replayer.notices:
        print(note(text))
    origin = f"checkpoint {outcome.start:,}" if outcome.start else "the first weights"
    print(
        f"{job.steps.capitalize()} of {outcome.replayer.parts.num_steps:,}, from {origin}: {count(len(outcome.steps), 'step')} "
        f"on {processes(outcome.replayer.strategy.num_processes)}, {duration(outcome.seconds)}. {verdict(outcome)}"
    )
    if outcome.steps and (last := outcome.steps[-1]).step not in outcome.lines:
        print(f"The run never finished step {last.step:,}: loss {last.loss:.6g}, gradient norm {last.grad_norm:.6g} here.")
    is_exact = all(found.is_bit_equal for _, found in outcome.compared())
    if named := [found for found in outcome.differences if not is_exact or found.kind == "data"]:
        print("Differs from the run (then | here):", *(f"  {found.kind:<10}{found.text}" for found in named), sep="\n")
    steps = {step.step: step for step in outcome.steps if step.step >= job.first}
    if job.change or len(steps) > 1:
        rows = [("step", "loss", "in the run", "differs", "norm", "in the run", "lr")]
        for number in range(job.first, job.last + 1):
            line, step = outcome.lines.get(number, {}), steps.get(number)
            loss, norm = (_number(line, name) for name in ("loss", "grad_norm"))
            if step is None:
                rows.append((f"{number:,}", "skipped", loss, "", "", norm, ""))
            else:
                found = difference(step, line)
                differs = "bit-equal" if found.is_bit_equal else f"{found.loss:.1e}"
                rows.append((f"{number:,}", f"{step.loss:.6g}", loss, differs, f"{step.grad_norm:.6g}", norm, short(step.lr)))
        print(*aligned(rows, right=len(rows[0])), sep="\n")
    if inspection is not None:
        print(*inspection.lines(printed_width()), sep="\n")
        if suspects := inspection.to_leave_out:
            end = max(job.last, min(max(outcome.lines), job.last + NEXT))
            print(f"Try: hftune replay {job.history.folder} --steps {job.first}:{end} --without {','.join(map(str, suspects))}")
    print(f"All numbers: {job.output}", flush=True)


def verdict(outcome: Outcome) -> str:
    """Say in sentences how the steps that should be as they were compare with the ledger."""
    compared = outcome.compared()
    if not compared:
        return "No step is compared with the ledger, as none is as it was."
    last, found = compared[-1]
    steps = "Ledger" if last.step == outcome.job.last else f"Ledger, up to step {last.step:,}"
    values = f" (loss {last.loss:.6g}, norm {last.grad_norm:.4g})" if last.step == outcome.job.first == outcome.job.last else ""
    if all(found.is_bit_equal for _, found in compared):
        return f"{steps}: bit-equal{values}."
    if outcome.is_equal:
        loss, norm = (max(getattr(found, name) for _, found in compared) for name in ("loss", "grad_norm"))
        return f"{steps}: equal but for rounding, {loss:.1e} of the loss and {norm:.1e} of the norm at most{values}."
    wrong, found = next(pair for pair in compared if not pair[1].is_equal)
    line = outcome.lines[wrong.step]
    if not found.same_samples:
        return f"{steps}: NOT equal. Step {wrong.step:,} has other samples here."
    return (
        f"{steps}: NOT equal. Step {wrong.step:,} has loss {wrong.loss:.6g} here and {_number(line, 'loss')} there, "
        f"gradient norm {wrong.grad_norm:.6g} and {_number(line, 'grad_norm')}."
    )


def _number(line: Mapping[str, Any], name: str) -> str:
    """Format a number of the ledger, which has null for one that was not finite; "-" if it is not there."""
    if name not in line:
        return "-"
    return "nan" if line[name] is None else f"{line[name]:.6g}"

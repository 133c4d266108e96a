"""Opens a run: its output folder, and all that hears of it. Our callbacks are listed here, in the order in which they run.

It knows what happens at each event, and not when.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hftune.build import Parts, skip_notices
from hftune.callbacks import Begin, Callback, Callbacks, CheckpointDone, Failure
from hftune.checkpoints.checkpointer import Checkpointer, path_of
from hftune.checkpoints.output_dir import OutputDir
from hftune.checkpoints.run_folder import PROFILE
from hftune.checkpoints.train_state import Provenance, TrainState
from hftune.config.importing import import_named
from hftune.distributed.devices import peak_flops
from hftune.distributed.failure_report import Report
from hftune.distributed.process_info import ProcessInfo
from hftune.distributed.rounds import agents_word
from hftune.distributed.session import Session
from hftune.milestones import Run, evaluation_is_due
from hftune.strategies.base import Strategy
from hftune.tracking.console import Console
from hftune.tracking.facts import hardware, of_all, write
from hftune.tracking.ledger import NAME as LEDGER
from hftune.tracking.ledger import Ledger, last_step
from hftune.tracking.predictions import Predictions
from hftune.tracking.profiler import Profiler, unreachable_steps
from hftune.tracking.start_facts import keep_rows, run_facts, start_facts
from hftune.tracking.summary import Summary, processes
from hftune.tracking.throughput import Stopwatch, Throughput
from hftune.tracking.tracker import Tracker


def open_run(
    output: OutputDir,
    session: Session,
    strategy: Strategy,
    parts: Parts,
    provenance: Provenance,
    state: TrainState,
    run_ids: Mapping[str, str],
    users: Sequence[Callback],
) -> Run:
    """Open the output folder, trackers and ledger, and say what is about to happen. Collective.

    From here on a signal is a request to stop after the current step.

    Args:
        run_ids: of the trackers' runs that are continued.
        users: the callbacks that are not ours.
    """
    session.progress.stage("opening the output folder")
    recipe, clock = output.recipe, Stopwatch()
    computed_on = strategy.gather_to_main([(strategy.process_index, hardware(strategy.device))])
    output.find_best(strategy, state)

    def ledger_start() -> dict[str, Any]:
        rows_root = keep_rows(output.path, parts.datasets["train"], provenance.digests["train data"], strategy.progress)
        return start_facts(recipe, strategy, parts, provenance, output.start.checkpoint, of_all(computed_on or []), rows_root)

    ledger = Ledger(output.path / LEDGER, ledger_start, output.is_ours)
    must_start = not session.here.round
    tracker = Tracker(recipe, run_ids, lambda: evaluation_is_due(run), must_start, output.before_release)
    console = Console(strategy.is_main, parts.num_steps, state.step, recipe.eval.metric, recipe.eval.sets)
    ours = our_callbacks(output, session, strategy, parts, clock, ledger, tracker, console)
    run = Run(
        recipe,
        strategy,
        parts.plan,
        parts.datasets,
        parts.num_steps,
        state,
        provenance,
        Callbacks([*ours, *users], strategy.is_main),
        Checkpointer(output.path / "checkpoints", recipe.checkpoint, last=state.step or None, is_ours=output.is_ours),
        session.accept_stop_requests(),
        clock,
        console.scored,
        lambda: [tracker.file, ledger.file],
    )

    def checkpoint_written(step: int, hashes: dict[str, str]) -> None:
        done = CheckpointDone(step=step, path=path_of(run.checkpointer.folder, step), hashes=hashes, waited_s=run.waited_s)
        run.callbacks.tell("on_checkpoint", done, keep=True)

    def failed(report: Report) -> None:
        run.callbacks.tell("on_failure", Failure(reason=report.sentence, is_interruption=report.is_interruption))

    run.checkpointer.on_written = checkpoint_written
    session.closers.append(failed)
    if strategy.is_main:
        session.at_end(run.checkpointer.wait)  # before the folder is released
    begin(run, output, session, parts)
    provenance.callbacks = output.callbacks
    provenance.run_ids = strategy.on_main(tracker.run_ids)
    return run


def our_callbacks(
    output: OutputDir,
    session: Session,
    strategy: Strategy,
    parts: Parts,
    clock: Stopwatch,
    ledger: Ledger,
    tracker: Tracker,
    console: Console,
) -> list[Callback]:
    """Return what happens at each event, from top to bottom. Collective."""
    recipe, path, progress = output.recipe, output.path, strategy.progress
    usage = session.sample_usage(strategy.device, path)
    profiler = Profiler(recipe.train.profile, path / PROFILE, strategy.process_index, strategy.device, clock.paused)
    session.at_end(profiler.close)  # of a run that is stopped in the middle, by the thread that has begun it
    peak = None
    if parts.arithmetic is not None:
        own = peak_flops(strategy.device, strategy.precision, recipe.train.tf32)
        peak = strategy.sum(torch.tensor(own or math.nan, dtype=strategy.exact, device=strategy.device)).item()
        peak = peak if math.isfinite(peak) else None  # of all processes together; nobody knows one of them
    wings = "hftune.reporting.callbacks"  # no part of the core, which therefore does not import it but by name
    card, report = (import_named("callbacks", f"{wings}.{name}", wings, name)() for name in ("Card", "Report"))
    return [
        ledger,  # what each step was computed from, and what came out
        Throughput(strategy.times.take, usage, arithmetic=parts.arithmetic, peak_flops=peak),  # logs the values perf/...
        profiler,  # traces of train.profile
        Predictions(path, recipe.task, progress.tick),  # predictions.jsonl, images of samples, folds
        card,  # the model card
        report,  # report.html
        Summary(),  # prints what is trained, and what came out
        tracker,  # metrics.jsonl and track.with
        console,  # lines and the progress bar
    ]


def begin(run: Run, output: OutputDir, session: Session, parts: Parts) -> None:
    """Bring the output folder to where training starts, write run.json, and let callbacks hear of the beginning. Collective."""
    recipe, state, strategy = run.recipe, run.state, run.strategy

    def record() -> Begin:
        facts: dict[str, Any] = {}
        if strategy.is_main:
            parts.notices += [*unreachable_steps(recipe.train.profile, parts.num_steps), *output.start.notices]
            parts.notices += skip_notices(recipe.train, state.step, parts.num_steps)
            parts.notices += where_it_goes_on(run, output, session.here)
            facts = run_facts(recipe, strategy, parts, run.provenance, session.here.num_nodes)
            output.open(state)
            write(facts, output.path)
        return Begin(
            recipe=recipe,
            model=strategy.model,
            plan=run.plan,
            datasets=run.datasets,
            output_dir=output.path,
            step=state.step,
            num_steps=run.num_steps,
            process_index=strategy.process_index,
            num_processes=strategy.num_processes,
            device=strategy.device,
            facts=facts,
        )

    run.tell_while_waiting("on_begin", record)


def where_it_goes_on(run: Run, output: OutputDir, here: ProcessInfo) -> list[str]:
    """Say which checkpoint a run is resumed from; in a later round of an elastic job also on what, and what is lost."""
    step, place = run.state.step, "the beginning"
    if not step and not here.round:
        return []
    if step:
        place = f"step {step} of {run.num_steps} (epoch {run.epoch():.2f}), from {output.start.checkpoint.path}"
    if not here.round:
        return [f"Resuming from {place}."]
    machines = "1 machine" if here.num_nodes == 1 else f"{here.num_nodes} machines"
    taken, over = last_step(output.path / LEDGER), agents_word(rounds_ago=1)
    again = f"Step {taken} is" if taken == step + 1 else f"Steps {step + 1} to {taken} are"
    lost = f" {again} computed again." if taken > step else " No step is lost." if over and over.is_planned else ""
    return [f"Round {here.round}, {processes(here.world_size)} on {machines}: going on from {place}.{lost}"]

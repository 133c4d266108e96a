"""``train(recipe)``: the single entry point for command line, Spark and notebooks. Joins, builds, restores, trains, saves.

Not ``train.py``: a module and a function cannot share the name ``hftune.train``; whichever is imported last would win.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from hftune.build import (
    Parts,
    build,
    choose_strategy,
    idle_notices,
    prepare,
    settle_micro_batches,
    skip_notices,
    warm_up_strategy,
)
from hftune.callbacks import Begin, Callback, Callbacks, CheckpointDone, Failure, make_callbacks
from hftune.checkpoints.checkpointer import Checkpointer, path_of
from hftune.checkpoints.output_dir import OutputDir, TrainResult
from hftune.checkpoints.resume import settle
from hftune.checkpoints.run_folder import PROFILE
from hftune.checkpoints.train_state import Provenance, RestoredState
from hftune.config import Recipe
from hftune.config.importing import import_named
from hftune.distributed.devices import peak_flops
from hftune.distributed.failure_report import Report
from hftune.distributed.rounds import wait_for_agent
from hftune.distributed.session import Session
from hftune.errors import Interrupted
from hftune.finish import end_of_round, finish, how_to_resume, say_finished
from hftune.loop import fit
from hftune.milestones import Run
from hftune.models.weights import weights_digest
from hftune.strategies import statistics
from hftune.strategies.base import Strategy
from hftune.strategies.sharding import model_tensors
from hftune.tracking.console import Console, hide_progress_bars, hide_reports, is_terminal, note
from hftune.tracking.hardware import hardware, of_all
from hftune.tracking.ledger import NAME as LEDGER
from hftune.tracking.ledger import Ledger
from hftune.tracking.predictions import Predictions
from hftune.tracking.printout import Printout, where_it_goes_on
from hftune.tracking.profiler import Profiler, unreachable_steps
from hftune.tracking.start_facts import keep_rows, run_facts, start_facts
from hftune.tracking.summary import PRECISIONS
from hftune.tracking.throughput import Stopwatch, Throughput
from hftune.tracking.tracker import Tracker, check_trackers


def train(recipe: Recipe, callbacks: Sequence[Callback] = ()) -> TrainResult:
    """Train a recipe. Every process of the job calls it with the same recipe.

    Args:
        callbacks: hear of what happens, after those that the recipe names; see ``hftune.Callback``.

    Raises:
        ConfigError: the recipe cannot be run, here or at all; raised before a model is loaded if possible.
        DataError: the data cannot be trained on.
        TrainingError: a loss that is not finite, or a file that could not be written; an ElsewhereError if another process
            failed. A process that cannot raise it, because it waits for the failed one, ends with exit code 1.
        Interrupted: a signal asked to stop; the step was finished and a checkpoint written.
    """
    recipe.validate()
    users = [*make_callbacks(recipe.callbacks), *callbacks]
    # The folder is released last: trackers may upload from it for hours after the other processes have left.
    with OutputDir(recipe) as output, Session(recipe) as session:
        settle(recipe)
        claim(output, session)
        parts = build(recipe, session.progress)
        output.check_finished(parts.num_steps)
        strategy = choose_strategy(session.join(), recipe, session.progress)
        session.at_end(strategy.end_workers)
        provenance = compare(session, strategy, parts)
        output.confirm(strategy)
        parts.first_weights = first_weights(output, strategy, parts)
        prepare(recipe, strategy, parts)
        restored = output.restore(strategy, provenance, parts.num_steps)
        if result := output.finished_result(strategy, restored.state, parts.num_steps):
            return say_finished(strategy, recipe, result)
        parts.notices += changed_precision(recipe, strategy, restored.precision)
        provenance.micro_batch_size = settle_micro_batches(recipe, strategy, parts, restored.micro_batch_size)
        parts.notices += idle_notices(parts.plan, strategy.num_processes // recipe.parallel.pipeline_stages)
        run = open_run(output, session, strategy, parts, provenance, restored, users)
        return fit_and_finish(run, output)


def claim(output: OutputDir, session: Session) -> None:
    """Lock the output folder, and refuse trackers that cannot be reached, before anything is loaded.

    Raises:
        ConfigError: see ``OutputDir.claim`` and ``check_trackers``.
    """
    session.progress.stage("claiming the output folder")
    if not session.info.is_main:
        hide_reports()
    elif not is_terminal(sys.stderr):
        hide_progress_bars()
    if session.info.is_main and not session.info.round:  # it alone writes, and talks to trackers
        check_trackers(output.recipe)
    output.claim()


def compare(session: Session, strategy: Strategy, parts: Parts) -> Provenance:
    """Make sure that all processes train the same, and return what checkpoints record of it. Collective.

    Raises:
        ConfigError: see ``Session.compare``.
    """
    task = session.recipe.task
    commits = task.commits()
    digests = session.compare(strategy, parts.datasets, commits)
    parts.notices += strategy.on_main(lambda: task.notices(parts.datasets, parts.model))
    return Provenance(digests, commits, strategy.precision, base=strategy.broadcast(parts.base))


def first_weights(output: OutputDir, strategy: Strategy, parts: Parts) -> str | None:
    """Return, on the main process of a run that begins, the digest of the weights that it begins with. Local.

    Before ``strategy.prepare``, while the main process has the whole model on its host.
    """
    if not strategy.is_main or output.start.checkpoint is not None:
        return None
    strategy.progress.stage("hashing the first weights")
    return weights_digest(model_tensors(parts.model))


def changed_precision(recipe: Recipe, strategy: Strategy, before: str | None) -> list[str]:
    """Say that ``train.mixed_precision=auto`` means something else than in the steps that a run is resumed from."""
    if recipe.train.mixed_precision != "auto" or before in (None, strategy.precision):
        return []
    return [
        f"train.mixed_precision=auto: the steps so far were computed in {PRECISIONS[before]}, those from here on in "
        f"{PRECISIONS[strategy.precision]}. To keep to one of them, set train.mixed_precision={before}."
    ]


def open_run(
    output: OutputDir,
    session: Session,
    strategy: Strategy,
    parts: Parts,
    provenance: Provenance,
    restored: RestoredState,
    users: Sequence[Callback],
) -> Run:
    """Open the output folder, trackers and ledger, and say what is about to happen. Collective.

    From here on a signal is a request to stop after the current step.
    """
    session.progress.stage("opening the output folder")
    recipe, state, path = output.recipe, restored.state, output.path
    usage, clock = session.sample_usage(strategy.device, path), Stopwatch()
    computed_on = strategy.gather_to_main([(strategy.process_index, hardware(strategy.device))])
    output.find_best(strategy, state)

    def ledger_start() -> dict[str, Any]:
        rows_root = keep_rows(path, parts.datasets["train"], provenance.digests["train data"], strategy.progress)
        checkpoint = output.start.checkpoint
        return start_facts(recipe, strategy, parts, provenance, checkpoint, of_all(computed_on or []), rows_root)

    ledger = Ledger(path / LEDGER, ledger_start, output.is_ours)
    is_evaluated, must_start = state.evaluated_step == state.step, not session.info.round
    tracker = Tracker(recipe, restored.run_ids, is_evaluated, must_start, output.before_release)
    console = Console(strategy.is_main, parts.num_steps, state.step, recipe.eval.metric)
    arithmetic = parts.arithmetic
    peak = None if arithmetic is None else all_peaks(strategy, recipe)
    # What happens at each event, from top to bottom.
    ours = [
        ledger,  # what each step was computed from, and what came out
        Throughput(strategy.times.take, usage, arithmetic=arithmetic, peak_flops=peak),  # logs the values perf/...
        Profiler(recipe.train.profile, path / PROFILE, strategy.process_index, strategy.device, clock.paused),
        Predictions(path, recipe.task, strategy.progress.tick),  # predictions.jsonl, images of samples, folds
        wing("hftune.reporting.callbacks.Card"),  # the model card
        wing("hftune.reporting.callbacks.Report"),  # report.html
        Printout(),  # prints what is trained, and what came out
        tracker,  # metrics.jsonl and track.with
        console,  # lines and the progress bar
    ]
    listening = Callbacks([*ours, *users], strategy.is_main)
    run = Run(
        recipe,
        strategy,
        parts.plan,
        parts.datasets,
        parts.num_steps,
        state,
        provenance,
        listening,
        Checkpointer(path / "checkpoints", recipe.checkpoint, last=state.step or None, is_ours=output.is_ours),
        session.accept_stop_requests(),
        clock,
        console.scored,
        lambda: [tracker.file, ledger.file],
    )

    def checkpoint_written(step: int, hashes: dict[str, str]) -> None:
        done = CheckpointDone(step=step, path=path_of(run.checkpointer.folder, step), hashes=hashes, waited_s=run.waited_s)
        listening.tell("on_checkpoint", done)

    def failed(report: Report) -> None:
        listening.tell("on_failure", Failure(reason=report.sentence, is_interruption=report.is_interruption))

    run.checkpointer.on_written = checkpoint_written
    session.at_failure(failed)
    if strategy.is_main:
        session.at_end(run.checkpointer.wait)  # before the folder is released
    begin(run, output, session, parts)
    provenance.run_ids = strategy.on_main(tracker.run_ids)
    return run


def wing(path: str) -> Callback:
    """Make a callback of ours that is no part of the core, which therefore does not import it but by name."""
    module, _, name = path.rpartition(".")
    return import_named("callbacks", path, module, name)()


def begin(run: Run, output: OutputDir, session: Session, parts: Parts) -> None:
    """Bring the output folder to where training starts, write run.json, and let callbacks hear of the beginning. Collective."""
    recipe, state, strategy = run.recipe, run.state, run.strategy

    def record() -> Begin:
        facts = {}
        if strategy.is_main:
            parts.notices += [*unreachable_steps(recipe.train.profile, parts.num_steps), *output.start.notices]
            parts.notices += skip_notices(recipe.train, state.step, parts.num_steps)
            goes_on = where_it_goes_on(run.num_steps, state, run.epoch(), output, session.info)
            parts.notices += [] if goes_on is None else [goes_on]
            collected = run_facts(recipe, strategy, parts, run.provenance, session.info.num_nodes)
            output.open(state)
            collected.write(output.path)
            facts = asdict(collected)
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


def all_peaks(strategy: Strategy, recipe: Recipe) -> float | None:
    """Return the peak rates of the devices of all processes together; None if nobody knows one of them. Collective."""
    own = peak_flops(strategy.device, strategy.precision, recipe.train.tf32)
    peaks = strategy.sum(torch.tensor(math.nan if own is None else own, dtype=strategy.exact, device=strategy.device)).item()
    return peaks if math.isfinite(peaks) else None


def fit_and_finish(run: Run, output: OutputDir) -> TrainResult:
    """Train to the end, and write the results. Collective.

    Raises:
        Interrupted: a signal asked to stop; the message says how to resume.
    """
    strategy = run.strategy
    try:
        warm_up(run)
        fit(run)
        result = finish(run, output)
    except Interrupted as error:
        strategy.on_main(run.checkpointer.wait)
        over = wait_for_agent(lambda: bool(run.stop))
        raise Interrupted(end_of_round(run, over) or f"{error} {how_to_resume(run)}") from None
    return result


def warm_up(run: Run) -> None:
    """Let the strategy do the one-time work of a first step. Collective."""
    hide_progress_bars()  # from here on there would be one for each export; downloads are over
    recipe = run.recipe
    kinds = warm_up_strategy(recipe, run.strategy, run.plan, run.datasets)
    notice = statistics.notice(kinds, recipe.train.batch_norm, recipe.train.micro_batch_size)
    if notice is not None and run.strategy.is_main:
        print(note(notice), flush=True)

"""``train(recipe)``: the single entry point for command line, Spark and notebooks. Joins, builds, restores, trains, saves.

Not ``train.py``: a module and a function cannot share the name ``hftune.train``; whichever is imported last would win.
"""

from __future__ import annotations

import functools
import math
import platform
import sys
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import torch

from hftune import __version__
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
from hftune.checkpoints.atomic_files import explain_write_errors, write_text
from hftune.checkpoints.checkpointer import BrokenCheckpoint, Checkpoint, Checkpointer, open_checkpoint, path_of
from hftune.checkpoints.export import export
from hftune.checkpoints.output_dir import PROFILE, OutputDir, TrainResult
from hftune.checkpoints.resume import settle
from hftune.checkpoints.train_state import Provenance, RestoredState
from hftune.config import Recipe
from hftune.data.digest import cached_row_hashes
from hftune.data.row_hashes import NAME as ROWS
from hftune.data.row_hashes import root, write_rows
from hftune.distributed.consistency import code_of, fingerprint, named_code
from hftune.distributed.devices import peak_flops
from hftune.distributed.process_info import ProcessInfo
from hftune.distributed.pulse import marked_while_moving
from hftune.distributed.rounds import Over, agents_word, present_round, wait_for_agent
from hftune.distributed.session import Session
from hftune.errors import Interrupted, TrainingError
from hftune.evaluation import evaluate
from hftune.loop import Run, fit, log
from hftune.models.weights import weights_digest
from hftune.reporting.card import add_card
from hftune.reporting.page import REPORT
from hftune.strategies import statistics
from hftune.strategies.base import Strategy
from hftune.strategies.sharding import model_tensors
from hftune.task import ask
from hftune.tracking.console import Console, hide_progress_bars, hide_reports, is_terminal, note, warning
from hftune.tracking.facts import Facts, command, git_state, now
from hftune.tracking.hardware import hardware, of_all
from hftune.tracking.jsonl import read_lines, strict_json
from hftune.tracking.ledger import NAME as LEDGER
from hftune.tracking.ledger import Ledger, last_step, plan_facts
from hftune.tracking.profiler import StepProfiler, unreachable_steps
from hftune.tracking.summary import PRECISIONS, best_and_last, describe_best, describe_times, print_start, print_summary
from hftune.tracking.tracker import Tracker, check_trackers


def train(recipe: Recipe) -> TrainResult:
    """Train a recipe. Every process of the job calls it with the same recipe.

    Raises:
        ConfigError: the recipe cannot be run, here or at all; raised before a model is loaded if possible.
        DataError: the data cannot be trained on.
        TrainingError: a loss that is not finite, or a file that could not be written; an ElsewhereError if another process
            failed. A process that cannot raise it, because it waits for the failed one, ends with exit code 1.
        Interrupted: a signal asked to stop; the step was finished and a checkpoint written.
    """
    recipe.validate()
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
        run = open_run(output, session, strategy, parts, provenance, restored)
        return fit_and_save(run, output)


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


def say_finished(strategy: Strategy, recipe: Recipe, result: TrainResult) -> TrainResult:
    """Say on the main process that there is nothing left to train, and return the result."""
    limit = "train.epochs" if recipe.train.max_steps is None else "train.max_steps or train.epochs, whichever ends it"
    if result.stopped_early:
        limit = "eval.patience"
    if strategy.is_main:
        print(
            f"{recipe.output_dir} is finished: {result.steps} steps, {describe_best(result.best)}. "
            f"Nothing was trained. To train longer, raise {limit}; to start over, set resume=never or a different output_dir.",
            flush=True,
        )
    return result


def open_run(
    output: OutputDir, session: Session, strategy: Strategy, parts: Parts, provenance: Provenance, restored: RestoredState
) -> Run:
    """Open the output folder, trackers and ledger, and say what is about to happen. Collective.

    From here on a signal is a request to stop after the current step.
    """
    session.progress.stage("opening the output folder")
    recipe, state, ledger = output.recipe, restored.state, Ledger(output.path / LEDGER, output.is_ours)
    run = Run(
        recipe,
        strategy,
        parts.plan,
        parts.datasets,
        parts.num_steps,
        state,
        provenance,
        tracker=Tracker(recipe),
        console=Console(strategy.is_main, parts.num_steps, state.step, recipe.eval.metric),
        ledger=ledger,
        checkpointer=Checkpointer(
            output.path / "checkpoints",
            recipe.checkpoint,
            last=state.step or None,
            on_written=ledger.note_checkpoint,
            is_ours=output.is_ours,
        ),
        stop=session.accept_stop_requests(),
        usage=session.sample_usage(strategy.device, output.path),
        profiler=StepProfiler(recipe.train.profile, output.path / PROFILE, strategy.process_index, strategy.device),
    )
    if parts.arithmetic is not None:
        run.throughput.arithmetic = parts.arithmetic
        run.throughput.peak_flops = all_peaks(strategy, recipe)
    if strategy.is_main:
        session.at_failure(lambda report: run.console.close())
        session.at_failure(run.tracker.end_early)
        session.at_end(run.checkpointer.wait)  # before the folder is released
    output.find_best(strategy, state)
    processes = strategy.gather_to_main([(strategy.process_index, hardware(strategy.device))])

    def open_files() -> dict[str, str]:
        counts = ask(recipe.task, "class_counts", {}, run.datasets["train"])
        parts.notices += [*unreachable_steps(recipe.train.profile, parts.num_steps), *output.start.notices]
        parts.notices += skip_notices(recipe.train, state.step, parts.num_steps)
        here = where_it_goes_on(run, output, session.info) if state.step or session.info.round else None
        parts.notices += [] if here is None else [here]
        facts = facts_of(run, session, parts)
        output.open(state)
        facts.write(output.path)
        is_evaluated, must_start = state.evaluated_step == state.step, not session.info.round
        run.tracker.start(recipe, state.step, is_evaluated, restored.run_ids, asdict(facts), must_start)
        rows_root = keep_rows(run, output)
        start_facts = ledger_facts(run, parts, output.start.checkpoint, of_all(processes), rows_root)
        run.ledger.begin(state.step, start_facts)
        print_start(recipe, run.plan, facts, counts)
        return run.tracker.run_ids()

    provenance.run_ids = strategy.on_main(open_files)
    return run


def where_it_goes_on(run: Run, output: OutputDir, here: ProcessInfo) -> str:
    """Say which checkpoint a run is resumed from; in a later round of an elastic job also on what, and what is lost."""
    step, place = run.state.step, "the beginning"
    if step:
        epoch = f"{run.state.progress(run.plan.num_steps):.2f}"
        place = f"step {step} of {run.num_steps} (epoch {epoch}), from {output.start.checkpoint.path}"
    if not here.round:
        return f"Resuming from {place}."
    machines = "1 machine" if here.num_nodes == 1 else f"{here.num_nodes} machines"
    processes = "1 process" if here.world_size == 1 else f"{here.world_size} processes"
    taken = last_step(run.ledger.path)
    again = f"Step {taken} is" if taken == step + 1 else f"Steps {step + 1} to {taken} are"
    over = agents_word(rounds_ago=1)
    lost = f" {again} computed again." if taken > step else " No step is lost." if over and over.is_planned else ""
    return f"Round {here.round}, {processes} on {machines}: going on from {place}.{lost}"


def keep_rows(run: Run, output: OutputDir) -> str | None:
    """Write rows.bin, and return the hash that stands for all rows of the training data, if there is one. Main process only."""
    run.strategy.progress.stage("hashing the rows of the training data")
    with marked_while_moving(run.strategy.progress):
        hashes = cached_row_hashes(run.datasets["train"], run.provenance.digests["train data"])
    with explain_write_errors(output.path / ROWS):
        write_rows(output.path, hashes)
    return None if hashes is None else root(hashes)


def all_peaks(strategy: Strategy, recipe: Recipe) -> float | None:
    """Return the peak rates of the devices of all processes together; None if nobody knows one of them. Collective."""
    own = peak_flops(strategy.device, strategy.precision, recipe.train.tf32)
    peaks = strategy.sum(torch.tensor(math.nan if own is None else own, dtype=strategy.exact, device=strategy.device)).item()
    return peaks if math.isfinite(peaks) else None


def facts_of(run: Run, session: Session, parts: Parts) -> Facts:
    """Collect what run.json says of this run. Main process only."""
    strategy, datasets, digests = run.strategy, parts.datasets, run.provenance.digests
    labels = ask(run.recipe.task, "labels", None)
    return Facts(
        recipe=run.recipe.recipe,
        started=now(),
        command=command(),
        processes=strategy.num_processes,
        nodes=session.info.num_nodes,
        device=torch.cuda.get_device_name(strategy.device) if strategy.device.type == "cuda" else strategy.device.type,
        precision=strategy.precision,
        model=parts.model_name,
        parameters=parts.num_parameters,
        trainable_parameters=parts.num_trainable,
        data={split: {"samples": len(rows), "digest": digests.get(f"{split} data")} for split, rows in datasets.items()},
        labels=None if labels is None else list(map(str, labels)),
        commits=run.provenance.commits,
        versions=versions(),
        git=git_state(),
        num_steps=run.num_steps,
        steps_per_epoch=run.plan.num_steps,
        notices=parts.notices,
        code=code_of(run.recipe.task) | named_code(run.recipe),
        fold_data=ask(run.recipe.task, "fold_data", None),
    )


def ledger_facts(
    run: Run, parts: Parts, checkpoint: Checkpoint | None, computed_on: dict[str, Any], rows_root: str | None
) -> dict[str, Any]:
    """Collect what the ledger says of a start: everything that the steps from here on follow from. Main process only.

    No times, and no folder of the run: nothing in which equal runs would differ.
    """
    roots = {"train": rows_root}
    recipe, provenance, own = run.recipe.to_dict(), run.provenance, fingerprint(run.recipe)
    if checkpoint is None:
        origin: dict[str, Any] = {"weights": parts.first_weights}
    else:
        origin = {"checkpoint": {"step": checkpoint.step, **checkpoint.hashes}}
    return {
        "world_size": run.strategy.num_processes,
        **plan_facts(run.plan),
        "strategy": type(run.strategy).__name__,
        "precision": run.strategy.precision,
        "num_steps": run.num_steps,
        "steps_per_epoch": run.plan.num_steps,
        "recipe": {key: value for key, value in recipe.items() if key not in ("output_dir", "resume")},
        "code": own["code"],
        "packages": own["packages"],
        "hardware": computed_on,
        "commits": provenance.commits,
        "base": provenance.base,
        "data": {
            split: {"rows": len(rows), "digest": provenance.digests.get(f"{split} data"), "root": roots.get(split)}
            for split, rows in run.datasets.items()
        },
        **origin,
    }


def fit_and_save(run: Run, output: OutputDir) -> TrainResult:
    """Train to the end, and write the results. Collective.

    Raises:
        Interrupted: a signal asked to stop; the message says how to resume.
    """
    strategy = run.strategy
    run.console.start()
    try:
        warm_up(run)
        fit(run)
        run.profiler.close()
        result = finish(run, output)
    except Interrupted as error:
        run.profiler.close()
        strategy.on_main(run.checkpointer.wait)
        over = wait_for_agent(lambda: bool(run.stop))
        raise Interrupted(end_of_round(run, over) or f"{error} {how_to_resume(run)}") from None
    finally:
        run.console.close()
    if strategy.is_main:
        outcome = f"{result.steps} steps, {describe_best(result.best)}."
        # Once everything is saved: an upload may take hours, or fail.
        output.before_release(lambda: run.tracker.close(outcome))
        say_result(run, result)
    return result


def say_result(run: Run, result: TrainResult) -> None:
    """Print the metrics of the best and the last model, and where everything is. Main process only."""
    log_file, report = result.output_dir / "metrics.jsonl", result.output_dir / REPORT
    speed = run.throughput.total_samples / max(run.throughput.total_seconds, 1e-9)
    evaluations = best_and_last(read_lines(log_file), result.best["step"], result.steps)
    rows = {
        "steps": describe_times(result.steps, result.seconds, result.world_size, speed),
        "stopped": result.stopped_early,
        "model": f"{result.model_dir} ({'the last one' if run.recipe.eval.is_off else 'the last one: model_last'})",
        "report": str(report) if report.is_file() else f"none, see above; {log_file} has all numbers",
    }
    shown = {name: text for name, text in rows.items() if text}
    print_summary(evaluations | ({"test": result.test} if result.test else {}), result.best, shown)


def warm_up(run: Run) -> None:
    """Let the strategy do the one-time work of a first step. Collective."""
    hide_progress_bars()  # from here on there would be one for each export; downloads are over
    recipe = run.recipe
    kinds = warm_up_strategy(recipe, run.strategy, run.plan, run.datasets)
    if notice := statistics.notice(kinds, recipe.train.batch_norm, recipe.train.micro_batch_size):
        run.console.line(note(notice))


def end_of_round(run: Run, over: Over | None) -> str | None:
    """Say that a round of an elastic job is over and the next one goes on from here; None if it is the job that stops."""
    if over is None or run.checkpointer.failure is not None:
        return None
    return f"{over.reason}. Round {present_round()} ends after step {run.state.step}, with a checkpoint."


def how_to_resume(run: Run) -> str:
    """Say what was saved and how to resume."""
    checkpointer = run.checkpointer
    if checkpointer.failure is not None:
        return f"Its checkpoint could not be written: {checkpointer.failure}. resume=auto resumes from an earlier one."
    how = "The same command" if run.recipe.resume == "auto" else "resume=auto"
    return f"{how} resumes from {path_of(checkpointer.folder, run.state.step)}."


def finish(run: Run, output: OutputDir) -> TrainResult:
    """Export the last model, score the best one on the test split, and write its card and result.json. Collective.

    Raises:
        Interrupted: a signal asked to stop during the test; everything but its scores and result.json is saved.
        TrainingError: the last checkpoint could not be written; everything else is saved.
    """
    recipe, strategy = run.recipe, run.strategy
    strategy.progress.stage("saving the last model")
    best: dict[str, Any] = {"metric": recipe.eval.metric, "value": run.state.best, "step": run.state.best_step}
    if recipe.eval.is_off:
        best = {"step": run.state.step}
    with strategy.averaged():
        model = strategy.unwrap()
        if recipe.eval.is_off:
            about = {**best, "columns": dict(ask(recipe.task, "read_columns", {}))}
            strategy.on_main(lambda: export(recipe.task, model, output.path / "model", about, recipe.adapter.export))
        else:
            strategy.on_main(lambda: export(recipe.task, model, output.path / "model_last", kind=recipe.adapter.export))
    test = test_best(run) if "test" in run.datasets else {}
    result = TrainResult(
        metrics=run.state.metrics,
        test=test,
        stopped_early=run.stopped_early(),
        best=best,
        commits=run.provenance.commits,
        steps=run.state.step,
        seconds=round(run.seconds(), 3),
        world_size=strategy.num_processes,
        versions=versions(),
        output_dir=output.path,
        model_dir=output.path / "model",
    )

    def save() -> None:
        run.checkpointer.wait()
        run.ledger.close()
        run.tracker.file.close()
        add_card(output.path, recipe, result.to_json())
        with explain_write_errors(output.path / "result.json"):
            write_text(output.path / "result.json", strict_json(result.to_json(), indent=2) + "\n")
        run.reporter.write(output.path, run.console.line, is_last=True)
        if run.checkpointer.failure is not None:
            raise TrainingError(f"Everything is saved except the last checkpoint: {run.checkpointer.failure}.")

    strategy.on_main(save)
    return result


def test_best(run: Run) -> dict[str, Any]:
    """Score the best model on the test split, and log its metrics. Collective; it replaces the model in training.

    Raises:
        Interrupted: a signal asked to stop. Nothing is written; the checkpoint of the last step is there to resume from.
    """
    recipe, strategy = run.recipe, run.strategy
    strategy.progress.stage("the evaluation on the test split")
    if not load_best(run):
        return {}
    config, workers = recipe.eval, recipe.train.num_workers
    dataset, should_stop = run.datasets["test"], lambda: bool(run.stop)
    with strategy.averaged():
        evaluation = evaluate(
            strategy,
            dataset,
            config.batch_size,
            workers,
            should_stop,
            metrics=config.metrics,
            on_scored=run.console.scored,
            batch_tokens=config.batch_tokens,
        )
    if evaluation is None:
        raise Interrupted(f"{run.stop.name or 'Another process was asked to stop'}: stopped while testing the best model.")
    log(run, {f"test/{name}": value for name, value in evaluation.metrics.items()})
    run.console.evaluated(run.state.step, run.epoch(), evaluation.metrics)
    return evaluation.metrics


def load_best(run: Run) -> bool:
    """Give the model in training the weights of the best one, from its checkpoint. Collective.

    Not from the export: merged adapters are none, and what ``task.load`` returns may be a model that is made to be served.

    Returns:
        False: there is no such checkpoint. A kill came between the export of the best model and its checkpoint.
    """
    strategy, step, found = run.strategy, run.state.best_step or run.state.step, []

    def read() -> bool:
        run.checkpointer.wait()
        try:
            found.append(open_checkpoint(path_of(run.checkpointer.folder, step)))
        except BrokenCheckpoint as error:
            text = f"The test split is not scored, as the checkpoint of step {step} cannot be read: {error}."
            run.console.line(warning(f"{text} hftune evaluate scores the best model."))
        return bool(found)

    if not strategy.on_main(read):
        return False
    strategy.load_state((found[0].tensors, found[0].progress["values"]) if found else None)
    return True


@functools.cache  # finding them takes longer than a short step
def versions() -> dict[str, str]:
    """Return the versions that the result depends on."""
    packages = ("torch", "accelerate", "transformers", "datasets")
    return {"hftune": __version__, "python": platform.python_version(), **{name: version(name) for name in packages}}

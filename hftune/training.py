"""``train(recipe)``: the single entry point for command line, Spark and notebooks. Joins, builds, restores, trains, saves.

Not ``train.py``: a module and a function cannot share the name ``hftune.train``; whichever is imported last would win.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hftune.build import Parts, build, choose_strategy
from hftune.callbacks import Callback, make_callbacks
from hftune.checkpoints.output_dir import OutputDir, TrainResult
from hftune.checkpoints.resume import keep_settled
from hftune.checkpoints.train_state import Provenance
from hftune.config import Recipe
from hftune.distributed.accelerator import explained_determinism
from hftune.distributed.session import Session
from hftune.errors import Interrupted
from hftune.finish import finish, interrupted, say_finished
from hftune.loop import fit
from hftune.milestones import Run
from hftune.opening import open_run
from hftune.settle import changed_precision, idle_notices, prepare, settle_micro_batches, warm_up_strategy
from hftune.strategies import statistics
from hftune.strategies.base import Strategy
from hftune.tracking.console import hide_progress_bars, hide_reports, is_terminal, note
from hftune.tracking.tracker import check_trackers


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
    made_as = [callback.made_as for callback in callbacks]
    with OutputDir(recipe, made_as) as output, Session(recipe) as session, explained_determinism():
        keep_settled(recipe)
        claim(output, session)
        parts = build(recipe, session.progress)
        output.check_finished(parts.num_steps)
        strategy = choose_strategy(session.join(), recipe, session.progress)
        session.at_end(strategy.end_workers)
        provenance = compare(session, strategy, parts)
        output.confirm(strategy)
        prepare(recipe, strategy, parts)
        provenance.base, provenance.reference = parts.base, parts.reference
        parts.first_weights = first_weights(output, strategy)
        state, before = output.restore(strategy, provenance, parts.num_steps)
        if result := output.finished_result(strategy, state, parts.num_steps):
            return say_finished(strategy, recipe, result)
        parts.notices += changed_precision(recipe, strategy, before.get("precision"))
        provenance.micro_batch_size = settle_micro_batches(recipe, strategy, parts, before.get("micro_batch_size", {}))
        parts.notices += idle_notices(parts.plan, strategy.dp_size // strategy.together)
        run = open_run(output, session, strategy, parts, provenance, state, before.get("run_ids", {}), users)
        try:
            warm_up(run)
            fit(run)
            return finish(run, output)
        except Interrupted as error:
            raise interrupted(run, error) from None


def claim(output: OutputDir, session: Session) -> None:
    """Lock the output folder, and refuse trackers that cannot be reached, before anything is loaded.

    Raises:
        ConfigError: see ``OutputDir.claim`` and ``check_trackers``.
    """
    session.progress.stage("claiming the output folder")
    if not session.here.is_main:
        hide_reports()
    elif not is_terminal(sys.stderr):
        hide_progress_bars()
    if session.here.is_main and not session.here.round:  # it alone writes, and talks to trackers
        check_trackers(output.recipe)
    output.claim()


def compare(session: Session, strategy: Strategy, parts: Parts) -> Provenance:
    """Make sure that all processes train the same, and return what checkpoints record of it. Collective.

    Raises:
        ConfigError: see ``Session.compare``.
    """
    task = session.recipe.task
    commits = task.commits() | parts.commits
    weights = {} if parts.teacher is None else {"weights of the teacher": parts.teacher.digest}
    digests = session.compare(strategy, parts.datasets, commits, weights)
    parts.notices += strategy.on_main(lambda: task.notices(parts.datasets, parts.model))
    return Provenance(digests, commits, strategy.precision)


def first_weights(output: OutputDir, strategy: Strategy) -> str | None:
    """Return, on the main process of a run that begins, the digest of the weights that it begins with. Collective."""
    if strategy.broadcast(output.start.checkpoint is not None):
        return None
    strategy.progress.stage("hashing the first weights")
    return strategy.sharding.digest()


def warm_up(run: Run) -> None:
    """Let the strategy do the one-time work of a first step. Collective."""
    hide_progress_bars()  # from here on there would be one for each export; downloads are over
    recipe = run.recipe
    kinds = warm_up_strategy(recipe, run.strategy, run.plan, run.datasets)
    notice = statistics.notice(kinds, recipe.train)
    if notice is not None and run.strategy.is_main:
        print(note(notice), flush=True)

"""How a training ends: with the last model, the test split and result.json, or with a word on how it goes on. Knows no step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hftune.atomic import explain_write_errors, write_text
from hftune.callbacks import End, EvaluationDone
from hftune.checkpoints.checkpointer import BrokenCheckpoint, open_checkpoint, path_of
from hftune.checkpoints.output_dir import OutputDir, TrainResult
from hftune.config import Recipe
from hftune.distributed.rounds import present_round, wait_for_agent
from hftune.errors import Interrupted, TrainingError
from hftune.evaluation import evaluate
from hftune.milestones import Run, export_model, log, wait_for_checkpoint
from hftune.strategies.base import Strategy
from hftune.tracking.console import warning
from hftune.tracking.jsonl import strict_json
from hftune.tracking.start_facts import versions
from hftune.tracking.summary import describe_best


def finish(run: Run, output: OutputDir) -> TrainResult:
    """Export the last model, score the best one on the test split, tell callbacks, and write result.json. Collective.

    result.json comes last: a folder that has it holds a finished run.

    Raises:
        Interrupted: a signal asked to stop during the test; everything but its scores and result.json is saved.
        TrainingError: the last checkpoint could not be written; everything else is saved.
    """
    recipe, state, strategy = run.recipe, run.state, run.strategy
    strategy.progress.stage("saving the last model")
    with strategy.sharding.averaged():
        if recipe.eval.is_off:
            best: dict[str, Any] = {"step": state.step}
            export_model(run, "model", best)
        else:
            best = {"metric": recipe.eval.metric, "value": state.best, "step": state.best_step}
            export_model(run, "model_last")
    test = test_best(run) if "test" in run.datasets else {}
    result = TrainResult(
        metrics=state.metrics,
        test=test,
        stopped_early=stopped_early(run),
        best=best,
        commits=run.provenance.commits,
        steps=state.step,
        seconds=round(run.seconds(), 3),
        world_size=strategy.num_processes,
        versions=versions(),
        output_dir=output.path,
        model_dir=output.path / "model",
    )
    wait_for_checkpoint(run)
    run.tell_while_waiting("on_end", lambda: End(result=result))
    strategy.gather_to_main([])  # until all have heard of it

    def write_result() -> None:
        with explain_write_errors(path := output.path / "result.json"):
            write_text(path, strict_json(result.to_json(), indent=2) + "\n")
        if run.checkpointer.failure is not None:
            raise TrainingError(f"Everything is saved except the last checkpoint: {run.checkpointer.failure}.")

    strategy.on_main(write_result)
    return result


def stopped_early(run: Run) -> str | None:
    """Return why training ended before the last step of its schedule, as a sentence; None if it did not."""
    state, config = run.state, run.recipe.eval
    if state.step == run.num_steps:
        return None
    where = f"Stopped after step {state.step:,} of {run.num_steps:,}"
    if state.ended_by is not None:
        return f"{where}, as a callback asked for: {state.ended_by}."
    least = f" by more than {config.min_improvement:g}" if config.min_improvement else ""
    count = f"{config.patience} evaluations" if config.patience != 1 else "the last evaluation"
    return f"{where}: {count} did not improve eval/{config.metric}{least} (eval.patience={config.patience})."


def test_best(run: Run) -> dict[str, Any]:
    """Score the best model on the test split, and log its metrics. Collective; it replaces the model in training.

    Raises:
        Interrupted: a signal asked to stop. Nothing is written; the checkpoint of the last step is there to resume from.
    """
    recipe, strategy = run.recipe, run.strategy
    strategy.progress.stage("the evaluation on the test split")
    if not load_best(run):
        return {}
    config, workers, should_stop = replace(recipe.eval, show_samples=0), recipe.train.num_workers, lambda: bool(run.stop)
    with strategy.sharding.averaged():
        evaluation = evaluate(strategy, run.datasets["test"], config, workers, should_stop, run.on_scored)
    if evaluation is None:
        raise Interrupted(f"{run.stop.name or 'Another process was asked to stop'}: stopped while testing the best model.")
    log(run, {f"test/{name}": value for name, value in evaluation.metrics.items()})

    done = EvaluationDone(
        step=run.state.step,
        epoch=run.epoch(),
        wishes=run.wishes,
        split="test",
        metrics=evaluation.metrics,
        rows=evaluation.rows,
    )
    run.tell_while_waiting("on_evaluation", lambda: done)
    log(run, {})
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
            print(warning(f"{text} hftune evaluate scores the best model."), flush=True)
        return bool(found)

    if not strategy.on_main(read):
        return False
    strategy.sharding.load_state((found[0].tensors, found[0].progress["values"]) if found else None)
    return True


def say_finished(strategy: Strategy, recipe: Recipe, result: TrainResult) -> TrainResult:
    """Say on the main process that there is nothing left to train, and return the result."""
    longer = "raise " + (
        "train.epochs" if recipe.train.max_steps is None else "train.max_steps or train.epochs, whichever ends it"
    )
    if result.stopped_early:
        longer = "raise eval.patience" if "eval.patience" in result.stopped_early else "change the callbacks"
    if strategy.is_main:
        print(
            f"{recipe.output_dir} is finished: {result.steps} steps, {describe_best(result.best)}. "
            f"Nothing was trained. To train longer, {longer}; to start over, set resume=never or a different output_dir.",
            flush=True,
        )
    return result


def interrupted(run: Run, error: Interrupted) -> Interrupted:
    """Return the error of a run that was asked to stop, with what was saved and how the run goes on. Collective."""
    wait_for_checkpoint(run)
    checkpointer, over = run.checkpointer, wait_for_agent(lambda: bool(run.stop))
    if checkpointer.failure is not None:
        failed = f"Its checkpoint could not be written: {checkpointer.failure}. resume=auto resumes from an earlier one."
        return Interrupted(f"{error} {failed}")
    if over is not None:  # a round of an elastic job, and not the job
        reached = f"Round {present_round()} ends after step {run.state.step}, with a checkpoint."
        return Interrupted(f"{over.reason}. {reached}")
    how = "The same command" if run.recipe.resume == "auto" else "resume=auto"
    return Interrupted(f"{error} {how} resumes from {path_of(checkpointer.folder, run.state.step)}.")

"""``train(recipe)``: the one door for command line, Spark and notebook alike. Builds, wires, runs, saves.

Not ``train.py``: a module and a function cannot share the name ``hftune.train``; whichever is imported last would win.
"""

from __future__ import annotations

import atexit
import json
import os
import pickle
import platform
import shutil
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields, replace
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import (
    Accelerator,
    DistributedType,
)
from torch import nn

from hftune import __version__
from hftune.batch_plan import BatchPlan
from hftune.checkpoints.atomic_files import named_where_it_fails, only_writer, write_text
from hftune.checkpoints.checkpointer import Checkpointer, path_of, steps
from hftune.checkpoints.export import export, read_about, restore_export
from hftune.checkpoints.resume import Start, check_finished, find_start, leads_elsewhere, member, note_begun
from hftune.config import Recipe
from hftune.config.sections import ParallelConfig
from hftune.data.augmentation import augmented
from hftune.data.cache import one_at_a_time
from hftune.data.digest import content_digest
from hftune.distributed.accelerator import check_launcher, check_machine, leave_group, start_accelerator
from hftune.distributed.consistency import EARLY_S, check_early, differences, disagreement, facts
from hftune.distributed.heartbeat import Heartbeat
from hftune.distributed.progress import Progress
from hftune.distributed.signals import StopRequest
from hftune.errors import ConfigError, DataError, Interrupted, TrainingError, format_value
from hftune.evaluation import evaluate
from hftune.loop import SAMPLES, Run, TrainState, fit, log, total_steps
from hftune.optim import build_optimizer
from hftune.strategies import statistics
from hftune.strategies.base import Strategy
from hftune.strategies.contract import check_sums
from hftune.strategies.data_parallel import DataParallel, checkpoint_tensors
from hftune.strategies.pipeline_stages import check_stages
from hftune.task import Task
from hftune.tracking.console import Console, hide_progress_bars, is_number, short, table
from hftune.tracking.jsonl import strict_json
from hftune.tracking.ledger import Ledger
from hftune.tracking.tracker import Tracker, check_trackers

DIGEST = "all:"
"""Begins the digests of data; those of hftune 0.2, which saw little of them, have no such beginning."""


@dataclass(kw_only=True)
class TrainResult:
    """What a run came to: result.json, and the folders. The same on every process, but for ``seconds``."""

    metrics: dict[str, Any]
    """The last evaluation's."""
    test: dict[str, Any] = field(default_factory=dict)
    """Of the best model on the test part; empty where the task has none."""
    best: dict[str, Any]
    """metric, value and step of the model in model_dir."""
    commits: dict[str, str] = field(default_factory=dict)
    """Of what was loaded from the Hub, by the key that names the repository, such as task.model."""
    steps: int
    seconds: float
    """From the opening of the output folder to the end of training, evaluations included."""
    world_size: int
    versions: dict[str, str]
    output_dir: Path
    model_dir: Path
    """The best model by ``eval.metric``; the last one lies beside it in model_last."""

    @classmethod
    def read(cls, output_dir: Path) -> TrainResult:
        """Return what a finished run came to, from its folder."""
        values = json.loads((output_dir / "result.json").read_text(encoding="utf-8"))
        return cls(**values, output_dir=output_dir, model_dir=output_dir / "model")


def train(recipe: Recipe) -> TrainResult:
    """Train a recipe on the processes there are. Every process of the job calls it with the same recipe.

    Raises:
        ConfigError: the recipe cannot be run, here or at all; found before a model is loaded where that can be.
        DataError: the data cannot be trained on.
        TrainingError: a loss that is not finite, or a file that could not be written; an ElsewhereError where another
            process failed. A process that cannot raise it, because it waits for the failed one, ends with exit code 1.
        Interrupted: a signal asked to stop; the step was finished and a checkpoint written.
    """
    recipe.validate()
    progress = Progress()
    with ExitStack() as held:
        with Heartbeat(progress, recipe.train.dead_after_s, recipe.train.stall_after_s) as heartbeat, ExitStack() as watched:
            progress.stage("comparing code and recipe with the others")
            check_early(heartbeat.early_store(EARLY_S), heartbeat.here.rank, facts(recipe))
            return run_recipe(recipe, progress, heartbeat, watched, held)


def run_recipe(recipe: Recipe, progress: Progress, heartbeat: Heartbeat, watched: ExitStack, held: ExitStack) -> TrainResult:
    """Build, wire, run and save.

    Args:
        watched: what is given back at the end, whatever happens.
        held: what is given back after that, when nobody watches any more: dashboards may upload for hours, and the output
            folder is theirs until they are done.
    """
    progress.stage("preparing the data")
    check_launcher(recipe)
    check_machine(recipe)
    if int(os.environ.get("RANK", 0)) == 0:  # the main process alone talks to dashboards
        check_trackers(recipe)
    start = claim_folder(recipe, held)
    datasets = load_datasets(recipe)
    plan = plan_batches(recipe, datasets["train"])
    check_finished(start, recipe, total_steps(recipe.train, plan))
    progress.stage("building the model")
    model = build_model(recipe)
    check_pipeline(recipe, plan, datasets["train"], model)
    seen = augmented(datasets["train"], recipe.task, recipe.seed, 0)
    notices = check_sums(recipe.task, model, seen, plan.lengths) if int(os.environ.get("RANK", 0)) == 0 else []
    # The process group comes last: until here every process works by itself, so a slow download times nothing out.
    progress.stage("joining the others")
    with heartbeat.waiting():
        accelerator = start_accelerator(recipe.train, recipe.track.with_, recipe.output_dir)
    heartbeat.join()
    atexit.register(leave_group)
    strategy = choose_strategy(accelerator, recipe, progress)
    progress.stage("comparing recipe and data with the others")
    commits = recipe.task.commits()
    digests = check_agreement(strategy, recipe, datasets, commits)
    start = confirm_start(strategy, recipe, start)
    # They read all of the data: the main process alone does.
    notices += [*strategy.on_main(lambda: recipe.task.notices(datasets, model)), *start.notices]
    progress.stage("preparing model and optimizer")
    strategy.prepare(model, build_optimizer(model, recipe.train))
    notices += strategy.notices()
    state, run_ids, found = load_checkpoint(strategy, start, digests, commits)
    num_steps = total_steps(recipe.train, plan)
    check_step(recipe, state, num_steps)
    if state.step == num_steps and (done := strategy.on_main(lambda: earlier_result(recipe))):
        return done
    if recipe.train.micro_batch_size == "auto":
        known = found["size"] if found == {**memory_facts(recipe, strategy), "size": found.get("size")} else None
        plan = replace(plan, micro_batch_size=known or find_micro_batch_size(strategy, plan, seen))
        how = ", found when the run began" if known else " of the longest samples fit on every process"
        notices.append(f"train.micro_batch_size=auto: {plan.micro_batch_size}{how}.")

    progress.stage("opening the output folder")
    run = open_run(recipe, accelerator, strategy, plan, datasets, state, watched.enter_context(StopRequest()))
    heartbeat.leave_sigterm()
    if strategy.is_main:
        heartbeat.closers.append(run.tracker.abandon)
        watched.callback(run.checkpointer.wait)  # before the folder is given back
    if state.step and (best := strategy.on_main(lambda: best_of_folder(recipe, state, start))):
        state.best_step, state.best = best
    elif state.step:
        state.forget_best()
    run.facts = {"commits": commits}
    strategy.on_main(lambda: open_folder(run, start, run_ids))
    size = plan.micro_batch_size if recipe.train.micro_batch_size == "auto" else None
    found = {**memory_facts(recipe, strategy), "size": size}
    run.facts |= {"digests": digests, "run_ids": strategy.on_main(run.tracker.run_ids), "micro_batch_size": found}
    if strategy.is_main:
        print_start(run, accelerator.device, [*notices, *([going_on(run, start)] if state.step else [])])
    result = train_and_save(run)
    if strategy.is_main:
        held.callback(run.tracker.close)  # after all is saved: an upload may fail
    return result


def choose_strategy(accelerator: Accelerator, recipe: Recipe, progress: Progress) -> Strategy:
    """Return the strategy that the recipe or the launcher's configuration asks for."""
    if recipe.parallel.pipeline_stages > 1:
        from hftune.strategies.pipeline import Pipeline

        return Pipeline(accelerator, recipe.task, recipe.parallel, progress)
    if accelerator.distributed_type == DistributedType.FSDP:
        from hftune.strategies.fully_sharded import FullySharded  # with its imports, a second that others need not wait

        return FullySharded(accelerator, recipe.task, progress)
    return DataParallel(accelerator, recipe.task, progress)


def check_pipeline(recipe: Recipe, plan: BatchPlan, dataset: Any, model: nn.Module) -> None:
    """Refuse a pipeline that this model or these batches cannot be computed in.

    Raises:
        ConfigError: the model cannot be cut; or a step has fewer micro-batches than the schedule needs.
    """
    config, task = recipe.parallel, recipe.task
    if config.pipeline_stages == 1:
        return
    num_replicas = int(os.environ.get("WORLD_SIZE", 1)) // config.pipeline_stages
    check_micro_batches(config, plan, num_replicas)
    shortest = 0 if plan.lengths is None else int(np.argmin(plan.lengths))
    example = augmented(dataset, task, recipe.seed, 0)[shortest]
    check_stages(model, config.num_stages, config.split, task.inputs(task.collate([example])))


def check_micro_batches(config: ParallelConfig, plan: BatchPlan, num_replicas: int) -> None:
    """Refuse whole batches that are cut into too few micro-batches for the schedule, or raise ConfigError."""
    needed, found = config.fill_up(1), len(plan.epoch(0)[0])
    if plan.num_samples >= plan.batch_size and found < needed * num_replicas:
        pipelines = f" for each of {num_replicas} pipelines" if num_replicas > 1 else ""
        raise ConfigError(
            f"parallel.schedule={config.schedule} with parallel.pipeline_stages={config.pipeline_stages} needs at least "
            f"{needed} micro-batches in a step{pipelines}, {needed * num_replicas} in all; a step of "
            f"train.batch_size={plan.batch_size} has {found}. Lower train.micro_batch_size or train.micro_batch_tokens, or "
            "raise train.batch_size."
        )


def claim_folder(recipe: Recipe, held: ExitStack) -> Start:
    """On the main process: hold the output folder against other runs, and find where this one begins.

    Raises:
        ConfigError: another run holds the folder, or a checkpoint in it cannot go on with this recipe.
    """
    if not sys.stderr.isatty():
        hide_progress_bars()
    if int(os.environ.get("RANK", 0)) != 0:
        return Start()
    held.enter_context(only_writer(Path(recipe.output_dir)))
    return find_start(recipe)


def confirm_start(strategy: Strategy, recipe: Recipe, start: Start) -> Start:
    """Look again where the run begins, now that all processes are known: one of another machine may know it is a restart.

    Collective; the result is the main process's.

    Raises:
        ConfigError: as ``find_start``.
    """
    group = strategy.gather_to_main(member())
    found = replace(start, group=group or ())

    def look() -> None:
        nonlocal found
        if recipe.resume == "never" and start.checkpoint is None:
            found = find_start(recipe, group)

    strategy.on_main(look)
    return found


def open_run(
    recipe: Recipe,
    accelerator: Accelerator,
    strategy: Strategy,
    plan: BatchPlan,
    datasets: Mapping[str, Any],
    state: TrainState,
    stop: StopRequest,
) -> Run:
    """Put together what the loop works with; nothing is written yet."""
    output_dir, num_steps = Path(recipe.output_dir), total_steps(recipe.train, plan)
    return Run(
        recipe,
        strategy,
        plan,
        datasets,
        num_steps,
        tracker=Tracker(accelerator, recipe),
        console=Console(strategy.is_main, num_steps, state.step),
        ledger=Ledger(output_dir / "ledger.jsonl"),
        checkpointer=Checkpointer(output_dir / "checkpoints", recipe.checkpoint.keep, last=state.step or None),
        stop=stop,
        state=state,
    )


def train_and_save(run: Run) -> TrainResult:
    """Train to the end, and write what came out. Collective.

    Raises:
        Interrupted: a signal asked to stop; the message says how to go on.
    """
    strategy, progress = run.strategy, run.strategy.progress
    hide_progress_bars()  # downloads are over; there would be one for each export
    progress.stage("the first gradient, a rehearsal")
    recipe = run.recipe
    how = recipe.train.batch_norm
    seen = augmented(run.datasets["train"], recipe.task, recipe.seed, 0)
    kinds = strategy.rehearse(seen, run.plan.epoch(0)[0][0], frozen=how == "frozen")
    if said := statistics.notice(kinds, how, recipe.train.micro_batch_size):
        run.console.line(said)
    try:
        fit(run)
        result = finish(run)
    except Interrupted as error:
        strategy.on_main(run.checkpointer.wait)
        raise Interrupted(f"{error} {how_to_go_on(run)}") from None
    finally:
        run.console.close()
    if strategy.is_main:
        print_summary(run, result)
    return result


def find_micro_batch_size(strategy: Strategy, plan: BatchPlan, dataset: Any) -> int:
    """Halve the size until the longest samples fit on all processes; begin with a process's share of the global batch.

    accelerate's find_executable_batch_size does the same for one process: the others would not hear of its failures.

    Raises:
        ConfigError: not even one sample fits.
    """
    size = largest_micro_batch_size(plan, strategy.num_processes)
    while not strategy.fits(dataset, plan.longest(size)):
        if size == 1:
            raise ConfigError(
                "train.micro_batch_size=auto: not even the longest sample alone fits into memory. Lower the task's maximum "
                "length, or set train.gradient_checkpointing=true or train.mixed_precision=bf16."
            )
        size = -(-size // 2)
    return size


def memory_facts(recipe: Recipe, strategy: Strategy) -> dict[str, Any]:
    """Return what decides how many samples fit, as far as it may change when a run is resumed. Collective."""
    keys = ("mixed_precision", "gradient_checkpointing", "compile", "deterministic", "batch_norm", "micro_batch_tokens")
    device = strategy.device.type
    if device == "cuda":
        properties = torch.cuda.get_device_properties(strategy.device)
        device = f"{properties.name} with {properties.total_memory} bytes"
    where = {"processes": strategy.num_processes, "device": strategy.broadcast(device)}
    return where | {key: getattr(recipe.train, key) for key in keys}


def largest_micro_batch_size(plan: BatchPlan, num_processes: int) -> int:
    """Return a process's share of the global batch, or fewer where ``train.micro_batch_tokens`` bounds the longest samples."""
    share = -(-plan.batch_size // num_processes)
    return share if plan.micro_batch_tokens is None else min(share, max(1, plan.micro_batch_tokens // plan.most_padded))


def load_checkpoint(
    strategy: Strategy, start: Start, digests: Mapping[str, str], commits: Mapping[str, str]
) -> tuple[TrainState, dict[str, str], dict[str, Any]]:
    """Take over model, optimizer and state where training goes on. Collective.

    Returns:
        The state, the dashboards' run ids, and the micro-batch size that was found to fit, with its ``memory_facts``.

    Raises:
        ConfigError: the checkpoint is of other commits of the Hub, of other data or of another model.
    """
    checkpoint = start.checkpoint
    progress, path, changed = strategy.broadcast(
        (checkpoint.progress, str(checkpoint.path), [*start.changed]) if checkpoint else (None, "", [])
    )
    if progress is None:
        return TrainState(), {}, {}
    check_commits(path, progress.get("commits", {}), commits)
    if not all(digest.startswith(DIGEST) for digest in progress["digests"].values()):
        raise ConfigError(
            f"{path} is from an older hftune, which noted too little of its data to tell whether these are the same. Finish it "
            "with that version, or start anew with resume=never."
        )
    if other := [name for name, digest in progress["digests"].items() if digests.get(name) != digest]:
        raise ConfigError(f"{path} was trained on another {' and another '.join(other)}. resume=never starts anew.")
    try:
        strategy.load_state((checkpoint.tensors, progress["values"]) if checkpoint else None)
    except ValueError as error:
        raise ConfigError(f"{path} is of another model: {error}.") from error
    if checkpoint:
        checkpoint.tensors.clear()  # they are as large as model and optimizer
    state = read_state(path, progress["state"])
    declares = strategy.task.metric_directions is not None  # then only the metric decides what the best one is
    if "eval.metric" in changed or ("eval.greater_is_better" in changed and not declares):
        state.forget_best()
    return state, progress["run_ids"], progress["micro_batch_size"]


def read_state(path: str, values: Mapping[str, Any]) -> TrainState:
    """Return the loop's state as a checkpoint holds it.

    Raises:
        ConfigError: a different version of hftune wrote it, whose state has other fields.
    """
    known = {item.name for item in fields(TrainState)}
    if odd := sorted(values.keys() ^ known):
        raise ConfigError(
            f"{path} was written by a different version of hftune: its state differs in {', '.join(odd)}. Resume with that "
            "version; or start anew with resume=never or a different output_dir."
        )
    return TrainState(**values)


def check_commits(path: str, before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Refuse to resume with other commits of the Hub than the checkpoint's, or raise ConfigError; older ones name none."""
    for key, commit in before.items():
        if now.get(key, commit) != commit:
            raise ConfigError(
                f"{path} was trained with commit {commit} of {key}, and commit {now[key]} was loaded now: the repository has "
                f"changed on the Hub. {key}_revision={commit} resumes with the old one; resume=never starts anew."
            )


def check_step(recipe: Recipe, state: TrainState, num_steps: int) -> None:
    """Refuse to go on from beyond the end, or raise ConfigError."""
    if state.step > num_steps:
        raise ConfigError(
            f"The checkpoint is of step {state.step}, and train.epochs={recipe.train.epochs} with "
            f"train.max_steps={format_value(recipe.train.max_steps)} ends after step {num_steps}. Raise them, "
            "or set resume=never."
        )


def earlier_result(recipe: Recipe) -> TrainResult | None:
    """Return what a run that is done came to, and say that it is; None where its result was never written."""
    output_dir = Path(recipe.output_dir)
    if not (output_dir / "result.json").is_file() or not (output_dir / "model").is_dir():
        return None
    result = TrainResult.read(output_dir)
    limit = "train.epochs" if recipe.train.max_steps is None else "train.max_steps or train.epochs, whichever ends it"
    print(
        f"{output_dir} is finished: {result.steps} steps, {result.best['metric']} {short(result.best['value'])}. "
        f"Nothing was trained. To train on, raise {limit}; to train anew, set resume=never or another output_dir.",
        flush=True,
    )
    return result


def best_of_folder(recipe: Recipe, state: TrainState, start: Start) -> tuple[int, float] | None:
    """Return step and score of the best model so far, which the output folder holds; None where it does not. Main process only.

    It does not where the checkpoint comes from another folder. Where the model was written after the checkpoint and before a
    kill, it is better than what the checkpoint knows of; unless training goes on in a way that would not have led to it.
    """
    output_dir = Path(recipe.output_dir)
    restore_export(output_dir / "model")
    about = read_about(output_dir / "model")
    if not about or about["metric"] != recipe.eval.metric:
        return None
    found = about["step"], about["value"]
    if found == (state.best_step, state.best):
        return found
    is_ours = start.checkpoint.path.resolve().parents[1] == output_dir.resolve() and not leads_elsewhere(start)
    return found if is_ours and about["step"] > state.step else None


def open_folder(run: Run, start: Start, run_ids: Mapping[str, str]) -> None:
    """Bring the output folder to where training begins or goes on. Main process only."""
    recipe, state, output_dir = run.recipe, run.state, Path(run.recipe.output_dir)
    if state.step == 0:
        start_folder(recipe)
    elif (origin := start.checkpoint.path.resolve().parents[1]) != output_dir.resolve():
        for name in ("metrics.jsonl", "ledger.jsonl"):  # the history that goes on here
            if (origin / name).is_file():
                shutil.copyfile(origin / name, output_dir / name)
    (output_dir / "result.json").unlink(missing_ok=True)
    note_begun(output_dir, start.group)
    write_text(output_dir / "recipe.yaml", recipe.to_yaml())
    run.tracker.start(recipe, state.step, state.evaluated_step == state.step, run_ids, run.facts["commits"])
    run.ledger.begin(state.step, run.plan, run.strategy.num_processes)


def going_on(run: Run, start: Start) -> str:
    """Say where training goes on."""
    epoch = run.state.progress(run.plan.num_steps)
    return f"Going on after step {run.state.step} of {run.num_steps} (epoch {epoch:.2f}), from {start.checkpoint.path}."


def how_to_go_on(run: Run) -> str:
    """Say what was saved and how to continue."""
    checkpointer = run.checkpointer
    if checkpointer.failure is not None:
        return f"Its checkpoint could not be written: {checkpointer.failure}. resume=auto goes on from an earlier one."
    how = "The same command" if run.recipe.resume == "auto" else "resume=auto"
    return f"{how} goes on from {path_of(checkpointer.folder, run.state.step)}."


def load_datasets(recipe: Recipe) -> Mapping[str, Any]:
    """Prepare the data, one process after another: they wait on a file lock, not in a collective, and find a warm cache."""
    task = recipe.task

    def say_waiting() -> None:
        if int(os.environ.get("LOCAL_RANK", 0)) == 0:
            print("Another process prepares the same data; waiting for it.", flush=True)

    with one_at_a_time([type(task).__qualname__, asdict(task)], say_waiting):
        datasets = task.datasets()
    for part in ("train", "eval", *({"test"} & datasets.keys())):
        if part not in datasets or len(datasets[part]) == 0:
            raise DataError(f"{type(task).__name__}.datasets() returned no samples for {part!r}.")
    return datasets


def plan_batches(recipe: Recipe, dataset: Any) -> BatchPlan:
    """Plan the training batches; the same on every process.

    Raises:
        ConfigError: ``train.micro_batch_tokens`` cannot hold the longest sample, or the samples have no lengths.
    """
    config = recipe.train
    return BatchPlan(
        num_samples=len(dataset),
        batch_size=config.batch_size,
        micro_batch_size=config.max_rows,
        micro_batch_tokens=config.micro_batch_tokens,
        lengths=recipe.task.lengths(dataset),
        sizes=recipe.task.sizes(dataset),
        padded_length=recipe.task.padded_length,
        seed=recipe.seed,
    )


def build_model(recipe: Recipe) -> nn.Module:
    """Build the task's model with the same drawn weights on every process.

    Raises:
        ConfigError: gradient checkpointing is asked of a model that has none.
    """
    torch.manual_seed(recipe.seed)
    model = recipe.task.build_model()
    if recipe.train.gradient_checkpointing:
        if not getattr(model, "supports_gradient_checkpointing", False):
            raise ConfigError(f"train.gradient_checkpointing=true: {type(model).__name__} does not support it.")
        model.activation_checkpointing_enable({"use_reentrant": False})
    if recipe.train.compile:
        model.compile(dynamic=True)
    return model


def check_agreement(
    strategy: Strategy, recipe: Recipe, datasets: Mapping[str, Any], commits: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Make sure that all processes run the same code and recipe on the same data; return the digests of the data.

    Raises:
        ConfigError: on all processes, naming those that differ from the main one, their machine, and in what.
    """
    parts = [part for part in ("train", "eval", "test") if part in datasets]
    digests = {f"{part} data": data_digest(recipe.task, datasets[part]) for part in parts}
    check_facts(strategy, facts(recipe) | {"data": digests, "commits": dict(commits or {})})
    return digests


def check_facts(strategy: Strategy, own: Mapping[str, Any]) -> None:
    """Compare each process's facts with the main one's, or raise ConfigError. Collective."""
    main = strategy.broadcast(own)
    different = [(own, strategy.process_index)] if differences(own, main) else []
    others = strategy.broadcast(strategy.gather_to_main(different))
    if others:
        first = {name: value for name, value in others[0][0].items() if name != "pid"}
        ranks = [rank for other, rank in others if first.items() <= other.items()]
        raise ConfigError(disagreement(ranks, first, main))


def data_digest(task: Task, dataset: Any) -> str:
    """Hash all that the data set holds, the samples' lengths, and eight samples spread over it as the model would see them."""
    digest, count = sha256(content_digest(dataset).encode()), len(dataset)
    if (lengths := task.lengths(dataset)) is not None:
        digest.update(lengths.tobytes())
    batch = task.collate([dataset[place] for place in sorted({place * (count - 1) // 7 for place in range(8)})])
    digest.update(pickle.dumps({name: value.tolist() for name, value in batch.items()}))
    return f"{DIGEST}{digest.hexdigest()}"


def start_folder(recipe: Recipe) -> None:
    """Take an earlier run out of the output folder; its model, too, which would be taken for the new recipe's."""
    output_dir = Path(recipe.output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    if (output_dir / "result.json").exists() or steps(output_dir / "checkpoints"):
        print(f"{output_dir} holds an earlier run; this one replaces it.", flush=True)
    for name in ("model", "model_last"):
        restore_export(output_dir / name)  # a kill may have left it under its other name
    for name in (
        "model",
        "model_last",
        "tensorboard",
        "checkpoints",
        SAMPLES,
    ):  # tensorboard would draw both runs into one plot
        shutil.rmtree(output_dir / name, ignore_errors=True)
    for name in ("result.json", "predictions.jsonl", "metrics.jsonl", "ledger.jsonl"):
        (output_dir / name).unlink(missing_ok=True)


def finish(run: Run) -> TrainResult:
    """Export the last model, score the best one on the test part, and write result.json. Collective.

    Raises:
        Interrupted: a signal asked to stop during the test; all but its scores and result.json is saved.
        TrainingError: the last checkpoint could not be written; everything else is saved.
    """
    recipe, strategy, output_dir = run.recipe, run.strategy, Path(run.recipe.output_dir)
    strategy.progress.stage("the saving of the last model")
    model = strategy.unwrap()
    strategy.on_main(lambda: export(recipe.task, model, output_dir / "model_last"))
    test = test_best(run) if "test" in run.datasets else {}
    result = TrainResult(
        metrics=run.state.metrics,
        test=test,
        best={"metric": recipe.eval.metric, "value": run.state.best, "step": run.state.best_step},
        commits=run.facts["commits"],
        steps=run.state.step,
        seconds=round(run.seconds(), 3),
        world_size=strategy.num_processes,
        versions=versions(),
        output_dir=output_dir,
        model_dir=output_dir / "model",
    )

    def save() -> None:
        values = {key: value for key, value in asdict(result).items() if not isinstance(value, Path)}
        run.checkpointer.wait()
        run.ledger.close()
        with named_where_it_fails(output_dir / "result.json"):
            write_text(output_dir / "result.json", strict_json(values, indent=2) + "\n")
        if run.checkpointer.failure is not None:
            raise TrainingError(f"All is saved but the last checkpoint: {run.checkpointer.failure}.")

    strategy.on_main(save)
    return result


def test_best(run: Run) -> dict[str, Any]:
    """Score the best model on the test part, and log its metrics. Collective; the model in training becomes the best one.

    Raises:
        Interrupted: a signal asked to stop. Nothing is written: the checkpoint of the last step is what to go on from.
    """
    recipe, strategy = run.recipe, run.strategy
    strategy.progress.stage("the evaluation on the test part")
    tensors: dict[str, torch.Tensor] = {}

    def read_best_model() -> None:
        best = recipe.task.load(Path(recipe.output_dir) / "model")
        tensors.update(checkpoint_tensors(best, build_optimizer(best, recipe.train))["model"])

    strategy.on_main(read_best_model)
    strategy.load_state(({"model": tensors, "optimizer": {}}, {}) if strategy.is_main else None)
    config, workers = recipe.eval, recipe.train.num_workers
    found = evaluate(strategy, run.datasets["test"], config.batch_size, workers, lambda: bool(run.stop))
    if found is None:
        raise Interrupted(f"{run.stop.name or 'Another process was asked to stop'}: stopped in the test of the best model.")
    log(run, {f"test/{name}": value for name, value in found.metrics.items()})
    return found.metrics


def versions() -> dict[str, str]:
    """Versions of what the result depends on."""
    packages = ("torch", "accelerate", "transformers", "datasets")
    return {"hftune": __version__, "python": platform.python_version(), **{name: version(name) for name in packages}}


def print_start(run: Run, device: torch.device, notices: list[str]) -> None:
    """One line that says what is about to happen, and how; then notices, one a line."""
    recipe, plan, config = run.recipe, run.plan, run.recipe.train
    count = run.strategy.num_processes
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    bounds = [f"{plan.micro_batch_size} samples"] if plan.micro_batch_size else []
    bounds += [f"{config.micro_batch_tokens} tokens"] if config.micro_batch_tokens else []
    print(
        f"hftune {__version__}  {recipe.recipe}  {count} process{'es' if count > 1 else ''} on {name}  "
        f"global batch {config.batch_size} in micro-batches of at most {' and '.join(bounds)}  "
        f"precision {config.mixed_precision}  {plan.num_samples:,} samples",
        *notices,
        sep="\n",
        flush=True,
    )


def print_summary(run: Run, result: TrainResult) -> None:
    """A short table: what came out, how fast, and where it lies."""
    rows = {name: short(value) for name, value in result.metrics.items() if is_number(value)}
    rows |= {f"test {name}": short(value) for name, value in result.test.items() if is_number(value)}
    best, processes = result.best, f"{result.world_size} process{'es' if result.world_size > 1 else ''}"
    rows |= {
        "best": f"{best['metric']} {short(best['value'])} at step {best['step']}",
        "steps": f"{result.steps} in {result.seconds:.0f} s on {processes}",
        "speed": f"{run.speed.total_samples / max(run.speed.total_seconds, 1e-9):,.0f} samples/s in training",
        "model": f"{result.model_dir} (the last one: model_last)",
        "log": f"{result.output_dir / 'metrics.jsonl'}",
    }
    print(table(rows), flush=True)

"""``train(recipe)``: the one door for command line, Spark and notebook alike. Builds, wires, runs, saves.

Not ``train.py``: a module and a function cannot share the name ``hftune.train``; whichever is imported last would win.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import pickle
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, DistributedType, GradScalerKwargs, InitProcessGroupKwargs
from accelerate.state import AcceleratorState
from accelerate.utils import GradientAccumulationPlugin, ProjectConfiguration, TorchDynamoPlugin
from accelerate.utils.environment import parse_flag_from_env
from torch import nn

from hftune import __version__
from hftune.batch_plan import BatchPlan
from hftune.checkpoint import export, restore_export, write_text
from hftune.config import Recipe
from hftune.console import Console, hide_progress_bars, is_number, short, table
from hftune.data.cache import one_at_a_time
from hftune.errors import ConfigError, DataError
from hftune.heartbeat import Heartbeat
from hftune.loop import Run, fit, total_steps
from hftune.optim import build_optimizer
from hftune.progress import Progress
from hftune.rendezvous import init_method
from hftune.strategies.base import Strategy
from hftune.strategies.data_parallel import DataParallel
from hftune.task import Task
from hftune.tracking import Tracker, check_trackers


@dataclass
class TrainResult:
    """What a run came to: result.json, and the folders. The same on every process, but for ``seconds``."""

    metrics: dict[str, Any]
    """The last evaluation's."""
    best: dict[str, Any]
    """metric, value and step of the model in model_dir."""
    steps: int
    seconds: float
    """From the opening of the output folder to the end of training, evaluations included."""
    world_size: int
    versions: dict[str, str]
    output_dir: Path
    model_dir: Path
    """The best model by ``eval.metric``; the last one lies beside it in model_last."""


def train(recipe: Recipe) -> TrainResult:
    """Train a recipe on the processes there are. Every process of the job calls it with the same recipe.

    Raises:
        ConfigError: the recipe cannot be run, here or at all; found before a model is loaded where that can be.
        DataError: the data cannot be trained on.
        TrainingError: a loss that is not finite, or a file that could not be written; an ElsewhereError where another
            process failed. A process that cannot raise it, because it waits for the failed one, ends with exit code 1.
    """
    recipe.check()
    progress = Progress()
    with Heartbeat(progress, recipe.train.dead_after_s, recipe.train.stall_after_s) as heartbeat:
        return run_recipe(recipe, progress, heartbeat)


def run_recipe(recipe: Recipe, progress: Progress, heartbeat: Heartbeat) -> TrainResult:
    """Build, wire, run and save."""
    progress.at("preparing the data")
    check_machine(recipe)
    if not sys.stderr.isatty():
        hide_progress_bars()
    datasets = load_datasets(recipe)
    plan = plan_batches(recipe, datasets["train"])
    progress.at("building the model")
    model = build_model(recipe)
    hide_progress_bars()  # downloads are over; there would be one for each export
    # The process group comes last: until here every process works by itself, so a slow download times nothing out.
    progress.at("joining the others")
    accelerator = start_accelerator(recipe)
    heartbeat.join()
    progress.at("comparing recipe and data with the others")
    strategy = DataParallel(accelerator, recipe.task, progress)
    check_agreement(strategy, recipe, datasets)
    remarks = recipe.task.remarks(datasets, model)
    progress.at("preparing model and optimizer")
    strategy.prepare(model, build_optimizer(model, recipe.train))

    started = time.monotonic()
    progress.at("opening the output folder")
    strategy.on_main(lambda: start_folder(recipe))
    if strategy.is_main:
        print_start(recipe, accelerator, plan, remarks)
    num_steps = total_steps(recipe.train, plan)
    console, tracker = Console(strategy.is_main, num_steps), Tracker(accelerator, recipe)
    strategy.on_main(lambda: tracker.start(recipe))
    if strategy.is_main:
        heartbeat.closers.append(tracker.abandon)
    run = Run(recipe, strategy, plan, datasets, num_steps, tracker, console)
    try:
        metrics = fit(run)
    finally:
        console.close()
    progress.at("the saving of the last model")
    result = finish(run, metrics, time.monotonic() - started)
    progress.at("the closing of the dashboards")
    strategy.on_main(tracker.close)  # after all is saved: an upload may fail
    if strategy.is_main:
        print_summary(run, result)
    atexit.register(leave_group)
    return result


def check_machine(recipe: Recipe) -> None:
    """Refuse what this machine cannot do, before anything is loaded.

    Raises:
        ConfigError: fp16 without a GPU, bf16 on a GPU without it, no dashboard, an output folder that cannot be written.
    """
    precision = recipe.train.mixed_precision
    if precision == "fp16" and on_cpu():
        raise ConfigError("train.mixed_precision=fp16 needs a GPU, and this runs on CPUs. Use bf16 or no.")
    on_cuda = torch.cuda.is_available() and not on_cpu()
    if precision == "bf16" and on_cuda and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise ConfigError(f"train.mixed_precision=bf16 is not supported by {torch.cuda.get_device_name()}. Use fp16 or no.")
    if int(os.environ.get("RANK", 0)) == 0:  # the main process alone writes, and talks to dashboards
        check_trackers(recipe)
        check_writable(Path(recipe.output_dir))


def on_cpu() -> bool:
    """Say whether to compute on the CPU: no GPU is there, or the launcher was told not to use it."""
    return parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()


def check_writable(folder: Path) -> None:
    """Try to write in the output folder, or raise ConfigError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"output_dir={folder} cannot be written: {error.strerror}. Set output_dir=... to another.") from error


def load_datasets(recipe: Recipe) -> Mapping[str, Any]:
    """Prepare the data, one process after another: they wait on a file lock, not in a collective, and find a warm cache."""
    task = recipe.task

    def say_waiting() -> None:
        if int(os.environ.get("LOCAL_RANK", 0)) == 0:
            print("Another process prepares the same data; waiting for it.", flush=True)

    with one_at_a_time([type(task).__qualname__, asdict(task)], say_waiting):
        datasets = task.datasets()
    for part in ("train", "eval"):
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


def start_accelerator(recipe: Recipe) -> Accelerator:
    """Join the other processes of the job.

    Raises:
        ConfigError: another number of processes joined than the launcher announced, or it asks for FSDP or DeepSpeed.
    """
    AcceleratorState._reset_state()  # a notebook may train twice, with another precision
    expected = int(os.environ.get("WORLD_SIZE", 1))
    accelerator = Accelerator(
        cpu=on_cpu(),
        mixed_precision=recipe.train.mixed_precision,
        log_with=recipe.track.with_ or None,
        project_config=ProjectConfiguration(recipe.output_dir, logging_dir=str(Path(recipe.output_dir) / "tensorboard")),
        kwargs_handlers=[
            DistributedDataParallelKwargs(gradient_as_bucket_view=True),
            # The backward multiplies by the number of processes (see DataParallel): fp16 overflows at the same loss on all.
            GradScalerKwargs(init_scale=2.0**16 / expected),
            # One machine may still download what another has. The default, 10 minutes under NCCL, is short for that.
            InitProcessGroupKwargs(init_method=init_method(), timeout=timedelta(hours=1)),
        ],
        # The recipe decides these two. Left out, an environment variable of the launcher would.
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        dynamo_plugin=TorchDynamoPlugin(backend="no"),
        step_scheduler_with_optimizer=False,
    )
    if accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        raise ConfigError(
            f"The launcher asks for {accelerator.distributed_type.value}, which hftune does not have. "
            "Use a config of accelerate_configs/, with distributed_type MULTI_GPU."
        )
    if accelerator.num_processes != expected:
        raise ConfigError(
            f"The launcher announced {expected} processes, but {accelerator.num_processes} joined. On machines without "
            "GPUs start them with accelerate_configs/2cpu.yaml or torchrun."
        )
    return accelerator


def check_agreement(strategy: Strategy, recipe: Recipe, datasets: Mapping[str, Any]) -> None:
    """Make sure that all processes were given the same recipe and found the same data.

    Raises:
        ConfigError: naming the processes that differ from the main one.
    """
    own = {"recipe": sha256(recipe.to_yaml().encode()).hexdigest()}
    own |= {f"{part} data": data_digest(recipe.task, datasets[part]) for part in ("train", "eval")}
    gathered = strategy.broadcast(strategy.gather_to_main([own]))
    for what, expected in gathered[0].items():
        different = [str(rank) for rank, other in enumerate(gathered) if other[what] != expected]
        if different:
            raise ConfigError(
                f"Process {', '.join(different)} has another {what} than process 0. All have to be started with the same."
            )


def data_digest(task: Task, dataset: Any) -> str:
    """Hash the number of samples, their lengths, and eight samples spread over them as the model would see them."""
    digest, count = sha256(str(len(dataset)).encode()), len(dataset)
    if (lengths := task.lengths(dataset)) is not None:
        digest.update(lengths.tobytes())
    batch = task.collate([dataset[place] for place in sorted({place * (count - 1) // 7 for place in range(8)})])
    digest.update(pickle.dumps({name: value.tolist() for name, value in batch.items()}))
    return digest.hexdigest()


def start_folder(recipe: Recipe) -> None:
    """Put the recipe into the output folder and an earlier run's results out; its model stays until there is a new one."""
    output_dir = Path(recipe.output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    for name in ("model", "model_last"):
        restore_export(output_dir / name)
    if (output_dir / "result.json").exists():
        print(f"{output_dir} holds an earlier run; this one replaces it.", flush=True)
    for name in ("result.json", "predictions.jsonl", "metrics.jsonl"):
        (output_dir / name).unlink(missing_ok=True)
    shutil.rmtree(output_dir / "tensorboard", ignore_errors=True)  # it would draw both runs into one plot
    write_text(output_dir / "recipe.yaml", recipe.to_yaml())


def finish(run: Run, metrics: dict[str, Any], seconds: float) -> TrainResult:
    """Export the last model and write result.json. Collective."""
    recipe, output_dir = run.recipe, Path(run.recipe.output_dir)
    result = TrainResult(
        metrics=metrics,
        best={"metric": recipe.eval.metric, "value": run.state.best, "step": run.state.best_step},
        steps=run.state.step,
        seconds=round(seconds, 3),
        world_size=run.strategy.num_processes,
        versions=versions(),
        output_dir=output_dir,
        model_dir=output_dir / "model",
    )
    model = run.strategy.unwrap()

    def save() -> None:
        export(recipe.task, model, output_dir / "model_last")
        values = {key: value for key, value in asdict(result).items() if not isinstance(value, Path)}
        write_text(output_dir / "result.json", json.dumps(values, indent=2) + "\n")

    run.strategy.on_main(save)
    return result


def leave_group() -> None:
    """Close the process group at the interpreter's end: Gloo may abort, and NCCL complains, where it is left open.

    Not at the end of ``train``, which may be called again.
    """
    gc.collect()  # DDP's reducers, in cycles with their modules, hold the group, too
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def versions() -> dict[str, str]:
    """Versions of what the result depends on."""
    packages = ("torch", "accelerate", "transformers", "datasets")
    return {"hftune": __version__, "python": platform.python_version(), **{name: version(name) for name in packages}}


def print_start(recipe: Recipe, accelerator: Accelerator, plan: BatchPlan, remarks: list[str]) -> None:
    """One line that says what is about to happen, and how; then the task's remarks, one a line."""
    config, device = recipe.train, accelerator.device
    count = accelerator.num_processes
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    bounds = [f"{config.max_rows} samples"] if config.max_rows else []
    bounds += [f"{config.micro_batch_tokens} tokens"] if config.micro_batch_tokens else []
    print(
        f"hftune {__version__}  {recipe.recipe}  {count} process{'es' if count > 1 else ''} on {name}  "
        f"global batch {config.batch_size} in micro-batches of at most {' and '.join(bounds)}  "
        f"precision {config.mixed_precision}  {plan.num_samples:,} samples",
        *remarks,
        sep="\n",
        flush=True,
    )


def print_summary(run: Run, result: TrainResult) -> None:
    """A short table: what came out, how fast, and where it lies."""
    rows = {name: short(value) for name, value in result.metrics.items() if is_number(value)}
    best, processes = result.best, f"{result.world_size} process{'es' if result.world_size > 1 else ''}"
    rows |= {
        "best": f"{best['metric']} {short(best['value'])} at step {best['step']}",
        "steps": f"{result.steps} in {result.seconds:.0f} s on {processes}",
        "speed": f"{run.speed.total_samples / run.speed.total_seconds:,.0f} samples/s in training",
        "model": f"{result.model_dir} (the last one: model_last)",
        "log": f"{result.output_dir / 'metrics.jsonl'}",
    }
    print(table(rows), flush=True)

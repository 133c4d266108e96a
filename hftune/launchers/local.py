"""``launch(recipe, num_processes=2)``: train on several processes of this machine, from a program or a notebook cell.

The processes are forks of a new interpreter that has done nothing but import libraries (forks.py): nothing is forked after CUDA
was initialized, nothing is pickled, and a process that crashes does not take the notebook with it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import psutil

from hftune.config.recipe import Recipe, type_name
from hftune.distributed.failure_report import Report, exit_code, with_report
from hftune.distributed.process_info import ProcessInfo
from hftune.distributed.signals import STARTED_BY, handling
from hftune.errors import ConfigError, DataError, Interrupted, TrainingError
from hftune.launchers.forks import Wanted, how_it_ended
from hftune.tracking.console import is_terminal
from hftune.tracking.facts import COMMAND, command

if TYPE_CHECKING:
    from hftune.checkpoints.output_dir import TrainResult

KINDS = {kind.__name__: kind for kind in (ConfigError, DataError, TrainingError, Interrupted, KeyboardInterrupt)}


def launch(recipe: Recipe, num_processes: int | tuple[int, int] | None = None) -> TrainResult:
    """Train a recipe on ``num_processes`` processes of this machine and wait for the end. Shows what they print.

    None means one per GPU, or one process without GPUs. ``(least, most)`` starts as many as there are GPUs, at most ``most``
    (without GPUs ``most``), and replaces those that are killed or lose their GPU. SIGTERM and Ctrl-C (interrupting the cell)
    finish the step and write a checkpoint, from which the same call resumes; a second Ctrl-C ends all processes at once.

    Raises:
        ConfigError, DataError, TrainingError, Interrupted: as ``train``, with the message of the process that failed. Any
            other exception of a task becomes a TrainingError with that process's traceback.
    """
    start_training(recipe, num_processes)
    from hftune.checkpoints.output_dir import TrainResult  # only now: it imports torch, and the processes need not wait for it

    return TrainResult.read(recipe.folder)


def start_training(recipe: Recipe, num_processes: int | tuple[int, int] | None) -> None:
    """Do what ``launch`` does, without the result: importing what reads it takes seconds."""
    recipe.validate()
    check_importable(recipe)
    count = wanted(recipe, *num_processes) if isinstance(num_processes, tuple) else count_processes(num_processes)
    with tempfile.TemporaryDirectory(prefix="hftune-launch-") as folder:
        path = Path(folder) / "recipe.yaml"
        path.write_text(recipe.to_yaml(), encoding="utf-8")
        start_processes("hftune.run", [f"recipe={path}"], count, ("hftune.training", *recipe.task.libraries))


def start_processes(program: str, words: Sequence[str], count: int | Wanted, libraries: Sequence[str]) -> None:
    """Run ``python -m program words`` as ``count`` processes of this machine that can join, and wait for the end.

    Args:
        count: if Wanted, processes that die are replaced.
        program: a module with ``main(words)``: hftune.run or hftune.cli.
        libraries: modules to import once for all of them.

    Raises:
        ConfigError, DataError, TrainingError, Interrupted: with the message of the process that failed.
    """
    with tempfile.TemporaryDirectory(prefix="hftune-launch-") as folder:
        variables = {"OMP_NUM_THREADS": "1"} | environment()  # torchrun's own default, which it announces with a banner
        if count == 1:
            launcher = ["-m", program]
            variables = environment() | {"TORCHELASTIC_ERROR_FILE": f"{folder}/error.json"}  # launchers name one for each
        elif isinstance(count, Wanted) or sys.platform == "linux":
            wanted = count if isinstance(count, Wanted) else Wanted(count, count)
            launcher = ["-m", "hftune.launchers.forks", json.dumps(asdict(wanted)), folder, ",".join(libraries), program]
        else:  # macOS, whose libraries do not survive a fork. Not --standalone, whose store listens on all networks
            meeting = ["--nnodes", "1", "--rdzv-backend", "hftune", "--rdzv-endpoint", "127.0.0.1:0"]
            several = [*meeting, "--nproc_per_node", str(count), "--log-dir", folder]
            launcher = ["-m", "hftune.launchers.quietly", "torchrun", *several, "-m", program]
        code, is_stopped = run_and_show([sys.executable, *launcher, *words], variables)
        if code != 0:
            raise failure(Path(folder), code, is_stopped)


def check_importable(recipe: Recipe) -> None:
    """Raise ConfigError if other processes cannot import the task."""
    if type(recipe.task).__module__ == "__main__":
        name = type(recipe.task).__qualname__
        raise ConfigError(
            f"task.type={type_name(type(recipe.task))} is defined in this notebook or script itself, from which other "
            f"processes cannot import it. Put it into a file, such as {name.lower()}.py, and import {name} from there."
        )


def count_processes(asked: int | None) -> int:
    """Return how many processes to start.

    Raises:
        ConfigError: there are fewer GPUs, or a launcher has already started several processes.
    """
    check_not_launched()
    if asked is not None and asked < 1:
        raise ConfigError(f"num_processes={asked} must be at least 1.")
    if asked is not None and "torch" not in sys.modules:  # importing it takes a second, and each process checks the same
        return asked
    import torch

    from hftune.distributed.accelerator import on_cpu

    num_gpus = 0 if on_cpu() else torch.accelerator.device_count()
    if asked is None:
        return max(num_gpus, 1)
    if 0 < num_gpus < asked:
        raise ConfigError(
            f"num_processes={asked} exceeds the number of this machine's GPUs, {num_gpus}: each process takes one. Lower it; "
            "train.batch_size and the result stay the same."
        )
    return asked


def wanted(recipe: Recipe, least: int, most: int) -> Wanted:
    """Return how many processes are to train this recipe, given the bounds of their number.

    Raises:
        ConfigError: see ``check_range``.
    """
    check_not_launched()
    check_range(f"num_processes=({least}, {most})", least, most, recipe.parallel.pipeline_stages)
    return Wanted(least, most, recipe.parallel.pipeline_stages, str(recipe.folder))


def check_range(given: str, least: int, most: int, stages: int) -> None:
    """Check the bounds of the number of processes.

    Args:
        given: as the user wrote them.
        stages: of the pipeline, which the number of processes must be a multiple of.

    Raises:
        ConfigError: they are out of order, or no number between them will do; or this is not Linux.
    """
    if least < 1:
        raise ConfigError(f"{given}: the least number must be at least 1.")
    if least > most:
        raise ConfigError(f"{given}: the least number exceeds the most, {most}. Write the smaller number first.")
    if most // stages * stages < least:
        raise ConfigError(f"{given} contains no multiple of parallel.pipeline_stages={stages}. Raise the most.")
    if sys.platform != "linux":
        raise ConfigError(f"{given} replaces processes that die, which works on Linux only. Give one number.")


def check_not_launched() -> None:
    """Raise ConfigError if this is one of several processes that a launcher has started."""
    if ProcessInfo.from_environment().world_size > 1:
        raise ConfigError(
            "hftune.launch starts processes itself, and this is one of several that a launcher has started: call train(recipe)."
        )


def environment() -> dict[str, str]:
    """Return the environment of the processes: whom they end with, the caller's module search path, and unbuffered output."""
    modules = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
    own = {STARTED_BY: str(os.getpid()), COMMAND: command(), "PYTHONPATH": modules}
    return {**os.environ, **own, "PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8"}


def run_and_show(command: list[str], env: dict[str, str]) -> tuple[int, bool]:
    """Run a command and print its output; return its exit code, and whether it was asked to stop.

    Forwards SIGTERM, SIGHUP and the first SIGINT; see ``handling``.

    Raises:
        KeyboardInterrupt: after a second SIGINT; all processes have been killed.
    """
    # On a terminal they write to it themselves, with a progress bar. A notebook's stream is none, and takes only what we print.
    is_theirs = is_terminal(sys.stdout) and is_terminal(sys.stderr)
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "encoding": "utf-8", "errors": "replace"}
    # A session of its own: a terminal, and Jupyter, would also send Ctrl-C to torchrun, which would then receive it twice.
    process = subprocess.Popen(command, env=env, start_new_session=True, **({} if is_theirs else pipes))
    forwarded: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and number in forwarded:
            raise KeyboardInterrupt
        forwarded.append(number)
        process.send_signal(number)

    errors = threading.Thread(target=show, args=(process.stderr or (), "stderr"), name="hftune stderr", daemon=True)
    with handling(forward):
        errors.start()
        try:
            show(process.stdout or (), "stdout")
            errors.join()
            return process.wait(), bool(forwarded)
        finally:
            if process.poll() is None:
                kill(process)
            errors.join()
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()


def kill(process: subprocess.Popen) -> None:
    """Kill a process that leads a session and all that it has started, also in sessions of their own, and wait for it."""
    children = []
    with suppress(psutil.NoSuchProcess):
        children = psutil.Process(process.pid).children(recursive=True)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for child in children:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    process.wait()


def show(lines: Iterable[str], name: str) -> None:
    """Print lines as they come. If nobody can read them any more, training continues."""
    for line in lines:
        with suppress(OSError):
            print(line, end="", file=getattr(sys, name), flush=True)


def failure(folder: Path, code: int, is_stopped: bool) -> BaseException:
    """Return the exception that the processes ended with; with a report if they have printed its message."""
    if (error := read_failure(folder)) is not None:
        return with_report(error, Report(str(error), exit_code(error), is_printed_here=False))
    if is_stopped:
        return Interrupted("Training was asked to stop, and ended before it could write a checkpoint.")
    return TrainingError(f"Training {how_it_ended(code)} without a message; see its output above.")


def read_failure(folder: Path) -> BaseException | None:
    """Return the exception of the first process to fail, from the error files in ``folder``; None if there are none."""
    messages = [json.loads(path.read_text(encoding="utf-8"))["message"] for path in folder.rglob("error.json")]
    if not messages:
        return None
    first = min(messages, key=lambda message: message["extraInfo"]["timestamp"])
    return KINDS.get(first["extraInfo"]["kind"], TrainingError)(first["message"].removeprefix("hftune: "))

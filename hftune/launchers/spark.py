"""Trains on the executors of a Spark cluster, or on the driver's machine. The entry point is hftune.spark.

pyspark's TorchDistributor starts the processes and knows nothing about training. A folder that the driver and the processes
share keeps what TorchDistributor loses: who failed and why, and who trained to the end. The result is read from the output
folder. In pyspark 4.3 a failed run may come back as a success, with the value of a different process, and an executor's
exception never comes back at all.

Executors import this module before they have the driver's environment variables, so it must not import torch by itself.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hftune.config import Recipe
from hftune.config.addresses import refuse_address
from hftune.distributed.process_info import ProcessInfo
from hftune.errors import ConfigError, TrainingError

if TYPE_CHECKING:
    from pyspark.ml.torch.distributor import TorchDistributor
    from pyspark.sql import SparkSession

    from hftune.checkpoints.output_dir import TrainResult

SLOTS_S = 30.0
"""Time for executors to start before a cluster counts as too small."""
TRAVELS = ("MLFLOW_", "DATABRICKS_", "WANDB_", "HF_", "HFTUNE_", "ACCELERATE_", "NCCL_", "GLOO_", "OMP_", "AWS_", "AZURE_")
"""Prefixes of the driver's environment variables that are passed to the processes: trackers, keys, networks.

They are sent as arguments of the Spark tasks, HF_TOKEN and AWS_SECRET_ACCESS_KEY among them: anyone who can read the cluster's
traffic or memory can read these. Remove what training does not need from the driver's environment.
"""


def launch(recipe: Recipe, num_processes: int = 2, local_mode: bool = False, use_gpu: bool = False) -> TrainResult:
    """Train a recipe on ``num_processes`` Spark tasks and wait for the end.

    Uses the active SparkSession, or creates one. ``recipe.output_dir`` must be on a file system that the driver and all
    executors share.

    Args:
        local_mode: start the processes on the driver's machine, not on executors.
        use_gpu: one GPU for each process; otherwise CPUs are used even if there are GPUs.

    Raises:
        ConfigError, DataError, TrainingError, Interrupted: as ``train``, with the message of the process that failed. Any
            other exception of a process becomes a TrainingError with its traceback, rank and host.
    """
    from hftune.launchers.local import check_importable

    recipe.validate()
    refuse_address(recipe.output_dir, "Spark")
    check_importable(recipe)
    if num_processes < 1:
        raise ConfigError(f"num_processes={num_processes} must be at least 1.")
    check_installed()
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    spark = session()
    distributor = make_distributor(num_processes, local_mode, use_gpu)
    if not local_mode:
        check_slots(spark, distributor.num_tasks)
    recipe = replace(recipe, output_dir=str(recipe.folder.resolve()))
    with shared_folder(recipe) as folder:
        modules, values, problem = [path for path in sys.path if path], environment(recipe, use_gpu), None
        try:
            distributor.run(train_here, str(folder), str(Path.cwd()), modules, values)
        except (RuntimeError, Py4JError, PySparkException) as error:  # if Spark notices that a process failed
            problem = error
        return read_result(folder, distributor, problem)


def check_installed() -> None:
    """Raise ConfigError if pyspark or Java is not installed."""
    if importlib.util.find_spec("pyspark") is None:
        raise ConfigError('hftune.spark needs a package that is not installed: pip install "hftune[spark]".')
    is_remote = "SPARK_REMOTE" in os.environ or "SPARK_CONNECT_MODE_ENABLED" in os.environ  # Java is at the other end
    home = os.environ.get("JAVA_HOME")
    if not is_remote and shutil.which("java", path=f"{home}/bin" if home else None) is None:
        where = f"JAVA_HOME={home} has none" if home else "there is none on the PATH"
        raise ConfigError(f"Spark needs Java, and {where}: install version 17 or 21, such as openjdk-17-jre-headless.")


def session(master: str | None = None) -> SparkSession:
    """Return the active SparkSession, or a new one whose executors use this Python and find its modules."""
    from pyspark.sql import SparkSession

    if (active := SparkSession.getActiveSession()) is not None:
        return active
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # Spark would take the python3 of the PATH
    modules = os.pathsep.join(path for path in sys.path if path)
    builder = SparkSession.builder.appName("hftune").config("spark.executorEnv.PYTHONPATH", modules)
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    try:
        return (builder.master(master) if master else builder).getOrCreate()
    except (PySparkException, Py4JError) as error:
        raise ConfigError(f"Spark cannot be started: {telling_line(error)}") from error


def make_distributor(num_processes: int, local_mode: bool, use_gpu: bool) -> TorchDistributor:
    """Create the distributor that starts the processes.

    Raises:
        ConfigError: the cluster has no GPUs for tasks, or fewer GPUs than processes: TorchDistributor would only warn.
    """
    from pyspark.ml.torch.distributor import TorchDistributor

    try:
        distributor = TorchDistributor(num_processes=num_processes, local_mode=local_mode, use_gpu=use_gpu)
    except RuntimeError as error:
        raise ConfigError(f"use_gpu={use_gpu}: {error}") from error
    if distributor.num_processes != num_processes:
        raise ConfigError(
            f"num_processes={num_processes} exceeds the number of the driver's GPUs, {distributor.num_processes}. Lower it; "
            "train.batch_size and the result stay the same."
        )
    return distributor


def check_slots(spark: SparkSession, num_tasks: int) -> None:
    """Wait for the executors to start, or raise ConfigError: Spark itself would wait for many minutes in silence.

    Returns at once under Spark Connect, where the cluster cannot be queried.
    """
    from pyspark.sql.utils import is_remote

    if is_remote():
        return
    context = spark.sparkContext._jsc.sc()
    profile = context.resourceProfileManager().defaultResourceProfile()
    until = time.monotonic() + SLOTS_S
    while (slots := context.maxNumConcurrentTasks(profile)) < num_tasks:
        if time.monotonic() > until:
            raise ConfigError(
                f"The training needs {num_tasks} Spark tasks at once, and the cluster {spark.conf.get('spark.master')} can run "
                f"{slots}. Lower num_processes, or give the cluster more executors or cores."
            )
        time.sleep(0.2)


@contextmanager
def shared_folder(recipe: Recipe) -> Iterator[Path]:
    """Create a folder for this launch inside the output folder, with the recipe in it; remove it at the end."""
    from hftune.distributed.preflight import check_writable

    check_writable(recipe.folder)
    recipe.folder.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=".spark-", dir=recipe.output_dir))
    try:
        (folder / "recipe.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def environment(recipe: Recipe, use_gpu: bool) -> dict[str, str]:
    """Return the driver's environment variables that are passed to the processes."""
    named = set(re.findall(r"oc\.env:\s*(\w+)", recipe.to_yaml()))  # by the recipe itself
    values = {name: value for name, value in os.environ.items() if name.startswith(TRAVELS) or name in named}
    if not use_gpu:
        values["ACCELERATE_USE_CPU"] = "true"
    if "mlflow" in recipe.track.with_:
        from hftune.tracking.mlflow_tracker import prepare_mlflow, tracking_uri

        prepare_mlflow()
        values["MLFLOW_TRACKING_URI"] = tracking_uri()  # the default one is relative to the driver's folder
    return values


def train_here(folder: str, start: str, modules: list[str], values: dict[str, str]) -> None:
    """Train as one of the processes. Returns nothing: TorchDistributor may return the value of any process."""
    os.environ.update(values)
    sys.path += [path for path in modules if path not in sys.path]
    if Path(start).is_dir():  # the recipe's relative paths start there
        os.chdir(start)
    from hftune.run import fail, leave  # only now: libraries read the environment when they are imported
    from hftune.tracking.console import print_any_character

    print_any_character()
    try:
        process_folder = enter_folder(Path(folder))
        from hftune.training import train

        train(Recipe.load(Path(folder) / "recipe.yaml"))
        (process_folder / "trained").touch()
    except (Exception, KeyboardInterrupt) as error:
        leave(fail(error))


def enter_folder(folder: Path) -> Path:
    """Create this process's folder for its result or failure, with its name in it.

    Raises:
        ConfigError: the shared folder is not visible on this machine.
    """
    process = ProcessInfo.from_environment()
    if not folder.is_dir():
        raise ConfigError(
            f"{process.name} does not see output_dir={folder.parent}: driver and executors must share its file system."
        )
    process_folder = folder / str(process.rank)
    process_folder.mkdir()
    (process_folder / "who").write_text(process.name, encoding="utf-8")
    os.environ["TORCHELASTIC_ERROR_FILE"] = str(process_folder / "error.json")  # where a failure is described
    return process_folder


def read_result(folder: Path, distributor: TorchDistributor, problem: Exception | None) -> TrainResult:
    """Return the main process's result, once all processes have ended.

    Raises:
        ConfigError, DataError, TrainingError, Interrupted: the failure of the first process that failed; or, if none
            described its failure, which processes are missing.
    """
    from hftune.checkpoints.output_dir import TrainResult
    from hftune.launchers.local import read_failure

    num_processes = distributor.num_processes
    folders = [folder / str(rank) for rank in range(num_processes)]
    silent = [path for path in folders if not (path / "error.json").is_file() and not (path / "trained").is_file()]
    first = re.search(r"barrier task \w+\(\d+, (\d+)\) finished unsuccessfully", str(problem))
    killed = None if first is None else folder / first[1]
    # With a task for each process, a task's number is its process's rank. Spark ended the others.
    if distributor.num_tasks == num_processes and killed is not None and killed in silent and killed.exists():
        raise TrainingError(f"{name_of(killed)} exited unexpectedly: it was killed, or crashed.") from problem
    if (failure := read_failure(folder)) is not None:
        raise failure from problem
    reason = f" Spark says: {telling_line(problem)}" if problem is not None else ""
    if not any(map(Path.exists, folders)):
        place = f"Is output_dir={folder.parent} on a file system that they and the driver share, and hftune installed there?"
        raise TrainingError(f"None of the {num_processes} processes started. {place}{reason}") from problem
    if silent:
        raise TrainingError(
            f"{', '.join(map(name_of, silent))} exited without a message, or never started.{reason}"
        ) from problem
    if problem is not None:
        raise TrainingError(f"All processes finished training, but Spark failed afterwards.{reason}") from problem
    return TrainResult.read(folder.parent)


def name_of(process_folder: Path) -> str:
    """Name the process that a folder belongs to, whether it created the folder or not."""
    return (process_folder / "who").read_text(encoding="utf-8") if process_folder.exists() else f"Process {process_folder.name}"


def telling_line(error: Exception) -> str:
    """Return the most informative line of Spark's many."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if "Exception:" in line or "Error:" in line), lines[0] if lines else repr(error))

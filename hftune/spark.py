"""``hftune.spark.launch(recipe, num_processes=2)``: train on the executors of a Spark cluster, or on the driver's machine.

pyspark's TorchDistributor starts the processes; it knows no training. What it loses is kept in a folder that driver and
processes share: who failed and why, and what the main process returned. In pyspark 4.3 a failed run may come back as a
success, with another process's value, and an executor's exception never comes back at all.

    python -m hftune.spark recipe=yelp [section.key=value ...] [--num-processes 2] [--local] [--use-gpu] [--master URL]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hftune.config import Recipe
from hftune.errors import ConfigError, DataError, Interrupted, TrainingError

if TYPE_CHECKING:
    from pyspark.ml.torch.distributor import TorchDistributor
    from pyspark.sql import SparkSession

    from hftune.checkpoints.output_dir import TrainResult

SLOTS_S = 30.0
"""For executors to start, before a cluster counts as too small."""
TRAVELS = ("MLFLOW_", "DATABRICKS_", "WANDB_", "HF_", "HFTUNE_", "ACCELERATE_", "NCCL_", "GLOO_", "OMP_", "AWS_", "AZURE_")
"""Beginnings of the driver's environment variables that the processes get, too: dashboards, keys, networks.

They travel as arguments of the Spark tasks, HF_TOKEN and AWS_SECRET_ACCESS_KEY among them: whoever can read the cluster's
traffic or memory can read these. Take what training does not need out of the driver's environment.
"""


def launch(
    recipe: Recipe, num_processes: int = 2, local_mode: bool = False, use_gpu: bool = False, allow_fewer: bool = False
) -> TrainResult:
    """Train a recipe on ``num_processes`` Spark tasks and wait for the end.

    The active SparkSession is used; where there is none, one is made. ``recipe.output_dir`` must lie on a file system that
    the driver and all executors share.

    Args:
        local_mode: start the processes on the driver's machine, not on executors.
        use_gpu: one GPU for each process; else CPUs are used even where there are GPUs.
        allow_fewer: train on as many processes as the driver has GPUs, where these are fewer.

    Raises:
        ConfigError, DataError, TrainingError, Interrupted: as ``train``, with the message of the process that failed. What
            else a process raises comes as a TrainingError with its traceback, rank and host.
    """
    from hftune.launchers.local import check_importable

    recipe.validate()
    check_importable(recipe)
    if num_processes < 1:
        raise ConfigError(f"num_processes={num_processes} must be at least 1.")
    check_installed()
    spark = session()
    distributor = make_distributor(num_processes, local_mode, use_gpu, allow_fewer)
    if not local_mode:
        check_slots(spark, distributor.num_tasks)
    recipe = replace(recipe, output_dir=str(Path(recipe.output_dir).resolve()))
    with shared_folder(recipe) as folder:
        problem = run(distributor, folder, environment(recipe, use_gpu))
        return read_result(folder, distributor, problem)


def check_installed() -> None:
    """Look for pyspark and Java, or raise ConfigError."""
    if importlib.util.find_spec("pyspark") is None:
        raise ConfigError('hftune.spark needs a package that is not installed: pip install "hftune[spark]".')
    is_remote = "SPARK_REMOTE" in os.environ or "SPARK_CONNECT_MODE_ENABLED" in os.environ  # Java is at the other end
    home = os.environ.get("JAVA_HOME")
    if not is_remote and shutil.which("java", path=f"{home}/bin" if home else None) is None:
        where = f"JAVA_HOME={home} holds none" if home else "there is none on the PATH"
        raise ConfigError(f"Spark needs Java, and {where}: install version 17 or 21 of it, such as openjdk-17-jre-headless.")


def session(master: str | None = None) -> SparkSession:
    """Return the active SparkSession, or a new one, whose executors use this Python and find its modules."""
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
        raise ConfigError(f"Spark cannot be started: {first_line(error)}") from error


def make_distributor(num_processes: int, local_mode: bool, use_gpu: bool, allow_fewer: bool) -> TorchDistributor:
    """Make what starts the processes.

    Raises:
        ConfigError: the cluster has no GPUs for tasks, or fewer than processes: TorchDistributor would only warn of these.
    """
    from pyspark.ml.torch.distributor import TorchDistributor

    try:
        distributor = TorchDistributor(num_processes=num_processes, local_mode=local_mode, use_gpu=use_gpu)
    except RuntimeError as error:
        raise ConfigError(f"use_gpu={use_gpu}: {error}") from error
    if distributor.num_processes != num_processes and not allow_fewer:
        raise ConfigError(
            f"num_processes={num_processes} is more than the GPUs of the driver, {distributor.num_processes}. Lower it, or set "
            "allow_fewer=True; train.batch_size and the result stay the same."
        )
    return distributor


def check_slots(spark: SparkSession, num_tasks: int) -> None:
    """Wait for the executors to start, or raise ConfigError: Spark itself would wait for many minutes without a word.

    Nothing is known of a cluster behind Spark Connect.
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
                f"{slots}. Lower num_processes, or give it more executors or cores."
            )
        time.sleep(0.2)


@contextmanager
def shared_folder(recipe: Recipe) -> Iterator[Path]:
    """Make a folder for this launch alone, with the recipe in it, inside the output folder; remove it at the end."""
    from hftune.distributed.preflight import check_writable

    check_writable(Path(recipe.output_dir))
    Path(recipe.output_dir).mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=".spark-", dir=recipe.output_dir))
    try:
        (folder / "recipe.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def environment(recipe: Recipe, use_gpu: bool) -> dict[str, str]:
    """Return the environment variables that the processes get from the driver."""
    named = set(re.findall(r"oc\.env:\s*(\w+)", recipe.to_yaml()))  # by the recipe itself
    values = {name: value for name, value in os.environ.items() if name.startswith(TRAVELS) or name in named}
    if not use_gpu:
        values["ACCELERATE_USE_CPU"] = "true"
    if "mlflow" in recipe.track.with_:
        from hftune.tracking.mlflow_tracker import prepare_mlflow, tracking_uri

        prepare_mlflow()
        values["MLFLOW_TRACKING_URI"] = tracking_uri()  # the default one is relative to the driver's folder
    return values


def run(distributor: TorchDistributor, folder: Path, values: dict[str, str]) -> Exception | None:
    """Run ``train_here`` in each process; return what Spark says where it notices that one failed."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    try:
        distributor.run(train_here, str(folder), str(Path.cwd()), [path for path in sys.path if path], values)
    except (RuntimeError, Py4JError, PySparkException) as error:
        return error
    return None


def train_here(folder: str, start: str, modules: list[str], values: dict[str, str]) -> None:
    """Train as one of the processes. Returns nothing: TorchDistributor may pass on the value of any of them."""
    os.environ.update(values)
    sys.path += [path for path in modules if path not in sys.path]
    if Path(start).is_dir():  # relative paths of the recipe are seen from the driver's folder
        os.chdir(start)
    from hftune.run import fail, leave  # only now: libraries read the environment when they are imported
    from hftune.tracking.console import print_any_character

    print_any_character()
    try:
        own = begin(Path(folder))
        from hftune.training import train

        result = train(Recipe.load(Path(folder) / "recipe.yaml"))
    except (Exception, KeyboardInterrupt) as error:
        leave(fail(error))
        return
    values = {name: str(value) if isinstance(value, Path) else value for name, value in vars(result).items()}
    (own / "result.json").write_text(json.dumps(values), encoding="utf-8")


def begin(folder: Path) -> Path:
    """Make this process's folder for its last word, and say there who it is.

    Raises:
        ConfigError: the shared folder is not here.
    """
    rank = os.environ["RANK"]
    who = f"Process {rank} (host {socket.gethostname()}, pid {os.getpid()})"
    if not folder.is_dir():
        raise ConfigError(f"{who} does not see output_dir={folder.parent}: driver and executors must share its file system.")
    own = folder / rank
    own.mkdir()
    (own / "who").write_text(who, encoding="utf-8")
    os.environ["TORCHELASTIC_ERROR_FILE"] = str(own / "error.json")  # where Heartbeat and fail leave the last word
    return own


def read_result(folder: Path, distributor: TorchDistributor, problem: Exception | None) -> TrainResult:
    """Return what the main process came to, once all have come to their end.

    Raises:
        ConfigError, DataError, TrainingError, Interrupted: what the first process to fail said; or, where none said a word,
            which ones are missing.
    """
    from hftune.checkpoints.output_dir import TrainResult
    from hftune.launchers.local import read_failure

    num_processes = distributor.num_processes
    own = [folder / str(rank) for rank in range(num_processes)]
    silent = [path for path in own if not (path / "error.json").is_file() and not (path / "result.json").is_file()]
    one_each = distributor.num_tasks == num_processes  # then a task's number is its process's rank
    if one_each and (killed := folder / str(first_task(problem))) in silent and killed.exists():  # Spark ended the others
        raise TrainingError(f"{name_of(killed)} ended without a word: it was killed, or crashed.") from problem
    if (failure := read_failure(folder)) is not None:
        raise failure from problem
    said = f" Spark says: {first_line(problem)}" if problem is not None else ""
    if not any(map(Path.exists, own)):
        place = f"Is output_dir={folder.parent} on a file system that they and the driver share, and hftune installed there?"
        raise TrainingError(f"None of the {num_processes} processes began. {place}{said}") from problem
    if silent:
        raise TrainingError(f"{', '.join(map(name_of, silent))} ended without a word, or never began.{said}") from problem
    if problem is not None:
        raise TrainingError(f"All processes trained to the end, and Spark failed after that.{said}") from problem
    values: dict[str, Any] = json.loads((own[0] / "result.json").read_text(encoding="utf-8"))
    return TrainResult(**{**values, "output_dir": Path(values["output_dir"]), "model_dir": Path(values["model_dir"])})


def name_of(own: Path) -> str:
    """Return who left, or would have left, this folder."""
    return (own / "who").read_text(encoding="utf-8") if own.exists() else f"Process {own.name}"


def first_task(problem: Exception | None) -> str | None:
    """Return the number of the Spark task that failed first, where Spark says it."""
    found = re.search(r"barrier task \w+\(\d+, (\d+)\) finished unsuccessfully", str(problem))
    return found and found[1]


def first_line(error: Exception) -> str:
    """Return the line of Spark's many that says most."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if "Exception:" in line or "Error:" in line), lines[0] if lines else repr(error))


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return its exit code, as ``hftune.run``."""
    options, words = parser().parse_known_args(argv)
    try:
        recipe = Recipe.from_argv(words)
        recipe.validate()
        check_installed()
        session(options.master or ("local[1]" if options.local else None))
        launch(recipe, options.num_processes, options.local, options.use_gpu)
    except (ConfigError, DataError, TrainingError, Interrupted) as error:
        from hftune.distributed.failure_report import exit_code

        print(f"hftune: {error}", file=sys.stderr, flush=True)
        return exit_code(error)
    return 0


def parser() -> argparse.ArgumentParser:
    """Describe the options; what is left are the words of the recipe."""
    root = argparse.ArgumentParser(
        prog="python -m hftune.spark", usage="%(prog)s recipe=NAME [section.key=value ...] [options]", allow_abbrev=False
    )
    root.add_argument("--num-processes", type=int, default=2, help="Spark tasks that train together (default %(default)s)")
    root.add_argument("--local", action="store_true", help="on the driver's machine, not on executors")
    root.add_argument("--use-gpu", action="store_true", help="one GPU for each process")
    root.add_argument("--master", help="of the cluster, such as spark://host:7077 (default: as Spark is configured)")
    return root


if __name__ == "__main__":
    from hftune import spark  # what is pickled must not belong to __main__, which executors do not have

    sys.exit(spark.main())

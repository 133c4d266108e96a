"""`hftune.spark`: on executors and on the driver's machine, the same training; and no failure is lost on the way."""

import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hftune import ConfigError, DataError, Recipe, TrainingError, spark
from hftune.launchers import spark as launcher
from tests.support.runs import QUICK_JAVA, Run, environment, train_on, warm_python

ROOT = Path(__file__).parents[2]
TAGGING, FAULTY = ROOT / "tests" / "support" / "tagging.yaml", ROOT / "tests" / "support" / "faulty.yaml"
WORDS = ("task.dropout=0.2", "train.epochs=2")
JAVA = {"SPARK_LOCAL_IP": "127.0.0.1", **QUICK_JAVA}
HAS_MLFLOW = importlib.util.find_spec("mlflow") is not None
MISSING = [name for name in ("pyspark", "pandas", "pyarrow") if importlib.util.find_spec(name) is None]

pytestmark = [
    pytest.mark.spark,
    pytest.mark.skipif(shutil.which("java") is None, reason="Spark needs Java, which is not on the PATH"),
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)} (pip install hftune[spark])"),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A SparkSession with two executors of one core each, and a driver that says it has one GPU."""
    from pyspark.sql import SparkSession

    script = tmp_path_factory.mktemp("spark") / "gpus.sh"
    script.write_text("""#!/bin/sh\necho '{"name": "gpu", "addresses": ["0"]}'\n""")
    script.chmod(0o755)
    options = {
        **{f"spark.driver.{name}": "127.0.0.1" for name in ("host", "bindAddress")},
        "spark.driver.resource.gpu.amount": "1",
        "spark.driver.resource.gpu.discoveryScript": str(script),
        "spark.ui.enabled": "false",
        "spark.executorEnv.PYTHONPATH": str(ROOT),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment(**JAVA, PYSPARK_PYTHON=warm_python()).items():
            patch.setenv(name, value)
        patch.setattr(sys, "executable", warm_python())
        builder = SparkSession.builder.master("local-cluster[2,1,1024]")
        for name, value in options.items():
            builder = builder.config(name, value)
        session = builder.getOrCreate()
        session.sparkContext.setLogLevel("OFF")
        patch.setattr(launcher, "SLOTS_S", 240)
        launcher.check_slots(session, 2)  # the executors take a while to come up where the machine is busy
        yield session
        session.stop()


@pytest.fixture(scope="module")
def runs(cluster, tmp_path_factory):
    """The same recipe, by five routes."""
    folder = tmp_path_factory.mktemp("routes")
    made = {f"python on {count}": train_on(count, {"plain": WORDS}, folder, str(TAGGING))["plain"] for count in (1, 2)}
    for name, local_mode, tracked in (("local mode", True, ""), ("executors", False, "mlflow" * HAS_MLFLOW)):
        words = (*WORDS, f"track.with=[{tracked}]", f"output_dir={folder / name}")
        with pytest.MonkeyPatch.context() as patch:  # after the executors have started, which therefore cannot see it
            patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder}/mlflow.db")
            patch.setenv("MLFLOW_EXPERIMENT_NAME", "from the driver")
            result = spark.launch(Recipe.load(TAGGING, *words), 2, local_mode)
        assert (result.world_size, result.steps, result.output_dir) == (2, 10, folder / name)
        made[name] = Run(result.output_dir)
        assert made[name].result["metrics"] == result.metrics and made[name].result["seconds"] == result.seconds
    return made


def test_spark_trains_bit_equal_to_torchrun_and_like_one_process(runs):
    expected = runs["python on 2"]
    losses, weights = expected.logged("train/loss"), load_file(expected.folder / "model" / "model.safetensors")
    assert len(losses) == 10
    for name in ("local mode", "executors"):
        assert runs[name].logged("train/loss") == losses
        other = load_file(runs[name].folder / "model" / "model.safetensors")
        assert other.keys() == weights.keys() and all(torch.equal(other[key], weights[key]) for key in weights)
    assert runs["python on 1"].logged("train/loss") == pytest.approx(losses, rel=1e-5)


def test_each_route_leaves_the_same_files(runs):
    files = {name: {str(path.relative_to(run.folder)) for path in run.folder.rglob("*")} for name, run in runs.items()}
    assert {"result.json", "model/model.safetensors", "ledger.jsonl"} <= files["python on 1"]
    for name in runs:
        assert files[name] == files["python on 1"]


@pytest.mark.skipif(not HAS_MLFLOW, reason="needs mlflow")
def test_dashboards_of_the_driver_are_those_of_the_executors(runs):
    import mlflow

    folder = runs["executors"].folder
    client = mlflow.MlflowClient(f"sqlite:///{folder.parent}/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("from the driver").experiment_id])
    assert (run.info.status, run.data.metrics["eval/loss"]) == ("FINISHED", runs["executors"].result["metrics"]["loss"])


def test_exception_on_an_executor_comes_with_its_traceback_rank_and_host(cluster, tmp_path):
    recipe = Recipe.load(FAULTY, "task.fault=raise", "task.sample=17", f"output_dir={tmp_path}/out")
    with pytest.raises(TrainingError) as caught:
        spark.launch(recipe, 2)
    head, *trace, last = str(caught.value).splitlines()
    assert re.match(rf"\[process 1 of 2 on host {socket.gethostname()}, step \d+, samples ", head)
    assert trace[-1].strip() == 'raise ValueError("bad sample 17")' and last == "ValueError: bad sample 17"
    assert not list((tmp_path / "out").glob(".spark-*"))


def test_failed_run_is_no_success_even_where_an_earlier_one_left_its_result(cluster, runs, tmp_path):
    """TorchDistributor's local mode says nothing where a process fails after another one has ended."""
    shutil.copytree(runs["local mode"].folder, tmp_path / "out")
    words = ("task.fault=data error", "task.sample=17", f"output_dir={tmp_path}/out", "resume=never")
    with pytest.raises(DataError) as caught:
        spark.launch(Recipe.load(FAULTY, *words), 2, local_mode=True)
    assert str(caught.value) == "Sample 17 has no label."


def test_killed_process_is_told_of(cluster, tmp_path):
    recipe = Recipe.load(FAULTY, "task.fault=kill", "task.sample=17", "train.dead_after_s=3", f"output_dir={tmp_path}/out")
    with pytest.raises(TrainingError) as caught:
        spark.launch(recipe, 2)
    who = rf"Process 1 \(host {socket.gethostname()}, pid \d+\)"
    assert re.fullmatch(rf"{who} exited unexpectedly: it was killed, or crashed\.", str(caught.value))


def refused(recipe=TAGGING, num_processes=2, **options):
    with pytest.raises(ConfigError) as caught:
        spark.launch(Recipe.load(recipe), num_processes, **options)
    return str(caught.value)


def test_what_the_cluster_cannot_do_is_refused_in_seconds(cluster, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launcher, "SLOTS_S", 0.5)
    assert refused(num_processes=0) == "num_processes=0 must be at least 1."
    assert "needs 3 Spark tasks at once, and the cluster local-cluster[2,1,1024] can run 2. Lower num_pr" in refused(
        num_processes=3
    )
    assert refused(use_gpu=True).startswith("use_gpu=True: 'spark.task.resource.gpu.amount' was unset")
    assert "num_processes=2 exceeds the number of the driver's GPUs, 1. Lower it" in refused(use_gpu=True, local_mode=True)
    assert not any(tmp_path.iterdir())


def test_what_is_not_installed_is_named(monkeypatch):
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    assert refused().startswith("Spark needs Java, and JAVA_HOME=/nowhere has none: install version 17 or 21")
    monkeypatch.delenv("JAVA_HOME")
    monkeypatch.setenv("PATH", "/nowhere")
    assert refused().startswith("Spark needs Java, and there is none on the PATH: install version 17 or 21")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert refused() == 'hftune.spark needs a package that is not installed: pip install "hftune[spark]".'


@pytest.fixture
def standalone(tmp_path):
    """The address of a standalone cluster with a worker of two cores; pyspark ships no script that starts one."""
    import pyspark

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"spark://127.0.0.1:{free.getsockname()[1]}"
    home = Path(pyspark.__file__).parent
    host, env = ["--host", "127.0.0.1", "--webui-port", "0"], environment(**JAVA, SPARK_HOME=str(home))
    deploy = "org.apache.spark.deploy"
    commands = {"master": [f"{deploy}.master.Master", "--port", address.rpartition(":")[2], *host]}
    size = ["--cores", "2", "--memory", "2g", "--work-dir", str(tmp_path / "work")]
    commands["worker"] = [f"{deploy}.worker.Worker", *size, *host, address]
    started = []
    try:
        for name, command in commands.items():
            with (tmp_path / f"{name}.log").open("w") as log:
                spark_class = [str(home / "bin" / "spark-class"), *command]
                started.append(subprocess.Popen(spark_class, env=env, stdout=log, stderr=log))
        until = time.monotonic() + 240
        while "uccessfully registered" not in (tmp_path / "worker.log").read_text():
            assert time.monotonic() < until, "".join(path.read_text() for path in tmp_path.glob("*.log"))
            time.sleep(0.2)
        yield address
    finally:
        for process in started:
            process.kill()
            process.wait()


def test_command_trains_on_a_standalone_cluster(standalone, runs, tmp_path):
    words = [f"recipe={TAGGING}", *WORDS, f"output_dir={tmp_path}/out"]
    command = [sys.executable, "-m", "hftune.spark", *words, "--num-processes", "2", "--master", standalone]
    env = environment(**JAVA)
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert Run(tmp_path / "out").logged("train/loss") == runs["executors"].logged("train/loss")


def test_command_refuses_a_bad_recipe_before_java_starts(monkeypatch, capsys):
    assert spark.main([f"recipe={TAGGING}", "train.lr=fast", "--num-processes", "2"]) == 2
    assert capsys.readouterr().err == "hftune: train.lr='fast' is not a number, such as 5e-05.\n"
    assert "SPARK_HOME" not in os.environ

"""The Databricks notebook runs from top to bottom."""

import ast
import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.runs import QUICK_JAVA, Run, environment, warm_python

NOTEBOOK = Path(__file__).parents[2] / "examples" / "databricks_mnist.py"
MISSING = [name for name in ("pyspark", "pandas", "pyarrow", "mlflow") if importlib.util.find_spec(name) is None]


@pytest.mark.spark
@pytest.mark.skipif(shutil.which("java") is None, reason="Spark needs Java, which is not on the PATH")
@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)} (pip install hftune[spark,mlflow])")
def test_notebook_trains_the_same_in_three_ways_and_gets_labels_from_mlflow(tmp_path):
    variables = {
        "RECIPE": "mnist_demo",
        "OUTPUT": str(tmp_path / "out"),
        "WORDS": "task.max_train_samples=400 task.max_eval_samples=100 train.epochs=1 train.log_every=1",
        "SPARK_LOCAL_IP": "127.0.0.1",
        **QUICK_JAVA,
        "PYSPARK_SUBMIT_ARGS": "--master local[2] pyspark-shell",
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path / 'mlflow.db'}",
    }
    done = subprocess.run(
        [warm_python(), NOTEBOOK], env=environment(**variables), cwd=tmp_path, capture_output=True, text=True, timeout=540
    )
    assert done.returncode == 0, done.stdout + done.stderr
    losses = {name: Run(tmp_path / "out" / name).logged("train/loss") for name in ("one_process", "two_processes", "executors")}
    assert losses["two_processes"] == losses["executors"] == pytest.approx(losses["one_process"], rel=1e-5)
    assert len(losses["executors"]) == 4
    lines = done.stdout.splitlines()
    assert [line.split()[:3] for line in lines if " processes  loss " in line] == [
        ["one", "process", "1"],
        ["two", "processes", "2"],
        ["executors", "2", "processes"],
    ]
    said = [row["label"] for row in ast.literal_eval(next(line for line in lines if line.startswith("[{'label'")))]
    assert [re.split(r"\s+", line)[1] for line in lines[-5:]] == said
    assert (tmp_path / "mlflow.db").is_file()

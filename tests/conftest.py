"""Keeps every test, and every process that a test starts, off the network and out of the user's caches."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SHARED = os.environ.get("TESTS_CACHE")
"""The folder of the pytest process that has started this one, under xdist."""
CACHE = SHARED or tempfile.mkdtemp(prefix="hftune-tests-")
# Here and not in a fixture: datasets, transformers and torch read these when they are imported, which test modules may do.
# One thread, as in the processes that tests start: what is trained here and there is compared bit by bit.
os.environ.update(
    HF_DATASETS_CACHE=CACHE,
    HF_HUB_OFFLINE="1",
    WANDB_MODE="disabled",
    MLFLOW_DISABLE_TELEMETRY="true",
    MLFLOW_LOGGING_LEVEL="ERROR",
    TOKENIZERS_PARALLELISM="false",
    OMP_NUM_THREADS="1",
    TORCHINDUCTOR_COMPILE_THREADS="1",  # else torch.compile starts a pool of interpreters
)


if "TESTS_COLD_PYTHON" in os.environ:  # we are a fork of a warm interpreter; tests that start a cold one say sys.executable
    sys.executable = os.environ["TESTS_COLD_PYTHON"]


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config):
    """Let xdist's workers, and all that they fork, be forks of one interpreter: each would take seconds to import torch."""
    tx = getattr(config.option, "tx", None)
    if SHARED or not tx or set(tx) != {"popen"} or sys.platform != "linux":  # elsewhere, libraries do not survive a fork
        return
    from tests.support.runs import warm_python

    os.environ.update(TESTS_CACHE=CACHE, TESTS_COLD_PYTHON=sys.executable)
    only_units = all("tests/unit" in name for name in config.args)  # those hardly train
    os.environ["TESTS_UNIT" if only_units else "TESTS_DEMOS"] = "yes"
    os.environ["TESTS_WARM_PYTHON"] = executable = warm_python()
    config.option.tx = [f"popen//python={executable}" for _ in tx]


def pytest_collection():
    """Import and rewrite test modules without Python's garbage collector, which would look at all objects again and again."""
    gc.disable()


def pytest_collection_finish():
    """Hide what was imported from the garbage collector for good: it is a million objects."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_unconfigure():
    if not SHARED:
        shutil.rmtree(CACHE, ignore_errors=True)


@pytest.fixture(autouse=True)
def no_session_of_wandb_outlives_a_test():
    """Within a process, wandb keeps the mode (offline, disabled) that its session began with."""
    yield
    if "wandb" in sys.modules:
        sys.modules["wandb"].teardown()


@pytest.fixture(autouse=True)
def no_signal_handler_outlives_a_test():
    """Forks of later tests would have it, and would not end when they are asked to."""
    before = [*map(signal.getsignal, (signal.SIGINT, signal.SIGTERM))]
    yield
    assert [*map(signal.getsignal, (signal.SIGINT, signal.SIGTERM))] == before


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[[str, list[Any]], Path]:
    """Return a function that writes rows into a jsonl file of this name in tmp_path and returns its path."""

    def write(name: str, rows: list[Any]) -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    return write


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """The folder of a run, as far as arguments are checked."""
    from hftune import Recipe

    folder = tmp_path / "outputs"
    for name in ("model", "checkpoints/step_00000005"):
        (folder / name).mkdir(parents=True)
    recipe = Recipe.load("yelp_demo", f"output_dir={folder}").to_yaml()
    (folder / "recipe.yaml").write_text(recipe)
    (folder / "model" / "config.json").write_text("{}")
    (folder / "checkpoints/step_00000005/manifest.json").write_text("{}")
    return folder

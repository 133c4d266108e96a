"""Starts the interpreter of tests/rehearsal/process.py, whose forks all runs are, on CPUs or on simulated GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.rehearsal.simulated_cuda import CannotBuild, build
from tests.support.runs import environment


def pytest_sessionstart(session: pytest.Session):
    try:
        build()
    except CannotBuild as error:
        pytest.exit(f"skipped: {error}", returncode=0)


@pytest.fixture(scope="session", autouse=True)
def interpreter_with_gpus():
    command = [sys.executable, "-m", "tests.rehearsal.process", tempfile.mkdtemp(dir=os.environ["HF_DATASETS_CACHE"])]
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    server = subprocess.Popen(command, cwd=Path(__file__).parents[2], env=environment(TORCH_CPP_LOG_LEVEL="ERROR"), **streams)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TESTS_WARM_PYTHON", server.stdout.readline().strip())
        yield
    server.communicate()

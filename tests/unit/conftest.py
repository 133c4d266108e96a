"""Unit tests are quick: they start no interpreters. Those that have to are in tests/commands and tests/multiprocess."""

import os
import subprocess
import sys

import pytest


@pytest.fixture(autouse=True)
def no_interpreters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse to start Python: importing torch in another process costs seconds, and this folder is what one runs before a commit."""
    original = subprocess.Popen.__init__

    def start(self, args, *more, **options):
        program = args.split()[0] if isinstance(args, str) else args[0] if isinstance(args, (list, tuple)) else args
        if os.fspath(program) == sys.executable:
            raise AssertionError("a unit test starts an interpreter: move it to tests/commands or tests/multiprocess")
        original(self, args, *more, **options)

    monkeypatch.setattr(subprocess.Popen, "__init__", start)

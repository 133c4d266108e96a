"""The launcher that forks: what it makes of signals and of processes that end."""

import json
import os
import signal
import time

import pytest

from hftune.errors import ConfigError
from hftune.launchers import forks
from hftune.launchers.forks import Signals, wait_for
from hftune.launchers.local import read_failure


@pytest.fixture
def signals():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)}
    yield Signals()
    for number, handler in before.items():
        signal.signal(number, handler)


def fork(work):
    """Return the process id of a fork that does this, and ends with what it returns."""
    if (child := os.fork()) == 0:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        os._exit(work())
    return child


def sleep():
    time.sleep(30)
    return 0


def waited(signals, *works):
    children = {fork(work): rank for rank, work in enumerate(works)}
    signals.children = children
    return wait_for(children, signals, lambda rank: False)


def test_processes_that_end_well_are_a_success(signals):
    assert waited(signals, lambda: 0, lambda: 0) == 0


def test_one_that_fails_ends_the_others_and_is_named(signals, capsys):
    began = time.monotonic()
    assert waited(signals, sleep, lambda: 3) == 1
    assert time.monotonic() - began < 10
    said = capsys.readouterr().err
    assert said.startswith("Process 1 (pid ") and said.endswith(") ended with exit code 3.\n") and said.count("Process") == 1


def test_a_process_that_a_library_has_started_is_none_of_its_business(signals):
    stray = fork(lambda: 7)
    assert waited(signals, lambda: time.sleep(0.3) or 0) == 0
    with pytest.raises(ChildProcessError):
        os.waitpid(stray, 0)


def test_a_signal_is_passed_on_and_is_the_exit_code(signals):
    ready, is_ready = os.pipe()
    children = {fork(lambda: os.write(is_ready, b"-") and sleep()): 0}
    signals.children = children
    os.read(ready, 1)  # it has its own handlers
    os.kill(os.getpid(), signal.SIGTERM)
    assert wait_for(children, signals, lambda rank: False) == 128 + signal.SIGTERM


def test_processes_that_end_well_after_a_signal_are_a_success(signals):
    ready, is_ready = os.pipe()

    def finish():
        got = []
        signal.signal(signal.SIGTERM, lambda number, frame: got.append(number))
        os.write(is_ready, b"-")
        while not got:
            time.sleep(0.01)
        return 0

    children = {fork(finish): 0}
    signals.children = children
    os.read(ready, 1)
    os.kill(os.getpid(), signal.SIGTERM)
    assert wait_for(children, signals, lambda rank: False) == 0


def test_a_signal_after_the_end_of_a_process_harms_nobody(signals):
    child = fork(lambda: 0)
    os.waitpid(child, 0)
    signals.children = {child: 0}
    signals.send(signal.SIGTERM)


def test_patience_that_is_no_number_is_the_default(monkeypatch, signals):
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30s")
    assert forks.shutdown_seconds() == forks.SHUTDOWN_S


def test_a_module_that_cannot_be_imported_is_named_with_its_reason(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "")
    assert forks.main([json.dumps({"least": 2, "most": 2}), str(tmp_path), "no_such_library", "hftune.run", "recipe=x"]) == 2
    said = "Task.libraries names no_such_library, which cannot be imported: ModuleNotFoundError: No module named 'no_such_library'."
    assert capsys.readouterr().err == f"hftune: {said}\n"
    error = read_failure(tmp_path)
    assert isinstance(error, ConfigError) and str(error) == said

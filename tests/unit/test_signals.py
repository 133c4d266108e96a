"""What asks a process to stop: signals, a closed terminal, and the death of its launcher."""

import os
import signal
import sys
import time

import pytest

from hftune.distributed.signals import STARTED_BY, StopRequest, follow_launcher


@pytest.fixture
def hangup():
    before = signal.getsignal(signal.SIGHUP)
    yield lambda handler: signal.signal(signal.SIGHUP, handler)
    signal.signal(signal.SIGHUP, before)


def test_a_terminal_that_is_closed_asks_to_stop(hangup):
    hangup(signal.SIG_DFL)
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        assert stop.name == "SIGHUP"
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL


def test_under_nohup_it_does_not(hangup):
    hangup(signal.SIG_IGN)
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        assert stop.name is None


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has ended")
@pytest.mark.parametrize("launcher", ["hftune", "torchrun", "hftune, already gone"])
def test_a_process_gets_sigterm_when_its_launcher_is_killed(launcher):
    words, said = os.pipe()
    if (parent := os.fork()) == 0:
        known = os.getpid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, lambda *_: os.write(said, b"SIGTERM") and os._exit(0))
            if launcher == "hftune, already gone":
                os.kill(known, signal.SIGKILL)
                while os.getppid() == known:
                    time.sleep(0.001)
            os.environ.pop("GROUP_RANK", None)
            os.environ |= {"GROUP_RANK": "0"} if launcher == "torchrun" else {STARTED_BY: str(known)}
            follow_launcher()
            os.write(said, b"follows ")
            time.sleep(10)
            os._exit(0)
        time.sleep(10)
        os._exit(0)
    os.close(said)
    heard = os.read(words, 100)
    if heard == b"follows ":
        os.kill(parent, signal.SIGKILL)
        heard = os.read(words, 100)
    os.waitpid(parent, 0)
    assert heard == b"SIGTERM"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has ended")
def test_a_wrapper_between_launcher_and_process_ends_nothing():
    """As one that a shell script or a test puts in the place of sys.executable."""
    if (child := os.fork()) == 0:
        os.environ[STARTED_BY] = str(os.getppid())
        if (grandchild := os.fork()) == 0:
            follow_launcher()
            os._exit(7)
        os._exit(os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1]) % 256)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_a_process_without_a_launcher_follows_nobody(monkeypatch):
    monkeypatch.delenv("GROUP_RANK", raising=False)
    monkeypatch.setattr("ctypes.CDLL", lambda name: pytest.fail("it asked for a signal"))
    follow_launcher()

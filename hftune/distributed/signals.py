"""SIGTERM and Ctrl-C as a request to stop after the current step; the death of a launcher is one. Independent of training."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import psutil

SECOND_AFTER_S = 1.0
"""A launcher may forward the Ctrl-C that the terminal has already sent; a repeat this soon is not a second request."""
STARTED_BY = "HFTUNE_STARTED_BY"
"""Environment variable: the process id of the hftune that has started this process and waits for it."""
PR_SET_PDEATHSIG = 1
"""Of Linux's prctl: which signal this process gets when its parent ends."""


class StopRequest:
    """Within ``with``: the first SIGTERM, SIGINT or SIGHUP sets ``name``; a second SIGINT interrupts at once.

    Schedulers (SLURM, Kubernetes, spot instances) send SIGTERM and wait before they kill; a terminal that is closed sends
    SIGHUP. Does nothing outside the main thread, where Python handles no signals.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        """Name of the signal that asked to stop; None before that."""
        self._since = 0.0

    def __enter__(self) -> StopRequest:
        self._handling = handling(self._handle)
        self._handling.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._handling.__exit__(*error)

    def __bool__(self) -> bool:
        return self.name is not None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.name is None:
            self.name, self._since = signal.Signals(number).name, now
        elif number == signal.SIGINT and now - self._since > SECOND_AFTER_S:
            raise KeyboardInterrupt


@contextmanager
def handling(handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle SIGTERM, SIGINT and SIGHUP, and as before at the end; in other threads than the main one Python receives none."""
    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT, *hangup()) if is_main}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def hangup() -> list[signal.Signals]:
    """Return SIGHUP, which a terminal sends when it is closed; nothing if this process ignores it, as under nohup."""
    return [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]


def follow_launcher() -> None:
    """From here on, SIGTERM comes when the launcher of this process ends, however it does: nobody would watch it any more.

    That is hftune itself, which names itself in the environment, or a torchrun agent. Linux only; does nothing elsewhere, and
    without a launcher. Children do not inherit it.
    """
    named = os.environ.pop(STARTED_BY, None)
    if sys.platform != "linux" or (named is None and "GROUP_RANK" not in os.environ):
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGTERM))
    if os.getppid() != parent or (named is not None and _has_ended(int(named))):  # before it could be followed
        os.kill(os.getpid(), signal.SIGTERM)


def _has_ended(process: int) -> bool:
    """Return whether a process has ended. Not asked of the parent: a wrapper may stand between, in place of the interpreter."""
    try:
        return psutil.Process(process).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True

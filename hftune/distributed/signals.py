"""SIGTERM and Ctrl-C as a request to stop after the current step. Independent of training and files."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any

SECOND_AFTER_S = 1.0
"""A launcher may forward the Ctrl-C that the terminal has already sent; a repeat this soon is not a second request."""


class StopRequest:
    """Within ``with``: the first SIGTERM or SIGINT sets ``name``; a second SIGINT interrupts at once.

    Schedulers (SLURM, Kubernetes, spot instances) send SIGTERM and wait before they kill. Does nothing outside the main
    thread, where Python handles no signals.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        """Name of the signal that asked to stop; None before that."""
        self._since = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __bool__(self) -> bool:
        return self.name is not None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.name is None:
            self.name, self._since = signal.Signals(number).name, now
        elif number == signal.SIGINT and now - self._since > SECOND_AFTER_S:
            raise KeyboardInterrupt

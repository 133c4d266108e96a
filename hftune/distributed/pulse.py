"""Signs of life from code that gives none, such as a metric in plain Python. Independent of who reads them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from hftune.distributed.progress import Progress

EVERY_S = 1.0
"""Between two looks."""
DEPTH = 20
"""Frames to look at, from the innermost one."""


@contextmanager
def marked_while_moving(progress: Progress, every_s: float = EVERY_S) -> Iterator[None]:
    """Within ``with``: mark progress whenever this thread's Python code has moved since the last look.

    A call that does not return, such as one that waits for a file system, leaves no mark.
    """
    thread, done = threading.get_ident(), threading.Event()

    def watch() -> None:
        last: list[tuple[int, int]] = []
        while not done.wait(every_s):
            position = _position(thread)
            if position != last:
                progress.tick()
            last = position

    watcher = threading.Thread(target=watch, name="pulse", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def _position(thread: int) -> list[tuple[int, int]]:
    frame, position = sys._current_frames().get(thread), []
    while frame is not None and len(position) < DEPTH:
        position.append((id(frame.f_code), frame.f_lasti))
        frame = frame.f_back
    return position

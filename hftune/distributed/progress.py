"""What this process is working on: set by the loop and the strategy, read when something goes wrong. Independent of readers."""

from __future__ import annotations

import sys
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from hftune.errors import first_few

SHOWN = 16
"""Samples to list; the rest are counted."""
EVERY_S = 1.0
"""Between two looks."""
DEPTH = 20
"""Frames to look at, from the innermost one."""


class Progress:
    """The current stage and samples. Setting them costs nothing; each change is also a sign that the process is alive."""

    def __init__(self):
        self.current_samples: Collection[int] = ()
        self.current_stage, self.marks = "the start", 0

    def stage(self, name: str) -> None:
        """Enter a stage, such as ``step 12``."""
        self.current_stage, self.current_samples, self.marks = name, (), self.marks + 1

    def samples(self, indices: Collection[int]) -> None:
        """Start to load or compute these samples, a micro-batch of the current stage."""
        self.current_samples, self.marks = indices, self.marks + 1

    def tick(self) -> None:
        """Report progress within the current stage."""
        self.marks += 1

    def describe(self) -> str:
        """Return the stage and its samples in words: ``step 12, samples 3, 17``."""
        samples = [str(int(sample)) for sample in self.current_samples]
        if not samples:
            return self.current_stage
        return f"{self.current_stage}, {'samples' if len(samples) > 1 else 'sample'} {first_few(samples, SHOWN)}"


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

"""A thread that makes calls one after the other, so that a slow server never holds up training. Independent of trackers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue


class Background:
    """Makes calls in their order, in a thread of its own, which ends with the process.

    Args:
        failed: called in that thread with the name of a call and the exception that it raised; later calls are made anyway.
    """

    def __init__(self, name: str, failed: Callable[[str, BaseException], None]):
        self._failed = failed
        self._calls: SimpleQueue[tuple[str, Callable[[], object], bool]] = SimpleQueue()
        self._is_over = False
        threading.Thread(target=self._run, name=f"hftune {name}", daemon=True).start()

    def do(self, name: str, call: Callable[[], object], may_wait: bool = False) -> None:
        """Make a call later, after all those that were given before. ``may_wait``: it may wait for a server."""
        self._calls.put((name, call, may_wait))

    def hurry(self) -> None:
        """Make the calls that are left, except those that may wait: in another thread, as one of them does now."""
        self._is_over, left = True, []
        while not self._calls.empty():
            left.append(self._calls.get())

        def make() -> None:
            for _, call, may_wait in left:
                if not may_wait:
                    with suppress(Exception):  # the server is known to be lost
                        call()

        threading.Thread(target=make, daemon=True).start()

    def _run(self) -> None:
        while True:
            name, call, _ = self._calls.get()
            try:
                call()
            except BaseException as error:  # whatever a tracker's package raises: sys.exit, too, would end the thread
                if not self._is_over:
                    self._failed(name, error)

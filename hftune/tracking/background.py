"""A thread that makes calls one after the other, so that a slow server never holds up training. Independent of trackers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue


class Background:
    """Makes calls in their order, in a thread of its own, which ends with the process.

    Args:
        failed: called in that thread with the name of a call and the exception that it raised; later calls are made anyway.
    """

    def __init__(self, name: str, failed: Callable[[str, Exception], None]):
        self._failed = failed
        self._calls: SimpleQueue[tuple[str, Callable[[], object]]] = SimpleQueue()
        self._is_over = False
        threading.Thread(target=self._run, name=f"hftune {name}", daemon=True).start()

    def do(self, name: str, call: Callable[[], object]) -> None:
        """Make a call later, after all those that were given before."""
        self._calls.put((name, call))

    def drop(self) -> None:
        """Make none of the calls that are left."""
        self._is_over = True

    def _run(self) -> None:
        while True:
            name, call = self._calls.get()
            try:
                if not self._is_over:
                    call()
            except Exception as error:  # whatever a tracker's package raises
                if not self._is_over:
                    self._failed(name, error)

"""Makes the calls to one tracker in a thread of their own, so that no dashboard holds up a step or the end of a run.

Knows trackers by their interface only. Each has its own lane: one that hangs does not keep the others from their numbers.
"""

from __future__ import annotations

import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from hftune.errors import ConfigError, first_line
from hftune.tracking.backend import EarlierRun, TrackerBackend
from hftune.tracking.console import note, warning

RETRY_S = 60.0
"""Between two attempts to log numbers that a tracker did not take."""
ANSWER_S = 6.0
"""At the end of a run, a server that has not answered for this long is taken for dead."""
PROBE_INTERVAL_S = 2.0
SHOWN = ("log_table", "log_confusion_matrix", "log_images")
MAX_WAITING_SHOWN = 100
"""While this many calls wait for a slow server, tables and images are dropped: they would fill the memory."""
MAX_WAITING = 100_000
"""A tracker with this many calls waiting gets nothing more."""


class Lane:
    """Makes calls to a tracker in their order.

    A call that fails is one warning for each method. Numbers that it did not take are tried again until the run ends.
    """

    def __init__(self, name: str, backend: TrackerBackend, output_dir: Path):
        self.name, self.backend, self.output_dir = name, backend, output_dir
        self.done = threading.Event()
        """Set when the tracker has finished the run."""
        self._calls: SimpleQueue[tuple[str, tuple[Any, ...]]] = SimpleQueue()
        self._is_ending = threading.Event()
        self._has_failed, self._warned, self._is_watched = False, set[str](), False

    def start(self, config: Mapping[str, Any], earlier: EarlierRun) -> None:
        """Start the tracker in this thread.

        Raises:
            ConfigError: it does not start.
        """
        try:
            self.backend.start(config, earlier)
        except ConfigError:
            raise
        except Exception as error:  # whatever a tracker's package raises
            raise ConfigError(f"track.with={self.name} does not start: {reason(error)}.") from error
        self._is_watched = self.backend.url is not None and answers(self.backend.url) is True
        threading.Thread(target=self._run, name=f"hftune {self.name}", daemon=True).start()

    def do(self, method: str, *args: Any) -> None:
        """Make a call later, after those that were asked for before."""
        if method == "finish":
            self._is_ending.set()
        waiting = self._calls.qsize()
        if method == "finish" or waiting < (MAX_WAITING_SHOWN if method in SHOWN else MAX_WAITING):
            self._calls.put((method, args))

    def _run(self) -> None:
        method = ""
        while method != "finish":
            method, args = self._calls.get()
            if method == "finish" or not self._has_failed:
                self._make(method, args)
        self.done.set()

    def _make(self, method: str, args: tuple[Any, ...]) -> None:
        is_late = False
        while True:
            is_last = self._is_ending.is_set()
            try:
                getattr(self.backend, method)(*args)
            except BaseException as error:  # whatever a tracker's package raises: sys.exit, too, would end the thread
                if method not in self._warned and not self._has_failed and not self.done.is_set():
                    self._warned.add(method)
                    goes_on = " It is tried again once a minute, and at the end." if method == "log" else ""
                    failed = f"track.with={self.name} failed in {method}: {reason(error)}.{goes_on}"
                    print(warning(f"{failed} {self.output_dir} has everything."), flush=True)
                if method == "log" and not is_last:
                    is_late = True
                    self._is_ending.wait(RETRY_S)
                    continue
                self._has_failed |= method == "log"
            else:
                if is_late:
                    print(note(f"track.with={self.name} takes numbers again, also those that it lacked."), flush=True)
            return

    def wait(self, until: float) -> bool:
        """Wait for the tracker to finish the run, until a time of ``time.monotonic`` or until its server is dead."""
        answered = time.monotonic()
        while not self.done.wait(min(PROBE_INTERVAL_S, max(0.0, until - time.monotonic()))):
            now = time.monotonic()
            if now >= until:
                return False
            if self.backend.url is None or until - now < ANSWER_S:
                continue
            found = answers(self.backend.url)
            if found or (found is None and not self._is_watched):  # it may answer the tracker's package, if not us
                answered = time.monotonic()
            elif time.monotonic() - answered >= ANSWER_S:
                return self.done.is_set()
        return True

    def hurry(self) -> None:
        """Make the short calls that are left in another thread, as the tracker's own is stuck in one of them."""
        left = []
        with suppress(Empty):
            while True:
                left.append(self._calls.get_nowait())
        self.done.set()

        def make() -> None:
            for method, args in left:
                if method not in (*SHOWN, "upload"):
                    with suppress(Exception):
                        getattr(self.backend, method)(*args)

        threading.Thread(target=make, daemon=True).start()

    def leave(self) -> None:
        """Leave a tracker that has not finished, and say what the user can do."""
        advice = ""
        with suppress(Exception):
            advice = self.backend.leave() or ""
        what = f"track.with={self.name} does not answer: its run is incomplete. {self.output_dir} has everything. {advice}"
        print(warning(what.rstrip()), flush=True)


def answers(url: str) -> bool | None:
    """Ask a server something; return whether it says anything, be it that it does not know us; None if nobody can say."""
    try:
        urllib.request.urlopen(url, timeout=ANSWER_S).close()
    except urllib.error.HTTPError as error:
        return True if error.code < 500 else None
    except (OSError, HTTPException) as error:
        why = getattr(error, "reason", error)
        if isinstance(why, ConnectionRefusedError):
            return False
        return True if isinstance(why, ssl.SSLError) else None  # a certificate that the package may accept
    return True


def reason(error: BaseException) -> str:
    """Return the root cause in a line: packages wrap it in paragraphs of their own."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return first_line(error)

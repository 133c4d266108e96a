"""Where the agents of an elastic job keep what they share: in a store at an address, or in a folder that all see.

A place holds the document (membership.py), which changes only as a whole and only from what its writer has read; each agent's
sign of life; and notes that never change. Independent of what they say.
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from hftune.atomic import atomic_path
from hftune.distributed.network import hang_up

LOCKED_S = 20.0
"""How long the lock of a shared folder may be held; a write takes milliseconds."""
SIGN_BYTES = 256
POLL_S = 0.1
"""Between two attempts to connect."""


class FolderPlace:
    """A folder on a file system that all machines share; no machine's loss ends it.

    All methods raise OSError, or a store's RuntimeError (torch's DistError), if the place does not answer.
    """

    def __init__(self, folder: Path, job: str):
        self._folder = folder / "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in job)
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def read(self) -> str:
        """Return the document; empty before the first."""
        return self._read("membership.json")

    def swap(self, seen: str, wanted: str) -> str:
        """Replace the document if it is still as this agent has seen it; return what it is now."""
        with (self._folder / "lock").open("a") as lock:
            _lock(lock.fileno(), self._folder)
            now = self.read()
            if now == seen:
                self._write("membership.json", wanted)
                return wanted
            return now

    def give_sign(self, name: str, sign: str) -> None:
        """Write an agent's sign of life."""
        # In place, as a network file system shows a file's new contents sooner than a new file of the same name.
        descriptor = os.open(self._folder / f"sign_{name}", os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.pwrite(descriptor, sign.ljust(SIGN_BYTES).encode(), 0)
        finally:
            os.close(descriptor)

    def signs(self, names: list[str]) -> dict[str, str]:
        """Return the signs of life; empty for an agent that has given none."""
        return {name: self._read(f"sign_{name}").rstrip() for name in names}

    def note(self, name: str, text: str = "") -> str:
        """Leave a note unless there is one of that name; return the one that is there, empty if there is none."""
        if text and not self._read(f"note_{name}"):
            self._write(f"note_{name}", text)
        return self._read(f"note_{name}")

    def hang_up(self) -> None:
        """Let a request that has got no answer fail, from another thread. Here none waits for another machine of the job."""

    def _read(self, name: str) -> str:
        try:
            return (self._folder / name).read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""

    def _write(self, name: str, text: str) -> None:
        with atomic_path(self._folder / name, is_shared=True) as temporary:
            temporary.write_text(text, encoding="utf-8")


class StorePlace:
    """A TCPStore, of the agent at an address or of ``hftune meeting``, which may be started again with an empty store.

    Its methods do what those of FolderPlace do.
    """

    def __init__(self, store: Any, job: str, connect: Callable[[], Any]):
        self._store, self._key, self._connect = store, f"hftune/elastic/{job}", connect
        self._first = store
        """It may serve the place, which ends with the last reference."""

    def read(self) -> str:
        return self.swap("", "")

    def swap(self, seen: str, wanted: str) -> str:
        return self._exchange("membership", seen, wanted)

    def give_sign(self, name: str, sign: str) -> None:
        if self._store is None:
            self._store = self._connect()
        self._do(lambda store: store.set(f"{self._key}/sign/{name}", sign))

    def signs(self, names: list[str]) -> dict[str, str]:
        return {name: self._exchange(f"sign/{name}", "", "") for name in names}

    def note(self, name: str, text: str = "") -> str:
        return self._exchange(f"note/{name}", "", text)

    def hang_up(self) -> None:
        # After a cut, TCP itself sends again only once as much time has passed as the cut took; a new connection is quicker.
        hang_up(self._first.port)

    def _exchange(self, key: str, seen: str, wanted: str) -> str:
        return self._do(lambda store: store.compare_set(f"{self._key}/{key}", seen, wanted)).decode()

    def _do(self, request: Callable[[Any], Any]) -> Any:
        try:
            return request(self._store)
        except RuntimeError:
            self._store = None  # its connection does not come back; the next sign of life makes another
            raise


Place = FolderPlace | StorePlace


def connect(host: str, port: int, seconds: float) -> TCPStore:
    """Connect to a store that others serve, or raise OSError or DistError.

    torch itself prints its call stack if nobody answers, hence the first attempt.
    """
    until = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, port), timeout=max(until - time.monotonic(), 2 * POLL_S)).close()
            break
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(POLL_S)
    timeout = timedelta(seconds=max(until - time.monotonic(), 1.0))
    store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
    store.set_timeout(timedelta(seconds=60))
    return store


def _lock(descriptor: int, folder: Path) -> None:
    """Take the lock, or raise TimeoutError: a machine that was stopped in the middle of a write may hold it."""
    until = time.monotonic() + LOCKED_S
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise TimeoutError(f"another machine has held the lock in {folder} for {LOCKED_S:.0f} s") from None
            time.sleep(0.01)

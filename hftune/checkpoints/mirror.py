"""Keeps the output folders of machines without a common file system alike, while machines come and go. Independent of models.

While a job trains, the main machine serves its output folder, and ``checkpoint.copies`` other machines copy from it, each in a
thread of its first process: what a resume needs, after each checkpoint. Where a round goes on from is found in newest.py.

Machines with a common file system see the same folder, and none of this happens.
"""

from __future__ import annotations

import secrets
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from http.client import HTTPException
from pathlib import Path

from hftune.atomic import remove
from hftune.checkpoints.atomic_files import only_writer
from hftune.checkpoints.checkpointer import steps, tidy
from hftune.checkpoints.contents import Changed
from hftune.checkpoints.newest import BEHIND
from hftune.checkpoints.own_folders import note_id, own_address, own_folder, read_id
from hftune.checkpoints.transfer import INCOMING, Receiver, Source
from hftune.distributed.collectives import Collectives
from hftune.distributed.process_info import ProcessInfo
from hftune.errors import ConfigError

PAUSE_S = 1.0
"""Between two attempts."""
PATIENCE = 10
"""Attempts to reach the main machine before it is said that it cannot be reached; a lost one is said by others by then."""


class Copies:
    """Copies of the main machine's output folder on other machines, from ``begin`` until ``end``. Every process has one."""

    def __init__(self, folder: Path, copies: int, may_replace: bool, mark: Callable[[], None]):
        self.folder, self.copies, self.may_replace, self._mark = folder, copies, may_replace, mark
        self.source: Source | None = None
        """On the main process, if other machines copy from it."""
        self.receivers: list[str] = []
        """Hosts that copy."""
        self._thread: CopyThread | None = None
        self._held = ExitStack()
        self._is_ours: Callable[[], bool] = lambda: True

    def begin(self, group: Collectives) -> list[str]:
        """Begin to copy if machines have folders of their own; return notices on the main process. Collective."""
        run_id = group.broadcast(read_id(self.folder) or secrets.token_hex(8) if group.is_main else None)
        note_id(self.folder, run_id, group.is_main)
        with own_folder(group, self.folder, makes_it=True) as is_own:
            refusal = self._prepare(run_id) if is_own and not group.is_main else None
            host, rank = ProcessInfo.from_environment().host, group.process_index
            found = group.gather_to_main([(rank, host, refusal)] if is_own and not group.is_main else [])
        ready = sorted((rank, host) for rank, host, why in found or () if why is None)[: self.copies]
        chosen: list[tuple[int, str]] = group.broadcast(ready)
        if not any(rank == group.process_index for rank, _ in chosen):
            self._held.close()
        if chosen:
            self.receivers = [f"{host} ({rank})" for rank, host in chosen]
            self._connect(group, dict(chosen))
        if group.is_main:
            (self.folder / BEHIND).unlink(missing_ok=True)
        return notices(found, chosen) if found else []

    def _prepare(self, run_id: str) -> str | None:
        """Lock this machine's folder for its copy; return why it cannot have one, None if it can."""
        if steps(self.folder / "checkpoints") and read_id(self.folder) != run_id and not self.may_replace:
            return "output_dir holds another run there"
        try:
            self._is_ours = self._held.enter_context(only_writer(self.folder))
            remove(self.folder / INCOMING)
            tidy(self.folder / "checkpoints")
        except ConfigError as error:
            return str(error)
        return None

    def _connect(self, group: Collectives, chosen: dict[int, str]) -> None:
        def serve() -> tuple[tuple[str, int], str]:
            self.source = Source(self.folder, own_address(), secrets.token_hex(32))
            return self.source.address, self.source.token

        address, token = group.on_main(serve)
        if group.process_index in chosen:
            name = f"{chosen[group.process_index]} ({group.process_index})"
            self._thread = CopyThread(Receiver(self.folder, address, token, name, self._is_ours))
            self._thread.start()

    def end(self, is_awaited: bool = True) -> None:
        """End copying. Nothing is written to the folder of a copy afterwards.

        Args:
            is_awaited: first let the copies have what the main machine has now, as long as they make progress.
        """
        if self.source is not None:
            if is_awaited:
                self.source.finish(self.receivers, self._mark)
            self.source.close()
        if self._thread is not None:
            self._thread.end(is_awaited, self._mark)
        self.source, self._thread = None, None
        self._held.close()


class CopyThread(threading.Thread):
    """Copies whenever there is something new. What goes wrong is tried again and never ends the training."""

    def __init__(self, receiver: Receiver):
        super().__init__(name="copy", daemon=True)
        self.receiver = receiver
        self._over, self._is_last = threading.Event(), threading.Event()
        self._said, self._failed_in_a_row = "", 0

    def run(self) -> None:
        has, is_final, behind = 0, False, self.receiver.folder / BEHIND
        while not self._over.is_set() and not is_final:
            try:
                found = self.receiver.update(has)
                self._failed_in_a_row = 0
                if found is not None:
                    behind.unlink(missing_ok=True) if found.is_final else behind.touch()
                    has, is_final = found.version, found.is_final
            except (OSError, HTTPException, Changed, ValueError, LookupError) as error:
                if self._is_last.is_set() and isinstance(error, ConnectionError | TimeoutError | HTTPException):
                    return  # the main machine has ended
                self._say(error)
                self._over.wait(PAUSE_S)
        with suppress(OSError, HTTPException, Changed, ValueError, LookupError):
            self.receiver.update(has)  # says that it has all

    def _say(self, error: Exception) -> None:
        """Print once what keeps this machine from having a copy; not that the main machine is away for a moment."""
        is_far = isinstance(error, ConnectionError | TimeoutError | HTTPException)
        self._failed_in_a_row = self._failed_in_a_row + 1 if is_far else 0
        if isinstance(error, Changed) or (is_far and self._failed_in_a_row != PATIENCE) or str(error) == self._said:
            return
        self._said = str(error)
        address = "{}:{}".format(*self.receiver.address)
        what = f"{address} on the main machine does not answer" if is_far else f"{self.receiver.folder} could not be renewed"
        print(
            f"warning: The copy of the output folder on {ProcessInfo.from_environment().host} is not up to date, as {what}: "
            f"{error}. Training goes on, and it is tried again.",
            file=sys.stderr,
            flush=True,
        )

    def end(self, is_awaited: bool, mark: Callable[[], None]) -> None:
        """Wait for the last copy, as long as the main machine answers; or end the present one."""
        self._is_last.set()
        while is_awaited and self.is_alive():
            self.join(0.5)
            mark()
        self._over.set()
        self.receiver.close()
        self.join()


def notices(found: list[tuple[int, str, str | None]], chosen: list[tuple[int, str]]) -> list[str]:
    """Say who keeps a copy, and who cannot."""
    refusals = [f"{host} keeps no copy of output_dir: {why.removesuffix('.')}." for _, host, why in sorted(found) if why]
    if not chosen:
        return [*refusals, "The machines have no common file system, and no copy of the main machine's output_dir."]
    hosts = ", ".join(host for _, host in chosen)
    who = f"{hosts} {'keeps' if len(chosen) == 1 else 'keep'} a copy of output_dir"
    return [*refusals, f"The machines have no common file system: {who} (checkpoint.copies={len(chosen)})."]

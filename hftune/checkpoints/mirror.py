"""Keeps the output folders of machines without a common file system alike, while machines come and go. Independent of models.

While a job trains, the main machine serves its output folder, and ``checkpoint.copies`` other machines copy from it, each in a
thread of its first process: what a resume needs, after each checkpoint. When the machines of a round have met, the folder with
the newest state of the run becomes the main machine's, before anything in it is removed.

Machines with a common file system see the same folder, and none of this happens.
"""

from __future__ import annotations

import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

from hftune.atomic import remove
from hftune.checkpoints.atomic_files import only_writer, write_text
from hftune.checkpoints.checkpointer import newest_step, steps
from hftune.checkpoints.transfer import INCOMING, Changed, Receiver, Source
from hftune.distributed.collectives import Collectives
from hftune.distributed.network import interfaces, route_to
from hftune.distributed.process_info import ProcessInfo
from hftune.distributed.pulse import marked_while_moving
from hftune.distributed.rounds import AgentFolder
from hftune.errors import ConfigError, TrainingError

RUN_ID = ".run_id"
"""File in the output folder: a random word that copies of one run have in common. Also in the agent's folder."""
BEHIND = ".behind"
"""File in a copy that the main machine may be ahead of; not in one that was completed at the end of a round."""
TRIES = 3
"""Attempts to fetch a folder, when a machine has become the main one."""
PAUSE_S = 1.0
"""Between two attempts."""


@dataclass(frozen=True)
class Offer:
    """What the output folder of one machine holds."""

    rank: int
    """Of the machine's first process."""
    host: str
    run_id: str
    """Empty if the folder's run has none, as it was no elastic one."""
    job_run_id: str
    """Of the run that this job has trained so far, as far as this machine knows; empty if it has just come."""
    starts: int
    """How often training has started or resumed. Of two folders, the run has gone on from the one with more."""
    step: int
    """Of the newest whole checkpoint; 0 if there is none."""
    is_behind: bool = False
    """It is a copy, and the main machine may have taken more steps before it was lost."""


def choose(offers: list[Offer], may_replace: bool) -> Offer | None:
    """Return which folder to go on from; None if no machine has a checkpoint of this run.

    Args:
        offers: of all machines with a folder of their own, the main one's first.
        may_replace: whatever else the main machine's folder holds may be removed: resume=never.

    Raises:
        ConfigError: the main machine's folder holds another run, or in a new job several machines hold different ones.
    """
    main, others = offers[0], [offer for offer in offers if offer.step]
    run_id = next((offer.job_run_id for offer in offers if offer.job_run_id), None)
    if run_id is None and main.step:
        others = [main, *(offer for offer in others if offer.run_id == main.run_id != "" and offer is not main)]
    elif run_id is None:
        if len({offer.run_id for offer in others}) > 1:
            listed = ", ".join(f"{offer.host} (step {offer.step})" for offer in others)
            raise ConfigError(
                f"The machines hold checkpoints of different runs in output_dir: {listed}. Remove those that are not to be "
                "resumed, set output_dir=... to a new folder, or start over with resume=never."
            )
    else:
        others = [offer for offer in others if offer.run_id == run_id]
        if main.step and main.run_id != run_id and not may_replace:
            raise ConfigError(
                f"output_dir on {main.host}, which is now the main machine, holds the checkpoints of another run. Remove that "
                "folder there, or take the machine out of the job."
            )
    return max(others, key=lambda offer: (offer.starts, offer.step, -offer.rank), default=None)


def take_newest(group: Collectives, folder: Path, own_step: int, may_replace: bool) -> Offer | None:
    """Bring the newest state of the run from wherever it is into the main machine's folder. Collective.

    Args:
        own_step: of the main machine's newest whole checkpoint; 0 if there is none, or none that may be resumed from.
        may_replace: see ``choose``.

    Returns:
        Where it was; None if no machine has a checkpoint of this run.

    Raises:
        ConfigError: see ``choose``.
        TrainingError: it could not be fetched.
    """
    group.progress.stage("looking for the newest checkpoint on all machines")
    with own_folder(group, folder, makes_it=False) as is_own:
        step = own_step if group.is_main or not is_own else newest_step(folder / "checkpoints")
        offers = group.gather_to_main([offer(group.process_index, folder, step)] if is_own else [])
    chosen: Offer | None = group.on_main(lambda: choose(sorted(offers, key=lambda one: one.rank), may_replace))
    if chosen is None or chosen.rank == 0:
        return chosen
    token = group.broadcast(secrets.token_hex(32))
    with ExitStack() as stack:
        address = []
        if group.process_index == chosen.rank:
            source = Source(folder, own_address(), token, is_final=True)
            stack.callback(source.close)
            address = [source.address]
        found = group.gather_to_main(address)
        group.progress.stage(f"copying the checkpoints of {chosen.host}")

        def fetch() -> None:
            with marked_while_moving(group.progress):
                fetch_folder(Receiver(folder, found[0], token, "main"), chosen)

        group.on_main(fetch)
    return chosen


def fetch_folder(receiver: Receiver, chosen: Offer) -> None:
    """Copy all that is served into the folder of this machine.

    Raises:
        TrainingError: it could not be fetched.
    """
    for attempt in range(1, TRIES + 1):
        try:
            receiver.update()
        except (OSError, HTTPException, Changed) as error:
            if attempt == TRIES:
                raise TrainingError(
                    f"The newest checkpoint, of step {chosen.step}, is on {chosen.host} and could not be copied to this "
                    f"machine, which is now the main one: {error}. It is still there."
                ) from error
            time.sleep(PAUSE_S)
        else:
            return


def offer(rank: int, folder: Path, step: int) -> Offer:
    """Return what this machine's folder holds besides the checkpoint of this step."""
    info, ledger, starts = ProcessInfo.from_environment(), folder / "ledger.jsonl", 0
    if ledger.is_file():
        with ledger.open("rb") as lines:
            starts = sum(b'"after_step"' in line for line in lines)
    return Offer(rank, info.host, read_id(folder), job_run_id(), starts, step, (folder / BEHIND).exists())


def read_id(folder: Path) -> str:
    """Return the word that copies of a run have in common; empty if it has none."""
    path = folder / RUN_ID
    return path.read_text(encoding="utf-8").strip() if path.is_file() else ""


def job_run_id() -> str:
    """Return the word of the run that this job has trained so far, as far as this machine knows; empty if it does not."""
    agent = AgentFolder.from_environment()
    return "" if agent is None else read_id(agent.path)


@contextmanager
def own_folder(group: Collectives, folder: Path, makes_it: bool) -> Iterator[bool]:
    """Yield whether this is the first process of a machine that has an output folder of its own; the main one has. Collective.

    All create one file of the same name, which succeeds once in each folder. Looking for one would not do: over NFS a machine
    may not see one for a minute.

    Args:
        makes_it: create the folder. Without, one that is not there is its machine's own.

    Raises:
        ElsewhereError: as ``Collectives.on_main``.
    """
    name, is_own = f".seen-{secrets.token_hex(8)}", False

    def claim() -> str:
        nonlocal is_own
        is_own = is_first_to_create(folder, name, makes_it)
        return name

    name = group.on_main(claim)  # before the others: it is the main machine's folder, whoever sees it
    if not group.is_main and ProcessInfo.from_environment().local_rank == 0:
        claim()
    try:
        yield is_own
        group.any_process(False)  # nobody removes the file before all have tried
    finally:
        if is_own:
            with suppress(OSError):
                (folder / name).unlink()


def is_first_to_create(folder: Path, name: str, makes_it: bool) -> bool:
    """Create a file, and return whether it was not there yet. See ``own_folder``."""
    with suppress(OSError):  # a folder that cannot be written is nobody else's, either
        if makes_it:
            folder.mkdir(parents=True, exist_ok=True)
        try:
            if folder.is_dir():
                (folder / name).touch(exist_ok=False)
        except FileExistsError:
            return False
    return True


def own_address() -> str:
    """Return this machine's address on the network that the training uses."""
    present, name = interfaces(), os.environ.get("GLOO_SOCKET_IFNAME", "").lstrip("=").split(",")[0]
    if name in present:
        return min(present[name], key=lambda address: ":" in address)
    return route_to(ProcessInfo.from_environment().main_address or "localhost").address


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
        self._said = ""

    def run(self) -> None:
        has, is_final, behind = 0, False, self.receiver.folder / BEHIND
        while not self._over.is_set() and not is_final:
            try:
                found = self.receiver.update(has)
                if found is not None:
                    behind.unlink(missing_ok=True) if found.is_final else behind.touch()
                    has, is_final = found.version, found.is_final
            except (OSError, HTTPException, Changed) as error:
                if self._is_last.is_set() and isinstance(error, ConnectionError | TimeoutError | HTTPException):
                    return  # the main machine has ended
                self._say(error)
                self._over.wait(PAUSE_S)
        with suppress(OSError, HTTPException, Changed):
            self.receiver.update(has)  # says that it has all

    def _say(self, error: Exception) -> None:
        """Print what this machine cannot write, once; who cannot be reached, others say."""
        if isinstance(error, Changed | ConnectionError | TimeoutError | HTTPException) or str(error) == self._said:
            return
        self._said = str(error)
        print(
            f"warning: The copy of the newest checkpoint in {self.receiver.folder} could not be written: {error}. Training "
            "goes on, and it is tried again.",
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


def note_id(folder: Path, run_id: str, is_main: bool) -> None:
    """Record which run this job trains: in the main machine's output folder, and with the agent of each machine."""
    agent = AgentFolder.from_environment()
    if is_main and read_id(folder) != run_id:
        write_text(folder / RUN_ID, run_id)
    if agent is not None and ProcessInfo.from_environment().local_rank == 0:
        write_text(agent.path / RUN_ID, run_id)


def notices(found: list[tuple[int, str, str | None]], chosen: list[tuple[int, str]]) -> list[str]:
    """Say who keeps a copy, and who cannot."""
    refusals = [f"{host} keeps no copy of output_dir: {why.removesuffix('.')}." for _, host, why in sorted(found) if why]
    if not chosen:
        return [*refusals, "The machines have no common file system, and no copy of the main machine's output_dir."]
    hosts = ", ".join(host for _, host in chosen)
    who = f"{hosts} {'keeps' if len(chosen) == 1 else 'keep'} a copy of output_dir"
    return [*refusals, f"The machines have no common file system: {who} (checkpoint.copies={len(chosen)})."]

"""Which machines have an output folder of their own, and whose run is in it. Independent of models and of copying."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hftune.checkpoints.atomic_files import write_text
from hftune.distributed.collectives import Collectives
from hftune.distributed.network import interfaces, route_to
from hftune.distributed.process_info import ProcessInfo
from hftune.distributed.rounds import AgentFolder

RUN_ID = ".run_id"
"""File in the output folder: a random word that copies of one run have in common. Also in the agent's folder."""


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


def read_id(folder: Path) -> str:
    """Return the word that copies of a run have in common; empty if it has none."""
    path = folder / RUN_ID
    return path.read_text(encoding="utf-8").strip() if path.is_file() else ""


def job_run_id() -> str:
    """Return the word of the run that this job has trained so far, as far as this machine knows; empty if it does not."""
    agent = AgentFolder.from_environment()
    return "" if agent is None else read_id(agent.path)


def note_id(folder: Path, run_id: str, is_main: bool) -> None:
    """Record which run this job trains: in the main machine's output folder, and with the agent of each machine."""
    agent = AgentFolder.from_environment()
    if is_main and read_id(folder) != run_id:
        write_text(folder / RUN_ID, run_id)
    if agent is not None and ProcessInfo.from_environment().local_rank == 0:
        write_text(agent.path / RUN_ID, run_id)


def own_address() -> str:
    """Return this machine's address on the network that the training uses."""
    present, name = interfaces(), os.environ.get("GLOO_SOCKET_IFNAME", "").lstrip("=").split(",")[0]
    if name in present:
        return min(present[name], key=lambda address: ":" in address)
    return route_to(ProcessInfo.from_environment().main_address or "localhost").address

"""Finds the newest state of a run in the folders of all machines, and brings it to the main one. Independent of models."""

from __future__ import annotations

import secrets
import time
from contextlib import ExitStack
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

from hftune.checkpoints.checkpointer import newest_step
from hftune.checkpoints.contents import Changed
from hftune.checkpoints.own_folders import job_run_id, own_address, own_folder, read_id
from hftune.checkpoints.transfer import Receiver, Source
from hftune.distributed.collectives import Collectives
from hftune.distributed.process_info import ProcessInfo
from hftune.distributed.pulse import marked_while_moving
from hftune.errors import ConfigError, TrainingError

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

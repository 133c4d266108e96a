"""How the processes of a group that a launcher may restart find each other, and not their predecessors. Knows no training.

torchrun's agent keeps one store for all attempts. In torch 2.13 a restarted group reads there the addresses that the ended
one left, and fails with "Connection refused" (pytorch/pytorch#135712, #167288). TORCHELASTIC_RESTART_COUNT cannot tell the
groups apart: each machine counts its own restarts.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.rendezvous import register_rendezvous_handler, rendezvous

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters


def get_handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Return what makes the handler of ``rdzv_backend: hftune``. An entry point, which torchrun calls while it is imported."""

    def create_handler(params: RendezvousParameters) -> RendezvousHandler:
        from hftune.machines import create_handler

        return create_handler(params)

    return create_handler


def init_method() -> str | None:
    """Return what ``init_process_group`` should be given; None, which means torch's own, where nothing is ever restarted."""
    may_restart = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    if not may_restart or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    _register()
    return "hftune://"


@cache
def _register() -> None:
    register_rendezvous_handler("hftune", _meet)


def _meet(url: str, timeout: timedelta, **kwargs: Any) -> Iterator[tuple[Any, int, int]]:
    store, rank, num_processes = next(rendezvous("env://", timeout=timeout))
    yield dist.PrefixStore(agree(store, rank, num_processes, timeout), store), rank, num_processes


def agree(store: Any, rank: int, num_processes: int, timeout: timedelta) -> str:
    """Return a name that the processes have in common with each other and with no earlier group in this store.

    Process 0 invites; each other one answers under the newest invitation with a word of its own. An invitation counts once
    it is confirmed with that word, which the process 0 of an ended group cannot have heard.

    Raises:
        DistStoreError: the others did not come in time.
    """
    if rank == 0:
        name = uuid.uuid4().hex
        store.set("hftune/invitation", name)
        for other in range(1, num_processes):
            word = store.get(f"hftune/{name}/answer/{other}").decode()
            store.set(f"hftune/{name}/confirmed/{word}", "")
        return name
    word, until = uuid.uuid4().hex, time.monotonic() + timeout.total_seconds()
    while time.monotonic() < until:
        name = store.get("hftune/invitation").decode()
        store.set(f"hftune/{name}/answer/{rank}", word)
        if store.check([f"hftune/{name}/confirmed/{word}"]):
            return name
        time.sleep(0.05)
    raise dist.DistStoreError(f"Process 0 did not answer process {rank} within {timeout}.")

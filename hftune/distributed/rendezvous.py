"""How the processes of a restarted group find each other, and not their predecessors. Independent of training.

torchrun's agent keeps one store for all attempts. In torch 2.13 a restarted group reads the addresses that the
previous one left there, and fails with "Connection refused" (pytorch/pytorch#135712, #167288). TORCHELASTIC_RESTART_COUNT
cannot tell the groups apart: each machine counts its own restarts.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import register_rendezvous_handler, rendezvous

from hftune.distributed.process_info import ProcessInfo

JOIN = timedelta(hours=1)
"""For all processes to come: one machine may still be downloading what another one has."""
CONNECT = timedelta(seconds=10)
"""For the processes of an elastic job to connect, once all have come."""


def init_method() -> str | None:
    """Return the init_method for ``init_process_group``; None, torch's own, if the group is never restarted."""
    process = ProcessInfo.from_environment()
    if not ((process.may_restart or process.round is not None) and process.agent_has_store):
        return None
    _register()
    return "hftune://"


@cache
def _register() -> None:
    register_rendezvous_handler("hftune", _meet)


def _meet(url: str, timeout: timedelta, **kwargs: Any) -> Iterator[tuple[Any, int, int]]:
    store, rank, num_processes = next(rendezvous("env://", timeout=JOIN))
    if ProcessInfo.from_environment().round is None:
        store = agree(store, rank, num_processes, timeout)
    else:  # its store is new
        await_all(store, rank, num_processes, JOIN)
    yield store, rank, num_processes


def await_all(store: Any, rank: int, num_processes: int, timeout: timedelta) -> None:
    """Wait until all processes have come. What is left, to connect to each other, takes milliseconds.

    If one is lost then, Gloo waits for its connection five times as long as the group's timeout, and nothing wakes it
    (torch 2.13). So an elastic job has a short timeout there, see ``start_accelerator``, and waits for all in advance.

    Raises:
        DistStoreError: the other processes did not arrive in time.
    """
    store.set(f"hftune/here/{rank}", "")
    store.wait([f"hftune/here/{other}" for other in range(num_processes)], timeout)


def agree(store: Any, rank: int, num_processes: int, timeout: timedelta) -> Any:
    """Return a store that all processes of this attempt share, and no earlier attempt.

    Process 0 invites until all others have come.

    Raises:
        DistStoreError: the other processes did not arrive in time.
    """
    attempt, until = Attempt(dist.PrefixStore("group", store), rank), time.monotonic() + timeout.total_seconds()
    while (found := attempt.look()) is None or (rank == 0 and found.add("come", 0) < num_processes - 1):
        if time.monotonic() > until:
            raise dist.DistStoreError(f"Not all {num_processes} processes met within {timeout}, as process {rank} saw it.")
        time.sleep(0.05)
    if rank != 0:
        found.add("come", 1)
    return found


class Attempt:
    """The processes of one attempt of a group that may be restarted, of which earlier ones have used the same store.

    Process 0 invites, with a number that it raises at each look. The others follow an invitation whose number rises: process 0
    of an earlier attempt has ended, or looks no more.
    """

    def __init__(self, store: Any, rank: int):
        self._store, self._is_host = store, rank == 0
        self._job = f"hftune/{ProcessInfo.from_environment().run_id}"
        self._name, self._count = uuid.uuid4().hex if rank == 0 else "", 0
        self._seen: dict[str, str] = {}
        """The number of each invitation when it was first seen."""
        self._shared: Any = None

    def look(self) -> Any | None:
        """Return the store of this attempt, the same object while nothing changes; None until process 0 is seen to invite."""
        if self._is_host:
            self._count += 1
            self._store.set(f"{self._job}/invitation", f"{self._name} {self._count}")
            name, is_new = self._name, self._shared is None
        elif not self._store.check([f"{self._job}/invitation"]):
            return None
        else:
            name, _, count = self._store.get(f"{self._job}/invitation").decode().partition(" ")
            is_new = name != self._name and self._seen.setdefault(name, count) != count
        if is_new:
            self._name, self._shared = name, dist.PrefixStore(f"{self._job}/{name}", self._store)
        return self._shared if name == self._name else None

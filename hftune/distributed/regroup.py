"""Going on in the next round of an elastic job without a new process. Independent of models and of what is kept in memory.

The agent of a machine says in its folder that a round is over (rounds.py). If all processes are alive, they finish their step,
as for a request to stop. If one is lost, the others may stand in a collective for an hour: Gloo wakes nobody, even when its
group is aborted (torch 2.13). So a thread shuts this process's own connections to the others, and whoever waits gets an error
at once. The error becomes a RoundOver, the process waits to be told who is in the next round, and begins it as if it resumed.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hftune.distributed.failure_report import is_second_hand
from hftune.distributed.process_info import ProcessInfo
from hftune.distributed.rounds import LOOK_S, ROUND, AgentFolder, Over, present_round, wait_for_agent
from hftune.errors import ConfigError, DataError, Interrupted, TrainingError

DESCRIPTORS = Path("/proc/self/fd")
"""Where Linux lists the open files of a process."""
SET_BY_TRAINING = ("ACCELERATE_", "GLOO_", "NCCL_", "TP_")
"""Prefixes of variables that a round may set for itself, and that the next one finds as the launcher left them."""


class RoundOver(Interrupted):
    """A round of an elastic job is over, and this process goes on in the next one."""


class RoundWatch:
    """A context around one round in one process. Outside elastic jobs it does nothing.

    A thread waits for the agent's word. Until the process has promised to stay, that word changes nothing here: the agent ends
    the process itself.

    Args:
        promises: it promises at once, as it has a state to go on from.
    """

    def __init__(self, promises: bool = False) -> None:
        number = present_round()
        self.folder = None if number is None else AgentFolder.from_environment()
        self.number = 0 if number is None else number
        self.over: Over | None = None
        """Why the round is over; None while it goes on."""
        self.has_promised = False
        self._promises = promises
        self._left = threading.Event()
        self._joined: Callable[[], set[str]] = set
        """Returns the connections to the other processes."""

    @property
    def is_elastic(self) -> bool:
        """Whether the job has rounds."""
        return self.folder is not None

    @property
    def asks_to_leave(self) -> bool:
        """Whether to end the round after the present step, with all others."""
        return self.has_promised and self.over is not None and self.over.is_planned

    @property
    def is_broken(self) -> bool:
        """Whether a process is lost, and this one goes on without it: what it computes now leads to nothing."""
        return self.has_promised and self.over is not None and not self.over.is_planned

    def __enter__(self) -> RoundWatch:
        if self.is_elastic:
            threading.Thread(target=self._listen, name="hftune round", daemon=True).start()
        if self._promises:
            self.promise()
        return self

    def __exit__(self, *error: object) -> None:
        self._left.set()

    def promise(self) -> None:
        """Promise the agent that this process outlives the round. HFTUNE_REGROUP=restart forbids it."""
        if self.folder is not None and not self.has_promised and os.environ.get("HFTUNE_REGROUP") != "restart":
            self.has_promised = True
            self.folder.stay(self.number, ProcessInfo.from_environment().local_rank)

    @contextmanager
    def joining(self) -> Iterator[None]:
        """Take the connections that the block makes for those to the other processes.

        Within the block those to the store count, too: a process waits there for others that may be lost.

        Raises:
            RoundOver: the round is over before it has begun.
        """
        if not self.is_elastic:
            yield
            return
        before = connections()
        self._joined = lambda: connections() - before
        if self.has_promised and self.over is not None and not self.over.is_planned:
            raise RoundOver(self.over.reason)
        yield
        joined = connections(but_port=ProcessInfo.from_environment().main_port) - before
        self._joined = lambda: joined

    @contextmanager
    def outlived(
        self, has_failed: Callable[[], bool] = lambda: False, is_to_stop: Callable[[], bool] = lambda: False
    ) -> Iterator[None]:
        """Turn the error of a broken connection into a RoundOver if the agent says that the round is over.

        So does it with recipe or data that were right in the rounds before: the newcomer that they are wrong on leaves.

        Args:
            has_failed: whether a process is known to have failed by itself: then the job ends, whatever the agent says.
            is_to_stop: whether this process was asked to stop. It cannot finish its step: its agent hung, or was cut off, and
                the others go on without it.

        Raises:
            RoundOver: to be handled where the next round begins.
            Interrupted: this process was asked to stop.
        """
        try:
            yield
        except Interrupted:
            raise
        except (ConfigError, DataError):
            over = wait_for_agent(lambda: has_failed() or is_to_stop()) if self._promises and self.has_promised else None
            if over is None:
                raise
            raise RoundOver(over.reason) from None
        except RuntimeError as error:
            is_settled = hasattr(error, "report")  # the processes of this round have agreed that the job ends
            if is_settled or not self.has_promised or not (is_second_hand(error) or _is_about_store(error)):
                raise
            over = wait_for_agent(lambda: has_failed() or is_to_stop())
            if is_to_stop() and not has_failed():
                raise Interrupted(
                    "Asked to stop in a step that cannot be finished: the other processes have left it."
                ) from None
            if over is None:
                raise
            raise RoundOver(over.reason) from None

    def hang_up(self) -> None:
        """Shut the connections to the other processes: whoever waits in a collective, here and there, gets an error."""
        hang_up(self._joined())

    def _listen(self) -> None:
        while not self._left.wait(LOOK_S):
            if self.over is None or self.over.is_planned:  # a machine may be lost while all finish their step
                self.over = self.folder.over(self.number) or self.over
            if self.is_broken:
                self.hang_up()  # again and again: the main thread may be making new ones
                self._left.wait(4 * LOOK_S)


def _is_about_store(error: RuntimeError) -> bool:
    """Say whether the launcher's store did not answer; it may have been on the machine that is lost."""
    import torch.distributed as dist

    return isinstance(error, dist.DistError) or isinstance(error.__cause__, dist.DistError)


def can_hang_up() -> bool:
    """Say whether this system lets a process find its own connections."""
    return DESCRIPTORS.is_dir()


def connections(but_port: int | None = None) -> set[str]:
    """Return the TCP connections of this process, by the names that Linux gives them.

    Args:
        but_port: leave out those that have this port at either end.
    """
    return {name for name, one in _sockets() if _is_connection(one, but_port)}


def connections_to(port: int) -> set[str]:
    """Return the TCP connections of this process to a port, by the names that Linux gives them."""
    return {name for name, one in _sockets() if _is_connection(one, None) and _port_of_peer(one) == port}


def hang_up(names: set[str]) -> None:
    """Shut these connections. Both ends get errors; nothing is closed here, so no other file can take a number."""
    for name, one in _sockets():
        if name in names:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


def _sockets() -> Iterator[tuple[str, socket.socket]]:
    """Yield name and socket of each open one; the socket is a copy that is closed afterwards."""
    if not can_hang_up():
        return
    for path in DESCRIPTORS.iterdir():
        try:
            name = str(path.readlink())
            if name.startswith("socket:"):
                with socket.socket(fileno=os.dup(int(path.name))) as one:
                    yield name, one
        except OSError:  # closed meanwhile
            continue


def _is_connection(one: socket.socket, but_port: int | None) -> bool:
    if one.type != socket.SOCK_STREAM or one.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    try:
        return but_port not in (one.getpeername()[1], one.getsockname()[1])
    except OSError:  # it listens
        return False


def _port_of_peer(one: socket.socket) -> int | None:
    try:
        return one.getpeername()[1]
    except OSError:  # it has just ended
        return None


class Environment:
    """The launcher's variables, as they were before the first round of this process."""

    def __init__(self) -> None:
        self._before = {name: value for name, value in os.environ.items() if name.startswith(SET_BY_TRAINING)}
        self._parent = os.getppid()

    def next_round(self, number: int) -> None:
        """Wait for the agent to tell who is in a round, and set what a launcher sets for a process in it.

        Raises:
            TrainingError: the agent has ended.
        """
        folder, info = AgentFolder.from_environment(), ProcessInfo.from_environment()
        while (members := folder.members(number)) is None:
            if os.getppid() != self._parent:
                raise TrainingError(f"The launcher on host {info.host} ended before round {number} began.")
            time.sleep(LOOK_S / 5)
        for name in [name for name in os.environ if name.startswith(SET_BY_TRAINING) and name not in self._before]:
            del os.environ[name]
        local_rank = info.local_rank if members.local_ranks is None else members.local_ranks[info.local_rank]
        told = {
            **{"RANK": str(members.first_rank + local_rank), "WORLD_SIZE": str(members.world_size)},
            **{"LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(members.local_world_size or info.local_world_size)},
            **{"GROUP_RANK": str(members.machine_rank), "GROUP_WORLD_SIZE": str(members.num_machines)},
            **{"MASTER_ADDR": members.address, "MASTER_PORT": str(members.port)},
            ROUND: str(members.round),
        }
        os.environ.update({**self._before, **told})

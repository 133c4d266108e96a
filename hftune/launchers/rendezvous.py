"""How the machines of a job meet, before any process is started or GPU held. Independent of training.

torchrun and accelerate launch use this behind the rendezvous backend "hftune" (elastic/handler.py), if the number of machines
is fixed. It is their static backend except for the waiting, which names who is there, who is missing and why, and ends with a
message. The machine whose address is the job's address (``main_process_ip``) is the main one, so the same command works on
all.
"""

from __future__ import annotations

import json
import math
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, NoReturn

from torch.distributed import DistError, PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousParameters
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from hftune.distributed.network import JOIN_TIMEOUT, PORT, UnknownHost, is_own_address, resolve, route_to
from hftune.errors import ConfigError

MACHINES = "HFTUNE_MACHINES"
JOIN_TIMEOUT_S = 300.0  # people start the second machine by hand, and imports from a cold network disk take a minute
DOCTOR_TIMEOUT_S = 25.0  # whoever runs the doctor wants an answer soon
ANSWER_S = 5.0  # for a program that accepts a connection to answer as a launcher's store does
PATIENCE_S = 5.0  # before the first message
REMINDER_S = 15.0


@dataclass(frozen=True)
class Machine:
    """What a machine tells the others about itself."""

    host: str
    address: str
    interface: str
    num_machines: int
    """As its launcher was told."""

    def __str__(self) -> str:
        return f"{self.host} ({self.address} on {self.interface})"


def create_fixed(params: RendezvousParameters) -> FixedRendezvous:
    """Read the parameters of a launcher with a fixed number of machines.

    Raises:
        SystemExit: there is no address, or it is invalid.
    """
    if not params.endpoint and params.max_nodes == 1:
        params.endpoint = "127.0.0.1:0"  # accelerate passes no address for one machine
    if not params.endpoint:
        leave("rdzv_backend hftune needs main_process_ip, without --same_network (torchrun: --rdzv-endpoint HOST:PORT).")
    try:
        host, port = parse_rendezvous_endpoint(params.endpoint, PORT)
    except ValueError as error:
        leave(f"{params.endpoint}: {error}")
    return FixedRendezvous(
        host, port, params.max_nodes, params.run_id, join_timeout_s(params.config.get("join_timeout")), params.config
    )


def join_timeout_s(given: str | None) -> float:
    """Return how long to wait for the other machines: --rdzv_conf join_timeout=S, HFTUNE_JOIN_TIMEOUT_S or the default."""
    value = given or os.environ.get(JOIN_TIMEOUT)
    if value is None:
        return DOCTOR_TIMEOUT_S if "hftune.doctor" in sys.argv else JOIN_TIMEOUT_S
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        leave(f"{'--rdzv_conf join_timeout' if given else JOIN_TIMEOUT}={value} is not a number of seconds.")
    return seconds


def leave(message: str, code: int = 1) -> NoReturn:
    """End the launcher with one message; a traceback would not help.

    Args:
        code: 1; 0 if there is nothing left to do; REFUSED if it cannot be started like this; STOPPED if a scheduler may start
            it again.
    """
    say(message)
    sys.exit(code)


class FixedRendezvous(StaticTCPRendezvous):
    """Opens the store on the main machine and connects to it on the others."""

    def __init__(self, host: str, port: int, num_machines: int, run_id: str, timeout_s: float, config: Any):
        super().__init__(host, port, rank=-1, world_size=num_machines, run_id=run_id, timeout=600)
        self.timeout_s, self.endpoint = timeout_s, f"{host}:{port}"
        self.is_host = {"true": True, "false": False}.get(str(config.get("is_host", "")).lower())

    def get_backend(self) -> str:
        return "hftune"

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other machines once; a restarted group uses the same store.

        Raises:
            SystemExit: some did not arrive, or they do not fit together; the message says which and why.
        """
        if self._store is None:  # type: ignore[has-type]
            try:
                store, is_host = self.find_store()
                self._store = store
                self.rank = self._gather(PrefixStore(f"hftune/machines/{self.run_id}", store), is_host)
            except ConfigError as error:
                leave(str(error))
            except DistError:
                leave(f"The launcher at {self.endpoint} exited while {self.machine} was waiting; see its log.")
        return super().next_rendezvous()

    def find_store(self) -> tuple[TCPStore, bool]:
        """Open the store if this machine has its address and no other process has opened it, or connect to it.

        Returns:
            The store, and whether this process serves it.

        Raises:
            ConfigError: nothing answers in time, or another program does; or the address is none.
        """
        self.began, self.next_reminder_s = time.monotonic(), PATIENCE_S
        self.until = self.began + self.timeout_s
        while True:  # a pod of Kubernetes may start before the name of another one has an address
            try:
                address = resolve(self.master_addr)
                break
            except UnknownHost as error:
                if re.fullmatch(r"[\d.]+", self.master_addr):
                    raise
                reason = str(error).rstrip(".")
                self._wait(lambda reason=reason: reason)  # type: ignore[misc]
        is_host = is_own_address(address) if self.is_host is None else self.is_host
        route = route_to(address)
        self.machine = Machine(socket.gethostname(), route.address, route.interface, self.world_size)
        store = self._open_store() if is_host else None
        return (self._reach(address, is_taken=is_host), False) if store is None else (store, True)

    def _open_store(self) -> TCPStore | None:
        """Open the port, or return None if it is taken: by another launcher of this job on the same machine, perhaps."""
        allow_open_files()
        options: dict[str, Any] = {"wait_for_workers": False, "multi_tenant": True}
        if self.world_size == 1 and resolve(self.master_addr) == "127.0.0.1":
            # torch would listen on all interfaces, and anyone who reaches a store controls the job.
            try:
                with socket.create_server((self.master_addr, self.master_port)) as server:  # type: ignore[has-type]
                    self.master_port = server.getsockname()[1]  # any if it was 0
                    options["master_listen_fd"] = server.detach()
            except OSError as error:
                owner = owner_of(self.master_port)
                raise ConfigError(f"The port of {self.endpoint} cannot be opened{owner}: {error.strerror}.") from error
        try:
            return TCPStore(self.master_addr, self.master_port, None, True, self.timeout, **options)
        except DistError as error:
            if "EADDRINUSE" not in str(error):
                raise ConfigError(f"The port of {self.endpoint} cannot be opened: {error}") from error
            return None

    def _gather(self, store: Any, is_host: bool) -> int:
        """Wait until all machines are here and know it; return this one's rank.

        Raises:
            ConfigError: some did not arrive, have left, or were started for a different number of machines.
        """
        rank, here = 0 if is_host else int(store.add("joined", 1)), list[Machine]()
        if rank >= self.world_size:
            raise ConfigError(
                f"The job at {self.endpoint} already has all {self.world_size} machines. Is an earlier launcher still "
                "running there, or was one started twice?"
            )
        store.set(f"machine/{rank}", json.dumps(asdict(self.machine)))
        while len(here) < self.world_size:
            for index in range(len(here), min(int(store.add("joined", 0)) + 1, self.world_size)):
                _await(store, f"machine/{index}", "A machine joined and left again without a message")
                here.append(Machine(**json.loads(store.get(f"machine/{index}"))))
            if unlike := [one for one in here if one.num_machines != here[0].num_machines]:
                if is_host:
                    time.sleep(1.0)  # for the others to see it, too
                raise ConfigError(
                    f"{unlike[0]} was started for {unlike[0].num_machines} machines, and {here[0]} for "
                    f"{here[0].num_machines}. Start all with the same num_machines (--nnodes)."
                )
            if len(here) < self.world_size:
                self._wait(lambda: self._missing(here))
        store.set(f"ready/{rank}", "")
        for index, one in enumerate(here):
            _await(store, f"ready/{index}", f"{one} joined and left again")
        if is_host and self.next_reminder_s > PATIENCE_S:
            say(f"All {self.world_size} machines are here: {', '.join(map(str, here))}.")
        return rank

    def _missing(self, here: list[Machine]) -> str:
        known = {machine.host.partition(".")[0] for machine in here} | {machine.address for machine in here}
        names = os.environ.get(MACHINES, "").replace(",", " ").split()
        named = [name for name in names if known.isdisjoint((name, name.partition(".")[0]))]
        who, count = f" Missing: {', '.join(named)}." if named else "", self.world_size - len(here)
        return (
            f"{len(here)} of {self.world_size} machines {'is' if len(here) == 1 else 'are'} here: {', '.join(map(str, here))}."
            f"{who} {count} more must be started with the same command, and be able to reach {self.endpoint} "
            "(firewall, address, port)"
        )

    def _reach(self, address: str, is_taken: bool) -> TCPStore:
        """Connect to the main machine's store.

        Raises:
            ConfigError: nothing answers, or another program does.
        """
        while True:
            try:
                socket.create_connection((address, self.master_port), timeout=ANSWER_S).close()
                break
            except OSError as error:
                reason = "no answer" if isinstance(error, TimeoutError) else error.strerror
                said = (
                    f"Nothing answers at {self.endpoint} ({reason}); this machine is {self.machine}. The machine with that "
                    "address must be started with the same command and port; if none has it, correct main_process_ip"
                )
                self._wait(lambda said=said: said)  # type: ignore[misc]
        answers: list[Any] = []

        def connect() -> None:
            try:
                store = TCPStore(address, self.master_port, None, False, timedelta(seconds=ANSWER_S), wait_for_workers=False)
                store.check(["hftune"])
                answers.append(store)
            except DistError as error:
                answers.append(error)

        # In a thread that can be abandoned: a listener that is no store may never answer.
        threading.Thread(target=connect, daemon=True).start()
        until = time.monotonic() + ANSWER_S
        while not answers and time.monotonic() < until:
            time.sleep(0.05)
        if answers and isinstance(answers[0], TCPStore):
            answers[0].set_timeout(self.timeout)
            return answers[0]
        where = "on this machine" if is_taken else f"on {self.master_addr}"
        raise ConfigError(
            f"Port {self.master_port} {where} is taken by another program{owner_of(self.master_port) if is_taken else ''}: it "
            "accepts connections but does not answer as a launcher. Give all machines a different --main_process_port."
        )

    def _wait(self, describe: Callable[[], str]) -> None:
        """Sleep for a moment, and print every REMINDER_S what is awaited.

        Raises:
            ConfigError: the time is over.
        """
        waited_s = time.monotonic() - self.began
        if time.monotonic() > self.until:
            raise ConfigError(
                f"{describe()}. Waited {self.timeout_s:.0f} s; {JOIN_TIMEOUT}={2 * self.timeout_s:.0f} waits longer."
            )
        if waited_s > self.next_reminder_s:
            say(f"{describe()}. Waiting, for up to {self.timeout_s:.0f} s.")
            self.next_reminder_s += REMINDER_S
        time.sleep(0.2)


def _await(store: Any, key: str, otherwise: str) -> None:
    try:
        store.wait([key], timedelta(seconds=ANSWER_S))
    except DistError:
        raise ConfigError(f"{otherwise}. Start the command on all machines again.") from None


def owner_of(port: int) -> str:
    """Name the process that listens on a port of this machine, if this user may know it."""
    import psutil

    with suppress(psutil.AccessDenied, psutil.NoSuchProcess):
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                return f" ({psutil.Process(connection.pid).name()}, pid {connection.pid})"
    return ""


def say(text: str) -> None:
    """Print a message of the launcher."""
    print(f"hftune: {text}", file=sys.stderr, flush=True)


def allow_open_files(most: int = 65536) -> None:
    """Raise this process's limit of open files as far as permitted: the store takes two for each process of the job."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = most if hard == resource.RLIM_INFINITY else min(most, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))

"""Several machines out of one: network namespaces on one switch, each with a host name and an address of its own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from string import ascii_uppercase

MAIN = "10.77.0.1"


class NotAllowed(RuntimeError):
    """This machine, or this user, cannot make network namespaces."""


@dataclass(frozen=True)
class Machine:
    """One of them."""

    name: str
    namespace: str
    interface: str
    address: str

    @property
    def prefix(self) -> tuple[str, ...]:
        """What to put before a command to run it there."""
        script = f'hostname {self.name}; exec "$@"'
        return ("ip", "netns", "exec", self.namespace, "unshare", "--uts", "sh", "-c", script, "sh")

    def cut(self) -> None:
        """Pull its cable."""
        _ip("-n", self.namespace, "link", "set", self.interface, "down")

    def mend(self) -> None:
        """Plug it in again."""
        _ip("-n", self.namespace, "link", "set", self.interface, "up")

    @property
    def processes(self) -> list[int]:
        """All that run there, whoever started them."""
        here, found = Path("/run/netns", self.namespace).stat().st_ino, []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):  # it has just ended
                if entry.name.isdigit() and (entry / "ns/net").stat().st_ino == here:
                    found.append(int(entry.name))
        return found

    def signal(self, number: int) -> None:
        """Send a signal to all of its processes."""
        for pid in self.processes:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self) -> None:
        """End all of its processes at once. Its kernel lives, and closes their connections."""
        while self.processes:  # one may be starting another
            self.signal(signal.SIGKILL)

    def power_off(self) -> None:
        """End it as a power failure does: nobody hears that its connections are closed. It has power again when this returns."""
        self.cut()
        self.kill()
        self.mend()


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextmanager
def several_machines(count: int) -> Iterator[list[Machine]]:
    """Yield machineA (10.77.0.1), machineB (10.77.0.2) and so on.

    Raises:
        NotAllowed: saying why.
    """
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        raise NotAllowed("needs ip and unshare, to make several machines of one")
    switch = f"hftune{os.getpid()}"
    # An interface's name has 15 letters at most.
    machines = [
        Machine(f"machine{letter}", f"hftune{letter}{os.getpid()}", f"{letter}{os.getpid()}", f"10.77.0.{number}")
        for number, letter in enumerate(ascii_uppercase[:count], start=1)
    ]
    try:
        try:
            _ip("netns", "add", switch)
            _ip("-n", switch, "link", "add", "switch", "type", "bridge")
            _ip("-n", switch, "link", "set", "switch", "up")
            for machine in machines:
                _ip("netns", "add", machine.namespace)
                ends = (machine.interface, "netns", machine.namespace), (machine.interface, "netns", switch)
                _ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
                _ip("-n", switch, "link", "set", machine.interface, "master", "switch", "up")
                _ip("-n", machine.namespace, "addr", "add", f"{machine.address}/24", "dev", machine.interface)
                _ip("-n", machine.namespace, "link", "set", "lo", "up")
                _ip("-n", machine.namespace, "link", "set", machine.interface, "up")
        except subprocess.CalledProcessError as error:
            raise NotAllowed(f"may not make network namespaces: {error.stderr.decode().strip()}") from error
        yield machines
    finally:
        for namespace in [*(machine.namespace for machine in machines), switch]:
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True)


@contextmanager
def two_machines() -> Iterator[list[Machine]]:
    """Yield machineA (10.77.0.1) and machineB (10.77.0.2); see ``several_machines``."""
    with several_machines(2) as machines:
        yield machines

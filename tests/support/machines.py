"""Two machines out of one: network namespaces joined by a cable, each with a host name and an address of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

MAIN = "10.77.0.1"


class NotAllowed(RuntimeError):
    """This machine, or this user, cannot make network namespaces."""


@dataclass(frozen=True)
class Machine:
    """One of the two."""

    name: str
    namespace: str
    interface: str

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


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextmanager
def two_machines() -> Iterator[list[Machine]]:
    """Yield machineA (10.77.0.1) and machineB (10.77.0.2).

    Raises:
        NotAllowed: saying why.
    """
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        raise NotAllowed("needs ip and unshare, to make two machines of one")
    # An interface's name has 15 letters at most.
    machines = [Machine(f"machine{letter}", f"hftune{letter}{os.getpid()}", f"{letter}{os.getpid()}") for letter in "AB"]
    try:
        try:
            for machine in machines:
                _ip("netns", "add", machine.namespace)
            ends = [machine.interface for machine in machines]
            _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
            for number, machine in enumerate(machines, start=1):
                _ip("link", "set", machine.interface, "netns", machine.namespace)
                _ip("-n", machine.namespace, "addr", "add", f"10.77.0.{number}/24", "dev", machine.interface)
                _ip("-n", machine.namespace, "link", "set", "lo", "up")
                _ip("-n", machine.namespace, "link", "set", machine.interface, "up")
        except subprocess.CalledProcessError as error:
            raise NotAllowed(f"may not make network namespaces: {error.stderr.decode().strip()}") from error
        yield machines
    finally:
        for machine in machines:
            subprocess.run(["ip", "netns", "del", machine.namespace], capture_output=True)

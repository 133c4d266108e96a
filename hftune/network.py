"""Which of this machine's network interfaces lead to the other machines. Knows no process group and no training."""

from __future__ import annotations

import ipaddress
import os
import socket
from dataclasses import dataclass

from hftune.errors import ConfigError
from hftune.messages import did_you_mean

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@dataclass(frozen=True)
class Route:
    """The way from this machine to an address: the interface that it takes, and this machine's address on it."""

    interface: str
    address: str

    def __str__(self) -> str:
        return f"{self.address} on {self.interface}"


def interfaces() -> dict[str, list[str]]:
    """Return the addresses of each network interface that is up."""
    import psutil

    states = psutil.net_if_stats()
    addresses = {
        name: [entry.address.partition("%")[0] for entry in entries if entry.family in (socket.AF_INET, socket.AF_INET6)]
        for name, entries in psutil.net_if_addrs().items()
    }

    def is_up(name: str) -> bool:  # an alias such as eth0:1 has no state of its own
        state = states.get(name) or states.get(name.partition(":")[0])
        return state is not None and state.isup

    return {name: found for name, found in addresses.items() if found and is_up(name)}


def outward_interfaces() -> dict[str, list[str]]:
    """Return those of them that lead out of this machine: all but the loopback."""
    return {name: found for name, found in interfaces().items() if not any(map(_is_loopback, found))}


def resolve(host: str) -> str:
    """Return the address of a host; IPv4 where there is one.

    Raises:
        ConfigError: the name means nothing here.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(
            f"{host!r} is the address of no machine ({error.strerror}). Give main_process_ip as numbers."
        ) from error
    return min(found, key=lambda entry: entry[0] != socket.AF_INET)[4][0]


def route_to(host: str) -> Route:
    """Return the way to a host, without sending anything.

    Raises:
        ConfigError: there is none; the message lists this machine's own addresses.
    """
    address = resolve(host)
    with socket.socket(_family(address), socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # of a datagram socket: only looks the route up
            own = probe.getsockname()[0].partition("%")[0]
        except OSError as error:
            raise ConfigError(
                f"No network of this machine leads to {host} ({error.strerror}). It has {own_addresses()}."
            ) from error
    for name, addresses in interfaces().items():
        if own in addresses:
            return Route(name, own)
    return Route("lo" if ipaddress.ip_address(own).is_loopback else "an unknown interface", own)


def is_own_address(address: str) -> bool:
    """Say whether an address is one of this machine's."""
    with socket.socket(_family(address), socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def own_addresses() -> str:
    """List this machine's addresses, the loopback's last."""
    pairs = [(address, name) for name, addresses in interfaces().items() for address in addresses if ":" not in address]
    pairs.sort(key=lambda pair: ipaddress.ip_address(pair[0]).is_loopback)
    return ", ".join(f"{address} ({name})" for address, name in pairs) or "no address"


def check_interfaces() -> None:
    """Refuse names of interfaces that this machine does not have: Gloo would fail with "Unable to find address".

    Raises:
        ConfigError: GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names no interface.
    """
    present = interfaces()
    for variable in VARIABLES:
        given = os.environ.get(variable, "")
        for name in filter(None, given.lstrip("=").split(",")):
            if not given.startswith("^") and not any(other.startswith(name) for other in present):
                hint = did_you_mean(name, present)
                raise ConfigError(f"{variable}={given}: this machine has no such interface.{hint} It has {own_addresses()}.")


def choose_interface(main_host: str) -> Route:
    """Point Gloo and NCCL at the interface that leads to the main machine, where the user has not.

    Left alone, Gloo takes the interface that the host's own name resolves to: 127.0.1.1 on a Debian, which no other machine
    reaches.

    Raises:
        ConfigError: as ``check_interfaces``; or there is no way to the main machine, or no telling which one it is.
    """
    check_interfaces()
    present = interfaces()
    route = route_to(main_host)
    if ipaddress.ip_address(route.address).is_loopback and main_host != "localhost" and not _is_address(main_host):
        outward = outward_interfaces()
        if len(outward) != 1 and VARIABLES[0] not in os.environ:
            raise ConfigError(
                f"{main_host} means {route.address} on this machine, which others do not reach. Set main_process_ip to its "
                f"address in the network, or GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME. It has {own_addresses()}."
            )
        if len(outward) == 1:
            ((name, addresses),) = outward.items()
            route = Route(name, addresses[0])
    if route.interface not in present:
        raise ConfigError(f"No interface of this machine has {route.address}. It has {own_addresses()}. Set {VARIABLES[0]}.")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", route.interface)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={route.interface}")  # "=": this one, and not all that begin so
    return route


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET

"""Which of this machine's network interfaces lead to the other machines. Independent of process groups and training."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hftune.errors import ConfigError, did_you_mean

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
DESCRIPTORS = Path("/proc/self/fd")
"""Where Linux lists the open files of a process."""
NCCL_CONF = "/etc/nccl.conf"
PORT = 29500
"""Where machines meet, if no other is given."""
JOIN_TIMEOUT = "HFTUNE_JOIN_TIMEOUT_S"
"""The variable that says how long they wait for each other."""


class UnknownHost(ConfigError):
    """A name that does not resolve to an address; it may do so later."""


@dataclass(frozen=True)
class Route:
    """The route from this machine to an address: the interface it takes, and this machine's address on it."""

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

    up = {name for name, state in states.items() if state.isup}  # an alias such as eth0:1 has no state of its own
    return {name: listed for name, listed in addresses.items() if listed and not up.isdisjoint((name, name.partition(":")[0]))}


def outward_interfaces() -> dict[str, list[str]]:
    """Return the interfaces that lead out of this machine: all but the loopback."""
    return {name: addresses for name, addresses in interfaces().items() if not any(map(_is_loopback, addresses))}


def resolve(host: str) -> str:
    """Return the address of a host; an IPv4 address if it has one.

    Raises:
        UnknownHost: the name does not resolve.
    """
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UnknownHost(
            f"{host!r} does not resolve to an address ({error.strerror}). Set main_process_ip to the main machine's IP address."
        ) from error
    return str(min(entries, key=lambda entry: entry[0] != socket.AF_INET)[4][0])


def route_to(host: str) -> Route:
    """Return the route to a host, without sending anything.

    Raises:
        ConfigError: there is no route; the message lists this machine's own addresses.
    """
    address = resolve(host)
    with socket.socket(family(address), socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # a datagram socket only looks the route up
            source = probe.getsockname()[0].partition("%")[0]
        except OSError as error:
            raise ConfigError(
                f"This machine has no route to {host} ({error.strerror}). It has {own_addresses()}. "
                "Check that address and the network."
            ) from error
    for name, addresses in interfaces().items():
        if source in addresses:
            return Route(name, source)
    return Route("lo" if _is_loopback(source) else "an unknown interface", source)


def is_own_address(address: str) -> bool:
    """Say whether an address is one of this machine's.

    Not by trying to bind it: with net.ipv4.ip_nonlocal_bind=1, as on machines that run keepalived, any address can be bound.
    """
    own = {_plain(other) for addresses in interfaces().values() for other in addresses}
    if _is_loopback(address) or _plain(address) in own:
        return True
    try:
        return _plain(route_to(address).address) == _plain(address)
    except ConfigError:  # no route
        return False


def own_addresses() -> str:
    """List this machine's addresses, the loopback's last; IPv6 addresses only of interfaces that have no others."""
    pairs = []
    for name, addresses in interfaces().items():
        plain = [address for address in addresses if ":" not in address]
        pairs += [(address, name) for address in plain or addresses if not ipaddress.ip_address(address).is_link_local]
    pairs.sort(key=lambda pair: _is_loopback(pair[0]))
    return ", ".join(f"{address} ({name})" for address, name in pairs) or "no address"


def check_interfaces() -> None:
    """Reject names of interfaces that this machine does not have: Gloo would fail with "Unable to find address".

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
    """Point Gloo and NCCL at the interface that leads to the main machine, unless the user has.

    By default, Gloo takes the interface that the host's own name resolves to: 127.0.1.1 on Debian, which no other machine
    reaches.

    Raises:
        ConfigError: as ``check_interfaces``; or there is no route to the main machine, or it is unclear which interface
            leads there.
    """
    check_interfaces()
    present = interfaces()
    route = route_to(main_host)
    is_name = main_host != "localhost" and ":" not in main_host and not re.fullmatch(r"[\d.]+", main_host)
    if is_name and _is_loopback(route.address):
        outward = outward_interfaces()
        if len(outward) != 1 and VARIABLES[0] not in os.environ:
            raise ConfigError(
                f"{main_host} resolves to {route.address} on this machine, which other machines cannot reach. Set "
                f"main_process_ip to its address in the network, or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME. It has "
                f"{own_addresses()}."
            )
        if len(outward) == 1:
            ((name, addresses),) = outward.items()
            route = Route(name, addresses[0])
    if route.interface not in present:
        raise ConfigError(
            f"No interface of this machine has the address {route.address}. It has {own_addresses()}. Set {VARIABLES[0]}."
        )
    os.environ.setdefault("GLOO_SOCKET_IFNAME", route.interface)
    if not is_in_nccl_conf("NCCL_SOCKET_IFNAME"):
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={route.interface}")  # "=": this one, not all with this prefix
    return route


def stay_on_this_machine() -> None:
    """Point Gloo at the loopback, which no other machine reaches, unless the user has set an interface. For one machine."""
    loopback = next((name for name, addresses in interfaces().items() if all(map(_is_loopback, addresses))), None)
    if loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)


def is_in_nccl_conf(name: str) -> bool:
    """Say whether one of NCCL's own files sets a variable, which the environment would override.

    Source: NCCL's documentation, "Environment Variables": NCCL_CONF_FILE or ~/.nccl.conf, and /etc/nccl.conf.
    """
    paths = [os.environ.get("NCCL_CONF_FILE") or f"{os.environ.get('HOME', '')}/.nccl.conf", NCCL_CONF]
    for path in map(Path, paths):
        try:
            lines = path.read_text(errors="replace").splitlines()
        except OSError:
            continue
        if any(line.partition("=")[0].strip() == name for line in lines):
            return True
    return False


def hang_up(port: int) -> None:
    """Shut this process's connections to a port: whoever waits there for an answer gets an error at once. On Linux only.

    Nothing is closed here, so no other file can take a number.
    """
    for path in DESCRIPTORS.iterdir() if DESCRIPTORS.is_dir() else ():
        with suppress(OSError):  # it listens, or was closed meanwhile
            if path.readlink().name.startswith("socket:"):
                with socket.socket(fileno=os.dup(int(path.name))) as one:
                    is_tcp = one.type == socket.SOCK_STREAM and one.family in (socket.AF_INET, socket.AF_INET6)
                    if is_tcp and one.getpeername()[1] == port:
                        one.shutdown(socket.SHUT_RDWR)


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _plain(address: str) -> str:
    """Return the canonical spelling of an address."""
    return str(ipaddress.ip_address(address.partition("%")[0]))


def family(address: str) -> socket.AddressFamily:
    """Return the family of an IP address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET

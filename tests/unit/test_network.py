"""Which interface leads to the others, and what is said where none does."""

import socket
import threading

import pytest

from hftune import ConfigError
from hftune.distributed import network
from hftune.distributed.network import Route, choose_interface, hang_up, is_own_address, resolve, route_to

PRESENT = {"lo": ["127.0.0.1"], "eth0": ["10.1.0.5"], "ib0": ["10.2.0.5"]}


@pytest.fixture
def present(monkeypatch):
    """A machine with two networks, where the name node1 means the loopback, as on Debian."""
    for variable in network.VARIABLES:
        monkeypatch.setenv(variable, "")  # so that it is put back, whatever the test sets
        monkeypatch.delenv(variable)
    monkeypatch.setattr(network, "interfaces", lambda: PRESENT)
    monkeypatch.setattr(
        network, "route_to", lambda host: Route("lo", "127.0.1.1") if host == "node1" else Route("ib0", "10.2.0.5")
    )


def test_this_machine_has_a_loopback():
    assert route_to("127.0.0.1") == Route("lo", "127.0.0.1")
    assert is_own_address("127.0.0.1") and not is_own_address("192.0.2.77")
    assert resolve("localhost") == "127.0.0.1"


def refused(function, *arguments) -> str:
    with pytest.raises(ConfigError) as caught:
        function(*arguments)
    return str(caught.value)


def test_a_name_that_means_nothing_is_refused():
    said = refused(resolve, "no-such-host.invalid")
    assert said.startswith("'no-such-host.invalid' does not resolve to an address (") and "Set main_process_ip" in said


def test_the_interface_that_leads_to_the_main_machine_is_set_for_gloo_and_nccl(present):
    assert choose_interface("10.2.0.1") == Route("ib0", "10.2.0.5")
    assert network.os.environ["GLOO_SOCKET_IFNAME"] == "ib0" and network.os.environ["NCCL_SOCKET_IFNAME"] == "=ib0"


def test_what_the_user_has_set_stays(present, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth,ib")  # NCCL takes beginnings of names
    choose_interface("10.2.0.1")
    assert network.os.environ["GLOO_SOCKET_IFNAME"] == "eth0" and network.os.environ["NCCL_SOCKET_IFNAME"] == "eth,ib"


def test_an_interface_that_is_not_there_is_refused_with_those_that_are(present, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth1")
    said = refused(choose_interface, "10.2.0.1")
    assert said.startswith("GLOO_SOCKET_IFNAME=eth1: this machine has no such interface. Did you mean 'eth0'?")
    assert said.endswith("It has 10.1.0.5 (eth0), 10.2.0.5 (ib0), 127.0.0.1 (lo).")


def test_a_main_machine_whose_name_means_its_loopback_is_asked_for_its_address(present):
    said = refused(choose_interface, "node1")
    assert "node1 resolves to 127.0.1.1 on this machine" in said and "Set main_process_ip" in said and "10.2.0.5 (ib0)" in said


def test_with_one_network_only_there_is_nothing_to_ask(present, monkeypatch):
    monkeypatch.setattr(network, "interfaces", lambda: {"lo": ["127.0.0.1"], "eth0": ["10.1.0.5"]})
    assert choose_interface("node1") == Route("eth0", "10.1.0.5")


def test_a_route_over_no_known_interface_is_not_handed_to_the_backends(present, monkeypatch):
    monkeypatch.setattr(network, "interfaces", lambda: {"lo": ["127.0.0.1"], "eth0": ["10.1.0.5"]})
    said = refused(choose_interface, "10.2.0.1")
    assert said.startswith("No interface of this machine has the address 10.2.0.5.") and "Set GLOO_SOCKET_IFNAME" in said


def test_an_alias_of_an_interface_is_up_as_that_is(monkeypatch):
    import psutil

    address = psutil._ntuples.snicaddr(socket.AF_INET, "10.9.9.9", None, None, None)
    known = psutil.net_if_addrs()
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: known | {"lo:1": [address], "gone0": [address]})
    assert network.interfaces()["lo:1"] == ["10.9.9.9"] and "gone0" not in network.interfaces()


def test_no_way_to_another_network_is_said_at_once(monkeypatch):
    class Unrouted(socket.socket):
        def connect(self, address):
            raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(network.socket, "socket", Unrouted)
    monkeypatch.setattr(network, "interfaces", lambda: PRESENT)
    said = refused(route_to, "10.9.0.1")
    assert said.startswith("This machine has no route to 10.9.0.1 (Network is unreachable).") and "10.1.0.5 (eth0)" in said


def test_an_address_that_may_be_bound_is_not_therefore_this_machines(monkeypatch):
    """As with net.ipv4.ip_nonlocal_bind=1: every machine would take itself for the main one, and none would meet."""

    class Nonlocal(socket.socket):
        def bind(self, address):
            pass

    monkeypatch.setattr(network.socket, "socket", Nonlocal)
    assert not is_own_address("192.0.2.77")
    assert is_own_address("127.0.1.1") and is_own_address("::1")


def test_an_address_on_an_interface_is_this_machines_however_it_is_spelled(monkeypatch):
    monkeypatch.setattr(network, "interfaces", lambda: {"eth0": ["192.0.2.5", "fd99::2"]})
    assert is_own_address("192.0.2.5") and is_own_address("fd99:0::2")


def test_a_machine_with_ipv6_alone_has_addresses(monkeypatch):
    both = {"lo": ["127.0.0.1", "::1"], "eth0": ["fd99::2", "fe80::1"], "eth1": ["10.1.0.5", "fd98::2"]}
    monkeypatch.setattr(network, "interfaces", lambda: both)
    assert network.own_addresses() == "fd99::2 (eth0), 10.1.0.5 (eth1), 127.0.0.1 (lo)"


def test_what_nccls_own_file_sets_is_not_overruled(present, monkeypatch, tmp_path):
    (tmp_path / "nccl.conf").write_text("# the fast network\nNCCL_SOCKET_IFNAME = ib\nNCCL_DEBUG=WARN\n")
    monkeypatch.setattr(network, "NCCL_CONF", str(tmp_path / "nccl.conf"))
    choose_interface("10.2.0.1")
    assert network.os.environ["GLOO_SOCKET_IFNAME"] == "ib0" and "NCCL_SOCKET_IFNAME" not in network.os.environ
    monkeypatch.setattr(network, "NCCL_CONF", str(tmp_path / "none"))
    monkeypatch.setenv("NCCL_CONF_FILE", str(tmp_path / "nccl.conf"))
    assert network.is_in_nccl_conf("NCCL_SOCKET_IFNAME") and not network.is_in_nccl_conf("NCCL_SOCKET")


def test_processes_of_one_machine_are_kept_off_the_network(present, monkeypatch):
    network.stay_on_this_machine()
    assert network.os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    network.stay_on_this_machine()
    assert network.os.environ["GLOO_SOCKET_IFNAME"] == "eth0"


def test_who_waits_for_an_answer_from_a_port_is_woken_and_other_connections_stay():
    heard, pairs = [], []
    for _ in range(2):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            pairs.append((socket.create_connection(listener.getsockname()), listener.accept()[0]))
    (asks, silent), (tracker, server) = pairs
    waiting = threading.Thread(target=lambda: heard.append(asks.recv(1)))
    waiting.start()
    hang_up(silent.getsockname()[1])
    waiting.join(5)
    assert heard == [b""]
    tracker.sendall(b"loss")
    assert server.recv(4) == b"loss"
    for one in (asks, silent, tracker, server):
        one.close()

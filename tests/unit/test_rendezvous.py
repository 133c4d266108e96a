"""What the launcher's side does without another machine: refusals, limits, reminders. Two machines: test_two_machines.py."""

from __future__ import annotations

import resource
import socket
import threading
import time
from collections.abc import Iterator

import psutil
import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousParameters

from hftune.distributed import network
from hftune.doctor import FAULT, _open_files
from hftune.elastic import handler
from hftune.launchers.rendezvous import FixedRendezvous, create_fixed


@pytest.fixture
def few_files() -> Iterator[int]:
    """A limit of 512 open files, which a process may raise itself; yields how far."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    yield 65536 if hard == resource.RLIM_INFINITY else min(65536, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_launcher_that_holds_the_store_allows_itself_the_connections_of_all_processes(few_files):
    assert FixedRendezvous("127.0.0.1", 0, 1, "job", 5.0, {})._open_store() is not None
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == few_files


def test_the_store_of_one_machine_is_not_on_the_network():
    meeting = create_fixed(RendezvousParameters("hftune", "", "job", 1, 1))
    info = meeting.next_rendezvous()
    address, port = info.bootstrap_store_info.master_addr, info.bootstrap_store_info.master_port
    assert (address, info.rank, info.world_size) == ("127.0.0.1", 0, 1)
    listening = {one.laddr for one in psutil.Process().net_connections() if one.status == psutil.CONN_LISTEN}
    assert {where.ip for where in listening if where.port == port} == {"127.0.0.1"}
    info.store.set("key", "value")
    assert TCPStore(address, port, is_master=False, wait_for_workers=False).get("job/key") == b"value"


def test_the_doctor_counts_the_files_that_the_launcher_needs(few_files, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "512")
    ((what, level, todo),) = _open_files()
    assert level == FAULT and todo == "run ulimit -n 65536 before you start the launcher"
    assert what == "at most 512, and 512 processes need 1,088 in the main machine's launcher"
    resource.setrlimit(resource.RLIMIT_NOFILE, (2048, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    assert [*_open_files()] == [("at most 2,048",)]


@pytest.fixture
def name_server(monkeypatch):
    """Return a function that lets a name resolve to the loopback only after so many attempts; it counts them."""
    attempts = []

    def configure(num_failures: float) -> list[str]:
        def getaddrinfo(host, *arguments, **options):
            attempts.append(host)
            if len(attempts) <= num_failures:
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
            return real("127.0.0.1", *arguments, **options)

        monkeypatch.setattr(network.socket, "getaddrinfo", getaddrinfo)
        return attempts

    real = socket.getaddrinfo
    return configure


def test_a_name_that_does_not_resolve_yet_is_tried_again(name_server):
    """On Kubernetes, the name of pod 0 may not exist before pod 1 asks for it."""
    attempts = name_server(2)
    info = FixedRendezvous("localhost", 0, 1, "job", 5.0, {}).next_rendezvous()
    assert info.rank == 0 and len(attempts) > 2


def test_a_name_that_never_resolves_ends_the_launcher_at_its_time_limit(name_server, capsys):
    name_server(float("inf"))
    with pytest.raises(SystemExit):
        FixedRendezvous("pod-0.job", 29500, 2, "job", 0.3, {}).next_rendezvous()
    said = capsys.readouterr().err
    assert (
        said.startswith("hftune: 'pod-0.job' does not resolve to an address (Name") and "HFTUNE_JOIN_TIMEOUT_S=1 waits" in said
    )


def test_numbers_that_are_no_address_are_refused_at_once(name_server, capsys):
    attempts = name_server(float("inf"))
    with pytest.raises(SystemExit):
        FixedRendezvous("10.77.0.300", 29500, 2, "job", 60.0, {}).next_rendezvous()
    assert capsys.readouterr().err.startswith("hftune: '10.77.0.300' does not resolve to an address (Name")
    assert len(attempts) == 1


@pytest.fixture
def launcher(monkeypatch):
    """Make this process a torchrun that was asked to start hftune, and that has no processes yet."""
    monkeypatch.setattr(handler, "REMINDER_S", 0.05)
    monkeypatch.setattr(handler.sys, "argv", ["torchrun", "--nnodes", "2", "-m", "hftune.run", "recipe=yelp_demo"])
    children: list[int] = []
    monkeypatch.setattr(handler.psutil, "Process", lambda: type("Process", (), {"children": lambda self: children})())
    yield children
    children.append(1)
    for thread in threading.enumerate():
        if thread.name == "hftune remind":
            thread.join()


def test_a_launcher_that_waits_with_another_backend_says_so_until_it_starts_a_process(launcher, capfd):
    handler.get_handler()
    time.sleep(0.12)
    said = capfd.readouterr().err.splitlines()
    assert said[0].startswith("hftune: This launcher has started no process for 0 s") and "--rdzv-backend hftune" in said[0]
    launcher.append(1)
    time.sleep(0.1)
    capfd.readouterr()
    time.sleep(0.1)
    assert capfd.readouterr().err == ""


def test_a_launcher_with_hftunes_backend_or_of_another_program_is_not_spoken_for(launcher, capfd, monkeypatch):
    handler.get_handler()(RendezvousParameters("hftune", "127.0.0.1:0", "job", 1, 1))
    monkeypatch.setattr(handler.sys, "argv", ["torchrun", "--nnodes", "2", "-m", "their.program"])
    handler.get_handler()
    time.sleep(0.12)
    assert capfd.readouterr().err == ""

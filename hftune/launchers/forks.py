"""``python -m hftune.launchers.forks N FOLDER MODULES PROGRAM WORD ...``: N processes of this machine that share their imports.

It does what torchrun does for one machine without restarts. But it imports what the processes need and then forks them, so that
training starts as fast on eight processes as on one: the imports take seconds of CPU time, and torchrun's agent needs some of
them itself before it starts a process. Nothing but imports happens before the fork: no GPU is touched, and no thread runs but
one of pyarrow's allocator, which minds forks.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

from hftune.distributed.failure_report import say_last
from hftune.distributed.signals import follow_launcher

POLL_S = 0.05
SHUTDOWN_S = 30.0
"""How long processes may take to end after a signal, as under torchrun; TORCH_ELASTIC_SHUTDOWN_TIMEOUT changes it."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def main(argv: Sequence[str]) -> int:
    """Run a program on N processes and wait for them; return 0, or 1 if one failed, or 128 and a signal's number.

    Args:
        argv: N; a folder for the error files; modules to import before the fork, with commas between; the program, hftune.run
            or hftune.cli; its words.
    """
    follow_launcher()
    count, folder, modules, program, words = int(argv[0]), Path(argv[1]), argv[2].split(","), argv[3], list(argv[4:])
    signals = Signals()
    if (code := import_modules(modules, folder, signals)) is not None:
        return code
    children: dict[int, int] = {}
    signals.children = children
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:  # not on all networks, as the store would by itself
            variables = group_variables(count, listener.getsockname()[1])
            sys.stdout.flush()
            for rank in range(count):
                if signals.first:
                    signals.send(signal.SIGKILL)
                    return 128 + signals.first
                error_file = folder / str(rank) / "error.json"
                error_file.parent.mkdir()
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "TORCHELASTIC_ERROR_FILE": str(error_file)}
                if (child := os.fork()) == 0:
                    children.clear()
                    signals.restore()
                    if signals.first:  # it came between the fork and here
                        os.kill(os.getpid(), signals.first)
                    listener.close()
                    become(program, words, {**variables, **own})
                children[child] = rank
            store = open_store(listener)
        try:
            code = wait_for(children, signals, lambda rank: (folder / str(rank) / "error.json").is_file())
        finally:
            del store  # only now: it served the processes
    except BaseException:
        signals.send(signal.SIGKILL)  # nobody would watch them any more
        raise
    return code


def import_modules(modules: Sequence[str], folder: Path, signals: Signals) -> int | None:
    """Import what the processes need; return the exit code if that fails, or if a signal has come.

    Args:
        folder: for the error file.
    """
    with nvml_instead_of_cuda():
        for module in filter(None, modules):
            if signals.first:
                return 128 + signals.first
            try:
                importlib.import_module(module)
            except Exception as error:  # whatever a library raises where something of it is missing
                named = "" if module.startswith("hftune.") else f"Task.libraries names {module}, which "
                os.environ["TORCHELASTIC_ERROR_FILE"] = str(folder / "error.json")
                say_last(f"hftune: {named or module + ' '}cannot be imported: {type(error).__name__}: {error}.", "ConfigError")
                return 2
    return None


class Signals:
    """Passes signals on to the processes; before they exist, keeps them in mind."""

    def __init__(self) -> None:
        self.first = 0
        """Number of the first signal that asked to stop; 0 if none has."""
        self.children: Mapping[int, int] = {}
        self.until = float("inf")
        """When processes that were asked to end are killed."""
        self._patience = shutdown_seconds()
        self._before = {number: signal.signal(number, self._receive) for number in SIGNALS}

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.first = self.first or number
        self.end(number)

    def end(self, number: int) -> None:
        """Ask all processes to end."""
        self.until = min(self.until, time.monotonic() + self._patience)
        self.send(number)

    def send(self, number: int) -> None:
        """Send a signal to the processes that still run."""
        for pid in list(self.children):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def restore(self) -> None:
        """Handle signals as before, in a process that was forked."""
        for number, handler in self._before.items():
            signal.signal(number, handler)


def shutdown_seconds() -> float:
    """Return how long processes may take to end after a signal."""
    try:
        return float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", SHUTDOWN_S))
    except ValueError:
        return SHUTDOWN_S


@contextmanager
def nvml_instead_of_cuda() -> Iterator[None]:
    """Let torch count GPUs without CUDA's driver, which a fork could not use any more."""
    name = "PYTORCH_NVML_BASED_CUDA_CHECK"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        os.environ.pop(name) if before is None else os.environ.update({name: before})


def group_variables(count: int, port: int) -> dict[str, str]:
    """Return what torchrun sets for all processes of a group on this machine, whose store is at this port."""
    return {
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(count)),
        **{"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"},
        **{"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": uuid.uuid4().hex},
        **{"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0"},
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }


def become(program: str, words: list[str], variables: Mapping[str, str]) -> None:
    """Be one of the processes, and exit."""
    import hftune.run

    os.environ.update(variables)
    module = importlib.import_module(program)
    sys.argv = [str(module.__file__), *words]
    sys.orig_argv[1:] = ["-m", program, *words]
    hftune.run.leave(module.main(words))


def open_store(listener: socket.socket) -> Any:
    """Open the launcher's store on a socket. Only after the forks: it runs threads, which a fork lacks."""
    from torch.distributed import TCPStore

    host, port = listener.getsockname()
    options = {"wait_for_workers": False, "master_listen_fd": listener.detach()}
    return TCPStore(host, port, None, True, timedelta(minutes=10), **options)


def how_it_ended(code: int) -> str:
    """Say in words how a process ended, whose exit code is negative if a signal killed it."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def wait_for(running: dict[int, int], signals: Signals, is_explained: Callable[[int], bool]) -> int:
    """Wait for processes to end. If one fails, end the others.

    Args:
        running: ranks by process id; emptied.
        is_explained: says whether a rank has left a message of why it failed.

    Returns:
        0 if all ended well; 1 if one failed by itself; 128 and the number of the first signal if they were asked to stop.
    """
    failed = ended_badly = False
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            if time.monotonic() > signals.until:
                signals.send(signal.SIGKILL)
            time.sleep(POLL_S)
            continue
        if (rank := running.pop(pid, None)) is None:
            continue  # a process that some library has started
        code = os.waitstatus_to_exitcode(status)
        ended_badly = ended_badly or code != 0
        if code and not failed and not signals.first:
            failed = True
            if not is_explained(rank):
                print(f"Process {rank} (pid {pid}) {how_it_ended(code)}.", file=sys.stderr, flush=True)
            signals.end(signal.SIGTERM)
    if not ended_badly:
        return 0
    return 128 + signals.first if signals.first else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

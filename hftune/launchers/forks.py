"""``python -m hftune.launchers.forks N FOLDER MODULES WORD ...``: N processes of this machine that import the libraries once.

It does what torchrun does for one machine without restarts. But it imports what the processes need and then forks them, so that
training starts as fast on eight processes as on one: the imports take seconds of CPU time, and torchrun's agent needs some of
them itself before it starts a process. Nothing but imports happens before the fork: no thread runs, no GPU is touched.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

POLL_S = 0.05
SHUTDOWN_S = 30.0
"""How long processes may take to end after a signal, as under torchrun; TORCH_ELASTIC_SHUTDOWN_TIMEOUT changes it."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def main(argv: Sequence[str]) -> int:
    """Train on N processes and wait for them; return 0, or 1 if one failed, or 128 and a signal's number.

    Args:
        argv: N; a folder for the error files; modules to import before the fork, with commas between; the words for hftune.run.
    """
    count, folder, modules, words = int(argv[0]), Path(argv[1]), argv[2].split(","), list(argv[3:])
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # asking the CUDA driver for GPUs would make it unusable after a fork
    for module in filter(None, modules):
        importlib.import_module(module)
    with socket.create_server(("127.0.0.1", 0)) as listener:  # not on all networks of the machine, as the store would by itself
        variables = group_variables(count, listener.getsockname()[1])
        sys.stdout.flush()
        children = {}
        for rank in range(count):
            error_file = folder / str(rank) / "error.json"
            error_file.parent.mkdir()
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "TORCHELASTIC_ERROR_FILE": str(error_file)}
            if (child := os.fork()) == 0:
                listener.close()
                become(words, {**variables, **own})
            children[child] = rank
        store = open_store(listener)
    try:
        return wait_for(children, lambda rank: (folder / str(rank) / "error.json").is_file())
    finally:
        del store


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


def become(words: list[str], variables: Mapping[str, str]) -> None:
    """Be one of the processes, and exit."""
    import hftune.run

    os.environ.update(variables)
    sys.argv = [str(hftune.run.__file__), *words]
    sys.orig_argv[1:] = ["-m", "hftune.run", *words]
    hftune.run.leave(hftune.run.main(words))


def open_store(listener: socket.socket) -> Any:
    """Open the launcher's store on a socket. Only after the forks: it runs threads, which a fork lacks."""
    from torch.distributed import TCPStore

    host, port = listener.getsockname()
    options = {"wait_for_workers": False, "master_listen_fd": listener.detach()}
    return TCPStore(host, port, None, True, timedelta(minutes=10), **options)


def wait_for(running: dict[int, int], is_explained: Callable[[int], bool]) -> int:
    """Wait for processes to end, and pass signals on to them. If one fails, end the others.

    Args:
        running: ranks by process id; emptied.
        is_explained: says whether a rank has left a message of why it failed.

    Returns:
        0; 1 if a process failed; 128 and the number of the first signal that asked to stop.
    """
    asked, failed, until = 0, False, float("inf")

    def end_all(number: int) -> None:
        nonlocal until
        until = min(until, time.monotonic() + float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", SHUTDOWN_S)))
        for pid in running:
            os.kill(pid, number)

    def pass_on(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = asked or number
        end_all(number)

    for number in SIGNALS:
        signal.signal(number, pass_on)
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            if time.monotonic() > until:
                end_all(signal.SIGKILL)
            time.sleep(POLL_S)
            continue
        rank, code = running.pop(pid), os.waitstatus_to_exitcode(status)
        if code and not failed and not asked:
            failed = True
            if not is_explained(rank):
                how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
                print(f"Process {rank} (pid {pid}) {how}.", file=sys.stderr, flush=True)
            end_all(signal.SIGTERM)
    return 128 + asked if asked else int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

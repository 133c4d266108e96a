"""Forks of this process in the place of the interpreters that a script starts with ``subprocess.run``."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

LAUNCHER = ["-m", "torch.distributed.run", "--standalone"]


@contextmanager
def interpreters_are_forks(work: Callable[..., None]) -> Iterator[None]:
    """Run ``python SCRIPT ...``, ``python -m hftune.run ...`` and both under torchrun in forks, which need not import anything.

    Args:
        work: ``tests.support.worker.work``.
    """
    original = subprocess.run

    def run(command: Sequence[Any], *, env: Mapping[str, str] | None = None, **options: Any) -> subprocess.CompletedProcess:
        program, *words = map(str, command)
        if program != sys.executable:
            return original(command, env=env, **options)
        world_size, words = processes_of(words)
        source, *words = words[1:] if words[0] == "-m" else words
        with tempfile.TemporaryDirectory() as name:
            paths = [Path(name, stream) for stream in ("out", "err")]
            code = run_forks(work, world_size, [source, words, None, {}], dict(os.environ if env is None else env), *paths)
            said = [path.read_text() if path.exists() else "" for path in paths]
        for text, stream, is_kept in zip(said, (sys.stdout, sys.stderr), kept(**options), strict=True):
            if not is_kept:
                stream.write(text)
        done = subprocess.CompletedProcess(command, code, *said)
        if options.get("check"):
            done.check_returncode()
        return done

    subprocess.run = run
    try:
        yield
    finally:
        subprocess.run = original


def kept(capture_output: bool = False, stdout: Any = None, stderr: Any = None, **_: Any) -> tuple[bool, bool]:
    """Return which of the two streams the caller of ``subprocess.run`` wants to read."""
    return capture_output or stdout is not None, capture_output or stderr is not None


def processes_of(words: list[str]) -> tuple[int, list[str]]:
    """Return how many processes Python's command line asks for, and the words that each of them gets."""
    if words[: len(LAUNCHER)] != LAUNCHER:
        return 1, words
    name, *rest = words[len(LAUNCHER)].split("=", 1) + words[len(LAUNCHER) + 1 :]
    assert name == "--nproc_per_node", words
    return int(rest[0]), rest[1:]


def run_forks(
    work: Callable[..., None], world_size: int, job: list[Any], environment: dict[str, str], out: Path, err: Path
) -> int:
    """Be a group of processes, wait for it, and return 0 or the exit code of one that failed."""
    from torch.distributed import TCPStore

    with socket.create_server(("127.0.0.1", 0)) as listener:
        variables = group_variables(world_size, listener.getsockname()[1]) if world_size > 1 else {}
        options = {"jobs": [job], "environment": environment | variables, "cwd": str(Path.cwd()), "log": str(out)}
        options |= {"world_size": world_size, "errors": str(err), "as_typed": True}
        children = [fork(lambda rank=rank: work(rank, **options)) for rank in range(world_size)]
        if world_size > 1:  # only now: it runs threads, which a fork lacks
            store = TCPStore(
                "127.0.0.1",
                listener.getsockname()[1],
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        if world_size > 1:
            del store
    return max(map(abs, codes))


def group_variables(world_size: int, port: int) -> dict[str, str]:
    """Return what torchrun sets for all processes of a group on this machine whose agent's store is at this port."""
    count = str(world_size)
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        **{"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "GROUP_WORLD_SIZE": "1", "GROUP_RANK": "0"},
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": uuid4().hex,
        **{"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0"},
    }


def fork(work: Callable[[], None]) -> int:
    """Do something in a child; return its process id. Its exit code is that of a Python script that does it."""
    if child := os.fork():
        return child
    code = 1
    try:
        work()
        code = 0
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

"""A ``python`` that has imported everything: what launchers start costs some hundredths of a second, not seconds.

``python()`` is the path of a small program to be started in the place of sys.executable. It hands its arguments, environment,
folder and streams to a server, which is tests/support/worker.py and has imported everything; a fork of the server
then is the interpreter, in the network namespace and under the host name of the one who asked. The small program passes
signals on and ends as the interpreter does; where it is killed itself, the interpreter is killed, too. ``Fork`` asks the server
without that program, for processes of which a test itself is the launcher.

So the launcher's own code runs, and processes, signals, sockets and exit codes are real. Three things are not: the imports,
the parent's process id, and the seed of hashes. Tests of these start sys.executable; see also test_routes.py.
"""

from __future__ import annotations

import atexit
import ctypes
import io
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

COMMANDS = {
    "python": [],
    "accelerate": ["-m", "accelerate.commands.accelerate_cli"],
    "torchrun": ["-m", "torch.distributed.run"],
    "hftune": ["-m", "hftune.cli"],
}
READ_AT_START = (
    "HF_",
    "HUGGINGFACE_",
    "TRANSFORMERS_CACHE",
    "TRANSFORMERS_OFFLINE",
    "DATASETS_",
    "MALLOC_",
    "LD_",
)
"""Variables that libraries read where they are imported: who sets others gets a cold start.

PYTHONHASHSEED is not among them, because Spark sets it for all its executors; who tests it starts sys.executable.
"""
STAYS_WARM = "TESTS_STAY_WARM"
"""Who sets this one gets no cold start, as the others change nothing that the test looks at."""

NAMESPACES = {"mnt": 0x00020000, "uts": 0x04000000, "net": 0x40000000}
"""CLONE_NEWNS, CLONE_NEWUTS and CLONE_NEWNET of <linux/sched.h>."""

CLIENT = """#!{python} -IS
import json, os, signal, socket, sys

words = {words!r} + sys.argv[1:]
words = words[1:] if words[:1] == ["-u"] else words
link = socket.socket(socket.AF_UNIX)
try:
    if not words or words[0].startswith("-") and words[0] not in ("-m", "-c"):
        raise OSError
    link.connect({address!r})
    ignored = [int(number) for number in signal.valid_signals() if signal.getsignal(number) == signal.SIG_IGN]
    asked = {{"words": words, "environment": dict(os.environ), "folder": os.getcwd(), "ignored": ignored}}
    asked |= {{"pid": os.getpid(), "leads": os.getsid(0) == os.getpid()}}
    socket.send_fds(link, [b"-"], [0, 1, 2])
    link.sendall(json.dumps(asked).encode() + b"\\n")
    answers = link.makefile()
    pid = int(answers.readline())
except (OSError, ValueError):
    os.execv({python!r}, [{python!r}, *{words!r}, *sys.argv[1:]])

def forward(number, frame):
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass

for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
    if number not in ignored:
        signal.signal(number, forward)
code = int(answers.readline() or 1)
if code < 0:
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""


class Server:
    """Forks this process for each client.

    Args:
        folder: for the socket, and for the programs to start: ``python``, and the commands that are Python modules.
        owner: a file descriptor that can be read, or is at its end, once nobody needs the server any more.
    """

    def __init__(self, folder: Path, owner: int):
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(folder / "socket"))
        self._listener.listen(64)
        self._clients: dict[int, socket.socket] = {}
        self.executable = folder / "python"
        for name, words in COMMANDS.items():
            command = folder / name
            command.write_text(CLIENT.format(python=sys.executable, address=str(folder / "socket"), words=words))
            command.chmod(0o755)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(owner, selectors.EVENT_READ, sys.exit)

    def serve(self) -> None:
        """Serve until the owner has gone, and take with it what still runs."""
        try:
            while True:
                ready = [key for key, _ in self._selector.select()]
                for key in sorted(ready, key=lambda key: key.fileobj is self._listener):  # who was killed dies first
                    key.data()
        finally:
            for pid in self._clients:
                os.kill(pid, signal.SIGKILL)

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        _, streams, *_ = socket.recv_fds(client, 1, 3)
        try:
            asked = json.loads(client.makefile().readline() or "null")
            if asked is None or needs_cold_start(asked["environment"]):
                client.sendall(b"cold\n")
                return client.close()
            if (pid := os.fork()) == 0:
                become(self.executable, streams, **asked)
        finally:
            for stream in streams:
                os.close(stream)
        self._clients[pid] = client
        ended = os.pidfd_open(pid)
        self._selector.register(client, selectors.EVENT_READ, lambda: self._kill(pid))
        self._selector.register(ended, selectors.EVENT_READ, lambda: self._reap(pid, ended))
        return self._tell(client, pid)

    def _kill(self, pid: int) -> None:
        """Kill the program of a client that is no more."""
        if (client := self._clients.get(pid)) is not None:  # both may have ended at once
            self._selector.unregister(client)
            os.kill(pid, signal.SIGKILL)

    def _reap(self, pid: int, ended: int) -> None:
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        client = self._clients.pop(pid)
        with suppress(KeyError):  # it was killed, and is not listened to
            self._selector.unregister(client)
        self._selector.unregister(ended)
        os.close(ended)
        self._tell(client, code)
        client.close()

    def _tell(self, client: socket.socket, number: int) -> None:
        with suppress(OSError):  # it was killed meanwhile
            client.sendall(f"{number}\n".encode())


class Fork:
    """A process that does what ``python WORDS`` does in this folder; both kinds of output are appended to files.

    Args:
        executable: the program of a server.
    """

    def __init__(self, executable: str, words: list[str], environment: dict[str, str], out: Path, err: Path):
        self._link = socket.socket(socket.AF_UNIX)
        self._link.connect(str(Path(executable).with_name("socket")))
        streams = [
            os.open(os.devnull, os.O_RDONLY),
            *(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND) for path in (out, err)),
        ]
        asked = {"words": words, "environment": environment, "folder": str(Path.cwd()), "ignored": []}
        socket.send_fds(self._link, [b"-"], streams)
        self._link.sendall(json.dumps({**asked, "pid": os.getpid(), "leads": False}).encode() + b"\n")
        self._answers = self._link.makefile()
        self.pid = int(self._answers.readline())
        self.code: int | None = None
        for stream in streams:
            os.close(stream)

    def poll(self, timeout_s: float = 0.0) -> int | None:
        """Return the exit code; None where there is none within the time."""
        if self.code is None and wait([self._link], timeout_s):  # not select(), which takes no descriptor above 1023
            self.code = int(self._answers.readline())
            self._link.close()
        return self.code


def needs_cold_start(environment: Any) -> bool:
    theirs, ours = ({name: own[name] for name in own if name.startswith(READ_AT_START)} for own in (environment, os.environ))
    return theirs != ours and STAYS_WARM not in environment


def become(
    executable: Path,
    streams: Sequence[int],
    words: list[str],
    environment: dict[str, str],
    folder: str,
    ignored: list[int],
    pid: int,
    leads: bool,
) -> None:
    """Be what ``python WORDS`` is, in the place of the process ``pid``; never return."""

    def program() -> None:
        os.setsid() if leads else os.setpgid(0, 0)
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        enter_namespaces(pid)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        os.chdir(folder)
        inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        os.environ.clear()
        os.environ.update(environment)
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)
        sys.executable = str(executable)
        given = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
        sys.path[:] = [*given, *(path for path in sys.path[1:] if path not in inherited)]
        open_streams()
        set_num_threads(int(environment.get("OMP_NUM_THREADS") or os.cpu_count() or 1))
        run(words)

    be(program)


def enter_namespaces(pid: int) -> None:
    """Enter the namespaces of another process where they are not ours."""
    for name, flag in NAMESPACES.items():
        theirs = Path(f"/proc/{pid}/ns/{name}")
        if theirs.readlink() != Path(f"/proc/self/ns/{name}").readlink():
            with theirs.open() as file:
                if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), flag):
                    raise OSError(ctypes.get_errno(), f"setns {name}")


def open_streams() -> None:
    """Open sys.stdin, stdout and stderr anew: encoded and buffered as the environment says."""
    encoding = os.environ.get("PYTHONIOENCODING", "utf-8").partition(":")[0]
    sys.stdin = sys.__stdin__ = open(0, encoding=encoding, closefd=False)  # noqa: SIM115
    is_unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    for number, name, errors in ((1, "stdout", "strict"), (2, "stderr", "backslashreplace")):
        raw = open(number, "wb", buffering=0 if is_unbuffered else -1, closefd=False)  # noqa: SIM115
        is_by_line = number == 2 or raw.isatty()
        stream = io.TextIOWrapper(raw, encoding, errors, line_buffering=is_by_line, write_through=is_unbuffered)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def set_num_threads(count: int) -> None:
    import torch

    if torch.get_num_threads() != count:
        torch.set_num_threads(count)


def run(words: list[str]) -> None:
    """Run ``-m MODULE ...``, ``-c CODE ...`` or ``SCRIPT ...``."""
    if words[0] == "-c":
        sys.argv, sys.path[0:0] = ["-c", *words[2:]], [""]
        sys.modules["__main__"] = module = ModuleType("__main__")
        exec(compile(words[1], "<string>", "exec"), vars(module))
    elif words[0] == "-m":
        sys.argv, sys.path[0:0] = words[1:], [str(Path.cwd())]
        sys.modules.pop(words[1], None)  # else runpy warns that it is there already
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0:0] = words, [str(Path(words[0]).resolve().parent)]
        runpy.run_path(words[0], run_name="__main__")


def be(program: Callable[[], None]) -> NoReturn:
    """Call what an interpreter would run, and end as it would.

    But for this: it would free each object, and so copy all memory that forks share, which takes longer than most programs here.
    """
    code = 1
    try:
        code = exit_code(program)
        threading._shutdown()  # waits for threads, as at every interpreter's end
        atexit._run_exitfuncs()
        flush()
    finally:
        os._exit(code)


def exit_code(program: Callable[[], None]) -> int:
    try:
        program()
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except KeyboardInterrupt as error:
        show(error)
        flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException as error:
        show(error)
        return 1
    return 0


def show(error: BaseException) -> None:
    """Print an exception with the stack that it would have had in an interpreter of its own."""
    below = error.__traceback__
    while below.tb_next is not None and below.tb_frame.f_code.co_filename == __file__:
        below = below.tb_next
    sys.excepthook(type(error), error.with_traceback(below), below)


def flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # the reader has gone
            stream.flush()

"""``python -m hftune.launchers.forks WANTED FOLDER MODULES PROGRAM WORD ...``: processes that share their imports.

It does what torchrun does for one machine. But it imports what the processes need and then forks them, so that training
starts as fast on eight processes as on one: the imports take seconds of CPU time, and torchrun's agent needs some of them
itself before it starts a process. Nothing but imports happens before a fork: no GPU is touched, and no thread runs but one of
pyarrow's allocator, which minds forks. So the store of the processes is served by a fork, too.

Processes that die are replaced if their number is a range: their round is over (see distributed/rounds.py), and the next one
begins with fresh forks.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType

from hftune.distributed.failure_report import INTERRUPTED, STOPPED, say_last
from hftune.distributed.rounds import FOLDER, JOB, ROUND, AgentFolder, Over
from hftune.distributed.signals import follow_launcher

POLL_S = 0.05
SHUTDOWN_S = 30.0
"""How long processes may take to end after a signal, as under torchrun; TORCH_ELASTIC_SHUTDOWN_TIMEOUT changes it."""
LEAVE_S = 5.0
"""How long processes of a broken round may take to end before they are killed; what they compute is lost in any case."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
MAX_LOSSES = 3
"""Losses without a further step that end the job: another attempt would not get further, either."""
SAME_S = 1.0
"""Losses within this time are one: whoever kills several processes does not kill them at the same moment."""
STORE = -1
"""In the place of a local rank if the store was lost."""
NOT_ITS_FAULT = re.compile(
    r"CUDA error: (uncorrectable|hardware stack error|unknown error|no CUDA-capable device|CUDA-capable device\(s\)).*"
    r"|DataLoader worker \(pid \d+\) is killed by signal: Killed"
)
"""What torch says if a GPU has failed, or the system has killed a process that loads data: not the program's fault.

Source: cudaGetErrorString of these errors in driver_types.h; torch/csrc/DataLoader.cpp.
"""


@dataclass(frozen=True)
class Wanted:
    """How many processes train."""

    least: int
    most: int
    multiple: int = 1
    """Their number is a multiple of this, the number of pipeline stages."""
    output_dir: str | None = None
    """Of the training, whose processes are replaced if they die. None: they are not."""


def main(argv: Sequence[str]) -> int:
    """Run a program on several processes; return 0, or 1 if it failed, 2 if it cannot start, 128 and a signal's number.

    Args:
        argv: Wanted; a folder for the error files; modules to import before the fork, with commas between; the program,
            hftune.run or hftune.cli; its words.
    """
    follow_launcher()
    wanted, folder, modules, program = Wanted(**json.loads(argv[0])), Path(argv[1]), argv[2].split(","), argv[3]
    signals = Signals()
    if (code := import_modules(modules, folder, signals)) is not None:
        return code
    found = gpus() if wanted.output_dir is not None else []
    forks = Forks(wanted, folder, signals, lambda variables: become(program, list(argv[4:]), variables), found)
    if forks.count < wanted.least:
        few = f"This machine has {len(found)} GPUs, of which each process takes one, and at least {wanted.least} processes"
        return forks.say_last(f"{few} were asked for. Lower the least number.", "ConfigError", 2)
    try:
        return forks.run()
    except BaseException:
        signals.send(signal.SIGKILL)  # nobody would watch them any more
        raise
    finally:
        forks.end_store()


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
            except Exception as error:  # whatever a library raises if something of it is missing
                named = "" if module.startswith("hftune.") else f"Task.libraries names {module}, which "
                os.environ["TORCHELASTIC_ERROR_FILE"] = str(folder / "error.json")
                say_last(f"hftune: {named or module + ' '}cannot be imported: {type(error).__name__}: {error}.", "ConfigError")
                return 2
    return None


def gpus() -> list[str]:
    """Return the GPUs as CUDA_VISIBLE_DEVICES names them; none on CPUs. Leaves CUDA alone: forks could not use it any more."""
    import torch

    from hftune.distributed.accelerator import on_cpu

    with nvml_instead_of_cuda():
        count = 0 if on_cpu() else torch.cuda.device_count()
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return named[:count] or [str(index) for index in range(count)]


class Signals:
    """Passes signals on to the processes; before they exist, keeps them in mind."""

    def __init__(self) -> None:
        self.first = 0
        """Number of the first signal that asked to stop; 0 if none has."""
        self.children: Mapping[int, int] = {}
        self.until = float("inf")
        """When processes that were asked to end are killed."""
        try:
            self._patience = float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", SHUTDOWN_S))
        except ValueError:
            self._patience = SHUTDOWN_S
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


class Forks:
    """Starts processes, round by round if they are replaced, until training has ended.

    Args:
        folder: private; for error files, and for what processes are told.
        signals: passes signals on to the processes.
        be_process: called in a fork with its environment; never returns.
        gpus: one for each process, in the order of the local ranks; none on CPUs.
    """

    def __init__(
        self,
        wanted: Wanted,
        folder: Path,
        signals: Signals,
        be_process: Callable[[Mapping[str, str]], None],
        gpus: Sequence[str] = (),
    ):
        self.wanted, self.signals, self.be_process, self.gpus = wanted, signals, be_process, list(gpus)
        most = min(wanted.most, len(gpus)) if gpus else wanted.most
        self.count = most - most % wanted.multiple
        self.round = 0
        self.running: dict[int, int] = {}
        """Local ranks of the living processes by process id."""
        self._ledger = Path(wanted.output_dir or "", "ledger.jsonl")
        self._ledger_before = version(self._ledger)  # what an earlier run has left there does not count
        self._step, self._num_losses, self._counted_at = 0, 0, float("-inf")
        """Of the training at the last loss, and the losses since it got there, the last of them at this time."""
        self._folder, self._job = folder, uuid.uuid4().hex
        self._error_files: list[Path] = []
        """Of this round, by local rank."""
        self._store: int | None = None
        """Process id of this round's store."""
        self._lacks_gpu = False
        signals.children = self.running

    def run(self) -> int:
        """Train, and return 0, or 1 if training failed, or 128 and a signal's number."""
        code = None
        while code is None:
            self._begin()
            end = self._await_end()
            code = self._end_round(end) if isinstance(end, dict) else end
        return code

    def end_store(self) -> None:
        """End the store of the last round."""
        if self._store is not None:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(self._store, signal.SIGKILL)
                os.waitpid(self._store, 0)
            self._store = None

    # The beginning of a round

    def _begin(self) -> None:
        """Start the processes of this round, and their store."""
        self.end_store()
        with socket.create_server(("127.0.0.1", 0)) as listener:  # not on all networks, as the store would by itself
            port = listener.getsockname()[1]
            self._store = fork(lambda: serve_store(listener))
        variables = group_variables(self.count, port, self._job, self.round)
        if self.wanted.output_dir is not None:
            self._notes = AgentFolder(self._folder / "agent")
            self._notes.path.mkdir(mode=0o700, exist_ok=True)
            variables |= {JOB: self._job, ROUND: str(self.round), FOLDER: str(self._notes.path)}
        if self._lacks_gpu:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus)
        sys.stdout.flush()
        self._error_files = [self._folder / f"round_{self.round}" / str(rank) / "error.json" for rank in range(self.count)]
        for rank in range(self.count):
            self._start(rank, variables)
        if self.signals.first:  # not all of them existed when it came
            self.signals.send(self.signals.first)

    def _start(self, rank: int, variables: Mapping[str, str]) -> None:
        error_file = self._error_files[rank]
        error_file.parent.mkdir(parents=True)
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "TORCHELASTIC_ERROR_FILE": str(error_file)}

        def be_process() -> None:
            self.running.clear()  # these and the store are the parent's
            self._store = None
            self.signals.restore()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            self.be_process({**variables, **own})

        # A signal that reaches a fork before Python's own work there is done would be forgotten. So let signals wait.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            self.running[fork(be_process)] = rank
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    # The end of processes

    def _await_end(self) -> int | dict[int, str]:
        """Wait for all processes to end, and end the others if one fails; return the exit code, see ``main``.

        If processes are replaced and some are lost, return at once how, by local rank: whoever kills several does so at once.
        """
        has_failed = ended_badly = False
        while self.running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                if time.monotonic() > self.signals.until:
                    self.signals.send(signal.SIGKILL)
                time.sleep(POLL_S)
                continue
            goes_on = not has_failed and not self.signals.first
            if pid == self._store:
                self._store = None
                if goes_on and self.wanted.output_dir is not None:
                    return {STORE: "The store that the processes share has ended"}
            if (rank := self.running.pop(pid, None)) is None:
                continue  # a process that some library has started, or the store
            code = os.waitstatus_to_exitcode(status)
            if goes_on and (how := self._loss(pid, rank, code)):
                lost = {rank: how}
                for other, rank in list(self.running.items()):
                    ended, status = os.waitpid(other, os.WNOHANG)
                    if ended and (how := self._loss(other, self.running.pop(other), os.waitstatus_to_exitcode(status))):
                        lost[rank] = how
                return lost
            ended_badly = ended_badly or code != 0
            if goes_on and code:
                has_failed = True
                if not self._error_files[rank].is_file():
                    print(f"Process {rank} (pid {pid}) {how_it_ended(code)}.", file=sys.stderr, flush=True)
                self.signals.end(signal.SIGTERM)
        if not ended_badly:
            return 0
        return 128 + self.signals.first if self.signals.first else 1

    def _loss(self, pid: int, rank: int, code: int) -> str | None:
        """Say how a process was lost; None if it ended well, or for a reason that would end its successor, too."""
        if code == 0 or self.wanted.output_dir is None:
            return None
        who = f"Process {rank} (pid {pid})"
        if self._error_files[rank].is_file():  # with why it failed
            said = json.loads(self._error_files[rank].read_text(encoding="utf-8"))["message"]["message"]
            found = NOT_ITS_FAULT.search(said)
            return f"{who} ended with {found[0]}" if found else None
        if code > 0 and (code in (STOPPED, INTERRUPTED) or any(path.is_file() for path in self._error_files)):
            return None
        return f"{who} {how_it_ended(code)}"

    # The end of a round

    def _end_round(self, lost: Mapping[int, str]) -> int | None:
        """Prepare the next round after a loss; return an exit code if there is none."""
        self._notes.note(self.round, Over("; ".join(lost.values()), is_planned=False))  # at once: the others wait for it
        if version(self._ledger) not in (None, self._ledger_before) and (step := last_step(self._ledger)) > self._step:
            self._step, self._num_losses, self._counted_at = step, 0, float("-inf")
        if (now := time.monotonic()) - self._counted_at > SAME_S:
            self._num_losses, self._counted_at = self._num_losses + 1, now
        count, place = self._num_losses, f"after step {self._step}" if self._step else "before the first step"
        reason = f"{'; '.join(lost.values())} {place}"
        is_lower = 1 < count < MAX_LOSSES and self._lower(lost)
        until = time.monotonic() + LEAVE_S
        self.signals.send(signal.SIGTERM)
        while self.running:
            if time.monotonic() > until:
                self.signals.send(signal.SIGKILL)
            pid, _ = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                time.sleep(POLL_S)
            self.running.pop(pid, None)
        for path in self._error_files:  # what they said was of this round
            path.unlink(missing_ok=True)
        resume = " The same command resumes from the newest checkpoint." if self._step else ""
        if count >= MAX_LOSSES:
            text = f"{reason}. It was loss {MAX_LOSSES} without a further step, so training ends.{resume}"
            return self.say_last(text, "TrainingError", 1)
        if number := self.signals.first:
            text = f"{signal.Signals(number).name}: stopped {place}, while processes were being replaced.{resume}"
            return self.say_last(text, "Interrupted", 128 + number)
        self.round += 1
        why = f", fewer than before: this was loss {count} without a further step" if is_lower else ""
        here = f"{self.count} process{'es' * (self.count > 1)}{why}"
        below = "\n" if sys.stderr.isatty() else ""  # the process that was lost may have left a progress bar there
        print(f"{below}hftune: {reason}. Round {self.round}: {here}.", file=sys.stderr, flush=True)
        return None

    def _lower(self, lost: Mapping[int, str]) -> bool:
        """Go on with fewer processes if there may be fewer, without a GPU of those that were lost; return whether there may."""
        if self.count - self.wanted.multiple < self.wanted.least:
            return False
        self.count -= self.wanted.multiple
        if self.gpus and (rank := min(lost)) != STORE:
            del self.gpus[rank]
            self._lacks_gpu = True
        return True

    def say_last(self, text: str, kind: str, code: int) -> int:
        """Say why training ends, and return the exit code."""
        os.environ["TORCHELASTIC_ERROR_FILE"] = str(self._folder / "error.json")
        say_last(f"hftune: {text}", kind)
        return code


def last_step(ledger: Path) -> int:
    """Return the last step of a ledger, or after which it was resumed last; 0 if it says neither."""
    from hftune.tracking.ledger import whole_lines

    lines = map(json.loads, reversed(whole_lines(ledger)))
    return next((step for line in lines if (step := line.get("step", line.get("after_step"))) is not None), 0)


def version(path: Path) -> tuple[int, int] | None:
    """Return what changes if a file is written; None if there is none."""
    return (found.st_size, found.st_mtime_ns) if path.is_file() and (found := path.stat()) else None


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


def group_variables(count: int, port: int, job: str, number: int) -> dict[str, str]:
    """Return what torchrun sets for all processes of a group on this machine, whose store is at this port."""
    return {
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(count)),
        **{"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"},
        **{"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": job},
        **{"TORCHELASTIC_RESTART_COUNT": str(number), "TORCHELASTIC_MAX_RESTARTS": "0"},
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }


def fork(work: Callable[[], None]) -> int:
    """Do this in a fork, and return its process id."""
    if (child := os.fork()) == 0:
        work()
        os._exit(0)
    return child


def become(program: str, words: list[str], variables: Mapping[str, str]) -> None:
    """Be one of the processes, and exit."""
    import hftune.run

    os.environ.update(variables)
    module = importlib.import_module(program)
    sys.argv = [str(module.__file__), *words]
    sys.orig_argv[1:] = ["-m", program, *words]
    hftune.run.leave(module.main(words))


def serve_store(listener: socket.socket) -> None:
    """Serve a store while the parent lives."""
    from torch.distributed import TCPStore

    parent = os.getppid()
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    host, port = listener.getsockname()
    options = {"wait_for_workers": False, "master_listen_fd": listener.detach()}
    store = TCPStore(host, port, None, True, timedelta(minutes=10), **options)
    while os.getppid() == parent:
        time.sleep(POLL_S)
    del store


def how_it_ended(code: int) -> str:
    """Say in words how a process ended, whose exit code is negative if a signal killed it."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

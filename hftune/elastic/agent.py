"""``python -m hftune.elastic.agent WANTED FOLDER MODULES PROGRAM WORD ...``: processes that are replaced if they die.

All on this machine. It does as forks.py, whose parts it uses, but in rounds (see distributed/rounds.py): if a process is
killed, its round is over, and the next one begins with a fresh fork in its place. Every round has a store of its own, served by
a process of its own, because the interpreter that forks must not run threads.
"""

from __future__ import annotations

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
from pathlib import Path

from hftune.distributed.failure_report import INTERRUPTED, STOPPED, say_last
from hftune.distributed.rounds import FOLDER, JOB, ROUND, AgentFolder, Over
from hftune.distributed.signals import follow_launcher
from hftune.launchers.forks import (
    POLL_S,
    SIGNALS,
    Signals,
    become,
    group_variables,
    how_it_ended,
    import_modules,
    nvml_instead_of_cuda,
    open_store,
    wait_for,
)
from hftune.launchers.local import Wanted
from hftune.tracking.ledger import NAME as LEDGER
from hftune.tracking.ledger import whole_lines

MOST_LOSSES = 3
"""So many losses without a further step end the job: a further attempt would not get further, either."""
SAME_S = 1.0
"""Losses within this time are one: whoever kills several processes does not kill them at the same moment."""
STORE = -1
"""In the place of a local rank where the store was lost."""
LEAVE_S = 5.0
"""How long processes of a broken round may take to end before they are killed; what they compute is lost in any case."""
NOT_ITS_FAULT = re.compile(
    r"CUDA error: (uncorrectable|hardware stack error|unknown error|no CUDA-capable device|CUDA-capable device\(s\)).*"
    r"|DataLoader worker \(pid \d+\) is killed by signal: Killed"
)
"""What torch says where a GPU has failed, or the system has killed a process that loads data: not the program's fault.

Source: cudaGetErrorString of these errors in driver_types.h; torch/csrc/DataLoader.cpp.
"""


def main(argv: Sequence[str]) -> int:
    """Run a program on several processes, replacing those that die; return an exit code as forks.py does.

    Args:
        argv: Wanted; a folder for the error files; modules to import before the fork, with commas between; the program; its
            words.
    """
    follow_launcher()
    wanted, folder, modules, program = Wanted(**json.loads(argv[0])), Path(argv[1]), argv[2].split(","), argv[3]
    signals = Signals()
    if (code := import_modules(modules, folder, signals)) is not None:
        return code
    agent = Agent(wanted, folder, signals, lambda variables: become(program, list(argv[4:]), variables), gpus())
    if agent.count < wanted.least:
        few = f"This machine has {len(agent.gpus)} GPUs, of which each process takes one, and at least {wanted.least} processes"
        return agent.say_last(f"{few} were asked for. Lower the least number.", "ConfigError", 2)
    try:
        return agent.run()
    except BaseException:
        signals.send(signal.SIGKILL)  # nobody would watch them any more
        raise
    finally:
        agent.end_store()


def gpus() -> list[str]:
    """Return the GPUs as CUDA_VISIBLE_DEVICES names them; none on CPUs. Leaves CUDA alone: forks could not use it any more."""
    import torch

    from hftune.distributed.accelerator import on_cpu

    with nvml_instead_of_cuda():
        count = 0 if on_cpu() else torch.cuda.device_count()
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return named[:count] or [str(index) for index in range(count)]


class Agent:
    """Starts processes round by round until training has ended.

    Args:
        wanted: how many.
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
        self._losses = Losses(Path(wanted.output_dir) / LEDGER)
        self._folder, self._job = folder, uuid.uuid4().hex
        self._pids: dict[int, int] = {}
        """Process ids by local rank in this round, also of those that have ended."""
        self._error_files: dict[int, Path] = {}
        """By process id."""
        self._store: int | None = None
        """Process id of this round's store."""
        self._lacks_gpu = False
        self._notes = AgentFolder(folder / "agent")
        self._notes.path.mkdir(mode=0o700)
        signals.children = self.running

    def run(self) -> int:
        """Train, and return 0, or 1 if training failed, or 128 and a signal's number."""
        code = None
        while code is None:
            self._begin()
            ended = self._await_loss()
            code = ended if isinstance(ended, int) else self._end_round(ended)
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
        variables = {
            **group_variables(self.count, port),
            **{"TORCHELASTIC_RUN_ID": self._job, "TORCHELASTIC_RESTART_COUNT": str(self.round)},
            **{JOB: self._job, ROUND: str(self.round), FOLDER: str(self._notes.path)},
            **({"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)} if self._lacks_gpu else {}),
        }
        sys.stdout.flush()
        for rank in range(self.count):
            self._start(rank, variables)
        self._pids = {rank: pid for pid, rank in self.running.items()}
        if self.signals.first:  # not all of them existed when it came
            self.signals.send(self.signals.first)

    def _start(self, rank: int, variables: Mapping[str, str]) -> None:
        error_file = self._folder / f"process_{len(self._error_files)}" / "error.json"
        error_file.parent.mkdir()
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "TORCHELASTIC_ERROR_FILE": str(error_file)}

        def be_process() -> None:
            self.running.clear()  # these and the store are the parent's
            self._store = None
            self.signals.restore()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            self.be_process({**variables, **own})

        with held_signals():
            pid = fork(be_process)
            self._error_files[pid] = error_file
            self.running[pid] = rank

    # The end of processes

    def _await_loss(self) -> dict[int, str] | int:
        """Wait until a process is lost, and return how, by local rank; or the exit code once all have ended otherwise."""
        while self.running and not self.signals.first:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                time.sleep(POLL_S)
            elif ended.si_pid == self._store:
                return {STORE: "The store that the processes share has ended"}
            elif ended.si_pid not in self.running or ended.si_status == 0:
                self._reap(ended.si_pid)
            elif self._loss(ended):
                return self._reap_lost()
            else:
                break  # it failed by itself, or somebody asked it to stop
        return wait_for(self.running, self.signals, self._is_explained)

    def _loss(self, ended: os.waitid_result) -> str | None:
        """Say how a process was lost; None if it ended for a reason that would end its successor, too."""
        who = f"Process {self.running[ended.si_pid]} (pid {ended.si_pid})"
        if (path := self._error_files[ended.si_pid]).is_file():
            found = NOT_ITS_FAULT.search(json.loads(path.read_text(encoding="utf-8"))["message"]["message"])
            return f"{who} ended with {found[0]}" if found else None
        if ended.si_code in (os.CLD_KILLED, os.CLD_DUMPED):
            return f"{who} {how_it_ended(-ended.si_status)}"
        is_reported = any(self._is_explained(rank) for rank in self._pids)
        return None if is_reported or ended.si_status in (STOPPED, INTERRUPTED) else f"{who} {how_it_ended(ended.si_status)}"

    def _is_explained(self, rank: int) -> bool:
        """Whether a process has left a message of why it failed."""
        return self._error_files[self._pids[rank]].is_file()

    def _reap(self, pid: int) -> None:
        os.waitpid(pid, 0)
        self.running.pop(pid, None)

    def _reap_lost(self) -> dict[int, str]:
        """Return how processes were lost, by local rank: whoever kills several does so at once."""
        lost = {}
        for pid, rank in list(self.running.items()):
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None and ended.si_status and (how := self._loss(ended)):
                lost[rank] = how
                self._reap(pid)
        return lost

    # The end of a round

    def _end_round(self, lost: Mapping[int, str]) -> int | None:
        """Prepare the next round after a loss; return an exit code if there is none."""
        self._notes.end(self.round, Over("; ".join(lost.values()), is_planned=False))  # at once: the others wait for it
        count = self._losses.note()
        reason = f"{'; '.join(lost.values())} {self._losses.place}"
        is_last = count >= MOST_LOSSES
        is_lower = count > 1 and not is_last and self._lower(lost)
        self._end_processes()
        for path in self._error_files.values():  # what they said was of this round
            path.unlink(missing_ok=True)
        if is_last:
            return self._give_up(reason)
        if self.signals.first:
            return self._stopped()
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

    def _end_processes(self) -> None:
        until = time.monotonic() + LEAVE_S
        self.signals.send(signal.SIGTERM)
        while self.running:
            if time.monotonic() > until:
                self.signals.send(signal.SIGKILL)
            pid, _ = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                time.sleep(POLL_S)
            self.running.pop(pid, None)

    def _give_up(self, reason: str) -> int:
        text = f"{reason}. It was loss {MOST_LOSSES} without a further step, so training ends.{self._losses.how_to_resume}"
        return self.say_last(text, "TrainingError", 1)

    def _stopped(self) -> int:
        name = signal.Signals(self.signals.first).name
        text = f"{name}: stopped {self._losses.place}, while processes were being replaced.{self._losses.how_to_resume}"
        return self.say_last(text, "Interrupted", 128 + self.signals.first)

    def say_last(self, text: str, kind: str, code: int) -> int:
        """Say why training ends, and return the exit code."""
        os.environ["TORCHELASTIC_ERROR_FILE"] = str(self._folder / "error.json")
        say_last(f"hftune: {text}", kind)
        return code


class Losses:
    """Counts the losses without a further step in between.

    Args:
        ledger: of the run; what an earlier one has left there does not count.
    """

    def __init__(self, ledger: Path):
        self._ledger, self._before = ledger, version(ledger)
        self._step, self._count, self._counted_at = 0, 0, float("-inf")

    @property
    def place(self) -> str:
        """Where training was at the last loss."""
        return f"after step {self._step}" if self._step else "before the first step"

    @property
    def how_to_resume(self) -> str:
        """A last sentence, if there is something to resume."""
        return " The same command resumes from the newest checkpoint." if self._step else ""

    def note(self) -> int:
        """Note a loss, and return how many there have been since the last further step."""
        if version(self._ledger) != self._before and (step := last_step(self._ledger)) > self._step:
            self._step, self._count, self._counted_at = step, 0, float("-inf")
        if (now := time.monotonic()) - self._counted_at > SAME_S:
            self._count, self._counted_at = self._count + 1, now
        return self._count


def version(path: Path) -> tuple[int, int] | None:
    """Return what changes if a file is written; None if there is none."""
    if not path.is_file():
        return None
    found = path.stat()
    return found.st_size, found.st_mtime_ns


def last_step(ledger: Path) -> int:
    """Return the last step of a ledger, or after which it was resumed last; 0 if it says neither."""
    for text in reversed(whole_lines(ledger)):
        line = json.loads(text)
        if (step := line.get("step", line.get("after_step"))) is not None:
            return step
    return 0


@contextmanager
def held_signals() -> Iterator[None]:
    """Let signals wait. One that reaches a fork before Python's own work there is done would be forgotten."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def fork(work: Callable[[], None]) -> int:
    """Do this in a fork, and return its process id."""
    if (child := os.fork()) == 0:
        work()
        os._exit(0)
    return child


def serve_store(listener: socket.socket) -> None:
    """Serve a store while the parent lives."""
    parent = os.getppid()
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    store = open_store(listener)
    while os.getppid() == parent:
        time.sleep(POLL_S)
    del store


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Starts an elastic job on several machines, does things to them, and holds a stop watch on the ledger."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.machines import Machine
from tests.support.runs import environment

PORT = 29400


class Stuck(AssertionError):
    """What was waited for did not come; the message holds what all agents have said."""


@dataclass
class Agent:
    """The launcher of one machine. What it and its processes say goes into ``log``."""

    machine: Machine
    process: subprocess.Popen
    log: Path

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def kill_worker(self) -> None:
        """SIGKILL one of its training processes. See tests/support/warm.py for what else runs there."""
        for pid in self.machine.processes:
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            if "hftune.run" in words and "torch.distributed.run" not in words:
                return subprocess.run(["kill", "-KILL", str(pid)], check=True) and None
        raise Stuck(f"{self.machine.name} has no training process.")


@dataclass(frozen=True)
class Seen:
    """A line of the ledger, and when it was seen on this process's monotonic clock."""

    at: float
    values: dict[str, Any]

    @property
    def is_start(self) -> bool:
        return "after_step" in self.values

    @property
    def is_step(self) -> bool:
        return "epoch" in self.values


@dataclass(frozen=True)
class Resumption:
    """How a job went on after an event."""

    seconds: float
    """From the event to the next finished step of the new round."""
    pause_s: float
    """From the last finished step before it to that one."""
    lost_steps: int
    """Finished before, and computed again."""
    world_size: int


@dataclass
class ElasticJob:
    """One job, whose machines share the output folder.

    Args:
        folder: for the output folder, and for what the agents say.
        endpoint: of the meeting, HOST:PORT or a folder.
        words: of the recipe, whose task is Braked (tests/support/tasks.py): its steps take their time until ``brake`` is removed.
        nodes: MIN:MAX.
        python: the interpreter to start.
    """

    folder: Path
    endpoint: str
    words: Sequence[str]
    nodes: str = "1:4"
    python: str = "python"
    max_restarts: int = 3
    conf: str = ""
    variables: dict[str, str] = field(default_factory=dict)
    homes: dict[str, Path] = field(default_factory=dict)
    """The working directories of machines that have one of their own, by name."""

    def __post_init__(self) -> None:
        self.output_dir, self.brake = self.folder / "out", self.folder / "brake"
        self.brake.touch()
        self.agents: list[Agent] = []
        self.seen: list[Seen] = []
        self._ledger: io.FileIO | None = None

    # Machines

    def start(self, machine: Machine, *words: str, launcher: Sequence[str] = (), **variables: str) -> Agent:
        """Start an agent; options, words and variables that come last win over those of the job."""
        conf = ["--rdzv_conf", self.conf] if self.conf else []
        torchrun = [
            *("-m", "torch.distributed.run", "--nnodes", self.nodes, "--nproc_per_node", "1", "--rdzv_backend", "hftune"),
            *("--rdzv_endpoint", self.endpoint, "--rdzv_id", "job", "--local-addr", machine.address, *conf),
            *("--max_restarts", str(self.max_restarts), *launcher),
        ]
        return self.run(machine, *torchrun, *self.training, *words, **variables)

    @property
    def training(self) -> tuple[str, ...]:
        """What a launcher is to start."""
        return ("-m", "hftune.run", *self.words, f"output_dir={self.output_dir}", f"task.brake={self.brake}")

    def run(self, machine: Machine, *words: str, **variables: str) -> Agent:
        """Start any program there whose end belongs to the job's end."""
        log = self.folder / f"{len(self.agents)}-{machine.name}.log"
        with log.open("w") as file:
            process = subprocess.Popen(
                [*machine.prefix, self.python, *words],
                env=environment(TORCH_CPP_LOG_LEVEL="ERROR", PYTHONUNBUFFERED="1", **(self.variables | variables)),
                cwd=self.homes.get(machine.name, self.folder),
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        agent = Agent(machine, process, log)
        self.agents.append(agent)
        return agent

    # What became of it

    def look(self) -> None:
        """Read what the ledger has more of since the last look.

        A job that has lost its main machine before the first checkpoint begins a new one.
        """
        if self._ledger is None or os.fstat(self._ledger.fileno()).st_nlink == 0:
            with suppress(FileNotFoundError):
                self._ledger, self._read = (self.output_dir / "ledger.jsonl").open("rb", buffering=0), 0
        if self._ledger is None:
            return
        now = time.monotonic()
        self._ledger.seek(self._read)
        whole = self._ledger.read().rpartition(b"\n")[0]
        if whole:
            self.seen += [Seen(now, json.loads(line)) for line in whole.split(b"\n")]
            self._read += len(whole) + 1

    @property
    def step(self) -> int:
        """The last step that was finished and not lost since."""
        for line in reversed(self.seen):
            if line.is_step or line.is_start:
                return line.values["step" if line.is_step else "after_step"]
        return 0

    def resumption(self, event: float) -> Resumption | None:
        """Return how the job went on after a moment; None while it has not."""
        starts = [place for place, line in enumerate(self.seen) if line.is_start and line.at > event]
        if not starts:
            return None
        steps = [line for line in self.seen[starts[-1] :] if line.is_step]
        before = [line for line in self.seen[: starts[0]] if line.is_step]
        if not steps:
            return None
        start = self.seen[starts[-1]].values
        lost = max(before[-1].values["step"] - start["after_step"], 0) if before else 0
        pause_s = steps[0].at - before[-1].at if before else 0.0
        return Resumption(steps[0].at - event, pause_s, lost, start["world_size"])

    def wait_for(self, is_so: Callable[[], Any], what: str, timeout_s: float = 120.0) -> Any:
        """Return the first true value of ``is_so``.

        Raises:
            Stuck: it did not come in time.
        """
        until = time.monotonic() + timeout_s
        while True:
            self.look()
            if value := is_so():
                return value
            if time.monotonic() > until:
                raise Stuck(f"No {what} within {timeout_s:g} s, at step {self.step}.\n{self.words_of_all()}")
            time.sleep(0.02)

    def wait_for_step(self, step: int, timeout_s: float = 120.0) -> None:
        self.wait_for(lambda: self.step >= step, f"step {step}", timeout_s)

    def wait_for_words(self, agent: Agent, pattern: str, timeout_s: float = 120.0) -> str:
        found = self.wait_for(lambda: re.search(pattern, agent.said), f"{pattern!r} of {agent.machine.name}", timeout_s)
        return found[0]

    def wait_for_resumption(
        self, event: float, world_size: int | None = None, timeout_s: float = 120.0, comes: Agent | None = None
    ) -> Resumption:
        """Wait until the job has gone on after a moment, with so many processes if it is said.

        Args:
            comes: who must not end meanwhile.
        """

        def gone_on() -> Resumption | None:
            if comes is not None and not comes.is_alive:
                raise Stuck(f"{comes.machine.name} was not let in.\n{self.words_of_all()}")
            found = self.resumption(event)
            return found if found and world_size in (None, found.world_size) else None

        return self.wait_for(gone_on, f"next step with {world_size or 'any number of'} processes", timeout_s)

    def wait_for_end(self, *agents: Agent, timeout_s: float = 120.0) -> list[int]:
        """Wait until these agents have ended; return their exit codes."""
        self.wait_for(lambda: not any(agent.is_alive for agent in agents), "end", timeout_s)
        return [agent.process.returncode for agent in agents]

    def words_of_all(self) -> str:
        """What all agents have said, but for the lines of steps."""
        said = [(agent, re.sub(r"^step \d+/.*\n", "", agent.said, flags=re.MULTILINE)) for agent in self.agents]
        return "".join(f"\n--- {agent.log.name} (exit code {agent.process.poll()})\n{text}" for agent, text in said)

    def end(self) -> None:
        """Kill what still runs."""
        for machine in {agent.machine.namespace: agent.machine for agent in self.agents}.values():
            machine.kill()
        for agent in self.agents:
            agent.process.wait()

"""What the agents of an elastic job do, for machines of one process each: a test says who is lost, and who comes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from torch.distributed import TCPStore

from hftune.distributed.rounds import AgentFolder, Members, Over
from tests.support.runs import Group

MEMBER = str(Path(__file__).with_name("member.py"))


class Agents:
    """Processes that train one recipe, of which not all are there from the first round on."""

    def __init__(self, count: int, words: Sequence[str], folder: Path, **variables: str):
        self.folders = [AgentFolder(folder / "agents" / str(number)) for number in range(count)]
        for agent in self.folders:
            agent.path.mkdir(parents=True)
        self.log = folder / "members.log"
        variables |= {"AGENTS": str(folder / "agents")}
        self.group = Group(count, [[MEMBER, words, None, variables]], self.log, last_words_s=300)
        self.round, self.present = -1, [0]

    def meet(self, *present: int) -> None:
        """Begin the next round with these processes, in the order of their ranks, and a store of its own."""
        self.round, self.present = self.round + 1, list(present)
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # the last round's is gone
        for rank, number in enumerate(present):
            told = Members(self.round, rank, len(present), len(present), rank, "127.0.0.1", self.store.port)
            self.folders[number].begin(told)

    def end_round(self, reason: str, is_planned: bool) -> None:
        for number in self.present:
            self.folders[number].end(self.round, Over(reason, is_planned))

    def lose(self, number: int, deed: signal.Signals) -> None:
        """Kill or stop a process; a second later, as an agent would, say so, and go on without it."""
        os.kill(self.group.pids[number], deed)
        time.sleep(0.5)
        self.end_round(f"Lost machine {number}: no sign of life for 0.5 s", is_planned=False)
        self.meet(*(other for other in self.present if other != number))

    def take_in(self, number: int) -> None:
        """Let a process join that has waited."""
        self.end_round(f"Machine {number} has come", is_planned=True)
        self.meet(*self.present, number)

    def wait_for(self, condition: Callable[[], bool], what: str, seconds: float = 60) -> None:
        until = time.monotonic() + seconds
        while not condition():
            assert self.group.poll() is None, self.log.read_text()
            assert time.monotonic() < until, f"no {what} within {seconds} s\n{self.log.read_text()}"
            time.sleep(0.01)

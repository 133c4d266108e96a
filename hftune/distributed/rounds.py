"""What an agent and the processes of its machine tell each other when machines come and go. Independent of torch.

An elastic job is a sequence of rounds: a round is one set of machines that train together. Each round has new processes, which
go on from a checkpoint. The agent of each machine (torchrun's, or the parent process of ``hftune.launch``) keeps a private
folder, through which it tells its processes that a round is over, and they tell it that a round failed. Files appear whole and
never change afterwards, with one exception: a machine may be lost while all finish the last step of a round, which is then not
planned any more.

    over_N.json     by the agent: round N is over, and why
    failure_N.json  by a process: round N failed, not for the loss of a machine; on each machine, by one process
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from hftune.atomic import atomic_path

ROUND = "HFTUNE_ROUND"
JOB = "HFTUNE_JOB"
FOLDER = "HFTUNE_AGENT_FOLDER"

ATTEMPTS = 3
"""Rounds that may fail in the same stage of training, such as "step 12", before the job ends."""
REFUSED = 2
"""The exit code if recipe or data are wrong, which no other attempt mends."""
AGENT_S = 30.0
"""For an agent to notice that a machine has left by word."""
LOOK_S = 0.05
"""Between two looks into the agent's folder."""


@dataclass(frozen=True)
class Over:
    """That a round has ended for all of its processes."""

    reason: str
    """A sentence without a final full stop, such as "Lost node2 (10.0.0.2): no sign of life for 5 s"."""
    is_planned: bool
    """All processes of the round are alive and finish their step. Otherwise one is lost, and the step cannot be finished."""


@dataclass(frozen=True)
class Failure:
    """Why a round failed: an error in a process, or the death of one."""

    stage: str
    """Such as "step 12"."""
    text: str
    """The message that it ended with."""
    code: int
    """The exit code, see REFUSED."""


class AgentFolder:
    """The folder of one agent."""

    def __init__(self, path: Path):
        self.path = path

    def note(self, number: int, what: Over | Failure) -> None:
        """Say that a round is over, by the agent; or that it failed, by a process."""
        with atomic_path(self.path / f"{type(what).__name__.lower()}_{number}.json", is_shared=True) as temporary:
            temporary.write_text(json.dumps(asdict(what)), encoding="utf-8")

    def over(self, number: int) -> Over | None:
        """Return why a round is over; None while it goes on."""
        try:
            return Over(**json.loads((self.path / f"over_{number}.json").read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None

    def verdict(self) -> Failure | None:
        """Return why this machine should not take part in another round; None if it should.

        Rounds fail in one stage again and again; or recipe or data are wrong, and this is the machine's first round. A machine
        that has trained with them goes on without the newcomer that they are wrong on.
        """
        read = {number: (self.path / f"failure_{number}.json").read_text(encoding="utf-8") for number in self.rounds("failure")}
        if not (failures := {number: Failure(**json.loads(text)) for number, text in read.items()}):
            return None
        newest, first = max(failures), min([*failures, *self.rounds("over")])
        last = failures[newest]
        if last.code == REFUSED and newest == first:
            return last
        alike = [number for number, failure in failures.items() if failure.stage == last.stage]
        if not re.search(r"\d", last.stage):  # a stage of each start, such as "joining": only one start after another counts
            alike = [number for number in alike if number > newest - ATTEMPTS]
        count = len(alike)
        if count < ATTEMPTS:
            return None
        text = f"{last.text}\nhftune: {count} rounds have failed in {last.stage}: the job ends."
        return Failure(last.stage, text, last.code)

    def rounds(self, kind: str) -> list[int]:
        """Return the numbers of the rounds that there is a file of this kind for."""
        matches = (re.fullmatch(rf"{kind}_(\d+)\.json", path.name) for path in self.path.iterdir())
        return [int(match[1]) for match in matches if match]


def present_round() -> int | None:
    """Return the number of this process's round, equal on all machines and 0 for the first; None if its job is not elastic."""
    value = os.environ.get(ROUND)
    return int(value) if value is not None and value.isdecimal() else None


def present_job() -> str | None:
    """Return the word that all rounds of this elastic job share, and that no other job has; None if it was not told."""
    return os.environ.get(JOB)


def present_agent() -> tuple[AgentFolder, int] | None:
    """Return the folder of the agent that started this process, and the present round; None if its job is not elastic."""
    path, number = os.environ.get(FOLDER), present_round()
    return None if path is None or number is None else (AgentFolder(Path(path)), number)


def agents_word(rounds_ago: int = 0) -> Over | None:
    """Return what the agent of this process has said of the end of the present round; None if it has said nothing."""
    agent = present_agent()
    return None if agent is None else agent[0].over(agent[1] - rounds_ago)


def has_trained() -> bool:
    """Whether this machine was in an earlier round: then recipe and data are right here, and wrong on a newcomer at most.

    The newcomer's launcher leaves. Who has trained waits for that, as a process that ends by itself counts as one that failed.
    """
    agent = present_agent()
    return agent is not None and any(agent[0].over(before) for before in range(agent[1]))


def note_failure(failure: Failure) -> None:
    """By one process of each machine: record a failure for the agent, unless the round was over already for a loss."""
    agent, over = present_agent(), agents_word()
    if agent is not None and (over is None or over.is_planned):
        agent[0].note(agent[1], failure)


def wait_for_agent(was_told: Callable[[], bool], timeout_s: float = AGENT_S) -> Over | None:
    """Wait until the agent knows that the round is over, and return what it says; None if it is not the round that ends.

    Else the agent would take a process that leaves for one that failed: the news that another machine leaves comes to processes
    first, with the sums of their step.

    Args:
        was_told: whether this process itself was asked to stop, as its agent does.
    """
    if present_round() is None:
        return None
    until = time.monotonic() + timeout_s
    while agents_word() is None and not was_told() and time.monotonic() < until:
        time.sleep(LOOK_S)
    return agents_word()

"""What an agent and the processes of its machine tell each other when machines come and go. Independent of torch.

An elastic job is a sequence of rounds: a round is one set of machines that train together. The agent of each machine
(torchrun's, or the parent process of ``hftune.launch``) keeps a private folder, through which it tells its processes that a
round is over and who is in the next one. Files appear whole and never change afterwards.

    over_N.json     by the agent: round N is over, and why
    next_N.json     by the agent: who is in round N, for processes that outlive round N - 1
    stays_N_L       by local process L in round N: it can go on in round N + 1 itself (see regroup.py)
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hftune.atomic import atomic_path

ROUND = "HFTUNE_ROUND"
FOLDER = "HFTUNE_AGENT_FOLDER"


@dataclass(frozen=True)
class Over:
    """That a round has ended for all of its processes."""

    reason: str
    """A sentence without a final full stop, such as "Lost node2 (10.0.0.2): no sign of life for 5 s"."""
    is_planned: bool
    """All processes of the round are alive and finish their step. Otherwise one is lost, and the step cannot be finished."""


@dataclass(frozen=True)
class Members:
    """Who is in a round, as the processes of one machine need to know it."""

    round: int
    first_rank: int
    """Of this machine's processes."""
    world_size: int
    num_machines: int
    machine_rank: int
    address: str
    """Host of this round's store, in which nothing of an earlier round is left."""
    port: int
    local_ranks: list[int | None] | None = None
    """Of this machine's processes, by their local ranks in the last round; None for one that is not in this round. By default
    they keep them. Only where some processes of a machine outlive others."""
    local_world_size: int | None = None
    """Of this machine; by default as in the last round."""


class AgentFolder:
    """The folder of one agent."""

    def __init__(self, path: Path):
        self.path = path

    @classmethod
    def from_environment(cls) -> AgentFolder | None:
        """Return the folder of the agent that started this process; None if its job is not elastic."""
        path = os.environ.get(FOLDER)
        return None if path is None else cls(Path(path))

    def end(self, round_number: int, over: Over) -> None:
        """By the agent: say that a round is over."""
        self._write(f"over_{round_number}.json", asdict(over))

    def over(self, round_number: int) -> Over | None:
        """Return why a round is over; None while it goes on."""
        found = self._read(f"over_{round_number}.json")
        return None if found is None else Over(**found)

    def begin(self, members: Members) -> None:
        """By the agent: say who is in a round."""
        self._write(f"next_{members.round}.json", asdict(members))

    def members(self, round_number: int) -> Members | None:
        """Return who is in a round; None while they have not met, or if it was not told."""
        found = self._read(f"next_{round_number}.json")
        return None if found is None else Members(**found)

    def stay(self, round_number: int, local_rank: int) -> None:
        """By a process: promise to go on in the next round without a restart, whatever ends this one but its own death."""
        self._write(f"stays_{round_number}_{local_rank}", {})

    def stays(self, round_number: int, local_rank: int) -> bool:
        """Whether a process has promised to outlive this round."""
        return (self.path / f"stays_{round_number}_{local_rank}").exists()

    def will_stay(self, round_number: int, local_world_size: int) -> bool:
        """Whether all processes of this machine have promised to outlive this round."""
        return all(self.stays(round_number, local_rank) for local_rank in range(local_world_size))

    def _write(self, name: str, value: dict[str, Any]) -> None:
        with atomic_path(self.path / name, is_shared=True) as temporary:
            temporary.write_text(json.dumps(value), encoding="utf-8")

    def _read(self, name: str) -> dict[str, Any] | None:
        try:
            return json.loads((self.path / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None


def present_round() -> int | None:
    """Return the number of this process's round, equal on all machines and 0 for the first; None if its job is not elastic."""
    value = os.environ.get(ROUND)
    return int(value) if value is not None and value.isdecimal() else None

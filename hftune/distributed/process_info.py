"""Which process this is, as the launcher told it. The only place that reads a launcher's variables."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass


@dataclass(frozen=True)
class ProcessInfo:
    """This process among the others."""

    rank: int = 0
    """From 0; process 0 is the main process, which alone prints and writes."""
    world_size: int = 1
    """Processes of the job, on all nodes."""
    local_rank: int = 0
    """From 0 on each node."""
    local_world_size: int | None = None
    """Processes on this node; None if the launcher does not say."""
    host: str = ""

    @classmethod
    def from_environment(cls) -> ProcessInfo:
        """Read what accelerate launch, torchrun and TorchDistributor set; without a launcher, a process alone."""
        local_world_size = _number("LOCAL_WORLD_SIZE", 0) or None
        return cls(
            rank=_number("RANK", 0),
            world_size=_number("WORLD_SIZE", 1),
            local_rank=_number("LOCAL_RANK", 0),
            local_world_size=local_world_size,
            host=socket.gethostname(),
        )

    @property
    def is_main(self) -> bool:
        """Whether this is the main process."""
        return self.rank == 0


def _number(name: str, default: int) -> int:
    value = os.environ.get(name, "")
    return int(value) if value.isdecimal() else default

"""Python objects of all processes on the main one, a few at a time, over the CPUs. Knows nothing of what they are."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from hftune.distributed.progress import Progress


def host_group() -> Any:
    """Return a group of all processes that talks from CPU to CPU: None, which is the default one, where that does. Collective.

    NCCL would pickle objects into the GPUs' memory, all processes' at once on the main one.
    """
    if torch.distributed.get_backend() == "gloo":
        return None
    return torch.distributed.new_group(backend="gloo", timeout=timedelta(hours=1))


def gather_in_slices(rows: list, group: Any, at_once: int, progress: Progress) -> list | None:
    """Return all processes' rows, in process order, on process 0; None elsewhere. Collective.

    Args:
        at_once: rows of each process that are sent together.
    """
    rank, num_processes = torch.distributed.get_rank(), torch.distributed.get_world_size()
    counts: list[Any] = [None] * num_processes
    torch.distributed.all_gather_object(counts, len(rows), group=group)
    found: list[list] = [[] for _ in range(num_processes)]
    for start in range(0, max(counts), at_once):
        parts: list[Any] | None = [None] * num_processes if rank == 0 else None
        torch.distributed.gather_object(rows[start : start + at_once], parts, group=group)
        for whole, part in zip(found, parts or (), strict=False):
            whole.extend(part)
        progress.tick()
    return [row for part in found for row in part] if rank == 0 else None

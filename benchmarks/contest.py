"""Contenders that take turns, and scripts on several processes, for the benchmarks. Not run by itself; imports no torch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def take_turns(contenders: Mapping[str, Callable[[int], Any]], rounds: int) -> dict[str, list[Any]]:
    """Call every contender once a round with the round's number; another one begins each time. Return what they returned.

    Alternating, because other users of the machine come and go in minutes: a slow minute then hits all contenders alike.
    """
    names, results = list(contenders), {name: [] for name in contenders}
    for turn in range(rounds):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            results[name].append(contenders[name](turn))
    return results


def start(processes: int, words: Sequence[str]) -> None:
    """Run a Python command on that many processes, and wait for it."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    command = [sys.executable, *(launcher if processes > 1 else []), *words]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")

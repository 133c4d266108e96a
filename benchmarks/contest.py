"""Contenders that take turns, for the benchmarks that compare timings. Not run by itself; imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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

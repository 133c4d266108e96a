"""What every benchmark shares: contenders that take turns, and the table at the end. Not run by itself; imports no torch."""

from __future__ import annotations

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


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print aligned columns below a title: the first to the left, the others to the right."""
    cells = [list(header), *[[str(cell) for cell in row] for row in rows]]
    widths = [max(len(row[place]) for row in cells) for place in range(len(header))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *[cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]])
        for row in cells
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    print("\n".join([f"\n{title}", *[line.rstrip() for line in lines]]), flush=True)

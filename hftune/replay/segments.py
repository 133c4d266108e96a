"""The segments of a run, from one checkpoint to the next: which are computed again, and what that leaves open.

The verifier draws them after the owner has given the receipt away, so nobody can know which parts need to be true.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, order=True)
class Segment:
    """The steps after one checkpoint, up to and including that of another."""

    start: int
    """Step of the checkpoint that it starts from; 0 for the first weights."""
    end: int

    def __str__(self) -> str:
        return f"{self.start + 1}-{self.end}" if self.end > self.start + 1 else str(self.end)

    @property
    def title(self) -> str:
        """The segment in words, such as "steps 11-20"."""
        return f"step{'s' if len(self) > 1 else ''} {self}"

    def __len__(self) -> int:
        return self.end - self.start


def segments_between(checkpoints: Iterable[int]) -> list[Segment]:
    """Cut a run at the steps of its checkpoints."""
    return [Segment(start, end) for start, end in pairwise([0, *sorted(checkpoints)])]


@dataclass(frozen=True)
class Draw:
    """Which segments are computed again."""

    always: list[Segment]
    """The first one, which pins the first weights, and the last one, which makes the model."""
    drawn: list[Segment]
    """At random among all others."""
    left: list[Segment]
    """The others of these."""

    @property
    def chosen(self) -> list[Segment]:
        return sorted([*self.always, *self.drawn])

    @property
    def chance_to_miss_one(self) -> float:
        """The probability that one forged segment, somewhere among those that were drawn from, would not have been drawn."""
        return len(self.left) / (len(self.drawn) + len(self.left)) if self.left else 0.0


def draw(segments: Sequence[Segment], count: int | None, seed: str) -> Draw:
    """Draw the segments to compute again.

    Args:
        count: how many in all; at least the first and the last. None: all of them.
        seed: equal seeds draw equal segments.
    """
    always = sorted({segments[0], segments[-1]})
    middle = [segment for segment in segments if segment not in always]
    wanted = len(middle) if count is None else min(len(middle), max(0, count - len(always)))
    drawn = sorted(random.Random(seed).sample(middle, wanted))
    return Draw(always, drawn, [segment for segment in middle if segment not in drawn])

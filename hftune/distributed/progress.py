"""What this process is working on: set by the loop and the strategy, read when something goes wrong. Independent of readers."""

from __future__ import annotations

from collections.abc import Collection

SHOWN = 16
"""Samples to list; the rest are counted."""


class Progress:
    """The current stage and samples. Setting them costs nothing; each change is also a sign that the process is alive."""

    def __init__(self):
        self.current_samples: Collection[int] = ()
        self.current_stage, self.marks = "the start", 0

    def stage(self, name: str) -> None:
        """Enter a stage, such as ``step 12``."""
        self.current_stage, self.current_samples, self.marks = name, (), self.marks + 1

    def samples(self, indices: Collection[int]) -> None:
        """Start to load or compute these samples, a micro-batch of the current stage."""
        self.current_samples, self.marks = indices, self.marks + 1

    def tick(self) -> None:
        """Report progress within the current stage."""
        self.marks += 1

    def describe(self) -> str:
        """Return the stage and its samples in words: ``step 12, samples 3, 17``."""
        samples = [str(int(sample)) for sample in self.current_samples]
        if not samples:
            return self.current_stage
        more = f" and {len(samples) - SHOWN} more" if len(samples) > SHOWN else ""
        return f"{self.current_stage}, {'samples' if len(samples) > 1 else 'sample'} {', '.join(samples[:SHOWN])}{more}"

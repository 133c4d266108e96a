"""What this process is working on: written by loop and strategy, read when something goes wrong. Knows no one who reads it."""

from __future__ import annotations

from collections.abc import Sequence


class Progress:
    """Two marks that cost nothing to set. Each one is also a sign that the process moves on."""

    def __init__(self):
        self.doing, self.samples, self.marks = "the start", (), 0

    def at(self, doing: str) -> None:
        """Begin something else, such as ``step 12``."""
        self.doing, self.samples, self.marks = doing, (), self.marks + 1

    def on(self, samples: Sequence[int]) -> None:
        """Begin to load or to compute these samples, a micro-batch."""
        self.samples, self.marks = samples, self.marks + 1

    def tick(self) -> None:
        """Go on with the same."""
        self.marks += 1

    def place(self) -> str:
        """Say it in words: ``step 12, samples 3, 17``."""
        samples = [str(int(sample)) for sample in self.samples]
        if not samples:
            return self.doing
        more = f" and {len(samples) - 16} more" if len(samples) > 16 else ""
        return f"{self.doing}, {'samples' if len(samples) > 1 else 'sample'} {', '.join(samples[:16])}{more}"

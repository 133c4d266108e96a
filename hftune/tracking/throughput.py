"""How fast training is: samples and tokens a second. Independent of what is computed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hftune.batch_plan import MicroBatch


class Throughput:
    """Counts samples and tokens against the time spent in training; evaluations do not count."""

    def __init__(self):
        self.total_samples, self.total_seconds = 0, 0.0
        self.checkpoint_seconds = 0.0
        """For which checkpoints held up the training thread since the last call of ``rates``."""
        self._restart()

    def _restart(self) -> None:
        self.samples, self.tokens, self.padded, self.since = 0, 0, 0, time.monotonic()

    def count(self, plan: list[MicroBatch], lengths: Any) -> None:
        """Add one global batch."""
        self.samples += sum(len(micro_batch.samples) for micro_batch in plan)
        if lengths is not None:
            self.tokens += sum(int(lengths[micro_batch.samples].sum()) for micro_batch in plan)
            self.padded += sum(micro_batch.tokens for micro_batch in plan)

    def rates(self) -> dict[str, float]:
        """Return samples (and tokens, padding not counted) a second and the share of padding since the last call."""
        seconds = max(time.monotonic() - self.since, 1e-9)
        rates = {"perf/samples_per_s": self.samples / seconds}
        if self.tokens:
            rates |= {"perf/tokens_per_s": self.tokens / seconds, "perf/padding_share": 1 - self.tokens / self.padded}
        if self.checkpoint_seconds:
            rates["perf/checkpoint_s"], self.checkpoint_seconds = self.checkpoint_seconds, 0.0
        self.total_samples, self.total_seconds = self.total_samples + self.samples, self.total_seconds + seconds
        self._restart()
        return rates

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time spent inside."""
        began = time.monotonic()
        yield
        self.since += time.monotonic() - began

"""How fast training is: samples, tokens and useful arithmetic a second. Independent of what is computed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from hftune.batch_plan import MicroBatch
from hftune.strategies.arithmetic import Arithmetic


class Throughput:
    """Counts samples and tokens against the time spent in training; evaluations do not count."""

    def __init__(self):
        self.total_samples, self.total_seconds = 0, 0.0
        self.arithmetic: Arithmetic | None = None
        """What the model needs for its samples; None if that is not known."""
        self.peak_flops: float | None = None
        """Floating-point operations a second that the devices of all processes compute at best; None if that is not known."""
        self.checkpoint_seconds = 0.0
        """For which checkpoints held up the training thread since the last call of ``rates``."""
        self._restart()

    def _restart(self) -> None:
        self.steps, self.samples, self.tokens, self.padded, self.flops, self.since = 0, 0, 0, 0, 0.0, time.monotonic()

    def count(self, plan: list[MicroBatch], lengths: Any, num_items: float) -> None:
        """Add one global batch, whose loss is a sum over so many items."""
        self.steps += 1
        self.samples += sum(len(micro_batch.samples) for micro_batch in plan)
        if lengths is None:
            return
        lengths_B = np.concatenate([lengths[micro_batch.samples] for micro_batch in plan])
        self.tokens += int(lengths_B.sum())
        self.padded += sum(micro_batch.tokens for micro_batch in plan)
        if self.arithmetic is not None:
            self.flops += self.arithmetic.flops(lengths_B, num_items)

    def rates(self) -> dict[str, float]:
        """Return seconds a step, and samples and tokens (padding not counted) a second since the last call; padding; and mfu.

        perf/mfu: model FLOPs utilisation, the useful arithmetic over what the devices could have done meanwhile.
        """
        seconds = max(time.monotonic() - self.since, 1e-9)
        rates = {"perf/step_s": seconds / max(self.steps, 1), "perf/samples_per_s": self.samples / seconds}
        if self.tokens:
            rates |= {"perf/tokens_per_s": self.tokens / seconds, "perf/padding_share": 1 - self.tokens / self.padded}
        if self.flops and self.peak_flops:
            rates["perf/mfu"] = self.flops / seconds / self.peak_flops
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

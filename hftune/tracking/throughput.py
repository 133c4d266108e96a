"""How fast training is: samples, tokens and useful arithmetic a second. Independent of what is computed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from hftune.callbacks import Begin, Callback, CheckpointDone, Step
from hftune.strategies.arithmetic import Arithmetic


class Stopwatch:
    """The time that goes into training itself."""

    def __init__(self) -> None:
        self._since = time.monotonic()

    def lap(self) -> float:
        """Return the seconds since the last call, without those that it was paused."""
        began, self._since = self._since, time.monotonic()
        return self._since - began

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time spent inside."""
        began = time.monotonic()
        yield
        self._since += time.monotonic() - began


class Throughput(Callback):
    """Logs with each line of training how fast it was since the previous one, how even the work, and how busy the machines.

    Args:
        others: return what else is to be logged, such as ``StepTimes.take``; called on all processes.
        arithmetic: what the model needs for its samples; None if that is not known.
        peak_flops: floating-point operations a second that the devices of all processes compute at best; None if unknown.
    """

    on_all_processes = must_not_fail = True

    def __init__(
        self,
        *others: Callable[[], dict[str, float]],
        arithmetic: Arithmetic | None = None,
        peak_flops: float | None = None,
    ):
        self.others, self.arithmetic, self.peak_flops = others, arithmetic, peak_flops
        self.checkpoint_s = 0.0
        self._restart()

    def _restart(self) -> None:
        self.steps, self.samples, self.tokens, self.padded, self.flops, self.seconds = 0, 0, 0, 0, 0.0, 0.0

    def on_begin(self, begin: Begin) -> None:
        self.lengths = begin.plan.lengths

    def on_step(self, step: Step) -> None:
        self.seconds += step.seconds
        if step.loss is not None:
            self.steps += 1
            self.samples += step.num_samples
            if self.lengths is not None:
                lengths_B = np.concatenate([self.lengths[micro_batch.samples] for micro_batch in step.micro_batches])
                self.tokens += int(lengths_B.sum())
                self.padded += sum(micro_batch.tokens for micro_batch in step.micro_batches)
                self.flops += 0.0 if self.arithmetic is None else self.arithmetic.flops(lengths_B, step.num_items)
        if step.is_logged:
            for values in (self.rates(), *(take() for take in self.others)):
                for name, value in values.items():
                    step.log(name, value)

    def on_checkpoint(self, checkpoint: CheckpointDone) -> None:
        self.checkpoint_s += checkpoint.waited_s

    def rates(self) -> dict[str, float]:
        """Return seconds a step, and samples and tokens (padding not counted) a second since the last call; padding; and mfu.

        perf/mfu: model FLOPs utilisation, the useful arithmetic over what the devices could have done meanwhile.
        """
        seconds = max(self.seconds, 1e-9)
        rates = {"perf/step_s": seconds / max(self.steps, 1), "perf/samples_per_s": self.samples / seconds}
        if self.tokens:
            rates |= {"perf/tokens_per_s": self.tokens / seconds, "perf/padding_share": 1 - self.tokens / self.padded}
        if self.flops and self.peak_flops:
            rates["perf/mfu"] = self.flops / seconds / self.peak_flops
        if self.checkpoint_s:
            rates["perf/checkpoint_s"], self.checkpoint_s = self.checkpoint_s, 0.0
        self._restart()
        return rates

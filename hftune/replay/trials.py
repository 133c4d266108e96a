"""The same few steps of a run, computed again and again with other keys, each time from the same weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from hftune.replay.engine import Replayer
from hftune.replay.history import Change, History


class Trials:
    """A context in which steps are computed with other keys. What they share is set up once: processes, and data if they can.

    Args:
        history: of the run.
        first, last: the steps. They are reached from the checkpoint before ``first``, without the changes.
    """

    def __init__(self, history: History, first: int, last: int):
        self.history, self.first, self.last = history, first, last
        self._shared: Replayer | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Trials:
        return self

    def __exit__(self, *error: Any) -> bool | None:
        self._shared = None
        return self._stack.__exit__(*error)

    def losses(self, overrides: Sequence[str] = ()) -> list[float]:
        """Compute the steps with these overrides, and return the loss of each; infinity once training would have stopped.

        Raises:
            ConfigError, DataError: no run can have these keys.
        """
        change = Change(overrides=tuple(overrides), from_step=self.first)
        replayer = Replayer(self.history, self.first, change, like=self._shared)
        if self._shared is None:
            self._shared = self._stack.enter_context(replayer)
            return self._advance(replayer)
        with replayer:
            return self._advance(replayer)

    def _advance(self, replayer: Replayer) -> list[float]:
        losses = []
        for step in replayer.advance(self.last):
            if not math.isfinite(step.loss):
                return losses + [math.inf] * (self.last - max(step.step, self.first) + 1)
            if step.step >= self.first:
                losses.append(step.loss)
        return losses

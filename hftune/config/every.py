"""How often something is done in a training: an interval of steps, epochs or time, or never. Knows no loop and no clock."""

from __future__ import annotations

import re
from dataclasses import dataclass

_UNITS = {"s": 1, "min": 60, "h": 3600}
_EPOCHS = re.compile(r"(?:([1-9]\d*) ?epochs?|epoch)")
_TIME = re.compile(rf"(\d+(?:\.\d+)?) ?({'|'.join(_UNITS)})")
PATTERN = rf"^({_EPOCHS.pattern}|{_TIME.pattern})$"
"""Of the texts that it can be, besides "never"."""


@dataclass(frozen=True)
class Every:
    """A distance between two evaluations, checkpoints or log lines: one of the three, or none of them, which is never."""

    steps: int | None = None
    epochs: int | None = None
    seconds: float | None = None
    """Only the clock of one process can tell when these have passed: the main process decides, and tells the others."""

    @classmethod
    def read(cls, value: int | str) -> Every:
        """Read the value of a key: ``500``, ``epoch``, ``2 epochs``, ``90 s``, ``30 min``, ``2 h`` or ``never``.

        Raises:
            ValueError: it is none of these; the text says what the value is not.
        """
        if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
            return cls(steps=value)
        if isinstance(value, str):
            if value == "never":
                return cls()
            if found := _EPOCHS.fullmatch(value):
                return cls(epochs=int(found[1] or 1))
            if (found := _TIME.fullmatch(value)) and float(found[1]) > 0:
                return cls(seconds=float(found[1]) * _UNITS[found[2]])
        raise ValueError("is neither a number of steps, such as 500, nor epoch, '2 epochs', '30 min' or never.")

    @property
    def is_never(self) -> bool:
        return self == Every()

    def falls_on(self, step: int, steps_per_epoch: int) -> bool:
        """Say whether it is time after optimizer step ``step``, from 1; False where time is told by the clock."""
        interval = self.steps if self.epochs is None else self.epochs * steps_per_epoch
        return interval is not None and step % interval == 0

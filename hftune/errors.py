"""The ways a run can be refused or stopped; each message is meant to be read by a person, alone."""

from __future__ import annotations

from collections.abc import Sequence


class ConfigError(ValueError):
    """A recipe that cannot be run as written. Holds every problem found, one sentence each."""

    def __init__(self, problems: str | Sequence[str], recipe: str | None = None):
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        self.recipe = recipe
        super().__init__(self._text())

    def _text(self) -> str:
        if len(self.problems) == 1:
            return self.problems[0]
        where = f"Recipe {self.recipe!r}" if self.recipe else "The recipe"
        return "\n  ".join([f"{where} has {len(self.problems)} problems:", *self.problems])


class DataError(ValueError):
    """Data that cannot be trained on: a wrong column, an empty text, a label out of range. Names split and row."""


class TrainingError(RuntimeError):
    """Training that had to stop, such as a loss that is not finite. Names step, process and samples."""


class Interrupted(RuntimeError):
    """Training that was asked to stop, by a signal, and can go on. Says from where, and how."""


class ElsewhereError(TrainingError):
    """Another process failed, which reports it; this one has to stop with it. The message is that report."""

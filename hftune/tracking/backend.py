"""The interface of a tracker: the base class of W&B, MLflow and TensorBoard here, and of your own trackers.

Independent of training: a tracker sees numbers, tables and pictures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hftune.config import Recipe


@dataclass
class EarlierRun:
    """What a tracker needs to know about a run to continue it after an interruption."""

    step: int = 0
    """The optimizer step after which training resumes; 0 if it begins."""
    run_id: str | None = None
    """What ``run_id`` returned before."""
    lines: Sequence[Mapping[str, Any]] = field(default_factory=list)
    """All lines of metrics.jsonl up to that step."""


class TrackerBackend:
    """One tracker of one run. Subclass it and name the class in ``track.with`` by its dotted path.

    All methods are called on the main process only, between two steps: training waits for them, so return quickly. If ``start``
    raises, the run ends before it trains. An exception in any other method becomes one warning: training continues, the tracker
    gets nothing more, and metrics.jsonl has everything.

    Only ``log`` must be written.
    """

    def __init__(self, recipe: Recipe):
        self.recipe = recipe

    @classmethod
    def check(cls, recipe: Recipe) -> None:
        """Find out whether the tracker can be reached; called before data and model are loaded.

        Raises:
            ConfigError: it cannot, and what to do.
        """

    def start(self, config: Mapping[str, Any], earlier: EarlierRun) -> None:
        """Begin a run, or continue the earlier one.

        Args:
            config: the resolved recipe as nested plain data, and the Hub's ``commits``. No secrets of the environment.
        """

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record numbers of an optimizer step, such as train/loss, eval/accuracy and epoch."""
        raise NotImplementedError

    def log_table(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Record a few samples with their predictions; all rows have the same fields."""

    def log_images(self, step: int, pixels_HWC: np.ndarray) -> None:
        """Record one picture of samples, (height, width, 3) uint8."""

    @property
    def run_id(self) -> str | None:
        """Return the id by which ``start`` finds this run again, for checkpoints to keep; None if there is none."""
        return None

    def close(self) -> None:
        """End a run that is finished and saved. This may take its time, such as for an upload."""

    def abandon(self) -> None:
        """End a run that failed."""
        self.close()

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
            config: the resolved recipe as nested plain data, and the facts of run.json as ``run``; see hftune.tracking.facts.
                No secrets of the environment.
        """

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record numbers of an optimizer step, such as train/loss, eval/accuracy and epoch."""
        raise NotImplementedError

    def log_table(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Record rows that all have the same fields.

        Args:
            name: "eval/samples", the first samples with the task's ``sample_fields``; or "eval/predictions", the samples with
                the greatest errors, the worst first.
        """

    def log_confusion_matrix(self, step: int, name: str, counts: Sequence[Sequence[int]], labels: Sequence[str]) -> None:
        """Record how often each class was taken for each: as a table, unless a tracker has something better.

        Args:
            counts: a row for each true class, a column for each predicted one.
        """
        columns = [f"as {label}" for label in labels]
        rows = [
            {"true class": label, **dict(zip(columns, row, strict=True))} for label, row in zip(labels, counts, strict=True)
        ]
        self.log_table(step, name, rows)

    def log_images(self, step: int, name: str, images: Sequence[np.ndarray], captions: Sequence[str]) -> None:
        """Record images of samples, each (H, W, 3) uint8, of several sizes, with a caption each."""

    def log_best(self, step: int, metric: str, value: float) -> None:
        """Record the best evaluation so far, after each one; ``metric`` has no eval/ in front."""

    def alert(self, title: str, text: str, level: str) -> None:
        """Tell the user of an event at once.

        Args:
            level: "info" (the run is done), "warning" (a checkpoint could not be written) or "error" (the run failed).
        """

    @property
    def run_id(self) -> str | None:
        """Return the id by which ``start`` finds this run again, for checkpoints to keep; None if there is none."""
        return None

    def close(self) -> None:
        """End a run that is finished and saved. This may take its time, such as for an upload."""

    def interrupt(self) -> None:
        """End a run that a signal has stopped, to be resumed: the machine may be preempted within seconds."""
        self.abandon()

    def pause(self) -> None:
        """End a run that goes on in a moment, in the next round of an elastic job."""
        self.interrupt()

    def abandon(self) -> None:
        """End a run that failed. The process ends within seconds, whether or not this has returned."""
        self.close()

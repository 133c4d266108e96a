"""The interface of a tracker: the base class of those here, and of your own. A tracker sees numbers, tables and images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from hftune.config import Recipe

Status = Literal["finished", "failed", "interrupted", "paused"]
"""How a run ends; interrupted by a signal, to be resumed; paused, to go on in a moment, in the next round of an elastic job."""


@dataclass
class EarlierRun:
    """What a tracker needs to know about a run to continue it after an interruption."""

    step: int = 0
    """The optimizer step after which training resumes; 0 if it begins."""
    run_id: str | None = None
    """What ``run_id`` returned before."""
    lines: Sequence[Mapping[str, Any]] = field(default_factory=list)
    """All lines of metrics.jsonl up to that step."""
    awaits_evaluation: bool = False
    """Whether that step is evaluated now, as its evaluation was interrupted: its row is logged again."""


class TrackerBackend:
    """One tracker of one run. Subclass it and name the class in ``track.with`` by its dotted path.

    All methods are called on the main process only, and those after ``start`` in a thread of the tracker's own, one after the
    other: training does not wait for them. If ``start`` raises, the run ends before it trains. An exception in any other method
    becomes one warning; ``log`` is tried again later with the same numbers. metrics.jsonl has everything.

    Only ``log`` must be written.
    """

    url: str | None = None
    """An address that answers while the server does, set by ``start``: the end of a run does not wait for a dead one."""

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
        """Record the best evaluation so far, when it has changed; ``metric`` has no eval/ in front."""
        self.log(step, {"best/value": value, "best/step": step})

    def alert(self, title: str, text: str, level: str) -> None:
        """Tell the user of an event at once.

        Args:
            level: "info" (the run is done), "warning" (a checkpoint could not be written) or "error" (the run failed).
        """

    @property
    def run_id(self) -> str | None:
        """Return the id by which ``start`` finds this run again, for checkpoints to keep; None if there is none."""
        return None

    def upload(self) -> None:
        """Send the files and models of a run that is finished and saved. This may take its time."""

    def finish(self, status: Status) -> None:
        """End the run. Unless it is finished, the process ends within seconds, whether or not this has returned."""

    def leave(self) -> str | None:
        """End what would keep the process from ending, if ``finish`` or a call before it takes too long.

        Returns:
            What the user can do later.
        """
        return None

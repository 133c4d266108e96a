"""Records of events, as the loop makes them, for tests of what hears of them."""

from pathlib import Path
from typing import Any

from hftune.callbacks import CheckpointDone, EvaluationDone, Log, Step, Wishes


def step_taken(step: int, place: tuple[int, int] = (0, 0), **values: Any) -> Step:
    """Return the record of a step; without values, of one that was skipped."""
    wishes = values.pop("wishes", None) or Wishes({})
    return Step(step=step, epoch=0.5, wishes=wishes, place=place, **{"loss": None, **values})


def checkpoint_written(step: int, **hashes: str) -> CheckpointDone:
    """Return the record of a checkpoint that is complete."""
    return CheckpointDone(step=step, path=Path(f"step_{step:08d}"), hashes=hashes)


def logged(step: int, epoch: float, values: dict[str, Any]) -> Log:
    """Return the record of a line of metrics.jsonl."""
    return Log(step=step, epoch=epoch, values=values)


def evaluated(step: int, epoch: float, metrics: dict[str, Any], **values: Any) -> EvaluationDone:
    """Return the record of an evaluation; without ``best``, that of the test split."""
    split = "eval" if "best" in values else "test"
    defaults = {"split": split, "metrics": metrics, "rows": (), "wishes": Wishes({})}
    return EvaluationDone(step=step, epoch=epoch, **{**defaults, **values})

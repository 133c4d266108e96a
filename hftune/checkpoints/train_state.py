"""What changes in training besides model and optimizer, and what a checkpoint records about where a run came from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class TrainState:
    """Everything that changes in training besides model and optimizer. ``(epoch, step_in_epoch)`` is the whole data order."""

    step: int = 0
    """Optimizer steps taken."""
    epoch: int = 0
    step_in_epoch: int = 0
    best: float | None = None
    """The best value of ``eval.metric`` so far."""
    best_step: int | None = None
    last_improvement: float | None = None
    """The value of ``eval.metric`` that was last better than the one before by more than ``eval.min_improvement``."""
    evaluations_since: int = 0
    """Evaluations since then."""
    counted_step: int = 0
    """Step of the last evaluation that ``eval.patience`` has counted; 0 before the first."""
    num_falls: int = 0
    """How often ``train.schedule=plateau`` has made the learning rate fall."""
    evaluated_step: int = 0
    """Step of the last evaluation; 0 before the first."""
    metrics: dict[str, Any] = field(default_factory=dict)
    """Those of the last evaluation."""
    seconds: float = 0.0
    """Spent in training so far, interruptions not counted."""
    mean_loss: float = 0.0
    """Mean over the items of the steps since the last line of metrics.jsonl."""
    mean_items: float = 0.0
    """Number of these items."""
    pending: dict[str, str] = field(default_factory=dict)
    """What callbacks, of any process, have asked for, and the next step is to tell all processes; see ``Wishes``."""
    evaluation_is_asked: bool = False
    """Whether a callback or the clock has asked for an evaluation that has not been made yet."""
    ended_by: str | None = None
    """Why a callback has ended the training before its last step."""

    def advance(self) -> tuple[int, int]:
        """Count a step; return its epoch, and its place in it."""
        place = self.epoch, self.step_in_epoch
        self.step, self.step_in_epoch = self.step + 1, self.step_in_epoch + 1
        return place

    def add_loss(self, loss: float, num_items: float) -> None:
        """Take a step's loss into the mean. The mean of a single step is its loss to the last bit."""
        self.mean_items += num_items
        self.mean_loss += (loss - self.mean_loss) * (num_items / self.mean_items)

    def take_mean_loss(self) -> float:
        """Return the mean, and start a new one."""
        mean, self.mean_loss, self.mean_items = self.mean_loss, 0.0, 0.0
        return mean

    def note_score(
        self, score: float, greater_is_better: bool, min_improvement: float, plateau_patience: int | None = None
    ) -> None:
        """Count an evaluation for ``eval.patience`` and ``train.plateau_patience``; once, even if it is made again."""
        if self.counted_step == self.step:
            return
        self.counted_step = self.step
        before, sign = self.last_improvement, 1 if greater_is_better else -1
        if before is None or sign * (score - before) > min_improvement:
            self.last_improvement, self.evaluations_since = score, 0
        else:
            self.evaluations_since += 1
            self.num_falls += plateau_patience is not None and self.evaluations_since % plateau_patience == 0

    def has_ended(self, num_steps: int, patience: int | None) -> bool:
        """Say whether no step is left, ``eval.patience`` is exhausted, or a callback has ended the training."""
        is_out = patience is not None and self.evaluations_since >= patience
        return self.step == num_steps or is_out or self.ended_by is not None

    def forget_best(self) -> None:
        """Look for the best model from here on, starting with an evaluation of this step if one is due."""
        self.best, self.best_step, self.evaluated_step = None, None, 0

    def forget_scores(self) -> None:
        """Forget the best model, and what ``eval.patience`` has counted: they are scores of another metric."""
        self.forget_best()
        self.last_improvement, self.evaluations_since, self.counted_step = None, 0, 0

    def progress(self, steps_per_epoch: int) -> float:
        """Return the epochs done, with a fraction."""
        return self.epoch + self.step_in_epoch / steps_per_epoch


@dataclass
class Provenance:
    """What a checkpoint records in addition to the state: enough to refuse a resume that would be a different training."""

    digests: dict[str, str]
    """Of each split, such as "train data"."""
    commits: dict[str, str]
    """Of what was loaded from the Hub, by the key that names the repository, such as task.model."""
    precision: str = "no"
    """What ``train.mixed_precision`` means on these devices: no, bf16 or fp16."""
    run_ids: dict[str, str] = field(default_factory=dict)
    """Of the runs at the trackers, by tracker."""
    micro_batch_size: dict[str, Any] = field(default_factory=dict)
    """How many of the longest samples ``train.micro_batch_size=auto`` or ``micro_batch_tokens=auto`` found to fit, and the
    conditions it was found under."""
    base: str | None = None
    """The digest of the frozen weights that adapters are trained on; None without adapters."""
    reference: str | None = None
    """That of the starting model, if the loss compares with it."""
    callbacks: list[str] = field(default_factory=list)
    """How the callbacks were made that ``train`` was given besides the recipe's."""

"""What is predicted of a sample, by transformers' names: a class, several labels or a number; with loss, rows and metrics.

torch and scikit-learn are imported inside the methods, so that mistyped recipes are refused without waiting for them.
Shape suffixes: N samples, K classes or labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from hftune.errors import ConfigError
from hftune.metrics import records
from hftune.tasks.late_rows import late_rows_each

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from hftune.task import Direction

THRESHOLD = 0.5
"""Probability from which a sample is predicted to have a label, if it can have several."""


@dataclass(frozen=True)
class SingleLabel:
    """Each sample has one of K classes. The loss is cross-entropy; an item is a sample, or, with weights, its class's weight.

    So a weighted loss is divided by the sum of the weights of the global batch, as torch's CrossEntropyLoss divides by that of
    its batch.
    """

    labels: Sequence[str] = ()
    weights: Sequence[float] | None = None
    """By class."""
    label_smoothing: float = 0.0
    focal_gamma: float = 0.0
    ordinal: bool = False

    directions: ClassVar[Mapping[str, Direction | None]] = records.directions("accuracy", "macro_f1", "mcc")

    def loss(self, logits_NK: Tensor, labels_N: Tensor) -> Tensor:
        from torch.nn.functional import cross_entropy

        logits_NK = logits_NK.float()
        weights_K = None if self.weights is None else _on_device(self.weights, logits_NK.device)
        if not self.focal_gamma:
            return cross_entropy(logits_NK, labels_N, weight=weights_K, label_smoothing=self.label_smoothing, reduction="sum")
        losses_N = cross_entropy(logits_NK, labels_N, reduction="none")
        losses_N = _focal(1 - (-losses_N).exp(), self.focal_gamma) * losses_N  # exp(-loss) is the probability of the label
        return (losses_N if weights_K is None else weights_K[labels_N] * losses_N).sum()

    def item_logits(self, logits_NK: Tensor) -> Tensor | None:
        return None if self.weights else logits_NK

    def num_items(self, labels_N: Tensor) -> float:
        import torch

        if self.weights is None:
            return len(labels_N)
        return float(torch.tensor(self.weights, dtype=torch.float64)[labels_N.cpu()].sum())

    def rows(self, logits_NK: Tensor, labels_N: Tensor) -> list[dict[str, Any]]:
        """Return rows of label and prediction (class numbers), the probabilities of both and the loss, rounded to 6 digits."""
        probability_N = logits_NK.float().softmax(-1).gather(-1, labels_N[:, None]).squeeze(-1)
        loss_N = logits_NK.float().log_softmax(-1).gather(-1, labels_N[:, None]).squeeze(-1).abs()  # no -0.0

        def row(label: int, best: float, prediction: int, probability: float, loss: float) -> dict[str, Any]:
            of_both = {"probability": round(best, 6), "label_probability": round(probability, 6)}
            return {"label": label, "prediction": prediction, **of_both, "loss": round(loss, 6)}

        return late_rows_each(row, labels_N, *logits_NK.float().softmax(-1).max(-1), probability_N, loss_N)

    def describe(self, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return names instead of class numbers. The error is the probability that the label did not get."""
        return [
            {
                **row,
                "label": self.labels[row["label"]],
                "prediction": self.labels[row["prediction"]],
                "error": round(1 - row["label_probability"], 6),
            }
            for row in rows
        ]

    def metrics(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        from hftune.metrics.classification import class_metrics

        labels, predictions = ([row[name] for row in rows] for name in ("label", "prediction"))
        return class_metrics(labels, predictions, self.labels, self.ordinal)

    @staticmethod
    def answers(logits_NK: Tensor, names: Sequence[str], probabilities: bool = False) -> list[dict[str, Any]]:
        """Return the most probable label of each sample, by name, and its probability; on demand those of all labels."""
        rows: list[dict[str, Any]] = [
            {"label": names[label], "probability": probability} for label, probability in _most_probable(logits_NK)
        ]
        if probabilities:
            for row, values in zip(rows, logits_NK.float().softmax(-1).tolist(), strict=True):
                row["probabilities"] = _by_name(names, values)
        return rows


@dataclass(frozen=True)
class MultiLabel:
    """Each sample has any of K labels. The loss is binary cross-entropy; an item is a sample's answer to one label."""

    labels: Sequence[str] = ()
    weights: Sequence[float] | None = None
    """By label, of the samples that have it: torch's pos_weight."""
    focal_gamma: float = 0.0

    directions: ClassVar[Mapping[str, Direction | None]] = records.directions("macro_f1", "micro_f1", "auroc", "exact_match")

    def loss(self, logits_NK: Tensor, labels_NK: Tensor) -> Tensor:
        from torch.nn.functional import binary_cross_entropy_with_logits

        logits_NK, labels_NK = logits_NK.float(), labels_NK.float()
        weights_K = None if self.weights is None else _on_device(self.weights, logits_NK.device)
        losses_NK = binary_cross_entropy_with_logits(logits_NK, labels_NK, pos_weight=weights_K, reduction="none")
        if self.focal_gamma:
            probability_NK = logits_NK.sigmoid()
            wrong_NK = probability_NK + labels_NK - 2 * probability_NK * labels_NK  # what the true answer did not get
            losses_NK = _focal(wrong_NK, self.focal_gamma) * losses_NK
        return losses_NK.sum()

    def item_logits(self, logits_NK: Tensor) -> Tensor | None:
        """Return the logits of no and yes for each answer, (N * K, 2)."""
        import torch

        if self.weights:
            return None
        return torch.stack([torch.zeros_like(logits_NK), logits_NK], -1).flatten(0, 1)

    def num_items(self, labels_NK: Tensor) -> float:
        return labels_NK.numel()

    def rows(self, logits_NK: Tensor, labels_NK: Tensor) -> list[dict[str, Any]]:
        """Return rows of label and prediction (0 or 1 for each label), and the probabilities of all labels."""

        def row(label: list[int], shares: list[float]) -> dict[str, Any]:
            return {"label": label, "prediction": [int(value >= THRESHOLD) for value in shares], "probabilities": shares}

        return late_rows_each(row, labels_NK.int(), logits_NK.float().sigmoid())

    def describe(self, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return names instead of 0 and 1. The error is the largest distance of a probability from the truth."""

        def names(flags: Sequence[int]) -> list[str]:
            return [name for name, flag in zip(self.labels, flags, strict=True) if flag]

        return [
            {
                "label": names(row["label"]),
                "prediction": names(row["prediction"]),
                "probabilities": _by_name(self.labels, row["probabilities"]),
                "error": round(max(abs(a - b) for a, b in zip(row["label"], row["probabilities"], strict=True)), 6),
            }
            for row in rows
        ]

    def metrics(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        from hftune.metrics.classification import multi_label_metrics

        labels, said, probabilities = ([row[name] for row in rows] for name in ("label", "prediction", "probabilities"))
        return multi_label_metrics(labels, said, probabilities, self.labels)

    @staticmethod
    def answers(logits_NK: Tensor, names: Sequence[str], probabilities: bool = True) -> list[dict[str, Any]]:
        """Return each sample's labels, by name, and the probabilities of all labels."""
        return [
            {
                "labels": [name for name, value in zip(names, row, strict=True) if value >= THRESHOLD],  # before it is rounded
                "probabilities": _by_name(names, row),
            }
            for row in logits_NK.float().sigmoid().tolist()
        ]


@dataclass(frozen=True)
class Regression:
    """Each sample has a number. The loss is the squared error; an item is a sample."""

    labels: ClassVar[None] = None
    directions: ClassVar[Mapping[str, Direction | None]] = records.directions("rmse", "mae", "pearson", "spearman")

    def loss(self, logits_N1: Tensor, values_N: Tensor) -> Tensor:
        from torch.nn.functional import mse_loss

        return mse_loss(logits_N1.squeeze(-1).float(), values_N.float(), reduction="sum")

    def item_logits(self, logits_N1: Tensor) -> None:
        return None

    def num_items(self, values_N: Tensor) -> float:
        return len(values_N)

    def rows(self, logits_N1: Tensor, values_N: Tensor) -> list[dict[str, Any]]:
        """Return rows of label and prediction, two numbers."""
        columns = (values_N, logits_N1.squeeze(-1).float())
        return late_rows_each(lambda value, prediction: {"label": value, "prediction": prediction}, *columns)

    def describe(self, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return rounded numbers, and their distance as the error."""
        return [
            {**{name: _rounded(value) for name, value in row.items()}, "error": _rounded(abs(row["label"] - row["prediction"]))}
            for row in rows
        ]

    def metrics(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        from hftune.metrics.regression import regression_metrics

        return regression_metrics([row["prediction"] for row in rows], [row["label"] for row in rows])

    @staticmethod
    def answers(logits_N1: Tensor, names: Sequence[str], probabilities: bool = False) -> list[dict[str, Any]]:
        """Return each sample's number.

        Raises:
            ConfigError: probabilities are asked for.
        """
        if probabilities:
            raise ConfigError("This model predicts a number, which has no probabilities.")
        return [{"value": _rounded(value)} for value in logits_N1.squeeze(-1).float().tolist()]


Problem = SingleLabel | MultiLabel | Regression
PROBLEMS: dict[str, type[Problem]] = {
    "single_label_classification": SingleLabel,
    "multi_label_classification": MultiLabel,
    "regression": Regression,
}
"""By transformers' names."""


def _on_device(values: Sequence[float], device: torch.device) -> Tensor:
    """Return float32 values on a device. A copy from memory that is not pinned would wait for a GPU."""
    import torch

    pinned = torch.tensor(values, dtype=torch.float32, pin_memory=device.type == "cuda")
    return pinned.to(device, non_blocking=True)


def _focal(wrong: Tensor, gamma: float) -> Tensor:
    """Return the factors of the focal loss, by the probability of a wrong answer.

    It is 0 where an answer is certain; there a power below 1 has an infinite slope, and the gradient would be NaN.
    """
    import torch

    return wrong.clamp_min(torch.finfo(wrong.dtype).tiny) ** gamma


def _most_probable(logits_NK: Tensor) -> list[tuple[int, float]]:
    """Return each sample's most probable class number and its probability, rounded to 6 digits."""
    probability_N, class_N = logits_NK.float().softmax(-1).max(-1)
    return [(label, round(probability, 6)) for label, probability in zip(class_N.tolist(), probability_N.tolist(), strict=True)]


def _by_name(names: Sequence[str], probabilities: Sequence[float]) -> dict[str, float]:
    return {name: round(value, 6) for name, value in zip(names, probabilities, strict=True)}


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")

"""Classification metrics on class numbers, computed by scikit-learn. ``evaluate.load`` would download the same from the Hub."""

from __future__ import annotations

from typing import Any

import datasets
import evaluate
from sklearn.metrics import accuracy_score, confusion_matrix, f1_score, mean_absolute_error

_LABELS = datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")})


class _LabelMetric(evaluate.Metric):
    """A metric of predicted against true class numbers, both (N,) int64."""

    def __init__(self):
        super().__init__(keep_in_memory=True)

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(description=type(self).__doc__, citation="", inputs_description="", features=_LABELS)


class Accuracy(_LabelMetric):
    """Share of predictions that equal their reference, in [0, 1]."""

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        return {"accuracy": float(accuracy_score(references, predictions))}


class MacroF1(_LabelMetric):
    """Mean over the classes of the F1 score, in [0, 1]; a class that is neither present nor predicted counts 0."""

    def _compute(self, predictions: Any, references: Any, num_labels: int) -> dict[str, float]:
        labels = range(num_labels)
        score = f1_score(references, predictions, labels=labels, average="macro", zero_division=0.0)
        return {"macro_f1": float(score)}


class MeanAbsoluteError(_LabelMetric):
    """Mean distance between predicted and true grade, in grades; for ordered classes only."""

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        return {"mae": float(mean_absolute_error(references, predictions))}


class ConfusionMatrix(_LabelMetric):
    """Counts of (true, predicted) pairs: rows are true classes, columns predicted ones."""

    def _compute(self, predictions: Any, references: Any, num_labels: int) -> dict[str, list[list[int]]]:
        return {"confusion_matrix": confusion_matrix(references, predictions, labels=range(num_labels)).tolist()}

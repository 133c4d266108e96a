"""Classification metrics on class numbers, computed by scikit-learn. ``evaluate.load`` would download the same from the Hub."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import datasets
import evaluate
import numpy as np
from sklearn.metrics import (
    accuracy_score,
    confusion_matrix,
    f1_score,
    matthews_corrcoef,
    mean_absolute_error,
    precision_recall_fscore_support,
    roc_auc_score,
)

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
    """Mean of the F1 scores of the classes that are present or predicted, in [0, 1], as scikit-learn has it."""

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        return {"macro_f1": float(f1_score(references, predictions, average="macro", zero_division=0.0))}


class MatthewsCorrelation(_LabelMetric):
    """Correlation of predicted and true classes, in [-1, 1]: 0 for guesses, however unequal the classes are."""

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        return {"mcc": float(matthews_corrcoef(references, predictions))}


class MeanAbsoluteError(_LabelMetric):
    """Mean distance between predicted and true grade, in grades; for ordered classes only."""

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        return {"mae": float(mean_absolute_error(references, predictions))}


class ConfusionMatrix(_LabelMetric):
    """Counts of (true, predicted) pairs: rows are true classes, columns predicted ones."""

    def _compute(self, predictions: Any, references: Any, num_labels: int) -> dict[str, list[list[int]]]:
        return {"confusion_matrix": confusion_matrix(references, predictions, labels=range(num_labels)).tolist()}


class PerClass(_LabelMetric):
    """Precision, recall and F1 of each class, by its name, in [0, 1]; 0 where undefined. ``support``: its number of samples."""

    def _compute(self, predictions: Any, references: Any, names: Sequence[str]) -> dict[str, Any]:
        scores = precision_recall_fscore_support(references, predictions, labels=range(len(names)), zero_division=0.0)
        return {"per_class": _by_class(names, *scores)}


def multi_label_metrics(labels: Any, predictions: Any, probabilities: Any, names: Sequence[str]) -> dict[str, Any]:
    """Return the metrics of samples that can have several labels.

    Args:
        labels, predictions: (N, K), 0 or 1.
        probabilities: (N, K).
        names: of the labels.

    Returns:
        macro_f1 (mean over the labels), micro_f1 (over all answers), exact_match (share of samples whose labels are all right),
        auroc (mean over the labels that some samples have and others lack; None if there are none, or if probabilities are
        NaN), in [0, 1]; and per_class, those of each label, by its name.
    """
    true_NK, said_NK, probability_NK = np.asarray(labels), np.asarray(predictions), np.asarray(probabilities)
    scores = precision_recall_fscore_support(true_NK, said_NK, average=None, zero_division=0.0)
    per_class = _by_class(names, *scores)
    for number, row in enumerate(per_class.values()):
        has_both = 0 < row["support"] < len(true_NK) and np.isfinite(probability_NK[:, number]).all()
        row["auroc"] = float(roc_auc_score(true_NK[:, number], probability_NK[:, number])) if has_both else None
    areas = [row["auroc"] for row in per_class.values() if row["auroc"] is not None]
    return {
        "macro_f1": float(np.mean([row["f1"] for row in per_class.values()])),
        "micro_f1": float(f1_score(true_NK, said_NK, average="micro", zero_division=0.0)),
        "auroc": float(np.mean(areas)) if areas else None,
        "exact_match": float((true_NK == said_NK).all(1).mean()),
        "per_class": per_class,
    }


def _by_class(names: Sequence[str], precision: Any, recall: Any, f1: Any, support: Any) -> dict[str, dict[str, Any]]:
    columns = zip(names, precision.tolist(), recall.tolist(), f1.tolist(), support.tolist(), strict=True)
    return {name: dict(zip(("precision", "recall", "f1", "support"), scores, strict=True)) for name, *scores in columns}

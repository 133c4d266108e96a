"""Metrics of class numbers, computed by scikit-learn. Independent of tasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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


def class_metrics(
    labels: Sequence[int], predictions: Sequence[int], names: Sequence[str], are_grades: bool = False
) -> dict[str, Any]:
    """Return the metrics of samples that each have one of several classes.

    Args:
        labels, predictions: class numbers, (N,).
        names: of all classes.
        are_grades: whether the classes are ordered.

    Returns:
        accuracy, in [0, 1]; macro_f1, the mean of the F1 scores of the classes that are present or predicted, in [0, 1], as
        scikit-learn has it; mcc, the correlation of predicted and true classes, in [-1, 1]: 0 for guesses, however unequal the
        classes are; mae, of grades, the mean distance in grades; confusion_matrix, counts with true classes as rows and
        predicted ones as columns; per_class, precision, recall and F1 of each class, 0 where undefined, and its support, by
        its name.
    """
    return {
        "accuracy": float(accuracy_score(labels, predictions)),
        "macro_f1": float(f1_score(labels, predictions, average="macro", zero_division=0.0)),
        "mcc": float(matthews_corrcoef(labels, predictions)),
        **({"mae": float(mean_absolute_error(labels, predictions))} if are_grades else {}),
        "confusion_matrix": confusion_matrix(labels, predictions, labels=range(len(names))).tolist(),
        "per_class": per_class(labels, predictions, names, labels=range(len(names))),
    }


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
    by_name = per_class(true_NK, said_NK, names)
    for number, row in enumerate(by_name.values()):
        has_both = 0 < row["support"] < len(true_NK) and np.isfinite(probability_NK[:, number]).all()
        row["auroc"] = float(roc_auc_score(true_NK[:, number], probability_NK[:, number])) if has_both else None
    areas = [row["auroc"] for row in by_name.values() if row["auroc"] is not None]
    return {
        "macro_f1": float(np.mean([row["f1"] for row in by_name.values()])),
        "micro_f1": float(f1_score(true_NK, said_NK, average="micro", zero_division=0.0)),
        "auroc": float(np.mean(areas)) if areas else None,
        "exact_match": float((true_NK == said_NK).all(1).mean()),
        "per_class": by_name,
    }


def per_class(true: Any, predicted: Any, names: Sequence[str], labels: Any = None) -> dict[str, dict[str, Any]]:
    """Return precision, recall, F1 and support of each class or label, in [0, 1] and 0 where undefined, by its name."""
    scores = precision_recall_fscore_support(true, predicted, labels=labels, zero_division=0.0)
    rows = zip(names, *(column.tolist() for column in scores), strict=True)
    return {name: dict(zip(("precision", "recall", "f1", "support"), row, strict=True)) for name, *row in rows}

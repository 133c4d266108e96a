"""Metrics of classes of pixels, from one confusion matrix of whole numbers. Independent of tasks.

Shape suffixes: H and W height and width, K classes (rows: true ones, columns: predicted ones).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np


def confusion_of(labels_HW: np.ndarray, predictions_HW: np.ndarray, ignored: int) -> list[list[int]]:
    """Return how many pixels have which class and which prediction, as rows of label, prediction and count above 0.

    Args:
        ignored: label of pixels that do not count.
    """
    is_valid = labels_HW != ignored
    pairs = labels_HW[is_valid].astype(np.int64) << 32 | predictions_HW[is_valid].astype(np.int64)
    found, counts = np.unique(pairs, return_counts=True)
    return [[pair >> 32, pair & 0xFFFFFFFF, count] for pair, count in zip(found.tolist(), counts.tolist(), strict=True)]


def confusion_matrix(entries: Iterable[Sequence[int]], num_classes: int) -> np.ndarray:
    """Return the matrix, (K, K) int64, of what ``confusion_of`` returned for any number of images."""
    matrix_KK = np.zeros((num_classes, num_classes), np.int64)
    for label, prediction, count in entries:
        matrix_KK[label, prediction] += count
    return matrix_KK


def ious(matrix_KK: np.ndarray) -> list[float | None]:
    """Return each class's intersection over union, in [0, 1]; None if no pixel has it or is predicted to have it."""
    hits_K = matrix_KK.diagonal()
    union_K = matrix_KK.sum(0) + matrix_KK.sum(1) - hits_K
    return [hits / union if union else None for hits, union in zip(hits_K.tolist(), union_K.tolist(), strict=True)]


def segmentation_metrics(matrix_KK: np.ndarray, names: Sequence[str]) -> dict[str, Any]:
    """Return the metrics of all pixels of a split.

    Returns:
        mean_iou, the mean over the classes that occur or are predicted, and pixel_accuracy, in [0, 1], None without pixels;
        confusion_matrix, counts of pixels; and per_class, by its name, each class's iou (None as in ``ious``), accuracy, the
        share of its pixels that are found (None if it has none), and support, its number of pixels.
        Source: Long et al. 2014, https://arxiv.org/abs/1411.4038, section 5.
    """
    found = ious(matrix_KK)
    rows = zip(names, found, matrix_KK.diagonal().tolist(), matrix_KK.sum(1).tolist(), strict=True)
    occurring = [iou for iou in found if iou is not None]
    total = int(matrix_KK.sum())
    return {
        "mean_iou": sum(occurring) / len(occurring) if occurring else None,
        "pixel_accuracy": int(matrix_KK.trace()) / total if total else None,
        "confusion_matrix": matrix_KK.tolist(),
        "per_class": {
            name: {"iou": iou, "accuracy": hits / support if support else None, "support": support}
            for name, iou, hits, support in rows
        },
    }

"""Metrics of predicted against true numbers. Independent of tasks."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
from scipy.stats import pearsonr, spearmanr


def regression_metrics(predictions: Sequence[float], references: Sequence[float]) -> dict[str, float | None]:
    """Return the root mean squared and the mean absolute error, in units of the targets, and two correlations.

    A correlation, Pearson's or Spearman's (of ranks), is None where all targets or all predictions are equal.
    """
    predicted, true = np.asarray(predictions, np.float64), np.asarray(references, np.float64)
    error = predicted - true
    correlations: dict[str, float | None] = {"pearson": None, "spearman": None}
    if len(true) > 1 and np.ptp(predicted) > 0 and np.ptp(true) > 0:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of nearly constant input
            found = {"pearson": pearsonr(predicted, true).statistic, "spearman": spearmanr(predicted, true).statistic}
        correlations = {name: float(value) for name, value in found.items()}
    return {"rmse": float(np.sqrt(np.mean(error**2))), "mae": float(np.mean(np.abs(error))), **correlations}

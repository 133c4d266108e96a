"""What the classification tasks share, of texts or of images: the most probable class of each sample, and its evaluation rows.

Shape suffixes: N samples, K classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import ArrayLike
    from torch import Tensor


def count_classes(labels_N: ArrayLike, names: Sequence[str]) -> dict[str, int]:
    """Return the number of samples of each class, by its name."""
    import numpy as np

    return dict(zip(names, np.bincount(labels_N, minlength=len(names)).tolist(), strict=True))


def most_probable(logits_NK: Tensor) -> list[tuple[int, float]]:
    """Return each sample's most probable class number and its probability, rounded to 6 digits."""
    probability_N, class_N = logits_NK.float().softmax(-1).max(-1)
    return [(label, round(probability, 6)) for label, probability in zip(class_N.tolist(), probability_N.tolist(), strict=True)]


def answers(logits_NK: Tensor, names: Sequence[str], probabilities: bool) -> list[dict[str, Any]]:
    """Return each sample's most probable label, by name, and its probability; and on demand those of all classes."""
    rows: list[dict[str, Any]] = [
        {"label": names[label], "probability": probability} for label, probability in most_probable(logits_NK)
    ]
    if probabilities:
        for row, values in zip(rows, logits_NK.float().softmax(-1).tolist(), strict=True):
            row["probabilities"] = {name: round(value, 6) for name, value in zip(names, values, strict=True)}
    return rows


def evaluation_rows(logits_NK: Tensor, labels_N: Tensor) -> list[dict[str, Any]]:
    """Return rows of label and prediction (class numbers), the probabilities of both and the loss, rounded to 6 digits."""
    probability_N = logits_NK.float().softmax(-1).gather(-1, labels_N[:, None]).squeeze(-1)
    loss_N = logits_NK.float().log_softmax(-1).gather(-1, labels_N[:, None]).squeeze(-1).abs()  # minus would make -0.0 of 0
    columns = zip(labels_N.tolist(), most_probable(logits_NK), probability_N.tolist(), loss_N.tolist(), strict=True)
    return [
        {
            **{"label": label, "prediction": prediction, "probability": probability},
            **{"label_probability": round(of_label, 6), "loss": round(loss, 6)},
        }
        for label, (prediction, probability), of_label, loss in columns
    ]


def named(rows: Sequence[dict[str, Any]], labels: Sequence[str]) -> list[dict[str, Any]]:
    """Return the rows with names instead of class numbers. Their error is the probability that the label did not get."""
    return [
        {
            **row,
            "label": labels[row["label"]],
            "prediction": labels[row["prediction"]],
            "error": round(1 - row["label_probability"], 6),
        }
        for row in rows
    ]

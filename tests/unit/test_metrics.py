"""Metrics on cases counted by hand."""

import pytest

from hftune.metrics.classification import Accuracy, ConfusionMatrix, MacroF1, MeanAbsoluteError

SAID = {"predictions": [0, 1, 1, 3], "references": [0, 1, 2, 0]}


def test_accuracy_counts_equal_pairs():
    assert Accuracy().compute(**SAID) == {"accuracy": 0.5}


def test_mean_absolute_error_is_in_grades():
    assert MeanAbsoluteError().compute(**SAID) == {"mae": 1.0}


def test_macro_f1_counts_the_classes_that_occur_as_scikit_learn_does():
    # F1 of the classes: 0: 2/3, 1: 2/3, 2 (never predicted): 0, 3 (never true): 0.
    assert MacroF1().compute(**SAID) == {"macro_f1": pytest.approx((2 / 3 + 2 / 3) / 4)}
    right = [0, 0, 2, 2]  # of a model with a third class, 1
    assert MacroF1().compute(predictions=right, references=right) == {"macro_f1": 1.0}


def test_confusion_matrix_has_true_classes_as_rows():
    rows = ConfusionMatrix().compute(**SAID, num_labels=4)["confusion_matrix"]
    assert rows == [[1, 0, 0, 1], [0, 1, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0]]

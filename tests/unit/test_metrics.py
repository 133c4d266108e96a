"""Metrics on cases counted by hand."""

import pytest

from hftune.metrics.classification import Accuracy, ConfusionMatrix, MacroF1, MeanAbsoluteError

SAID = {"predictions": [0, 1, 1, 3], "references": [0, 1, 2, 0]}


def test_accuracy_counts_equal_pairs():
    assert Accuracy().compute(**SAID) == {"accuracy": 0.5}


def test_mean_absolute_error_is_in_grades():
    assert MeanAbsoluteError().compute(**SAID) == {"mae": 1.0}


def test_macro_f1_counts_every_class_even_absent_ones():
    # F1 of the classes: 0: 2/3, 1: 2/3, 2: 0, 3: 0, 4 (absent): 0.
    assert MacroF1().compute(**SAID, num_labels=5) == {"macro_f1": pytest.approx((2 / 3 + 2 / 3) / 5)}


def test_confusion_matrix_has_true_classes_as_rows():
    rows = ConfusionMatrix().compute(**SAID, num_labels=4)["confusion_matrix"]
    assert rows == [[1, 0, 0, 1], [0, 1, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0]]

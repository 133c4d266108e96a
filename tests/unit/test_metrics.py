"""Metrics on cases counted by hand, and what is known of them by name."""

import pytest

from hftune.metrics.classification import class_metrics
from hftune.metrics.records import METRICS, record_of

LABELS, PREDICTIONS, NAMES = [0, 1, 2, 0], [0, 1, 1, 3], ["a", "b", "c", "d"]


def test_metrics_of_classes_are_those_counted_by_hand():
    found = class_metrics(LABELS, PREDICTIONS, NAMES, are_grades=True)
    # F1 of the classes: 0: 2/3, 1: 2/3, 2 (never predicted): 0, 3 (never true): 0.
    assert (found["accuracy"], found["mae"], found["macro_f1"]) == (0.5, 1.0, pytest.approx((2 / 3 + 2 / 3) / 4))
    assert found["confusion_matrix"] == [[1, 0, 0, 1], [0, 1, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0]], "true classes are rows"
    assert found["per_class"]["b"] == {"precision": 0.5, "recall": 1.0, "f1": pytest.approx(2 / 3), "support": 1}
    assert "mae" not in class_metrics(LABELS, PREDICTIONS, NAMES)


def test_macro_f1_counts_the_classes_that_occur_as_scikit_learn_does():
    right = [0, 0, 2, 2]  # of a model with a third class, 1
    assert class_metrics(right, right, ["a", "b", "c"])["macro_f1"] == 1.0


@pytest.mark.parametrize(
    ("key", "title", "unit"),
    [
        ("train/lr", "Learning rate", ""),
        ("eval/rouge_l_char", "ROUGE-L char", ""),
        ("eval/macro_f1", "Macro F1", ""),
        ("psnr_inside", "PSNR inside", "dB"),
        ("perf/samples_per_s", "Training speed", "samples/s"),
        ("perf/padding_share", "Share of padding", "%"),
        ("perf/host0/memory_gib", "Memory in use", "GiB"),
        ("perf/host0/gpu3_power_w", "GPU power", "W"),
        ("perf/host0/gpu3_percent", "GPU load", "percent"),
        ("perf/process0/step_s", "Step", "s"),
        ("own/peak_bytes", "Peak", "B"),
        ("own/words_per_s", "Words per s", "words/s"),
        ("mine", "Mine", ""),
    ],
)
def test_metrics_have_titles_and_units(key, title, unit):
    assert (record_of(key).title, record_of(key).unit) == (title, unit)


def test_every_metric_of_a_shipped_task_has_a_record_with_its_direction():
    from hftune.config.reference import task_types
    from hftune.config.schema import metrics

    for type_ in task_types().values():
        assert {*metrics(type_)} <= METRICS.keys()

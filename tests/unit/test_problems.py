"""The losses, items, rows and metrics of each problem type, against transformers, torch and numbers worked out by hand."""

import math

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.nn.functional import cross_entropy
from transformers import BertConfig
from transformers.loss.loss_utils import ForSequenceClassificationLoss

from hftune.metrics.regression import regression_metrics
from hftune.tasks.problems import PROBLEMS, MultiLabel, Regression, SingleLabel

LABELS = ["low", "middle", "high"]
LOGITS = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
CLASSES = torch.tensor([0, 2, 1, 1, 0, 2, 2, 2])
FLAGS = torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 1], [0, 1, 0]] * 2, dtype=torch.float32)
NUMBERS = torch.linspace(-3, 3, 8)
CASES = {
    "single_label_classification": (SingleLabel(LABELS), LOGITS, CLASSES),
    "multi_label_classification": (MultiLabel(LABELS), LOGITS, FLAGS),
    "regression": (Regression(), LOGITS[:, :1], NUMBERS),
}


def mean(problem, logits, target):
    return problem.loss(logits, target).item() / problem.num_items(target)


@pytest.mark.parametrize("name", PROBLEMS)
def test_loss_is_that_of_transformers(name):
    problem, logits, target = CASES[name]
    config = BertConfig(problem_type=name, num_labels=logits.shape[1])
    assert mean(problem, logits, target) == pytest.approx(
        ForSequenceClassificationLoss(target, logits, config).item(), rel=1e-6
    )


@pytest.mark.parametrize("name", PROBLEMS)
def test_loss_and_items_add_up_over_any_micro_batches(name):
    problem, logits, target = CASES[name]
    weighted = {
        "single_label_classification": SingleLabel(LABELS, [0.5, 1.0, 4.0], label_smoothing=0.1),
        "multi_label_classification": MultiLabel(LABELS, [0.5, 1.0, 4.0], focal_gamma=2.0),
    }
    for kind in (problem, weighted.get(name, problem)):
        parts = [(logits[:1], target[:1]), (logits[1:6], target[1:6]), (logits[6:], target[6:])]
        assert sum(kind.loss(*part).item() for part in parts) == pytest.approx(kind.loss(logits, target).item(), rel=1e-6)
        assert sum(kind.num_items(target) for _, target in parts) == pytest.approx(kind.num_items(target))


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_weighted_mean_is_that_of_torch(smoothing):
    weights = [0.5, 1.0, 4.0]
    expected = cross_entropy(LOGITS, CLASSES, weight=torch.tensor(weights), label_smoothing=smoothing)
    assert mean(SingleLabel(LABELS, weights, smoothing), LOGITS, CLASSES) == pytest.approx(expected.item(), rel=1e-6)


def test_focal_loss_of_one_class_counts_what_is_easy_less():
    focal = SingleLabel(LABELS, [1.0, 1.0, 3.0], focal_gamma=2.0)
    losses = [-math.log(probability) for probability in LOGITS.softmax(-1)[range(8), CLASSES].tolist()]
    expected = sum(
        (3.0 if label == 2 else 1.0) * (1 - math.exp(-loss)) ** 2 * loss
        for loss, label in zip(losses, CLASSES.tolist(), strict=True)
    )
    assert focal.loss(LOGITS, CLASSES).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("gamma", [0.5, 2.0])
def test_gradient_of_the_focal_loss_is_finite_where_an_answer_is_certain(gamma):
    for problem, target in (
        (SingleLabel("ab", focal_gamma=gamma), [0, 1]),
        (MultiLabel("ab", focal_gamma=gamma), [[1, 0], [1, 1]]),
    ):
        logits = torch.tensor([[30.0, -200.0], [0.0, 1.0]], requires_grad=True)
        problem.loss(logits, torch.tensor(target)).backward()
        assert logits.grad.isfinite().all() and logits.grad[1].all()


def test_focal_loss_of_several_labels_counts_what_is_easy_less():
    found = MultiLabel(LABELS, [1.0, 2.0, 1.0], focal_gamma=1.5).loss(LOGITS, FLAGS).item()
    expected = 0.0
    for probabilities, flags in zip(LOGITS.sigmoid().tolist(), FLAGS.tolist(), strict=True):
        for weight, probability, flag in zip([1.0, 2.0, 1.0], probabilities, flags, strict=True):
            right = probability if flag else 1 - probability
            expected -= (weight if flag else 1.0) * (1 - right) ** 1.5 * math.log(right)
    assert found == pytest.approx(expected, rel=1e-5)


def test_metrics_of_classes():
    problem = SingleLabel(LABELS)
    logits = torch.eye(3)[torch.tensor([0, 1, 1, 1])] * 9
    metrics = problem.metrics(problem.rows(logits, torch.tensor([0, 1, 1, 2])))
    assert metrics["accuracy"] == 0.75 and metrics["mcc"] == pytest.approx(0.645497, rel=1e-5)
    assert metrics["per_class"]["middle"] == {"precision": pytest.approx(2 / 3), "recall": 1.0, "f1": 0.8, "support": 2}
    assert metrics["per_class"]["high"] == {"precision": 0.0, "recall": 0.0, "f1": 0.0, "support": 1}


def test_metrics_of_several_labels():
    problem = MultiLabel(["a", "b"])
    probabilities = torch.tensor([[0.9, 0.2], [0.4, 0.3], [0.6, 0.1]])
    rows = problem.rows(probabilities.logit(), torch.tensor([[1.0, 0], [1, 0], [0, 0]]))
    metrics = problem.metrics(rows)
    assert metrics["per_class"]["a"] == {"precision": 0.5, "recall": 0.5, "f1": 0.5, "support": 2, "auroc": 0.5}
    assert metrics["per_class"]["b"]["auroc"] is None  # no text has it
    assert (metrics["auroc"], metrics["macro_f1"]) == (0.5, 0.25)
    assert metrics["exact_match"] == pytest.approx(1 / 3)
    described = problem.describe(rows)[1]
    assert described == {"label": ["a"], "prediction": [], "probabilities": {"a": 0.4, "b": 0.3}, "error": 0.6}
    rows = problem.rows(torch.full((2, 2), math.nan), torch.tensor([[1.0, 0], [0, 1]]))
    assert problem.metrics(rows)["auroc"] is None  # so that the loop says that training has diverged


def test_a_label_is_predicted_where_the_evaluation_says_it_too():
    logits = torch.tensor([[-1e-6, 0.0, 1e-6]])  # 0.49999976 is rounded to 0.5
    (row,) = MultiLabel(LABELS).rows(logits, torch.zeros(1, 3))
    (answer,) = MultiLabel.answers(logits, LABELS)
    assert answer["labels"] == [name for name, flag in zip(LABELS, row["prediction"], strict=True) if flag] == LABELS[1:]


def test_metrics_of_numbers():
    metrics = regression_metrics([1.0, 2.0, 5.0], [1.0, 3.0, 4.0])
    assert metrics["rmse"] == pytest.approx(math.sqrt(2 / 3)) and metrics["mae"] == pytest.approx(2 / 3)
    assert metrics["pearson"] == pytest.approx(0.891042, rel=1e-5) and metrics["spearman"] == pytest.approx(1.0)
    assert regression_metrics([1.0, 1.0], [1.0, 2.0])["pearson"] is None


@pytest.mark.parametrize(("kind", "target"), [(SingleLabel, CLASSES), (MultiLabel, FLAGS)])
def test_a_plan_without_values_leaves_no_weights_of_classes_to_the_training_after_it(kind, target):
    problem = kind(LABELS, weights=[1.0, 2.0, 0.5])
    with FakeTensorMode() as mode:
        problem.loss(mode.from_tensor(LOGITS), mode.from_tensor(target))
    assert math.isfinite(problem.loss(LOGITS, target).item())

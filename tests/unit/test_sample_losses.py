"""Each sample's own loss out of a micro-batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers.modeling_outputs import SequenceClassifierOutput

from hftune.errors import TrainingError
from hftune.models.scored_head import ScoredOutput
from hftune.replay.samples import sample_losses
from hftune.task import BatchLossTask, Task
from hftune.tasks.text import head_loss


@dataclass
class Classes(Task):
    """Cross-entropy of the classes, divided by ``divisor``."""

    takes_mean: bool = False

    def datasets(self) -> dict[str, Any]:
        return {}

    def build_model(self) -> nn.Module:
        raise NotImplementedError

    def loss(self, outputs: Any, target: Any) -> Tensor:
        return cross_entropy(outputs["logits"], target["labels"], reduction="mean" if self.takes_mean else "sum")


class Tokens(Classes):
    def loss(self, outputs: Any, target: Any) -> Tensor:
        return head_loss(outputs, target)


class Distances(Classes, BatchLossTask):
    """Each sample's loss is its distance from the mean of all."""

    def embed(self, outputs: Any, target: Any) -> Tensor:
        return outputs

    def batch_losses(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        return (embeddings - embeddings.mean(0)).square().sum(1)

    def loss(self, outputs: Any, target: Any) -> Tensor:
        return BatchLossTask.loss(self, outputs, target)


LOGITS = torch.tensor([[2.0, 0.0, 1.0], [0.5, 0.1, 0.3], [-1.0, 3.0, 0.0], [0.0, 0.0, 0.0]])
TARGET = {"labels": torch.tensor([0, 2, 2, 1]), "weights": torch.ones(3)}


def test_each_sample_has_the_loss_and_the_gradient_of_its_row():
    logits = LOGITS.clone().requires_grad_()
    losses = sample_losses(Classes(), SequenceClassifierOutput(logits=logits), TARGET, 4)
    torch.testing.assert_close(losses, cross_entropy(LOGITS, TARGET["labels"], reduction="none"))
    (gradient,) = torch.autograd.grad(losses[2], logits)
    assert gradient[2].abs().min() > 0 and not gradient[[0, 1, 3]].any()


def test_a_mean_is_refused():
    with pytest.raises(TrainingError, match=r"Classes\.loss of a micro-batch is 1\.42\d+, and 5\.68\d* if it is added up"):
        sample_losses(Classes(takes_mean=True), {"logits": LOGITS}, TARGET, 4)


def test_a_loss_that_is_not_finite_is_shown_not_refused():
    logits = LOGITS.clone()
    logits[1] = torch.nan
    losses = sample_losses(Classes(), {"logits": logits}, TARGET, 4)
    assert losses.isnan().tolist() == [False, True, False, False]


def test_losses_that_a_head_has_computed_are_added_up_by_sample():
    token_losses = torch.tensor([[1.0, 2.0], [0.5, 0.0]])
    outputs = ScoredOutput(token_losses.sum(), token_losses)
    assert sample_losses(Tokens(), outputs, torch.zeros(2, 2, dtype=torch.int64), 2).tolist() == [3.0, 0.5]


def test_samples_that_are_compared_with_each_other_have_losses_of_their_own():
    embeddings = torch.tensor([[0.0, 0.0], [2.0, 0.0], [4.0, 0.0]])
    assert sample_losses(Distances(), embeddings, torch.zeros(3), 3).tolist() == [4.0, 0.0, 4.0]

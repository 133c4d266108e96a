"""The gradient of a loss over the whole step, in two passes: exactly that of one pass over all of its samples."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from hftune.batch_plan import BatchPlan
from hftune.errors import ConfigError
from hftune.strategies.base import StepBatch
from hftune.strategies.contract import check_sums
from hftune.strategies.data_parallel import DataParallel
from hftune.strategies.two_pass import rows_of
from hftune.task import BatchLossTask
from hftune.tasks import contrastive
from hftune.tasks.contrastive import ranking_losses

WIDTH = 6


class Pairs(BatchLossTask):
    """Samples are two vectors of float64; the model has dropout, so that both passes must draw the same."""

    def datasets(self) -> dict[str, Tensor]:
        values = torch.randn(40, 2, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        return {"train": values, "eval": values}

    def build_model(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(WIDTH, 16), nn.Dropout(0.3), nn.Tanh(), nn.Linear(16, WIDTH)).double()

    def collate(self, examples: list) -> dict[str, Tensor]:
        return {"input": torch.stack(examples), "labels": torch.arange(2 * len(examples)).view(-1, 2)}

    def embed(self, outputs: Tensor, target: Tensor) -> Tensor:
        return nn.functional.normalize(outputs, dim=-1)

    def batch_losses(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        return ranking_losses(embeddings, labels, scale=5.0, mask_duplicates=False)


def step_of(strategy: DataParallel, task: Pairs, micro_batch_size: int) -> StepBatch:
    """The first step: 16 samples."""
    dataset = task.datasets()["train"]
    plan = BatchPlan(len(dataset), 16, micro_batch_size=micro_batch_size).epoch(0)
    return next(strategy.batches(dataset, plan, num_workers=0))


def one_pass(task: Pairs, strategy: DataParallel, batch: StepBatch) -> tuple[float, list[Tensor]]:
    """Loss and gradient with all graphs in memory at once."""
    model = task.build_model().train()
    embeddings = []
    for micro_batch, loaded in zip(batch.mine, batch.batches, strict=True):
        strategy._seeds.begin(7, 3, micro_batch.index)
        embeddings.append(task.embed(model(**task.inputs(loaded)), None))
    everything = torch.cat(embeddings)
    loss = task.batch_losses(everything, torch.arange(2 * len(everything)).view(-1, 2)).mean()
    loss.backward()
    return loss.item(), [value.grad for value in model.parameters()]


@pytest.mark.parametrize(("micro_batch_size", "most"), [(2, 2), (3, 3), (4, 4), (8, 8), (16, 16), (4, 15), (4, 16), (8, None)])
def test_two_passes_give_loss_and_gradient_of_one_with_dropout(micro_batch_size, most):
    task = Pairs()
    strategy, model = DataParallel(Accelerator(cpu=True), task), task.build_model()
    strategy.most = most, None
    strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = step_of(strategy, task, micro_batch_size)
    passes = []
    model.register_forward_hook(lambda *arguments: passes.append(torch.is_grad_enabled()))
    strategy.forward_backward(batch, seed=7, step=3)
    report = strategy.report(strategy.clip_grad_norm(None))
    loss, gradient = one_pass(task, strategy, batch)
    assert report.loss == pytest.approx(loss, rel=1e-12)
    for parameter, expected in zip(model.parameters(), gradient, strict=True):
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-10, atol=1e-12)
    count = len(batch.mine)
    keeps = count == 1 or most in (16, None)  # the graphs of micro-batches that one might hold
    assert passes == ([True] * count if keeps else [False] * count + [True] * count)


def test_each_micro_batch_has_its_rows_in_the_order_of_the_step():
    plan = BatchPlan(10, 10, micro_batch_size=4).epoch(0)[0]
    batch = StepBatch(plan, [plan[2], plan[0], plan[1]], [1, 1, 0])
    assert [rows_of(batch, index) for index in range(3)] == [slice(8, 10), slice(0, 4), None]


def test_a_loss_between_samples_is_not_taken_for_a_sum():
    task = Pairs()
    assert check_sums(task, task.build_model(), task.datasets()["train"], np.ones(40)) == []


# The loss


def random_texts(count: int, columns: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    vectors = nn.functional.normalize(torch.randn(count, columns, 8, dtype=torch.float64), dim=-1)
    return vectors, torch.arange(count * columns).view(count, columns)


@pytest.mark.parametrize("symmetric", [False, True])
def test_the_loss_does_not_depend_on_its_chunks(monkeypatch, symmetric):
    vectors, texts = random_texts(10, 3)
    texts[7, 1] = texts[2, 1]
    found = []
    for at_once in (2**24, 60):
        monkeypatch.setattr(contrastive, "AT_ONCE", at_once)
        leaf = vectors.clone().requires_grad_()
        losses = ranking_losses(leaf, texts, 20.0, symmetric)
        losses.sum().backward()
        found.append((losses.detach(), leaf.grad))
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-14)


def test_equal_texts_are_no_negatives():
    vectors, texts = random_texts(4, 3)
    texts[1, 1] = texts[0, 1]  # the same answer
    texts[3, 0] = texts[0, 0]  # the same question, with another answer
    texts[2, 2] = texts[0, 1]  # a hard negative of another sample that is this one's answer
    scores = 20 * vectors[0, 0] @ vectors[:, 1:].transpose(0, 1).flatten(0, 1).T  # positives 0-3, negatives 4-7
    left = scores[[0, 2, 4, 5, 7]]
    losses = ranking_losses(vectors, texts, 20.0)
    assert losses[0] == pytest.approx((left.logsumexp(0) - scores[0]).item(), rel=1e-12)
    everything = ranking_losses(vectors, texts, 20.0, mask_duplicates=False)
    assert everything[0] == pytest.approx((scores.logsumexp(0) - scores[0]).item(), rel=1e-12)


def test_a_single_pair_has_nothing_to_learn_from():
    vectors, texts = random_texts(1, 2)
    assert ranking_losses(vectors, texts, 20.0).item() == 0


# What is refused


def test_a_pipeline_and_batches_of_one_are_refused_by_name():
    from hftune import Recipe

    recipe = Recipe.load("embeddings_demo", "parallel.pipeline_stages=2", "train.batch_size=1")
    with pytest.raises(ConfigError) as error:
        recipe.validate()
    assert "the loss of Embeddings compares the samples of a step with each other, and a pipeline" in str(error.value)
    assert "train.batch_size=1: the loss of Embeddings compares" in str(error.value)

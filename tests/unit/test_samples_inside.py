"""Each sample's own loss and gradient, out of the micro-batches of a step."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers.modeling_outputs import SequenceClassifierOutput

from hftune.batch_plan import BatchPlan
from hftune.errors import ConfigError, TrainingError
from hftune.replay.samples import batch_loss, look_inside, sample_losses
from hftune.strategies.base import StepBatch, StepReport
from hftune.strategies.data_parallel import DataParallel
from hftune.task import BatchLossTask, Task
from hftune.tasks.contrastive import ranking_losses


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


LOGITS = torch.tensor([[2.0, 0.0, 1.0], [0.5, 0.1, 0.3], [-1.0, 3.0, 0.0], [0.0, 0.0, 0.0]])
TARGET = {"labels": torch.tensor([0, 2, 2, 1]), "weights": torch.ones(3)}


def test_each_sample_has_the_loss_and_the_gradient_of_its_row():
    logits = LOGITS.clone().requires_grad_()
    losses = sample_losses(Classes(), SequenceClassifierOutput(logits=logits), TARGET, 4)
    torch.testing.assert_close(torch.stack(losses), cross_entropy(LOGITS, TARGET["labels"], reduction="none"))
    (gradient,) = torch.autograd.grad(losses[2], logits)
    assert gradient[2].abs().min() > 0 and not gradient[[0, 1, 3]].any()


def test_a_mean_is_refused():
    with pytest.raises(TrainingError, match=r"Classes\.loss of a micro-batch is 1\.42\d+, and 5\.68\d* if it is added up"):
        sample_losses(Classes(takes_mean=True), {"logits": LOGITS}, TARGET, 4)


def test_a_loss_that_is_not_finite_is_shown_not_refused():
    logits = LOGITS.clone()
    logits[1] = torch.nan
    losses = sample_losses(Classes(), {"logits": logits}, TARGET, 4)
    assert [loss.isnan().item() for loss in losses] == [False, True, False, False]


# A whole step

WIDTH = 6


@dataclass
class Points(Classes):
    """Classes of points, in float64; the model has dropout and, with ``norm``, running statistics."""

    dropout: float = 0.3
    norm: bool = False

    labels = ("a", "b", "c")

    def datasets(self) -> dict[str, Any]:
        points = torch.randn(40, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        return {"train": [{"input": point, "labels": index % 3} for index, point in enumerate(points)]}

    def build_model(self) -> nn.Module:
        torch.manual_seed(0)
        norm = [nn.BatchNorm1d(16)] if self.norm else []
        return nn.Sequential(nn.Linear(WIDTH, 16), *norm, nn.Dropout(self.dropout), nn.Tanh(), nn.Linear(16, 3)).double()

    def loss(self, outputs: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(outputs, target, reduction="sum")

    def predictions(self, outputs: Tensor, model: nn.Module, batch: dict[str, Tensor]) -> list[dict[str, Any]]:
        pairs = zip(batch["labels"].tolist(), outputs.argmax(-1).tolist(), strict=True)
        return [{"label": label, "prediction": prediction} for label, prediction in pairs]

    def sample_images(self, outputs: Any, model: nn.Module, batch: dict[str, Tensor], indices: Any) -> list[np.ndarray]:
        return [np.full((2, 2, 3), int(batch["labels"][index]), np.uint8) for index in indices]


class Pairs(BatchLossTask):
    """Pairs of vectors of float64, each compared with those of all others."""

    def datasets(self) -> dict[str, Tensor]:
        return {"train": torch.randn(40, 2, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))}

    def build_model(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(WIDTH, 16), nn.Dropout(0.3), nn.Tanh(), nn.Linear(16, WIDTH)).double()

    def collate(self, examples: list) -> dict[str, Tensor]:
        return {"input": torch.stack(examples), "labels": torch.arange(2 * len(examples)).view(-1, 2)}

    def embed(self, outputs: Tensor, target: Tensor) -> Tensor:
        return nn.functional.normalize(outputs, dim=-1)

    def batch_losses(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        return ranking_losses(embeddings, labels, scale=5.0, mask_duplicates=False)


def step_of(task: Task, micro_batch_size: int) -> tuple[SimpleNamespace, StepBatch, StepReport]:
    """What ``look_inside`` is given between backward pass and optimizer step of the fourth step: 16 samples."""
    strategy, model = DataParallel(Accelerator(cpu=True), task), task.build_model()
    strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    dataset = task.datasets()["train"]
    batch = next(strategy.batches(dataset, BatchPlan(40, 16, micro_batch_size=micro_batch_size).epoch(0), num_workers=0))
    strategy.forward_backward(batch, seed=7, step=3)
    report = strategy.report(strategy.clip_grad_norm(0.01))
    return SimpleNamespace(strategy=strategy, task=task, recipe=SimpleNamespace(task=task, seed=7), step=4), batch, report


@pytest.mark.parametrize("task", [Points(), Points(norm=True), Pairs()], ids=["classes", "running statistics", "pairs"])
@pytest.mark.parametrize("micro_batch_size", [6, 16])
def test_losses_and_gradients_of_samples_add_up_to_those_of_the_step(task, micro_batch_size):
    replayer, batch, report = step_of(task, micro_batch_size)
    model = replayer.strategy.sharding.model
    before = {name: value.clone() for name, value in model.state_dict().items()}
    gradient = [parameter.grad.clone() for parameter in model.parameters()]
    records = look_inside(replayer, batch, report)
    assert [record.sample for record in records] == np.concatenate([part.samples for part in batch.plan]).tolist()
    assert sum(record.loss_sum for record in records) / 16 == pytest.approx(report.loss, rel=1e-12)
    assert [batch_loss(replayer, batch, step) for step in (4, 4)] == pytest.approx([report.loss] * 2, rel=1e-12)
    assert sum(record.loss_share for record in records) == pytest.approx(1)
    assert sum(record.gradient_share for record in records) == pytest.approx(1, rel=1e-9)  # each drew the dropout of the step
    assert all(torch.equal(parameter.grad, kept) for parameter, kept in zip(model.parameters(), gradient, strict=True))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_without_dropout_a_sample_has_the_loss_and_the_gradient_that_it_has_alone():
    task = Points(dropout=0.0)
    replayer, batch, report = step_of(task, 5)
    records, model = look_inside(replayer, batch, report), replayer.strategy.sharding.model
    for record in (records[0], records[7]):
        sample = task.datasets()["train"][record.sample]
        loss = cross_entropy(model(sample["input"][None]), torch.tensor([sample["labels"]]), reduction="sum")
        gradient = torch.autograd.grad(loss, [*model.parameters()])
        assert record.loss == pytest.approx(loss.item(), rel=1e-12)
        assert record.grad_norm == pytest.approx(nn.utils.get_total_norm(gradient).item() / 16, rel=1e-9)


def test_samples_have_answers_and_the_worst_their_pictures():
    records = look_inside(*step_of(Points(), 5), pictures=2)
    worst = sorted(records, key=lambda record: record.loss)[-2:]
    assert [record.sample for record in records if record.picture is not None] == [
        record.sample for record in records if record in worst
    ]
    assert all(record.picture.max() == record.answer["label"] for record in worst)
    assert all(record.answer["label"] == record.sample % 3 for record in records)


def test_a_process_that_holds_a_part_of_the_model_cannot_look_inside():
    with pytest.raises(ConfigError, match="where each process holds the whole model"):
        look_inside(
            SimpleNamespace(strategy=SimpleNamespace(teacher=None), recipe=SimpleNamespace(task=None)),
            StepBatch([], [], []),
            None,
        )

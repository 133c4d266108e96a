"""Where the gradient is, how long, and what DDP sends besides it."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch.distributed import HashStore
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from hftune import Task
from hftune.batch_plan import BatchPlan
from hftune.config import EvalConfig
from hftune.evaluation import evaluate
from hftune.planning.memory import TensorBytes
from hftune.strategies import sharding
from hftune.strategies.data_parallel import DataParallel
from hftune.strategies.sharding import Sharding, empty_on_host


@pytest.fixture
def group():
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


class OnlyAccelerator(SimpleNamespace):
    """Wraps a model in DDP, as Accelerate does where there are several processes."""

    device = torch.device("cpu")

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        return DistributedDataParallel(model, gradient_as_bucket_view=True), optimizer

    def unwrap_model(self, wrapped: nn.Module) -> nn.Module:
        return wrapped.module


def replicated(model: nn.Module) -> Sharding:
    found = Sharding(OnlyAccelerator(), None)
    found.prepare(model, torch.optim.AdamW(model.parameters(), fused=True))
    return found


def test_the_gradient_stays_in_the_buckets_of_ddp(group):
    held = replicated(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)))

    def storages() -> set[int]:
        return {value.grad.untyped_storage().data_ptr() for value in held.model.parameters()}

    found = []
    for _ in range(3):
        with held.wrapped.no_sync():
            held.wrapped(torch.ones(3, 4)).sum().backward()
        found.append(storages())
        held.wrapped(torch.ones(3, 4)).sum().backward()
        held.optimizer.step()
        held.clear_gradient()
        assert all(not value.grad.any() for value in held.model.parameters())
    assert len(found[1]) == 1  # of four parameters
    assert found[1] == found[2] == storages()


class Plain(torch.optim.SGD):
    """An optimizer of one's own that knows one way to clear gradients."""

    def zero_grad(self) -> None:
        super().zero_grad()


def test_an_optimizer_that_has_no_choice_clears_the_gradient_in_its_own_way(group):
    model = nn.Linear(4, 2)
    held = Sharding(OnlyAccelerator(), None)
    held.prepare(model, Plain(model.parameters(), lr=0.1))
    held.wrapped(torch.ones(3, 4)).sum().backward()
    held.clear_gradient()
    assert not held.keeps_gradient and model.weight.grad is None


def test_ddp_sends_no_buffers_for_all_average_the_same_sums(group):
    strategy = DataParallel(Accelerator(cpu=True), Wide())
    strategy.sharding = replicated(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)))
    assert strategy.sharding.wrapped.will_sync_module_buffers()
    strategy._keep_statistics([(strategy.sharding.model[1], "running_mean")], frozen=False)
    assert not strategy.sharding.wrapped.will_sync_module_buffers()


class Wide(Task):
    """Its activations are larger than its weights: the peak comes before most of the gradient is there."""

    def datasets(self):
        raise NotImplementedError

    def build_model(self) -> nn.Module:
        layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)]
        return nn.Sequential(*layers, nn.Linear(64, 1))

    def collate(self, examples: list) -> dict[str, Tensor]:
        return {"x": torch.stack(examples), "labels": torch.zeros(len(examples), 1)}

    def inputs(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"input": batch["x"]}

    def loss(self, outputs: Tensor, target: Tensor) -> Tensor:
        return (outputs - target).square().sum()

    def predictions(self, outputs: Tensor, model: nn.Module, batch: dict[str, Tensor]) -> list[dict[str, int]]:
        return [{}] * len(outputs)


def test_auto_measures_what_a_second_micro_batch_needs():
    task = Wide()
    strategy = DataParallel(Accelerator(cpu=True), task)
    model = task.build_model()
    strategy.prepare(model, torch.optim.AdamW(model.parameters()))
    dataset, samples = torch.ones(256, 64), np.arange(256)
    size = sum(value.nbytes for value in model.parameters())
    with TensorBytes() as measured:
        assert strategy.fits(dataset, samples)
    assert all(value.grad is None for value in model.parameters())

    for value in model.parameters():
        value.grad = torch.zeros_like(value)
    with TensorBytes() as needed:
        needed.add_all(value.grad for value in model.parameters())
        strategy._backward_once(model, dataset, samples)
    assert needed.peak > 5 * size
    assert measured.peak == pytest.approx(needed.peak + 2 * size, rel=0.01)  # and two moments


def test_memory_on_the_host_is_not_pinned_where_the_machine_does_not_allow_it(monkeypatch):
    original = torch.empty_like

    def refusing(*arguments, pin_memory=False, **options):
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return original(*arguments, **options)

    monkeypatch.setattr(sharding.torch, "empty_like", refusing)
    monkeypatch.setattr(Tensor, "is_cuda", True)
    assert empty_on_host(torch.ones(2, 3).t()).is_contiguous()


class RoundedWeights(TorchDispatchMode):
    """Counts how often each weight is rounded."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.names = {value.data_ptr(): name for name, value in model.named_parameters()}
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default and args[0].data_ptr() in self.names:
            self.counts[self.names[args[0].data_ptr()]] += 1
        return func(*args, **kwargs or {})


@pytest.fixture
def fresh_state():
    AcceleratorState._reset_state(reset_partial_state=True)
    yield AcceleratorState._reset_state
    AcceleratorState._reset_state(reset_partial_state=True)


def test_a_step_and_an_evaluation_round_each_weight_once(monkeypatch, fresh_state):
    """Not once in each of their micro-batches; the gradient is that of weights rounded in each."""
    gradients = []
    for is_kept in (True, False):
        fresh_state()
        torch.manual_seed(0)
        strategy = DataParallel(Accelerator(cpu=True, mixed_precision="bf16"), task := Wide())
        strategy.prepare(model := task.build_model(), torch.optim.AdamW(model.parameters()))
        dataset = torch.randn(12, 64)
        if not is_kept:
            monkeypatch.setattr(strategy, "rounding_once", nullcontext)
        (batch,) = strategy.batches(dataset, BatchPlan(12, 12, micro_batch_size=4).epoch(0), num_workers=0)
        assert len(batch.mine) == 3
        with RoundedWeights(model) as rounded:
            strategy.forward_backward(batch, seed=0, step=0)
        gradients.append([value.grad for value in model.parameters()])
        with strategy.evaluating(), RoundedWeights(model) as evaluated:
            evaluate(strategy, dataset, EvalConfig(batch_size=4))
        names = [name for name, _ in model.named_parameters()]
        assert rounded.counts == evaluated.counts == dict.fromkeys(names, 1 if is_kept else 3)
    assert all(torch.equal(kept, each) for kept, each in zip(*gradients, strict=True))


def test_no_process_waits_for_others_before_its_forward_pass_nor_between_backward_pass_and_clipping(monkeypatch, fresh_state):
    """Numbers that all add up travel beside these, or two processes on small models would spend their time on waiting."""
    strategy = DataParallel(Accelerator(cpu=True), task := Wide())
    strategy.prepare(model := task.build_model(), torch.optim.AdamW(model.parameters()))
    (batch,) = strategy.batches(torch.randn(4, 64), BatchPlan(4, 4, micro_batch_size=4).epoch(0), num_workers=0)
    events: list[str] = []
    monkeypatch.setattr(strategy, "sum_later", lambda value: events.append("ask") or (lambda: events.append("wait") or value))
    model.register_forward_hook(lambda *given: events.append("forward"))
    strategy.forward_backward(batch, seed=0, step=0)
    events.append("clip")
    report = strategy.report(strategy.clip_grad_norm(1.0))
    assert events == ["ask", "forward", "wait", "ask", "clip", "wait"] and report.num_items == 4

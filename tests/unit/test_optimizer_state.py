"""Which optimizers of the user's can be saved and spread, found out on a few small tensors before training."""

from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch import nn

from hftune import ConfigError
from hftune.strategies.optimizer_state import (
    MOMENTS,
    changed_options,
    check_optimizer,
    most_moments,
    options_of,
    plain_state,
)
from hftune.strategies.sharding import Sharding
from tests.support.optimizers import Counted

CPU = torch.device("cpu")
SHARDED, STAGED = {"is_sharded": True}, {"is_staged": True}


class Listed(torch.optim.SGD):
    """Keeps a list."""

    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight]["history"] = [1.0]


class Global(torch.optim.SGD):
    """Keeps state that belongs to no parameter."""

    def step(self, closure=None):
        super().step()
        self.state["seen"]["count"] = 1


class Together(torch.optim.SGD):
    """Normalises by the norm of all gradients."""

    def step(self, closure=None):
        weights = [weight for group in self.param_groups for weight in group["params"]]
        norm = torch.stack([weight.grad.norm() for weight in weights]).norm()
        for weight in weights:
            weight.grad /= norm
        super().step()


def built(kind):
    return kind(nn.Linear(3, 2).parameters(), lr=0.1)


@pytest.mark.parametrize("how", [{}, SHARDED, STAGED])
@pytest.mark.parametrize("name", ["AdamW", "RMSprop", "Adadelta", "NAdam", "RAdam"])
def test_torchs_elementwise_optimizers_work_everywhere(name, how):
    check_optimizer(built(getattr(torch.optim, name)), CPU, **how)


@pytest.mark.parametrize(
    ("kind", "how", "message"),
    [
        (torch.optim.LBFGS, {}, "LBFGS failed on a few small tensors: TypeError: 'NoneType' object is not callable. It is"),
        (Listed, {}, "Listed keeps history, a list, which checkpoints cannot hold: only a parameter's tensors, numbers"),
        (Global, {}, "Global keeps seen, which belongs to no parameter. Checkpoints hold only the state of parameters."),
        (torch.optim.Adafactor, SHARDED, "Adafactor keeps row_var in a shape that differs from its parameter's, which FSDP"),
        (torch.optim.Adagrad, SHARDED, "Adagrad creates its state when it is built, before FSDP shards the parameters. Tra"),
        (Together, STAGED, "Together looks at all parameters together, and in a pipeline each process has only some of them."),
        (Counted, STAGED, "Counted looks at all parameters together, and in a pipeline each process has only some of them."),
    ],
)
def test_what_cannot_work_is_refused_before_training(kind, how, message):
    with pytest.raises(ConfigError) as caught:
        check_optimizer(built(kind), CPU, **how)
    assert str(caught.value).startswith(f"train.optimizer: {message}")


@pytest.mark.parametrize(
    ("kind", "how"), [(torch.optim.Adafactor, STAGED), (torch.optim.Adagrad, STAGED), (Together, {}), (Counted, {})]
)
def test_what_works_in_one_way_is_not_refused_there(kind, how):
    check_optimizer(built(kind), CPU, **how)


def test_a_trial_leaves_the_optimizer_and_its_parameters_alone():
    optimizer = built(torch.optim.RMSprop)
    before = [weight.clone() for weight in optimizer.param_groups[0]["params"]]
    check_optimizer(optimizer, CPU, **STAGED)
    assert not optimizer.state and all(map(torch.equal, optimizer.param_groups[0]["params"], before))


class Located(torch.optim.SGD):
    """Notes where it steps."""

    devices: ClassVar[set[str]] = set()

    def step(self, closure=None):
        self.devices.update(weight.device.type for group in self.param_groups for weight in group["params"])


def test_a_trial_leaves_the_accelerator_alone_if_training_does(monkeypatch):
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda: torch.device("meta"))
    accelerator = SimpleNamespace(device=CPU, prepare=lambda *parts: parts, unwrap_model=lambda model: model)
    Sharding(accelerator, None).prepare(nn.Linear(3, 2), built(Located))
    assert Located.devices == {"cpu"}


def test_numbers_of_state_and_groups_are_found_by_name():
    layer = nn.Linear(2, 1)
    optimizer = Counted(layer.parameters())
    before = options_of(optimizer)
    for weight in layer.parameters():
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    names = {weight: name for name, weight in layer.named_parameters()}
    assert plain_state(optimizer, names) == {"weight/count": 1, "bias/count": 1}
    assert changed_options(optimizer, before) == [{"patience": 0.9}]


def test_8_bit_state_is_refused_under_fsdp_by_whatever_name():
    """Tensors as small as those that are tried have a plain state."""
    AdamW8bit = pytest.importorskip("bitsandbytes").optim.AdamW8bit
    with pytest.raises(ConfigError, match="AdamW8bit keeps its state in blocks of 256 numbers"):
        check_optimizer(built(AdamW8bit), CPU, is_sharded=True)


@pytest.mark.parametrize("kind", sorted(MOMENTS, key=str))
def test_no_optimizer_keeps_more_than_is_reserved_for_it(kind):
    weight = nn.Parameter(torch.ones(6, 5))
    optimizer = kind([weight], lr=0.1)
    weight.grad = torch.ones(6, 5)
    optimizer.step()
    kept = sum(value.numel() for value in optimizer.state[weight].values() if value is not None and value.ndim)
    assert kept <= most_moments(optimizer) * weight.numel()

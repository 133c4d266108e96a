"""Averages of the weights: what is averaged, and that evaluating them leaves training alone."""

from types import SimpleNamespace

import pytest
import torch
from schedulefree import AdamWScheduleFree
from torch import nn

from hftune import ConfigError
from hftune.strategies.averages import MovingAverage, averaged_names
from hftune.strategies.sharding import Sharding, checkpoint_tensors


def prepared(model, optimizer, keeps_average):
    accelerator = SimpleNamespace(
        device=torch.device("cpu"), prepare=lambda *parts: parts, unwrap_model=lambda model: model, scaler=None
    )
    group = SimpleNamespace(
        is_main=True,
        process_index=0,
        on_main=lambda call: call(),
        device=torch.device("cpu"),
        broadcast_tensor=lambda value: None,
    )
    sharding = Sharding(accelerator, group)
    sharding.prepare(model, optimizer)
    sharding.begin_training(keeps_average)
    return sharding


def step(sharding, rng):
    for value in sharding.model.parameters():
        value.grad = torch.randn(value.shape, generator=rng) if value.requires_grad else None
    sharding.optimizer.step()


def copies(model):
    return [value.clone() for value in (*model.parameters(), *model.buffers())]


def test_half_precision_is_too_coarse_to_average():
    with pytest.raises(ConfigError, match=r"train.ema_decay: weight is torch.bfloat16"):
        MovingAverage(nn.Linear(2, 2).bfloat16().state_dict())


def test_an_optimizer_that_averages_itself_takes_no_other_average():
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"train.ema_decay: AdamWScheduleFree averages the weights itself"):
        prepared(model, AdamWScheduleFree(model.parameters()), keeps_average=True)


def test_frozen_parameters_and_counters_are_not_averaged():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[0].weight.requires_grad_(False)
    names = averaged_names(
        dict(model.named_parameters()), checkpoint_tensors(model, torch.optim.SGD(model.parameters()))["model"]
    )
    assert names == ["0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var"]


def test_the_average_is_that_of_the_formula_and_evaluated_in_place_of_the_weights():
    model, rng = nn.Linear(3, 2), torch.Generator().manual_seed(0)
    sharding = prepared(model, torch.optim.SGD(model.parameters(), lr=0.1), keeps_average=True)
    expected = model.weight.detach().clone()
    for decay in (0.1, 0.5, 0.9):
        step(sharding, rng)
        sharding.average.update(decay)
        expected = decay * expected + (1 - decay) * model.weight.detach()
    before = copies(model)
    with pytest.raises(KeyError), sharding.averaged():
        assert torch.allclose(model.weight, expected, rtol=1e-6) and not torch.equal(model.weight, before[0])
        raise KeyError
    assert all(map(torch.equal, copies(model), before))
    assert torch.allclose(sharding.average.values["weight"], expected, rtol=1e-6)


def test_numbers_of_two_kinds_are_averaged():
    live = {"one": torch.ones(2), "two": torch.ones(2, dtype=torch.float64)}
    average = MovingAverage(live)
    for value in live.values():
        value.fill_(3.0)
    average.update(0.5)
    assert average.values["one"].tolist() == average.values["two"].tolist() == [2.0, 2.0]


def test_schedule_free_is_evaluated_at_its_average_and_trains_on_to_the_bit():
    runs = []
    for evaluates in (False, True):
        torch.manual_seed(0)
        model, rng = nn.Linear(3, 2), torch.Generator().manual_seed(0)
        optimizer = AdamWScheduleFree(model.parameters(), lr=0.1)
        sharding = prepared(model, optimizer, keeps_average=False)
        for number in range(4):
            step(sharding, rng)
            if evaluates and number:  # after the first step both are equal
                before = copies(model)
                with sharding.averaged():
                    z = optimizer.state[model.weight]["z"]
                    assert torch.allclose(model.weight, before[0].lerp(z, 1 - 1 / 0.9)) and not torch.equal(
                        model.weight, before[0]
                    )
                assert all(map(torch.equal, copies(model), before))
        runs.append(copies(model))
    assert all(map(torch.equal, *runs))


def test_an_optimizer_that_binds_other_memory_gets_its_weights_back_to_the_bit():
    class Shifts(torch.optim.SGD):
        def eval(self):
            self._move(1 / 3)

        def train(self):
            self._move(-1 / 3)

        def _move(self, by):
            for value in self.param_groups[0]["params"]:
                value.data = value.data + by

    model = nn.Linear(30, 20)
    sharding, before = prepared(model, Shifts(model.parameters(), lr=0.1), keeps_average=False), copies(model)
    with sharding.averaged():
        assert not torch.equal(model.weight, before[0])
    assert all(map(torch.equal, copies(model), before))


def test_averages_are_saved_and_loaded_and_start_anew_where_there_are_none():
    model, rng = nn.Linear(3, 2), torch.Generator().manual_seed(0)
    first = prepared(model, torch.optim.SGD(model.parameters(), lr=0.1), keeps_average=True)
    step(first, rng)
    first.average.update(0.5)
    first.accelerator.scaler = None
    tensors, values = first.state()
    assert tensors["ema"].keys() == {"weight", "bias"}
    other = nn.Linear(3, 2)
    second = prepared(other, torch.optim.SGD(other.parameters(), lr=0.1), keeps_average=True)
    second.load_state((tensors, values))
    assert torch.equal(second.average.values["weight"], first.average.values["weight"]) and torch.equal(
        other.weight, model.weight
    )
    second.load_state(({name: tensors[name] for name in ("model", "optimizer")}, values))
    assert torch.equal(second.average.values["weight"], model.weight)

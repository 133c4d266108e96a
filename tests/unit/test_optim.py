"""Schedules against transformers' own, and which parameters decay."""

import pytest
import torch
from torch import nn
from transformers import get_scheduler

from hftune.config.recipe import TrainConfig
from hftune.optim import build_optimizer, lr_at, parameter_groups


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
@pytest.mark.parametrize(("num_steps", "warmup_ratio"), [(1, 0.0), (40, 0.0), (40, 0.1), (33, 0.5)])
def test_schedule_equals_that_of_transformers(schedule, num_steps, warmup_ratio):
    config = TrainConfig(lr=3e-4, schedule=schedule, warmup_ratio=warmup_ratio)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=config.lr)
    name = "constant_with_warmup" if schedule == "constant" else schedule
    num_warmup = -(-int(warmup_ratio * num_steps * 1000) // 1000)
    scheduler = get_scheduler(name, optimizer, num_warmup_steps=num_warmup, num_training_steps=num_steps)
    for step in range(num_steps):
        assert lr_at(step, num_steps, config, steps_per_epoch=num_steps) == pytest.approx(
            scheduler.get_last_lr()[0], rel=1e-12, abs=1e-18
        )
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
@pytest.mark.parametrize(("num_steps", "warmup_ratio"), [(1, 0.1), (2, 0.9), (3, 0.99)])
def test_a_warmup_leaves_the_last_step_its_learning_rate(schedule, num_steps, warmup_ratio):
    config = TrainConfig(lr=3e-4, schedule=schedule, warmup_ratio=warmup_ratio)
    rates = [lr_at(step, num_steps, config, steps_per_epoch=num_steps) for step in range(num_steps)]
    assert rates[-1] == 3e-4 and rates == sorted(rates)


def test_cosine_ends_at_min_lr_as_torch_has_it():
    config = TrainConfig(lr=2e-4, min_lr=1e-6, schedule="cosine")
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=config.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30, eta_min=1e-6)
    for step in range(31):
        assert lr_at(step, 30, config, steps_per_epoch=10) == pytest.approx(scheduler.get_last_lr()[0], rel=1e-9)
        optimizer.step()
        scheduler.step()
    assert lr_at(30, 30, config, steps_per_epoch=10) == 1e-6


@pytest.mark.parametrize(("step_size", "warmup_ratio"), [(1, 0.0), (2, 0.0), (1, 0.3)])
def test_step_falls_at_the_ends_of_epochs_as_torchs_step_lr_does(step_size, warmup_ratio):
    config = TrainConfig(lr=5.0, schedule="step", gamma=0.95, step_size=step_size, warmup_ratio=warmup_ratio)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=config.lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=step_size, gamma=0.95)
    rates = []
    for epoch in range(5):
        for step in range(7 * epoch, 7 * (epoch + 1)):
            rates.append(lr_at(step, 35, config, steps_per_epoch=7))
            if step >= warmup_ratio * 35:
                assert rates[-1] == pytest.approx(scheduler.get_last_lr()[0], rel=1e-12)
            optimizer.step()
        scheduler.step()
    assert len({*rates[14:]}) == (3 if step_size == 1 else 2) and (warmup_ratio == 0) == (rates[0] == 5.0)


def test_biases_and_norms_do_not_decay_and_frozen_parameters_are_left_out():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2, bias=False))
    model[3].weight.requires_grad_(False)
    decayed, plain = parameter_groups(model, 0.1)
    assert [parameter.shape for parameter in decayed["params"]] == [(5, 4), (4, 4)] and decayed["weight_decay"] == 0.1
    assert len(plain["params"]) == 3 and plain["weight_decay"] == 0.0


@pytest.mark.parametrize(
    ("config", "kind", "fields"),
    [
        (TrainConfig(optimizer="adamw", betas=(0.8, 0.9), eps=1e-6), torch.optim.AdamW, {"betas": (0.8, 0.9), "eps": 1e-6}),
        (TrainConfig(optimizer="adam"), torch.optim.Adam, {"betas": (0.9, 0.999)}),
        (TrainConfig(optimizer="sgd", momentum=0.5), torch.optim.SGD, {"momentum": 0.5}),
    ],
)
def test_optimizer_takes_its_fields_and_is_fused(config, kind, fields):
    optimizer = build_optimizer(nn.Linear(2, 2), config)
    assert type(optimizer) is kind
    assert {**fields, "fused": True, "lr": 5e-5}.items() <= optimizer.param_groups[0].items()

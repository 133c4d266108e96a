"""Schedules against transformers' own, parameter groups, and optimizers by name and by dotted path."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from transformers import get_scheduler

from hftune import ConfigError, Recipe, TrainingError
from hftune.config import TrainConfig, sections
from hftune.optim import OPTIMIZERS, SCHEDULES, build_optimizer, check_schedule, lr_at, parameter_groups
from tests.support.tasks import Tagging


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


class Layered(nn.Module):
    """Two layers and a norm."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2, bias=False)


@dataclass
class Plain(Tagging):
    """A task with hftune's own parameter groups."""


@dataclass
class LayerWise(Tagging):
    """The first layer learns at a tenth of the rate."""

    def parameter_groups(self, model, config):
        return [
            {"params": model.first.parameters(), "lr": 0.1 * config.lr},
            {"params": [*model.norm.parameters(), *model.head.parameters()]},
        ]


def recipe_with(task=None, **train):
    return Recipe(task=task or Plain(), train=TrainConfig(**train))


def refused(call, *arguments):
    with pytest.raises(ConfigError) as caught:
        call(*arguments)
    return str(caught.value)


def test_biases_and_norms_do_not_decay_and_frozen_parameters_are_left_out():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2, bias=False))
    model[3].weight.requires_grad_(False)
    decayed, plain = parameter_groups(model, recipe_with(weight_decay=0.1))
    assert [parameter.shape for parameter in decayed["params"]] == [(5, 4), (4, 4)] and decayed["weight_decay"] == 0.1
    assert len(plain["params"]) == 3 and plain["weight_decay"] == 0.0


@pytest.mark.parametrize(
    ("config", "kind", "options"),
    [
        ({"optimizer": "adamw", "betas": (0.8, 0.9), "eps": 1e-6}, torch.optim.AdamW, {"betas": (0.8, 0.9), "eps": 1e-6}),
        ({"optimizer": "adam"}, torch.optim.Adam, {"betas": (0.9, 0.999)}),
        ({"optimizer": "sgd", "momentum": 0.5}, torch.optim.SGD, {"momentum": 0.5}),
        ({"optimizer": "adam", "optimizer_args": {"amsgrad": True}}, torch.optim.Adam, {"amsgrad": True}),
    ],
)
def test_optimizer_takes_its_fields_and_is_fused(config, kind, options):
    optimizer = build_optimizer(nn.Linear(2, 2), recipe_with(**config))
    assert type(optimizer) is kind
    assert {**options, "fused": True, "lr": 5e-5}.items() <= optimizer.param_groups[0].items()


def test_the_names_that_recipes_may_use_are_those_of_the_tables():
    assert tuple(OPTIMIZERS) == sections.OPTIMIZERS and tuple(SCHEDULES) == sections.SCHEDULES


def test_a_dotted_path_is_an_optimizer_of_ones_own_with_its_arguments():
    given = {"optimizer": "torch.optim.RMSprop", "optimizer_args": {"alpha": 0.5}, "weight_decay": 0.1}
    optimizer = build_optimizer(Layered(), recipe_with(**given))
    assert type(optimizer) is torch.optim.RMSprop
    assert [group["alpha"] for group in optimizer.param_groups] == [0.5, 0.5]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]


def test_each_parameter_group_keeps_its_share_of_the_learning_rate_through_the_schedule():
    recipe = recipe_with(LayerWise(), lr=1e-3)
    optimizer = build_optimizer(Layered(), recipe)
    assert [group["lr_scale"] for group in optimizer.param_groups] == [pytest.approx(0.1), 1.0]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"optimizer": "torch.optim.RMSprop", "optimizer_args": {"alhpa": 0.5}},
            "train.optimizer_args.alhpa: RMSprop(params, lr=0.01, alpha=0.99, eps=1e-08, weight_decay=0, momentum=0, "
            "centered=False, capturable=False, foreach=None, maximize=False, differentiable=False) has no such argument. Did you mean 'alpha'?",
        ),
        ({"optimizer": "torch.nn.Linear"}, "train.optimizer=torch.nn.Linear is not a subclass of torch.optim.Optimizer."),
        (
            {"optimizer": "torch.optim.RMSprob"},
            "train.optimizer=torch.optim.RMSprob cannot be imported: module 'torch.optim' has no attribute 'RMSprob'.",
        ),
        (
            {"optimizer": "torch.optim.RMSprop", "optimizer_args": {"alpha": -1.0}},
            "train.optimizer=torch.optim.RMSprop cannot be built with train.optimizer_args={'alpha': -1.0}: Invalid alpha value: "
            "-1.0.",
        ),
        (
            {"optimizer": "torch.optim.SparseAdam", "weight_decay": 0.1},
            "train.weight_decay=0.1: SparseAdam(params, lr=0.001, betas=(0.9, 0.999), eps=1e-08, maximize=False) has no such "
            "argument. Set it to 0.",
        ),
    ],
)
def test_an_optimizer_that_cannot_be_built_says_what_it_takes(config, message):
    assert refused(build_optimizer, Layered(), recipe_with(**config)) == message


@dataclass
class Forgetful(Tagging):
    """Returns the parameters that ``chosen`` picks."""

    def parameter_groups(self, model, config):
        return [{"params": [*model.first.parameters()] * self.times}, {"params": [model.head.weight]}]

    times: int = 1


@pytest.mark.parametrize(
    ("times", "message"),
    [
        (1, "Forgetful.parameter_groups returned norm.weight in no group: it would not be trained."),
        (2, "Forgetful.parameter_groups returned first.weight 2 times."),
    ],
)
def test_groups_must_hold_each_parameter_once(times, message):
    assert refused(parameter_groups, Layered(), recipe_with(Forgetful(times=times))) == message


def half(step, num_steps, steps_per_epoch):
    return 0.5


def by_epoch(step, num_steps, steps_per_epoch):
    return 1.0 / (1 + step // steps_per_epoch)


def broken(step, num_steps, steps_per_epoch):
    return 1.0 if step < num_steps - 1 else -0.5


def words(step, num_steps, steps_per_epoch):
    return "fast"


def test_a_schedule_of_ones_own_scales_the_learning_rate_after_the_warmup():
    config = TrainConfig(lr=1e-2, schedule=f"{__name__}.by_epoch", warmup_ratio=0.25)
    check_schedule(config, 8, 4)
    rates = [lr_at(step, 8, config, steps_per_epoch=4) for step in range(8)]
    assert rates == [0.0, 0.005, 0.01, 0.01, 0.005, 0.005, 0.005, 0.005]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("broken", "returned -0.5 for step 9 of 10"),
        ("words", "returned 'fast' for step 0 of 10"),
    ],
)
def test_a_schedule_that_returns_no_factor_is_refused(name, message):
    config = TrainConfig(schedule=f"{__name__}.{name}")
    assert refused(check_schedule, config, 10, 5) == (
        f"train.schedule={__name__}.{name} {message}. f(step, num_steps, steps_per_epoch) must return the factor of train.lr: a "
        "finite number of at least 0."
    )


def test_a_schedule_that_cannot_be_called_says_how_it_is_called():
    config = TrainConfig(schedule="math.sqrt")
    assert refused(check_schedule, config, 10, 5) == (
        "train.schedule=math.sqrt cannot be called as f(step, num_steps, steps_per_epoch) with 0, 10, 5: TypeError: math.sqrt() "
        "takes exactly one argument (3 given)."
    )


def test_a_factor_that_goes_wrong_later_stops_training():
    config = TrainConfig(schedule=f"{__name__}.broken")
    with pytest.raises(TrainingError, match=r"returned -0.5 for step 9 of 10\.$"):
        lr_at(9, 10, config, steps_per_epoch=5)

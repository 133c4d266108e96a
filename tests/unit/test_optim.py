"""Schedules against transformers' own, parameter groups, and optimizers by name and by dotted path."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from transformers import get_scheduler

from hftune import ConfigError, Recipe, TrainingError
from hftune.checkpoints.train_state import TrainState
from hftune.config import TrainConfig, sections
from hftune.distributed.preflight import check_launcher
from hftune.optim import (
    OPTIMIZERS,
    build_optimizer,
    check_schedule,
    ema_decay_at,
    freeze,
    lr_at,
    parameter_groups,
)
from hftune.strategies.optimizer_state import check_optimizer
from tests.support.tasks import Tagging


def follow(scheduler_of, config, num_steps, steps_per_epoch, rel=1e-12):
    """Compare a schedule, step by step, with the scheduler that is made of an optimizer."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=config.lr)
    scheduler = scheduler_of(optimizer)
    for step in range(num_steps):
        expected = pytest.approx(scheduler.get_last_lr()[0], rel=rel, abs=1e-18)
        assert lr_at(step, num_steps, config, steps_per_epoch) == expected
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize(
    ("given", "name", "specific"),
    [
        ({"schedule": "linear"}, "linear", {}),
        ({"schedule": "cosine"}, "cosine", {}),
        ({"schedule": "constant"}, "constant_with_warmup", {}),
        ({"schedule": "wsd", "decay_ratio": 0.25}, "warmup_stable_decay", {"num_decay_steps": 10, "decay_type": "linear"}),
        ({"schedule": "cosine_restarts", "cycles": 3}, "cosine_with_restarts", {"num_cycles": 3}),
        ({"schedule": "inverse_sqrt"}, "inverse_sqrt", {}),
        ({"schedule": "polynomial", "power": 3.0, "min_lr": 1e-5}, "polynomial", {"lr_end": 1e-5, "power": 3.0}),
    ],
)
@pytest.mark.parametrize("num_warmup", [0, 4, 20])
def test_schedules_equal_those_of_transformers(given, name, specific, num_warmup):
    config = TrainConfig(lr=3e-4, warmup_ratio=num_warmup / 40, **given)
    follow(lambda optimizer: get_scheduler(name, optimizer, num_warmup, 40, scheduler_specific_kwargs=specific), config, 40, 40)


def test_cosine_ends_at_min_lr_as_torch_has_it():
    config = TrainConfig(lr=2e-4, min_lr=1e-6, schedule="cosine")
    follow(lambda optimizer: CosineAnnealingLR(optimizer, T_max=30, eta_min=1e-6), config, 30, 10, rel=1e-9)
    assert lr_at(30, 30, config, steps_per_epoch=10) == 1e-6


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
@pytest.mark.parametrize(("num_steps", "warmup_ratio"), [(1, 0.1), (2, 0.9), (3, 0.99)])
def test_a_warmup_leaves_the_last_step_its_learning_rate(schedule, num_steps, warmup_ratio):
    config = TrainConfig(lr=3e-4, schedule=schedule, warmup_ratio=warmup_ratio)
    rates = [lr_at(step, num_steps, config, steps_per_epoch=num_steps) for step in range(num_steps)]
    assert rates[-1] == 3e-4 and rates == sorted(rates)


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


@pytest.mark.parametrize("patience", [1, 2])
def test_plateau_falls_where_torchs_does(patience):
    config = TrainConfig(lr=1.0, schedule="plateau", gamma=0.5, min_lr=0.2, plateau_patience=patience)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=config.lr)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, mode="max", factor=0.5, patience=patience - 1, threshold=0.0, min_lr=0.2
    )
    state, rates = TrainState(), []
    for score in (0.1, 0.3, 0.3, 0.2, 0.4, 0.4, 0.1, 0.2, 0.3, 0.1, 0.5, 0.5):
        state.step += 10
        for _ in range(2):  # an evaluation that is made again counts once
            state.note_score(score, greater_is_better=True, min_improvement=0.0, plateau_patience=patience)
        scheduler.step(score)
        rates.append(lr_at(state.step, 1000, config, 50, state.num_falls))
        assert rates[-1] == scheduler.get_last_lr()[0]
    assert rates[-1] == 0.2 and len({*rates}) == 4


def test_warmup_steps_are_as_many_steps_in_a_run_of_any_length():
    config = TrainConfig(lr=1.0, schedule="constant", warmup_steps=4)
    assert [lr_at(step, 1000, config, 10) for step in range(6)] == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
    with pytest.raises(ConfigError, match=r"train.warmup_steps=4, but training has 4 steps in all, .* Set fewer than 4"):
        check_schedule(config, 4, 4)
    check_schedule(config, 5, 5)
    check_schedule(config, 1, 1)
    assert lr_at(0, 1, config, 1) == 1.0  # the only step is no warmup


class Layered(nn.Module):
    """Two layers and a norm."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2, bias=False)


@dataclass
class LayerWise(Tagging):
    """The first layer learns at a tenth of the rate."""

    def parameter_groups(self, model, config):
        return [
            {"params": model.first.parameters(), "lr": 0.1 * config.lr},
            {"params": [*model.norm.parameters(), *model.head.parameters()]},
        ]


def recipe_with(task=None, **train):
    return Recipe(task=task or Tagging(), train=TrainConfig(**train))


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
    assert tuple(OPTIMIZERS) == sections.OPTIMIZERS


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


RMSPROP = "torch.optim.RMSprop"
NOT_BUILT = [
    ({"optimizer": RMSPROP, "optimizer_args": {"alhpa": 0.5}}, "train.optimizer_args.alhpa: RMSprop(", "Did you mean 'alpha'?"),
    ({"optimizer": "torch.nn.Linear"}, "train.optimizer=torch.nn.Linear is not", "torch.optim.Optimizer."),
    ({"optimizer": "torch.optim.RMSprob"}, "train.optimizer=torch.optim.RMSprob cannot be imported", "'RMSprob'."),
    ({"optimizer": RMSPROP, "optimizer_args": {"alpha": -1.0}}, "train.optimizer_args={'alpha': -1.0}", "alpha value: -1.0."),
    ({"optimizer": "torch.optim.SparseAdam", "weight_decay": 0.1}, "train.weight_decay=0.1: SparseAdam(", "Set it to 0."),
    ({"optimizer": "muon"}, "train.optimizer=muon: Layered has no trainable matrices", "Use adamw."),
]


@pytest.mark.parametrize(("config", "what", "hint"), NOT_BUILT)
def test_an_optimizer_that_cannot_be_built_says_what_it_takes(config, what, hint):
    model = Layered()
    if config["optimizer"] == "muon":
        model.first.weight.requires_grad_(False)
    said = refused(build_optimizer, model, recipe_with(**config))
    assert what in said and said.endswith(hint)


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
    ("schedule", "problem"),
    [
        (f"{__name__}.broken", "returned -0.5 for step 9 of 10. f(step, num_steps, steps_per_epoch) must return the factor"),
        (f"{__name__}.words", "returned 'fast' for step 0 of 10. f(step, num_steps, steps_per_epoch) must return the factor"),
        ("math.sqrt", "cannot be called as f(step, num_steps, steps_per_epoch) with 0, 10, 5: TypeError"),
    ],
)
def test_a_schedule_that_is_none_is_refused(schedule, problem):
    assert refused(check_schedule, TrainConfig(schedule=schedule), 10, 5).startswith(f"train.schedule={schedule} {problem}")


def test_a_factor_that_goes_wrong_later_stops_training():
    config = TrainConfig(schedule=f"{__name__}.broken")
    with pytest.raises(TrainingError, match=r"returned -0.5 for step 9 of 10\.$"):
        lr_at(9, 10, config, steps_per_epoch=5)


def test_wsd_falls_to_min_lr_after_a_warmup_of_any_length():
    config = TrainConfig(lr=1e-3, min_lr=1e-4, schedule="wsd", decay_ratio=1.0, warmup_ratio=0.9)
    rates = [lr_at(step, 10, config, steps_per_epoch=10) for step in range(11)]
    assert rates[9] == 1e-3 and rates[10] == 1e-4


def test_the_average_takes_in_more_of_the_weights_in_early_steps():
    config = TrainConfig(ema_decay=0.9)
    assert [ema_decay_at(step, config) for step in (0, 2, 80, 1000)] == [0.1, 0.25, 0.9, 0.9]


class Stacked(nn.Module):
    """Embeddings, three layers, a norm and a head."""

    def __init__(self):
        super().__init__()
        self.embed, self.layers = nn.Embedding(5, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 2)


def rates_of(model, recipe):
    """The learning rate and weight decay of each parameter, by name."""
    names = {value: name for name, value in model.named_parameters()}
    groups = parameter_groups(model, recipe)
    assert all(group["lr_scale"] == group["lr"] / recipe.train.lr for group in groups)
    return {names[value]: (group["lr"], group["weight_decay"]) for group in groups for value in group["params"]}


def test_layers_learn_the_slower_the_lower_they_are():
    rates = rates_of(Stacked(), recipe_with(lr=1.0, layer_decay=0.5, weight_decay=0.1))
    assert {name: rate for name, (rate, _) in rates.items()} == {
        "embed.weight": 1 / 16,
        **{f"layers.{index}.{kind}": 1 / 2 ** (3 - index) for index in range(3) for kind in ("weight", "bias")},
        **dict.fromkeys(("norm.weight", "norm.bias", "head.weight", "head.bias"), 1.0),
    }
    assert {name for name, (_, decay) in rates.items() if decay} == {name for name in rates if name.endswith(".weight")} - {
        "norm.weight"
    }


def test_layers_of_transformers_are_found():
    from transformers import (
        AutoModelForSeq2SeqLM,
        AutoModelForSequenceClassification,
        BertConfig,
        T5Config,
        ViTConfig,
        ViTForImageClassification,
    )

    small = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8, "num_hidden_layers": 2}
    t5 = T5Config(vocab_size=9, d_model=8, d_kv=4, d_ff=8, num_layers=2, num_decoder_layers=3, num_heads=2)
    bert = AutoModelForSequenceClassification.from_config(BertConfig(vocab_size=9, **small))
    vit = ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, **small))
    for model, lowest, last, above in (
        (bert, "bert.embeddings.LayerNorm.bias", "bert.encoder.layer.1.output.dense.bias", "bert.pooler.dense.bias"),
        (vit, "vit.embeddings.cls_token", "layers.1.", "classifier.bias"),
        (AutoModelForSeq2SeqLM.from_config(t5), "shared.weight", "decoder.block.2.", "decoder.final_layer_norm.weight"),
    ):
        rates = {name: rate for name, (rate, _) in rates_of(model, recipe_with(lr=1.0, layer_decay=0.5)).items()}
        (last_rate,) = {rate for name, rate in rates.items() if last in name}
        assert rates[lowest] == min(rates.values()) < last_rate == 0.5 and rates[above] == 1.0


def test_groups_by_name_come_before_layers_and_keep_their_own_rates():
    rules = [
        {"match": r"^layers\.2", "lr": 0.3},
        {"match": "layers", "weight_decay": 0.7},
        {"match": "bias$", "lr": 2.0, "weight_decay": 0.0},
    ]
    rates = rates_of(Stacked(), recipe_with(lr=1.0, layer_decay=0.5, weight_decay=0.1, groups=rules))
    assert rates["layers.2.weight"] == (0.3, 0.1) and rates["layers.2.bias"] == (0.3, 0.0)
    assert rates["layers.1.weight"] == (0.25, 0.7) and rates["layers.1.bias"] == (0.25, 0.7)
    assert rates["head.bias"] == (2.0, 0.0) and rates["head.weight"] == (1.0, 0.1) and rates["embed.weight"] == (1 / 16, 0.1)


def test_groups_by_name_refine_the_tasks_own_groups():
    rates = rates_of(Layered(), recipe_with(LayerWise(), lr=1.0, weight_decay=0.1, groups=[{"match": "first.bias", "lr": 5.0}]))
    assert rates["first.weight"] == (0.1, 0.1) and rates["first.bias"] == (5.0, 0.1) and rates["head.weight"] == (1.0, 0.1)


def test_frozen_parameters_are_in_no_group_and_tied_ones_have_both_names():
    model = Stacked()
    model.again = model.embed
    freeze(model, ["^again", r"layers\.[01]\."])
    assert {name for name, value in model.named_parameters() if value.requires_grad} == {
        *("layers.2.weight", "layers.2.bias", "norm.weight", "norm.bias", "head.weight", "head.bias")
    }
    assert "embed.weight" not in rates_of(model, recipe_with())


HEAD = {"match": "head", "lr": 1.0}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"freeze": ["layer.0"]}, "train.freeze: 'layer.0' matches no parameter of Stacked. Near it: layers.0"),
        (
            {"freeze": ["zzzzzz"]},
            "train.freeze: 'zzzzzz' matches no parameter of Stacked. It has embed.weight, layers.0.weight",
        ),
        ({"freeze": ["."]}, "train.freeze leaves no parameter of Stacked to train. Leave some names out."),
        ({"groups": [{"match": "heads", "lr": 1.0}]}, "train.groups[0].match: 'heads' matches no parameter of Stacked. Near"),
        (
            {"groups": [HEAD, {"match": "head.bias", "lr": 2.0}]},
            "train.groups[1].match: all that 'head.bias' matches is frozen",
        ),
        ({"layer_decay": 0.5}, "train.layer_decay=0.5: Layered has no stack of layers"),
    ],
)
def test_names_that_lead_nowhere_are_refused(given, message):
    def build(model, recipe):
        freeze(model, recipe.train.freeze)
        parameter_groups(model, recipe)

    model = Layered() if "layer_decay" in given else Stacked()
    assert refused(build, model, recipe_with(**given)).startswith(message)


def stepped(optimizer, parameters, times=3):
    rng = torch.Generator().manual_seed(0)
    for _ in range(times):
        for value in parameters:
            value.grad = torch.randn(value.shape, generator=rng)
        optimizer.step()


def test_muon_equals_torchs_without_its_rounding_on_matrices_and_adamw_on_the_rest(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda self: self.clone())
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Stacked())
    ours = build_optimizer(models[0], recipe_with(optimizer="muon", lr=1e-2, weight_decay=0.1, betas=(0.8, 0.9)))
    stepped(ours, [*models[0].parameters()])
    matrices = [layer.weight for layer in models[1].layers]
    decayed = [models[1].embed.weight, models[1].head.weight]
    plain = [value for value in models[1].parameters() if value.ndim < 2]
    options = {"lr": 1e-2, "betas": (0.8, 0.9), "weight_decay": 0.1, "fused": True}
    torchs = [
        torch.optim.Muon(matrices, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([{"params": decayed}, {"params": plain, "weight_decay": 0.0}], **options),
    ]
    both = type("Both", (), {"step": lambda self: [one.step() for one in torchs]})()
    stepped(both, [*models[1].parameters()])
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))


def test_lion_steps_as_its_paper_says():
    weight = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    optimizer = build_optimizer(nn.ParameterList([weight]), recipe_with(optimizer="lion", lr=0.1))
    optimizer.param_groups[0]["weight_decay"] = 0.5
    expected, momentum = weight.detach().clone(), torch.zeros(3)
    for gradient in (torch.tensor([1.0, -1.0, 0.5]), torch.tensor([-0.02, 9.0, 0.5])):
        weight.grad = gradient.clone()
        optimizer.step()
        update = torch.sign(0.9 * momentum + 0.1 * gradient)
        expected = expected - 0.1 * (update + 0.5 * expected)
        momentum = 0.99 * momentum + 0.01 * gradient
    assert torch.allclose(weight, expected, rtol=1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_is_built_by_its_name_and_survives_the_trial(name):
    schedule = "constant" if name == "schedule_free" else "linear"
    optimizer = build_optimizer(Stacked(), recipe_with(optimizer=name, schedule=schedule))
    check_optimizer(optimizer, torch.device("cpu"))


@dataclass
class Builds(Tagging):
    """Builds its own optimizer."""

    leave_out: bool = False

    def optimizer(self, model, config):
        parts = [{"params": [model.first.weight], "lr": 0.1}, {"params": [model.first.bias, *model.norm.parameters()]}]
        return torch.optim.RMSprop([*parts, *([] if self.leave_out else [{"params": model.head.parameters()}])], lr=1e-3)


def test_a_task_may_build_its_own_optimizer():
    optimizer = build_optimizer(Layered(), recipe_with(Builds(), lr=1e-3))
    assert type(optimizer) is torch.optim.RMSprop
    assert [group["lr_scale"] for group in optimizer.param_groups] == [pytest.approx(100), 1.0, 1.0]
    for task, given, said in (
        (Builds(leave_out=True), {}, "returned head.weight in no group: it would not be trained."),
        (Builds(), {"layer_decay": 0.5}, "builds the optimizer and its groups. Leave train.groups and train.layer_decay out."),
        (Builds(), {"optimizer": "lion"}, "builds the optimizer: train.optimizer=lion has no effect."),
    ):
        assert refused(build_optimizer, Layered(), recipe_with(task, **given)).startswith(f"Builds.optimizer {said}")


@pytest.mark.parametrize(
    ("given", "what", "hint"),
    [
        ({"optimizer": "schedule_free"}, "train.optimizer=schedule_free does without train.schedule", "schedule=constant"),
        ({"optimizer": "lion", "betas": (0.9, 0.95)}, "train.betas=[0.9, 0.95] needs train.optimizer=adamw, adam", "not lion."),
        ({"decay_ratio": 0.2}, "train.decay_ratio=0.2 needs train.schedule=wsd", "not linear."),
        ({"schedule": "wsd", "decay_ratio": 0.0}, "train.decay_ratio=0.0", "(0, 1]."),
        ({"schedule": "polynomial", "power": 0.0}, "train.power=0.0", "above 0."),
        ({"schedule": "inverse_sqrt", "min_lr": 1e-6}, "train.min_lr=1e-06 needs train.schedule=linear", "not inverse_sqrt."),
        ({"freeze": ["bert("]}, "train.freeze[0]='bert(' is not a regular expression", "position 4."),
        ({"groups": [{"match": "x", "lrr": 1.0}]}, "train.groups[0].lrr is not one of match, lr", "Did you mean 'lr'?"),
        ({"groups": [{"lr": 1.0}]}, "train.groups[0] has no match", "a regular expression"),
        ({"groups": [{"match": "x"}]}, "train.groups[0] sets neither", "lr nor weight_decay."),
        ({"groups": [{"match": "x", "lr": "fast"}]}, "train.groups[0].lr='fast' is not a number", "1e-4."),
        ({"groups": [{"match": "x", "lr": 0.0}]}, "train.groups[0].lr=0.0", "above 0."),
    ],
)
def test_values_out_of_bounds_are_refused_at_once(given, what, hint):
    with pytest.raises(ConfigError) as caught:
        TrainConfig(**given)
    assert any(problem.startswith(what) and hint in problem for problem in caught.value.problems)


def test_patience_counts_from_the_last_improvement_that_was_large_enough():
    state = TrainState(step=5)
    counts = []
    for score in (0.5, 0.55, 0.62, 0.6, 0.71, 0.73):
        state.step += 1
        for _ in range(2):  # a run that goes on in a new folder evaluates its last step again, to have a model there
            state.note_score(score, greater_is_better=True, min_improvement=0.1)
        counts.append(state.evaluations_since)
        assert state.has_ended(20, 2) == (score == 0.71)
    assert counts == [0, 1, 0, 1, 2, 0] and not state.has_ended(20, 1) and state.has_ended(11, None)
    state.note_score(0.72, greater_is_better=True, min_improvement=0.1)
    state.forget_best()
    assert state.last_improvement == 0.73
    state.forget_scores()
    assert state.last_improvement is None and state.evaluations_since == state.counted_step == 0
    assert TrainState(epoch=2, step_in_epoch=3).progress(steps_per_epoch=4) == 2.75


@pytest.mark.parametrize("name", sorted(sections.UNSHARDED))
def test_optimizers_that_need_whole_weights_are_refused_under_fsdp_before_anything_is_loaded(name, monkeypatch):
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    for variable, value in {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "ACCELERATE_USE_CPU": "true"}.items():
        monkeypatch.setenv(variable, value)
    said = refused(check_launcher, recipe_with(optimizer=name))
    assert said.startswith(f"train.optimizer={name} does not work under FSDP: it {sections.UNSHARDED[name]}.")

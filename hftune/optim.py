"""Optimizers, their parameter groups, and schedules as pure functions of the optimizer step. Independent of batches and ranks.

A bare name in ``train.optimizer`` or ``train.schedule`` is one of the tables here; a dotted path leads to the user's code.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hftune.config.importing import import_named
from hftune.config.recipe import Recipe
from hftune.config.sections import TrainConfig, is_dotted
from hftune.errors import ConfigError, TrainingError, did_you_mean, format_value

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
}
"""The optimizers with a bare name. hftune.config.sections lists the names, so that recipes can be checked without torch."""


def optimizer_class(config: TrainConfig) -> type[torch.optim.Optimizer]:
    """Return the class that ``train.optimizer`` names.

    Raises:
        ConfigError: it cannot be imported, is not an optimizer, or does not take ``train.optimizer_args``.
    """
    name = config.optimizer
    if not is_dotted(name):
        kind = OPTIMIZERS[name]
    else:
        module, _, attribute = name.rpartition(".")
        kind = import_named("train.optimizer", name, module, attribute)
        if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
            raise ConfigError(f"train.optimizer={name} is not a subclass of torch.optim.Optimizer.")
    _check_arguments(name, kind, config)
    return kind


def _check_arguments(name: str, kind: type, config: TrainConfig) -> None:
    signature = inspect.signature(kind)
    taken = {key for key, item in signature.parameters.items() if item.kind not in (item.VAR_POSITIONAL, item.VAR_KEYWORD)}
    if any(item.kind is item.VAR_KEYWORD for item in signature.parameters.values()):
        return
    plain = ", ".join(str(item.replace(annotation=item.empty)) for item in signature.parameters.values())
    shown = f"{kind.__name__}({plain})"
    for key in config.optimizer_args:
        if key not in taken:
            hint = did_you_mean(key, taken)
            raise ConfigError(f"train.optimizer_args.{key}: {shown} has no such argument.{hint}")
    if "lr" not in taken:
        raise ConfigError(f"train.optimizer={name}: {shown} has no argument lr, which train.lr and train.schedule set.")
    if config.weight_decay and "weight_decay" not in taken:
        raise ConfigError(f"train.weight_decay={config.weight_decay}: {shown} has no such argument. Set it to 0.")


def build_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """Build ``train.optimizer`` on the groups that the task makes of the model's parameters.

    hftune's own are fused: one kernel for all parameters, on CPUs and GPUs. sgd is not under fp16: if the scaler skips the
    first step, fused SGD keeps momentum that was never written (torch 2.13).

    Raises:
        ConfigError: as ``optimizer_class``; the class refuses its arguments; or the groups do not hold each parameter once.
    """
    config = recipe.train
    kind, groups = optimizer_class(config), parameter_groups(model, recipe)
    options: dict[str, Any] = {}
    if config.optimizer in ("adamw", "adam"):
        options = {"betas": tuple(config.betas), "eps": config.eps, "fused": True}
    elif config.optimizer == "sgd":
        options = {"momentum": config.momentum, "fused": config.mixed_precision != "fp16"}
    try:
        return kind(groups, lr=config.lr, **{**options, **config.optimizer_args})
    except (TypeError, ValueError, RuntimeError) as error:
        given = f" with train.optimizer_args={dict(config.optimizer_args)}" if config.optimizer_args else ""
        raise ConfigError(f"train.optimizer={config.optimizer} cannot be built{given}: {error}.") from error


def parameter_groups(model: nn.Module, recipe: Recipe) -> list[dict[str, Any]]:
    """Return the task's groups, each with its share of the learning rate, ``lr_scale``.

    Raises:
        ConfigError: a trainable parameter is in no group or in several, or one in a group is frozen or not the model's.
    """
    groups = [{**group, "params": list(group["params"])} for group in recipe.task.parameter_groups(model, recipe.train)]
    source, names = f"{type(recipe.task).__name__}.parameter_groups", {value: name for name, value in model.named_parameters()}
    counts: dict[Tensor, int] = dict.fromkeys((value for value in names if value.requires_grad), 0)
    for parameter in (parameter for group in groups for parameter in group["params"]):
        if parameter not in counts:
            raise ConfigError(
                f"{source} returned {names.get(parameter, 'a tensor')}, which is not a trainable parameter of the model."
            )
        counts[parameter] += 1
    for parameter, count in counts.items():
        if count != 1:
            how = "in no group: it would not be trained" if count == 0 else f"{count} times"
            raise ConfigError(f"{source} returned {names[parameter]} {how}.")
    for group in groups:
        group["lr_scale"] = group.get("lr", recipe.train.lr) / recipe.train.lr
    return [group for group in groups if group["params"]]


def num_warmup_steps(num_steps: int, config: TrainConfig) -> int:
    """Return the number of warmup steps. At least one step follows them, and the first of these has the peak learning rate."""
    return min(math.ceil(config.warmup_ratio * num_steps), num_steps - 1)  # a run of one step would have rate 0


def linear(step: int, num_steps: int, steps_per_epoch: int, config: TrainConfig) -> float:
    """Fall to 0 in a straight line."""
    return max(0.0, 1 - _progress(step, num_steps, config))


def cosine(step: int, num_steps: int, steps_per_epoch: int, config: TrainConfig) -> float:
    """Fall to 0 along half a cosine."""
    return max(0.0, 0.5 * (1 + math.cos(math.pi * _progress(step, num_steps, config))))


def constant(step: int, num_steps: int, steps_per_epoch: int, config: TrainConfig) -> float:
    """Stay at the peak."""
    return 1.0


def decay_by_epoch(step: int, num_steps: int, steps_per_epoch: int, config: TrainConfig) -> float:
    """Multiply by ``train.gamma`` after every ``train.step_size`` epochs, counted from the first step on, warmup included."""
    return config.gamma ** (step // (steps_per_epoch * config.step_size))


def _progress(step: int, num_steps: int, config: TrainConfig) -> float:
    """Return the share of the steps after the warmup that are done."""
    num_warmup = num_warmup_steps(num_steps, config)
    return (step - num_warmup) / max(1, num_steps - num_warmup)


SCHEDULES: dict[str, Callable[[int, int, int, TrainConfig], float]] = {
    "linear": linear,
    "cosine": cosine,
    "constant": constant,
    "step": decay_by_epoch,
}
"""The schedules that have a bare name: functions of (step, num_steps, steps_per_epoch, train section), which return the factor
of ``train.lr`` after the warmup. hftune.config.sections lists the names."""


def lr_at(step: int, num_steps: int, config: TrainConfig, steps_per_epoch: int) -> float:
    """Return the learning rate of optimizer step ``step`` (0-based) out of ``num_steps``.

    A function, not an object: nothing to save, nothing that can be stepped once too often. The warmup comes first, whatever the
    schedule; a user's function also gets steps counted from the start of the run.
    Source: transformers.optimization.get_{linear,cosine,constant}_schedule_with_warmup, to which tests compare it; with
    ``train.min_lr``, torch.optim.lr_scheduler.CosineAnnealingLR's ``eta_min``; torch.optim.lr_scheduler.StepLR, stepped after
    each epoch, for step.

    Raises:
        TrainingError: a user's function returned something other than a finite number of at least 0.
    """
    num_warmup = num_warmup_steps(num_steps, config)
    if step < num_warmup:
        return config.lr * step / num_warmup
    if is_dotted(config.schedule):
        factor = _user_schedule(config)(step, num_steps, steps_per_epoch)
        if problem := _factor_problem(factor):
            raise TrainingError(f"train.schedule={config.schedule} returned {problem} for step {step} of {num_steps}.")
        return config.lr * float(factor)
    return config.min_lr + (config.lr - config.min_lr) * SCHEDULES[config.schedule](step, num_steps, steps_per_epoch, config)


def check_schedule(config: TrainConfig, num_steps: int, steps_per_epoch: int) -> None:
    """Try a user's schedule on the first, a middle and the last step.

    Raises:
        ConfigError: it cannot be imported, fails, or returns something other than a finite number of at least 0.
    """
    if not is_dotted(config.schedule):
        return
    schedule, asked = _user_schedule(config), "f(step, num_steps, steps_per_epoch)"
    for step in sorted({0, num_steps // 2, num_steps - 1}):
        try:
            factor = schedule(step, num_steps, steps_per_epoch)
        except Exception as error:  # whatever the user's code raises
            raise ConfigError(
                f"train.schedule={config.schedule} cannot be called as {asked} with {step}, {num_steps}, {steps_per_epoch}: "
                f"{type(error).__name__}: {error}."
            ) from error
        if problem := _factor_problem(factor):
            raise ConfigError(
                f"train.schedule={config.schedule} returned {problem} for step {step} of {num_steps}. {asked} must return the "
                "factor of train.lr: a finite number of at least 0."
            )


def _user_schedule(config: TrainConfig) -> Callable[[int, int, int], float]:
    module, _, attribute = config.schedule.rpartition(".")
    found = import_named("train.schedule", config.schedule, module, attribute)
    if not callable(found) or isinstance(found, type):
        raise ConfigError(f"train.schedule={config.schedule} is not a function f(step, num_steps, steps_per_epoch).")
    return found


def _factor_problem(factor: Any) -> str | None:
    """Format a factor that is not a finite number of at least 0; return None if it is one."""
    try:
        is_fine = not isinstance(factor, (bool, str)) and math.isfinite(number := float(factor)) and number >= 0
    except (TypeError, ValueError):
        is_fine = False
    return None if is_fine else format_value(factor)

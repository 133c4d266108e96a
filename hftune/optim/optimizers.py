"""Optimizers by name, by dotted path, or as the task builds them. Independent of batches and ranks.

A bare name in ``train.optimizer`` is one of OPTIMIZERS; a dotted path leads to the user's code.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from hftune.config.importing import import_named
from hftune.config.keys import is_dotted, needing
from hftune.config.recipe import Recipe
from hftune.config.sections import TrainConfig
from hftune.errors import ConfigError, did_you_mean
from hftune.optim.groups import check_groups, parameter_groups

OPTIMIZERS: Mapping[str, str] = {
    "adamw": "torch.optim.AdamW",
    "adam": "torch.optim.Adam",
    "sgd": "torch.optim.SGD",
    "muon": "hftune.optim.muon.Muon",
    "adafactor": "torch.optim.Adafactor",
    "lion": "hftune.optim.lion.Lion",
    "schedule_free": "schedulefree.AdamWScheduleFree",
    "adamw_8bit": "bitsandbytes.optim.AdamW8bit",
}
"""The classes of the optimizers with a bare name, imported when they are asked for. hftune.config.sections lists the names, so
that recipes can be checked without torch."""


def optimizer_class(config: TrainConfig) -> type[torch.optim.Optimizer]:
    """Return the class that ``train.optimizer`` names.

    Raises:
        ConfigError: it cannot be imported, is not an optimizer, or does not take ``train.optimizer_args``.
    """
    name = config.optimizer
    path = OPTIMIZERS.get(name, name)
    module, _, attribute = path.rpartition(".")
    if not is_dotted(name) and find_spec(package := module.partition(".")[0]) is None:
        raise ConfigError(f'train.optimizer={name} needs {package}, which is not installed: pip install "hftune[optimizers]".')
    kind = import_named("train.optimizer", name, module, attribute)
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise ConfigError(f"train.optimizer={name} is not a subclass of torch.optim.Optimizer.")
    signature = inspect.signature(kind)
    taken = {key for key, item in signature.parameters.items() if item.kind not in (item.VAR_POSITIONAL, item.VAR_KEYWORD)}
    if any(item.kind is item.VAR_KEYWORD for item in signature.parameters.values()):
        return kind
    plain = ", ".join(str(item.replace(annotation=item.empty)) for item in signature.parameters.values())
    shown = f"{kind.__name__}({plain})"
    for key in config.optimizer_args:
        if key not in taken:
            raise ConfigError(f"train.optimizer_args.{key}: {shown} has no such argument.{did_you_mean(key, taken)}")
    if "lr" not in taken:
        raise ConfigError(f"train.optimizer={name}: {shown} has no argument lr, which train.lr and train.schedule set.")
    if config.weight_decay and "weight_decay" not in taken:
        raise ConfigError(f"train.weight_decay={config.weight_decay}: {shown} has no such argument. Set it to 0.")
    return kind


def build_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """Build the task's own optimizer, or ``train.optimizer`` on the groups that the task makes of the model's parameters.

    hftune's own are fused: one kernel for all parameters, on CPUs and GPUs. sgd is not under fp16: if the scaler skips the
    first step, fused SGD keeps momentum that was never written (torch 2.13).

    Raises:
        ConfigError: as ``optimizer_class``; the class refuses its arguments; or the groups do not hold each parameter once.
    """
    config = recipe.train
    if (own := own_optimizer(model, recipe)) is not None:
        return own
    kind, groups = optimizer_class(config), parameter_groups(model, recipe)
    options: dict[str, Any] = {
        name: getattr(config, name) for name, owners in needing(TrainConfig, "optimizer").items() if config.optimizer in owners
    }
    if config.optimizer in ("adamw", "adam"):
        options["fused"] = True
    elif config.optimizer == "sgd":
        options["fused"] = config.mixed_precision != "fp16"
    try:
        return kind(groups, lr=config.lr, **{**options, **config.optimizer_args})
    except (TypeError, ValueError, RuntimeError) as error:
        given = f" with train.optimizer_args={dict(config.optimizer_args)}" if config.optimizer_args else ""
        raise ConfigError(f"train.optimizer={config.optimizer} cannot be built{given}: {error}.") from error


def own_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer | None:
    """Return what the task's method ``optimizer`` builds, with each group's share of ``train.lr``; None if it builds none.

    Raises:
        ConfigError: it is not an optimizer, or does not hold each trainable parameter once; or the recipe has groups, too.
    """
    config, source = recipe.train, f"{type(recipe.task).__name__}.optimizer"
    optimizer = recipe.task.optimizer(model, config)
    if optimizer is None:
        return None
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"{source} returned {type(optimizer).__name__}, which is not a torch.optim.Optimizer.")
    if config.groups or config.layer_decay is not None:
        raise ConfigError(f"{source} builds the optimizer and its groups. Leave train.groups and train.layer_decay out.")
    if config.optimizer != TrainConfig.optimizer or config.optimizer_args:
        raise ConfigError(
            f"{source} builds the optimizer: train.optimizer={config.optimizer} has no effect. Leave it and "
            "train.optimizer_args out."
        )
    check_groups(model, optimizer.param_groups, source)
    for group in optimizer.param_groups:
        group["lr_scale"] = group["lr"] / config.lr
    return optimizer

"""Which parameters are trained, and in which groups: frozen ones, learning rates by name and by layer. Independent of ranks."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from hftune.config.recipe import Recipe
from hftune.errors import ConfigError
from hftune.models.stacks import depths, hidden_matrices
from hftune.optim.muon import MATRICES

Group = dict[str, Any]
"""A parameter group, as torch.optim takes it."""


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters whose names match one of these regular expressions somewhere: ``train.freeze``.

    Raises:
        ConfigError: a pattern matches no name; or nothing is left to train.
    """
    for pattern in patterns:
        for parameter in matching(model, pattern, "train.freeze"):
            parameter.requires_grad_(False)
    if patterns and not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(f"train.freeze leaves no parameter of {type(model).__name__} to train. Leave some names out.")


def matching(model: nn.Module, pattern: str, key: str) -> list[nn.Parameter]:
    """Return the parameters with a name that matches; tied ones have several names.

    Raises:
        ConfigError: there is none; the message says which names are near.
    """
    named = [*model.named_parameters(remove_duplicate=False)]
    if found := [parameter for name, parameter in named if re.search(pattern, name)]:
        return found
    names = [name for name, _ in named]
    parts = dict.fromkeys(name.rsplit(".", count)[0] for name in names for count in range(name.count(".") + 1))
    near = difflib.get_close_matches(re.sub(r"[\^$\\()]|\.[*+]", "", pattern), parts, n=3, cutoff=0.6)
    how = f"Near it: {', '.join(near)}." if near else f"It has {', '.join(names[:3])} and so on: {len(names)} in all."
    raise ConfigError(f"{key}: {pattern!r} matches no parameter of {type(model).__name__}. {how}")


def parameter_groups(model: nn.Module, recipe: Recipe) -> list[Group]:
    """Return the task's groups, split where the recipe's learning rates differ; each with its share of it, ``lr_scale``.

    Raises:
        ConfigError: a trainable parameter is in no group or in several, or one in a group is frozen or not the model's; or
            ``train.groups`` or ``train.layer_decay`` do not fit the model.
    """
    config = recipe.train
    groups = [{**group, "params": list(group["params"])} for group in recipe.task.parameter_groups(model, config)]
    check_groups(model, groups, f"{type(recipe.task).__name__}.parameter_groups")
    groups = [{"lr": config.lr, "weight_decay": config.weight_decay, **group} for group in groups]
    if config.groups or config.layer_decay is not None:
        groups = split_by_recipe(model, recipe, groups)
    if config.optimizer == "muon":  # which trains the matrices between embeddings and head
        matrices = {*hidden_matrices(model)}
        groups = [
            {**group, "params": [value for value in group["params"] if (value in matrices) is is_matrix], MATRICES: is_matrix}
            for group in groups
            for is_matrix in (True, False)
        ]
        if not any(group["params"] for group in groups if group[MATRICES]):
            name = type(model).__name__
            raise ConfigError(f"train.optimizer=muon: {name} has no trainable matrices between embeddings and head. Use adamw.")
    return [{**group, "lr_scale": group["lr"] / config.lr} for group in groups if group["params"]]


def check_groups(model: nn.Module, groups: Iterable[Group], source: str) -> None:
    """Make sure that each trainable parameter is in exactly one group, or raise ConfigError."""
    names = {value: name for name, value in model.named_parameters()}
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


def split_by_recipe(model: nn.Module, recipe: Recipe, groups: Sequence[Group]) -> list[Group]:
    """Split groups by ``train.groups``, whose learning rates are absolute, and ``train.layer_decay``, for all others."""
    config, rules = recipe.train, dict[Tensor, dict[str, Any]]()
    for index, given in enumerate(config.groups):  # the first that matches
        key = f"train.groups[{index}].match"
        new = [value for value in matching(model, given["match"], key) if value.requires_grad and value not in rules]
        if not new:
            raise ConfigError(f"{key}: all that {given['match']!r} matches is frozen, or in an earlier group.")
        rules |= dict.fromkeys(new, given)
    above = depths(model) if config.layer_decay is not None else {}
    if config.layer_decay is not None and not above:
        raise ConfigError(
            f"train.layer_decay={config.layer_decay}: {type(model).__name__} has no stack of layers (an nn.ModuleList). Give "
            "its parts learning rates by name, in train.groups."
        )
    split: list[Group] = []
    for group in groups:
        parts: dict[tuple[float, float], list[Tensor]] = {}
        for parameter in group["params"]:
            rule = rules.get(parameter, {})
            lr = group["lr"] if config.layer_decay is None else group["lr"] * config.layer_decay ** above[parameter]
            options = rule.get("lr", lr), rule.get("weight_decay", group["weight_decay"])
            parts.setdefault(options, []).append(parameter)
        split += [{**group, "params": params, "lr": lr, "weight_decay": decay} for (lr, decay), params in parts.items()]
    return split

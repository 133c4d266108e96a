"""Builds a network that a recipe names by its import path. Knows no task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from hftune.config.importing import import_named
from hftune.errors import ConfigError


def build_network(path: str, arguments: Mapping[str, Any]) -> nn.Module:
    """Call the class ``package.module.Class`` with keyword arguments.

    Raises:
        ConfigError: it cannot be imported, does not take the arguments, or is no torch.nn.Module.
    """
    module, _, attribute = path.rpartition(".")
    try:
        found = import_named("task.network", path, module, attribute)
    except ConfigError as error:
        raise ConfigError(f"{error} Write package.module.Class.") from error
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise ConfigError(f"task.network={path} is not a subclass of torch.nn.Module.")
    try:
        return found(**arguments)
    except TypeError as error:
        raise ConfigError(f"task.network={path} cannot be built from task.network_args={dict(arguments)}: {error}.") from error

"""Networks that a recipe names by their import path: built here, and their outputs checked. Independent of tasks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from hftune.config.importing import import_named
from hftune.errors import ConfigError


def build_network(path: str, arguments: Mapping[str, Any]) -> nn.Module:
    """Import the class ``package.module.Class`` and call it with keyword arguments.

    Raises:
        ConfigError: it cannot be imported, does not take the arguments, or is not a torch.nn.Module.
    """
    module, _, attribute = path.rpartition(".")
    try:
        network_class = import_named("task.network", path, module, attribute)
    except ConfigError as error:
        raise ConfigError(f"{error} Write package.module.Class.") from error
    if not (isinstance(network_class, type) and issubclass(network_class, nn.Module)):
        raise ConfigError(f"task.network={path} is not a subclass of torch.nn.Module.")
    try:
        return network_class(**arguments)
    except TypeError as error:
        raise ConfigError(f"task.network={path} cannot be built from task.network_args={dict(arguments)}: {error}.") from error


class Classifier(nn.Module):
    """Run a network that returns logits, and check their shape: the loss would not notice a class too many."""

    def __init__(self, network: nn.Module, num_classes: int):
        super().__init__()
        self.network, self.num_classes = network, num_classes

    def forward(self, image: Tensor) -> Tensor:
        """Return logits (N, K) of images (N, C, H, W).

        Raises:
            ConfigError: the network returns something else.
        """
        logits = self.network(image)
        shape, expected = getattr(logits, "shape", None), (len(image), self.num_classes)
        if shape != expected:
            raise ConfigError(
                f"task.network: for images {tuple(image.shape)} {type(self.network).__name__} returned "
                f"{type(logits).__name__ if shape is None else tuple(shape)}, not logits {expected}, one for each class."
            )
        return logits

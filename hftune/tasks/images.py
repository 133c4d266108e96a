"""What the image tasks share: keys for the data set and for a network of your own, and the description saved with a network.

torch, datasets and Pillow are imported inside the methods, so that mistyped recipes are refused without waiting for them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from hftune.errors import ConfigError
from hftune.task import Task

CONFIG = "config.json"
"""File beside the weights that describes the network."""


@dataclass
class ImageTask(Task):
    """A task on the images of a data set, with a small network of hftune's or one of your own."""

    network: str | None = None
    """Import path of your own network class, package.module.Class. null: hftune's network."""
    network_args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of your own network class."""
    dataset: str = "imagefolder"
    """Data set name on the Hub (owner/name); imagefolder with data_dir; parquet or arrow with data_files; or module:function
    that returns rows."""
    dataset_revision: str | None = None
    """Commit, tag or branch of the data set on the Hub, such as refs/convert/parquet. null: the newest commit."""
    data_dir: str | None = None
    """Folder with the images of imagefolder."""
    data_files: dict[str, Any] | None = None
    """Your own files: data_files.train and data_files.eval, each a path, a glob or a list of them. Used instead of dataset."""
    train_split: str = "train"
    """Split of the data set to train on."""
    eval_split: str = "test"
    """Split of the data set to evaluate on."""
    image_column: str = "image"
    """Column of the images."""
    max_train_samples: int | None = None
    """Number of training images to use, a random subset that is the same in every run. null: all."""
    max_eval_samples: int | None = None
    """Number of evaluation images to use, a random subset that is the same in every run. null: all."""

    @cached_property
    def dataset_commit(self) -> str | None:
        """Commit of the data set that is loaded from the Hub; None for files, folders and functions."""
        from hftune.data.files import dataset_commit

        return dataset_commit(self.dataset, self.data_files, self.dataset_revision, self._instead_of_hub)

    @property
    def _instead_of_hub(self) -> str:
        """Keys to set if the Hub cannot be reached, for error messages."""
        raise NotImplementedError

    def commits(self) -> dict[str, str]:
        from hftune.data.hub import known

        return known({"task.dataset": self.dataset_commit})

    def _network_problems(self) -> Iterator[str]:
        if self.network_args and self.network is None:
            yield "task.network_args is for a network of your own: set task.network=package.module.Class."

    def _own_network(self) -> dict[str, Any]:
        return {"network": self.network, "network_args": dict(self.network_args)}

    def _save_config(self, config: dict[str, Any], directory: Path) -> None:
        text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
        (directory / CONFIG).write_text(text, encoding="utf-8")

    def _saved_config(self, directory: Path) -> dict[str, Any]:
        return json.loads((directory / CONFIG).read_text(encoding="utf-8"))


def check_same_network(saved: dict[str, Any], configured: dict[str, Any], directory: Path) -> None:
    """Compare the network that was saved with the recipe's.

    Raises:
        ConfigError: they differ; the message names the first key.
    """
    for name in {**saved, **configured}:
        if saved.get(name) != configured.get(name):
            raise ConfigError(
                f"{directory} has a network with task.{name}={saved.get(name)}, but the recipe has "
                f"task.{name}={configured.get(name)}."
            )

"""What the image tasks share: keys for the data set and for a network of your own, and the description saved with a network.

torch, datasets and Pillow are imported inside the methods, so that mistyped recipes are refused without waiting for them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hftune.config.keys import key
from hftune.errors import ConfigError
from hftune.task import Task

CONFIG = "config.json"
"""File beside the weights that describes the network."""
DEFAULT_SHARE = 0.1
"""Of the training images, to evaluate on if nothing else is said."""


@dataclass
class ImageTask(Task):
    """A task on the images of a data set, with a small network of hftune's or one of your own."""

    network: str | None = key(None, changes="model")
    """Import path of your own network class, package.module.Class. null: hftune's network."""
    network_args: dict[str, Any] = key(dict, changes="model")
    """Keyword arguments of your own network class."""
    weights: str | None = key(None, changes="model", resume="harmless")
    """Weights of your own to start from: a safetensors or PyTorch file, or a folder with one, copied by name. null: none."""
    dataset: str = key("imagefolder", changes="data")
    """Data set name on the Hub (owner/name); imagefolder with data_dir; parquet or arrow with data_files; or module:function
    that returns rows."""
    dataset_revision: str | None = key(None, changes="data")
    """Commit, tag or branch of the data set on the Hub, such as refs/convert/parquet. null: the newest commit."""
    data_dir: str | None = key(None, changes="data")
    """Folder with the images of imagefolder."""
    data_files: dict[str, Any] | None = key(None, changes="data", inside={"eval": "output", "test": "output"})
    """Your own files: data_files.train, and optionally eval and test, each a path, a glob or a list of them. Used instead of
    dataset."""
    train_split: str = key("train", changes="data")
    """Split of the data set to train on."""
    eval_split: str | None = key(None, changes="output")
    """Split of the data set to evaluate on while training, and to choose the best model by, such as validation. null: images
    held out of the training images, unless data_files.eval or a function provides others."""
    test_split: str | None = key(None, changes="output")
    """Split of the data set on which the best model is evaluated once, at the end. null: none, unless there are
    data_files.test."""
    eval_share: float | None = key(None, changes="data")
    """Share of the training images to hold out and evaluate on: random ones, the same in every run, of each class its share.
    null: 0.1 if nothing else provides evaluation images."""
    eval_fold: list[int] | None = key(None, changes="data")
    """Instead of eval_share, one of several folds: its number, from 0, and the number of folds, such as [0, 5].
    max_train_samples are then the images of all folds together. `hftune folds` sets it; it takes no restoration."""
    image_column: str = "image"
    """Column of the images."""
    max_train_samples: int | None = key(None, changes="data")
    """Number of training images to use, a random subset that is the same in every run. null: all."""
    max_eval_samples: int | None = key(None, changes="output")
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

    def _split_problems(self, folders: Iterable[str] = ()) -> Iterator[str]:
        """Yield what is wrong with the keys that say where the images come from, and which of them are evaluated on.

        Args:
            folders: keys of splits that a folder of idx files must have.
        """
        from hftune.data.files import data_file_problems, held_out_key, held_out_problems, image_folder_problems

        yield from held_out_problems(self)
        if self.eval_split is not None and (key := held_out_key(self)) and not self.data_files and ":" not in self.dataset:
            yield (
                f"{key} takes evaluation images from the training images, but task.eval_split={self.eval_split} names others. "
                "Set one of them to null."
            )
        yield from data_file_problems(self.dataset, self.data_files, needs_eval=False)
        splits = {f"task.{name}": value for name in folders if (value := getattr(self, name)) is not None}
        if self.data_dir is not None or not self.data_files:
            yield from image_folder_problems(self.dataset, self.data_dir, splits)

    @property
    def _source_splits(self) -> dict[str, str]:
        """Names of the splits in the data set, by split; that of the training images for those that are held out of them."""
        from hftune.data.files import held_out_key

        splits = {"train": self.train_split}
        if self.evaluates:  # files and functions have no names of splits
            splits["eval"] = self.train_split if held_out_key(self) or self.eval_split is None else self.eval_split
        if "test" in self.data_files if self.data_files else self.test_split is not None and ":" not in self.dataset:
            splits["test"] = self.test_split or ""
        return splits

    @property
    def held_out_share(self) -> float | None:
        """Share of the training images to evaluate on; None if others are named, or none are needed."""
        from hftune.data.files import names_eval_data

        is_default = self.eval_share is None and self.eval_fold is None and self.evaluates and not names_eval_data(self)
        return DEFAULT_SHARE if is_default else self.eval_share

    @property
    def _counts(self) -> dict[str, int | None]:
        """Number of images to use, by split; None for all."""
        return {"train": self.max_train_samples, "eval": self.max_eval_samples, "test": None}

    def _kept(self, totals: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
        """Return those of ``totals``, the images used and all images of each split, that a limit applies to."""
        return {} if self.eval_fold else {split: totals[split] for split in totals if self._counts[split] is not None}

    def network_problems(self) -> Iterator[str]:
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

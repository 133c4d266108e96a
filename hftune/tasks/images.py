"""What the image tasks share: where images come from, and the description saved with a network.

torch, datasets and Pillow are imported inside the methods, so that mistyped recipes are refused without waiting for them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hftune.config.keys import key
from hftune.errors import ConfigError
from hftune.tasks.folders import FolderTask

if TYPE_CHECKING:
    import numpy as np
    from datasets import Dataset
    from torch import Tensor

CONFIG = "config.json"
"""File beside the weights that describes the network."""


@dataclass
class ImageTask(FolderTask):
    """A task on the images of a data set."""

    weights: str | None = key(None, changes="model", resume="harmless")
    """Weights of your own to start from: a safetensors or PyTorch file, or a folder with one, copied by name. null: none."""
    dataset: str | None = key("imagefolder", changes="data")
    """Data set name on the Hub (owner/name); imagefolder with data_dir; parquet or arrow with data_files; or module:function
    that returns rows."""
    data_dir: str | None = key(None, changes="data")
    """Folder with the images of imagefolder."""

    rows_are = "images"
    instead_of_hub = (
        "task.dataset=imagefolder task.data_dir=FOLDER, or task.dataset=parquet task.data_files.train=... "
        "task.data_files.eval=..."
    )

    def data_problems(self) -> Iterator[str]:
        if self.dataset == "coco" and "objects" not in self.columns:
            yield "task.dataset=coco has boxes, which only ObjectDetection learns. Use imagefolder."
        yield from super().data_problems()

    @property
    def is_folder(self) -> bool:
        """Whether the images are files in folders."""
        return self.dataset == "imagefolder" and not self.data_files

    def paired_rows(self, split: str, source_split: str, columns: Sequence[str]) -> Dataset:
        """Return all rows of a split whose columns are images: of a folder, the files in its subfolders, matched by name."""
        if not self.is_folder or self.source_of(split) is not self.source:
            return super().load_source(split, source_split)
        from hftune.data.restoration_images import load_folder

        return load_folder(Path(str(self.data_dir)).expanduser() / source_split, f"task.data_dir={self.data_dir}", columns)

    def encoded_rows(self) -> dict[str, Dataset]:
        """Return the columns of images that are read, of each split, undecoded and under the names of their roles."""
        from datasets import Image

        names = {
            column: name for name, role in self.columns.items() if role.kind == "image" for column in self.columns_for(name)
        }
        splits = {}
        for split, rows in self.rows.items():
            rows = rows.select_columns([*names]).rename_columns(names)
            for name in names.values():
                rows = rows.cast_column(name, Image(decode=False))
            splits[split] = rows
        return splits

    def encoded_notices(self, encoded: Mapping[str, Dataset]) -> list[str]:
        """Return notices of splits that are not used, and of images that several splits share."""
        from hftune.data import notices

        if self.is_folder:
            splits = sorted(path.name for path in Path(str(self.data_dir)).expanduser().iterdir() if path.is_dir())
        else:
            splits = [] if self.data_files else [*(self.rows["train"].info.splits or ())]
        files = {split: rows["image"][:] for split, rows in encoded.items()}
        return [*notices.unused_splits(self, splits), *notices.shared_files(files)]


def network_problems(network: str | None, network_args: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the keys of a network of the user's own."""
    if network_args and network is None:
        yield "task.network_args is for a network of your own: set task.network=package.module.Class."


def save_config(config: dict[str, Any], directory: Path) -> None:
    """Write what is needed to build a network, and to prepare its inputs."""
    (directory / CONFIG).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_config(directory: Path) -> dict[str, Any]:
    """Read what ``save_config`` wrote."""
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


def to_bytes(image_3HW: Tensor) -> np.ndarray:
    """Return an image in [0, 1] as (H, W, 3) uint8, clipping values outside."""
    return (image_3HW.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).cpu().numpy()

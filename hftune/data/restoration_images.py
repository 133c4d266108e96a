"""Damaged images, with masks and targets: matched by name or by row, checked, and decoded on access. Independent of tasks.

Shape suffixes: H and W height and width, C channels (red, green, blue).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from PIL import Image

from hftune.data.damage import draw_mask
from hftune.data.files import list_images
from hftune.data.images import (
    EncodedImages,
    check_depth,
    checked_rows,
    name_of,
    open_stored,
    read_image,
    upright_size,
    with_file,
)
from hftune.errors import DataError

MIN_SIDE = 16
"""Minimum height and width in pixels."""
MASK_KEY = 20201
"""First number of the seed of fixed random masks. Masks in training have seeds of three numbers."""


@dataclass
class DamagedImages(EncodedImages):
    """A data set of damaged images. A sample has an image (H, W, C) uint8, a mask (H, W) bool and a target like the image.

    The target is None if the image itself is undamaged; then ``collate`` damages the masked pixels. If the data have no masks,
    each sample gets a random mask that is always the same, which follows from its size and index.
    """

    sizes: np.ndarray
    """Height and width of each image, (N, 2) int32."""
    num_converted: int
    """Number of images and targets that are not RGB."""
    marked: np.ndarray
    """Share of masked pixels of each image, in [0, 1]; empty if masks are random."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        row, row_name, (height, width) = self.rows[index], name_of(self.rows, index, self.split), self.sizes[index].tolist()
        sample = {name: to_rgb(*open_stored(row[name], row_name)) for name in ("image", "target") if name in row}
        if "mask" in row:
            sample["mask"] = to_mask(*open_stored(row["mask"], row_name))
        else:
            sample["mask"] = draw_mask(height, width, np.random.RandomState([MASK_KEY, index]))
        for name, pixels in sample.items():
            if pixels.shape[:2] != (height, width):
                raise DataError(
                    f"{with_file(row.get(name), row_name)}: its {name} is {pixels.shape[1]} x {pixels.shape[0]} pixels, "
                    f"but was {width} x {height} when training began."
                )
        return {"target": None, **sample}

    @property
    def areas(self) -> np.ndarray | None:
        """Number of pixels of each image; None if all images have the same size."""
        return None if (self.sizes == self.sizes[0]).all() else self.sizes.prod(axis=1, dtype=np.int64)


def load_folder(folder: Path, source: str, columns: Sequence[str]) -> datasets.Dataset:
    """List the images in a folder if there is one column, else those of its subfolders, one a column, matched by name."""
    if len(columns) == 1:
        paths = {columns[0]: list_images(folder, source)}
    else:
        paths = paired({column: folder / column for column in columns}, source)
    kind = datasets.Features({name: datasets.Image(decode=False) for name in paths})
    return datasets.Dataset.from_dict({name: [{"path": str(path)} for path in files] for name, files in paths.items()}, kind)


def paired(folders: Mapping[str, Path], source: str) -> dict[str, list[Path]]:
    """Match the images of several folders by their names without suffix, in the order of the first folder.

    Raises:
        DataError: beginning with ``source``, a folder has no images, or an image has no match in one of the other folders.
    """
    images: dict[str, dict[Path, Path]] = {}
    for name, folder in folders.items():
        images[name] = {}
        for path in list_images(folder, source):
            other = images[name].setdefault(path.relative_to(folder).with_suffix(""), path)
            if other != path:
                raise DataError(f"{source}: {other} and {path} have the same name except for the suffix. Rename one.")
    for files in images.values():
        for partner, partners in images.items():
            if lonely := sorted(files.keys() - partners.keys()):
                more = f" (and {len(lonely) - 1} more)" if len(lonely) > 1 else ""
                raise DataError(f"{source}: {files[lonely[0]]} has no match of the same name in {folders[partner]}{more}.")
    order = [*next(iter(images.values()))]
    return {name: [files[key] for key in order] for name, files in images.items()}


def checked_images(rows: datasets.Dataset, split: str, min_side: int | None) -> DamagedImages:
    """Check the size of every image, and every mask, before training begins; only once while the files stay as they are.

    Args:
        rows: encoded images: the columns image and, if the data have them, mask and target.
        min_side: minimum height and width in pixels, for crops of this size.

    Raises:
        DataError: one of them cannot be used.
    """

    def check(index: int) -> tuple[tuple[int, int], int, float | None]:
        return _check_row(rows[index], name_of(rows, index, split), min_side)

    def arrays(found: list[tuple[tuple[int, int], int, float | None]]) -> dict[str, np.ndarray]:
        sizes, converted, marked = zip(*found, strict=True)
        shares = np.array([share for share in marked if share is not None], np.float64)
        return {"sizes": np.array(sizes, np.int32), "converted": np.array(converted), "marked": shares}

    found = checked_rows(rows, check, arrays, "images checked", min_side)
    return DamagedImages(rows, split, found["sizes"], int(found["converted"].sum()), found["marked"])


def _check_row(row: Mapping[str, Any], row_name: str, min_side: int | None) -> tuple[tuple[int, int], int, float | None]:
    """Return the image's height and width, how many of image and target are not RGB, and the share of masked pixels.

    Raises:
        DataError: one of them cannot be used.
    """
    sizes, num_converted = {}, 0
    for name, stored in row.items():
        image, image_name = open_stored(stored, row_name, decode=False)
        with image:
            check_depth(image, image_name)
            num_converted += name != "mask" and image.mode != "RGB"
        sizes[name] = upright_size(stored, row_name)
    check_sizes(sizes, {name: with_file(stored, row_name) for name, stored in row.items()})
    image_name, (height, width) = with_file(row["image"], row_name), sizes["image"]
    if min(height, width) < MIN_SIDE:
        raise DataError(f"{image_name} is {width} x {height} pixels. Each side must have at least {MIN_SIDE}.")
    if min_side is not None and min(height, width) < min_side:
        raise DataError(
            f"{image_name} is {width} x {height} pixels, smaller than task.crop={min_side}. Lower it, or remove such images."
        )
    if "mask" not in row:
        return sizes["image"], num_converted, None
    mask_HW = to_mask(*open_stored(row["mask"], row_name))
    check_marks(mask_HW, with_file(row["mask"], row_name))
    return sizes["image"], num_converted, float(mask_HW.mean())


def check_sizes(sizes: Mapping[str, tuple[int, int]], names: Mapping[str, str]) -> None:
    """Raise DataError if mask or target differ from the image in size (height, width); ``names`` are for the message."""
    height, width = sizes["image"]
    for name, (other_height, other_width) in sizes.items():
        if (other_height, other_width) != (height, width):
            raise DataError(
                f"{names['image']} is {width} x {height} pixels, but its {name} is {other_width} x {other_height}. "
                "They must have the same size."
            )


def check_marks(mask_HW: np.ndarray, name: str) -> None:
    """Raise DataError if a mask marks no pixel."""
    if not mask_HW.any():
        raise DataError(
            f"{name} has an empty mask, so there is nothing to restore. Paint the damage white (at least half bright), or "
            "leave the image out."
        )


def read_pair(value: Any, index: int) -> tuple[np.ndarray, np.ndarray]:
    """Return image (H, W, C) uint8 and mask (H, W) bool of a model's input: a pair of paths, Pillow images or arrays.

    Raises:
        DataError: it is not a pair, one of them cannot be read, their sizes differ, or the mask marks nothing.
    """
    name = f"Input {index}"
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise DataError(
            f"{name} is a {type(value).__name__}, not a pair of an image and a mask. For `hftune predict`, set --masks."
        )
    (image, image_name), (mask, mask_name) = (read_image(item, name) for item in value)
    sizes = {"image": (image.height, image.width), "mask": (mask.height, mask.width)}
    check_sizes(sizes, {"image": image_name, "mask": mask_name})
    check_marks(mask_HW := to_mask(mask, mask_name), mask_name)
    if image.mode != "RGB":
        warnings.warn("Some images are not RGB and are converted to it.", stacklevel=2)  # Python shows it once
    return to_rgb(image, image_name), mask_HW


def to_rgb(image: Image.Image, name: str) -> np.ndarray:
    """Return an image as (H, W, C) uint8 without transparency. Raise DataError if it has more than 8 bits per channel."""
    check_depth(image, name)
    return np.asarray(image if image.mode == "RGB" else image.convert("RGB"))


def to_mask(image: Image.Image, name: str) -> np.ndarray:
    """Return which pixels a mask marks, (H, W) bool: those at least half as bright as white, such as orange ones.

    Transparent pixels count as black.

    Raises:
        DataError: the mask has a palette of colours, as class masks for segmentation have, or more than 8 bits per channel.
    """
    if image.mode in ("P", "PA"):
        used = image.convert("RGB").getcolors(maxcolors=256) or []
        if coloured := [colour for _, colour in used if len(set(colour)) > 1]:
            raise DataError(
                f"{name} is a mask with a palette of colours, such as {coloured[0]}, and it is unclear which of them mark "
                "damage. Save masks in black and white."
            )
    if image.has_transparency_data:
        transparent = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "black"), transparent).convert("RGB")
    return to_rgb(image, name) @ LUMA >= 128 if image.mode != "L" else np.asarray(image) >= 128


LUMA = np.array([0.299, 0.587, 0.114], dtype=np.float32)
"""Weights of red, green and blue in brightness. Source: ITU-R BT.601."""


def crop(sample: Mapping[str, Any], top: int, left: int, size: int) -> dict[str, Any]:
    return {name: None if pixels is None else pixels[top : top + size, left : left + size] for name, pixels in sample.items()}


def flip(sample: Mapping[str, Any]) -> dict[str, Any]:
    return {name: None if pixels is None else pixels[:, ::-1] for name, pixels in sample.items()}


def stack(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Stack arrays (H, W, ...) of one kind and of several sizes, padded with zeros at the right and at the bottom."""
    height, width = (max(array.shape[axis] for array in arrays) for axis in (0, 1))
    stacked = np.zeros((len(arrays), height, width, *arrays[0].shape[2:]), arrays[0].dtype)
    for row, array in zip(stacked, arrays, strict=True):
        row[: array.shape[0], : array.shape[1]] = array
    return stacked

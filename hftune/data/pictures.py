"""Pictures to restore, with masks and targets: from folders, or from what ``datasets`` reads; checked, decoded when asked for.
Knows no task and no network.

Shape suffixes: H and W height and width, C channels (red, green, blue).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from PIL import ExifTags, Image

from hftune.data.cache import idle_cores
from hftune.data.damage import draw_mask
from hftune.data.images import open_image, read_image
from hftune.data.text import check_column, load_split, row_numbers, subsample
from hftune.errors import DataError

INSTEAD = (
    "task.dataset=imagefolder task.data_dir=FOLDER, or task.dataset=parquet task.data_files.train=... task.data_files.eval=..."
)
"""What to name where the Hub cannot be reached."""
SMALLEST = 16
"""Pixels a side; what is smaller has no inside."""
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".ppm")
"""Files of a folder that are taken for pictures; others are left alone."""


@dataclass
class Pictures:
    """A data set of damaged images: each sample has an image (H, W, C) uint8, a mask (H, W) bool, and a target as the image.

    The target is None where the image itself is whole: then what the mask marks is damaged later, in ``collate``. Where the
    data have no masks, one is drawn, for the same sample always the same.
    """

    rows: datasets.Dataset
    """Undecoded, with the columns that the data have of image, mask and target."""
    split: str
    sizes: list[tuple[int, int]]
    """Height and width of each image."""
    num_converted: int
    """Images and targets that are not RGB."""
    marked: list[float]
    """Share of each image's pixels that its mask marks, from 0 to 1; empty where masks are drawn."""

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: int) -> dict[str, Any]:
        row = self.rows[place]
        picture = {name: to_rgb(*_open(row[name], self.said(place))) for name in ("image", "target") if name in row}
        if "mask" in row:
            picture["mask"] = to_mask(*_open(row["mask"], self.said(place)))
        else:
            picture["mask"] = draw_mask(*self.sizes[place], np.random.RandomState([MASK_KEY, place]))
        for name, pixels in picture.items():
            if pixels.shape[:2] != self.sizes[place]:
                height, width = self.sizes[place]
                raise DataError(
                    f"{_named(row.get(name), self.said(place))}: its {name} is {pixels.shape[1]} x {pixels.shape[0]} pixels, "
                    f"and was {width} x {height} when training began."
                )
        return {"target": None, **picture}

    def contents(self) -> dict[str, Any]:
        """Return what there is to hash: see hftune.data.digest. Drawn masks follow from sizes and places."""
        return {"rows": self.rows}

    def said(self, place: int) -> str:
        """Name a sample in a message."""
        return f"Row {row_numbers(self.rows, [place])[0]} of the {self.split} split"

    @property
    def areas(self) -> np.ndarray | None:
        """Pixels of each image; None where all have the same size."""
        return None if len(set(self.sizes)) == 1 else np.array([height * width for height, width in self.sizes])


MASK_KEY = 20201
"""Begins the key of masks that are drawn once and for all; those of training have keys of three numbers."""


def load_pictures(
    dataset: str,
    data_dir: str | None,
    data_files: Mapping[str, Any] | None,
    source_split: str,
    split: str,
    count: int | None,
    columns: Mapping[str, str | None],
    least: int | None,
    commit: str | None = None,
) -> Pictures:
    """Load and check ``count`` pictures (None: all) of one split, "train" or "eval".

    Args:
        columns: of image, mask and target; None for those that the data do not have. In folders, they name subfolders.
        least: pixels that each side must have, for crops of this size.
        commit: of a data set on the Hub.

    Raises:
        DataError: naming split, column, row and file.
    """
    columns = {name: column for name, column in columns.items() if column is not None}
    if dataset == "imagefolder" and not data_files:
        rows = _from_folder(Path(data_dir).expanduser() / source_split, f"task.data_dir={data_dir}", columns)
    else:
        rows = load_split(dataset, source_split, data_files, split, instead=INSTEAD, commit=commit)
        for name, column in columns.items():
            check_column(rows, f"task.{name}_column", column, split)
            if not isinstance(kind := rows.features[column], datasets.Image):
                raise DataError(f"Column {column!r} of the {split} split holds {getattr(kind, 'dtype', kind)}, not images.")
        rows = rows.select_columns([*columns.values()]).rename_columns({column: name for name, column in columns.items()})
        for name in columns:
            rows = rows.cast_column(name, datasets.Image(decode=False))
    return _checked(subsample(rows, count, seed=42), split, least)


def _from_folder(folder: Path, said: str, columns: Mapping[str, str]) -> datasets.Dataset:
    """List a folder: all images in it where they are clean; else those of its subfolders, which belong together by name."""
    if list(columns) == ["image"]:
        paths = {"image": list_images(folder, said)}
    else:
        paths = paired({name: folder / column for name, column in columns.items()}, said)
    kind = datasets.Features({name: datasets.Image(decode=False) for name in paths})
    return datasets.Dataset.from_dict({name: [{"path": str(path)} for path in files] for name, files in paths.items()}, kind)


def list_images(folder: Path, said: str) -> list[Path]:
    """Return the images in a folder and below, sorted; raise DataError, beginning with ``said``, where there are none."""
    if not folder.is_dir():
        raise DataError(f"{said}: there is no folder {folder}.")
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
    if not files:
        raise DataError(f"{said}: {folder} holds no images ({', '.join(SUFFIXES)}).")
    return files


def paired(folders: Mapping[str, Path], said: str) -> dict[str, list[Path]]:
    """Put the images of several folders together by their names without suffix, in the order of the first folder's.

    Raises:
        DataError: beginning with ``said``, where a folder has no images, or an image of one has no partner in another.
    """
    found: dict[str, dict[Path, Path]] = {}
    for name, folder in folders.items():
        found[name] = {}
        for path in list_images(folder, said):
            other = found[name].setdefault(path.relative_to(folder).with_suffix(""), path)
            if other != path:
                raise DataError(f"{said}: {other} and {path} have the same name. Which one belongs to it cannot be told.")
    for files in found.values():
        for other, partners in found.items():
            if lonely := sorted(files.keys() - partners.keys()):
                more = f" (and {len(lonely) - 1} more)" if len(lonely) > 1 else ""
                raise DataError(f"{said}: {files[lonely[0]]} has no partner of its name in {folders[other]}{more}.")
    order = [*next(iter(found.values()))]
    return {name: [files[key] for key in order] for name, files in found.items()}


def _checked(rows: datasets.Dataset, split: str, least: int | None) -> Pictures:
    """Look at every picture's size, and at every mask, before training begins."""
    pictures = Pictures(rows, split, [], 0, [])

    def look(place: int) -> tuple[tuple[int, int], int, float | None]:
        return _look(rows[place], pictures.said(place), least)

    with ThreadPoolExecutor(idle_cores(len(rows), rows_each=100)) as threads:
        for size, num_converted, marked in threads.map(look, range(len(rows))):
            pictures.sizes.append(size)
            pictures.num_converted += num_converted
            pictures.marked += [] if marked is None else [marked]
    return pictures


def _look(row: Mapping[str, Any], said: str, least: int | None) -> tuple[tuple[int, int], int, float | None]:
    """Return an image's height and width, how many of its pictures are not RGB, and the share that its mask marks.

    Raises:
        DataError: one of them cannot be trained on.
    """
    sizes, num_converted = {}, 0
    for name, stored in row.items():
        with _open(stored, said, decode=False)[0] as image:
            sizes[name] = _upright_size(image, stored, said)
            num_converted += name != "mask" and image.mode != "RGB"
    check_sizes(sizes, {name: _named(stored, said) for name, stored in row.items()})
    named, (height, width) = _named(row["image"], said), sizes["image"]
    if min(height, width) < SMALLEST:
        raise DataError(f"{named} is {width} x {height} pixels. Each side must have at least {SMALLEST}.")
    if least is not None and min(height, width) < least:
        raise DataError(
            f"{named} is {width} x {height} pixels, smaller than task.crop={least}. Lower task.crop, or remove such images."
        )
    if "mask" not in row:
        return sizes["image"], num_converted, None
    mask_HW = to_mask(*_open(row["mask"], said))
    check_marks(mask_HW, _named(row["mask"], said))
    return sizes["image"], num_converted, float(mask_HW.mean())


def _upright_size(image: Image.Image, stored: Mapping[str, Any], said: str) -> tuple[int, int]:
    """Return height and width after the turn that a camera may ask for, decoding the image only where it asks for one.

    Pillow turns a TIFF by itself and swaps its sides when opening it (13.0), those of other formats not: so look at the result.
    """
    if image.getexif().get(ExifTags.Base.Orientation, 1) >= 5:
        image = _open(stored, said)[0]
    return image.height, image.width


def check_sizes(sizes: Mapping[str, tuple[int, int]], said: Mapping[str, str]) -> None:
    """Refuse a mask or a target of another size (height, width) than its image; ``said`` names them in the message."""
    height, width = sizes["image"]
    for name, (other_height, other_width) in sizes.items():
        if (other_height, other_width) != (height, width):
            raise DataError(
                f"{said['image']} is {width} x {height} pixels, and its {name} {other_width} x {other_height}. "
                "They must have the same size."
            )


def check_marks(mask_HW: np.ndarray, said: str) -> None:
    """Refuse a mask that marks no pixel."""
    if not mask_HW.any():
        raise DataError(
            f"{said} has a mask that is empty everywhere: nothing is to be restored. Paint white (at least half bright) what "
            "is damaged, or leave the image out."
        )


def _named(stored: Mapping[str, Any] | None, said: str) -> str:
    """Add the file's name, where there is one."""
    return said if stored is None or stored["bytes"] is not None else f"{said} ({stored['path']})"


def _open(stored: Mapping[str, Any] | None, said: str, decode: bool = True) -> tuple[Image.Image, str]:
    """Return an image and its name for messages."""
    if stored is None:
        raise DataError(f"{said} lacks an image. Remove such rows.")
    named = _named(stored, said)
    return open_image(BytesIO(stored["bytes"]) if stored["bytes"] is not None else stored["path"], named, decode), named


def read_pair(value: Any, place: int) -> tuple[np.ndarray, np.ndarray]:
    """Return image (H, W, C) uint8 and mask (H, W) bool of what a model is to restore: a pair of paths, images or arrays.

    Raises:
        DataError: it is no pair, one of them cannot be read, their sizes differ, or the mask marks nothing.
    """
    said = f"Input {place}"
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise DataError(f"{said} is a {type(value).__name__}, not a pair of image and mask. `hftune predict` takes --masks.")
    (image, image_said), (mask, mask_said) = (read_image(item, said) for item in value)
    sizes = {"image": (image.height, image.width), "mask": (mask.height, mask.width)}
    check_sizes(sizes, {"image": image_said, "mask": mask_said})
    check_marks(mask_HW := to_mask(mask, mask_said), mask_said)
    if image.mode != "RGB":
        warnings.warn("Images that are grey, transparent or the like are made RGB.", stacklevel=2)  # which Python says once
    return to_rgb(image, image_said), mask_HW


def to_rgb(image: Image.Image, said: str) -> np.ndarray:
    """Return an image as (H, W, C) uint8; transparency is dropped. Raise DataError where 8 bits cannot hold it."""
    if image.mode.startswith(("I", "F")):
        raise DataError(f"{said} has pixels of more than 8 bits (Pillow's mode {image.mode}). Convert it.")
    return np.asarray(image if image.mode == "RGB" else image.convert("RGB"))


def to_mask(image: Image.Image, said: str) -> np.ndarray:
    """Return which pixels a mask marks: (H, W) bool, those that are at least half bright, as white and orange are.

    What is transparent marks nothing, as if the mask lay on black.

    Raises:
        DataError: the colours of a palette number classes, as in data sets for segmentation; or 8 bits cannot hold the mask.
    """
    if image.mode in ("P", "PA"):
        _check_palette(image, said)
    if image.has_transparency_data:
        drawn = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "black"), drawn).convert("RGB")
    return to_rgb(image, said) @ LUMA >= 128 if image.mode != "L" else np.asarray(image) >= 128


def _check_palette(image: Image.Image, said: str) -> None:
    """Refuse a mask whose palette has colours, unless all that it uses are grey."""
    used = image.convert("RGB").getcolors(maxcolors=256) or []
    coloured = [colour for _, colour in used if len(set(colour)) > 1]
    if coloured:
        raise DataError(
            f"{said} is a mask with a palette of colours, such as {coloured[0]}: which of them mark damage cannot be told. "
            "Save masks in black and white."
        )


LUMA = np.array([0.299, 0.587, 0.114], dtype=np.float32)
"""Brightness of red, green and blue. Source: ITU-R BT.601."""


def crop(sample: Mapping[str, Any], top: int, left: int, size: int) -> dict[str, Any]:
    """Cut the same square out of image, mask and target."""
    return {name: None if pixels is None else pixels[top : top + size, left : left + size] for name, pixels in sample.items()}


def flip(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Mirror image, mask and target, left to right."""
    return {name: None if pixels is None else pixels[:, ::-1] for name, pixels in sample.items()}


def stack(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Stack arrays (H, W, ...) of one kind and of several sizes, padded with zeros at the right and at the bottom."""
    height, width = (max(array.shape[axis] for array in arrays) for axis in (0, 1))
    stacked = np.zeros((len(arrays), height, width, *arrays[0].shape[2:]), arrays[0].dtype)
    for row, array in zip(stacked, arrays, strict=True):
        row[: array.shape[0], : array.shape[1]] = array
    return stacked

"""Image data sets: loaded from the Hub, folders, idx files or a Python function, checked and decoded. Independent of tasks.

Shape suffixes: N images, H and W height and width, C channels (1 grey, 3 red, green and blue).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import PIL
from PIL import Image, ImageOps

from hftune.data import idx
from hftune.data.cache import Stream, cached_arrays, idle_cores
from hftune.data.labels import read_labels
from hftune.data.splits import Part
from hftune.data.text import check_column, load_split, row_numbers, take
from hftune.errors import DataError

INSTEAD = (
    "task.dataset=imagefolder task.data_dir=FOLDER, task.dataset=idx task.data_dir=FOLDER, or "
    "task.dataset=parquet task.data_files.train=... task.data_files.eval=..."
)
"""Keys to set if the Hub cannot be reached."""
CHUNK = 1000
"""Number of images that are decoded together: few enough to also hold their encoded form in memory."""


@dataclass(frozen=True)
class Layout:
    """Size and channels of the images that a model is given."""

    size: int
    """Height and width in pixels."""
    num_channels: int
    """1 (grey) or 3 (red, green, blue)."""
    resize: bool
    """Whether to scale and crop images of other sizes instead of refusing them."""


@dataclass
class Images:
    """A data set in memory or in a memory-mapped file. A sample has an image (H, W, C) uint8 and a label."""

    pixels_NHWC: np.ndarray
    labels: Sequence[Any]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": self.pixels_NHWC[index], "label": self.labels[index]}

    def contents(self) -> dict[str, Any]:
        """Return the content to hash; see hftune.data.digest."""
        return {"pixels": self.pixels_NHWC, "labels": self.labels}


@dataclass
class Source:
    """The images of a split, with the labels of the data."""

    images: Images
    """Their labels are names if the data set has names, else numbers."""
    label_names: list[str] | None
    """Class names, if the data set itself has them."""
    rows: Sequence[int]
    """Index of each image in the whole split."""
    total: int
    """Number of images in the whole split."""


def load_idx(folder: str, split: str, part: Part, layout: Layout) -> Source:
    """Load a part of the images of a split of idx files.

    Raises:
        DataError: a file is broken, images and labels differ in number, or the images have the wrong size.
    """
    path = Path(folder).expanduser()
    images_NHW, labels_N = idx.read_split(path, split)
    total, rows_N = len(labels_N), part.indices(len(labels_N), labels_N.tolist())
    images_NHW, labels = images_NHW[rows_N], labels_N[rows_N].tolist()
    if images_NHW.shape[1:] == (layout.size, layout.size) and layout.num_channels == 1:
        pixels_NHWC = images_NHW[..., None]
    else:
        file = idx.find(path, split, "images")
        pixels = [
            to_pixels(Image.fromarray(image), f"{file}: image {row}", layout)
            for row, image in zip(rows_N, images_NHW, strict=True)
        ]
        pixels_NHWC = np.stack(pixels)
    return Source(Images(pixels_NHWC, labels), None, rows_N.tolist(), total)


def load_rows(
    dataset: str,
    data_dir: str | None,
    data_files: Mapping[str, Any] | None,
    source_split: str,
    split: str,
    part: Part,
    columns: Mapping[str, str],
    layout: Layout,
    commit: str | None = None,
) -> Source:
    """Load a part of the images of a data set that ``datasets`` reads, or of a function that returns rows.

    Args:
        columns: image and label column, by their key: {"task.image_column": "image", "task.label_column": "label"}.
        commit: of a data set on the Hub.

    Raises:
        DataError: the data cannot be used; the message names split, column and row.
    """
    source = "train" if part.held_out is not None else split
    rows = load_split(dataset, source_split, data_files, source, data_dir, INSTEAD, commit=commit)
    for key, column in columns.items():
        check_column(rows, key, column, split)
    image_column, label_column = columns.values()
    rows = take(rows, part, label_column)
    numbers = row_numbers(rows, range(len(rows)))
    labels = read_labels(rows, label_column, split, row_of=numbers.__getitem__)
    names = getattr(rows.features[label_column], "names", None)
    pixels_NHWC = decode(rows, image_column, split, layout)
    return Source(Images(pixels_NHWC, labels), names and list(names), numbers, rows.data.num_rows)


def decode(rows: datasets.Dataset, column: str, split: str, layout: Layout) -> np.ndarray:
    """Decode a column of images once per machine, into a memory-mapped file: (N, H, W, C) uint8.

    Raises:
        DataError: an image cannot be read or does not fit the layout; the message names the first one.
    """
    if not isinstance(kind := rows.features[column], datasets.Image):
        raise DataError(f"Column {column!r} of the {split} split holds {getattr(kind, 'dtype', kind)}, not images.")
    raw = rows.select_columns([column]).cast_column(column, datasets.Image(decode=False))

    def chunks() -> Iterator[np.ndarray]:
        with ThreadPoolExecutor(idle_cores(len(raw))) as threads:  # Pillow releases Python's lock while it decodes
            for start in range(0, len(raw), CHUNK):
                stored = raw[start : start + CHUNK][column]
                indices = range(start, start + len(stored))
                yield np.stack([*threads.map(partial(_decode, rows=raw, split=split, layout=layout), stored, indices)])

    shape = (len(raw), layout.size, layout.size, layout.num_channels)
    key = ["pixels", raw._fingerprint, column, layout, PIL.__version__]
    return cached_arrays(key, lambda: {"pixels": Stream(np.uint8, shape, chunks())})["pixels"]


def _decode(stored: Mapping[str, Any] | None, index: int, rows: datasets.Dataset, split: str, layout: Layout) -> np.ndarray:
    name = f"Row {row_numbers(rows, [index])[0]} of the {split} split"
    if stored is None:
        raise DataError(f"{name} has no image. Remove such rows.")
    if stored["bytes"] is not None:
        return to_pixels(open_image(BytesIO(stored["bytes"]), name), name, layout)
    name += f" ({stored['path']})"
    return to_pixels(open_image(stored["path"], name), name, layout)


def read_input(value: Any, index: int, layout: Layout) -> np.ndarray:
    """Return the pixels (H, W, C) of a model's input: a path, a Pillow image, or an array (H, W) or (H, W, 3).

    Raises:
        DataError: it is none of these, cannot be read, or does not fit the layout.
    """
    image, name = read_image(value, f"Input {index}")
    return to_pixels(image, name, layout)


def read_image(value: Any, name: str) -> tuple[Image.Image, str]:
    """Read a path, a Pillow image or an array (H, W) or (H, W, 3). Return a Pillow image and its name for messages.

    Raises:
        DataError: it is none of these or cannot be read; the message begins with ``name``.
    """
    if isinstance(value, str | Path):
        name += f" ({value})"
        value = open_image(Path(value).expanduser(), name)
    elif isinstance(value, np.ndarray):
        if value.dtype != np.uint8 or not (value.ndim == 2 or (value.ndim == 3 and value.shape[2] == 3)):
            raise DataError(f"{name} is an array {value.shape} of {value.dtype}, not (H, W) or (H, W, 3) of uint8.")
        value = Image.fromarray(value)
    if not isinstance(value, Image.Image):
        raise DataError(f"{name} is a {type(value).__name__}, not a path, a Pillow image or an array.")
    return value, name


def open_image(file: Any, name: str, decode: bool = True) -> Image.Image:
    """Decode a file (or only open it, for its size). Raise DataError with a message that begins with ``name``."""
    try:
        image = Image.open(file)
        if not decode:
            return image
        image.load()
    except FileNotFoundError as error:
        raise DataError(f"{name}: there is no such file.") from error
    except PIL.UnidentifiedImageError as error:
        raise DataError(f"{name} is not an image that can be read.") from error
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:  # as the formats of Pillow fail
        raise DataError(f"{name} cannot be read: {str(error).rstrip('.')}.") from error
    return ImageOps.exif_transpose(image)


def to_pixels(image: Image.Image, name: str, layout: Layout) -> np.ndarray:
    """Return an image as (H, W, C) uint8, or raise DataError with a message that begins with ``name``.

    Grey images are converted to colour if the layout has 3 channels; coloured images are refused if it has 1.
    """
    if image.mode.startswith(("I", "F")):
        raise DataError(f"{name} has more than 8 bits per channel (Pillow mode {image.mode}). Convert it.")
    if image.has_transparency_data and image.convert("RGBA").getextrema()[3][0] < 255:
        raise DataError(f"{name} has transparent parts. Flatten it onto a background.")
    if image.size != (layout.size, layout.size):
        if not layout.resize:
            width, height = image.size
            raise DataError(
                f"{name} is {width} x {height} pixels, but task.image_size={layout.size}. Give all images that size, or set "
                "task.resize=true, which scales the shorter side and crops the longer one."
            )
        image = ImageOps.fit(image if image.mode == "L" else image.convert("RGB"), (layout.size, layout.size))
    if image.mode == "L" and layout.num_channels == 1:
        return np.asarray(image)[..., None]
    pixels_HWC = np.asarray(image.convert("RGB"))
    if layout.num_channels == 3:
        return pixels_HWC
    if (pixels_HWC != pixels_HWC[..., :1]).any():
        raise DataError(f"{name} is in colour, but task.mean has one number, for grey. Give task.mean and task.std three.")
    return pixels_HWC[..., :1]


def move(pixels_HWC: np.ndarray, angle: float, right: float, down: float) -> np.ndarray:
    """Rotate an image about its centre (degrees, counter-clockwise), then shift it (pixels). Uncovered pixels are black.

    Bilinear, by Pillow: about 20 microseconds for 28 x 28 pixels.
    """
    height, width, channels = pixels_HWC.shape
    cos, sin = math.cos(math.radians(angle)), math.sin(math.radians(angle))
    x, y = width / 2, height / 2
    # Pillow wants the inverse transform, from the result to the source: shift back, then rotate back.
    back = (cos, -sin, x - cos * (x + right) + sin * (y + down), sin, cos, y - sin * (x + right) - cos * (y + down))
    image = Image.fromarray(pixels_HWC[..., 0] if channels == 1 else pixels_HWC)
    moved = image.transform((width, height), Image.Transform.AFFINE, back, Image.Resampling.BILINEAR)
    return np.asarray(moved).reshape(pixels_HWC.shape)

"""Image data sets: from the Hub, from folders, idx files or a Python function; checked, made arrays of bytes. Knows no task.

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
from hftune.data.cache import cached_bytes, idle_cores
from hftune.data.labels import read_labels
from hftune.data.text import check_column, drawn, load_split, row_numbers, subsample
from hftune.errors import DataError

INSTEAD = (
    "task.dataset=imagefolder task.data_dir=FOLDER, task.dataset=idx task.data_dir=FOLDER, or "
    "task.dataset=parquet task.data_files.train=... task.data_files.eval=..."
)
"""What to name where the Hub cannot be reached."""
CHUNK = 1000
"""Images that are decoded together: few enough to be held in memory as they stand in the data set, too."""


@dataclass(frozen=True)
class Layout:
    """What all images of a data set look like to the model."""

    size: int
    """Pixels a side."""
    num_channels: int
    resize: bool
    """Scale and cut images of another size, instead of refusing them."""


@dataclass
class Images:
    """A data set in memory, or in a file mapped into it: each sample has an image (H, W, C) uint8 and a label."""

    pixels_NHWC: np.ndarray
    labels: Sequence[Any]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, place: int) -> dict[str, Any]:
        return {"image": self.pixels_NHWC[place], "label": self.labels[place]}

    def contents(self) -> dict[str, Any]:
        """Return what there is to hash: see hftune.data.digest."""
        return {"pixels": self.pixels_NHWC, "labels": self.labels}


@dataclass
class Source:
    """Images with the labels as they stand in the data."""

    images: Images
    """Its labels are names, where the data set has any, else numbers."""
    label_names: list[str] | None
    """Of the classes, where the data set itself names them."""
    rows: Sequence[int]
    """Where each image stands in the whole split, from 0."""
    total: int
    """Images of the whole split."""


def load_idx(folder: str, split: str, count: int | None, layout: Layout) -> Source:
    """Load ``count`` images (None: all) of a split of idx files.

    Raises:
        DataError: a file is broken, the two do not fit together, or the images have another size.
    """
    path = Path(folder).expanduser()
    images_NHW, labels_N = idx.read_split(path, split)
    total, kept_N = len(labels_N), drawn(len(labels_N), count, seed=42)
    images_NHW, labels = images_NHW[kept_N], labels_N[kept_N].tolist()
    if images_NHW.shape[1:] == (layout.size, layout.size) and layout.num_channels == 1:
        pixels_NHWC = images_NHW[..., None]
    else:
        said = f"{idx.find(path, split, 'images')}: image"
        pixels = [
            to_pixels(Image.fromarray(image), f"{said} {row}", layout) for row, image in zip(kept_N, images_NHW, strict=True)
        ]
        pixels_NHWC = np.stack(pixels)
    return Source(Images(pixels_NHWC, labels), None, kept_N, total)


def load_rows(
    dataset: str,
    data_dir: str | None,
    data_files: Mapping[str, Any] | None,
    source_split: str,
    split: str,
    count: int | None,
    columns: Mapping[str, str],
    layout: Layout,
    commit: str | None = None,
) -> Source:
    """Load ``count`` images (None: all) of a data set that ``datasets`` reads, or of a function that returns rows.

    Args:
        columns: of image and label, by the key that names them: {"task.image_column": "image", "task.label_column": "label"}.
        commit: of a data set on the Hub.

    Raises:
        DataError: naming split, column and row.
    """
    rows = subsample(load_split(dataset, source_split, data_files, split, data_dir, INSTEAD, commit=commit), count, seed=42)
    for key, column in columns.items():
        check_column(rows, key, column, split)
    image_column, label_column = columns.values()
    numbers = row_numbers(rows, range(len(rows)))
    labels = read_labels(rows, label_column, split, row_of=numbers.__getitem__)
    names = getattr(rows.features[label_column], "names", None)
    pixels_NHWC = decode(rows, image_column, split, layout)
    return Source(Images(pixels_NHWC, labels), names and list(names), numbers, rows.data.num_rows)


def decode(rows: datasets.Dataset, column: str, split: str, layout: Layout) -> np.ndarray:
    """Decode a column of images once a machine, into a file that is mapped into memory: (N, H, W, C) uint8.

    Raises:
        DataError: naming the first image that cannot be read, or does not fit the layout.
    """
    if not isinstance(kind := rows.features[column], datasets.Image):
        raise DataError(f"Column {column!r} of the {split} split holds {getattr(kind, 'dtype', kind)}, not images.")
    raw = rows.select_columns([column]).cast_column(column, datasets.Image(decode=False))

    def chunks() -> Iterator[np.ndarray]:
        with ThreadPoolExecutor(idle_cores(len(raw))) as threads:  # Pillow decodes without Python's lock
            for start in range(0, len(raw), CHUNK):
                stored = raw[start : start + CHUNK][column]
                places = range(start, start + len(stored))
                yield np.stack([*threads.map(partial(_decode, rows=raw, split=split, layout=layout), stored, places)])

    shape = (len(raw), layout.size, layout.size, layout.num_channels)
    return cached_bytes([raw._fingerprint, column, layout, PIL.__version__], shape, chunks())


def _decode(stored: Mapping[str, Any] | None, place: int, rows: datasets.Dataset, split: str, layout: Layout) -> np.ndarray:
    said = f"Row {row_numbers(rows, [place])[0]} of the {split} split"
    if stored is None:
        raise DataError(f"{said} has no image. Remove such rows.")
    if stored["bytes"] is None:
        said += f" ({stored['path']})"
    return to_pixels(
        open_image(BytesIO(stored["bytes"]) if stored["bytes"] is not None else stored["path"], said), said, layout
    )


def read_input(value: Any, place: int, layout: Layout) -> np.ndarray:
    """Return the pixels (H, W, C) of what a model is to answer: a path, a Pillow image, or an array (H, W) or (H, W, 3).

    Raises:
        DataError: it is none of these, cannot be read, or does not fit the layout.
    """
    image, said = read_image(value, f"Input {place}")
    return to_pixels(image, said, layout)


def read_image(value: Any, said: str) -> tuple[Image.Image, str]:
    """Return a path, a Pillow image or an array (H, W) or (H, W, 3) as a Pillow image, with its name for messages.

    Raises:
        DataError: it is none of these, or cannot be read; the sentence begins with ``said``.
    """
    if isinstance(value, str | Path):
        said += f" ({value})"
        value = open_image(Path(value).expanduser(), said)
    elif isinstance(value, np.ndarray):
        if value.dtype != np.uint8 or not (value.ndim == 2 or (value.ndim == 3 and value.shape[2] == 3)):
            raise DataError(f"{said} is an array {value.shape} of {value.dtype}, not (H, W) or (H, W, 3) of uint8.")
        value = Image.fromarray(value)
    if not isinstance(value, Image.Image):
        raise DataError(f"{said} is a {type(value).__name__}, not a path, a Pillow image or an array.")
    return value, said


def open_image(file: Any, said: str, decode: bool = True) -> Image.Image:
    """Decode a file (or, for its size alone, only open it), or raise DataError with a sentence that begins with ``said``."""
    try:
        image = Image.open(file)
        if not decode:
            return image
        image.load()
    except FileNotFoundError as error:
        raise DataError(f"{said}: there is no such file.") from error
    except PIL.UnidentifiedImageError as error:
        raise DataError(f"{said} is no image that can be read.") from error
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:  # as Pillow's formats fail
        raise DataError(f"{said} cannot be read: {str(error).rstrip('.')}.") from error
    return ImageOps.exif_transpose(image)


def to_pixels(image: Image.Image, said: str, layout: Layout) -> np.ndarray:
    """Return an image as (H, W, C) uint8, or raise DataError with a sentence that begins with ``said``.

    Grey images become coloured ones where the layout has 3 channels; coloured ones are refused where it has 1.
    """
    if image.mode.startswith(("I", "F")):
        raise DataError(f"{said} has pixels of more than 8 bits (Pillow's mode {image.mode}). Convert it.")
    if image.has_transparency_data and image.convert("RGBA").getextrema()[3][0] < 255:
        raise DataError(f"{said} has transparent parts. Put it on a background.")
    if image.size != (layout.size, layout.size):
        if not layout.resize:
            width, height = image.size
            raise DataError(
                f"{said} is {width} x {height} pixels, and task.image_size={layout.size}. Give all images that size; or set "
                "task.resize=true, which scales the shorter side to it and cuts the longer one."
            )
        image = ImageOps.fit(image if image.mode == "L" else image.convert("RGB"), (layout.size, layout.size))
    if image.mode == "L" and layout.num_channels == 1:
        return np.asarray(image)[..., None]
    pixels_HWC = np.asarray(image.convert("RGB"))
    if layout.num_channels == 3:
        return pixels_HWC
    if (pixels_HWC != pixels_HWC[..., :1]).any():
        raise DataError(f"{said} is in colour, and task.mean has one number, for grey. Give task.mean and task.std three.")
    return pixels_HWC[..., :1]


def move(pixels_HWC: np.ndarray, angle: float, right: float, down: float) -> np.ndarray:
    """Turn an image about its middle, counter-clockwise in degrees, then shift it, in pixels. What comes in is black.

    Bilinear, by Pillow: about 20 microseconds for 28 x 28 pixels.
    """
    height, width, channels = pixels_HWC.shape
    cos, sin = math.cos(math.radians(angle)), math.sin(math.radians(angle))
    x, y = width / 2, height / 2
    # Pillow asks where each pixel of the result comes from: shifted back, then turned back.
    back = (cos, -sin, x - cos * (x + right) + sin * (y + down), sin, cos, y - sin * (x + right) - cos * (y + down))
    image = Image.fromarray(pixels_HWC[..., 0] if channels == 1 else pixels_HWC)
    moved = image.transform((width, height), Image.Transform.AFFINE, back, Image.Resampling.BILINEAR)
    return np.asarray(moved).reshape(pixels_HWC.shape)

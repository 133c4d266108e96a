"""Image data sets: loaded from the Hub, folders, idx files or a Python function, checked and decoded. Independent of tasks.

Shape suffixes: N images, H and W height and width, C channels (1 grey, 3 red, green and blue).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, Protocol

import datasets
import numpy as np
import PIL
import pyarrow.compute as pc
from PIL import ExifTags, Image, ImageOps

from hftune.data import idx
from hftune.data.cache import Stream, cached_arrays, idle_cores
from hftune.data.columns import IMAGES, LABELS, choose, is_image, is_label
from hftune.data.labels import names_of, read_labels
from hftune.data.rows import check_column, load_split, row_numbers, take
from hftune.data.splits import Part
from hftune.data.tokenized import Ragged
from hftune.errors import DataError

INSTEAD = (
    "task.dataset=imagefolder task.data_dir=FOLDER, task.dataset=idx task.data_dir=FOLDER, or "
    "task.dataset=parquet task.data_files.train=... task.data_files.eval=..."
)
"""Keys to set if the Hub cannot be reached."""
CHUNK = 1000
"""Number of images that are decoded together: few enough to also hold their encoded form in memory."""


class Form(Protocol):
    """How images of all kinds become arrays."""

    @property
    def key(self) -> Any:
        """All that the arrays depend on besides the images; it can be hashed."""

    @property
    def shape(self) -> tuple[int, int, int] | None:
        """Height, width and channels of every array; None if they differ in size."""

    def pixels(self, image: Image.Image, name: str) -> np.ndarray:
        """Return an image as (H, W, C) uint8, or raise DataError with a message that begins with ``name``."""


@dataclass(frozen=True)
class Layout:
    """Size and channels of the images that a network is given."""

    size: int
    """Height and width in pixels."""
    num_channels: int
    """1 (grey) or 3 (red, green, blue)."""
    resize: bool
    """Whether to scale and crop images of other sizes instead of refusing them."""

    @property
    def key(self) -> Layout:
        return self

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.size, self.size, self.num_channels

    def pixels(self, image: Image.Image, name: str) -> np.ndarray:
        return to_pixels(image, name, self)


@dataclass(frozen=True)
class Uncropped:
    """Whole images, from which random crops are cut: scaled down if they are large, each with its own aspect."""

    side: int
    """Maximum of the shorter side in pixels."""
    num_channels: int
    """1 (grey) or 3 (red, green, blue)."""

    shape = None

    @property
    def key(self) -> Uncropped:
        return self

    def size_of(self, width: int, height: int) -> tuple[int, int]:
        """Return width and height of an image that has these in its file."""
        factor = min(1.0, self.side / min(width, height))
        return max(1, round(width * factor)), max(1, round(height * factor))

    def pixels(self, image: Image.Image, name: str) -> np.ndarray:
        image = checked(image, name)
        image = (image if image.mode == "L" else image.convert("RGB")).resize(
            self.size_of(*image.size), Image.Resampling.BICUBIC
        )
        return channels(image, name, self.num_channels)


SPARE = 8 / 7
"""Shorter side of Uncropped images, by the size of the crops: 256 pixels for 224, as is usual."""


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

    def contents_by_row(self) -> dict[str, Any]:
        """Return the content of each sample; see hftune.data.digest."""
        return self.contents()


@dataclass
class SeveralSizes:
    """Images of several sizes in a memory-mapped file. A sample has an image (H, W, C) uint8 and a label."""

    pixels: np.ndarray
    """All bytes of all images, one image after the other, uint8."""
    shapes_N3: np.ndarray
    """Height, width and channels of each image."""
    labels: Sequence[Any]

    def __post_init__(self):
        self._ends_N = self.shapes_N3.prod(axis=1, dtype=np.int64).cumsum()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        shape = self.shapes_N3[index].tolist()
        end = int(self._ends_N[index])
        return {"image": self.pixels[end - math.prod(shape) : end].reshape(shape), "label": self.labels[index]}

    def contents(self) -> dict[str, Any]:
        """Return the content to hash; see hftune.data.digest."""
        return {"pixels": self.pixels, "shapes": self.shapes_N3, "labels": self.labels}

    def contents_by_row(self) -> dict[str, Any]:
        """Return the content of each sample; see hftune.data.digest."""
        pixels = Ragged(self.pixels, np.concatenate([[0], self._ends_N]))
        return {"pixels": pixels, "shapes": self.shapes_N3, "labels": self.labels}


@dataclass
class Source:
    """The images of a split, with the labels of the data."""

    images: Images | SeveralSizes
    """Their labels are names if the data set has names, else numbers."""
    label_names: list[str] | None
    """Class names, if the data set itself has them."""
    rows: Sequence[int]
    """Index of each image in the whole split."""
    total: int
    """Number of images in the whole split."""
    encoded: Sequence[Mapping[str, Any]] | None = None
    """Content or path of each image, as ``datasets.Image(decode=False)`` has it; None for idx files."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Columns of images and labels, by their keys."""
    all_columns: Sequence[str] = ()
    splits: Sequence[str] = ()
    """All splits of the data set, if it names them."""


def load_idx(folder: str, split: str, part: Part, form: Form) -> Source:
    """Load a part of the images of a split of idx files.

    Raises:
        DataError: a file is broken, images and labels differ in number, or the images have the wrong size.
    """
    path = Path(folder).expanduser()
    images_NHW, labels_N = idx.read_split(path, split)
    total, rows_N = len(labels_N), part.indices(len(labels_N), labels_N.tolist())
    images_NHW, labels = images_NHW[rows_N], labels_N[rows_N].tolist()
    if (*images_NHW.shape[1:], 1) == form.shape:
        return Source(Images(images_NHW[..., None], labels), None, rows_N.tolist(), total)
    file = idx.find(path, split, "images")

    def converted(index: int) -> np.ndarray:
        return form.pixels(Image.fromarray(images_NHW[index]), f"{file}: image {rows_N[index]}")

    def chunks() -> Iterator[np.ndarray]:
        for start in range(0, len(labels), CHUNK):
            yield np.stack([converted(index) for index in range(start, min(start + CHUNK, len(labels)))])

    shape = (len(labels), *converted(0).shape)  # the same for all, whatever the form: idx images have one size
    key = ["idx pixels", images_NHW, form.key, PIL.__version__]
    pixels_NHWC = cached_arrays(key, lambda: {"pixels": Stream(np.uint8, shape, chunks())})["pixels"]
    return Source(Images(pixels_NHWC, labels), None, rows_N.tolist(), total)


def load_rows(
    dataset: str,
    data_dir: str | None,
    data_files: Mapping[str, Any] | None,
    source_split: str,
    split: str,
    part: Part,
    columns: Mapping[str, str | None],
    form: Form,
    commit: str | None = None,
) -> Source:
    """Load a part of the images of a data set that ``datasets`` reads, or of a function that returns rows.

    Args:
        columns: image and label column, by their key: {"task.image_column": "image", "task.label_column": "label"}. None: the
            only one that there is.
        commit: of a data set on the Hub.

    Raises:
        DataError: the data cannot be used; the message names split, column and row.
    """
    source = "train" if part.held_out is not None else split
    rows = load_split(dataset, source_split, data_files, source, data_dir, INSTEAD, commit=commit)
    image_column, label_column = _columns(rows, split, columns)
    rows = take(rows, part, label_column)
    numbers = row_numbers(rows, range(len(rows)))
    labels = read_labels(rows, label_column, split, row_of=numbers.__getitem__)
    names = names_of(rows.features[label_column])
    raw = rows.select_columns([image_column]).cast_column(image_column, datasets.Image(decode=False))
    encoded = _Encoded(raw, image_column, split)
    images = encoded.several_sizes(form, labels) if isinstance(form, Uncropped) else Images(encoded.decode(form), labels)
    chosen = dict(zip(columns, (image_column, label_column), strict=True))
    shown, splits = rows.column_names, [] if data_files else list(rows.info.splits or ())
    return Source(images, names and list(names), numbers, rows.data.num_rows, raw[image_column], chosen, shown, splits)


def _columns(rows: datasets.Dataset, split: str, columns: Mapping[str, str | None]) -> tuple[str, str]:
    """Return the columns of images and labels: those that are given, or the only ones that there are."""
    for key, column in columns.items():
        if column is not None:
            check_column(rows, key, column, split)
    (image_key, given_image), (label_key, given_label) = columns.items()
    image_column = choose(image_key, given_image, rows, is_image, IMAGES, taken=[given_label] if given_label else [])
    if not isinstance(kind := rows.features[image_column], datasets.Image):
        raise DataError(f"Column {image_column!r} of the {split} split holds {getattr(kind, 'dtype', kind)}, not images.")
    return image_column, choose(label_key, given_label, rows, is_label, LABELS, taken=[image_column])


@dataclass
class _Encoded:
    """A column of encoded images, which are decoded once per machine, into memory-mapped files."""

    rows: datasets.Dataset
    column: str
    split: str

    def decode(self, form: Form) -> np.ndarray:
        """Return the images as (N, H, W, C) uint8.

        Raises:
            DataError: an image cannot be read or does not fit the form; the message names the first one.
        """
        pixels = partial(self._pixels, form)
        chunks = (np.stack(chunk) for chunk in self._chunks(pixels))
        key = ["pixels", *self._key, form.key, PIL.__version__]
        return cached_arrays(key, lambda: {"pixels": Stream(np.uint8, (len(self.rows), *form.shape), chunks)})["pixels"]

    def several_sizes(self, form: Uncropped, labels: Sequence[Any]) -> SeveralSizes:
        """Return the images with a size for each. Raise DataError as ``decode`` does."""

        def make() -> dict[str, Any]:
            shapes_N3 = np.array([shape for chunk in self._chunks(partial(self._shape, form)) for shape in chunk], np.int32)
            checked = zip(self._chunks(partial(self._pixels, form)), _slices(shapes_N3), strict=True)
            chunks = (_joined(arrays, shapes) for arrays, shapes in checked)
            return {
                "shapes": shapes_N3,
                "pixels": Stream(np.uint8, (int(shapes_N3.prod(axis=1, dtype=np.int64).sum()),), chunks),
            }

        found = cached_arrays(["uncropped", *self._key, form.key, PIL.__version__], make)
        return SeveralSizes(found["pixels"], found["shapes"], labels)

    @property
    def _key(self) -> list[Any]:
        return [self.rows._fingerprint, self.column, states_of_files(self.rows)]

    def _chunks(self, function: Callable[[Mapping[str, Any] | None, int], Any]) -> Iterator[list[Any]]:
        """Yield what a function makes of each image, CHUNK images at a time."""
        with ThreadPoolExecutor(
            idle_cores(len(self.rows), rows_each=100)
        ) as threads:  # Pillow releases Python's lock to decode
            for start in range(0, len(self.rows), CHUNK):
                stored = self.rows[start : start + CHUNK][self.column]
                yield [*threads.map(function, stored, range(start, start + len(stored)))]

    def _pixels(self, form: Form, stored: Mapping[str, Any] | None, index: int) -> np.ndarray:
        return form.pixels(*self._open(stored, index))

    def _shape(self, form: Uncropped, stored: Mapping[str, Any] | None, index: int) -> tuple[int, int, int]:
        image = self._open(stored, index, decode=False)[0]
        with image:
            if image.getexif().get(ExifTags.Base.Orientation, 1) >= 5:  # turned, which not all formats do on opening
                image = self._open(stored, index)[0]
            width, height = form.size_of(*image.size)
        return height, width, form.num_channels

    def _open(self, stored: Mapping[str, Any] | None, index: int, decode: bool = True) -> tuple[Image.Image, str]:
        """Return an image and its name for messages."""
        name = f"Row {row_numbers(self.rows, [index])[0]} of the {self.split} split"
        if stored is None:
            raise DataError(f"{name} has no image. Remove such rows.")
        if stored["bytes"] is not None:
            return open_image(BytesIO(stored["bytes"]), name, decode), name
        name += f" ({stored['path']})"
        return open_image(stored["path"], name, decode), name


def states_of_files(rows: datasets.Dataset) -> list[tuple[int, int] | None]:
    """Return size and time of change of each file that the rows name, None if it is missing; not of images in the rows."""

    def state(path: str) -> tuple[int, int] | None:
        try:
            found = Path(path).stat()
        except OSError:
            return None
        return found.st_size, found.st_mtime_ns

    kept_N = row_numbers(rows, range(len(rows)))
    states = []
    for stored in rows.data.columns:  # of the whole table: a selection would copy the images in it
        path, content = (pc.struct_field(stored, name) for name in ("path", "bytes"))
        states += map(state, path.take(kept_N).filter(content.is_null().take(kept_N)).drop_null().to_pylist())
    return states


def _slices(shapes_N3: np.ndarray) -> Iterator[np.ndarray]:
    for start in range(0, len(shapes_N3), CHUNK):
        yield shapes_N3[start : start + CHUNK]


def _joined(arrays: Sequence[np.ndarray], shapes_N3: np.ndarray) -> np.ndarray:
    """Return the bytes of all arrays, whose shapes were read from the files' headers."""
    if [array.shape for array in arrays] != [tuple(shape) for shape in shapes_N3.tolist()]:
        raise RuntimeError("An image has a different size than the header of its file says.")
    return np.concatenate([array.reshape(-1) for array in arrays])


def read_input(value: Any, index: int, form: Form) -> np.ndarray:
    """Return the pixels (H, W, C) of a model's input: a path, a Pillow image, or an array (H, W) or (H, W, 3).

    Raises:
        DataError: it is none of these, cannot be read, or does not fit the form.
    """
    return form.pixels(*read_image(value, f"Input {index}"))


def read_image(value: Any, name: str) -> tuple[Image.Image, str]:
    """Read a path, a Pillow image or an array (H, W) or (H, W, 3). Return a Pillow image and its name for messages.

    Raises:
        DataError: it is none of these or cannot be read; the message begins with ``name``.
    """
    if isinstance(value, str | Path):
        name += f" ({value})"
        return open_image(Path(value).expanduser(), name), name
    if isinstance(value, np.ndarray):
        if value.dtype != np.uint8 or not (value.ndim == 2 or (value.ndim == 3 and value.shape[2] == 3)):
            raise DataError(f"{name} is an array {value.shape} of {value.dtype}, not (H, W) or (H, W, 3) of uint8.")
        value = Image.fromarray(value)
    if not isinstance(value, Image.Image):
        raise DataError(f"{name} is a {type(value).__name__}, not a path, a Pillow image or an array.")
    with _readable(name):  # Pillow decodes what is opened only now
        return ImageOps.exif_transpose(value), name


def open_image(file: Any, name: str, decode: bool = True) -> Image.Image:
    """Decode a file (or only open it, for its size). Raise DataError with a message that begins with ``name``."""
    with _readable(name):
        image = Image.open(file)
        if decode:
            return ImageOps.exif_transpose(image)
        image.getexif()  # of a PNG, it may come after the pixels, which are decoded then
        return image


@contextmanager
def _readable(name: str) -> Iterator[None]:
    """Turn what Pillow raises for a broken image into a DataError with a message that begins with ``name``."""
    try:
        yield
    except FileNotFoundError as error:
        raise DataError(f"{name}: there is no such file.") from error
    except PIL.UnidentifiedImageError as error:
        raise DataError(f"{name} is not an image that can be read.") from error
    except (OSError, SyntaxError, ValueError, RuntimeError, Image.DecompressionBombError) as error:  # as its formats fail
        raise DataError(f"{name} cannot be read: {str(error).rstrip('.')}.") from error


def to_pixels(image: Image.Image, name: str, layout: Layout) -> np.ndarray:
    """Return an image as (H, W, C) uint8, or raise DataError with a message that begins with ``name``.

    Grey images are converted to colour if the layout has 3 channels; coloured images are refused if it has 1.
    """
    image = checked(image, name)
    if image.size != (layout.size, layout.size):
        if not layout.resize:
            width, height = image.size
            raise DataError(
                f"{name} is {width} x {height} pixels, but task.image_size={layout.size}. Give all images that size, or set "
                "task.resize=true, which scales the shorter side and crops the longer one."
            )
        image = ImageOps.fit(image if image.mode == "L" else image.convert("RGB"), (layout.size, layout.size))
    return channels(image, name, layout.num_channels)


def checked(image: Image.Image, name: str) -> Image.Image:
    """Return the image. Raise DataError if it is deeper than 8 bits or transparent, which a conversion would spoil."""
    check_depth(image, name)
    if image.has_transparency_data and image.convert("RGBA").getextrema()[3][0] < 255:
        raise DataError(f"{name} has transparent parts. Flatten it onto a background.")
    return image


def check_depth(image: Image.Image, name: str) -> None:
    """Raise DataError if an image has more than 8 bits per channel."""
    if image.mode.startswith(("I", "F")):
        raise DataError(f"{name} has more than 8 bits per channel (Pillow mode {image.mode}). Convert it.")


def channels(image: Image.Image, name: str, num_channels: int) -> np.ndarray:
    """Return an image as (H, W, C) uint8. Raise DataError if it is coloured, but should have one channel."""
    if image.mode == "L" and num_channels == 1:
        return np.asarray(image)[..., None]
    pixels_HWC = np.asarray(image.convert("RGB"))
    if num_channels == 3:
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


def check_learnt(numbers: Mapping[str, Sequence[int]], names: Sequence[str], rows: Mapping[str, Sequence[int]]) -> None:
    """Check that each class of the other splits is also in the train split.

    Folders and data sets list their classes for all splits together, so one that cannot be learnt would not be noticed.

    Args:
        numbers: class numbers of each split.
        rows: the rows in the data of each split, for messages.

    Raises:
        DataError: a class has no training images.
    """
    learnt = set(numbers["train"])
    for split, own in numbers.items():
        unknown = [index for index, number in enumerate(own) if number not in learnt]
        if unknown:
            raise DataError(
                f"Row {rows[split][unknown[0]]} of the {split} split has the label {names[own[unknown[0]]]!r}, which no image "
                "of the train split has. Add training images of it, or remove it; or list the classes to learn in "
                "task.label_names."
            )

"""Images: opened, checked and decoded once per machine, or one by one for a model's inputs. Independent of tasks.

Shape suffixes: N images, H and W height and width, C channels (1 grey, 3 red, green and blue).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar, Protocol

import datasets
import numpy as np
import PIL
import pyarrow.compute as pc
from PIL import ExifTags, Image, ImageOps

from hftune.data.cache import Stream, cached_arrays, idle_cores
from hftune.data.rows import row_numbers
from hftune.data.tokenized import Ragged
from hftune.errors import DataError

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
    resize: bool
    """Whether to scale and crop images of other sizes instead of refusing them."""
    mean: tuple[float, ...]
    """Of the pixel values, which are in [0, 1]: one number (grey) or three (red, green, blue)."""
    std: tuple[float, ...]

    is_bgr: ClassVar[bool] = False
    resample: ClassVar[int] = int(Image.Resampling.BILINEAR)
    """Pillow's number of the filter that scales images."""

    @property
    def num_channels(self) -> int:
        return len(self.mean)

    @property
    def key(self) -> tuple[int, int, bool]:
        return self.size, self.num_channels, self.resize

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.size, self.size, self.num_channels

    def pixels(self, image: Image.Image, name: str) -> np.ndarray:
        """Convert grey images to colour if there are 3 channels; refuse coloured images if there is 1."""
        image = checked(image, name)
        if image.size != (self.size, self.size):
            if not self.resize:
                width, height = image.size
                raise DataError(
                    f"{name} is {width} x {height} pixels, but task.image_size={self.size}. Give all images that size, or set "
                    "task.resize=true, which scales the shorter side and crops the longer one."
                )
            image = ImageOps.fit(image if image.mode == "L" else image.convert("RGB"), (self.size, self.size))
        return channels(image, name, self.num_channels)


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

    pixels: np.ndarray | Ragged
    """(N, H, W, C) uint8; or, of images of several sizes, the bytes of each."""
    labels: Sequence[Any]
    shapes_N3: np.ndarray | None = None
    """Height, width and channels of each image, if they differ in size."""

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        pixels = self.pixels
        if isinstance(pixels, Ragged):
            index = range(len(self))[index]
            image = pixels.flat[pixels.offsets[index] : pixels.offsets[index + 1]].reshape(self.shapes_N3[index])
        else:
            image = pixels[index]
        return {"image": image, "label": self.labels[index]}

    def contents(self) -> dict[str, Any]:
        is_ragged = isinstance(self.pixels, Ragged)
        return {**self.contents_by_row(), "pixels": self.pixels.flat if is_ragged else self.pixels}

    def contents_by_row(self) -> dict[str, Any]:
        shapes = {} if self.shapes_N3 is None else {"shapes": self.shapes_N3}
        return {"pixels": self.pixels, "labels": self.labels, **shapes}


@dataclass
class EncodedImages:
    """The base of data sets of images that are checked before training begins, and decoded when a sample is asked for."""

    rows: datasets.Dataset
    """Columns of encoded images, such as image and mask."""
    split: str

    def __len__(self) -> int:
        return len(self.rows)

    def contents(self) -> dict[str, Any]:
        """Return the content to hash; see hftune.data.digest."""
        return {"rows": self.rows}

    def contents_by_row(self) -> dict[str, Any]:
        return {"rows": self.rows}


def checked_rows(
    rows: datasets.Dataset, check: Callable[[int], Any], arrays: Callable[[list[Any]], dict[str, Any]], *depends_on: Any
) -> dict[str, np.ndarray]:
    """Check each row by its index, in threads, and return the arrays that are made of all that was found.

    They are cached while the files stay as they are; ``depends_on``: what is checked, and all that it depends on besides them.
    """

    def make() -> dict[str, Any]:
        with ThreadPoolExecutor(idle_cores(len(rows), rows_each=100)) as threads:
            return arrays([*threads.map(check, range(len(rows)))])

    return cached_arrays([*depends_on, rows._fingerprint, states_of_files(rows), PIL.__version__], make)


def decode_images(rows: datasets.Dataset, column: str, split: str, form: Form) -> Images:
    """Decode a column of images once per machine, into memory-mapped files. The data set has no labels yet.

    Raises:
        DataError: an image cannot be read or does not fit the form; the message names the first one.
    """
    rows = rows.select_columns([column]).cast_column(column, datasets.Image(decode=False))

    def pixels(stored: Mapping[str, Any] | None, index: int) -> np.ndarray:
        return form.pixels(*open_stored(stored, name_of(rows, index, split)))

    def chunks(function: Callable[[Mapping[str, Any] | None, int], Any]) -> Iterator[list[Any]]:
        """Yield what a function makes of each image, CHUNK images at a time."""
        with ThreadPoolExecutor(idle_cores(len(rows), rows_each=100)) as threads:  # Pillow decodes without Python's lock
            for start in range(0, len(rows), CHUNK):
                stored = rows[start : start + CHUNK][column]
                yield [*threads.map(function, stored, range(start, start + len(stored)))]

    depends_on = [rows._fingerprint, column, states_of_files(rows), form.key, PIL.__version__]
    if not isinstance(form, Uncropped):
        shape, stacked = (len(rows), *form.shape), (np.stack(chunk) for chunk in chunks(pixels))
        found = cached_arrays(["pixels", *depends_on], lambda: {"pixels": Stream(np.uint8, shape, stacked)})
        return Images(found["pixels"], range(len(rows)))

    def shape_of(stored: Mapping[str, Any] | None, index: int) -> tuple[int, int, int]:
        width, height = form.size_of(*upright_size(stored, name_of(rows, index, split))[::-1])
        return height, width, form.num_channels

    def make() -> dict[str, Any]:
        shapes_N3 = np.array([shape for chunk in chunks(shape_of) for shape in chunk], np.int32)
        expected = (shapes_N3[start : start + CHUNK] for start in range(0, len(shapes_N3), CHUNK))
        joined = (_joined(arrays, shapes) for arrays, shapes in zip(chunks(pixels), expected, strict=True))
        total = int(shapes_N3.prod(axis=1, dtype=np.int64).sum())
        return {"shapes": shapes_N3, "pixels": Stream(np.uint8, (total,), joined)}

    found = cached_arrays(["uncropped", *depends_on], make)
    ends_N = found["shapes"].prod(axis=1, dtype=np.int64).cumsum()
    return Images(Ragged(found["pixels"], np.concatenate([[0], ends_N])), range(len(rows)), found["shapes"])


def _joined(arrays: Sequence[np.ndarray], shapes_N3: np.ndarray) -> np.ndarray:
    """Return the bytes of all arrays, whose shapes were read from the files' headers."""
    if [array.shape for array in arrays] != [tuple(shape) for shape in shapes_N3.tolist()]:
        raise RuntimeError("An image has a different size than the header of its file says.")
    return np.concatenate([array.reshape(-1) for array in arrays])


def states_of_files(rows: datasets.Dataset) -> list[tuple[int, int] | None]:
    """Return size and time of change of each file that the rows name, None if it is missing; not of images in the rows."""
    kept_N = row_numbers(rows, range(len(rows)))
    states = []
    for stored in rows.data.columns:  # of the whole table: a selection would copy the images in it
        path, content = (pc.struct_field(stored, name) for name in ("path", "bytes"))
        states += map(state_of, path.take(kept_N).filter(content.is_null().take(kept_N)).drop_null().to_pylist())
    return states


def state_of(path: str | Path) -> tuple[int, int] | None:
    """Return size and time of change of a file; None if it is missing."""
    try:
        found = Path(path).stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


# Opening


def name_of(rows: datasets.Dataset, index: int, split: str) -> str:
    """Return the name of a row for messages."""
    return f"Row {row_numbers(rows, [index])[0]} of the {split} split"


def with_file(stored: Mapping[str, Any] | None, name: str) -> str:
    return name if stored is None or stored["bytes"] is not None else f"{name} ({stored['path']})"


def open_stored(stored: Mapping[str, Any] | None, name: str, decode: bool = True) -> tuple[Image.Image, str]:
    """Return an image of a data set, as ``datasets.Image(decode=False)`` has it, and its name for messages."""
    if stored is None:
        raise DataError(f"{name} has no image. Remove such rows.")
    name = with_file(stored, name)
    return open_image(BytesIO(stored["bytes"]) if stored["bytes"] is not None else stored["path"], name, decode), name


def upright_size(stored: Mapping[str, Any] | None, name: str) -> tuple[int, int]:
    """Return height and width after the rotation in the EXIF data, decoding the image only if there is one.

    Pillow (13.0) rotates TIFFs itself and swaps their sides on opening, but not other formats. Hence the decoding.
    """
    image, _ = open_stored(stored, name, decode=False)
    with image:
        if image.getexif().get(ExifTags.Base.Orientation, 1) >= 5:
            image = open_stored(stored, name)[0]
        return image.height, image.width


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
            ImageOps.exif_transpose(image, in_place=True)
            return image
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

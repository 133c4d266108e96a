"""Images to restore, with masks and targets: loaded from folders or by ``datasets``, checked, and decoded on access.

Independent of tasks and networks.

Shape suffixes: H and W height and width, C channels (red, green, blue).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import PIL
from PIL import ExifTags, Image

from hftune.data.cache import cached_arrays, idle_cores
from hftune.data.damage import draw_mask
from hftune.data.images import check_depth, open_image, read_image, states_of_files
from hftune.data.rows import check_column, load_split, row_numbers, take
from hftune.data.splits import Part
from hftune.errors import DataError

INSTEAD = (
    "task.dataset=imagefolder task.data_dir=FOLDER, or task.dataset=parquet task.data_files.train=... task.data_files.eval=..."
)
"""Keys to set if the Hub cannot be reached."""
SMALLEST = 16
"""Minimum height and width in pixels."""
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".ppm")
"""Suffixes of image files; other files of a folder are ignored."""


@dataclass
class Pictures:
    """A data set of damaged images. A sample has an image (H, W, C) uint8, a mask (H, W) bool and a target like the image.

    The target is None if the image itself is undamaged; then ``collate`` damages the masked pixels. If the data have no masks,
    each sample gets a random mask that is always the same.
    """

    rows: datasets.Dataset
    """Encoded images: the columns image and, if the data have them, mask and target."""
    split: str
    sizes: np.ndarray
    """Height and width of each image, (N, 2) int32."""
    num_converted: int
    """Number of images and targets that are not RGB."""
    marked: np.ndarray
    """Share of masked pixels of each image, in [0, 1]; empty if masks are random."""

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row, row_name, (height, width) = self.rows[index], self.name_of(index), self.sizes[index].tolist()
        picture = {name: to_rgb(*_open(row[name], row_name)) for name in ("image", "target") if name in row}
        if "mask" in row:
            picture["mask"] = to_mask(*_open(row["mask"], row_name))
        else:
            picture["mask"] = draw_mask(height, width, np.random.RandomState([MASK_KEY, index]))
        for name, pixels in picture.items():
            if pixels.shape[:2] != (height, width):
                raise DataError(
                    f"{_with_file(row.get(name), row_name)}: its {name} is {pixels.shape[1]} x {pixels.shape[0]} pixels, "
                    f"but was {width} x {height} when training began."
                )
        return {"target": None, **picture}

    def contents(self) -> dict[str, Any]:
        """Return the content to hash; see hftune.data.digest. Random masks follow from sizes and indices."""
        return {"rows": self.rows}

    def contents_by_row(self) -> dict[str, Any]:
        """Return the content of each sample; see hftune.data.digest."""
        return self.contents()

    def name_of(self, index: int) -> str:
        """Return the name of a sample for messages."""
        return f"Row {row_numbers(self.rows, [index])[0]} of the {self.split} split"

    @property
    def areas(self) -> np.ndarray | None:
        """Number of pixels of each image; None if all images have the same size."""
        return None if (self.sizes == self.sizes[0]).all() else self.sizes.prod(axis=1, dtype=np.int64)


MASK_KEY = 20201
"""First number of the seed of fixed random masks. Masks in training have seeds of three numbers."""


def load_pictures(
    dataset: str,
    data_dir: str | None,
    data_files: Mapping[str, Any] | None,
    source_split: str,
    split: str,
    part: Part | None,
    columns: Mapping[str, str | None],
    least: int | None,
    commit: str | None = None,
) -> Pictures:
    """Load and check the images of a split, "train" or "eval"; ``part``: which ones, None for all.

    Args:
        columns: columns of image, mask and target, or None if the data have none. In a folder, these are subfolders.
        least: minimum height and width in pixels, for crops of this size.
        commit: of a data set on the Hub.

    Raises:
        DataError: the data cannot be used; the message names split, column, row and file.
    """
    columns = {name: column for name, column in columns.items() if column is not None}
    if dataset == "imagefolder" and not data_files:
        rows = _from_folder(Path(data_dir).expanduser() / source_split, f"task.data_dir={data_dir}", columns)
    else:
        source = "train" if part is not None and part.held_out is not None else split
        rows = load_split(dataset, source_split, data_files, source, instead=INSTEAD, commit=commit)
        for name, column in columns.items():
            check_column(rows, f"task.{name}_column", column, split)
            if not isinstance(kind := rows.features[column], datasets.Image):
                raise DataError(f"Column {column!r} of the {split} split holds {getattr(kind, 'dtype', kind)}, not images.")
        rows = rows.select_columns([*columns.values()]).rename_columns({column: name for name, column in columns.items()})
        for name in columns:
            rows = rows.cast_column(name, datasets.Image(decode=False))
    return _checked(take(rows, part), split, least)


def _from_folder(folder: Path, source: str, columns: Mapping[str, str]) -> datasets.Dataset:
    """List all images in a folder if they are clean, else those of its subfolders, matched by name."""
    if list(columns) == ["image"]:
        paths = {"image": list_images(folder, source)}
    else:
        paths = paired({name: folder / column for name, column in columns.items()}, source)
    kind = datasets.Features({name: datasets.Image(decode=False) for name in paths})
    return datasets.Dataset.from_dict({name: [{"path": str(path)} for path in files] for name, files in paths.items()}, kind)


def list_images(folder: Path, source: str) -> list[Path]:
    """Return the images in a folder and below, sorted, without hidden ones, such as an editor's copies.

    Raises:
        DataError: beginning with ``source``, there are none.
    """
    if not folder.is_dir():
        raise DataError(f"{source}: there is no folder {folder}.")
    shown = (path for path in folder.rglob("*") if not any(part.startswith(".") for part in path.relative_to(folder).parts))
    files = sorted(path for path in shown if path.suffix.lower() in SUFFIXES and path.is_file())
    if not files:
        raise DataError(f"{source}: {folder} has no images ({', '.join(SUFFIXES)}).")
    return files


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


def _checked(rows: datasets.Dataset, split: str, least: int | None) -> Pictures:
    """Check the size of every image, and every mask, before training begins; only once while the files stay as they are.

    Raises:
        DataError: one of them cannot be used.
    """
    pictures = Pictures(rows, split, np.empty((0, 2), np.int32), 0, np.empty(0))

    def check(index: int) -> tuple[tuple[int, int], int, float | None]:
        return _check_row(rows[index], pictures.name_of(index), least)

    def make() -> dict[str, np.ndarray]:
        with ThreadPoolExecutor(idle_cores(len(rows), rows_each=100)) as threads:
            sizes, num_converted, marked = zip(*threads.map(check, range(len(rows))), strict=True)
        shares = [share for share in marked if share is not None]
        return {
            "sizes": np.array(sizes, np.int32),
            "converted": np.array(num_converted),
            "marked": np.array(shares, np.float64),
        }

    found = cached_arrays(["pictures checked", rows._fingerprint, states_of_files(rows), least, PIL.__version__], make)
    return replace(pictures, sizes=found["sizes"], num_converted=int(found["converted"].sum()), marked=found["marked"])


def _check_row(row: Mapping[str, Any], row_name: str, least: int | None) -> tuple[tuple[int, int], int, float | None]:
    """Return the image's height and width, how many of image and target are not RGB, and the share of masked pixels.

    Raises:
        DataError: one of them cannot be used.
    """
    sizes, num_converted = {}, 0
    for name, stored in row.items():
        image, image_name = _open(stored, row_name, decode=False)
        with image:
            check_depth(image, image_name)
            sizes[name] = _upright_size(image, stored, row_name)
            num_converted += name != "mask" and image.mode != "RGB"
    check_sizes(sizes, {name: _with_file(stored, row_name) for name, stored in row.items()})
    image_name, (height, width) = _with_file(row["image"], row_name), sizes["image"]
    if min(height, width) < SMALLEST:
        raise DataError(f"{image_name} is {width} x {height} pixels. Each side must have at least {SMALLEST}.")
    if least is not None and min(height, width) < least:
        raise DataError(
            f"{image_name} is {width} x {height} pixels, smaller than task.crop={least}. Lower it, or remove such images."
        )
    if "mask" not in row:
        return sizes["image"], num_converted, None
    mask_HW = to_mask(*_open(row["mask"], row_name))
    check_marks(mask_HW, _with_file(row["mask"], row_name))
    return sizes["image"], num_converted, float(mask_HW.mean())


def _upright_size(image: Image.Image, stored: Mapping[str, Any], row_name: str) -> tuple[int, int]:
    """Return height and width after the rotation in the EXIF data, decoding the image only if there is one.

    Pillow (13.0) rotates TIFFs itself and swaps their sides on opening, but not other formats. Hence the decoding.
    """
    if image.getexif().get(ExifTags.Base.Orientation, 1) >= 5:
        image = _open(stored, row_name)[0]
    return image.height, image.width


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


def _with_file(stored: Mapping[str, Any] | None, row_name: str) -> str:
    """Return the name of a row with that of its file, if it has one."""
    return row_name if stored is None or stored["bytes"] is not None else f"{row_name} ({stored['path']})"


def _open(stored: Mapping[str, Any] | None, row_name: str, decode: bool = True) -> tuple[Image.Image, str]:
    """Return an image and its name for messages."""
    if stored is None:
        raise DataError(f"{row_name} lacks an image. Remove such rows.")
    name = _with_file(stored, row_name)
    return open_image(BytesIO(stored["bytes"]) if stored["bytes"] is not None else stored["path"], name, decode), name


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
        _check_palette(image, name)
    if image.has_transparency_data:
        transparent = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "black"), transparent).convert("RGB")
    return to_rgb(image, name) @ LUMA >= 128 if image.mode != "L" else np.asarray(image) >= 128


def _check_palette(image: Image.Image, name: str) -> None:
    """Raise DataError if a mask uses palette colours other than greys."""
    used = image.convert("RGB").getcolors(maxcolors=256) or []
    coloured = [colour for _, colour in used if len(set(colour)) > 1]
    if coloured:
        raise DataError(
            f"{name} is a mask with a palette of colours, such as {coloured[0]}, and it is unclear which of them mark damage. "
            "Save masks in black and white."
        )


LUMA = np.array([0.299, 0.587, 0.114], dtype=np.float32)
"""Weights of red, green and blue in brightness. Source: ITU-R BT.601."""


def crop(sample: Mapping[str, Any], top: int, left: int, size: int) -> dict[str, Any]:
    """Crop the same square from image, mask and target."""
    return {name: None if pixels is None else pixels[top : top + size, left : left + size] for name, pixels in sample.items()}


def flip(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Flip image, mask and target left to right."""
    return {name: None if pixels is None else pixels[:, ::-1] for name, pixels in sample.items()}


def stack(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Stack arrays (H, W, ...) of one kind and of several sizes, padded with zeros at the right and at the bottom."""
    height, width = (max(array.shape[axis] for array in arrays) for axis in (0, 1))
    stacked = np.zeros((len(arrays), height, width, *arrays[0].shape[2:]), arrays[0].dtype)
    for row, array in zip(stacked, arrays, strict=True):
        row[: array.shape[0], : array.shape[1]] = array
    return stacked

"""The idx files of MNIST and similar data sets: found, read and checked. Independent of tasks.

Source: description of the format on MNIST's page: two zero bytes, the type of the values (8: unsigned byte), the number of
dimensions, each dimension as a big-endian 32-bit integer, then the values.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

from hftune.errors import DataError

if TYPE_CHECKING:
    import datasets
    import numpy as np

PREFIXES = {"train": "train", "test": "t10k"}
"""Prefix of the file names, by split."""
NAMES = {"images": "images-idx3-ubyte", "labels": "labels-idx1-ubyte"}


def find(folder: Path, split: str, kind: str) -> Path | None:
    """Return the file of the ``images`` or ``labels`` of a split, compressed or not; None if there is none."""
    name = f"{PREFIXES[split]}-{NAMES[kind]}"
    spellings = (name, name.replace("-idx", ".idx"))  # some copies have a dot instead
    paths = [folder / f"{spelling}{ending}" for spelling in spellings for ending in ("", ".gz")]
    return next((path for path in paths if path.is_file()), None)


def load(folder: Path, split: str) -> datasets.Dataset:
    """Return the rows of a split: image, in the PGM format, whose pixels are those of the file, and label.

    Raises:
        DataError: a file is truncated or is not an idx file, or images and labels differ in number.
    """
    import datasets

    images, labels = (find(folder, split, kind) for kind in NAMES)
    images_NHW, labels_N = read(images, 3), read(labels, 1)
    if len(images_NHW) != len(labels_N):
        raise DataError(f"{images} holds {len(images_NHW):,} images, but {labels} holds {len(labels_N):,} labels.")
    header = b"P5 %d %d 255\n" % (images_NHW.shape[2], images_NHW.shape[1])
    kinds = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    encoded = [{"bytes": header + image_HW.tobytes(), "path": None} for image_HW in images_NHW]
    return datasets.Dataset.from_dict({"image": encoded, "label": labels_N.tolist()}, kinds)


def read(path: Path, num_dimensions: int) -> np.ndarray:
    """Read a file of unsigned bytes with this number of dimensions, or raise DataError."""
    import numpy as np

    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (EOFError, zlib.error) as error:
        raise DataError(f"{path} is truncated or broken: {error}. Download it again.") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error
    header = struct.calcsize(f">4B{num_dimensions}I")
    if raw[:4] != (magic := bytes([0, 0, 8, num_dimensions])):
        kind = "images" if num_dimensions == 3 else "labels"
        start = raw[:4].hex(" ") or "nothing"
        raise DataError(f"{path} begins with {start}, not with {magic.hex(' ')}: it is not an idx file of {kind}.")
    if len(raw) < header:
        raise DataError(f"{path} is truncated: it has fewer than {header} bytes.")
    shape = struct.unpack(f">{num_dimensions}I", raw[4:header])
    if len(raw) - header != math.prod(shape):
        raise DataError(
            f"{path} is {'truncated' if len(raw) - header < math.prod(shape) else 'too long'}: its header announces "
            f"{math.prod(shape):,} bytes, and {len(raw) - header:,} follow."
        )
    return np.frombuffer(raw, dtype=np.uint8, offset=header).reshape(shape)

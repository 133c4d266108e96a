"""Hashes the content of data sets, to check that two machines, or a run and its resumption, have the same data.

Only content is hashed: no path, time stamp or fingerprint, so that equal data in different folders have equal digests.
Independent of tasks and processes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import is_dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

ROWS = 1000
"""Number of rows that are hashed together."""
END_BYTES = 64 * 2**10
"""Of an image file, its size and its first and last 64 KiB are hashed. In every compressed format, an edited image has a
different end (the last bytes of a PNG are a checksum of all its pixels)."""
ARRAY_BYTES = 16 * 2**30
"""Of larger arrays, evenly spaced rows are hashed, about this many bytes in all. 16 GiB in memory take seconds."""
SMALL = 2000
"""Number of samples up to which a data set of an unknown kind is hashed completely."""
SPREAD = 64
"""Number of evenly spaced samples that are hashed of a larger one."""


def content_digest(dataset: Any) -> str:
    """Hash the content of a data set, at gigabytes per second if it consists of Arrow columns or arrays.

    - ``datasets.Dataset``: all columns and rows, in order. For files of image columns see END_BYTES.
    - An object with a method ``contents()``: the arrays, sequences and data sets that it returns, by name.
    - Anything else: all samples if it is a list or has at most SMALL; otherwise SPREAD samples, and all arrays, tensors and
      lists of numbers among the object's attributes that have one entry per sample, as labels do.
    """
    hasher = _Hasher()
    hasher.add("length", str(len(dataset)))
    _add(hasher, "data", dataset)
    return hasher.hexdigest()


class Hasher(Protocol):
    """Takes in what a sample holds, piece by piece."""

    def add(self, name: str, data: Any) -> None: ...


class _Hasher:
    """Hashes one stream of bytes per name, independently of how a stream is cut into chunks."""

    def __init__(self):
        self._streams: dict[str, xxhash.xxh3_128] = {}

    def add(self, name: str, data: Any) -> None:
        data = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
        self._streams.setdefault(name, xxhash.xxh3_128()).update(data)

    def hexdigest(self) -> str:
        lines = [f"{name} {stream.hexdigest()}\n" for name, stream in sorted(self._streams.items())]
        return sha256("".join(lines).encode()).hexdigest()


def _add(hasher: _Hasher, name: str, value: Any) -> None:
    if isinstance(value, datasets.Dataset):
        _add_rows(hasher, name, value)
    elif (array := as_array(value)) is not None:
        _add_array(hasher, name, array)
    elif callable(contents := getattr(value, "contents", None)):
        for key, part in contents().items():
            _add(hasher, f"{name}.{key}", part)
    elif isinstance(value, list | tuple) or len(value) <= SMALL:
        for index in range(len(value)):  # iterating over a data set without __iter__ need not end
            add_sample(hasher, name, value[index])
    else:
        for index in range(SPREAD):
            add_sample(hasher, name, value[index * (len(value) - 1) // (SPREAD - 1)])
        for key, part in attributes(value):
            if isinstance(part, datasets.Dataset):
                _add_rows(hasher, f"{name}.{key}", part)
            elif _length(part) == len(value) and (array := as_array(part)) is not None:
                _add_array(hasher, f"{name}.{key}", array)
            elif isinstance(part, list | tuple) and len(part) == len(value) and not isinstance(part[0], str | Path):
                # Texts may be paths, which differ between machines; the samples above must suffice.
                for sample in part:
                    add_sample(hasher, f"{name}.{key}", sample)


def attributes(value: Any) -> Iterator[tuple[str, Any]]:
    for key, part in sorted(getattr(value, "__dict__", {}).items()):
        yield key, part
        if isinstance(part, list | tuple) and len(part) != len(value):  # such as TensorDataset's tensors
            yield from ((f"{key}.{index}", item) for index, item in enumerate(part))


def _length(value: Any) -> int | None:
    try:
        return len(value)
    except TypeError:
        return None


def as_array(value: Any) -> np.ndarray | None:
    """Return an array, a tensor, or a list of plain numbers as an array; None for everything else."""
    if isinstance(value, np.ndarray):
        return None if value.dtype.hasobject else value
    if hasattr(value, "detach") and hasattr(value, "numpy"):  # a tensor; numpy does not have bfloat16
        return value.detach().cpu().double().numpy() if value.is_floating_point() else value.detach().cpu().numpy()
    if isinstance(value, list | tuple) and value and all(type(item) in (bool, int, float) for item in value):
        array = np.asarray(value)
        return None if array.dtype.hasobject else array
    return None


def _add_array(hasher: Hasher, name: str, array: np.ndarray) -> None:
    hasher.add(name, f"{array.dtype.str}{array.shape}")
    if array.ndim == 0 or array.nbytes <= ROWS:
        hasher.add(name, np.ascontiguousarray(array).tobytes())
        return
    rows = array[:: -(-array.nbytes // ARRAY_BYTES)]
    each = max(1, 2**24 * len(array) // array.nbytes)
    for start in range(0, len(rows), each):
        hasher.add(name, np.ascontiguousarray(rows[start : start + each]).view(np.uint8).reshape(-1).data)


def add_sample(hasher: Hasher, name: str, sample: Any) -> None:
    """Hash a sample of an unknown kind: arrays by their bytes, containers item by item, everything else by its repr."""
    if isinstance(sample, Mapping):
        for key, value in sample.items():
            hasher.add(name, f"{key!r}:")
            add_sample(hasher, name, value)
    elif isinstance(sample, str | bytes):
        hasher.add(name, f"{type(sample).__name__}{len(sample)}:")
        hasher.add(name, sample)
    elif (array := as_array(sample)) is not None:
        _add_array(hasher, name, array)
    elif isinstance(sample, list | tuple):
        hasher.add(name, f"{len(sample)} items:")
        for item in sample:
            add_sample(hasher, name, item)
    elif isinstance(sample, bool | int | float | np.generic | None):
        hasher.add(name, f"{sample!r};")
    elif hasattr(sample, "tobytes"):  # Pillow's images
        hasher.add(name, sample.tobytes())
    elif is_dataclass(sample):
        add_sample(hasher, name, vars(sample))
    else:  # repr might hold an address
        hasher.add(name, type(sample).__qualname__)


def _add_rows(hasher: _Hasher, name: str, rows: datasets.Dataset) -> None:
    for column, kind in rows.features.items():
        hasher.add(f"{name}.{column}", str(getattr(kind, "names", "")))  # of classes
    # In batches from row 0, each column in one piece: the result must not depend on the chunks of Arrow files.
    for batch in rows.with_format("arrow").iter(ROWS):
        for column in batch.column_names:
            values = batch.column(column)
            _add_column(
                hasher, f"{name}.{column}", pa.concat_arrays(values.chunks) if len(values.chunks) > 1 else values.chunk(0)
            )


def _add_column(hasher: _Hasher, name: str, column: pa.Array) -> None:
    """Hash the values of an Arrow array, but not what its buffers hold before, after and between them."""
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    if isinstance(column, pa.DictionaryArray):
        column = column.dictionary_decode()
    hasher.add(f"{name} nulls", f"{column.null_count} of {len(column)};")
    if column.null_count:
        hasher.add(f"{name} nulls", column.is_valid().cast(pa.uint8()).to_numpy().tobytes())
        column = column.drop_null()
    kind = column.type
    if pa.types.is_null(kind) or len(column) == 0:
        return
    if pa.types.is_struct(kind):
        if {field.name for field in kind} == {"bytes", "path"}:  # as datasets stores images and audio
            _add_files(hasher, name, column)
            return
        for index, field in enumerate(kind):
            _add_column(hasher, f"{name}.{field.name}", pc.struct_field(column, [index]))
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        if not pa.types.is_fixed_size_list(kind):
            hasher.add(f"{name} lengths", pc.list_value_length(column).cast(pa.int64()).to_numpy().tobytes())
        _add_column(hasher, f"{name}.item", column.flatten())
    elif (
        pa.types.is_string(kind) or pa.types.is_binary(kind) or pa.types.is_large_string(kind) or pa.types.is_large_binary(kind)
    ):
        hasher.add(f"{name} lengths", pc.binary_length(column).cast(pa.int64()).to_numpy().tobytes())
        wide = pa.types.is_large_string(kind) or pa.types.is_large_binary(kind)
        _, offsets, data = column.buffers()
        first, last = np.frombuffer(offsets, np.int64 if wide else np.int32)[[column.offset, column.offset + len(column)]]
        if data is not None:
            hasher.add(name, memoryview(data)[first:last])
    elif pa.types.is_boolean(kind):  # bits, eight to a byte
        hasher.add(name, column.cast(pa.uint8()).to_numpy().tobytes())
    elif pa.types.is_primitive(kind) or pa.types.is_decimal(kind) or pa.types.is_fixed_size_binary(kind):
        width = kind.bit_width // 8
        hasher.add(name, memoryview(column.buffers()[1])[column.offset * width : (column.offset + len(column)) * width])
    else:  # maps, unions, views: rare, and small enough for repr
        hasher.add(name, repr(column.to_pylist()))


def _add_files(hasher: _Hasher, name: str, column: pa.Array) -> None:
    data = pc.struct_field(column, [0 if column.type[0].name == "bytes" else 1])
    if data.null_count == 0:  # their path only tells where they were packed, if anything
        _add_column(hasher, name, data)
        return
    with ThreadPoolExecutor(8) as threads:
        for digest in threads.map(_file_digest, column.to_pylist()):
            hasher.add(name, digest)


def _file_digest(stored: Mapping[str, Any]) -> bytes:
    return xxhash.xxh3_128_digest(file_content(stored))


def file_content(stored: Mapping[str, Any]) -> bytes:
    """Return what is hashed of a file as datasets stores it: its bytes if they are in the table, otherwise see END_BYTES."""
    if stored["bytes"] is not None:
        return stored["bytes"]
    path = Path(stored["path"])
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            head = file.read(END_BYTES * 2 if size <= END_BYTES * 2 else END_BYTES)
            file.seek(max(len(head), size - END_BYTES))
            return f"{size} ".encode() + head + file.read()
    except OSError:  # inside an archive, or missing: opening it gives a better message
        return path.name.encode()

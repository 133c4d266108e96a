"""Hashes what a data set holds, as a whole and by row, to tell whether two machines, or two runs, have the same data.

Only content is hashed: no path, time stamp or fingerprint, and not how Arrow keeps the rows, so that equal data in different
folders have equal digests. Knows nothing of tasks and processes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import is_dataclass
from hashlib import sha256
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from hftune.data.cache import cached_arrays
from hftune.data.in_place import RowsInPlace
from hftune.data.row_hashes import BYTES
from hftune.data.tokenized import Ragged
from hftune.errors import DataError

ROWS = 1000
"""Number of rows that are hashed together."""
END_BYTES = 64 * 2**10
"""Of an image file, its size and its first and last 64 KiB are hashed. In every compressed format, an edited image has a
different end (the last bytes of a PNG are a checksum of all its pixels)."""
ARRAY_BYTES = 16 * 2**30
"""Of larger arrays, evenly spaced rows are hashed, about this many bytes in all. 16 GiB in memory take seconds."""
MAX_READ = 2000
"""Number of samples up to which a data set of an unknown kind is read completely."""
SPREAD = 64
"""Number of evenly spaced samples that are read of a larger one."""
MIN_CACHED_ROWS = 100_000
"""Hashes of at least this many rows are cached; fewer take less than a second, unless they are files."""
NULL = bytes(BYTES)
"""The digest of a missing value."""


def content_digest(dataset: Any) -> str:
    """Hash the content of a data set, at gigabytes per second if it consists of Arrow columns or arrays.

    - ``datasets.Dataset``: all columns and rows, in order. For files of image columns see END_BYTES.
    - An object with a method ``contents()``: the arrays, sequences and data sets that it returns, by name.
    - Anything else: all samples if it is a list or has at most MAX_READ; otherwise SPREAD samples, and all arrays, tensors and
      lists of numbers among the object's attributes that have one entry per sample, as labels do.
    """
    hasher = _Hasher()
    hasher.add("length", str(len(dataset)))
    _add(hasher, "data", dataset)
    return hasher.hexdigest()


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
    if isinstance(value, datasets.Dataset | RowsInPlace):
        _add_rows(hasher, name, value)
    elif (array := _as_array(value)) is not None:
        _add_array(hasher, name, array)
    elif callable(contents := getattr(value, "contents", None)):
        for key, part in contents().items():
            _add(hasher, f"{name}.{key}", part)
    elif isinstance(value, list | tuple) or len(value) <= MAX_READ:
        for index in range(len(value)):  # iterating over a data set without __iter__ need not end
            _add_sample(hasher, name, value[index])
    else:
        for index in range(SPREAD):
            _add_sample(hasher, name, value[index * (len(value) - 1) // (SPREAD - 1)])
        for key, part in _attributes(value):
            if isinstance(part, datasets.Dataset):
                _add_rows(hasher, f"{name}.{key}", part)
            elif (array := _as_array(part)) is not None and array.ndim and len(array) == len(value):
                _add_array(hasher, f"{name}.{key}", array)
            elif isinstance(part, list | tuple) and len(part) == len(value) and not isinstance(part[0], str | Path):
                # Texts may be paths, which differ between machines; the samples above must suffice.
                for sample in part:
                    _add_sample(hasher, f"{name}.{key}", sample)


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    for key, part in sorted(getattr(value, "__dict__", {}).items()):
        yield key, part
        if isinstance(part, list | tuple) and len(part) != len(value):  # such as TensorDataset's tensors
            yield from ((f"{key}.{index}", item) for index, item in enumerate(part))


def _as_array(value: Any) -> np.ndarray | None:
    """Return an array, a tensor, or a list of plain numbers as an array; None for everything else."""
    if isinstance(value, np.ndarray):
        return None if value.dtype.hasobject else value
    if hasattr(value, "detach") and hasattr(value, "numpy"):  # a tensor; numpy does not have bfloat16
        return value.detach().cpu().double().numpy() if value.is_floating_point() else value.detach().cpu().numpy()
    if isinstance(value, list | tuple) and value and all(type(item) in (bool, int, float) for item in value):
        array = np.asarray(value)
        return None if array.dtype.hasobject else array
    return None


def _add_array(hasher: _Hasher | _SampleHasher, name: str, array: np.ndarray) -> None:
    hasher.add(name, f"{array.dtype.str}{array.shape}")
    if array.ndim == 0 or array.nbytes <= ROWS:
        hasher.add(name, np.ascontiguousarray(array).tobytes())
        return
    rows = array[:: -(-array.nbytes // ARRAY_BYTES)]
    each = max(1, 2**24 * len(array) // array.nbytes)
    for start in range(0, len(rows), each):
        hasher.add(name, np.ascontiguousarray(rows[start : start + each]).view(np.uint8).reshape(-1).data)


def _add_sample(hasher: _Hasher | _SampleHasher, name: str, sample: Any) -> None:
    """Hash a sample of an unknown kind: arrays by their bytes, containers item by item, everything else by its repr."""
    if isinstance(sample, Mapping):
        for key, value in sample.items():
            hasher.add(name, f"{key!r}:")
            _add_sample(hasher, name, value)
    elif isinstance(sample, str | bytes):
        hasher.add(name, f"{type(sample).__name__}{len(sample)}:")
        hasher.add(name, sample)
    elif (array := _as_array(sample)) is not None:
        _add_array(hasher, name, array)
    elif isinstance(sample, list | tuple):
        hasher.add(name, f"{len(sample)} items:")
        for item in sample:
            _add_sample(hasher, name, item)
    elif isinstance(sample, bool | int | float | np.generic | None):
        hasher.add(name, f"{sample!r};")
    elif hasattr(sample, "tobytes"):  # Pillow's images
        hasher.add(name, sample.tobytes())
    elif is_dataclass(sample):
        _add_sample(hasher, name, vars(sample))
    else:  # repr might hold an address
        hasher.add(name, type(sample).__qualname__)


def _add_rows(hasher: _Hasher, name: str, rows: datasets.Dataset) -> None:
    for column, kind in rows.features.items():
        hasher.add(f"{name}.{column}", str(getattr(kind, "names", "")))  # of classes
    # In batches from row 0, each column in one piece: the result must not depend on the chunks of Arrow files.
    for batch in rows.with_format("arrow").iter(ROWS):
        for column in batch.column_names:
            _add_column(hasher, f"{name}.{column}", _in_one_piece(batch.column(column)))


def _add_column(hasher: _Hasher, name: str, column: pa.Array) -> None:
    """Hash the values of an Arrow array, but not what its buffers hold before, after and between them."""
    column = _plain(column)
    hasher.add(f"{name} nulls", f"{column.null_count} of {len(column)};")
    if column.null_count:
        hasher.add(f"{name} nulls", column.is_valid().cast(pa.uint8()).to_numpy().tobytes())
        column = column.drop_null()
    type_, kind = column.type, _kind(column.type)
    if pa.types.is_null(type_) or len(column) == 0:
        return
    if kind == "file":
        data = pc.struct_field(column, "bytes")
        if data.null_count == 0:  # their path only tells where they were packed, if anything
            _add_column(hasher, name, data)
        else:
            for content in _file_contents(column):
                hasher.add(name, xxhash.xxh3_128_digest(content))
    elif kind == "struct":
        for index, field in enumerate(type_):
            _add_column(hasher, f"{name}.{field.name}", pc.struct_field(column, [index]))
    elif kind == "list":
        if not pa.types.is_fixed_size_list(type_):
            hasher.add(f"{name} lengths", pc.list_value_length(column).cast(pa.int64()).to_numpy().tobytes())
        _add_column(hasher, f"{name}.item", column.flatten())
    elif kind == "text":
        hasher.add(f"{name} lengths", pc.binary_length(column).cast(pa.int64()).to_numpy().tobytes())
        data, offsets = _text_bytes(column)
        hasher.add(name, data[offsets[0] : offsets[-1]])
    else:  # those of other kinds are rare, and small enough for repr
        hasher.add(name, _number_bytes(column)[0] if kind == "number" else repr(column.to_pylist()))


def row_hashes(dataset: Any) -> np.ndarray | None:
    """Hash the content of each row of a data set: equal rows have equal hashes, wherever they lie.

    A cryptographic hash, unlike ``content_digest``: nobody can make another row with the hash of one that is recorded.

    - ``datasets.Dataset``, arrays: their rows.
    - An object with a method ``contents_by_row()``: the tables, arrays, Ragged or sequences that it returns, by name, each with
      one entry for each row.
    - Anything else: its samples if it is a list or has at most MAX_READ; otherwise what among its attributes has one entry for
      each sample, as labels do.

    Returns:
        (N, 16) uint8; None for a large data set of the user's own whose rows are known only by reading all of them.

    Raises:
        DataError: ``contents_by_row()`` does not have an entry for each row.
    """
    contents = _contents_by_row(dataset)
    if not contents:
        return None
    hashes = _stacked(_joined({name: _digests(part) for name, part in contents.items()}))
    if len(hashes) != len(dataset):
        raise DataError(
            f"contents_by_row() of {type(dataset).__name__} has {len(hashes):,} entries for {len(dataset):,} samples. It must "
            "have one for each."
        )
    return hashes


def cached_row_hashes(dataset: Any, digest: str) -> np.ndarray | None:
    """Return ``row_hashes``, those of many rows from the cache of prepared data.

    Args:
        digest: the data set's ``content_digest``.

    Raises:
        ConfigError: see ``cached_arrays``.
    """
    # What contents_by_row() of the user's own says is not in a digest without contents(), and may change under it.
    is_in_digest = not hasattr(dataset, "contents_by_row") or hasattr(dataset, "contents")
    if len(dataset) < MIN_CACHED_ROWS or not is_in_digest:
        return row_hashes(dataset)

    def make() -> dict[str, np.ndarray]:
        hashes = row_hashes(dataset)
        return {} if hashes is None else {"hashes": hashes}

    return cached_arrays(["row hashes", digest], make).get("hashes")


def entry_hashes(entries: Any) -> np.ndarray:
    """Hash each entry of a table, an array, Ragged or any iterable: (N, 16) uint8."""
    return _stacked(_digests(entries))


def _stacked(digests: Iterable[bytes]) -> np.ndarray:
    return np.fromiter(digests, f"S{BYTES}").view(np.uint8).reshape(-1, BYTES)  # without millions of objects at once


def _contents_by_row(dataset: Any) -> Mapping[str, Any] | None:
    if isinstance(dataset, datasets.Dataset) or _as_array(dataset) is not None:
        return {"": dataset}
    if callable(known := getattr(dataset, "contents_by_row", None)):
        return known()
    if isinstance(dataset, list | tuple) or len(dataset) <= MAX_READ:
        return {"": (dataset[index] for index in range(len(dataset)))}  # without __iter__, iterating over it need not end
    return {name: part for name, part in _attributes(dataset) if _is_by_row(part, len(dataset))}


def _is_by_row(part: Any, count: int) -> bool:
    """Return whether an attribute has an entry for each row. Lists of texts do not count: they may be paths."""
    if isinstance(part, list | tuple):
        return len(part) == count and not isinstance(part[0], str | os.PathLike)
    is_known = isinstance(part, datasets.Dataset | Ragged) or _as_array(part) is not None
    return is_known and getattr(part, "shape", None) != () and len(part) == count


def _joined(columns: Mapping[str, Iterable[bytes]]) -> Iterator[bytes]:
    """Yield a digest for each row from those of its columns; their order does not count, but their names do."""
    names = sorted(columns)
    of_names = sha256(repr(names).encode())
    for parts in zip(*(columns[name] for name in names), strict=True):
        hasher = of_names.copy()
        hasher.update(b"".join(parts))
        yield hasher.digest()[:BYTES]


def _digests(part: Any) -> Iterable[bytes]:
    if isinstance(part, datasets.Dataset | RowsInPlace):
        batches = part.with_format("arrow").iter(ROWS)
        by_column = (
            {name: _column_digests(_in_one_piece(batch.column(name))) for name in batch.column_names} for batch in batches
        )
        return chain.from_iterable(map(_joined, by_column))
    if isinstance(part, Ragged):
        data = np.ascontiguousarray(part.flat).view(np.uint8).data
        return _span_digests(data, part.offsets.astype(np.int64) * part.flat.itemsize)
    if (array := _as_array(part)) is not None:
        return _array_digests(array)
    return map(_SampleHasher.digest, part)


def _digest(data: Any) -> bytes:
    return sha256(data).digest()[:BYTES]


def _span_digests(data: memoryview, offsets: np.ndarray) -> list[bytes]:
    """Hash the bytes from ``offsets[k]`` up to ``offsets[k + 1]`` for each k."""
    # Slices of a memoryview cost less than those of an array.
    return [_digest(data[start:stop]) for start, stop in pairwise(offsets.tolist())]


class _SampleHasher:
    """Takes in a sample as one stream."""

    def __init__(self):
        self.sha = sha256()

    @classmethod
    def digest(cls, sample: Any) -> bytes:
        hasher = cls()
        _add_sample(hasher, "", sample)
        return hasher.sha.digest()[:BYTES]

    def add(self, name: str, data: Any) -> None:
        self.sha.update(data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data)


def _array_digests(array: np.ndarray) -> Iterator[bytes]:
    """Hash the rows of an array; of an array larger than ARRAY_BYTES, such as pixels on a disk, their beginnings and ends."""
    width = array.nbytes // max(len(array), 1)
    end = width if array.nbytes <= ARRAY_BYTES else ARRAY_BYTES // len(array) // 2
    each = max(1, 2**24 // max(width, 1))
    for first in range(0, len(array), each):
        rows = np.ascontiguousarray(array[first : first + each])
        content = rows.reshape(-1).view(np.uint8).data
        for start in range(0, len(rows) * width, width) if width else [0] * len(rows):
            row = content[start : start + width]
            yield _digest(row if end >= width else bytes(row[:end]) + row[-end:])


def _column_digests(column: pa.Array) -> list[bytes]:
    column = _plain(column)
    kind = _kind(column.type)
    if column.null_count:
        present = iter(_column_digests(column.drop_null()))
        return [next(present) if is_valid else NULL for is_valid in column.is_valid().to_pylist()]
    if len(column) == 0:
        return []
    if kind == "file":
        return [*map(_digest, _file_contents(column))]
    if kind == "struct" and column.type.num_fields:
        fields = {field.name: pc.struct_field(column, [index]) for index, field in enumerate(column.type)}
        return [*_joined({name: _column_digests(field) for name, field in fields.items()})]
    if kind == "list":
        items = column.flatten()  # all in one width: numbers as they are, anything else hashed
        is_plain = _kind(items.type) == "number" and not items.null_count and len(items)
        data, width = _number_bytes(items) if is_plain else (memoryview(b"".join(_column_digests(items))), BYTES)
        return _span_digests(data, np.cumsum([0, *pc.list_value_length(column).to_numpy().astype(np.int64)]) * width)
    if kind == "text":
        return _span_digests(*_text_bytes(column))
    if kind == "number":
        data, width = _number_bytes(column)
        return _span_digests(data, np.arange(len(column) + 1) * width)
    return [_digest(repr(value).encode()) for value in column.to_pylist()]


def _in_one_piece(values: pa.ChunkedArray) -> pa.Array:
    return pa.concat_arrays(values.chunks) if len(values.chunks) > 1 else values.chunk(0)


def _plain(column: pa.Array) -> pa.Array:
    """Return the values themselves, without an extension type or a dictionary."""
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    return column.dictionary_decode() if isinstance(column, pa.DictionaryArray) else column


def _kind(type_: pa.DataType) -> str:
    """Return what its values are to a hash; "file": as datasets stores images and audio; "other": maps, unions and views."""
    if pa.types.is_struct(type_):
        return "file" if {field.name for field in type_} == {"bytes", "path"} else "struct"
    if pa.types.is_list(type_) or pa.types.is_large_list(type_) or pa.types.is_fixed_size_list(type_):
        return "list"
    if type_ in (pa.string(), pa.binary(), pa.large_string(), pa.large_binary()):
        return "text"
    is_plain = pa.types.is_primitive(type_) and not pa.types.is_null(type_)
    return "number" if is_plain or pa.types.is_decimal(type_) or pa.types.is_fixed_size_binary(type_) else "other"


def _number_bytes(column: pa.Array) -> tuple[memoryview, int]:
    """Return the bytes of numbers, and how many each has."""
    if pa.types.is_boolean(column.type):  # bits, eight to a byte
        column = column.cast(pa.uint8())
    width = column.type.bit_width // 8
    return memoryview(column.buffers()[1])[column.offset * width : (column.offset + len(column)) * width], width


def _text_bytes(column: pa.Array) -> tuple[memoryview, np.ndarray]:
    """Return a buffer of texts, and where in it each of them begins; at the end, where the last one ends."""
    is_large = column.type in (pa.large_string(), pa.large_binary())
    _, offsets, data = column.buffers()
    starts = np.frombuffer(offsets, np.int64 if is_large else np.int32)[column.offset : column.offset + len(column) + 1]
    return memoryview(data or b""), starts


def _file_contents(column: pa.Array) -> Iterator[bytes]:
    with ThreadPoolExecutor(8) as threads:
        yield from threads.map(file_content, column.to_pylist())


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

"""Hashes each row of a data set by its content. Independent of tasks, of paths, and of how Arrow or a file keeps the rows.

Unlike hftune.data.digest it uses a cryptographic hash: nobody can make another row with the hash of one that is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from itertools import pairwise
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hftune.data.digest import ARRAY_BYTES, ROWS, SMALL, add_sample, as_array, attributes, file_content
from hftune.data.row_hashes import BYTES
from hftune.data.tokenized import Ragged

NULL = bytes(BYTES)
"""The digest of a missing value."""


def row_digests(dataset: Any) -> Iterator[bytes] | None:
    """Yield the digest of each row, in order; None if it is not known what belongs to a row without reading all of them."""
    parts = contents_by_row(dataset)
    if not parts:
        return None
    return _joined({name: _digests(part) for name, part in parts.items()})


def contents_by_row(dataset: Any) -> Mapping[str, Any] | None:
    """Return what belongs to each row, by name: tables, arrays, Ragged or anything else with one entry for each row, in order.

    - An object with a method ``contents_by_row()``: what it returns.
    - Anything else: its samples if it is a list or has at most SMALL; otherwise what among its attributes has one entry for
      each sample, as labels do. None if nothing does.
    """
    if isinstance(dataset, datasets.Dataset) or as_array(dataset) is not None:
        return {"": dataset}
    if callable(known := getattr(dataset, "contents_by_row", None)):
        return known()
    if isinstance(dataset, list | tuple) or len(dataset) <= SMALL:
        return {"": (dataset[index] for index in range(len(dataset)))}  # without __iter__, iterating over it need not end
    return {name: part for name, part in attributes(dataset) if _is_by_row(part, len(dataset))} or None


def _is_by_row(part: Any, count: int) -> bool:
    """Say whether an attribute has an entry for each row. Lists of texts do not count: they may be paths."""
    if isinstance(part, list | tuple):
        return len(part) == count and not isinstance(part[0], str) and not hasattr(part[0], "__fspath__")
    is_known = isinstance(part, datasets.Dataset | Ragged) or as_array(part) is not None
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
    """Return the digest of each entry of something with one entry for each row."""
    if isinstance(part, datasets.Dataset):
        return _table_digests(part)
    if isinstance(part, Ragged):
        return _spans(part.flat, part.offsets)
    if (array := as_array(part)) is not None:
        return _array_digests(array)
    return map(_sample_digest, part)


def _digest(data: Any) -> bytes:
    return sha256(data).digest()[:BYTES]


def _sample_digest(sample: Any) -> bytes:
    hasher = _Hasher()
    add_sample(hasher, "", sample)
    return hasher.digest()


class _Hasher:
    """Takes a sample in for hftune.data.digest."""

    def __init__(self):
        self._sha = sha256()

    def add(self, name: str, data: Any) -> None:
        self._sha.update(data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data)

    def digest(self) -> bytes:
        return self._sha.digest()[:BYTES]


def _array_digests(array: np.ndarray) -> Iterator[bytes]:
    """Hash the rows of an array; of an array larger than ARRAY_BYTES, such as pixels on a disk, their beginnings and ends."""
    width = array.nbytes // max(len(array), 1)
    end = width if array.nbytes <= ARRAY_BYTES else ARRAY_BYTES // len(array) // 2
    each = max(1, 2**24 // max(width, 1))
    for first in range(0, len(array), each):
        rows = np.ascontiguousarray(array[first : first + each])
        content = rows.reshape(-1).view(np.uint8).data  # its slices are views, and cost less than an array's
        for start in range(0, len(rows) * width, width) if width else [0] * len(rows):
            row = content[start : start + width]
            yield _digest(row if end >= width else bytes(row[:end]) + row[-end:])


def _spans(values: np.ndarray, offsets: np.ndarray) -> Iterator[bytes]:
    """Hash consecutive pieces of an array: the numbers from ``offsets[k]`` up to ``offsets[k + 1]`` for each k."""
    content = np.ascontiguousarray(values).view(np.uint8).data  # its slices are views, and cost less than an array's
    for start, stop in pairwise((offsets.astype(np.int64) * values.itemsize).tolist()):
        yield _digest(content[start:stop])


def _table_digests(rows: datasets.Dataset) -> Iterator[bytes]:
    for batch in rows.with_format("arrow").iter(ROWS):
        yield from _joined({name: _column_digests(_in_one_piece(batch.column(name))) for name in batch.column_names})


def _in_one_piece(values: pa.ChunkedArray) -> pa.Array:
    return pa.concat_arrays(values.chunks) if len(values.chunks) > 1 else values.chunk(0)


def _column_digests(column: pa.Array) -> list[bytes]:
    """Hash each value of an Arrow array, but not what its buffers hold before, after and between them."""
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    if isinstance(column, pa.DictionaryArray):
        column = column.dictionary_decode()
    if column.null_count:
        present = iter(_column_digests(column.drop_null()))
        return [next(present) if is_valid else NULL for is_valid in column.is_valid().to_pylist()]
    if len(column) == 0:
        return []
    digests = next((digests for is_kind, digests in _KINDS if is_kind(column.type)), _value_digests)
    return digests(column)


def _value_digests(column: pa.Array) -> list[bytes]:
    """Hash values one by one: maps, unions, views."""
    return [_digest(repr(value).encode()) for value in column.to_pylist()]


def _number_digests(column: pa.Array) -> list[bytes]:
    data, width = _flat(column)
    return [_digest(data[start : start + width]) for start in range(0, len(data), width)]


def _text_digests(column: pa.Array) -> list[bytes]:
    wide = pa.types.is_large_string(column.type) or pa.types.is_large_binary(column.type)
    _, buffer, data = column.buffers()
    offsets = np.frombuffer(buffer, np.int64 if wide else np.int32)[column.offset : column.offset + len(column) + 1]
    return [_digest(memoryview(data or b"")[start:stop]) for start, stop in pairwise(offsets.tolist())]


def _list_digests(column: pa.Array) -> list[bytes]:
    items, width = _flat(column.flatten())
    lengths = pc.list_value_length(column).to_numpy().astype(np.int64)
    return [_digest(items[start:stop]) for start, stop in pairwise((np.cumsum([0, *lengths]) * width).tolist())]


def _struct_digests(column: pa.Array) -> list[bytes]:
    names = [field.name for field in column.type]
    if set(names) == {"bytes", "path"}:  # as datasets stores images and audio: their path only tells where they were packed
        with ThreadPoolExecutor(8) as threads:
            return [*threads.map(lambda stored: _digest(file_content(stored)), column.to_pylist())]
    return [*_joined({name: _column_digests(pc.struct_field(column, [index])) for index, name in enumerate(names)})]


def _flat(column: pa.Array) -> tuple[memoryview, int]:
    """Return the values of an array, all in one width, and the width in bytes: numbers as they are, anything else hashed."""
    if pa.types.is_boolean(column.type) and not column.null_count:  # bits, eight to a byte
        column = column.cast(pa.uint8())
    if not _is_number(column.type) or column.null_count or len(column) == 0:
        return memoryview(b"".join(_column_digests(column))), BYTES
    width = column.type.bit_width // 8
    return memoryview(column.buffers()[1])[column.offset * width : (column.offset + len(column)) * width], width


def _is_number(kind: pa.DataType) -> bool:
    is_wide = not pa.types.is_boolean(kind) and not pa.types.is_null(kind)
    return is_wide and (pa.types.is_primitive(kind) or pa.types.is_decimal(kind) or pa.types.is_fixed_size_binary(kind))


def _is_text(kind: pa.DataType) -> bool:
    return (
        pa.types.is_string(kind) or pa.types.is_binary(kind) or pa.types.is_large_string(kind) or pa.types.is_large_binary(kind)
    )


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


_KINDS: list[tuple[Callable[[pa.DataType], bool], Callable[[pa.Array], list[bytes]]]] = [
    (lambda kind: _is_number(kind) or pa.types.is_boolean(kind), _number_digests),
    (_is_text, _text_digests),
    (_is_list, _list_digests),
    (lambda kind: pa.types.is_struct(kind) and kind.num_fields > 0, _struct_digests),
]

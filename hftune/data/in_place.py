"""Rows of jsonl and parquet files, read where the files are, when they are asked for. Knows no task.

A jsonl file is looked through once, for where its lines begin, about every PIECE bytes. A parquet file says in its footer where
its row groups are. So the number of rows is known, and where each of them is, before any is read.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol

import datasets
import numpy as np
import pyarrow as pa
from datasets.fingerprint import Hasher
from pyarrow import ipc, json, parquet

from hftune.batch_plan import spread
from hftune.data.cache import cached_arrays, saying
from hftune.data.fetching import Blocks, File, SourceError, block_name, find_files
from hftune.data.files import PACKED
from hftune.errors import DataError

PIECE = 2**18
"""Bytes of a jsonl file that are read for one of its lines, about."""
REMOTE_PIECE = 2**22
"""Of one that is elsewhere: a request takes about as long as some megabytes."""
LOOKED_AT = 2**23
"""Bytes that are looked through together, a multiple of both."""
SEEN = 16
"""Pieces of a jsonl file by which the types of its columns are known."""
AT_ONCE = 2**24
"""Bytes in memory at a time, about, if all rows are read."""
Block = tuple[str, Callable[[], Any], int]
"""Name of a part, how to fetch it, and its bytes."""


class NotByRows(Exception):
    """A file in which the places of rows cannot be told: it must be converted as a whole."""


class Reader(Protocol):
    """The rows of one file."""

    starts: np.ndarray
    """First row of each part that is read as one, and the number of all rows."""
    size: int
    """In bytes, not compressed."""
    schema: pa.Schema
    key: Any
    """What the rows depend on."""
    is_fetched: bool
    """Whether parts are fetched before they are read."""

    def read(self, rows_N: np.ndarray, columns: pa.Schema) -> pa.Table:
        """Return some columns of some rows, which are ascending and different."""

    def block(self, part: int, names: Sequence[str]) -> Block:
        """Return how to fetch a part."""


class Lines:
    """The rows of a jsonl file."""

    def __init__(self, file: File, blocks: Blocks):
        self.file, self.blocks, self.size = file, blocks, file.size
        self.piece, self.is_fetched = PIECE if file.is_local else REMOTE_PIECE, not file.is_local
        self.key = ["lines", self.piece, *file.key]
        found = cached_arrays(self.key, self._look_through)
        self.starts, self._offsets = found["starts"], found["offsets"]
        if len(self.starts) < 2:
            raise NotByRows
        self.schema = ipc.read_schema(pa.py_buffer(found["schema"].tobytes()))

    def read(self, rows_N: np.ndarray, columns: pa.Schema) -> pa.Table:
        """Return some columns of some rows.

        Raises:
            DataError: a line is not like the others; the message names it.
        """
        lines, pieces_N = [], np.searchsorted(self.starts, rows_N, side="right") - 1
        for piece in np.unique(pieces_N).tolist():
            data, places = self._bytes(piece), (rows_N[pieces_N == piece] - self.starts[piece]).tolist()
            if len(places) == self.starts[piece + 1] - self.starts[piece]:
                lines.append(data)
                continue
            ends = np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n")).tolist()
            lines += [data[ends[place - 1] + 1 if place else 0 : ends[place]] for place in places]
        try:
            table = _parse(b"\n".join(lines), columns)
            problem = "" if len(table) == len(rows_N) else "it is no JSON object on a line of its own"
        except pa.ArrowException as error:
            problem = str(error).removeprefix("JSON parse error: ").partition(" in row ")[0].rstrip(".")
        if not problem:
            return table
        if len(rows_N) == 1:
            raise DataError(f"Row {rows_N[0]} of {self.file} cannot be read: {problem}. Correct this line, or remove it.")
        half = len(rows_N) // 2
        return pa.concat_tables([self.read(rows_N[:half], columns), self.read(rows_N[half:], columns)])

    def block(self, part: int, names: Sequence[str] = ()) -> Block:
        start, stop = self._offsets[part : part + 2].tolist()
        return block_name(self.key, start), partial(self.file.read, start, stop), stop - start

    def _bytes(self, piece: int) -> bytes:
        """Return whole lines, each with its end."""
        name, fetch, _ = self.block(piece)
        if self.is_fetched:
            with self.blocks.get(name, fetch) as file:
                data = file.read()
        else:
            data = fetch()
        return data if data.endswith(b"\n") else data + b"\n"

    def _look_through(self) -> dict[str, np.ndarray]:
        """Return the first row and byte of each piece, and the types of the columns; nothing if rows are not lines."""
        counts, ends, say = [], [], saying(f"Counting the rows of {self.file}", self.size, "bytes")
        with ThreadPoolExecutor(4) as pool:
            looked = pool.map(self._lines_of, range(0, self.size, LOOKED_AT))
            for place, (count_P, end_P, first, is_odd) in enumerate(looked):
                # Such as an empty line at the seam
                if is_odd or (first < 2 and (place == 0 or ends[-1].max() == place * LOOKED_AT)):
                    pool.shutdown(cancel_futures=True)
                    return {name: np.zeros(0, np.int64) for name in ("starts", "offsets", "schema")}
                counts.append(count_P)
                ends.append(end_P)
                say(place * LOOKED_AT)
        counts_P, ends_P = np.concatenate(counts), np.concatenate(ends)
        last = int(ends_P.max())
        if self.file.read(last, self.size).strip():  # a last line without an end
            counts_P, ends_P = np.append(counts_P, 1), np.append(ends_P, self.size)
        counts_P, ends_P = counts_P[counts_P > 0], ends_P[counts_P > 0]
        found = {"starts": np.cumsum([0, *counts_P.tolist()]), "offsets": np.array([0, *ends_P.tolist()])}
        self.starts, self._offsets = found["starts"], found["offsets"]
        try:
            pieces = spread(len(counts_P), SEEN, run=1)
            seen = [_parse(self._bytes(piece), None) for piece in pieces.tolist()]
            schema = pa.unify_schemas([table.schema for table in seen], promote_options="permissive")
            are_lines = [*map(len, seen)] == counts_P[pieces].tolist()
        except pa.ArrowException:  # such as a file that is one list
            are_lines = False
        if not are_lines:
            return {name: np.zeros(0, np.int64) for name in ("starts", "offsets", "schema")}
        return {**found, "schema": np.frombuffer(schema.serialize(), np.uint8)}

    def _lines_of(self, start: int) -> tuple[np.ndarray, np.ndarray, int, bool]:
        """Return how many lines end in each piece, where the last and the first of all do, and whether one between is blank."""
        stop = min(start + LOOKED_AT, self.size)
        ends = np.flatnonzero(np.frombuffer(self.file.read(start, stop), np.uint8) == ord("\n"))
        count_P = np.bincount(ends // self.piece, minlength=-(-(stop - start) // self.piece))
        last_P = np.append(ends, 0)[np.cumsum(count_P) - 1]
        first, is_odd = int(ends[0]) if len(ends) else stop, bool((np.diff(ends) < 3).any())
        return count_P, np.where(count_P > 0, start + last_P + 1, 0), first, is_odd


class RowGroups:
    """The rows of a parquet file."""

    is_fetched = True

    def __init__(self, file: File, blocks: Blocks):
        self.file, self.blocks, self.key = file, blocks, ["row groups", *file.key]
        self._footer: parquet.FileMetaData | None = None
        found = cached_arrays(self.key, self._read_footer)
        self.starts, self._sizes = found["starts"], found["sizes"]
        self.size = int(self._sizes.sum())
        self.schema = ipc.read_schema(pa.py_buffer(found["schema"].tobytes()))

    def read(self, rows_N: np.ndarray, columns: pa.Schema) -> pa.Table:
        batches, groups_N = [], np.searchsorted(self.starts, rows_N, side="right") - 1
        for group in np.unique(groups_N).tolist():
            with self.blocks.get(*self.block(group, columns.names)[:2]) as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            start = self.starts[group]
            for batch in ipc.open_file(pa.py_buffer(mapped)).read_all().to_batches():  # one for each 2 GiB of a column
                stop = start + len(batch)
                batches.append(batch.take(rows_N[(start <= rows_N) & (rows_N < stop)] - start))
                start = stop
        return pa.Table.from_batches(batches)

    def block(self, part: int, names: Sequence[str]) -> Block:
        fetch = partial(self._read_group, part, [*names])
        return block_name(self.key, part, [*names]), fetch, int(self._sizes[part])

    def _read_group(self, group: int, names: list[str]) -> pa.Buffer:
        with self._opened() as file:
            table = file.read_row_group(group, columns=names, use_threads=False).select(names)
        sink = pa.BufferOutputStream()
        with ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table.combine_chunks())
        return sink.getvalue()

    @contextmanager
    def _opened(self) -> Iterator[parquet.ParquetFile]:
        try:
            with self.file.open() as opened:
                # In this thread alone: threads of Arrow that wait for Python keep the process from ending.
                file = parquet.ParquetFile(opened, metadata=self._footer, pre_buffer=False)
                self._footer = file.metadata
                yield file
        except pa.ArrowException as error:
            raise SourceError(f"{self.file} cannot be read as parquet: {error}.") from error

    def _read_footer(self) -> dict[str, np.ndarray]:
        with self._opened() as file:
            groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
            return {
                "starts": np.cumsum([0, *(group.num_rows for group in groups)]),
                "sizes": np.array([group.total_byte_size for group in groups], np.int64),
                "schema": np.frombuffer(file.schema_arrow.serialize(), np.uint8),
            }


class Converted:
    """Rows of a data set that has been converted, beside those of files."""

    is_fetched = False

    def __init__(self, rows: datasets.Dataset):
        self.rows, self.starts, self.size = rows, np.array([0, len(rows)]), rows.data.nbytes
        self.schema, self.key = rows.features.arrow_schema, rows._fingerprint

    def read(self, rows_N: np.ndarray, columns: pa.Schema) -> pa.Table:
        return self.rows.select_columns(columns.names).with_format("arrow").select(rows_N)[:]

    def block(self, part: int, names: Sequence[str]) -> Block:
        raise NotImplementedError


class Extent(NamedTuple):
    num_rows: int
    nbytes: int


class RowsInPlace:
    """Rows of files, with what tasks use of a ``datasets.Dataset``.

    Args:
        readers: the files in their order, each with what its columns are called here.
        features: of the columns, by the names that they have here.
        numbers: the rows that are used; None for all.
    """

    def __init__(
        self,
        readers: Sequence[tuple[Reader, Mapping[str, str]]],
        features: datasets.Features,
        numbers: np.ndarray | None = None,
    ):
        self.readers, self.features, self.numbers = readers, features, numbers
        self._ends = np.cumsum([reader.starts[-1] for reader, _ in readers])

    def __len__(self) -> int:
        return int(self._ends[-1]) if self.numbers is None else len(self.numbers)

    @property
    def column_names(self) -> list[str]:
        return list(self.features)

    @property
    def data(self) -> Extent:
        """All rows of the files, and the bytes of those that are used."""
        count, size = int(self._ends[-1]), sum(reader.size for reader, _ in self.readers)
        return Extent(count, size * len(self) // max(count, 1))

    @cached_property
    def _fingerprint(self) -> str:
        files = [[reader.key, *sorted(names.items())] for reader, names in self.readers]
        return Hasher.hash([files, str(self.features), None if self.numbers is None else self.numbers.tobytes()])

    @property
    def versions(self) -> list[str]:
        """What is known of the content of each file without reading it, and alike on all machines."""
        files = [reader.file for reader, _ in self.readers if isinstance(reader, Lines | RowGroups)]
        return [f"{file.size} {'' if file.is_local else file.version}" for file in files]

    # Rows and columns

    def select(self, indices: Iterable[int]) -> RowsInPlace:
        """Return some of the rows, which are not read yet."""
        places = np.fromiter(indices, np.int64) if not isinstance(indices, np.ndarray) else indices
        return RowsInPlace(self.readers, self.features, places if self.numbers is None else self.numbers[places])

    def select_columns(self, columns: Sequence[str]) -> RowsInPlace:
        return self._named({column: column for column in columns})

    def remove_columns(self, columns: Sequence[str]) -> RowsInPlace:
        return self.select_columns([column for column in self.features if column not in columns])

    def rename_columns(self, names: Mapping[str, str]) -> RowsInPlace:
        return self._named({names.get(column, column): column for column in self.features})

    def cast(self, features: datasets.Features) -> RowsInPlace:
        return RowsInPlace(self.readers, features, self.numbers)

    def _named(self, names: Mapping[str, str]) -> RowsInPlace:
        """Return columns under new names: the old one by the new one."""
        readers = [(reader, {new: theirs[old] for new, old in names.items()}) for reader, theirs in self.readers]
        features = datasets.Features({new: self.features[old] for new, old in names.items()})
        return RowsInPlace(readers, features, self.numbers)

    # Reading

    def __getitem__(self, key: Any) -> Any:
        """Return a column, whose values are read when they are asked for; or what is in some rows, by column."""
        if isinstance(key, str):
            return Column(self.select_columns([key]))
        if isinstance(key, (int, np.integer)):
            return self.select([range(len(self))[key]]).read()[0]
        return self.select(range(len(self))[key] if isinstance(key, slice) else key).read()[:]

    def read(self) -> ReadRows:
        """Return all rows in memory."""
        numbers_N = np.arange(len(self)) if self.numbers is None else self.numbers
        return ReadRows(self._table(numbers_N), self.features, numbers_N, self._fingerprint)

    def with_format(self, kind: str) -> RowsInPlace:
        """Return the rows as they are: ``iter`` returns them as Arrow does."""
        return self

    def iter(self, size: int) -> Iterator[pa.Table]:
        """Read all rows, and return so many at a time."""
        most = max(1, self.at_once // size) * size
        for start in range(0, len(self), most):
            stop = min(start + most, len(self))
            self.expect(np.arange(start, min(stop + most, len(self))))
            table = self._table(np.arange(start, stop) if self.numbers is None else self.numbers[start:stop])
            yield from (table.slice(first, size) for first in range(0, stop - start, size))

    @property
    def at_once(self) -> int:
        """Rows that are read together if all are."""
        return max(1, len(self) * AT_ONCE // max(self.data.nbytes, 1))

    def _table(self, numbers_N: np.ndarray) -> pa.Table:
        kind = self.features.arrow_schema
        unique, inverse = np.unique(numbers_N, return_inverse=True)
        places, tables = np.searchsorted(self._ends, unique, side="right"), []
        for place in np.unique(places).tolist():
            (reader, names), start = self.readers[place], self._ends[place] - self.readers[place][0].starts[-1]
            theirs = pa.schema([kind.field(ours).with_name(names[ours]) for ours in kind.names])
            read = reader.read(unique[places == place] - start, theirs).rename_columns(kind.names)
            try:
                tables.append(read.cast(kind))
            except pa.ArrowException as error:
                raise DataError(f"Rows of {reader.key[1]} do not fit to the others: {error}. Convert the file.") from error
        table = pa.concat_tables(tables) if tables else kind.empty_table()
        return table if np.array_equal(inverse, np.arange(len(table))) else table.take(inverse)

    # What is needed next

    def groups(self, least: int) -> list[int]:
        """Return the numbers of rows that are used of consecutive parts, joined to groups of at least some rows."""
        firsts = self._parts if self.numbers is None else np.searchsorted(self.numbers, self._parts)
        groups = [0]
        for count in np.diff(firsts).tolist():
            if groups[-1] and groups[-1] >= least and count:
                groups.append(0)
            groups[-1] += count
        return groups

    def expect(self, rows_N: np.ndarray, kept: Callable[[list[int]], Iterable[int]] = lambda rows: ()) -> None:
        """Fetch what some rows are read from, in their order, before they are read.

        Args:
            kept: returns which of some rows need not be read any more: if the first of a part, then none of it, most likely.
        """
        if (blocks := self.blocks) is None:
            return
        parts = self.part_of(rows_N)
        first = np.sort(np.unique(parts, return_index=True)[1])
        first = first[~np.isin(rows_N[first], [*kept(rows_N[first].tolist())])]
        wanted = [self._block(part) for part in parts[first].tolist()]
        blocks.expect(block for block in wanted if block is not None)

    @property
    def blocks(self) -> Blocks | None:
        """Where parts are kept; None if nothing is fetched."""
        return next((reader.blocks for reader, _ in self.readers if reader.is_fetched), None)  # type: ignore[attr-defined]

    @cached_property
    def _parts(self) -> np.ndarray:
        """The first row of each part of each file, and the number of all rows."""
        starts = self._ends - [reader.starts[-1] for reader, _ in self.readers]
        begins = [reader.starts[:-1] + start for (reader, _), start in zip(self.readers, starts, strict=True)]
        return np.concatenate([*begins, self._ends[-1:]])

    def part_of(self, indices: np.ndarray) -> np.ndarray:
        """Return the number of the part that each row is read with."""
        return np.searchsorted(self._parts, indices if self.numbers is None else self.numbers[indices], side="right") - 1

    def _block(self, part: int) -> Block | None:
        place = int(np.searchsorted(self._ends, self._parts[part], side="right"))
        reader, names = self.readers[place]
        if not reader.is_fetched:
            return None
        first = part - int(np.searchsorted(self._parts, self._ends[place] - reader.starts[-1]))
        return reader.block(first, [*names.values()])


class ReadRows(datasets.Dataset):
    """Rows that have been read, which know their numbers."""

    def __init__(self, table: pa.Table, features: datasets.Features, numbers: np.ndarray, fingerprint: str):
        info = datasets.DatasetInfo(features=features)
        super().__init__(datasets.table.InMemoryTable(table), info=info, fingerprint=fingerprint)
        self.numbers = numbers


class Column(Sequence):
    """The values of a column, read when they are asked for."""

    def __init__(self, rows: RowsInPlace):
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Any]:
        done, say = 0, saying(f"Reading {self.rows.column_names[0]}", len(self))
        for table in self.rows.iter(self.rows.at_once):
            yield from table.column(0).to_pylist()
            say(done := done + len(table))

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, int):
            return next(iter(self.rows[key].values()))
        return [*Column(self.rows.select(range(len(self))[key]) if key != slice(None) else self.rows)]


READERS: Mapping[str, Callable[[File, Blocks], Reader]] = {"json": Lines, "parquet": RowGroups}
"""How the rows of a format are read in place."""


def open_in_place(kind: str, patterns: Sequence[str], options: Mapping[str, Any], least: float, blocks: Blocks) -> Any:
    """Find the rows of files.

    Args:
        kind: format of the files.
        least: in bytes. Files that are smaller together are not read in place.

    Returns:
        ``RowsInPlace``; None if the files are small, or if where their rows are cannot be told.

    Raises:
        SourceError: a file is not there, or cannot be read.
        DataError: the files have different columns, or one of a type that datasets does not know.
    """
    if kind not in READERS or any("::" in pattern for pattern in patterns):
        return None
    found = find_files(patterns, options)
    if any(re.split("[?#]", address.lower())[0].endswith(PACKED) for address in found):
        return None
    files = [file for address in found if (file := File.found(address, options)).size]
    if sum(file.size for file in files) < least or not all(file.has_parts for file in files):
        return None
    try:
        opened = [(str(file), READERS[kind](file, blocks)) for file in files]
    except NotByRows:
        return None
    readers = [reader for _, reader in opened if reader.starts[-1]]
    if not readers:
        return None
    schema = _same_columns(kind, [(name, reader.schema) for name, reader in opened if reader.starts[-1]])
    try:
        features = datasets.Features.from_arrow_schema(schema)
    except ValueError as error:  # such as Spark's maps, which datasets cannot convert either
        raise DataError(
            f"{opened[0][0]} cannot be read: {str(error).rstrip('.')}. Leave this column out, or convert it."
        ) from error
    return RowsInPlace([(reader, {name: name for name in features}) for reader in readers], features)


def joined(rows: Sequence[datasets.Dataset | RowsInPlace]) -> datasets.Dataset | RowsInPlace:
    """Return the rows of several data sets that have the same features, one after the other."""
    if all(isinstance(own, datasets.Dataset) for own in rows):
        return datasets.concatenate_datasets(list(rows))
    readers: list[tuple[Reader, Mapping[str, str]]] = []
    for own in rows:
        if isinstance(own, datasets.Dataset):
            readers.append((Converted(own), {name: name for name in own.features}))
        else:
            readers += own.readers
    return RowsInPlace(readers, rows[0].features)


def _same_columns(kind: str, schemas: Sequence[tuple[str, pa.Schema]]) -> pa.Schema:
    """Return the columns of all files; jsonl files may leave out those that are missing in all rows."""
    (first, known), *others = schemas
    for file, schema in others:
        if kind == "parquet" and (missing := sorted({*known.names} ^ {*schema.names})):
            has, lacks = (file, first) if missing[0] in schema.names else (first, file)
            raise DataError(f"{lacks} has no column {missing[0]!r}, which {has} has. Files of one split need the same columns.")
        try:
            known = pa.unify_schemas([known, schema], promote_options="permissive")
        except pa.ArrowException as error:
            raise DataError(f"The columns of {file} and {first} do not fit together: {error}. Convert one of them.") from error
    return known


def _parse(data: bytes, schema: pa.Schema | None) -> pa.Table:
    """Parse lines; with the columns of a schema, and only these, in its types.

    Raises:
        pa.ArrowException: they are no JSON, no UTF-8, or cannot be of these types.
    """
    others = {} if schema is None else {"explicit_schema": schema, "unexpected_field_behavior": "ignore"}
    options = json.ReadOptions(use_threads=False, block_size=len(data) + 1)
    try:
        table = json.read_json(pa.BufferReader(data), read_options=options, parse_options=json.ParseOptions(**others))
    except pa.ArrowInvalid:
        if schema is None:
            raise
        table = json.read_json(pa.BufferReader(data), read_options=options)  # 1.0 may be among whole numbers
        for name in {*schema.names} - {*table.column_names}:
            table = table.append_column(name, pa.nulls(len(table)))
        if any(
            pa.types.is_string(field.type) and not pa.types.is_string(table.schema.field(field.name).type) for field in schema
        ):
            raise  # a number is no text
        table = table.select(schema.names).cast(schema)
    table.validate(full=True)  # that texts are UTF-8
    return table if schema is None else table.select(schema.names)

"""Tables of raw inputs: read without changing a cell, written in any of the formats. Independent of tasks and models."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import file_digest, sha256
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from hftune.data.files import FORMAT_OF, format_of, list_images, nearest_file
from hftune.errors import DataError

if TYPE_CHECKING:
    import datasets
    import pyarrow

WRITTEN = {".csv": "csv", ".tsv": "tsv", ".jsonl": "jsonl", ".parquet": "parquet"}
"""Format to write by suffix."""
SOURCES = f"file ({', '.join(FORMAT_OF)}), folder of images or recordings, or data set on the Hub (owner/name[:split])"
"""What ``read_table`` reads, in words."""
CHUNK = 1000
"""Rows in memory at a time."""


@dataclass
class Table:
    """Rows from a file, a folder of images or the Hub."""

    name: str
    """As it was given."""
    rows: datasets.Dataset
    digest: str
    """Changes if the rows do. The contents of images that are named by their paths do not count."""
    folder: Path | None = None
    """To which the paths in a file are relative."""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def columns(self) -> list[str]:
        return list(self.rows.column_names)


def read_table(name: str, config: str | None = None, audio: bool = False) -> Table:
    """Read a table: a file, a folder of images or recordings, or a data set on the Hub as ``owner/name[:split]``, by default
    its test split.

    Args:
        config: configuration of a data set on the Hub that has several.
        audio: whether a folder is one of recordings.

    Raises:
        DataError: it does not exist, cannot be read or has no rows.
    """
    if "://" in name:
        from hftune.data.fetching import File, downloaded

        path = Path(downloaded(File.found(name, {})))
    else:
        path = Path(name).expanduser()
    if path.is_dir():
        import datasets

        try:
            images = list_images(path, f"--data {name}", "recording" if audio else "image")
        except DataError as error:
            raise DataError(f"{error} For a table, name its file.") from error
        files = [(str(file.relative_to(path)), file.stat()) for file in images]
        stamps = [[relative, state.st_size, state.st_mtime_ns] for relative, state in files]
        rows = datasets.Dataset.from_dict({"audio" if audio else "image": [relative for relative, _ in files]})
        table = Table(name, rows, sha256(json.dumps(stamps).encode()).hexdigest(), path)
    elif path.is_file():
        table = _from_file(name, path)
    elif re.fullmatch(r"[\w.-]+/[\w.-]+(:.+)?", name) and format_of(name) is None and not name.startswith("."):
        table = _from_hub(name, config)
    else:
        raise DataError(f"--data {name}: there is no such file.{nearest_file(path)}")
    if len(table) == 0:
        raise DataError(f"--data {name} has no rows.")
    return table


def _from_file(name: str, path: Path) -> Table:
    from hftune.data.rows import load_files, undecoded

    kind = format_of(path.name)
    if kind is None:
        raise DataError(f"--data {name}: its name does not end in one of {', '.join(FORMAT_OF)}.")
    try:
        rows = undecoded(load_files(kind, f"--data {name}", [str(path)], "test", as_written=True))
    except DataError as error:
        raise DataError(str(error).partition(" Name files:")[0]) from error
    if kind in ("csv", "tsv"):
        rows = _with_numbers(rows)
    elif kind == "json":
        rows = _with_dates_as_written(rows, path)
    with path.open("rb") as file:
        return Table(name, rows, file_digest(file, "sha256").hexdigest(), path.parent)


def _with_dates_as_written(rows: datasets.Dataset, path: Path) -> datasets.Dataset:
    """Give back the texts of which pyarrow has made moments, without a zone: 2024-05-01 or 2024-05-01T10:00:00Z."""
    import fsspec

    moments = [name for name, kind in rows.features.items() if "timestamp" in str(kind)]
    if not moments:
        return rows
    with fsspec.open(str(path), "rt", compression="infer", encoding="utf-8-sig") as file:
        text = file.read()
    decoder, place, values = json.JSONDecoder(strict=False), 0, []
    while rest := re.compile(r"\S").search(text, place):  # several values, or one that is a list of them
        value, place = decoder.raw_decode(text, rest.start())
        values += value if isinstance(value, list) else [value]
    columns, read = rows.column_names, {name: f"{name} as it was read" for name in moments}
    rows = rows.rename_columns(read)
    for name in moments:
        rows = rows.add_column(name, [value.get(name) for value in values])
    return rows.select_columns(columns)


def _with_numbers(rows: datasets.Dataset) -> datasets.Dataset:
    """Make whole numbers of the columns that hold nothing else, written as they would be read, which 007 would not be."""
    import datasets
    import pyarrow.compute as pc

    for name in rows.column_names:
        cells = rows.data.column(name).cast("string").drop_null()
        if len(cells) and pc.all(pc.match_substring_regex(cells, r"^(-?[1-9]\d{0,17}|0)$")).as_py():
            rows = rows.cast_column(name, datasets.Value("int64"))
    return rows


def _from_hub(name: str, config: str | None) -> Table:
    from hftune.data.rows import load_split
    from hftune.data.sources import Source

    dataset, _, split = name.partition(":")
    source = Source(dataset, config=config, key="--data", instead="--data FILE")
    commit = source.commit
    try:
        rows = load_split(source, "test", split or "test")
    except DataError as error:
        raise DataError(f"{error} Name a split: --data {dataset}:SPLIT." if not split else str(error)) from error
    return Table(name, rows, f"{dataset}@{commit}:{split or 'test'}:{config}")


def writable(kind: Any) -> bool:
    """Return whether a column with this feature can be written into a table: not images and other media."""
    return type(kind).__name__ not in ("Image", "Audio", "Video", "Pdf") and getattr(kind, "dtype", None) != "binary"


def write_table(
    path: Path, kind: str, columns: Sequence[str], rows: Iterable[Mapping[str, Any]], features: Mapping[str, Any] | None = None
) -> None:
    """Write rows into a file; what a row lacks is missing there.

    Args:
        kind: one of the values of WRITTEN.
        features: of those columns that are of a data set, to write their values as what they were there.
    """
    if kind == "parquet":
        import pyarrow
        from pyarrow import parquet

        iterator, tables = iter(rows), []  # as arrays, which take far less memory than Python's values
        while chunk := list(islice(iterator, CHUNK)):
            found = {name: _array([row.get(name) for row in chunk], (features or {}).get(name)) for name in columns}
            tables.append(pyarrow.table(found))
        parquet.write_table(pyarrow.concat_tables(tables, promote_options="permissive"), path)
    elif kind == "jsonl":
        with path.open("w", encoding="utf-8") as file:
            file.writelines(_json({name: row.get(name) for name in columns}) + "\n" for row in rows)
    else:
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(_UnixLines(file), delimiter="\t" if kind == "tsv" else ",")
            writer.writerow(columns)
            writer.writerows([_cell(row.get(name)) for name in columns] for row in rows)


@dataclass
class _UnixLines:
    """Ends lines in \\n alone. The writer must not: it quotes cells with characters of its line end only, so not a bare \\r."""

    file: TextIO

    def write(self, line: str) -> int:
        return self.file.write(f"{line.removesuffix(csv.excel.lineterminator)}\n")


def _cell(value: Any) -> Any:
    """Return a value as a cell of a csv file: lists and mappings as JSON, nothing as an empty cell."""
    return _json(value) if isinstance(value, (list, tuple, dict, bool)) else value


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _array(values: list[Any], feature: Any) -> pyarrow.Array:
    """Return values as an array: of whole numbers, those of the feature; of several kinds, as a json file may have, JSON."""
    import pyarrow

    if "Json(" in str(feature):
        return pyarrow.array([None if value is None else _json(value) for value in values], pyarrow.string())
    is_whole = re.match("u?int", str(getattr(feature, "dtype", None))) is not None
    return pyarrow.array(values, feature.pa_type if is_whole else None)

"""The rows of a data set: loaded from the Hub, files or a Python function, and checked. Independent of tasks and tokenizers."""

from __future__ import annotations

import csv
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
import fsspec
import numpy as np
import pandas
import pyarrow as pa
import pyarrow.compute as pc
from datasets.exceptions import DatasetGenerationError
from huggingface_hub import is_offline_mode
from huggingface_hub.utils import httpx

from hftune.config.importing import import_named
from hftune.data import idx
from hftune.data.cache import cached_arrays, cached_value
from hftune.data.cells import excel_file, query_file
from hftune.data.digest import MIN_CACHED_ROWS, content_digest, entry_hashes
from hftune.data.fetching import File, downloaded, find_files
from hftune.data.files import NOT_UTF8, SURPLUS, local_files
from hftune.data.hub import failure, fetch
from hftune.data.in_place import ReadRows, RowsInPlace
from hftune.data.labels import read_labels
from hftune.data.sources import INSTEAD, NO_EVAL_DATA, Source
from hftune.data.splits import Split
from hftune.errors import DataError, first_few

READER_OPTIONS: dict[str, dict[str, Any]] = {
    "csv": {"keep_default_na": False, "na_values": [""], "index_col": False},
    "text": {"encoding": "utf-8-sig"},
}
"""Options by file format. csv: only empty cells are missing values; by default, NA, null and None would be, too. And if lines
have one cell more than the header, the first column would not be read at all. text: a byte order mark is no character."""


def load_split(source: Source, split: str, source_split: str = "") -> datasets.Dataset:
    """Load the rows of one split of a data set.

    Args:
        split: what it is used for: "train", "eval", "test", or "eval/NAME" for one of ``eval.sets``. Files are named by it, and
            a function is called with it, or with ``source_split`` for one of ``eval.sets``.
        source_split: name of the split on the Hub or in a folder, such as "train", "test" or "train[:10%]".

    Raises:
        DataError: the split cannot be loaded or has no rows.
    """
    try:
        if source.kind == "files":
            kind, named = source.format_of(split), f"{source.files_key(split)}={source.files[split]}"
            name = split.partition("/")[0]  # as datasets names splits
            rows = load_files(kind, named, source.paths(split), name, options=source.options, sheet=source.sheet)
        elif source.kind == "database":
            key = source.query_key(split)
            rows = load_files("parquet", key, [query_file(key, str(source.dataset), source.queries[split])], split)
        elif source.kind == "function":
            rows = _from_function(source.dataset, source_split if split.startswith("eval/") else split)
        elif source.kind == "hub":
            rows = _from_hub(source, source_split)
        elif source.kind == "idx":
            rows = idx.load(Path(source.folder or "").expanduser(), source_split)
        elif source.folder:
            named, folder = f"{source.key}.data_dir={source.folder}", str(Path(source.folder).expanduser())
            rows = load(source.dataset, named, source.instead, split=source_split, data_dir=folder)
        else:
            rows = _from_folder(source, source_split)
    except DataError as error:
        if split == "train" or "nknown split" not in str(error):
            raise
        if split.startswith("eval/"):
            raise DataError(f"{error} Set eval.sets.{split[5:]} to one of them.") from error
        instead = NO_EVAL_DATA if split == "eval" else "or to null"
        raise DataError(f"{error} Set task.{split}_split to one of them, {instead}.") from error
    if len(rows) == 0:
        files = f" ({source.files[split]})" if source.files else ""
        raise DataError(f"The {split} split{f' of {source.dataset}' if source.dataset else ''} has no rows{files}.")
    return undecoded(rows)


def undecoded(rows: datasets.Dataset) -> datasets.Dataset:
    """Return rows whose recordings are files: datasets decodes them by torchcodec, hftune.data.audio by soundfile."""
    if not isinstance(rows, RowsInPlace):
        for name in [name for name, kind in rows.features.items() if isinstance(kind, datasets.Audio) and kind.decode]:
            rows = rows.cast_column(name, datasets.Audio(decode=False))
    return rows


class AudioPaths(datasets.Audio):
    """Audio of a folder, without torchcodec, which datasets (5.2) asks for even if it only notes the paths."""

    def encode_example(self, value: Any) -> Any:
        return {"bytes": None, "path": value} if isinstance(value, str) else value


def prepared(builder: datasets.DatasetBuilder, split: str) -> datasets.Dataset:
    """Prepare a data set, unless it is in the cache, and return a split of it."""
    if getattr(builder, "BASE_FEATURE", None) is datasets.Audio:
        builder.BASE_FEATURE = AudioPaths
    builder.download_and_prepare()
    return builder.as_dataset(split=split)


def take(
    rows: datasets.Dataset, split: Split | None, label_column: str | None = None, sizes: Sequence[int] | None = None
) -> datasets.Dataset:
    """Return the rows that a split uses, in their original order; all of them if ``split`` is None.

    Args:
        label_column: column of the labels, to hold out rows of each class.
        sizes: rows of each data set, if there are several.

    Raises:
        DataError: see ``split_off``; or the column does not hold labels.
    """
    if split is None or not (split.holds_out or (split.count is not None and split.count < len(rows))):
        return rows

    def row_of(index: int) -> int:
        return row_numbers(rows, [index])[0]

    by_class = split.holds_out and label_column is not None
    labels = read_labels(rows, label_column, "train", row_of) if by_class else None
    indices = split.indices(len(rows), labels, row_of, sizes)
    if len(indices) == len(rows):
        return rows
    return select(rows, indices)


def distinct(rows: datasets.Dataset, columns: Sequence[str]) -> np.ndarray:
    """Return the indices of the rows that equal no earlier one in these columns, ascending. Reads all rows."""
    read = rows.select_columns([*dict.fromkeys(columns)])

    def find() -> dict[str, np.ndarray]:
        hashes = entry_hashes(read)
        return {"indices": np.sort(np.unique(hashes.view(f"V{hashes.shape[1]}")[:, 0], return_index=True)[1])}

    return find()["indices"] if len(rows) < MIN_CACHED_ROWS else cached_arrays(["distinct", read._fingerprint], find)["indices"]


def select(rows: datasets.Dataset, indices: Sequence[int] | np.ndarray) -> datasets.Dataset:
    """Return some rows, whose numbers ``row_numbers`` knows."""
    selected = rows.select(indices)
    if isinstance(selected, RowsInPlace):
        return selected
    # Of consecutive rows, datasets returns a slice that has forgotten their numbers.
    return rows._select_with_indices_mapping(indices) if selected._indices is None else selected


def _from_function(name: str, split: str) -> datasets.Dataset:
    module, _, attribute = name.partition(":")
    function = import_named("task.dataset", name, module, attribute)
    return datasets.Dataset.from_list(list(function(split)))


def _from_folder(source: Source, source_split: str) -> datasets.Dataset:
    folder = Path(str(source.dataset)).expanduser()
    if saved := [path for path in (folder, folder / source_split) if (path / "state.json").is_file()]:
        return datasets.load_from_disk(saved[0])  # what ``save_to_disk`` wrote
    if (folder / "dataset_dict.json").is_file():
        splits = ", ".join(sorted(path.parent.name for path in folder.glob("*/state.json")))
        raise DataError(f"{source.named}: unknown split {source_split!r}. It has {splits}.")
    return load(str(folder), source.named, source.instead, name=source.config, split=source_split)


def _swallowing_row(rows: datasets.Dataset, separator: str) -> int | None:
    """Return the first row of a csv file with a cell that holds as many separators as the lines in it would have as rows."""
    others = len(rows.column_names) - 1 if len(rows) else 0
    for cells in rows.data.columns if others else ():
        if pa.types.is_string(cells.type) or pa.types.is_large_string(cells.type):
            for row in pc.indices_nonzero(pc.fill_null(pc.match_substring(cells, "\n"), False)).to_pylist():
                text = cells[row].as_py()
                if text.count(separator) == others * text.count("\n"):
                    return row
    return None


def _has_stray_quotes(path: str) -> bool:
    """Return whether something follows the closing quote of a cell, where the next cell or line would have to begin."""
    limit = csv.field_size_limit(sys.maxsize)  # of a cell, 131,072 characters by default
    with fsspec.open(path, "rt", compression="infer", newline="", encoding="utf-8", errors="replace") as file:
        try:
            for _ in csv.reader(file, strict=True):
                pass
        except csv.Error:
            return True
        finally:
            csv.field_size_limit(limit)
    return False


def load_files(
    kind: str,
    source: str,
    files: Sequence[str],
    split: str,
    as_written: bool = False,
    options: Mapping[str, Any] | None = None,
    sheet: str | None = None,
) -> datasets.Dataset:
    """Call ``load`` for files of one of the formats of ``FORMAT_OF``.

    Args:
        as_written: of csv and tsv files, leave all cells the texts that they are.
        options: see ``Source.options``. Files that are elsewhere are downloaded.
        sheet: of Excel files; None: the first.

    Raises:
        DataError: they cannot be loaded, hold texts that are not UTF-8, or rows of a csv file have been lost.
    """
    if any(file.lower().partition("?")[0].endswith(".zst") for file in files) and find_spec("zstandard") is None:
        raise DataError(f"{source} is compressed with zstd. To read it: pip install zstandard")
    if any("://" in file and "::" not in file for file in files):
        files = [downloaded(File.found(file, options or {})) for file in find_files(files, options or {})]
    if kind == "excel":
        kind, files = "parquet", [excel_file(source, files, sheet)]
    if kind not in ("csv", "tsv"):
        rows = load(kind, source, data_files={split: files}, split=split)
        if kind != "text" and len(rows):  # pyarrow reads the others without looking at their characters
            cached_value(["is UTF-8", rows._fingerprint], lambda: _check_characters(rows, source))
        return rows
    separator = "\t" if kind == "tsv" else ","
    texts = _text_columns(files, separator, as_written)
    if as_written and texts:  # a type for all 10,000s of rows: of one without a text, pandas could not tell
        cells: dict[str, Any] = {"features": datasets.Features(dict.fromkeys(texts, datasets.Value("large_string")))}
    else:
        cells = {"converters": dict.fromkeys(texts, _as_written)}
    rows = load("csv", source, data_files={split: files}, split=split, sep=separator, **cells)
    row = _swallowing_row(rows, separator)
    # Texts of several lines are usual in csv files, whose writers quote them well.
    if row is not None and (separator == "\t" or any(map(_has_stray_quotes, chain.from_iterable(map(local_files, files))))):
        raise DataError(
            f'{source}: a cell of row {row} has the lines of several rows, as a quote (") begins it that belongs to the '
            "text. Put such cells into quotes and double the quotes inside, or save the rows as jsonl or parquet."
        )
    return rows


def _check_characters(rows: datasets.Dataset, source: str) -> None:
    for name, cells in zip(rows.column_names, rows.data.columns, strict=True):
        try:
            cells.validate(full=True)
        except pa.ArrowInvalid as error:
            what = str(error).rpartition(": ")[2]
            raise DataError(f"{source} is not UTF-8 in column {name!r}: {what}. Convert its file.") from error


def _text_columns(files: Sequence[str], separator: str, are_all: bool) -> list[str]:
    """Return the columns of texts of csv files, or all columns, by the beginning of the first file.

    What pandas makes of a column, it decides anew for each 10,000 rows and for each file. Of texts, which all have nothing but
    numbers there, it would make numbers, and 7 of 007.
    """
    try:
        with _refusing_lost_cells():
            path = sorted(local_files(files[0]))[0]
            cells = pandas.read_csv(path, sep=separator, nrows=10_000, **READER_OPTIONS["csv"])
    except (IndexError, ValueError, OSError, Warning):  # on the web, or not a csv file, as ``load`` will say
        return []
    return [name for name, kind in cells.dtypes.items() if are_all or not pandas.api.types.is_numeric_dtype(kind)]


def _as_written(cell: str) -> str | None:
    return cell or None


def _from_hub(source: Source, source_split: str) -> datasets.Dataset:
    """Load a split of exactly the source's commit, if possible from the cache alone."""
    dataset, commit, key = source.dataset, source.commit, source.dataset_key
    named, instead = source.named, f"Without the Hub, name files: {source.instead}."
    if source.folder:  # downloaded and read as a local one: datasets 5.2 does not find offline what it has loaded by a data_dir
        name = source.folder.strip("/")
        folder = fetch("dataset", dataset, commit, [f"{name}/**"], key, instead) / name
        if not folder.is_dir():
            raise DataError(f"{named} with {source.key}.data_dir={source.folder}: commit {commit} has no such folder.")
        return load(str(folder), f"{named} with {source.key}.data_dir={source.folder}", split=source_split)
    if source.config:
        named += f" with {key}_config={source.config}"
    if not is_offline_mode():  # unlike datasets, this says why a repository cannot be reached
        fetch("dataset", dataset, commit, ["README.md"], key, instead)
    try:
        builder = datasets.load_dataset_builder(dataset, name=source.config, revision=commit)
        if builder.hash != commit:  # if the Hub does not answer, datasets uses the newest commit in its cache
            raise DataError(
                f"{named}: the cache has commit {builder.hash}, but commit {commit} is needed. Run once without "
                f"HF_HUB_OFFLINE, or set {key}_revision={builder.hash}."
            )
        return prepared(builder, source_split)
    except RuntimeError as error:
        if "scripts are no longer supported" not in str(error):
            raise
        raise DataError(
            f"{named} has a loading script, and hftune runs no code from the Hub. The Hub has a converted copy of most such "
            f"data sets: set {key}_revision=refs/convert/parquet, and {source.key}.data_dir=... to the folder of a "
            "configuration."
        ) from error
    except DatasetGenerationError as error:
        raise DataError(f"{named} cannot be read: {str(error.__cause__ or error).strip().rstrip('.')}.") from error
    except (OSError, httpx.HTTPError) as error:
        raise DataError(failure(error, "dataset", dataset, key, instead)) from error
    except ValueError as error:  # as datasets reports an unknown split or configuration
        raise DataError(f"{named} cannot be loaded: {error}") from error


def load(dataset: str, source: str, instead: str = INSTEAD, **kwargs: Any) -> datasets.Dataset:
    """Call ``datasets.load_dataset``.

    Args:
        source: the key and value that name the data, at the start of error messages.
        instead: keys to set if the Hub cannot be reached.

    Raises:
        DataError: the data cannot be loaded.
    """
    try:
        with _refusing_lost_cells() if dataset == "csv" else nullcontext():
            return datasets.load_dataset(dataset, **READER_OPTIONS.get(dataset, {}), **kwargs)
    except StopIteration:  # as the json reader of datasets fails on a file without lines
        return datasets.Dataset.from_dict({})
    except DatasetGenerationError as error:
        if "torchcodec" in str(error.__cause__):
            split = kwargs.pop("split")
            return prepared(datasets.load_dataset_builder(dataset, **kwargs), split)
        if isinstance(error.__cause__, Warning):
            raise DataError(f"{source} cannot be read as {dataset}: {SURPLUS}") from error
        reason = str(error.__cause__ or error).strip().rstrip(".")
        advice = f" {NOT_UTF8}" if isinstance(error.__cause__, UnicodeDecodeError) else ""
        raise DataError(f"{source} cannot be read as {dataset}: {reason}.{advice}") from error
    except (ConnectionError, FileNotFoundError) as error:
        raise DataError(f"{source} cannot be loaded: {error} Name files: {instead}.") from error
    except ValueError as error:  # as datasets reports an unknown split or configuration
        if "corresponds to no data" in str(error):  # or a csv file with nothing but a header
            return datasets.Dataset.from_dict({})
        raise DataError(f"{source} cannot be loaded: {error}") from error


@contextmanager
def _refusing_lost_cells() -> Iterator[None]:
    """Raise pandas' warning of csv lines that have more cells than the header, which would be left out."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", pandas.errors.ParserWarning)
        yield


def check_texts(
    rows: datasets.Dataset,
    column: str,
    split: str,
    may_be_empty: bool = False,
    row_of: Callable[[int], Any] | None = None,
) -> None:
    """Raise DataError if a text is missing, is not a string, or is empty and must not be; the message names the first rows.

    Args:
        row_of: translates an index to the row in the data, for the message; None: as ``row_numbers`` does.
    """
    check_kind(rows, column, split)
    if len(rows) < MIN_CACHED_ROWS:
        _read_all(rows, column, split, may_be_empty, row_of)
        return
    cached_value(
        ["texts checked", rows._fingerprint, column, may_be_empty], lambda: _read_all(rows, column, split, may_be_empty)
    )


def check_kind(rows: datasets.Dataset, column: str, split: str) -> None:
    """Raise DataError if a column is not of strings."""
    kind = rows.features[column]
    if getattr(kind, "dtype", None) not in ("string", "large_string"):
        raise DataError(f"Column {column!r} of the {split} split holds {getattr(kind, 'dtype', kind)}, not text.")


def _read_all(
    rows: datasets.Dataset, column: str, split: str, may_be_empty: bool, row_of: Callable[[int], Any] | None = None
) -> None:
    try:
        batches = rows.select_columns([column]).iter(1000)  # row by row, it takes 30 times as long
        texts = chain.from_iterable(batch[column] for batch in batches)
        empty = [index for index, text in enumerate(texts) if text is None or not (may_be_empty or text.strip())]
    except UnicodeDecodeError as error:
        raise DataError(f"Column {column!r} of the {split} split is not UTF-8: {error}. Convert its file.") from error
    if empty:
        what = "no text" if may_be_empty else "an empty text"
        numbers = row_numbers(rows, empty) if row_of is None else [*map(row_of, empty)]
        raise DataError(
            f"The {split} split has {what} in column {column!r} at row {first_few(numbers, 3)}. Remove these rows, or fill "
            "them in."
        )


def row_numbers(rows: datasets.Dataset, indices: Sequence[int]) -> list[int]:
    """Return the 0-based rows of the original file, for these indices of a (possibly subsampled) data set."""
    if isinstance(rows, RowsInPlace | ReadRows):
        return list(indices) if rows.numbers is None else rows.numbers[np.asarray(indices, np.int64)].tolist()
    table = rows._indices
    return list(indices) if table is None else table.column(0).take(np.asarray(indices, np.int64)).to_pylist()


def digest_of_all(rows: datasets.Dataset) -> str:
    """Hash the whole data set of which ``take`` took these rows."""
    return content_digest(datasets.Dataset(rows.data, info=rows.info))

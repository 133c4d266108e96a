"""Rows of Excel files, of databases, and of programs, as parquet files in the cache of prepared data. Knows no task.

A file is named by what it is made of, or by what is in it, so all processes of a machine, and all runs, read the same one.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from itertools import chain
from typing import Any

import datasets
import fsspec
import pandas
import pyarrow as pa

from hftune import __version__
from hftune.atomic import atomic_path
from hftune.data.cache import cache_dir, explained, locked
from hftune.data.digest import content_digest
from hftune.data.files import local_files
from hftune.errors import DataError, did_you_mean


def rows_file(rows: Any) -> str:
    """Write rows that a program has into a file, and return its path, for ``task.data_files``.

    The file is in the cache of prepared data, under a hash of what it holds: the same rows have the same path, on every
    process and in every run, so a run resumes, and is evaluated, with them.

    Args:
        rows: a list of dictionaries, a ``pandas.DataFrame`` without its index, or a ``datasets.Dataset``.

    Raises:
        DataError: these are no rows, or a column holds values of several kinds.
    """
    found = _given(rows)
    if len(found) == 0:
        raise DataError("There are no rows to write.")
    return _written(f"rows-{content_digest(found)[:32]}", lambda: found)


def query_file(source: str, database: str, query: str) -> str:
    """Write the rows that a query selects into a file, and return its path.

    Args:
        source: the key that names the query, at the start of error messages.
        database: its URL, as SQLAlchemy has them.

    Raises:
        DataError: a package is missing, the database does not answer, or the query fails. It has no password in it.
    """
    try:
        import sqlalchemy
    except ImportError as error:
        raise DataError(f"{source} needs a package that asks databases: pip install sqlalchemy") from error
    password = ""
    try:
        url = sqlalchemy.make_url(database)
        password = str(url.password or "")
        engine = sqlalchemy.create_engine(url, poolclass=sqlalchemy.NullPool)
        with engine.connect() as connection:  # nothing is committed
            # Without parameters, % and : are characters like others.
            result = connection.execution_options(no_parameters=True).exec_driver_sql(query)
            names, rows = [*result.keys()], result.fetchall()
    except ImportError as error:
        raise DataError(f"{source} needs the driver of this database, the Python package {error.name}.") from error
    except sqlalchemy.exc.SQLAlchemyError as error:
        reason = _reason(getattr(error, "orig", None) or error)
        raise DataError(f"{source} failed: {reason.replace(password, '...') if password else reason}.") from None
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise DataError(f"{source} selects two columns of the name {twice}. Rename one of them: ... AS other_name.")
    columns = zip(*rows, strict=True) if rows else [()] * len(names)
    found = _dataset({name: _cells(values) for name, values in zip(names, columns, strict=True)})
    return _written(f"rows-{content_digest(found)[:32]}", lambda: found)


def excel_file(source: str, files: Sequence[str], sheet: str | None) -> str:
    """Write a sheet of Excel files, by default the first, into a parquet file, and return its path.

    The first row has the names of the columns. Texts stay texts, and only an empty cell is a missing value. A column of cells
    of several kinds becomes texts.

    Args:
        source: the key and value that name the files, at the start of error messages.

    Raises:
        DataError: a file cannot be read, has no such sheet, or has other columns than the first one.
    """
    books = {}
    for path in chain.from_iterable(sorted(local_files(name)) for name in files):
        with fsspec.open(path, "rb", compression="infer") as file:
            books[path] = file.read()

    def read() -> datasets.Dataset:
        frames = {path: _sheet(source, path, data, sheet) for path, data in books.items()}
        columns = {path: ", ".join(map(str, frame.columns)) for path, frame in frames.items()}
        first, *_ = columns.values()
        for path, named in columns.items():
            if named != first:
                raise DataError(
                    f"{source}: {path} has the columns {named}, and the first file has {first}. Make them the same."
                )
        cells = pandas.concat(frames.values(), ignore_index=True)
        return _dataset({str(name): _cells(cells[name].tolist()) for name in cells.columns})

    key = [__version__, str(sheet), *(sha256(data).hexdigest() for data in books.values())]
    return _written(f"excel-{sha256(' '.join(key).encode()).hexdigest()[:32]}", read)


def _sheet(source: str, path: str, data: bytes, sheet: str | None) -> pandas.DataFrame:
    try:
        with pandas.ExcelFile(io.BytesIO(data)) as book:
            if sheet in (None, *book.sheet_names):
                return book.parse(sheet or 0, dtype=object, keep_default_na=False, na_values=[""])
            names = [*map(str, book.sheet_names)]
    except ImportError as error:
        package = "xlrd" if re.search(r"\.xls\b", path, re.IGNORECASE) else "openpyxl"  # pandas (3.1) may name a third one
        raise DataError(f"{source}: {path} is an Excel file. To read it: pip install {package}") from error
    except Exception as error:  # the packages that read them have exceptions of their own
        raise DataError(f"{source}: {path} cannot be read as an Excel file: {_reason(error)}.") from error
    raise DataError(
        f"task.sheet={sheet} is not a sheet of {path}. It has: {', '.join(names)}.{did_you_mean(str(sheet), names)}"
    )


def _written(name: str, read: Callable[[], datasets.Dataset]) -> str:
    path = cache_dir() / f"{name}.parquet"
    with locked(path):
        if not path.is_file():
            rows = read()
            with explained(), atomic_path(path, is_shared=True) as temporary:
                rows.to_parquet(str(temporary))
    return str(path)


def _dataset(columns: Mapping[str, pa.Array]) -> datasets.Dataset:
    return datasets.Dataset(pa.table(dict(columns)))


def _cells(values: Sequence[Any]) -> pa.Array:
    """Return cells as an array; if they are of several kinds, as texts."""
    try:
        found = pa.array(values, from_pandas=True)
    except pa.ArrowException:
        found = pa.array([None if pandas.api.types.is_scalar(value) and pandas.isna(value) else str(value) for value in values])
    return found.cast(pa.float64()) if pa.types.is_decimal(found.type) else found


def _given(rows: Any) -> datasets.Dataset:
    if isinstance(rows, datasets.Dataset):
        return rows
    if isinstance(rows, pandas.DataFrame):
        return _dataset({str(name): _one_kind(str(name), values) for name, values in rows.items()})
    if not isinstance(rows, Iterable) or isinstance(rows, (str, Mapping)):
        kinds = "a list of dictionaries, a pandas.DataFrame or a datasets.Dataset"
        raise DataError(f"Rows are {kinds}, not {type(rows).__name__}.")
    listed = [*rows]
    if (odd := next((row for row in listed if not isinstance(row, Mapping)), rows)) is not rows:
        raise DataError(f"A row must be a dictionary, such as {{'text': 'Great.', 'label': 1}}, not {type(odd).__name__}.")
    names = dict.fromkeys(chain.from_iterable(listed))
    return _dataset({name: _one_kind(name, [row.get(name) for row in listed]) for name in names})


def _one_kind(name: str, values: Any) -> pa.Array:
    """Return values as an array.

    Raises:
        DataError: they are of several kinds.
    """
    try:
        found = pa.array(values, from_pandas=True)
    except (pa.ArrowException, TypeError) as error:
        kinds = sorted({type(value).__name__ for value in values if value is not None})
        raise DataError(f"Column {name!r} holds values of several kinds: {', '.join(kinds)}. Make them one.") from error
    return found.cast(found.type.value_type) if pa.types.is_dictionary(found.type) else found  # of pandas' categories


def _reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0].strip().rstrip(".") if lines else "") or type(error).__name__

"""Tokenized texts that are made when they are first asked for, and kept for all processes of the machine. Knows no task.

A sample is a line of JSON in an SQLite file of the cache of prepared data. Processes that want the same samples, those of one
step, begin with different ones and take what the others have made: nobody waits, and little is made twice.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from platform import node
from typing import Any, SupportsIndex

import numpy as np
from datasets.fingerprint import Hasher

from hftune import __version__
from hftune.batch_plan import spread
from hftune.data.cache import ADVICE, cache_dir, locked
from hftune.data.in_place import RowsInPlace
from hftune.errors import ConfigError, DataError

HASHED_BYTES = 2**30
"""Of rows that are hashed as a whole, for digests, which takes a few seconds; of more, some are, and no row has a hash."""
RECENT = 4096
"""Samples that a process remembers, and once more: a step's lengths are asked for, then its samples."""
PAGE_BYTES = 4096
"""Of the file of samples."""
AT_ONCE = 500
"""Samples that are made, or read, in one go."""
SHARES = 4
"""In which a process makes the samples of a step, at least."""
AHEAD = 2**17
"""Samples whose rows are fetched before they are needed, as far as there is room for them."""
AGAIN = 512
"""Samples after which it is said again which are next: parts that they are done with make room."""
WAIT_S = 60.0
"""For another process that writes samples, which takes it milliseconds."""


class TextsAsNeeded(Sequence):
    """A data set of tokenized texts like ``Texts``, of which nothing is made before it is used.

    Args:
        key: what the samples depend on, hashed by content.
        rows: what they are made of, one each: a ``datasets.Dataset``, or ``RowsInPlace``.
        longest: what no sample has more tokens than.
        make: returns some of the samples, as dictionaries of numbers and lists of numbers; None for one that is left out.
        whole: returns whole columns of single values, by name.
        most_bytes: that are kept. The samples that were made first are made again where they are asked for.
    """

    def __init__(
        self,
        key: Any,
        rows: Any,
        longest: int,
        make: Callable[[list[int]], Sequence[Mapping[str, Any] | None]],
        whole: Callable[[], Mapping[str, np.ndarray]],
        most_bytes: float = float("inf"),
    ):
        # A file for each machine: SQLite's locks are not made for network file systems.
        self.path = cache_dir() / f"{Hasher.hash(['as needed', key, __version__])}.{node()}.sqlite"
        self.rows, self.longest, self._make, self._whole, self._most_bytes = rows, longest, make, whole, most_bytes
        self._recent: dict[int, Any] = {}
        self._local = threading.local()
        self.sizes: dict[tuple[str, ...], np.ndarray] = {}
        """Of all samples, (N, K), by the names of the columns, once all have been asked for, as by an evaluation."""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def is_in_place(self) -> bool:
        """Whether the rows are read from their files when they are needed, so that a pass over all takes long."""
        return isinstance(self.rows, RowsInPlace)

    def __getitem__(self, index: SupportsIndex) -> dict[str, Any]:  # type: ignore[override]  # no slices
        (sample,) = self.__getitems__([range(len(self))[index]])
        if sample is None:
            raise DataError(f"Sample {index} is left out, as it cannot be trained on (task.bad_rows=skip).")
        return sample

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        wanted = [int(index) for index in indices]
        recent = self._recent if len(self._recent) < RECENT else {}  # a new one: another thread may be reading
        found = {index: recent[index] for index in wanted if index in recent}
        missing = [index for index in dict.fromkeys(wanted) if index not in found]
        found |= self._read(missing)
        for share in self._shares([index for index in missing if index not in found]):
            found |= self._read(share)  # what other processes have made meanwhile
            if left := [index for index in share if index not in found]:
                found |= self._write(dict(zip(left, self._make(left), strict=True)))
        self._recent = {**recent, **found}
        return [found[index] for index in wanted]

    def expect(self, order_N: np.ndarray, start: int) -> None:
        """Have the rows fetched that are elsewhere and needed next: those of the samples from a place of an order on."""
        if not self.is_in_place or (blocks := self.rows.blocks) is None:
            return
        order, place = blocks.looked
        if order is not order_N or start >= place:
            blocks.looked = order_N, start + AGAIN
            self.rows.expect(order_N[start : start + AHEAD], self._kept)

    def column(self, name: str) -> np.ndarray:
        """Return a whole column with one value per sample."""
        return self._whole()[name]

    def contents(self) -> Mapping[str, Any]:
        if by_row := self.contents_by_row():
            return by_row
        some = {"some rows": self.rows.select(spread(len(self)))}
        return {**some, "files": self.rows.versions} if self.is_in_place else some

    def contents_by_row(self) -> Mapping[str, Any]:
        is_fetched = self.is_in_place and self.rows.blocks
        return {"rows": self.rows} if self.rows.data.nbytes < HASHED_BYTES and not is_fetched else {}

    def _shares(self, indices: list[int]) -> list[list[int]]:
        """Cut samples into shares, and begin with one that most other processes do not begin with."""
        size = max(SHARES, -(-len(indices) // AT_ONCE))
        shares = [share for place in range(size) if (share := indices[place::size])]
        first = os.getpid() % SHARES * len(shares) // SHARES
        return [*shares[first:], *shares[:first]]

    # The file

    def _read(self, indices: list[int]) -> dict[int, Any]:
        return {number: _read_sample(sample) for number, sample in self._select("number, sample", indices)}

    def _kept(self, indices: list[int]) -> list[int]:
        return [number for (number,) in self._select("number", indices)]

    def _select(self, columns: str, indices: list[int]) -> Iterator[tuple]:
        for start in range(0, len(indices), AT_ONCE):
            some = indices[start : start + AT_ONCE]
            yield from self._run(f"SELECT {columns} FROM samples WHERE number IN ({','.join('?' * len(some))})", some)

    def _write(self, samples: dict[int, Any]) -> dict[int, Any]:
        lines = [(number, json.dumps(sample, default=_plain), time.time()) for number, sample in samples.items()]
        self._run("INSERT OR IGNORE INTO samples VALUES (?, ?, ?)", lines, many=True)
        used = "page_count - freelist_count FROM pragma_page_count, pragma_freelist_count"
        if self._run(f"SELECT {used}", [])[0][0] * PAGE_BYTES > self._most_bytes:  # a few at a time: others wait
            oldest = "SELECT number FROM samples ORDER BY made LIMIT ?"
            self._run(f"DELETE FROM samples WHERE number IN ({oldest})", [2 * len(lines)])
        return {number: _read_sample(line) for number, line, _ in lines}  # as another process reads them

    def _run(self, statement: str, values: list, many: bool = False) -> list[tuple]:
        try:
            if getattr(self._local, "process", None) != os.getpid():  # a connection must not be used in a fork
                self._local.inherited = getattr(self._local, "connection", None)  # which a fork must not even close
                with locked(self.path):  # SQLite does not wait for another process that sets up the file
                    self._local.connection = self._connect()
                self._local.process = os.getpid()
            connection = self._local.connection
            if not many:
                return connection.execute(statement, values).fetchall()
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany(statement, values)
            connection.execute("COMMIT")
            return []
        except sqlite3.Error as error:
            said = f"{self.path}, in the cache of prepared data, cannot be used: {error}."
            if isinstance(error, sqlite3.OperationalError):
                said += " SQLite needs locks, which some network disks lack: use a disk of this machine, or task.prepare=all."
            else:
                said += " Remove it to have its samples made again."
            raise ConfigError(f"{said} {ADVICE}") from error

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, timeout=WAIT_S, isolation_level=None)
        connection.execute(f"PRAGMA page_size={PAGE_BYTES}")
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=OFF")  # what a machine that crashes loses is made again
        columns = "number INTEGER PRIMARY KEY, sample TEXT NOT NULL, made REAL NOT NULL"
        connection.execute(f"CREATE TABLE IF NOT EXISTS samples ({columns})")
        connection.execute("CREATE INDEX IF NOT EXISTS by_age ON samples (made)")
        return connection

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_local", "_recent")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _local=threading.local(), _recent={})


class Sizes:
    """The numbers of tokens of columns, (N, K) or of all together (N,): known for the samples that an array of them asks for.

    Args:
        less: how many of them do not count, of each column.
        are_summed: whether they are those of all columns together.
    """

    def __init__(self, texts: TextsAsNeeded, names: Sequence[str], less: Any = 0, are_summed: bool = False):
        self.texts, self.names, self.less, self.are_summed = texts, tuple(names), np.array(less, np.int32), are_summed

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, samples: np.ndarray) -> np.ndarray:
        known = self.texts.sizes.get(self.names)
        sizes_NK = self._of(samples) if known is None else known[samples]
        if known is None and len(samples) == len(self) == len(np.unique(samples)):
            self.texts.sizes[self.names] = sizes_NK[np.argsort(samples)]
        sizes_NK = np.where(sizes_NK < 0, sizes_NK, sizes_NK - self.less)
        return sizes_NK.sum(1, dtype=np.int32) if self.are_summed else sizes_NK

    def _of(self, samples: np.ndarray) -> np.ndarray:
        sizes, none = [], [-1] * len(self.names)
        for start in range(0, len(samples), RECENT):  # of a whole split, too, the tokens never are in memory together
            found = self.texts.__getitems__(samples[start : start + RECENT].tolist())
            sizes += [none if sample is None else [len(sample[name]) for name in self.names] for sample in found]
        return np.array(sizes, np.int32)

    def expect(self, order_N: np.ndarray, start: int) -> None:
        """Say in which order samples will be asked for, and from which place of it on."""
        self.texts.expect(order_N, start)

    def max(self, axis: int = 0) -> Any:
        """Return what no size exceeds, (K,) or a number."""
        most_K = np.full(len(self.names), self.texts.longest) - self.less
        return most_K.sum() if self.are_summed else most_K

    def sum(self, axis: int = 1, dtype: Any = None) -> Sizes:
        """Return those of all columns together."""
        return Sizes(self.texts, self.names, self.less, are_summed=True)


def _plain(value: Any) -> Any:
    return value.tolist()


def _read_sample(line: str) -> dict[str, Any] | None:
    sample = json.loads(line)
    return None if sample is None else {name: _number(value) for name, value in sample.items()}


def _number(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    array = np.asarray(value) if value else np.zeros(0, np.int64)
    return array.astype(np.float32 if array.dtype.kind == "f" else np.int64)

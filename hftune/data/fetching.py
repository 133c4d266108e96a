"""Files on this machine, or at an address that fsspec knows (s3, gs, az, hf, https, memory), and parts of them that are kept.

Knows no format, no row and no task.
"""

from __future__ import annotations

import atexit
import io
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from datasets.fingerprint import Hasher
from fsspec.spec import AbstractFileSystem

from hftune.atomic import atomic_path
from hftune.config import addresses
from hftune.data.cache import STALE_S, cache_dir, copy_folder, explained, locked
from hftune.data.files import local_files
from hftune.errors import DataError
from hftune.secrecy import without_secrets

_ending = threading.Event()
"""Set when the process ends. A thread that reads for Arrow then must have ended, or Arrow waits for it for ever."""
VERSIONS = (
    *("ETag", "etag", "xet_hash", "blob_id", "sha256", "md5Hash", "content_md5", "Content-MD5", "Digest"),
    *("LastModified", "last_modified", "Last-Modified", "mtime", "created"),
)
"""What file systems say of a file that changes with its content. The first that is said counts."""
IDLE_S = 600.0
"""After which a thread ends that has nothing to fetch."""
LAST_S = 60.0
"""To wait at the end of a process for the last request."""
FREE_TO_FETCH = 0.8
"""Of the space for parts, what is filled ahead. The rest is for what is asked for out of turn."""


class SourceError(DataError):
    """A file that is not there any more, has changed or cannot be reached: its rows are not bad, and none is left out."""


KEYS = "those of the environment, or task.storage_options"
patiently = partial(addresses.patiently, kind=SourceError, keys=KEYS, wait=_ending.wait)


@dataclass(frozen=True)
class File:
    """A file of which parts are read.

    Args:
        address: a path on this machine, or an address with ``://``.
        options: what fsspec is given for its file system, such as credentials.
    """

    address: str
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    size: int = 0
    version: str = ""
    has_parts: bool = True
    """Whether some of its bytes can be asked for."""

    @classmethod
    def found(cls, address: str, options: Mapping[str, Any]) -> File:
        """Ask for the size of a file, and for its version.

        Raises:
            SourceError: it is not there, or cannot be read.
        """
        file = cls(address, options)
        info = file.info()
        if info.get("size") is None:
            raise SourceError(f"{file} does not say how long it is, so its rows cannot be counted. Download it first.")
        return cls(address, options, int(info["size"]), _version(info), info.get("partial", True))

    def __str__(self) -> str:
        return without_secrets(self.address)

    @property
    def is_local(self) -> bool:
        return "://" not in self.address

    @property
    def key(self) -> list[Any]:
        """What its content depends on."""
        place = str(Path(self.address).resolve()) if self.is_local else self.address
        # A signed address is a new one each time. Without a version, what is signed may be what tells two files apart.
        return [str(self) if self.version and not self.is_local else place, self.size, self.version]

    def read(self, start: int, stop: int) -> bytes:
        """Return some of its bytes.

        Raises:
            SourceError: it has changed, is not there any more, or cannot be read.
        """
        with self.open() as file:
            file.seek(start)
            return file.read(stop - start)

    def open(self) -> BinaryIO:
        """Open it; see ``read``."""
        self.check()
        return patiently(lambda: Path(self.address).open("rb"), self) if self.is_local else Elsewhere(self)  # type: ignore[return-value]

    def fetch(self, start: int, stop: int) -> bytes:
        """Return some bytes of a file that is elsewhere, whatever has become of it."""

        def fetch() -> bytes:
            fs, path = self.place()
            if _ending.is_set():
                raise SourceError(f"{self} is not read any more: the process ends.")
            data, wanted = fs.cat_file(path, start=start, end=stop), stop - start
            if len(data) == wanted:
                return data
            if len(data) == self.size:
                raise SourceError(f"{self} is sent as a whole each time. task.prepare=all downloads it once.")
            raise OSError(f"{len(data):,} bytes came instead of {wanted:,}")

        return patiently(fetch, self) if start < stop else b""

    def check(self) -> None:
        """Raise SourceError if it is not what was found."""
        info = self.info()
        if (info.get("size"), _version(info)) != (self.size, self.version):
            raise SourceError(f"{self} has changed since its rows were counted. Restore it, or train in a new output folder.")

    def info(self) -> Mapping[str, Any]:
        """Ask the file system what it knows of the file."""

        def ask() -> Mapping[str, Any]:
            fs, path = self.place()
            fs.invalidate_cache(path)
            return fs.info(path)

        return patiently(ask, self)

    def place(self) -> tuple[AbstractFileSystem, str]:
        """Return its file system, and what it is called there."""
        options = {} if self.is_local else self.options
        return addresses.file_system(self.address, **options)  # anew: none may be used in a fork


class Elsewhere(io.RawIOBase):
    """A file that is elsewhere, opened. Exactly the bytes that are asked for are fetched, in one request."""

    def __init__(self, file: File):
        self.file, self.place = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.place = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.place, io.SEEK_END: self.file.size}[whence]
        return self.place

    def readinto(self, buffer: Any) -> int:
        data = self.file.fetch(self.place, min(self.place + len(buffer), self.file.size))
        buffer[: len(data)] = data
        self.place += len(data)
        return len(data)


def _version(info: Mapping[str, Any]) -> str:
    return next((str(info[name]) for name in VERSIONS if info.get(name)), "")


def find_files(patterns: Sequence[str], options: Mapping[str, Any]) -> list[str]:
    """Return the paths and addresses that patterns match, those of a pattern sorted.

    Raises:
        SourceError: a pattern matches none.
    """
    found: list[str] = []
    for pattern in patterns:
        if "://" not in pattern:
            found += sorted(local_files(pattern))
        elif "*" not in pattern:
            found.append(pattern)
        else:
            matched = patiently(partial(_matched, pattern, options), without_secrets(pattern))
            if not matched:
                raise SourceError(f"{without_secrets(pattern)}: there is no such file.")
            found += matched
    return found


def _matched(pattern: str, options: Mapping[str, Any]) -> list[str]:
    fs, path = addresses.file_system(pattern, **options)
    return sorted(map(fs.unstrip_protocol, fs.glob(path)))


def downloaded(file: File) -> str:
    """Return the path of a file, fetched once a machine if it is elsewhere."""
    if file.is_local:
        return file.address
    path = copy_folder("files", file.key) / Path(re.split("[?#]", file.address)[0]).name
    with explained(), locked(path):
        if not path.is_file():
            for left in path.parent.glob(".*.writing"):  # by a killed process
                left.unlink()
            with atomic_path(path, is_shared=True) as temporary:
                print(f"Downloading {file}, {file.size / 1e6:,.1f} MB ...", flush=True)
                patiently(lambda: addresses.get_file(file.address, temporary, **file.options), file)
                if temporary.stat().st_size != file.size:
                    raise SourceError(f"{file} has changed while it was downloaded. Start again.")
    return str(path)


class Blocks:
    """Parts of files that are fetched once, and kept for all processes of the machine, up to a number of bytes.

    If there is no room for one, those are removed that are needed last; ``expect`` says in which order they will be.

    Args:
        most_bytes: that all parts in the folder may have together, whatever data set they are of.
    """

    def __init__(self, most_bytes: float):
        self.folder, self.most_bytes = cache_dir() / "blocks", most_bytes
        self._next: dict[str, int] = {}
        self._free = 0.0  # bytes that may be written before the folder is looked at again
        self._expected: Sequence[tuple[str, Callable[[], bytes], int]] = ()
        self._reached = 0  # place among the expected: those before it have been asked for
        self._wanted = threading.Event()
        self._reader: threading.Thread | None = None
        self.looked: tuple[Any, int] = None, 0
        """The order of samples that ``expect`` was last called for, and from which place of it on it is to be called again."""

    def get(self, name: str, make: Callable[[], bytes]) -> BinaryIO:
        """Return a part, opened; ``make`` is called if it is not there."""
        path, self._reached = self.folder / name, max(self._reached, self._next.get(name, 0))
        while True:
            with suppress(FileNotFoundError):  # not there, or just removed for others
                return path.open("rb")
            with locked(path):
                if not path.is_file():
                    self._write(path, make())

    def expect(self, parts: Iterable[tuple[str, Callable[[], bytes], int]]) -> None:
        """Fetch parts in a thread, in the order in which they will be asked for, as many as there is room for.

        Args:
            parts: name, how to make it, and about how many bytes it has.
        """
        self._expected, self._reached = [*parts], 0
        self._next = {name: place for place, (name, *_) in reversed([*enumerate(self._expected)])}
        if self._reader is None or not self._reader.is_alive():  # it has ended, or this is a fork
            self._wanted = threading.Event()
            self._reader = threading.Thread(target=self._fetch, name="fetch blocks", daemon=True)
            self._reader.start()
            atexit.register(self._end)
        self._wanted.set()

    def _fetch(self) -> None:
        while self._wanted.wait(IDLE_S) and not _ending.is_set():
            self._wanted.clear()
            room = FREE_TO_FETCH * self.most_bytes
            for place, (name, make, size) in enumerate(self._expected):
                room -= size
                if room < 0 or self._wanted.is_set() or _ending.is_set():
                    break
                path = self.folder / name
                if path.is_file() or place < self._reached:
                    continue
                with suppress(Exception), locked(path, wait=False):  # who needs it then, will meet the failure
                    if not path.is_file():
                        self._write(path, make())

    def _end(self) -> None:
        """Let the thread end before the interpreter does."""
        _ending.set()
        self._wanted.set()
        if self._reader is not None:
            self._reader.join(LAST_S)

    def _write(self, path: Path, data: bytes) -> None:
        with explained():
            self.folder.mkdir(exist_ok=True)
            with locked(self.folder):
                self._make_room(len(data))
                with atomic_path(path, is_shared=True) as temporary:
                    temporary.write_bytes(data)

    def _make_room(self, wanted: int) -> None:
        self._free -= wanted
        if self._free >= 0:
            return
        for left in self.folder.glob(".*.writing"):  # by a killed process
            with suppress(OSError):
                if time.time() - left.stat().st_mtime > STALE_S:
                    left.unlink()
        states = []
        for path in self.folder.glob("[!.]*.block"):
            with suppress(FileNotFoundError):
                states.append((self._next.get(path.name, float("inf")), -path.stat().st_mtime, path.stat().st_size, path))
        total = wanted + sum(size for *_, size, _ in states)
        for *_, size, path in sorted(states, key=lambda state: (-state[0], -state[1])):  # needed last, or not, and the oldest
            if total <= self.most_bytes:
                break
            path.unlink(missing_ok=True)
            path.with_suffix(".lock").unlink(missing_ok=True)
            total -= size
        self._free = (self.most_bytes - total) / 64  # other processes write, too

    def __reduce__(self) -> Any:
        return Blocks, (self.most_bytes,)


def block_name(*key: Any) -> str:
    """Return the name of a part, by what it depends on."""
    return f"{Hasher.hash([*key])}.block"

"""Cache of work that is done once per machine, with keys that are hashes of content. Independent of what is cached.

Processes wait on a file lock, never in a collective: no process group exists while a slow machine tokenizes, so none can time
out. They wait only for what is not there yet: what is in the cache is read without a lock, by all of them at once.

An entry is ready once its ``HASH.json`` exists, which is written last and records the size and a checksum of each array.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from uuid import uuid4

import datasets
import numpy as np
import xxhash
from datasets.fingerprint import Hasher
from filelock import FileLock, Timeout

from hftune import __version__
from hftune.atomic import atomic_path, remove
from hftune.errors import ConfigError

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
CHECKED_BYTES = 2**29
"""A cached array is checked by its size and a hash of its first and last 512 MiB, which takes about 0.1 s per GiB."""
ADVICE = (
    "Set HF_HOME (for models and data sets) or HF_DATASETS_CACHE (for data sets only) to a folder that you can write to, "
    "with enough space."
)
STALE_S = 86_400
"""Unfinished files that have not changed for this long are left over from a killed process, and are removed."""
UNUSED_S = 30 * 86_400
"""Copies of what is elsewhere that nobody has asked for in this long are removed when one is asked for."""

NEW = ":new"
"""End of the names of columns while they are made of others."""
SAY_S = 10.0
"""Seconds between two lines of progress."""

_on_wait: ContextVar[Callable[[], None]] = ContextVar("_on_wait", default=lambda: None)
"""Called when this process waits for a lock; ``one_at_a_time`` sets it for all locks that are taken inside it."""


def cache_dir() -> Path:
    """Return hftune's folder in the cache of datasets (HF_DATASETS_CACHE), and create it if necessary.

    Raises:
        ConfigError: it cannot be created, perhaps because HOME is missing or belongs to a different user.
    """
    path = Path(datasets.config.HF_DATASETS_CACHE) / "hftune"
    try:
        path.mkdir(parents=True, exist_ok=True)
        path.stat()
    except OSError as error:
        _refuse(path, "used", error)
    return path


def _refuse(path: Path, what: str, error: OSError) -> NoReturn:
    raise ConfigError(f"{path}, the cache of prepared data, cannot be {what}: {error.strerror}. {ADVICE}") from error


@contextmanager
def one_at_a_time(key: Any, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Let the processes of a machine take turns until one has succeeded; from then on, none of them waits.

    A process that dies inside releases the lock. ``key`` identifies the work (hashed by content). ``on_wait`` is called once if
    a different process holds this lock, or that of an entry used inside, for more than a few seconds.
    """
    token = _on_wait.set(functools.cache(on_wait))  # cached: called once at most
    try:
        path = cache_dir() / f"{Hasher.hash([key, __version__])}"
        done = path.with_suffix(".done")
        with nullcontext() if done.exists() else locked(path):
            if not done.exists():
                yield
                with suppress(OSError):  # then the next processes take turns, too
                    done.touch()
                return
        yield  # also for those who waited while another one succeeded
    finally:
        _on_wait.reset(token)


@contextmanager
def locked(path: Path, wait: bool = True) -> Iterator[None]:
    """Hold the lock of an entry, a file whose name ends in .lock. Without waiting, raise Timeout if it is held."""
    lock = FileLock(path.with_suffix(".lock"), poll_interval=0.01)
    with explained():
        try:
            lock.acquire(timeout=5 if wait else 0)
        except Timeout:
            if not wait:
                raise
            _on_wait.get()()
            lock.acquire()
    try:
        yield
    finally:
        lock.release()


def copy_folder(kind: str, key: Any) -> Path:
    """Return a folder of the cache for a copy of what is elsewhere, and remove copies that are UNUSED_S old."""
    path = cache_dir() / kind / Hasher.hash(key)
    with explained(), locked(cache_dir() / kind):
        path.mkdir(parents=True, exist_ok=True)
        os.utime(path)  # it is asked for
        for other in path.parent.iterdir():
            if time.time() - other.stat().st_mtime > UNUSED_S:
                remove(other)
    return path


@contextmanager
def explained() -> Iterator[None]:
    """Turn failures to write into the cache into a ConfigError."""
    try:
        yield
    except OSError as error:
        is_ours = str(error.filename).startswith(str(cache_dir()))
        if error.errno not in NO_SPACE and not (is_ours and isinstance(error, PermissionError)):
            raise  # of reading the data
        _refuse(cache_dir(), "written", error)


@dataclass
class Stream:
    """An array to write that need not be in memory as a whole.

    Args:
        shape: None for an array of one dimension whose length its chunks tell.
        chunks: consecutive slices along its first dimension; consumed only if the array is written.
    """

    dtype: Any
    shape: tuple[int, ...] | None
    chunks: Iterable[np.ndarray]


def cached_arrays(key: Any, make: Callable[[], Mapping[str, np.ndarray | Stream]]) -> dict[str, np.ndarray]:
    """Write named arrays to disk once, under a hash of ``key``, and memory-map them from there, read-only.

    The processes of a machine share the mapped pages, which are those of the system's file cache. Damaged files are made again.

    Args:
        make: called if they are not there, in one process at a time; if it raises, nothing is kept.

    Raises:
        ConfigError: they cannot be written, or they are there and cannot be read.
    """
    path = _entry(key)
    if (arrays := _read(path)) is None:
        with locked(path):
            if (arrays := _read(path)) is None:
                for pattern in (".mapped-*", ".*.writing", "tmp*"):  # what killed processes left unfinished
                    for left in path.parent.glob(pattern):
                        with suppress(OSError):
                            if time.time() - left.stat().st_mtime > STALE_S:
                                remove(left)
                with explained():
                    _write(path, make())
                arrays = _read(path)
    if arrays is None:
        raise ConfigError(f"{path}.json, in the cache of prepared data, cannot be read back as it was written. {ADVICE}")
    return arrays


def kept_arrays(key: Any) -> dict[str, np.ndarray] | None:
    """Return what ``cached_arrays`` has written under a key; None if it is not there."""
    return _read(_entry(key))


def _entry(key: Any) -> Path:
    return cache_dir() / Hasher.hash([key, __version__])


def cached_value(key: Any, make: Callable[[], Any]) -> Any:
    """Return what ``make`` returns, a value that JSON can hold, and keep it on disk under a hash of ``key``.

    Raises:
        ConfigError: it cannot be written.
    """
    text = cached_arrays(["value", key], lambda: {"json": np.frombuffer(json.dumps(make()).encode(), np.uint8)})["json"]
    return json.loads(text.tobytes())


class MappedArray(np.memmap):
    """A memory-mapped .npy file, pickled as its path: the workers of a loader, where they are spawned, map it as well."""

    def __reduce__(self) -> Any:
        is_whole = self.filename is not None and self.offset + self.nbytes == Path(self.filename).stat().st_size
        return (map_array, (Path(self.filename),)) if is_whole else np.asarray(self).__reduce__()


def map_array(path: Path) -> np.ndarray:
    return np.load(path, mmap_mode="r").view(MappedArray)


def _read(path: Path) -> dict[str, np.ndarray] | None:
    """Map the arrays of an entry; None if it is not there, or if it is not what was written."""
    try:
        index = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        if any(_checksum(_file(path, name)) != checksum for name, checksum in index.items()):
            return None
        return {name: map_array(_file(path, name)) for name in index}
    except (FileNotFoundError, ValueError, AttributeError):
        return None
    except OSError as error:
        raise ConfigError(
            f"{error.filename or f'{path}.json'}, in the cache of prepared data, cannot be read: {error.strerror}. "
            f"Make it readable, or remove it to have it made again. {ADVICE}"
        ) from error


def _write(path: Path, arrays: Mapping[str, np.ndarray | Stream]) -> None:
    """Write the files of an entry; the one that makes it valid comes last."""
    for name, array in arrays.items():
        stream = array if isinstance(array, Stream) else Stream(array.dtype, array.shape, [array])
        # Written, not mapped: writing into a mapped file would kill the process if the disk is full.
        with atomic_path(_file(path, name), is_shared=True) as temporary, temporary.open("wb") as file:
            header = {"descr": np.dtype(stream.dtype).str, "fortran_order": False, "shape": stream.shape or (0,)}
            np.lib.format.write_array_header_1_0(file, header)  # of the same length for any number of rows
            start = file.tell()
            for chunk in stream.chunks:
                file.write(np.ascontiguousarray(chunk, dtype=stream.dtype).reshape(-1).view(np.uint8).data)
            if stream.shape is None:
                header["shape"] = ((file.tell() - start) // np.dtype(stream.dtype).itemsize,)
                file.seek(0)
                np.lib.format.write_array_header_1_0(file, header)
    with atomic_path(path.with_suffix(".json"), is_shared=True) as temporary:
        temporary.write_text(json.dumps({name: _checksum(_file(path, name)) for name in arrays}), encoding="utf-8")


def _file(path: Path, name: str) -> Path:
    return path.with_suffix(f".{name}.npy")


def _checksum(path: Path) -> str:
    """Return the size of a file, and a hash of its first and last CHECKED_BYTES."""
    content = np.memmap(path, np.uint8, mode="r")
    hasher = xxhash.xxh3_128(content[:CHECKED_BYTES].data)
    hasher.update(content[max(CHECKED_BYTES, len(content) - CHECKED_BYTES) :].data)
    return f"{len(content)} {hasher.hexdigest()}"


def saying(note: str, total: int, unit: str = "rows") -> Callable[[int], None]:
    """Return what to call with how much is done: it moves a bar, or, as in a log, prints a line each SAY_S."""
    if not datasets.are_progress_bars_disabled():
        bar = datasets.utils.tqdm(total=total, desc=note, unit=f" {unit}", delay=1)
        return lambda done: bar.update(done - bar.n)
    said = time.monotonic()

    def say(done: int) -> None:
        nonlocal said
        if time.monotonic() - said > SAY_S:
            print(f"{note}: {done:,} of {total:,} {unit}", flush=True)
            said = time.monotonic()

    return say


def mapped(
    dataset: datasets.Dataset, function: Callable, note: str, processes: int = 1, numbered: bool = False, **fn_kwargs: Any
) -> datasets.Dataset:
    """Map batches, without the old columns, and return the rows, whose file lasts as long as they do: it has no name any more.

    Args:
        note: text beside the progress bar; where there is none, as in a pipe, a line says every SAY_S how far it is.
        processes: number of processes that share the work; see ``idle_cores``.
        numbered: pass the indices of the rows as well, as the second argument.
    """
    name, done, function = f".mapped-{uuid4().hex}", 0, functools.partial(_renamed, function)
    say = saying(note, len(dataset)) if datasets.are_progress_bars_disabled() else lambda done: None  # as map has a bar

    def said(rows: Mapping[str, list], *numbers: Any, **others: Any) -> Any:
        nonlocal done
        made = function(rows, *numbers, **others)
        done += len(next(iter(rows.values())))
        say(done)
        return made

    try:
        found = dataset.map(
            said if processes == 1 else function,
            batched=True,
            with_indices=numbered,
            fn_kwargs=fn_kwargs,
            remove_columns=dataset.column_names,
            cache_file_name=str(cache_dir() / f"{name}.arrow"),
            new_fingerprint=name,
            num_proc=processes if processes > 1 else None,
            desc=note,
        )
        return found.rename_columns({column: column.removesuffix(NEW) for column in found.column_names})
    finally:  # a file may be unlinked while it is mapped; a folder of its own could not be removed then, on NFS
        for path in cache_dir().glob(f"{name}*"):  # several processes write a file each
            remove(path)


def _renamed(function: Callable, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Mark the columns of ``function``: datasets (5.2) would cast them to the types of old ones of the same name."""
    return {f"{name}{NEW}": values for name, values in function(*args, **kwargs).items()}


def idle_cores(num_rows: int, rows_each: int = 1000) -> int:
    """Return how many processes should share work in pure Python: one per core, since the training processes wait for it.

    Fewer if there is little to do, because starting a process takes more than a second.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, num_rows // rows_each))

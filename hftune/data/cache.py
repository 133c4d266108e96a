"""Cache of work that is done once per machine, with keys that are hashes of content. Independent of what is cached.

Processes wait on a file lock, never in a collective: no process group exists while a slow machine tokenizes, so none can time
out.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from datasets.fingerprint import Hasher
from filelock import FileLock, Timeout

from hftune import __version__
from hftune.atomic import atomic_path
from hftune.errors import ConfigError


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
        raise ConfigError(
            f"{path}, the cache of prepared data, cannot be used: {error.strerror}. Set HF_HOME (for models and data sets) "
            "or HF_DATASETS_CACHE (for data sets only) to a folder that you can write to."
        ) from error
    return path


@contextmanager
def one_at_a_time(key: Any, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Let the processes of a machine take turns: the first one fills the cache, the others use it.

    A process that dies inside releases the lock. ``key`` identifies the work (hashed by content). ``on_wait`` is called once if
    a different process holds the lock for more than a few seconds.
    """
    lock = FileLock(cache_dir() / f"{Hasher.hash(key)}.lock")
    try:
        lock.acquire(timeout=5)
    except Timeout:
        on_wait()
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def cached_map(
    dataset: datasets.Dataset, function: Callable, key: Any, note: str, processes: int = 1, **fn_kwargs: Any
) -> datasets.Dataset:
    """Map batches once, keep the result on disk under a hash of data set, function and key, and load it from there.

    ``datasets`` caches maps, too, but not those of data sets created in memory, and under a hash of pickled objects, which
    changes with the state of a used tokenizer. The old columns are dropped.

    Args:
        key: what the result depends on besides rows and function; hashed by content.
        note: text beside the progress bar.
        processes: number of processes that share the work; see ``idle_cores``.
    """
    fingerprint = Hasher.hash(
        [dataset._fingerprint, function.__module__, function.__qualname__, key, datasets.__version__, __version__]
    )
    return dataset.map(
        function,
        batched=True,
        fn_kwargs=fn_kwargs,
        remove_columns=dataset.column_names,
        cache_file_name=str(cache_dir() / f"{fingerprint}.arrow"),
        new_fingerprint=fingerprint,
        num_proc=processes if processes > 1 else None,
        desc=note,
    )


def cached_bytes(key: Any, shape: tuple[int, ...], chunks: Iterable[np.ndarray]) -> np.ndarray:
    """Write an array of uint8 to disk once, under a hash of ``key``, and memory-map it from there, read-only.

    The processes of a machine share the mapped pages, which are those of the system's file cache.

    Args:
        chunks: consecutive slices of the array along its first dimension; not consumed if the file exists.
    """
    path = cache_dir() / f"{Hasher.hash([key, shape, __version__])}.npy"
    if not path.exists():
        # Written, not mapped: writing into a mapped file would kill the process if the disk is full.
        with atomic_path(path, is_shared=True) as temporary, temporary.open("wb") as file:
            header = {"descr": "|u1", "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, header)
            for chunk in chunks:
                file.write(np.ascontiguousarray(chunk, dtype=np.uint8).data)
    return np.load(path, mmap_mode="r")


def idle_cores(num_rows: int, rows_each: int = 1000) -> int:
    """Return how many processes should share work in pure Python: one per core, since the training processes wait for it.

    Fewer if there is little to do, because starting a process takes more than a second.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, num_rows // rows_each))

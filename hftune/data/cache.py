"""Work that is done once a machine and found again by its content. Knows nothing of what is cached.

Waiting happens on a file lock, never in a collective: no process group has to exist while a slow machine tokenises, so none
can time out.
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
    """Return (and make) hftune's folder inside datasets' own cache; HF_DATASETS_CACHE moves both.

    Raises:
        ConfigError: it cannot be made; HOME may be missing or another user's.
    """
    path = Path(datasets.config.HF_DATASETS_CACHE) / "hftune"
    try:
        path.mkdir(parents=True, exist_ok=True)
        path.stat()
    except OSError as error:
        raise ConfigError(
            f"{path}, which is to hold prepared data, cannot be used: {error.strerror}. Set HF_HOME (for models and data sets) "
            "or HF_DATASETS_CACHE (for data sets alone) to a folder that you can write to."
        ) from error
    return path


@contextmanager
def one_at_a_time(key: Any, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Let one process of the machine after the other pass; the first fills the cache, the others find it filled.

    A process that dies inside gives the lock back. ``key`` names the work (hashed by content); ``on_wait`` is called once
    where another process holds the lock for more than a few seconds.
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
    """Map batches once, keep the result on disk under a hash of dataset, function and key, and load it from there.

    ``datasets`` caches maps by itself, but not those of a data set made in memory, and under a hash of pickled objects,
    which changes with the state of a used tokenizer. The old columns are dropped.

    Args:
        key: what the result depends on beside the rows and the function; hashed by content.
        note: shown beside the progress bar.
        processes: that share the work; see ``idle_cores``.
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
    """Put an array of uint8 on disk once, under a hash of ``key``, and map it into memory from there, read-only.

    What is mapped is the system's own cache of the file, which the processes of a machine share.

    Args:
        chunks: the array's parts along its first dimension, one after the other; not touched where the file is there.
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
    """Return how many processes should share work in pure Python: all cores, as other processes of the machine wait for it.

    Fewer where there is little to do: starting a process costs more than a second.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, num_rows // rows_each))

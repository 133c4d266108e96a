"""Writes files and folders so that a kill leaves the old one or the new one, never a part. Independent of what is in them.

Checkpoints and the data cache both need it, and neither may import the other, so it is in one of the lowest layers.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from uuid import uuid4

from safetensors import SafetensorError

from hftune.errors import TrainingError


@contextmanager
def atomic_path(path: Path, is_shared: bool = False) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; once the block has written a file or a folder there, flush it and rename it.

    If the block fails, the temporary path is removed, and ``path`` is as it was.

    A file is replaced in one rename. A folder takes two, between which the earlier one is at ``set_aside(path)``: only one
    process may write it, and ``restore`` finishes or undoes what a kill between the two left.

    Args:
        is_shared: other processes, also of other machines, may write the same file at the same time, as in a cache. Each of
            them has a temporary path of its own, and nothing is flushed: a cache can be computed again.
    """
    temporary = path.with_name(f".{path.name}.{f'{uuid4().hex}.' if is_shared else ''}writing")
    remove(temporary)  # a kill may have left it
    try:
        yield temporary
        if temporary.is_dir():
            mode = temporary.stat().st_mode & 0o666
            everything = sorted(temporary.rglob("*"))
            for file in everything:
                if file.is_file() and not file.is_symlink():  # safetensors (0.8) keeps its files to their owner
                    file.chmod(file.stat().st_mode | mode)
            for each in [*everything, temporary]:
                flush(each)
            restore(path)
            if path.exists():
                path.rename(set_aside(path))
            temporary.rename(path)
            flush(path.parent)
            remove(set_aside(path))
        else:
            if not is_shared:
                flush(temporary)
            temporary.replace(path)
    except BaseException:
        remove(temporary)
        raise


def set_aside(path: Path) -> Path:
    """Return the path of the earlier folder while a new one takes its name."""
    return path.with_name(f".{path.name}.replaced")


def restore(path: Path) -> None:
    """Finish or undo the replacement of a folder that a kill interrupted: the earlier folder gets its name back.

    Only for the process that may write the folder.
    """
    if set_aside(path).exists() and not path.exists():
        set_aside(path).rename(path)
    remove(set_aside(path))


def remove(path: Path) -> None:
    """Remove a file or a folder if it exists, as far as possible."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def flush(path: Path) -> None:
    """Wait until the contents of a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """Turn a write error into one that names the path and says what is safe.

    Raises:
        TrainingError: the block fails to write.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:  # safetensors reports a full disk with its own exception
        reason = getattr(error, "strerror", None) or str(error)
        has_checkpoints = any(any((parent / "checkpoints").glob("step_*")) for parent in path.absolute().parents[:2])
        intact = "Earlier checkpoints are intact. " if has_checkpoints else ""
        then = "then resume=auto continues from the newest checkpoint." if has_checkpoints else "then start again."
        raise TrainingError(
            f"{path} cannot be written: {reason}. {intact}Free disk space or fix permissions; {then}"
        ) from error


class GrowingFile:
    """A file that grows with a run. What a full disk refuses waits in memory until there is room. Safe in several threads."""

    def __init__(self, path: Path, size: int | None = None):
        """Open a file to append to it; with ``size``, cut it to this many bytes first."""
        self.path = path
        self._lock, self._waiting = Lock(), b""
        self._file = path.open("ab", buffering=0)
        if size is not None:
            self._file.truncate(size)

    def append(self, data: bytes) -> None:
        """Write, or keep the data in memory if the disk is full. Raises TrainingError if anything else is wrong."""
        with self._lock, explain_write_errors(self.path):
            self._waiting += data
            try:
                self._write()
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise

    def _write(self) -> None:
        while self._waiting:  # a disk that is filling up accepts a part
            self._waiting = self._waiting[self._file.write(self._waiting) :]

    def flush(self) -> None:
        """Wait until everything is on the disk. Raises OSError if there is no room for it."""
        with self._lock:
            self._write()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Write what is waiting, and close. Raises TrainingError if there is still no room."""
        with self._lock, explain_write_errors(self.path), self._file:
            self._write()


def write_text(path: Path, text: str) -> None:
    """Replace the text of a file atomically."""
    write_lines(path, [text])


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Replace the text of a file atomically with lines that are produced one at a time."""
    with atomic_path(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        file.writelines(lines)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of the contents of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

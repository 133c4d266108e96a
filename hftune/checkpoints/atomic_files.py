"""Files and folders that are whole or not there at all, and who may write them. Knows neither models nor training."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from hftune.atomic import atomic_path
from hftune.errors import ConfigError, TrainingError


@contextmanager
def named_where_it_fails(path: Path) -> Iterator[None]:
    """Turn an error of the disk into one that says what could not be written, and what is safe.

    Raises:
        TrainingError: where the block fails to write.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:  # safetensors reports a full disk by a name of its own
        reason = getattr(error, "strerror", None) or str(error)
        raise TrainingError(
            f"{path} cannot be written: {reason}. What was saved before is whole. Make room or set it right; then resume=auto "
            "goes on from the newest checkpoint."
        ) from error


def write_text(path: Path, text: str) -> None:
    """Replace a file's text in one go."""
    write_lines(path, [text])


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Do the same with a text that comes piece by piece."""
    with atomic_path(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        file.writelines(lines)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's contents, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Hold a folder for this process as long as it lives; the system gives it back when the process dies.

    Raises:
        ConfigError: another process holds it.
    """
    lock, owner = FileLock(folder / ".lock"), folder / ".owner"
    try:
        lock.acquire(timeout=0)
    except OSError as error:  # a Timeout is one as well
        if not isinstance(error, Timeout):
            raise ConfigError(
                f"output_dir={folder} is on a file system without file locks ({error.strerror or error}), which keep two runs "
                "out of one folder. Set output_dir=... to a folder on another one, and copy it afterwards."
            ) from error
        who = owner.read_text(encoding="utf-8") if owner.is_file() else "another process"
        raise ConfigError(
            f"output_dir={folder} is in use by {who}. Wait for that run to end, or set output_dir=... to another folder. If it "
            f"has ended for certain (its machine was lost, say), remove {folder / '.lock'}."
        ) from None
    try:
        owner.write_text(f"process {os.getpid()} on {socket.gethostname()}", encoding="utf-8")
        yield
    finally:
        owner.unlink(missing_ok=True)
        lock.release()

"""Writes output files atomically, reports write errors, and locks a folder against other runs. Independent of training."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from hftune.atomic import atomic_path
from hftune.errors import ConfigError, TrainingError


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
        raise TrainingError(
            f"{path} cannot be written: {reason}. Earlier checkpoints are intact. Free disk space or fix permissions; then "
            "resume=auto continues from the newest checkpoint."
        ) from error


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


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Lock a folder for this process. The system releases the lock if the process dies.

    The folder is created if necessary, and removed again if the block leaves nothing in it.

    Raises:
        ConfigError: another process has the lock, or the file system has no locks; or the folder cannot be created.
    """
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"output_dir={folder} cannot be created: {error.strerror}. Set output_dir=... to a different folder."
        ) from error
    lock, owner = FileLock(folder / ".lock"), folder / ".owner"
    try:
        lock.acquire(timeout=0)
    except OSError as error:  # Timeout is a subclass
        if not isinstance(error, Timeout):
            raise ConfigError(
                f"output_dir={folder} is on a file system without file locks ({error.strerror or error}), which keep two runs "
                "from using the same folder. Set output_dir=... to a folder on a different file system, and copy it afterwards."
            ) from error
        user = owner.read_text(encoding="utf-8") if owner.is_file() else "another process"
        raise ConfigError(
            f"output_dir={folder} is in use by {user}. Wait for that run to end, or set output_dir=... to a different folder. "
            f"If that process no longer exists (its machine was lost, for example), remove {folder / '.lock'}."
        ) from None
    try:
        owner.write_text(f"process {os.getpid()} on {socket.gethostname()}", encoding="utf-8")
        yield
    finally:
        with suppress(OSError):  # the folder may be gone, which must not hide why the block failed
            owner.unlink(missing_ok=True)
            if is_new and [path.name for path in folder.iterdir()] == [".lock"]:
                (folder / ".lock").unlink()  # before the release: filelock tries again if the file it has locked was removed
                folder.rmdir()
        lock.release()

"""Locks an output folder against other runs. Independent of training."""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from hftune.atomic import write_text
from hftune.distributed.rounds import present_job, present_round
from hftune.errors import ConfigError

RETURN_S = 1.5
"""For the main process of an earlier round to end and release its folder."""


@contextmanager
def only_writer(folder: Path) -> Iterator[Callable[[], bool]]:
    """Lock a folder for this process. The system releases the lock if the process dies.

    The folder is created if necessary, and removed again if the block leaves nothing in it.

    The main process of a later round of the same elastic job waits RETURN_S, and then takes the folder over: the machine of the
    earlier one hangs, or a file server still holds its lock.

    Yields:
        A function that says whether the folder is still this process's.

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
    lock, owner = FileLock(folder / ".lock", mode=0o666), folder / ".owner"
    job, number = present_job(), present_round()
    of_round = "" if job is None or number is None else f", in round {number} of job {job}"
    name = f"process {os.getpid()} on {socket.gethostname()}{of_round}"
    try:
        acquire(lock, owner)
    except PermissionError as error:
        raise ConfigError(
            f"output_dir={folder} is another user's: {error.filename or lock.lock_file} cannot be written ({error.strerror}). "
            "Ask for write permission, such as chmod -R g+w, or set output_dir=... to a folder of your own."
        ) from error
    except OSError as error:  # Timeout is a subclass
        if not isinstance(error, Timeout):
            raise ConfigError(
                f"output_dir={folder} is on a file system without file locks ({error.strerror or error}), which keep two runs "
                "from using the same folder. Set output_dir=... to a folder on a different file system, and copy it afterwards."
            ) from error
        user = read_owner(owner) or "another process"
        raise ConfigError(
            f"output_dir={folder} is in use by {user}. Wait for that run to end, or set output_dir=... to a different folder. "
            f"If that process no longer exists (its machine was lost, for example), remove {folder / '.lock'}."
        ) from None
    try:
        write_text(owner, name)  # replaced, as a killed run of another user may have left one
        yield lambda: read_owner(owner) in (None, name)
    finally:
        with suppress(OSError):  # the folder may be gone, which must not hide why the block failed
            if read_owner(owner) == name:
                owner.unlink()
            if is_new and [path.name for path in folder.iterdir()] == [".lock"]:
                (folder / ".lock").unlink()  # before the release: filelock tries again if the file it has locked was removed
                folder.rmdir()
        lock.release()


def acquire(lock: FileLock, owner: Path) -> None:
    """Acquire the lock of a folder: at once, or from the main process of an earlier round of this elastic job.

    Raises:
        Timeout: another process has it, a subclass of OSError.
    """
    try:
        lock.acquire(timeout=RETURN_S if present_round() else 0)
    except Timeout:
        before = read_owner(owner) or ""
        found = re.search(r", in round (\d+) of job (.+)$", before)
        if found is None or found[2] != present_job() or int(found[1]) >= (present_round() or 0):
            raise
        print(f"hftune: {before} still holds {lock.lock_file}. This round takes it over.", file=sys.stderr, flush=True)
        Path(lock.lock_file).unlink(missing_ok=True)  # its lock is on the file that was here, ours on the next one
        lock.acquire(timeout=0)


def read_owner(path: Path) -> str | None:
    """Return who has a folder; None if nobody says so."""
    return path.read_text(encoding="utf-8") if path.is_file() else None

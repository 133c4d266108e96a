"""Replaces a file or a folder atomically: a kill leaves the old one or the new one, never a part. Independent of contents.

Checkpoints and the data cache both need it, and neither may import the other, so it is in the lowest layer, next to errors.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4


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
            _follow_umask(temporary)
            flush_folder(temporary)
            _replace_folder(temporary, path)
        else:
            if not is_shared:
                flush(temporary)
            temporary.replace(path)
    except BaseException:
        remove(temporary)
        raise


def _follow_umask(folder: Path) -> None:
    """Let those read the files of a new folder who may read the folder itself: safetensors (0.8) keeps them to their owner."""
    mode = folder.stat().st_mode & 0o666
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(path.stat().st_mode | mode)


def _replace_folder(temporary: Path, path: Path) -> None:
    restore(path)
    if path.exists():
        path.rename(set_aside(path))
    temporary.rename(path)
    flush(path.parent)
    remove(set_aside(path))


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


def flush_folder(folder: Path) -> None:
    """Wait until everything in a folder is on the disk."""
    for path in [*sorted(folder.rglob("*")), folder]:
        flush(path)

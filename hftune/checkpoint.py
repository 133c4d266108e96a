"""Writes folders and files that are whole or not there at all. Knows no training.

An export is the finished model that ``from_pretrained`` loads, written by the main process only.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from torch import nn

from hftune.task import Task


def export(task: Task, model: nn.Module, directory: Path) -> None:
    """Write the model to a temporary name, flush it to disk, then rename: a kill never leaves half a model.

    Replaces an earlier export. Main process only.
    """
    fresh, old = directory.with_name(f".{directory.name}.writing"), directory.with_name(f".{directory.name}.replaced")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    task.save(model, fresh)
    for path in [*sorted(fresh.rglob("*")), fresh]:
        _flush(path)
    restore_export(directory)
    if directory.exists():
        directory.rename(old)
    fresh.rename(directory)
    _flush(directory.parent)
    shutil.rmtree(old, ignore_errors=True)


def restore_export(directory: Path) -> None:
    """Finish or undo what a kill between the two renames of ``export`` left: the earlier model gets its name back."""
    old = directory.with_name(f".{directory.name}.replaced")
    if old.exists() and not directory.exists():
        old.rename(directory)
    shutil.rmtree(old, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Replace a file's text in one go. Main process only."""
    fresh = path.with_name(f".{path.name}.writing")
    fresh.write_text(text, encoding="utf-8")
    _flush(fresh)
    fresh.replace(path)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

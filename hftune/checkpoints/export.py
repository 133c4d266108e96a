"""Writes the finished model that ``from_pretrained`` loads. Knows no training; what resumes it is a checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from hftune.checkpoints.atomic_files import flush, flush_folder, named_where_it_fails
from hftune.task import Task

if TYPE_CHECKING:
    from torch import nn

ABOUT = "hftune.json"
"""File in an exported model: of which step it is, and how it scored."""
TRIES = 3
"""Of reading a model that is replaced meanwhile."""


def export(task: Task, model: nn.Module, directory: Path, about: Mapping[str, Any] | None = None) -> None:
    """Write the model to a temporary name, flush it to disk, then rename: a kill never leaves half a model.

    Replaces an earlier export. Main process only. ``about`` goes into the folder, so that no kill comes between the two.

    Raises:
        TrainingError: it could not be written; the earlier export stays.
    """
    fresh, old = directory.with_name(f".{directory.name}.writing"), directory.with_name(f".{directory.name}.replaced")
    shutil.rmtree(fresh, ignore_errors=True)
    with named_where_it_fails(directory):
        fresh.mkdir(parents=True)
        task.save(model, fresh)
        if about is not None:
            (fresh / ABOUT).write_text(json.dumps(about) + "\n", encoding="utf-8")
        flush_folder(fresh)
        restore_export(directory)
        if directory.exists():
            directory.rename(old)
        fresh.rename(directory)
        flush(directory.parent)
    shutil.rmtree(old, ignore_errors=True)


def restore_export(directory: Path) -> None:
    """Finish or undo what a kill between the two renames of ``export`` left: the earlier model gets its name back.

    Only for the process that holds the output folder: see ``readable`` for the others.
    """
    old = directory.with_name(f".{directory.name}.replaced")
    if old.exists() and not directory.exists():
        old.rename(directory)
    shutil.rmtree(old, ignore_errors=True)


def read_about(directory: Path) -> dict[str, Any]:
    """Return what ``export`` was told about the model; nothing where it was told nothing."""
    path = directory / ABOUT
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def readable(directory: Path) -> Path:
    """Return where a model is: between the two renames, or after a kill there, it has another name. Changes nothing."""
    old = directory.with_name(f".{directory.name}.replaced")
    return old if not directory.exists() and old.is_dir() else directory


def read(directory: Path, load: Callable[[Path], Any]) -> Any:
    """Load a model that a run may replace at any moment; once more where it did so meanwhile."""
    for attempt in range(1, TRIES + 1):
        path = readable(directory)
        before = _identity(path)
        try:
            return load(path)
        except (OSError, SafetensorError):
            if attempt == TRIES or _identity(readable(directory)) == before:
                raise
    return None


def _identity(path: Path) -> int | None:
    return path.stat().st_ino if path.exists() else None

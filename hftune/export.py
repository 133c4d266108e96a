"""Writes the finished model that ``from_pretrained`` loads. Knows no training; what resumes it is a checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from hftune.disk import flush, flush_folder, named_where_it_fails
from hftune.task import Task

if TYPE_CHECKING:
    from torch import nn


def export(task: Task, model: nn.Module, directory: Path) -> None:
    """Write the model to a temporary name, flush it to disk, then rename: a kill never leaves half a model.

    Replaces an earlier export. Main process only.

    Raises:
        TrainingError: it could not be written; the earlier export stays.
    """
    fresh, old = directory.with_name(f".{directory.name}.writing"), directory.with_name(f".{directory.name}.replaced")
    shutil.rmtree(fresh, ignore_errors=True)
    with named_where_it_fails(directory):
        fresh.mkdir(parents=True)
        task.save(model, fresh)
        flush_folder(fresh)
        restore_export(directory)
        if directory.exists():
            directory.rename(old)
        fresh.rename(directory)
        flush(directory.parent)
    shutil.rmtree(old, ignore_errors=True)


def restore_export(directory: Path) -> None:
    """Finish or undo what a kill between the two renames of ``export`` left: the earlier model gets its name back."""
    old = directory.with_name(f".{directory.name}.replaced")
    if old.exists() and not directory.exists():
        old.rename(directory)
    shutil.rmtree(old, ignore_errors=True)

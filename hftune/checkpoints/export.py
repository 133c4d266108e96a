"""Writes the finished model that ``from_pretrained`` loads. Independent of training, which resumes from checkpoints."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from hftune.atomic import atomic_path, explain_write_errors, set_aside
from hftune.errors import ConfigError
from hftune.task import Task

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

ABOUT = "hftune.json"
"""File in an exported model: its step and its score."""
ADAPTER = "adapter"
"""Subfolder of a merged model with its adapters, for ``adapter.export=both``."""
TRIES = 3
"""Attempts to read a model that may be replaced at the same time."""


def export(
    task: Task,
    model: nn.Module,
    directory: Path,
    about: Mapping[str, Any] | None = None,
    kind: str = "adapter",
) -> None:
    """Write the model, in place of an earlier export: a kill leaves the one or the other, never a part. Main process only.

    Args:
        about: goes into the folder, so that model and score are replaced together.
        kind: ``adapter.export``, for a model with adapters.

    Raises:
        TrainingError: it cannot be written. The earlier export stays.
    """
    with explain_write_errors(directory), atomic_path(directory) as temporary:
        temporary.mkdir(parents=True)
        if getattr(model, "_hf_peft_config_loaded", False):
            save_adapted(task, model, temporary, directory, kind)
        else:
            task.save(model, temporary)
        if about is not None:
            (temporary / ABOUT).write_text(json.dumps(about) + "\n", encoding="utf-8")


def save_adapted(task: Task, model: PreTrainedModel, temporary: Path, directory: Path, kind: str) -> None:
    """Write a model with adapters: these alone, merged into a plain model, or both.

    Args:
        directory: the name that ``temporary`` will have.

    Raises:
        ConfigError: the task saves a whole model in its own way, into which adapters do not fit.
    """
    from hftune.models.adapter_files import complete_adapter, is_adapter, plain_model

    if kind != "adapter":
        task.save(plain_model(model, merged=True), temporary)
        if kind == "merged":
            return
        temporary, directory = temporary / ADAPTER, directory / ADAPTER
        temporary.mkdir()
    task.save(model, temporary)
    if not is_adapter(temporary):
        raise ConfigError(
            f"adapter.export={kind}: {type(task).__name__}.save writes adapters and base together. Set adapter.export=merged, "
            "or have it call model.save_pretrained(directory)."
        )
    complete_adapter(model, temporary, *base_of(task, model), directory)


def base_of(task: Task, model: PreTrainedModel) -> tuple[str | None, str | None]:
    """Return name and commit of the model that adapters belong to: a name on the Hub, or the path of a folder.

    The name is None for a model that was built from a config, converted, or given weights of one's own; and for one with frozen
    weights that were drawn at random, such as a pooler that the files lack: loading it again would draw others.
    """
    from hftune.models.adapters import base_tensors
    from hftune.models.kinds import drawn_parameters

    name = getattr(model, "name_or_path", "")
    if not name or getattr(task, "weights", None) or not base_tensors(model).keys().isdisjoint(drawn_parameters(model)):
        return None, None
    if (commit := getattr(task, "model_commit", None)) is not None:
        return task.model, commit
    path = Path(name).expanduser()
    return str(path.absolute()) if path.is_dir() else name, None


def read_about(directory: Path) -> dict[str, Any]:
    """Return the ``about`` of an exported model; empty if it has none."""
    path = directory / ABOUT
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def readable(directory: Path) -> Path:
    """Return the path of a model: of the earlier one, if a kill came between the two renames of ``export``. Changes nothing."""
    earlier = set_aside(directory)
    return earlier if not directory.exists() and earlier.is_dir() else directory


def read(directory: Path, load: Callable[[Path], Any]) -> Any:
    """Load a model that a run may replace at any moment. Try again if it was replaced meanwhile, so that its files match."""
    for attempt in range(1, TRIES + 1):
        path = readable(directory)
        before = _identity(path)
        for file in path.rglob("*"):
            if file.exists() and not os.access(file, os.R_OK):  # transformers would say that it is not there
                raise ConfigError(f"{file} cannot be read: permission denied. Ask its owner, for instance for chmod -R g+rX.")
        try:
            loaded = load(path)
        except (OSError, SafetensorError):
            if attempt == TRIES or _identity(readable(directory)) == before:
                raise
        else:
            if attempt == TRIES or _identity(readable(directory)) == before:
                return loaded
    return None


def _identity(path: Path) -> int | None:
    return path.stat().st_ino if path.exists() else None

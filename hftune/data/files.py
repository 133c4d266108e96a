"""Looks whether the files that a recipe names are there. Imports nothing heavy: it runs before torch does."""

from __future__ import annotations

import difflib
import glob
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hftune.data import idx
from hftune.errors import ConfigError

FILE_FORMATS = ("json", "csv", "parquet", "arrow", "text")
"""datasets' builders that read ``task.data_files``."""


FILE_TYPES = {".txt": "text", ".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
"""Which of FILE_FORMATS reads the files of a corpus, by their ending."""

FOLDER_FORMATS = ("idx", "imagefolder")
"""What reads ``task.data_dir``."""


def check_corpus(files: Sequence[str]) -> None:
    """Refuse files of a corpus that are not there or of an unknown type, or raise ConfigError."""
    for file in map(Path, files):
        if not file.is_file():
            raise ConfigError(f"{file}: there is no such file.")
        if file.suffix not in FILE_TYPES:
            raise ConfigError(f"{file} is of no known type. Known: {', '.join(FILE_TYPES)}.")


def data_file_problems(dataset: str, data_files: Mapping[str, Any] | None, optional: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield what is wrong with ``task.dataset`` and ``task.data_files``, one sentence each; ``optional``: parts beside two."""
    if dataset in FILE_FORMATS and not data_files:
        yield f"task.dataset={dataset} reads files: set task.data_files.train=... and task.data_files.eval=..."
    if not data_files:
        return
    for part in ("train", "eval"):
        if part not in data_files:
            yield f"task.data_files.{part} is missing. Name the files of the {part} split: task.data_files.{part}=..."
    for part in data_files:
        if part not in (known := ("train", "eval", *optional)):
            yield f"task.data_files.{part} is not a key of a recipe. Keys of task.data_files: {', '.join(known)}."
    for part, patterns in data_files.items():
        paths = [patterns] if isinstance(patterns, str) else patterns
        if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
            yield f"task.data_files.{part}={patterns!r} is not a path or a list of paths."
            continue
        for pattern in paths:
            if "://" not in pattern and not glob.glob(str(Path(pattern).expanduser()), recursive=True):  # noqa: PTH207 - Path.glob wants a root
                yield f"task.data_files.{part}={pattern}: there is no such file.{_nearest_file(Path(pattern))}"


def image_folder_problems(dataset: str, data_dir: str | None, splits: Mapping[str, str]) -> Iterator[str]:
    """Yield what is wrong with ``task.data_dir``, and with the splits (by their keys) that its idx files must have."""
    if dataset not in FOLDER_FORMATS:
        if data_dir is not None:
            yield f"task.data_dir={data_dir} is for task.dataset={' and '.join(FOLDER_FORMATS)}, not for {dataset}."
        return
    if data_dir is None:
        yield f"task.dataset={dataset} reads a folder: set task.data_dir=..."
        return
    if not (folder := Path(data_dir).expanduser()).is_dir():
        yield f"task.data_dir={data_dir}: there is no such folder.{_nearest_file(Path(data_dir))}"
    elif dataset == "idx":
        for key, split in splits.items():
            if split not in idx.PREFIXES:
                yield f"{key}={split}: idx files have the splits {' and '.join(idx.PREFIXES)}."
                continue
            missing = [name for kind, name in idx.NAMES.items() if idx.find(folder, split, kind) is None]
            yield from (
                f"task.data_dir={data_dir} holds no {idx.PREFIXES[split]}-{name}, with .gz or without." for name in missing
            )


def model_folder_problems(model: str | None, model_config: Mapping[str, Any], example: str = "bert") -> Iterator[str]:
    """Yield what is wrong with ``task.model``, where that is a folder, and with a model that is built from its config.

    Args:
        example: of a model_type.
    """
    if model is None and "model_type" not in model_config:
        yield f"task.model=null builds a fresh model: set task.model_config.model_type (such as {example}) and its sizes."
    if model is None or not is_folder(model):
        return
    folder = Path(model).expanduser()
    if not folder.is_dir():
        yield f"task.model={model}: there is no such folder."
    elif not (folder / "config.json").is_file():
        there = ", ".join(sorted(path.name for path in folder.iterdir())[:5]) or "nothing"
        yield f"task.model={model} holds no config.json (but {there}): name the folder that save_pretrained wrote."


def vocabulary_problems(vocabulary: str | None, model: str | None) -> Iterator[str]:
    """Yield what is wrong with ``task.vocabulary``, a folder for fresh models."""
    if vocabulary is None:
        return
    if model is not None:
        yield f"task.vocabulary={vocabulary} is for fresh models: task.model={model} brings its own. Set task.model=null."
    folder = Path(vocabulary).expanduser()
    if not folder.is_dir():
        yield f"task.vocabulary={vocabulary}: there is no such folder."
    elif not (folder / "vocab.txt").is_file():
        yield f"task.vocabulary={vocabulary} holds no vocab.txt: name the folder that `hftune vocab` wrote."


def is_folder(model: str) -> bool:
    """Say whether a model's name means a folder on this machine rather than a name on the Hub."""
    return Path(model).expanduser().exists() or model.startswith((".", "/", "~")) or model.count("/") > 1


def _nearest_file(path: Path) -> str:
    names = [other.name for other in path.expanduser().parent.glob("*")]
    near = difflib.get_close_matches(path.name, names, n=1)
    return f" Did you mean {path.parent / near[0]}?" if near else ""

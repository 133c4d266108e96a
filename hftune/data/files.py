"""Checks the files and names in a recipe's task section. Imports nothing heavy: it runs before torch is imported."""

from __future__ import annotations

import difflib
import glob
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hftune.data import idx
from hftune.data.hub import commit_of, name_problems
from hftune.errors import ConfigError

FILE_FORMATS = ("json", "csv", "parquet", "arrow", "text")
"""Formats of ``task.data_files``, named as the builders of datasets."""
FORMAT_OF = {
    **{".json": "json", ".jsonl": "json", ".csv": "csv", ".tsv": "tsv"},
    **{".parquet": "parquet", ".arrow": "arrow", ".txt": "text"},
}
"""File format by suffix; tsv is csv with tabs."""
PACKED = (".gz", ".bz2", ".xz", ".zst")
"""Suffixes of compressed files, which datasets decompresses."""

FOLDER_FORMATS = ("idx", "imagefolder")
"""Values of ``task.dataset`` that read ``task.data_dir``."""


def check_corpus(files: Sequence[str]) -> None:
    """Check that the files of a corpus exist and that their names tell their format.

    Raises:
        ConfigError: naming the file.
    """
    for file in map(Path, files):
        if not file.is_file():
            raise ConfigError(f"{file}: there is no such file.")
        if format_of(file.name) is None:
            raise ConfigError(f"{file} has none of the known suffixes: {', '.join(FORMAT_OF)}. Convert or rename it.")


def data_file_problems(
    dataset: str | None, data_files: Mapping[str, Any] | None, optional: tuple[str, ...] = ()
) -> Iterator[str]:
    """Yield the problems of ``task.dataset`` and ``task.data_files``, one sentence each.

    Files take precedence over ``dataset``, which may then name their format.

    Args:
        optional: splits that may be given besides "train" and "eval".
    """
    if not data_files:
        if dataset is None:
            yield "Name your data: task.data_files.train=... and task.data_files.eval=..., or task.dataset=..."
        elif dataset in FILE_FORMATS:
            yield f"task.dataset={dataset} needs files: set task.data_files.train=... and task.data_files.eval=..."
        elif ":" not in dataset and is_folder(dataset) and not Path(dataset).expanduser().exists():
            yield f"task.dataset={dataset}: there is no such folder.{_nearest_file(Path(dataset))}"
        elif is_repository(dataset):
            yield from name_problems("task.dataset", dataset, "dataset", (*FILE_FORMATS, *FOLDER_FORMATS))
        return
    for split in ("train", "eval"):
        if split not in data_files:
            yield f"task.data_files.{split} is missing. Name the files of the {split} split: task.data_files.{split}=..."
    for split in data_files:
        if split not in (known := ("train", "eval", *optional)):
            yield f"task.data_files.{split} is not a key of a recipe. Keys of task.data_files: {', '.join(known)}."
    for split, patterns in data_files.items():
        paths = [patterns] if isinstance(patterns, str) else patterns
        if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
            yield f"task.data_files.{split}={patterns!r} is not a path or a list of paths."
            continue
        for pattern in paths:
            if "://" not in pattern and not glob.glob(str(Path(pattern).expanduser()), recursive=True):  # noqa: PTH207 - Path.glob wants a root
                yield f"task.data_files.{split}={pattern}: there is no such file.{_nearest_file(Path(pattern))}"
            elif dataset not in FILE_FORMATS and file_format(pattern) is None:
                yield (
                    f"task.data_files.{split}={pattern}: its name does not end in one of {', '.join(FORMAT_OF)}. "
                    f"Name the format: task.dataset={', '.join(FILE_FORMATS[:-1])} or {FILE_FORMATS[-1]}."
                )
        if dataset not in FILE_FORMATS and len(formats := {file_format(pattern) for pattern in paths} - {None}) > 1:
            yield f"task.data_files.{split} has files of several formats: {', '.join(sorted(formats))}. Use one format."


def file_format(pattern: str) -> str | None:
    """Return the format of a file, or of all files that a pattern matches, by their names; None if they do not tell."""
    names = [pattern] if "://" in pattern else glob.glob(str(Path(pattern).expanduser()), recursive=True)  # noqa: PTH207 - as above
    formats = {format_of(name) for name in names}
    return formats.pop() if len(formats) == 1 else None


def format_of(name: str) -> str | None:
    """Return the format that a file's suffix stands for, not counting that of a compression; None if it is unknown."""
    suffixes = reversed(Path(name.lower()).suffixes)
    return FORMAT_OF.get(next((suffix for suffix in suffixes if suffix not in PACKED), ""))


def is_repository(dataset: str) -> bool:
    """Return whether ``task.dataset`` names a repository on the Hub, provided that there are no data_files."""
    return dataset not in (*FILE_FORMATS, *FOLDER_FORMATS) and ":" not in dataset and not is_folder(dataset)


def dataset_commit(dataset: str, data_files: Mapping[str, Any] | None, revision: str | None, instead: str) -> str | None:
    """Return the commit of ``task.dataset`` to load; None unless it is on the Hub.

    Raises:
        DataError: the Hub does not have it or cannot be reached; the message gives alternatives.
    """
    if data_files or not is_repository(dataset):
        return None
    return commit_of("dataset", dataset, revision, "task.dataset", f"Without the Hub, name files: {instead}.")


def model_commit(model: str | None, revision: str | None, key: str = "task.model") -> str | None:
    """Return the commit of a model or tokenizer to load; None unless it is on the Hub.

    Raises:
        ConfigError: the Hub does not have it or cannot be reached.
    """
    return None if model is None or is_folder(model) else commit_of("model", model, revision, key)


def image_folder_problems(dataset: str, data_dir: str | None, splits: Mapping[str, str]) -> Iterator[str]:
    """Yield the problems of ``task.data_dir``, and of the splits (by their keys) that idx files must have."""
    if dataset not in FOLDER_FORMATS:
        if data_dir is not None:
            yield f"task.data_dir={data_dir} is for task.dataset={' or '.join(FOLDER_FORMATS)}, not for {dataset}."
        return
    if data_dir is None:
        yield f"task.dataset={dataset} needs a folder: set task.data_dir=..."
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
                f"task.data_dir={data_dir} has no file {idx.PREFIXES[split]}-{name}, with or without .gz." for name in missing
            )


def model_folder_problems(model: str | None, model_config: Mapping[str, Any], example: str = "bert") -> Iterator[str]:
    """Yield the problems of ``task.model``, and of ``task.model_config`` if a new model is built from it.

    Args:
        example: example of a model_type, for messages.
    """
    if model is None and "model_type" not in model_config:
        yield f"task.model=null builds a new model: set task.model_config.model_type (such as {example}) and its sizes."
    if model is None:
        return
    if not is_folder(model):
        yield from name_problems("task.model", model, "model")
        return
    folder = Path(model).expanduser()
    if not folder.is_dir():
        yield f"task.model={model}: there is no such folder."
    elif not (folder / "config.json").is_file():
        there = ", ".join(sorted(path.name for path in folder.iterdir())[:5]) or "nothing"
        yield f"task.model={model} has no config.json (it has {there}): name a folder written by save_pretrained."


def vocabulary_problems(vocabulary: str | None, model: str | None) -> Iterator[str]:
    """Yield the problems of ``task.vocabulary``, a folder for new models."""
    if vocabulary is None:
        return
    if model is not None:
        yield f"task.vocabulary={vocabulary} is for new models, but task.model={model} has a vocabulary. Set task.model=null."
    folder = Path(vocabulary).expanduser()
    if not folder.is_dir():
        yield f"task.vocabulary={vocabulary}: there is no such folder."
    elif not (folder / "vocab.txt").is_file():
        yield f"task.vocabulary={vocabulary} has no vocab.txt: name a folder written by `hftune vocab`."


def is_folder(model: str) -> bool:
    """Return whether a name means a folder on this machine rather than a repository on the Hub."""
    return Path(model).expanduser().exists() or model.startswith((".", "/", "~")) or model.count("/") > 1


def _nearest_file(path: Path) -> str:
    names = [other.name for other in path.expanduser().parent.glob("*")]
    near = difflib.get_close_matches(path.name, names, n=1)
    return f" Did you mean {path.parent / near[0]}?" if near else ""

"""Files by their names: formats of data, folders of models.

Imports nothing heavy: recipes are checked before torch is imported.
"""

from __future__ import annotations

import difflib
import glob
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hftune.config.shipped_files import recipe_names
from hftune.data.hub import commit_of, name_problems
from hftune.errors import ConfigError, DataError

FILE_FORMATS = ("json", "csv", "parquet", "arrow", "text", "webdataset")
"""Formats of ``task.data_files``, named as the builders of datasets."""
FORMAT_OF = {
    **{".json": "json", ".jsonl": "json", ".csv": "csv", ".tsv": "tsv"},
    **{".parquet": "parquet", ".arrow": "arrow", ".txt": "text", ".xlsx": "excel", ".xls": "excel", ".tar": "webdataset"},
}
"""File format by suffix; tsv is csv with tabs."""
PACKED = (".gz", ".bz2", ".xz", ".zst", ".zip")
"""Suffixes of compressed files, which datasets decompresses."""


IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".ppm")
"""Suffixes of image files; other files of a folder of images are ignored."""
RECORDINGS = (".wav", ".flac", ".ogg", ".opus", ".mp3", ".aiff", ".aif", ".au", ".w64", ".caf")
"""Suffixes of files of sound."""


def list_images(folder: Path, source: str, kind: str = "image") -> list[Path]:
    """Return the images, or recordings, in a folder and below, sorted, without hidden ones, such as an editor's copies.

    Raises:
        DataError: beginning with ``source``, there are none.
    """
    if not folder.is_dir():
        raise DataError(f"{source}: there is no folder {folder}.")
    shown = (path for path in folder.rglob("*") if not any(part.startswith(".") for part in path.relative_to(folder).parts))
    suffixes = RECORDINGS if kind == "recording" else IMAGES
    files = sorted(path for path in shown if path.suffix.lower() in suffixes and path.is_file())
    if not files:
        raise DataError(f"{source}: {folder} has no {kind}s ({', '.join(suffixes)}).")
    return files


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


SURPLUS = "lines have more cells than the header has names. Complete the header, or quote cells with a separator in them."
"""What is wrong with a csv file whose first column would otherwise be left out."""
NOT_UTF8 = "Save the file as UTF-8."
"""What to do about a file in another encoding."""


def local_files(pattern: str) -> list[str]:
    """Return the files of this machine that a pattern matches."""
    return glob.glob(str(Path(pattern).expanduser()), recursive=True)  # noqa: PTH207 - Path.glob wants a root


def file_format(pattern: str) -> str | None:
    """Return the format of a file, or of all files that a pattern matches, by their names; None if they do not tell."""
    names = [re.split("[?#]", pattern)[0]] if "://" in pattern else local_files(pattern)  # without what signs an address
    formats = {format_of(name) for name in names}
    return formats.pop() if len(formats) == 1 else None


def format_of(name: str) -> str | None:
    """Return the format that a file's suffix stands for, not counting that of a compression; None if it is unknown."""
    suffixes = reversed(Path(name.lower()).suffixes)
    return FORMAT_OF.get(next((suffix for suffix in suffixes if suffix not in PACKED), ""))


def model_commit(model: str | None, revision: str | None, key: str = "task.model") -> str | None:
    """Return the commit of a model or tokenizer to load; None unless it is on the Hub.

    Raises:
        ConfigError: the Hub does not have it or cannot be reached.
    """
    return None if model is None or is_folder(model) else commit_of("model", model, revision, key)


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
        trained = folder.parent.name if folder.parent.name in recipe_names() else None
        hint = f" Recipe {trained} trains such a model: hftune train recipe={trained}" if trained else ""
        yield f"task.model={model}: there is no such folder.{hint}"
    elif (folder / "adapter_config.json").is_file():
        yield f"task.model={model} holds adapters, not a whole model. hftune merge {model} makes one of them."
    elif not (folder / "config.json").is_file():
        there = ", ".join(sorted(path.name for path in folder.iterdir())[:5]) or "nothing"
        below = folder / "model" / "config.json"  # of a run's output folder
        hint = f" Did you mean {below.parent}?" if below.is_file() else ""
        yield f"task.model={model} has no config.json (it has {there}): name a folder written by save_pretrained.{hint}"


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


def nearest_file(path: Path) -> str:
    """Return a hint at the file with the most similar name, for messages; nothing if none is similar."""
    names = [other.name for other in path.expanduser().parent.glob("*")]
    near = difflib.get_close_matches(path.name, names, n=1)
    return f" Did you mean {path.parent / near[0]}?" if near else ""

"""Checks the files and names in a recipe's task section. Imports nothing heavy: it runs before torch is imported."""

from __future__ import annotations

import difflib
import glob
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hftune.config.shipped_files import recipe_names
from hftune.data import idx
from hftune.data.hub import commit_of, name_problems
from hftune.errors import ConfigError, did_you_mean, format_value
from hftune.secrecy import without_secrets

FILE_FORMATS = ("json", "csv", "parquet", "arrow", "text")
"""Formats of ``task.data_files``, named as the builders of datasets."""
FORMAT_OF = {
    **{".json": "json", ".jsonl": "json", ".csv": "csv", ".tsv": "tsv"},
    **{".parquet": "parquet", ".arrow": "arrow", ".txt": "text"},
}
"""File format by suffix; tsv is csv with tabs."""
EXCEL = (".xlsx", ".xls")
"""Suffixes of files that spreadsheet programs write, and that must be saved as csv first."""
PACKED = (".gz", ".bz2", ".xz", ".zst")
"""Suffixes of compressed files, which datasets decompresses."""

INSTEAD = f"task.dataset=json task.data_files.train=... task.data_files.eval=... ({', '.join(FILE_FORMATS)})"
"""Keys to set if the Hub cannot be reached."""
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


SURPLUS = "lines have more cells than the header has names. Complete the header, or quote cells with a separator in them."
"""What is wrong with a csv file whose first column would otherwise be left out."""
NOT_UTF8 = "Save the file as UTF-8."
"""What to do about a file in another encoding."""
NO_EVAL_DATA = "hold out a share of the training rows (task.eval_share=0.1), or train without evaluation (eval.every=never)"
"""What else to do than to name evaluation data."""


def held_out_problems(task: Any) -> Iterator[str]:
    """Yield the problems of ``task.eval_share`` and ``task.eval_fold``, and what contradicts them, one sentence each."""
    share, fold = task.eval_share, task.eval_fold
    if share is not None and not 0 < share < 1:
        yield f"task.eval_share={share} must be between 0 and 1: it is the share of the training rows to evaluate on."
    if fold is not None and not (len(fold) == 2 and 0 <= fold[0] < fold[1] and fold[1] >= 2):
        yield f"task.eval_fold={fold} must be the number of a fold, from 0, and the number of folds, such as [0, 5]."
    key = held_out_key(task)
    if key is None:
        return
    if share is not None and fold is not None:
        yield f"task.eval_share={share} and task.eval_fold={fold} both hold out training rows. Set one of them to null."
    if task.evaluates and "eval" in (task.data_files or {}):
        yield (
            f"{key} takes the evaluation rows from the training data, but task.data_files.eval={task.data_files['eval']} names "
            "others. Leave one of them out."
        )


def held_out_key(task: Any) -> str | None:
    """Return the key by which a task holds out training rows, with its value; None if it holds out none."""
    for name, field in {"eval_fold": "eval_fold", "eval_share": "held_out_share"}.items():
        if (value := getattr(task, field, None)) is not None:
            return f"task.{name}={value}"
    return None


def names_eval_data(task: Any) -> bool:
    """Return whether the keys of a task name evaluation data; one that has no such keys is taken to have some."""
    if files := getattr(task, "data_files", None):
        return "eval" in files
    return getattr(task, "eval_split", "") is not None or ":" in task.dataset


MIXTURE_KEYS = ("dataset", "dataset_config", "dataset_revision", "data_files", "split", "columns", "weight")
"""Keys of an entry of ``task.datasets``."""


def mixture_name(entry: Mapping[str, Any], index: int) -> str:
    """Return what to call a data set of ``task.datasets`` in messages."""
    files = entry.get("data_files")
    paths = [files] if isinstance(files, str) else files or ()
    named = ", ".join(Path(without_secrets(path)).name for path in paths)  # first: a token in an address may hold a slash
    return named or str(entry.get("dataset") or f"task.datasets[{index}]")


def mixture_problems(task: Any) -> Iterator[str]:
    """Yield the problems of ``task.datasets``, and of the files of the other splits, one sentence each."""
    files = dict(task.data_files or {})
    if task.dataset is not None:
        yield f"task.dataset={task.dataset} and task.datasets both name training data. Set task.dataset=null."
    if "train" in files:
        yield "task.data_files.train and task.datasets both name training data. Make the files an entry of task.datasets."
    if task.evaluates and "eval" not in files and held_out_key(task) is None:
        yield f"task.datasets names training data only. Name evaluation data (task.data_files.eval=...), {NO_EVAL_DATA}."
    # The others need no files of the train split; they have these.
    others = {split: paths for split, paths in files.items() if split != "train"}
    yield from (text for text in data_file_problems(None, {"train": [], **others}, needs_eval=False) if others)
    if not task.datasets_:
        yield "task.datasets is empty. List the data sets: [{data_files: a.jsonl}, {data_files: b.jsonl, weight: 0.5}]"
    for index, entry in enumerate(task.datasets_):
        yield from _entry_problems(entry, f"task.datasets[{index}]")


def _entry_problems(entry: Mapping[str, Any], key: str) -> Iterator[str]:
    for name in entry:
        if name not in MIXTURE_KEYS:
            yield f"{key}.{name} is not a key. Keys: {', '.join(MIXTURE_KEYS)}.{did_you_mean(str(name), MIXTURE_KEYS)}"
    dataset, files = entry.get("dataset"), entry.get("data_files")
    if dataset is None and files is None:
        yield f"{key} names no data: give it data_files or dataset."
    elif isinstance(files, Mapping):
        yield f"{key}.data_files={dict(files)} must be a path, a glob or a list of them: all of these files are trained on."
    else:
        for text in data_file_problems(dataset, None if files is None else {"train": files}, needs_eval=False):
            yield text.replace("task.dataset", f"{key}.dataset").replace("task.data_files.train", f"{key}.data_files")
    for name in ("dataset", "dataset_config", "dataset_revision", "split"):
        if not isinstance(value := entry.get(name), str | None):
            yield f"{key}.{name}={format_value(value)} is not a text. Quote it as it is meant."
    weight = entry.get("weight", 1)
    if not isinstance(weight, int | float) or isinstance(weight, bool) or not 0 < weight < 1e6:
        yield f"{key}.weight={weight} must be a number above 0: how often an epoch uses each row, such as 0.5 or 3."
    columns = entry.get("columns") or {}
    if not isinstance(columns, Mapping) or not all(isinstance(name, str) for pair in columns.items() for name in pair):
        yield f"{key}.columns={columns} must say the name of each column there, such as {{text: review, label: stars}}."
    elif twice := [name for name, count in Counter(columns.values()).items() if count > 1]:
        yield f"{key}.columns={dict(columns)} gives {twice[0]} two names. Name each column once."


def data_file_problems(
    dataset: str | None,
    data_files: Mapping[str, Any] | None,
    optional: tuple[str, ...] = ("test",),
    needs_eval: bool = True,
) -> Iterator[str]:
    """Yield the problems of ``task.dataset`` and ``task.data_files``, one sentence each.

    Files take precedence over ``dataset``, which may then name their format.

    Args:
        optional: splits that may be given besides "train" and "eval".
        needs_eval: whether there must be files of the eval split: not if training rows are held out, or none evaluated on.
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
    if "train" not in data_files:
        yield "task.data_files.train is missing. Name the files of the train split: task.data_files.train=..."
    if needs_eval and "eval" not in data_files:
        yield f"task.data_files.eval is missing. Name evaluation data (task.data_files.eval=...), {NO_EVAL_DATA}."
    for split in data_files:
        if split not in (known := ("train", "eval", *optional)):
            yield f"task.data_files.{split} is not a key of a recipe. Keys of task.data_files: {', '.join(known)}."
    for split, patterns in data_files.items():
        paths = [patterns] if isinstance(patterns, str) else patterns
        if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
            yield f"task.data_files.{split}={patterns!r} is not a path or a list of paths."
            continue
        for pattern in paths:
            if "://" not in pattern and not local_files(pattern):
                yield f"task.data_files.{split}={pattern}: there is no such file.{_nearest_file(Path(pattern))}"
            elif Path(pattern).expanduser().is_dir():
                yield f"task.data_files.{split}={pattern} is a folder. Name its files, such as {Path(pattern) / '*.parquet'}."
            elif Path(pattern.lower()).suffix in EXCEL:
                yield f"task.data_files.{split}={pattern} is an Excel file, and hftune reads none. Save it as csv, in UTF-8."
            elif dataset not in FILE_FORMATS and file_format(pattern) is None:
                yield (
                    f"task.data_files.{split}={pattern}: its name does not end in one of {', '.join(FORMAT_OF)}. "
                    f"Name the format: task.dataset={', '.join(FILE_FORMATS[:-1])} or {FILE_FORMATS[-1]}."
                )
        if dataset not in FILE_FORMATS and len(formats := {file_format(pattern) for pattern in paths} - {None}) > 1:
            yield f"task.data_files.{split} has files of several formats: {', '.join(sorted(formats))}. Use one format."


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


def _nearest_file(path: Path) -> str:
    names = [other.name for other in path.expanduser().parent.glob("*")]
    near = difflib.get_close_matches(path.name, names, n=1)
    return f" Did you mean {path.parent / near[0]}?" if near else ""

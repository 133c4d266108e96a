"""Where the rows of a task come from, described once for the checks of a recipe and for loading. Knows no library that loads.

Imports nothing heavy: recipes are checked before torch is imported.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from hftune.data import idx
from hftune.data.files import FILE_FORMATS, FORMAT_OF, file_format, format_of, is_folder, local_files, nearest_file
from hftune.data.hub import commit_of, name_problems
from hftune.errors import did_you_mean, format_value
from hftune.secrecy import without_secrets

FOLDER_FORMATS = ("coco", "idx", "imagefolder", "audiofolder")
"""Formats of a folder of images or recordings."""
INSTEAD = f"task.dataset=json task.data_files.train=... task.data_files.eval=... ({', '.join(FILE_FORMATS)})"
"""Keys to set if the Hub cannot be reached."""
NO_EVAL_DATA = "hold out a share of the training rows (task.eval_share=0.1), or train without evaluation (eval.every=never)"
"""What else to do than to name evaluation data."""


@dataclass(frozen=True)
class Source:
    """A data set that has train, eval and test splits, as the keys of a recipe or an entry of ``task.datasets`` name it."""

    dataset: str | None = None
    """Name on the Hub (owner/name); ``module:function``, which returns rows; the URL of a database, with ``queries``; a folder;
    one of FOLDER_FORMATS, with ``folder``; or, with files, their format if their names do not tell."""
    files: Mapping[str, Any] | None = None
    """Files by split, each a path, a glob or a list of them; used instead of ``dataset``."""
    folder: str | None = None
    """Folder of images, or folder of the repository on the Hub to read instead of all of it."""
    config: str | None = None
    """Configuration of a data set on the Hub that has several, such as wikitext-2-v1."""
    revision: str | None = None
    """Commit, tag or branch on the Hub; None for the newest commit."""
    key: str = "task"
    """Key of the recipe whose keys name it: task, or task.datasets[0]. Or the option of a command."""
    instead: str = INSTEAD
    """Keys to set if the Hub cannot be reached, for messages."""
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """What fsspec is given to reach files that are elsewhere, such as credentials."""
    queries: Mapping[str, Any] | None = None
    """Query of a database by split."""
    sheet: str | None = None
    """Sheet of Excel files to read; None: the first."""
    names_files: bool = False
    """Whether the value of ``key`` itself is the files."""

    @property
    def kind(self) -> str:
        """files, database, function, folder, hub, or one of FOLDER_FORMATS."""
        if self.files or self.dataset in FILE_FORMATS:
            return "files"
        if is_database(self.dataset):
            return "database"
        if not self.dataset or self.dataset in FOLDER_FORMATS:
            return self.dataset or "folder"
        if ":" in self.dataset:
            return "function"
        return "folder" if is_folder(self.dataset) else "hub"

    @cached_property
    def commit(self) -> str | None:
        """Commit of the data set on the Hub; None for all other kinds.

        Raises:
            DataError: the Hub does not have it or cannot be reached; the message gives alternatives.
        """
        if self.kind != "hub":
            return None
        without = f"Without the Hub, name files: {self.instead}."
        return commit_of("dataset", str(self.dataset), self.revision, self.dataset_key, without)

    @property
    def dataset_key(self) -> str:
        """Return the key that names the data set; an option of a command is its own."""
        return self.key if self.key.startswith("--") else f"{self.key}.dataset"

    @property
    def named(self) -> str:
        """Return key and value, as messages name the data set."""
        return f"{self.dataset_key}{' ' if self.key.startswith('--') else '='}{self.dataset}"

    def paths(self, split: str) -> list[str]:
        """Return the paths, addresses and globs of the files of a split."""
        files = (self.files or {})[split]
        paths = [files] if isinstance(files, str) else files
        return [str(Path(path).expanduser()) if path.startswith("~") else path for path in paths]

    def format_of(self, split: str) -> str | None:
        """Return the format of these files."""
        return self.dataset if self.dataset in FILE_FORMATS else file_format(self.paths(split)[0])

    def files_key(self, split: str) -> str:
        """Return the key that names the files of a split; an entry of task.datasets or eval.sets has those of one only."""
        return self.key if self.names_files else f"{self.key}.data_files" + (f".{split}" if self.key == "task" else "")

    def query_key(self, split: str) -> str:
        """Return the key that names the query of a split, likewise."""
        return f"{self.key}.query" + (f".{split}" if self.key == "task" else "")

    def problems(self, needs_eval: bool = True) -> Iterator[str]:
        """Yield what is wrong with the names of data set and files, one sentence each.

        Args:
            needs_eval: whether there must be files of the eval split: not if training rows are held out, or none evaluated on.
        """
        if self.queries is not None and (self.files or not is_database(self.dataset)):
            yield f"{self.key}.query asks a database. Name it alone, by {self.key}.dataset=sqlite:///FILE or a different URL."
        if self.files:
            yield from self._file_problems(self.files, needs_eval)
        elif self.kind == "database":
            yield from self._query_problems(self.queries or {}, needs_eval)
        elif self.dataset is None:
            yield "Name your data: task.data_files.train=... and task.data_files.eval=..., or task.dataset=..."
        elif self.kind == "files":
            yield f"{self.named} needs files: set task.data_files.train=... and task.data_files.eval=..."
        elif self.kind == "folder" and not Path(self.dataset).expanduser().exists():
            yield f"{self.named}: there is no such folder.{nearest_file(Path(self.dataset))}"
        elif self.kind == "hub":
            yield from name_problems(self.dataset_key, self.dataset, "dataset", (*FILE_FORMATS, *FOLDER_FORMATS))

    def _file_problems(self, files: Mapping[str, Any], needs_eval: bool) -> Iterator[str]:
        if "train" not in files:
            yield "task.data_files.train is missing. Name the files of the train split: task.data_files.train=..."
        if needs_eval and "eval" not in files:
            yield f"task.data_files.eval is missing. Name evaluation data (task.data_files.eval=...), {NO_EVAL_DATA}."
        found: set[str | None] = set()
        for split, patterns in files.items():
            key, paths = self.files_key(split), [patterns] if isinstance(patterns, str) else patterns
            if split not in ("train", "eval", "test"):
                yield f"{key} is not a key of a recipe. Keys of task.data_files: train, eval, test."
            if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
                shown = reprlib.repr(patterns)
                yield f"{key}={shown} is not a path or a list of paths. hftune.rows_file(rows) makes a file of rows."
                continue
            for pattern in paths:
                if problem := self._pattern_problem(pattern):
                    yield f"{key}={pattern}{problem}"
            formats = {file_format(pattern) for pattern in paths} - {None}
            found |= formats
            if self.dataset not in FILE_FORMATS and len(formats) > 1:
                yield f"{key} has files of several formats: {', '.join(sorted(formats))}. Use one format."
        if self.sheet is not None and found and "excel" not in found:
            yield f"{self.key}.sheet={self.sheet} names a sheet of Excel files, and none of the files is one. Leave it out."

    def _query_problems(self, queries: Mapping[str, Any], needs_eval: bool) -> Iterator[str]:
        example = "'SELECT text, label FROM reviews ORDER BY id'"
        file = re.fullmatch(r"sqlite(?:\+\w+)?:///([^?]+)", str(self.dataset))
        if file is not None and not file[1].startswith((":", "file:")) and not Path(file[1]).is_file():  # it would be made
            yield f"{self.named}: there is no such file.{nearest_file(Path(file[1]))}"
        if "train" not in queries:
            yield f"{self.query_key('train')} is missing. Say which rows of {self.dataset_key} to train on, such as {example}."
        if needs_eval and "eval" not in queries:
            yield f"task.query.eval is missing. Select evaluation data (task.query.eval=...), {NO_EVAL_DATA}."
        for split, query in queries.items():
            key = self.query_key(split)
            if split not in ("train", "eval", "test"):
                yield f"{key} is not a key of a recipe. Keys of task.query: train, eval, test."
            elif not isinstance(query, str):
                yield f"{key}={format_value(query)} is not a query, such as {example}."
            elif not re.search(r"\border\s+by\b", query, re.IGNORECASE):
                yield (
                    f"{key} has no ORDER BY, and without one a database may return its rows in a different order each time. "
                    "Order them by something that no two of them share, such as ORDER BY id."
                )

    def _pattern_problem(self, pattern: str) -> str | None:
        if "://" not in pattern and not local_files(pattern):
            return f": there is no such file.{nearest_file(Path(pattern))}"
        if Path(pattern).expanduser().is_dir():
            return f" is a folder. Name its files, such as {Path(pattern) / '*.parquet'}."
        if self.dataset not in FILE_FORMATS and file_format(pattern) is None:
            return (
                f": its name does not end in one of {', '.join(FORMAT_OF)}. "
                f"Name the format: task.dataset={', '.join(FILE_FORMATS[:-1])} or {FILE_FORMATS[-1]}."
            )
        return None


def is_database(dataset: str | None) -> bool:
    """Return whether the name of a data set is the URL of a database."""
    return "://" in (dataset or "")


def folder_problems(dataset: str, data_dir: str | None, splits: Mapping[str, str]) -> Iterator[str]:
    """Yield the problems of ``task.data_dir``, and of the splits (by their keys) that idx files must have."""
    if dataset not in FOLDER_FORMATS:
        if data_dir is not None:
            yield f"task.data_dir={data_dir} is for task.dataset={' or '.join(FOLDER_FORMATS)}, not for {dataset}."
        return
    if data_dir is None:
        yield f"task.dataset={dataset} needs a folder: set task.data_dir=..."
        return
    if not (folder := Path(data_dir).expanduser()).is_dir():
        yield f"task.data_dir={data_dir}: there is no such folder.{nearest_file(Path(data_dir))}"
    elif dataset == "idx":
        for key, split in splits.items():
            if split not in idx.PREFIXES:
                yield f"{key}={split}: idx files have the splits {' and '.join(idx.PREFIXES)}."
                continue
            missing = [name for kind, name in idx.NAMES.items() if idx.find(folder, split, kind) is None]
            yield from (
                f"task.data_dir={data_dir} has no file {idx.PREFIXES[split]}-{name}, with or without .gz." for name in missing
            )


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
    for name, attribute in {"eval_fold": "eval_fold", "eval_share": "held_out_share"}.items():
        if (value := getattr(task, attribute, None)) is not None:
            return f"task.{name}={value}"
    return None


def names_eval_data(task: Any) -> bool:
    """Return whether the keys of a task name evaluation data; one that has no such keys is taken to have some."""
    if files := getattr(task, "data_files", None) or getattr(task, "query", None):
        return "eval" in files
    return getattr(task, "eval_split", "") is not None or ":" in (getattr(task, "dataset", None) or "")


MIXTURE_KEYS = (
    *("dataset", "dataset_config", "dataset_revision", "data_files", "split", "query", "sheet", "columns", "weight", "share"),
)
"""Keys of an entry of ``task.datasets``."""
SET_KEYS = ("dataset", "dataset_config", "dataset_revision", "data_files", "split", "sheet", "columns")
"""Keys of an entry of ``eval.sets``."""
MIXING = {"temperature": 0.1, "max_repeats": 1}
"""Keys of ``task.mixing`` that are numbers, and their least values."""


def mixture_name(entry: Mapping[str, Any], index: int) -> str:
    """Return what to call a data set of ``task.datasets`` in messages."""
    files = entry.get("data_files")
    paths = [files] if isinstance(files, str) else files or ()
    named = ", ".join(Path(without_secrets(path)).name for path in paths)  # first: a token in an address may hold a slash
    return named or without_secrets(str(entry.get("dataset") or f"task.datasets[{index}]"))


def mixture_source(entry: Mapping[str, Any], index: int, instead: str, options: Mapping[str, Any]) -> Source:
    """Return the source that an entry of ``task.datasets`` names; all of it is trained on."""
    names = (entry.get("dataset"), entry.get("dataset_config"), entry.get("dataset_revision"))
    dataset, config, revision = (None if name is None else str(name) for name in names)
    files, queries = ({"train": entry[name]} if entry.get(name) else None for name in ("data_files", "query"))
    named = Source(dataset, files, None, config, revision, f"task.datasets[{index}]", instead, options)
    return replace(named, queries=queries, sheet=entry.get("sheet"))


def set_entry(task: Any, name: str) -> Mapping[str, Any]:
    """Return what one of ``eval.sets`` says, with its keys: a text or list names files, or else a split of ``task.dataset``."""
    value = task.eval_sets[name]
    if isinstance(value, Mapping):
        return value
    are_files = isinstance(value, list) or bool(task.data_files) or format_of(re.split("[?#]", value)[0]) is not None
    return {"data_files" if are_files else "split": value}


def set_source(task: Any, name: str) -> Source:
    """Return where the rows of one of ``eval.sets`` come from: ``task.source``, unless it names another."""
    entry = set_entry(task, name)
    dataset, files = entry.get("dataset"), entry.get("data_files")
    config, revision = entry.get("dataset_config"), entry.get("dataset_revision")
    if dataset is None and files is None:
        if config is None and revision is None:
            return task.source
        own = task.source
        return replace(own, config=config or own.config, revision=revision or own.revision, key=f"eval.sets.{name}")
    if files is not None and dataset is None and task.dataset in FILE_FORMATS:
        dataset = task.dataset
    return Source(
        *(dataset, files and {f"eval/{name}": files}, None, config, revision, f"eval.sets.{name}"),
        instead=f"eval.sets.{name}=FILE",
        options=task.storage_options,
        sheet=entry.get("sheet"),
        names_files=not isinstance(task.eval_sets[name], Mapping),
    )


def set_problems(task: Any) -> Iterator[str]:
    """Yield the problems of ``eval.sets``, one sentence each."""
    for name, value in task.eval_sets.items():
        key = f"eval.sets.{name}"
        if not isinstance(value, str | list | Mapping) or not value:
            yield (
                f"{key}={format_value(value)} names no rows: give it a split of task.dataset, files, or {{dataset: ..., "
                "split: ...}."
            )
            continue
        entry = set_entry(task, name)
        if "data_files" in entry or "dataset" in entry:
            yield from _entry_problems(entry, key, SET_KEYS, not isinstance(value, Mapping))
            if ":" in str(entry.get("dataset") or ""):
                yield f"{key}.dataset={entry['dataset']} must be a data set on the Hub or a folder. Make the others files."
            continue
        yield from _entry_problems({"dataset": "of/task", **entry}, key, SET_KEYS)
        if "split" not in entry:
            yield f"{key}.split is missing: which rows to evaluate on."
        if task.source.kind in ("files", "database") or task.dataset is None:
            yield (
                f"{key}={format_value(value)} names a split, and task.dataset no data set that has splits. Name files, or give "
                "{dataset: ..., split: ...}."
            )


def mixture_problems(task: Any) -> Iterator[str]:
    """Yield the problems of ``task.datasets``, and of the files of the other splits, one sentence each."""
    files = dict(task.data_files or {})
    if task.dataset is not None:
        yield f"task.dataset={task.dataset} and task.datasets both name training data. Set task.dataset=null."
    if task.query is not None:
        yield "task.query and task.datasets both name data. Make it an entry of task.datasets: {dataset: URL, query: ...}."
    if "train" in files:
        yield "task.data_files.train and task.datasets both name training data. Make the files an entry of task.datasets."
    if task.evaluates and "eval" not in files and held_out_key(task) is None:
        yield f"task.datasets names training data only. Name evaluation data (task.data_files.eval=...), {NO_EVAL_DATA}."
    # The others need no files of the train split; they have these.
    others = {split: paths for split, paths in files.items() if split != "train"}
    if others:
        yield from Source(files={"train": [], **others}).problems(needs_eval=False)
    if not task.datasets_:
        yield "task.datasets is empty. List the data sets: [{data_files: a.jsonl}, {data_files: b.jsonl, weight: 0.5}]"
    for index, entry in enumerate(task.datasets_):
        yield from _entry_problems(entry, f"task.datasets[{index}]")
    yield from mixing_problems(task.mixing, task.datasets_)


def mixing_problems(mixing: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the problems of ``task.mixing``, and of the shares of ``task.datasets``, one sentence each."""
    for name, value in mixing.items():
        if name == "by":
            if value not in ("rows", "tokens"):
                yield f"task.mixing.by={format_value(value)} is not one of rows, tokens."
        elif name not in MIXING:
            known = ("by", *MIXING)
            yield f"task.mixing.{name} is not a key. Keys: {', '.join(known)}.{did_you_mean(str(name), known)}"
        elif not _is_number(value) or value < MIXING[name]:
            yield f"task.mixing.{name}={format_value(value)} must be a number of at least {MIXING[name]}."
    has_share = ["share" in entry for entry in entries]
    if any(has_share) and not all(has_share):
        yield f"task.datasets[{has_share.index(False)}] has no share, but others have. Give each of them one, or none."
    if any(has_share) and "temperature" in mixing:
        yield "task.mixing.temperature makes shares of sizes, and task.datasets has shares. Leave one of them out."
    for index, entry in enumerate(entries):
        if "weight" in entry and (mixing or any(has_share)):
            instead = "shares" if any(has_share) else "task.mixing"
            yield f"task.datasets[{index}].weight and {instead} both say how often its rows are used. Leave one of them out."


def _is_number(value: Any, below: float = 1e6) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < below


def _entry_problems(
    entry: Mapping[str, Any], key: str, keys: Sequence[str] = MIXTURE_KEYS, names_files: bool = False
) -> Iterator[str]:
    for name in entry:
        if name not in keys:
            yield f"{key}.{name} is not a key. Keys: {', '.join(keys)}.{did_you_mean(str(name), keys)}"
    dataset, files = entry.get("dataset"), entry.get("data_files")
    if dataset is None and files is None:
        yield f"{key} names no data: give it data_files or dataset."
    elif isinstance(files, Mapping):
        yield f"{key}.data_files={dict(files)} must be a path, a glob or a list of them: all of these files are used."
    else:
        queries = {"train": entry["query"]} if "query" in entry else None
        sheet = entry.get("sheet")
        named = Source(dataset and str(dataset), files and {"train": files}, key=key, queries=queries, sheet=sheet)
        named = replace(named, names_files=names_files)
        yield from named.problems(needs_eval=False)
    for name in ("dataset", "dataset_config", "dataset_revision", "split", "sheet"):
        if not isinstance(value := entry.get(name), str | None):
            yield f"{key}.{name}={format_value(value)} is not a text. Quote it as it is meant."
    weight, share = entry.get("weight", 1), entry.get("share", 1)
    if not _is_number(weight) or weight <= 0:
        yield f"{key}.weight={weight} must be a number above 0: how often an epoch uses each row, such as 0.5 or 3."
    if not _is_number(share, math.inf) or share <= 0:
        yield f"{key}.share={share} must be a number above 0: its part of an epoch, compared to the shares of the others."
    columns = entry.get("columns") or {}
    if not isinstance(columns, Mapping) or not all(isinstance(name, str) for pair in columns.items() for name in pair):
        yield f"{key}.columns={columns} must say the name of each column there, such as {{text: review, label: stars}}."
    elif twice := [name for name, count in Counter(columns.values()).items() if count > 1]:
        yield f"{key}.columns={dict(columns)} gives {twice[0]} two names. Name each column once."

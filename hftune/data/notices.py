"""Notices of the data before training: rows left out, keys without effect, rows in two splits."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from hftune.data.digest import entry_hashes, file_content
from hftune.data.row_hashes import BYTES
from hftune.data.sources import held_out_key

DOING = {"train": "Training", "eval": "Evaluating", "test": "Testing"}
MAX_BYTES = 2**31
"""Splits are compared if their images have at most this many bytes in memory: hashing them takes a second or two."""


def ignored_splits(task: Any) -> list[str]:
    """Return a notice of the split keys that have no effect: files and functions have no names of splits.

    Args:
        task: with the fields dataset, data_files, query and some of train_split, eval_split and test_split. Keys at their
            default are not mentioned.
    """
    named = next((name for name in ("data_files", "query") if getattr(task, name)), None)
    if named is None and ":" not in (task.dataset or ""):
        return []
    defaults = {item.name: item.default for item in dataclasses.fields(task)}
    ineffective = [
        f"task.{name}={value}"
        for name in ("train_split", "eval_split", *(("test_split",) if named else ()))  # a function is asked for it
        if (value := getattr(task, name, None)) is not None and value != defaults[name]
    ]
    source = f"task.{named}" if named else f"task.dataset={task.dataset}"
    return [f"No effect: {', '.join(ineffective)}. The splits come from {source}."] if ineffective else []


def held_out(task: Any, total: int, what: str = "rows") -> list[str]:
    """Return a notice of the training rows that are held out for evaluation; ``total``: the number of training rows."""
    if not task.evaluates and (key := held_out_key(task)):
        return [
            f"{key}: a part of the {total:,} {what} of the train split is held out, although eval.every=never uses none; "
            f"hftune evaluate can. To train on all of them, set {key.partition('=')[0]}=null."
        ]
    if task.eval_fold is not None:
        fold, num_folds = task.eval_fold
        return [f"task.eval_fold={task.eval_fold}: evaluated on fold {fold} of {num_folds} (from 0), trained on the others."]
    if (key := held_out_key(task)) is None:
        return []
    return [f"{key}: a share of the {total:,} {what} of the train split is held out for evaluation, the same in every run."]


def unused_splits(task: Any, names: Iterable[str]) -> list[str]:
    """Return a notice of the splits that a data set has besides those that a task uses."""
    used = {split and split.partition("[")[0] for split in (task.train_split, task.eval_split, task.test_split)}
    used |= {split.partition("[")[0] for split in task.source_splits.values()}
    if not (unused := [name for name in names if name not in used]):
        return []
    which = f"the split {unused[0]}" if len(unused) == 1 else f"the splits {' and '.join(unused)}"
    return [
        f"The data set has {which}, too, which nothing uses: task.eval_split names the one to choose the best model by, "
        "task.test_split the one to test it on."
    ]


def mixed(use: Sequence[Mapping[str, Any]], what: str = "rows") -> list[str]:
    """Return a notice of what an epoch takes from each data set of ``task.datasets``; ``use``: see ``Mixture.use``."""
    used, tokens = (sum(part[name] or 0 for part in use) for name in ("used", "tokens"))
    parts = []
    for part in use:
        shares = f"{part['used'] / used:.0%}" + (f", {part['tokens'] / tokens:.0%} of the tokens" if tokens else "")
        parts.append(f"{part['used']:,} from {part['name']} ({part['samples']:,} {what} x {part['weight']:g}, {shares})")
    return [f"task.datasets: an epoch takes {' and '.join(parts)}."]


def left_out(counts: Mapping[str, tuple[int, int]], what: str = "rows") -> list[str]:
    """Return a notice for each split that uses a subset only; ``counts``: samples used, and samples available."""
    return [
        f"{DOING[kind]} on {used:,} of {total:,} {what}{f' of {name}' if name else ''}: task.max_{kind}_samples={used}; null "
        "takes all."
        for split, (used, total) in counts.items()
        for kind, _, name in [split.partition("/")]
        if used < total
    ]


def num_rows(rows: datasets.Dataset) -> tuple[int, int]:
    """Return how many rows ``take`` kept of a data set, and how many there were."""
    return len(rows), rows.data.num_rows


def shared(contents: Mapping[str, Any], what: str = "rows") -> list[str]:
    """Return a notice for each split that shares samples with the train split.

    Args:
        contents: by split, what ``entry_hashes`` takes: a table with the columns that make two rows the same, arrays, ...
    """
    hashes = {split: entry_hashes(entries).view(f"S{BYTES}") for split, entries in contents.items()}
    counts = {split: int(np.isin(own, hashes["train"]).sum()) for split, own in hashes.items() if split != "train"}
    return [
        f"{count:,} of the {len(hashes[split]):,} {what} in the {split} split are also in the train split: "
        "scores will look better than they are."
        for split, count in counts.items()
        if count
    ]


def shared_files(files: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """Return a notice for each split with images that are also in the train split, whatever their names.

    Args:
        files: of each split, as ``datasets.Image(decode=False)`` returns them: ``bytes``, or None and a ``path``.
    """
    sizes = {
        split: [Path(stored["path"]).stat().st_size if stored["bytes"] is None else len(stored["bytes"]) for stored in own]
        for split, own in files.items()
    }
    # Only files of a size that two splits have are read: few, unless the images are not compressed.
    common = set(sizes["train"]) & {size for split, own in sizes.items() if split != "train" for size in own}

    def contents(split: str) -> Iterator[Any]:
        for stored, size in zip(files[split], sizes[split], strict=True):
            yield file_content(stored) if size in common else split

    return shared({split: contents(split) for split in files}, "images")

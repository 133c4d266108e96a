"""What a user should know of the data before training: rows left out, splits not used, rows in two parts. Knows no task."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.compute

DOING = {"train": "Training", "eval": "Evaluating", "test": "Testing"}
MOST_BYTES = 2**31
"""Of images in memory that are compared: a second or two of hashing."""


def ignored_splits(task: Any) -> list[str]:
    """Say which of a task's keys for splits do nothing: files and functions have parts, named train, eval and test.

    Args:
        task: with the fields dataset, data_files and some of train_split, eval_split and test_split. A split that is its
            field's default is no request, and not worth a word.
    """
    if not (task.data_files or ":" in task.dataset):
        return []
    defaults = {item.name: item.default for item in dataclasses.fields(task)}
    set_ones = [
        f"task.{name}={value}"
        for name in ("train_split", "eval_split", "test_split")
        if (value := getattr(task, name, None)) is not None and value != defaults[name]
    ]
    source = "task.data_files" if task.data_files else f"task.dataset={task.dataset}"
    return [f"Not used: {', '.join(set_ones)}. {source} has parts and no splits."] if set_ones else []


def left_out(parts: Mapping[str, tuple[int, int]], what: str = "rows") -> list[str]:
    """Say of each part that was cut down what is left of it; ``parts``: samples that were kept, and all there are."""
    return [
        f"{DOING[part]} on {kept:,} of {total:,} {what}: task.max_{part}_samples={kept}; null takes all."
        for part, (kept, total) in parts.items()
        if kept < total
    ]


def num_rows(rows: datasets.Dataset) -> tuple[int, int]:
    """Return how many rows ``rng`` kept of a data set, and how many there were."""
    return len(rows), rows.data.num_rows


def shared(counts: Mapping[str, tuple[int, int]], what: str = "rows") -> list[str]:
    """Say of each part how many of its samples are in the train split, too; ``counts``: those, and all of its samples."""
    return [
        f"{count:,} of the {total:,} {what} in the {part} split are also in the train split: "
        "scores will look better than they are."
        for part, (count, total) in counts.items()
        if count
    ]


def shared_texts(parts: Mapping[str, datasets.Dataset], column: str) -> dict[str, tuple[int, int]]:
    """Count the rows of each part but "train" whose text stands there, too. Takes memory for the texts of the other parts."""
    return {part: (_count_shared(parts["train"], rows, column), len(rows)) for part, rows in parts.items() if part != "train"}


def _count_shared(train: datasets.Dataset, rows: datasets.Dataset, column: str) -> int:
    def texts(source: datasets.Dataset) -> Iterator[pyarrow.Array]:
        for batch in source.select_columns([column]).with_format("arrow").iter(10_000):
            yield batch[column].cast(pyarrow.large_string())

    own = pyarrow.chunked_array(texts(rows), pyarrow.large_string())
    found = [batch.filter(pyarrow.compute.is_in(batch, value_set=own)) for batch in texts(train)]
    both = pyarrow.chunked_array([chunk for batch in found for chunk in getattr(batch, "chunks", [batch])], own.type)
    return pyarrow.compute.sum(pyarrow.compute.is_in(own, value_set=both)).as_py() or 0


def shared_arrays(parts: Mapping[str, Iterable[np.ndarray]]) -> dict[str, tuple[int, int]]:
    """Count the arrays of each part but "train" that are there, too, to the last byte."""
    digests = {part: [blake2b(array.tobytes(), digest_size=16).digest() for array in arrays] for part, arrays in parts.items()}
    train = set(digests["train"])
    return {part: (sum(map(train.__contains__, own)), len(own)) for part, own in digests.items() if part != "train"}


def shared_files(parts: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, tuple[int, int]]:
    """Count the files of each part but "train" that are there, too, whatever their names.

    Args:
        parts: what ``datasets.Image(decode=False)`` gives: ``bytes``, or None and a ``path``.
    """
    sizes = {part: [_num_bytes(stored) for stored in files] for part, files in parts.items()}
    train_sizes = set(sizes["train"])
    # Read are only files that have as many bytes as one of another part: few, unless they are not compressed.
    both = train_sizes & {size for part, own in sizes.items() if part != "train" for size in own}
    train = {_digest(stored) for stored, size in zip(parts["train"], sizes["train"], strict=True) if size in both}
    return {
        part: (
            sum(size in both and _digest(stored) in train for stored, size in zip(files, sizes[part], strict=True)),
            len(files),
        )
        for part, files in parts.items()
        if part != "train"
    }


def _num_bytes(stored: Mapping[str, Any]) -> int:
    return Path(stored["path"]).stat().st_size if stored["bytes"] is None else len(stored["bytes"])


def _digest(stored: Mapping[str, Any]) -> bytes:
    content = Path(stored["path"]).read_bytes() if stored["bytes"] is None else stored["bytes"]
    return blake2b(content, digest_size=16).digest()

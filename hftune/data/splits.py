"""Which rows a split uses: a random subset; or rows held out of the training rows, a share of them or one of several folds.

Pure functions of the number of rows, their labels and a seed: every process and every run computes the same. Not those of
scikit-learn: its random splits may change between versions, and a class may be missing from either side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from hftune.errors import DataError

SEED = 42
"""Seed of all choices of rows, so that they are the same in every run, whatever its own seed."""
Labels = Sequence[Any]
Pair = tuple[np.ndarray, np.ndarray]
"""Indices of the rows to train on and of those to evaluate on, ascending."""


@dataclass(frozen=True)
class Split:
    """The rows of the data that one split uses."""

    name: str
    """"train", "eval", "eval/NAME" or "test"."""
    count: int | None = None
    """Number of rows to use; None for all."""
    share: float | None = None
    """Share of the training rows that is evaluated on, in (0, 1). None: the split has data of its own, or a fold."""
    fold: tuple[int, int] | None = None
    """Number, from 0, and number of the folds of the training rows, one of which is evaluated on."""
    in_order: bool = False
    """Whether a share is the last rows, and folds are consecutive rows, rather than random ones: for texts that run on."""
    pool: int | None = None
    """Number of rows to make folds of; None for all."""

    @classmethod
    def of(cls, task: Any, name: str, counts: Mapping[str, int | None], in_order: bool = False) -> Split:
        """Return the split that a task with ``held_out_share`` and ``eval_fold`` says.

        A share is held out before rows are counted, so that the evaluation rows do not depend on the number of training rows.
        Folds are those of the training rows that are counted: together they evaluate each of these once.

        Args:
            counts: number of rows to use, by split; None for all.
        """
        if name not in ("train", "eval"):
            return cls(name, counts[name])
        if task.eval_fold is not None:
            return cls(name, fold=(task.eval_fold[0], task.eval_fold[1]), in_order=in_order, pool=counts["train"])
        return cls(name, counts[name], task.held_out_share, in_order=in_order)

    @property
    def holds_out(self) -> bool:
        """Whether rows are held out of the training rows."""
        return self.share is not None or self.fold is not None

    def indices(
        self,
        num_rows: int,
        labels: Labels | None = None,
        row_of: Callable[[int], int] = int,
        sizes: Sequence[int] | None = None,
    ) -> np.ndarray:
        """Return the indices of the rows to use, ascending; arguments as for ``split_off``.

        Args:
            sizes: rows of each data set that they come from; rows in order are held out of each. None: there is one.
        """
        if not self.holds_out:
            return subsample_indices(num_rows, self.count)
        if self.in_order and sizes is not None:
            starts = [0, *accumulate(sizes)]
            return np.concatenate([start + self.indices(size) for start, size in zip(starts, sizes, strict=False)])
        pool_N = subsample_indices(num_rows, self.pool)
        options: dict[str, Any] = {"in_order": self.in_order, "row_of": lambda index: row_of(int(pool_N[index]))}
        options["labels"] = None if labels is None else [labels[index] for index in pool_N]
        if self.fold is not None:
            train, held_out = split_fold(len(pool_N), *self.fold, **options)
        else:
            train, held_out = split_off(len(pool_N), self.share or 0.0, **options)
        rows = pool_N[held_out if self.name == "eval" else train]
        return rows[subsample_indices(len(rows), self.count)]


def subsample_indices(num_rows: int, count: int | None, seed: int = SEED) -> np.ndarray:
    """Return ``count`` random indices, ascending: those of ``dataset.shuffle(seed).select(range(count))``."""
    if count is None or count >= num_rows:
        return np.arange(num_rows)
    return np.sort(np.random.default_rng(seed).permutation(num_rows)[:count])  # as datasets (5.0) shuffles; a test compares


def split_off(
    num_rows: int,
    share: float,
    labels: Labels | None = None,
    seed: int = SEED,
    in_order: bool = False,
    row_of: Callable[[int], int] = int,
) -> Pair:
    """Hold out a share of the rows, rounded, but at least one row and never all.

    Args:
        labels: of all rows. With them, the share is held out of the rows of each class.
        in_order: hold out the last rows instead of random ones. Without labels only.
        row_of: translates an index to the row in the data, for messages.

    Raises:
        DataError: there is only one row, or, with labels, only one of a class.
    """
    if in_order:
        check_enough(num_rows, 2)
        return np.arange(num_rows - _count(share, num_rows)), np.arange(num_rows - _count(share, num_rows), num_rows)
    members = [permuted[: _count(share, len(permuted))] for permuted in _shuffled_classes(num_rows, labels, seed, row_of)]
    return _pair(num_rows, np.concatenate(members))


def split_fold(
    num_rows: int,
    fold: int,
    num_folds: int,
    labels: Labels | None = None,
    seed: int = SEED,
    in_order: bool = False,
    row_of: Callable[[int], int] = int,
) -> Pair:
    """Hold out one of ``num_folds`` folds. Each row is in exactly one fold; the sizes of any two differ by at most one row.

    With labels, so do the numbers of rows of each class. Arguments as for ``split_off``.

    Raises:
        DataError: there are fewer rows than folds, or, with labels, a class has a single row.
    """
    check_enough(num_rows, num_folds)
    order_N = np.arange(num_rows) * num_folds // num_rows if in_order else np.empty(num_rows, int)
    if not in_order:
        # Dealt like cards, class after class: neither folds nor classes in folds differ by more than one.
        dealt_N = np.concatenate(_shuffled_classes(num_rows, labels, seed, row_of))
        order_N[dealt_N] = np.arange(num_rows) % num_folds
    return _pair(num_rows, np.flatnonzero(order_N == fold))


def check_enough(num_rows: int, least: int) -> None:
    """Raise DataError if there are too few rows to split."""
    if num_rows < least:
        raise DataError(
            f"The train split has {num_rows} row{'s' * (num_rows != 1)}, too few to hold some out: {least} are needed."
        )


def _count(share: float, num_rows: int) -> int:
    return min(max(1, int(share * num_rows + 0.5)), num_rows - 1)


def _pair(num_rows: int, held_out: np.ndarray) -> Pair:
    is_held_out_N = np.zeros(num_rows, bool)
    is_held_out_N[held_out] = True
    return np.flatnonzero(~is_held_out_N), np.flatnonzero(is_held_out_N)


def _shuffled_classes(num_rows: int, labels: Labels | None, seed: int, row_of: Callable[[int], int]) -> list[np.ndarray]:
    """Return the shuffled indices of each class, in the order of their first rows; without labels, of all rows."""
    check_enough(num_rows, 2)
    rng = np.random.RandomState(seed)  # whose stream is frozen for good (NEP 19)
    if labels is None:
        return [rng.permutation(num_rows)]
    members: dict[Any, list[int]] = {}
    for index, label in enumerate(labels):
        members.setdefault(label, []).append(index)
    if single := [label for label, indices in members.items() if len(indices) == 1]:
        others = {1: "", 2: " 1 more class has a single row, too."}
        more = others.get(len(single), f" {len(single) - 1} more classes have a single row, too.")
        raise DataError(
            f"The class {single[0]!r} has a single row in the train split, row {row_of(members[single[0]][0])}.{more} To hold "
            "out rows of each class, each needs at least two: add rows, remove the class, or name evaluation data "
            "(task.eval_split or task.data_files.eval)."
        )
    return [rng.permutation(np.array(indices)) for indices in members.values()]

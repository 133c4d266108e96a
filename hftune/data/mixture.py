"""Several data sets to train on: loaded, brought to the same columns, and how often an epoch uses each. Independent of tasks.

Whatever a recipe says, it becomes a weight of each data set, before training; see ``BatchPlan.mixture``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import fsum, inf
from typing import Any

import datasets
import numpy as np
import pyarrow as pa

from hftune.batch_plan import drawn, spread
from hftune.data.in_place import RowsInPlace
from hftune.data.rows import load_split, row_numbers
from hftune.data.sources import Source, mixture_name
from hftune.errors import ConfigError, DataError, did_you_mean


def samples_of_rows(rows_N: np.ndarray, sizes: Sequence[int]) -> list[int]:
    """Return how many samples each data set has.

    Args:
        rows_N: the number of the row that each sample is made of.
        sizes: rows of each data set.
    """
    return np.diff(np.searchsorted(rows_N, np.cumsum(sizes)), prepend=0).tolist()


@dataclass(frozen=True)
class Mixture:
    """The rows of several data sets, one data set after the other."""

    names: Sequence[str]
    """What to call each in messages."""
    sources: Sequence[datasets.Dataset]
    """The rows of each."""
    weights: Sequence[float] | None = None
    """How often an epoch uses each sample of each; None: it follows from ``shares`` and ``mixing``."""
    shares: Sequence[float] | None = None
    """Of an epoch, in any unit; None: they follow from the sizes."""
    mixing: Mapping[str, Any] = field(default_factory=dict)
    """See ``TextTask.mixing``."""

    def plan(self, counts: Sequence[int], lengths: Any) -> list[tuple[int, float]]:
        """Return number of samples and weight of each data set, for ``BatchPlan.mixture``.

        Args:
            counts: samples of each.
            lengths: of all samples, in tokens; None if they have none.

        Raises:
            ConfigError: tokens count, and the samples have none.
        """
        if self.weights is not None:
            return [*zip(counts, self.weights, strict=True)]
        rule = dict(self.mixing)
        if rule.pop("by", "rows") == "tokens":
            if lengths is None:
                raise ConfigError("task.mixing.by=tokens needs a task whose samples have lengths. Set task.mixing.by=rows.")
            sizes = [count * mean for count, mean in zip(counts, self.mean_lengths(counts, lengths), strict=True)]
        else:
            sizes = [*map(float, counts)]
        return [*zip(counts, mixed_weights(sizes, self.shares, **rule), strict=True)]

    def use(self, plan: Sequence[Sequence[Any]], lengths: Any) -> list[dict[str, Any]]:
        """Return what an epoch uses of each data set, as run.json says it: samples, how many of them, tokens of these, about.

        Args:
            plan: number of samples and weight of each.
            lengths: as for ``plan``. Of samples that are made as needed, tokens are counted only if the plan needs them.
        """
        counts, is_counted = [count for count, _ in plan], isinstance(lengths, np.ndarray) or self.mixing.get("by") == "tokens"
        means = self.mean_lengths(counts, lengths) if is_counted else [None] * len(counts)
        found = []
        for name, (count, weight), mean in zip(self.names, plan, means, strict=True):
            tokens = None if mean is None else round(drawn(count, weight) * mean)
            found.append({"name": name, "samples": count, "weight": weight, "used": drawn(count, weight), "tokens": tokens})
        return found

    def mean_lengths(self, counts: Sequence[int], lengths: Any) -> list[float]:
        """Return the mean length of a sample of each data set, of at most SURVEYED ones each; see ``plan``.

        Raises:
            DataError: none of those of a data set can be trained on.
        """
        means = []
        for name, start, count in zip(self.names, [0, *accumulate(counts)], counts, strict=False):
            known = lengths[start + spread(count)]
            if (known < 0).all():
                raise DataError(f"task.datasets: none of {len(known):,} rows of {name} that were looked at can be trained on.")
            means.append(float(known[known >= 0].mean()))
        return means

    def sizes(self, kept: datasets.Dataset) -> list[int]:
        """Return how many rows of each data set are among those kept of all rows, which are in the order of the data sets.

        Raises:
            DataError: no row of a data set is left.
        """
        if len(kept) == self._ends[-1]:
            return [*map(len, self.sources)]
        places_N = np.searchsorted(self._ends, row_numbers(kept, range(len(kept))), side="right")
        sizes = np.bincount(places_N, minlength=len(self.sources)).tolist()
        if 0 in sizes:
            name = self.names[sizes.index(0)]
            raise DataError(f"task.datasets: no row of {name} is left to train on. Use more rows, or leave this data set out.")
        return sizes

    def parts(self, kept: datasets.Dataset) -> list[datasets.Dataset]:
        """Return those kept of all rows by data set."""
        starts = [0, *accumulate(self.sizes(kept))]
        return [kept.select(range(start, stop)) for start, stop in pairwise(starts)]

    def row_name(self, index: int) -> str:
        """Return which row of which data set a row of all of them is, for messages."""
        place = int(np.searchsorted(self._ends, index, side="right"))
        return f"{index - ([0, *self._ends][place])} of {self.names[place]}"

    @property
    def _ends(self) -> list[int]:
        return [*accumulate(map(len, self.sources))]


def mixed_weights(
    sizes: Sequence[float], shares: Sequence[float] | None = None, temperature: float = 1, max_repeats: float = inf
) -> list[float]:
    """Return how often an epoch that is as long as all data sets together uses each sample of each of them.

    What ``max_repeats`` cuts off a data set goes to the others, in proportion to their shares.

    Args:
        sizes: of the data sets, in samples or tokens.
        shares: of the epoch, in any unit; None: in proportion to size ** (1 / temperature).
        max_repeats: the most that a sample is used, at least 1.
    """
    wanted = shares or [(size / max(sizes)) ** (1 / temperature) for size in sizes]
    most_used_first = sorted(range(len(sizes)), key=lambda index: -wanted[index] / sizes[index])
    weights, rest = [float(max_repeats)] * len(sizes), fsum(sizes)
    for place, index in enumerate(most_used_first):
        unit = rest / fsum(wanted[other] for other in most_used_first[place:])
        if unit * wanted[index] <= max_repeats * sizes[index]:
            for other in most_used_first[place:]:
                weights[other] = unit * wanted[other] / sizes[other]
            break
        rest -= max_repeats * sizes[index]
    return [float(f"{weight:.9g}") for weight in weights]  # no machine's last bits, as checkpoints and ledgers hold them


def load_mixture(
    entries: Sequence[Mapping[str, Any]],
    sources: Sequence[Source],
    in_place: Callable[[Source, str], RowsInPlace | None],
    mixing: Mapping[str, Any] = {},
) -> Mixture:
    """Load the data sets of ``task.datasets``, which come from ``sources``.

    Args:
        in_place: returns the rows of a source and split that are read where they are; None: they are loaded.

    Raises:
        DataError: one of them cannot be loaded, lacks a column, or holds something else in a column of the same name.
    """
    names = [mixture_name(entry, index) for index, entry in enumerate(entries)]
    found = [
        in_place(source, "train") or load_split(source, "train", str(entry.get("split", "train")))
        for entry, source in zip(entries, sources, strict=True)
    ]
    loaded = [renamed(*each) for each in zip(entries, sources, found, names, strict=True)]
    common = [column for column in loaded[0].column_names if all(column in rows.column_names for rows in loaded)]
    if not common:
        listed = "; ".join(f"{name} has {', '.join(rows.column_names)}" for name, rows in zip(names, loaded, strict=True))
        raise DataError(f"task.datasets: no column is in all of them: {listed}. Rename them: columns: {{text: review}}.")
    loaded = _same_features([rows.select_columns(common) for rows in loaded], names)
    if mixing or "share" in entries[0]:
        shares = [float(entry["share"]) for entry in entries] if "share" in entries[0] else None
        return Mixture(names, loaded, None, shares, mixing)
    return Mixture(names, loaded, [float(entry.get("weight", 1)) for entry in entries])


def renamed(entry: Mapping[str, Any], source: Source, rows: datasets.Dataset, name: str) -> datasets.Dataset:
    """Return rows with the columns that the entry of a data set names: ``columns: {text: review}``.

    Raises:
        DataError: there is no such column.
    """
    names = {column: ours for ours, column in (entry.get("columns") or {}).items()}
    for column, ours in names.items():
        if column not in rows.column_names:
            hint = did_you_mean(column, rows.column_names)
            named = f"{source.key}.columns.{ours}={column}"
            raise DataError(f"{named} is not a column of {name}. It has: {', '.join(rows.column_names)}.{hint}")
    rows = rows.remove_columns([ours for ours in names.values() if ours in rows.column_names and ours not in names])
    return rows.rename_columns({column: ours for column, ours in names.items() if column != ours})


def _same_features(loaded: Sequence[datasets.Dataset], names: Sequence[str]) -> list[datasets.Dataset]:
    """Cast whole numbers and texts of several sizes to one, and refuse columns that hold different things."""
    first = loaded[0].features
    for name, rows in zip(names[1:], loaded[1:], strict=True):
        for column, kind in rows.features.items():
            if _kind(kind) != _kind(first[column]):
                raise DataError(
                    f"Column {column!r} holds {_described(first[column])} in {names[0]}, but {_described(kind)} in {name}. The "
                    "data sets of task.datasets must agree: convert one of them, or rename its column (columns: ...)."
                )
    cast = [loaded[0]]
    for name, rows in zip(names[1:], loaded[1:], strict=True):
        try:
            cast.append(rows if rows.features == first else rows.cast(first))
        except (ValueError, pa.ArrowException) as error:
            reason = str(error).strip().rstrip(".")
            raise DataError(
                f"{name}: its values do not fit into the columns of the first data set of task.datasets: {reason}. Convert one "
                "of them, or list this one first."
            ) from error
    return cast


def _kind(feature: Any) -> Any:
    """Return what a feature holds, whatever its number of bits."""
    dtype = str(getattr(feature, "dtype", ""))
    if getattr(feature, "names", None):
        return feature.names
    return next((kind for kind in ("string", "int", "float") if kind in dtype), str(feature))


def _described(feature: Any) -> str:
    if names := getattr(feature, "names", None):
        return f"classes ({', '.join(names[:5])}{', ...' if len(names) > 5 else ''})"
    return str(getattr(feature, "dtype", feature))

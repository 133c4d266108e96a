"""Translates the labels of a data set, numbers or names, to the class numbers that models learn. Independent of tasks."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hftune.errors import DataError

if TYPE_CHECKING:
    import datasets
    from numpy.typing import ArrayLike

MISSING = ("na", "n/a", "nan", "null", "none", "<na>")
"""Usual spellings of a missing value, in upper or lower case. Each of them may also be the name of a class."""
MAX_IDS = 100
"""Above this many classes, a column with almost one class per row is taken for an id and refused."""


def names_of(kind: Any) -> list[str] | None:
    """Return the names that a data set itself gives the classes of a column: those of a ``ClassLabel``, false and true.

    Args:
        kind: the column's feature; of a column of lists, that of their values.
    """
    return ["false", "true"] if getattr(kind, "dtype", None) == "bool" else getattr(kind, "names", None)


def read_labels(rows: datasets.Dataset, column: str, split: str, row_of: Callable[[int], int]) -> list[Any]:
    """Return the labels of a column: names if it has any (also those of its ``ClassLabel``), else whole numbers.

    Args:
        row_of: translates an index of ``rows`` to the row in the data, for messages.

    Raises:
        DataError: a row has no label, or the column has neither whole numbers nor names.
    """
    kind = rows.features[column]
    dtype = str(getattr(kind, "dtype", kind))
    is_known = dtype.removeprefix("u").startswith(("bool", "int", "string", "large_string", "null"))
    if not is_known and not dtype.startswith(("float", "double")):
        raise DataError(f"Column {column!r} of the {split} split holds {dtype}, not whole numbers or names.")
    labels = rows[column][:]  # iterating over a column takes 200 times as long
    _refuse_missing(labels, column, split, row_of)
    if not is_known:  # only now, because whole numbers with missing ones among them are floats, too
        raise DataError(f"Column {column!r} of the {split} split holds {dtype}, not whole numbers or names.")
    names = names_of(kind)
    if not names:
        return labels
    return [names[label] if 0 <= label < len(names) else label for label in labels]  # -1 stands for a missing label


def _is_missing(label: Any) -> bool:
    return label is None or (isinstance(label, str) and not label.strip())


def _refuse_missing(labels: Sequence[Any], column: str, split: str, row_of: Callable[[int], int]) -> None:
    if missing := [index for index, label in enumerate(labels) if _is_missing(label)]:
        more = f", and {len(missing) - 1} more rows have none" if len(missing) > 1 else ""
        raise DataError(
            f"Row {row_of(missing[0])} of the {split} split has no label in column {column!r}{more}. "
            "Fill it in, or remove the row."
        )


def class_names(
    labels: Sequence[Any], split: str, row_of: Callable[[int], int], ordinal: bool = False, elsewhere: Iterable[Any] = ()
) -> list[str]:
    """Return the class names for the labels found, the distinct ones, in order.

    Numbers, and texts that are all whole numbers, are sorted as numbers, other texts alphabetically.

    Args:
        ordinal: whether the order of the classes has a meaning.
        elsewhere: labels of the other splits. Their numbers are classes too, from 0 to the largest of ``labels``, as a small
            training split may lack one.

    Raises:
        DataError: nearly all labels differ; numbers with a text for a missing value among them; or ordinal classes whose order
            is unknown.
    """
    distinct = set(labels)
    if len(distinct) > MAX_IDS and len(distinct) > 0.9 * len(labels):
        raise DataError(
            f"The {split} split has {len(distinct):,} different labels in {len(labels):,} rows, as a column of ids has. Name "
            "the column of the classes in task.label_column, or list the classes in task.label_names."
        )
    texts = {label for label in distinct if isinstance(label, str)}
    if not texts:
        highest = max(distinct, default=0)
        numbers = distinct | {label for label in elsewhere if isinstance(label, int) and 0 <= label <= highest}
        return [str(number) for number in sorted(numbers or {0})]
    numbers = {label for label in texts if is_whole(label)}
    if numbers == texts:
        return sorted(texts, key=lambda text: (int(text), text))
    missing = {label for label in texts - numbers if label.strip().lower() in MISSING}
    if numbers and missing == texts - numbers:
        index = next(index for index, label in enumerate(labels) if label in missing)
        raise DataError(
            f"Row {row_of(index)} of the {split} split has the label {labels[index]!r}, but other rows have numbers. Correct "
            "the row, or list all classes in task.label_names."
        )
    if ordinal:
        raise DataError(
            f"task.ordinal=true: the labels are texts ({', '.join(sorted(texts)[:10])}), whose order is unknown. Set "
            "task.label_names to all of them, the lowest grade first, or task.ordinal=false if they are not grades."
        )
    return sorted(texts)


def is_whole(text: str) -> bool:
    return re.fullmatch(r"\s*[+-]?\d+\s*", text) is not None


@dataclass(frozen=True)
class Classes:
    """The classes of a task: their names in the order of the class numbers, and what the labels of the data mean."""

    names: Sequence[str]
    """``task.label_names``, if set."""
    data_names: Sequence[str] | None
    """Class names of the training data, in their order: some or all of ``names``, in any order; or different names for the same
    classes in the same order ("1 star", "one star"). None: the data have no names."""
    are_labels: bool
    """Whether ``names`` are what ``class_names`` found, so that a label 5 is the class "5", not the sixth, also if other
    classes are named by words."""

    at_least: int = 2
    """Number of classes that there must be."""

    @classmethod
    def of(cls, given: Sequence[str] | None, data_names: Sequence[str] | None, find: Callable[[], list[str]]) -> Classes:
        """Name the classes as the recipe does, or else the data, or else their labels, which ``find`` returns."""
        names = given or data_names
        return cls(list(names or find()), data_names, not names)

    def numbers(self, labels: Sequence[Any], split: str, row_of: Callable[[int], Any]) -> list[int]:
        """Translate the labels of a split, as ``read_labels`` returns them, to class numbers.

        Args:
            row_of: translates an index of ``labels`` to the row in the data, for messages.

        Raises:
            DataError: ``names`` and ``data_names`` do not match, there is only one class, or a label is not one of the classes.
        """
        count = len(self.names)
        if count < self.at_least:
            raise DataError(f"All samples have the label {self.names[0]!r}, but classification needs at least two classes.")
        numbers, data_names = {name: number for number, name in enumerate(self.names)}, self.data_names or ()
        moved = [name for number, name in enumerate(data_names) if numbers.get(name, number) != number]
        if not set(data_names) <= numbers.keys():
            if moved or len(data_names) != count:
                raise DataError(
                    f"task.label_names=[{', '.join(self.names)}] does not match the class names of the train split: "
                    f"{', '.join(data_names)}. Use the same names, in any order; or a new name for each, in that order; or "
                    "task.label_names=null, which uses those of the data."
                )
            numbers |= {name: number for number, name in enumerate(data_names)}
        elif moved and any(isinstance(label, int) for label in labels):
            raise DataError(
                f"The labels of the {split} split are numbers without names, and task.label_names changes the order of the "
                f"train split's names ({', '.join(data_names)}), so what the numbers mean is unknown. Set "
                "task.label_names=null."
            )
        own: dict[int, int] = {}
        if self.are_labels and not all(isinstance(label, str) for label in labels):
            own = {int(name): number for name, number in numbers.items() if is_whole(name)}
        translated = [
            numbers.get(label)
            if isinstance(label, str)
            else numbers.get(str(label), own.get(label))
            if self.are_labels
            else label
            for label in labels
        ]
        wrong = [index for index, number in enumerate(translated) if number is None or not 0 <= number < count]
        if wrong:
            # If names are expected and some labels are numbers written as texts, a label that is neither is the one to report.
            odd = (index for index in wrong if isinstance(labels[index], str) and not is_whole(labels[index]))
            index = next(odd, wrong[0])
            raise DataError(
                f"Row {row_of(index)} of the {split} split has the label {labels[index]!r}; there are {count} labels"
                f"{'' if self.are_labels else f', 0 to {count - 1}'} ({', '.join(self.names[:10])}). "
                "Correct the row, or set task.label_names; null uses the names of the data."
            )
        return translated

    def counts(self, numbers_N: ArrayLike) -> dict[str, int]:
        """Return the number of samples of each class, by its name."""
        return dict(zip(self.names, np.bincount(numbers_N, minlength=len(self.names)).tolist(), strict=True))

    def notices(self) -> list[str]:
        """Return notices of classes whose names differ in nothing but case and outer white space, and of numbers for names."""
        alike: dict[str, list[str]] = {}
        for name in self.names:
            alike.setdefault(name.strip().casefold(), []).append(name)
        messages = [
            f"The classes {' and '.join(map(repr, group))} differ only in case or white space. If they are one, correct the "
            "labels."
            for group in alike.values()
            if len(group) > 1
        ]
        are_numbers = self.are_labels and all(map(is_whole, self.names))
        if are_numbers and [*map(int, self.names)] != [*range(len(self.names))]:
            shown = f"{', '.join(self.names[:10])}{', ...' if len(self.names) > 10 else ''}"
            messages.append(
                f"The {len(self.names)} classes are the numbers among the labels: {shown}. task.label_names would name them."
            )
        return messages


def read_label_lists(
    rows: datasets.Dataset, column: str, split: str, row_of: Callable[[int], int]
) -> tuple[list[Any], list[int]]:
    """Return the labels of all rows of a column of lists, as ``read_labels`` does, and the index of the row of each.

    Raises:
        DataError: a row has no list, or lists no label or the same one twice.
    """
    inner = getattr(kind := rows.features[column], "feature", None)
    if inner is None:
        raise DataError(
            f"Column {column!r} of the {split} split holds {getattr(kind, 'dtype', kind)}, not lists of labels. Name a column "
            "of 0 and 1 for each label in task.label_columns, or set task.problem_type=single_label_classification."
        )
    names, labels, indices = names_of(inner), [], []
    for index, listed in enumerate(rows[column][:]):
        if listed is None:
            wrong = f"has no list in column {column!r}. An empty list means that it has none of the labels."
        elif any(map(_is_missing, listed)):
            wrong = f"lists a label without a name in column {column!r}. Fill it in, or remove it."
        elif len(set(listed)) < len(listed):
            wrong = (
                f"lists a label twice in column {column!r}: {listed}. List each label that the text has once, by name or "
                "number; or name a column of 0 and 1 for each label in task.label_columns."
            )
        else:
            wrong = None
        if wrong is not None:
            raise DataError(f"Row {row_of(index)} of the {split} split {wrong}")
        labels += [names[label] if names and 0 <= label < len(names) else label for label in listed]
        indices += [index] * len(listed)
    return labels, indices


def flags_of(numbers: Iterable[int], indices: Iterable[int], num_rows: int, num_labels: int) -> np.ndarray:
    """Return a row of 0 and 1 for each row, (N, K) float32: 1 for the labels that it lists."""
    flags_NK = np.zeros((num_rows, num_labels), np.float32)
    flags_NK[list(indices), list(numbers)] = 1
    return flags_NK


def read_flags(rows: datasets.Dataset, columns: Sequence[str], split: str, row_of: Callable[[int], int]) -> np.ndarray:
    """Return columns of 0 and 1, or of true and false, as (N, K) float32.

    Raises:
        DataError: a value is neither.
    """
    flags_NK = np.empty((len(rows), len(columns)), np.float32)
    for number, column in enumerate(columns):
        values = rows[column][:]
        if wrong := [index for index, value in enumerate(values) if isinstance(value, str) or value not in (0, 1)]:
            raise DataError(
                f"Row {row_of(wrong[0])} of the {split} split has {values[wrong[0]]!r} in column {column!r}, which is neither "
                "0 nor 1. Each column of task.label_columns says whether a text has that label."
            )
        flags_NK[:, number] = values
    return flags_NK


def read_targets(rows: datasets.Dataset, column: str, split: str, row_of: Callable[[int], int]) -> np.ndarray:
    """Return the numbers of a column, (N,) float32.

    Raises:
        DataError: a value is missing or not a number; the message names the first such row.
    """
    values = rows[column][:]
    _refuse_missing(values, column, split, row_of)
    numbers = [_number(value) for value in values]
    if wrong := [index for index, number in enumerate(numbers) if not math.isfinite(number)]:
        raise DataError(
            f"Row {row_of(wrong[0])} of the {split} split has {values[wrong[0]]!r} in column {column!r}, which is not a "
            "number. Correct it, or set task.problem_type if these are classes."
        )
    return np.array(numbers, np.float32)


def _number(value: Any) -> float:
    if isinstance(value, str) and "_" in value:  # 2024_05 is 202405.0 to Python
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def check_learnt(
    numbers: Mapping[str, Sequence[int]], names: Sequence[str], row_of: Callable[[str], Callable[[int], Any]], what: str
) -> None:
    """Check that each class of the other splits is also in the train split.

    Folders and data sets list their classes for all splits together, so one that cannot be learnt would not be noticed.

    Args:
        numbers: class numbers of each split.
        row_of: returns, for a split, what translates an index to the row in the data, for messages.
        what: what messages call the samples.

    Raises:
        DataError: a class has no training samples.
    """
    learnt = set(numbers["train"])
    for split, own in numbers.items():
        unknown = [index for index, number in enumerate(own) if number not in learnt]
        if unknown:
            raise DataError(
                f"Row {row_of(split)(unknown[0])} of the {split} split has the label {names[own[unknown[0]]]!r}, which none of "
                f"the {what} of the train split has. Add training {what} of it, or remove it; or list the classes to learn in "
                "task.label_names."
            )

"""Class labels as they stand in data sets, numbers or names, and the class numbers that models learn. Knows no task."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from hftune.errors import DataError

if TYPE_CHECKING:
    import datasets


def read_labels(rows: datasets.Dataset, column: str, part: str) -> list[Any]:
    """Return the labels of a column, or raise DataError where it holds neither whole numbers nor names."""
    kind = rows.features[column]
    if not str(getattr(kind, "dtype", kind)).removeprefix("u").startswith(("int", "string", "large_string", "null")):
        said = getattr(kind, "dtype", kind)
        raise DataError(f"Column {column!r} of the {part} split holds {said}, not whole numbers or names.")
    return list(rows[column])


def class_names(labels: Iterable[Any]) -> list[str]:
    """Return the names of the classes that are found: the labels themselves, or "0" to the largest number."""
    distinct = set(labels)
    if all(isinstance(label, str) for label in distinct):
        return sorted(distinct)
    numbers = [label for label in distinct if isinstance(label, int)]
    return [str(number) for number in range(max(numbers, default=0) + 1)]


def class_numbers(labels: Sequence[Any], names: Sequence[str], part: str, row_of: Callable[[int], int]) -> list[int]:
    """Translate labels to class numbers.

    Args:
        names: of the classes, in the order of their numbers.
        row_of: the row of the data, for messages, that a place among the labels comes from.

    Raises:
        DataError: there is but one class, or a label that is none of them.
    """
    count = len(names)
    if count < 2:
        raise DataError(f"All samples have the label {names[0]!r}: there is nothing to tell apart.")
    numbers = {name: number for number, name in enumerate(names)}
    found = [numbers.get(label) if isinstance(label, str) else label for label in labels]
    for place, number in enumerate(found):
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < count:
            raise DataError(
                f"Row {row_of(place)} of the {part} split has the label {labels[place]!r}; "
                f"there are {count} labels, 0 to {count - 1} ({', '.join(names[:10])}). "
                "Correct the row, or set task.label_names."
            )
    return found

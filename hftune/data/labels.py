"""Class labels as they stand in data sets, numbers or names, and the class numbers that models learn. Knows no task."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hftune.errors import DataError

if TYPE_CHECKING:
    import datasets

MISSING = ("na", "n/a", "nan", "null", "none", "<na>")
"""What files write, in upper or lower case, where a value is missing. Each may be the name of a class just as well."""


def read_labels(rows: datasets.Dataset, column: str, split: str, row_of: Callable[[int], int]) -> list[Any]:
    """Return the labels of a column: names, where it has any (those of its ``ClassLabel``, too), else whole numbers.

    Args:
        row_of: translates a place among the rows to the row of the data, for messages.

    Raises:
        DataError: a row has no label, or the column holds neither whole numbers nor names.
    """
    kind = rows.features[column]
    said = str(getattr(kind, "dtype", kind))
    is_known = said.removeprefix("u").startswith(("int", "string", "large_string", "null"))
    if not is_known and not said.startswith(("float", "double")):
        raise DataError(f"Column {column!r} of the {split} split holds {said}, not whole numbers or names.")
    labels = list(rows[column])
    if missing := [place for place, label in enumerate(labels) if label is None or label == ""]:
        more = f", and {len(missing) - 1} more rows have none" if len(missing) > 1 else ""
        raise DataError(
            f"Row {row_of(missing[0])} of the {split} split has no label in column {column!r}{more}. "
            "Fill it in, or remove the row."
        )
    if not is_known:  # whole numbers with a missing one among them are floats, too: hence only now
        raise DataError(f"Column {column!r} of the {split} split holds {said}, not whole numbers or names.")
    names = getattr(kind, "names", None)
    if not names:
        return labels
    return [names[label] if 0 <= label < len(names) else label for label in labels]  # -1 stands for a missing label


def class_names(labels: Sequence[Any], split: str, row_of: Callable[[int], int], ordinal: bool = False) -> list[str]:
    """Return the names of the classes that are found, in order: "0" to the largest number, or the labels themselves.

    Texts that are all whole numbers are sorted as numbers, others by letters.

    Args:
        ordinal: the order of the classes has a meaning.

    Raises:
        DataError: whole numbers, and among them a text for a missing value; or texts whose order has to be told.
    """
    distinct = set(labels)
    texts = {label for label in distinct if isinstance(label, str)}
    if not texts:
        return [str(number) for number in range(max(distinct, default=0) + 1)]
    numbers = {label for label in texts if is_whole(label)}
    if numbers == texts:
        return sorted(texts, key=lambda text: (int(text), text))
    missing = {label for label in texts - numbers if label.strip().lower() in MISSING}
    if numbers and missing == texts - numbers:
        place = next(place for place, label in enumerate(labels) if label in missing)
        raise DataError(
            f"Row {row_of(place)} of the {split} split has the label {labels[place]!r}, where others have numbers. Correct the "
            "row, or name all classes in task.label_names."
        )
    if ordinal:
        raise DataError(
            f"task.ordinal=true: the labels are texts ({', '.join(sorted(texts)[:10])}), whose order is not known. Set "
            "task.label_names to all of them, the lowest grade first; or task.ordinal=false if they are no grades."
        )
    return sorted(texts)


def is_whole(text: str) -> bool:
    """Say whether a text is a whole number."""
    return re.fullmatch(r"\s*[+-]?\d+\s*", text) is not None


def _numbers_by_name(names: Sequence[str], own: Sequence[str] | None) -> dict[str, int]:
    """Return each class's number by all names that it goes by in the data; see ``class_numbers``."""
    numbers = {name: number for number, name in enumerate(names)}
    if own is None or set(own) <= numbers.keys():
        return numbers
    moved = [name for number, name in enumerate(own) if numbers.get(name, number) != number]
    if moved or len(own) != len(names):
        raise DataError(
            f"task.label_names=[{', '.join(names)}] does not fit the train split's own names of the classes: "
            f"{', '.join(own)}. Use the same names, in any order; or a new name for each, in the data's order; or "
            "task.label_names=null for the data's own."
        )
    return numbers | {name: number for number, name in enumerate(own)}


def class_numbers(
    labels: Sequence[Any], names: Sequence[str], own: Sequence[str] | None, split: str, row_of: Callable[[int], int]
) -> list[int]:
    """Translate the labels of a split, as ``read_labels`` returns them, to class numbers.

    Args:
        names: of the classes, in the order of their numbers; ``task.label_names``, if that is set.
        own: the names that the training data have for their classes, in their order. Either the same names in any order, or
            some of them; or different ones for the same classes in the same order ("1 star", "one star"). None: none.
        row_of: translates a place among the labels to the row of the data, for messages.

    Raises:
        DataError: ``names`` and ``own`` do not fit together, there is only one class, or a label is none of them.
    """
    count = len(names)
    if count < 2:
        raise DataError(f"All samples have the label {names[0]!r}: there is nothing to tell apart.")
    numbers = _numbers_by_name(names, own)
    if any(numbers[name] != number for number, name in enumerate(own or [])) and any(
        isinstance(label, int) for label in labels
    ):
        raise DataError(
            f"The {split} split's labels are numbers without names, and task.label_names puts the train split's own names "
            f"({', '.join(own)}) into a different order: what the numbers mean is not known. Set task.label_names=null."
        )
    found = [numbers.get(label) if isinstance(label, str) else label for label in labels]
    wrong = [place for place, number in enumerate(found) if number is None or not 0 <= number < count]
    if wrong:
        # Where names are expected and numbers stand in texts, the row with a different text is the one to look at.
        odd = (place for place in wrong if isinstance(labels[place], str) and not is_whole(labels[place]))
        place = next(odd, wrong[0])
        raise DataError(
            f"Row {row_of(place)} of the {split} split has the label {labels[place]!r}; "
            f"there are {count} labels, 0 to {count - 1} ({', '.join(names[:10])}). "
            "Correct the row, or set task.label_names; null takes the data's own."
        )
    return found

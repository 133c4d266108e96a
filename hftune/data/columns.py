"""Chooses the column that a task reads where the recipe names none and there is only one way. Independent of tasks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hftune.errors import DataError, did_you_mean

if TYPE_CHECKING:
    import datasets

TEXTS = ("text", "sentence", "review", "content", "document", "article")
"""Usual names of a column of texts."""
LABELS = ("label", "labels", "target", "class", "category")
"""Usual names of a column of labels or of target values."""
IMAGES = ("image", "img", "picture", "photo")
"""Usual names of a column of images."""


def choose(
    key: str,
    given: str | None,
    rows: datasets.Dataset,
    fits: Callable[[Any], bool],
    usual: Sequence[str] = (),
    taken: Sequence[str] = (),
) -> str:
    """Return the given column; else the only one with one of the usual names; else the only one that fits.

    Args:
        key: the key that names the column, such as task.text_column, for messages.
        fits: tells whether a column's feature is of the right kind; see ``is_text`` and those below.
        taken: columns that have another use.

    Raises:
        DataError: the given column does not exist, or there is not exactly one to choose.
    """
    columns = ", ".join(rows.column_names)
    if given is not None:
        if given not in rows.column_names:
            hint = did_you_mean(given, rows.column_names)
            raise DataError(f"{key}={given} is not a column of the train split. It has: {columns}.{hint}")
        return given
    free = [column for column in rows.column_names if column not in taken]
    named = [column for column in free if column in usual]
    found = named or [column for column in free if fits(rows.features[column])]
    if len(found) == 1:
        return found[0]
    which = f"several columns would do: {', '.join(found)}" if found else "no column of the train split would do"
    raise DataError(f"{key} is not set, and {which}. Set it to one of the columns: {columns}.")


def chosen(key: str, given: str | None, column: str, columns: Sequence[str]) -> list[str]:
    """Return a notice of the column that ``choose`` has chosen from ``columns``; nothing if the recipe names it."""
    return [] if given is not None else [f"{key}={column}, chosen from the columns {', '.join(columns)}."]


def is_text(kind: Any) -> bool:
    """Return whether a feature of a data set holds texts."""
    return getattr(kind, "dtype", None) in ("string", "large_string")


def is_number(kind: Any) -> bool:
    """Return whether it holds whole or other numbers, which are not the numbers of named classes."""
    dtype = str(getattr(kind, "dtype", None))
    return dtype.removeprefix("u").startswith(("int", "float", "double", "decimal")) and not hasattr(kind, "names")


def is_label(kind: Any) -> bool:
    """Return whether it may hold classes: texts, whole numbers, true and false, or named classes."""
    dtype = str(getattr(kind, "dtype", None))
    return is_text(kind) or hasattr(kind, "names") or dtype.removeprefix("u").startswith(("int", "bool"))


def is_image(kind: Any) -> bool:
    """Return whether it holds images."""
    return type(kind).__name__ == "Image"


def is_list(kind: Any, of: Callable[[Any], bool] = lambda kind: True) -> bool:
    """Return whether it holds lists, of what ``of`` tells."""
    inner = kind[0] if isinstance(kind, list) and kind else getattr(kind, "feature", None)
    return inner is not None and not isinstance(inner, dict) and of(inner)

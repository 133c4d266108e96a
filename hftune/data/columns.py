"""The columns that a task reads, by their roles: what each holds, and which one it is if the recipe names none.

Independent of tasks, which list their roles; training, evaluation, prediction and messages find columns by them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hftune.errors import DataError, did_you_mean

if TYPE_CHECKING:
    import datasets

TEXTS = ("text", "sentence", "review", "content", "document", "article")
"""Usual names of a column of texts."""
LABELS = ("label", "labels", "target", "class", "category")
"""Usual names of a column of labels or of target values."""
BOXES = ("bbox", "boxes", "bboxes")
"""Usual names of the boxes in a column of objects."""
CATEGORIES = ("category", "categories", "label", "labels", "class_labels", "category_id")
"""Usual names of their classes."""
IMAGES = ("image", "img", "picture", "photo")
"""Usual names of a column of images."""
AUDIO = ("audio", "speech", "recording", "sound")
"""Usual names of a column of recordings."""
FILES = ("file_name", "path", "file")
"""Usual names of a column of paths."""


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


def is_list(kind: Any, of: Callable[[Any], bool] = lambda kind: True) -> bool:
    """Return whether it holds lists, of what ``of`` tells."""
    inner = kind[0] if isinstance(kind, list) and kind else getattr(kind, "feature", None)
    return inner is not None and not isinstance(inner, dict) and of(inner)


def are_answers(kind: Any) -> bool:
    """Return whether it holds answers as SQuAD has them, text and answer_start: two lists, or a list of both."""
    inner = kind[0] if isinstance(kind, list) and kind else getattr(kind, "feature", kind)
    return isinstance(inner, dict) and {"text", "answer_start"} <= {*inner}


def is_objects(kind: Any) -> bool:
    """Return whether it holds objects: lists of boxes and of what else is known of each."""
    inner = getattr(kind, "feature", kind)
    return isinstance(inner, dict) and any(name in inner for name in BOXES)


KINDS: dict[str, Callable[[Any], bool]] = {
    "text": is_text,
    "label": is_label,
    "number": is_number,
    "objects": is_objects,
    "image": lambda kind: type(kind).__name__ == "Image",
    "recording": lambda kind: type(kind).__name__ == "Audio" or (isinstance(kind, dict) and "array" in kind),
    "text or messages": lambda kind: is_text(kind) or isinstance(kind, list) or getattr(kind, "feature", None) is not None,
    "list of texts": lambda kind: is_list(kind, is_text),
    "list of labels": lambda kind: is_list(kind, is_label),
    "SQuAD answer": are_answers,
    "label, number or list of labels": lambda kind: is_label(kind) or is_number(kind) or is_list(kind, is_label),
}
"""What a column may hold, each with what tells by its feature."""


@dataclass(frozen=True)
class Role:
    """What a task reads a column for. The field ``NAME_column`` of the task, or ``NAME_columns`` for several, names it."""

    kind: str
    """What the column holds: a key of KINDS."""
    usual: Sequence[str] = ()
    """Usual names of the column. One of them comes before the only column that holds the right kind."""
    optional_in: Collection[str] = ()
    """"train" if the column is read only if the recipe names it; "predict" if predictions do not need it."""
    usual_inputs: Sequence[str] = ()
    """Further usual names in a table to predict from."""


def find_columns(roles: Mapping[str, Role], task: Any, rows: datasets.Dataset) -> dict[str, str]:
    """Return the columns of the training rows that a task reads, by the fields that name them: {"text_column": "review"}.

    Raises:
        DataError: a column that the recipe names does not exist; or it names none, and there is not exactly one to choose.
    """
    given: dict[str, Any] = {name: getattr(task, f"{name}_column", None) for name in roles}
    several: dict[str, Any] = {name: getattr(task, f"{name}_columns", None) for name in roles}
    named = {*given.values(), *(column for columns in several.values() for column in columns or ())}
    found: dict[str, str] = {}
    for place, (name, role) in enumerate(roles.items()):
        if several[name] is not None:
            found |= {f"{name}_columns[{index}]": column for index, column in enumerate(several[name])}
        elif given[name] is not None:
            found[f"{name}_column"] = given[name]
        elif "train" not in role.optional_in:
            # Usual names of roles further down, whose columns are chosen only if there is no other.
            later = {usual for other in list(roles.values())[place + 1 :] for usual in other.usual} - {*role.usual}
            free = [column for column in rows.column_names if column not in named | {*found.values()}]
            fitting = [column for column in free if KINDS[role.kind](rows.features[column])]
            usual = [column for column in free if column in role.usual]
            choices = usual or [column for column in fitting if column not in later] or fitting
            if role.kind == "recording" and not choices:  # a table may name files
                choices = [column for column in free if column in role.usual_inputs]
            if len(choices) != 1:
                listed = ", ".join(choices)
                which = f"several columns would do: {listed}" if choices else "no column of the train split would do"
                columns = ", ".join(rows.column_names)
                raise DataError(f"task.{name}_column is not set, and {which}. Set it to one of the columns: {columns}.")
            found[f"{name}_column"] = choices[0]
        for key in (key for key in found if key.startswith(f"{name}_column")):
            check_column(rows, f"task.{key}", found[key], "train")
            if role.kind == "image":  # what else a column must hold is checked when it is read
                check_kind(rows, found[key], "train", role.kind)
    return found


def check_column(rows: datasets.Dataset, key: str, column: str, split: str) -> None:
    """Raise DataError unless ``column`` exists; the message lists the columns."""
    if column not in rows.column_names:
        hint = did_you_mean(column, rows.column_names)
        raise DataError(f"{key}={column} is not a column of the {split} split. It has: {', '.join(rows.column_names)}.{hint}")


def check_kind(rows: datasets.Dataset, column: str, split: str, kind: str) -> None:
    """Raise DataError unless a column holds what the key ``kind`` of KINDS says."""
    feature = rows.features[column]
    if not KINDS[kind](feature):
        raise DataError(f"Column {column!r} of the {split} split holds {getattr(feature, 'dtype', feature)}, not {kind}s.")


def chosen(key: str, given: str | None, column: str, columns: Sequence[str]) -> list[str]:
    """Return a notice of a column that was chosen from ``columns``; nothing if the recipe names it."""
    return [] if given is not None else [f"{key}={column}, chosen from the columns {', '.join(columns)}."]

"""Checks of field values that several tasks share. Imports nothing heavy: recipes are validated before torch is imported."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from hftune.errors import format_value
from hftune.task import Task


def bound_problems(task: Task, minimum: Mapping[str, int]) -> Iterator[str]:
    """Yield a sentence for each field whose value is below its minimum; null is not checked."""
    for name, bound in minimum.items():
        if (value := getattr(task, name)) is not None and value < bound:
            yield f"task.{name}={value} must be at least {bound}."


def name_problems(task: Task) -> Iterator[str]:
    """Yield a sentence for each name that is listed twice: classes of one name could not be told apart."""
    for key in ("label_names", "label_columns"):
        for name, count in Counter(getattr(task, key, None) or ()).items():
            if count > 1:
                yield f"task.{key} lists {format_value(name)} {count} times. Give each class a name of its own."

"""Checks of field values that several tasks share. Imports nothing heavy: recipes are validated before torch is imported."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hftune.task import Task


def bound_problems(task: Task, minimum: Mapping[str, int]) -> Iterator[str]:
    """Yield a sentence for each field whose value is below its minimum; null is not checked."""
    for name, bound in minimum.items():
        if (value := getattr(task, name)) is not None and value < bound:
            yield f"task.{name}={value} must be at least {bound}."

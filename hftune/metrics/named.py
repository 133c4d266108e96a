"""Metrics that a recipe names in ``eval.metrics``: modules of ``evaluate``, and the user's own functions.

They see the rows of a whole split, as ``Task.metrics`` does. Independent of tasks and models.
"""

from __future__ import annotations

import functools
import numbers
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from hftune.config.importing import import_named
from hftune.config.keys import is_dotted
from hftune.errors import ConfigError, TrainingError, first_line, format_value

Rows = Sequence[Mapping[str, Any]]
Metric = Callable[[Rows], Any]

FIELDS = {"predictions": ("prediction", "generated"), "references": ("reference", "label", "title", "target")}
"""The fields of a row that a module of ``evaluate`` gets as predictions and as references: the first one that exists."""


def load_metrics(names: Sequence[str]) -> dict[str, Metric]:
    """Import the functions and load the modules of ``evaluate`` that ``eval.metrics`` names.

    Raises:
        ConfigError: one cannot be imported or loaded.
    """
    return {name: _load(name) for name in names}


@functools.cache  # each evaluation asks for them, and loading a module of evaluate takes a second
def _load(name: str) -> Metric:
    if is_function(name):
        path, _, attribute = name.rpartition(".")
        found = import_named("eval.metrics", name, path, attribute)
        if not callable(found):
            raise ConfigError(f"eval.metrics={name} is not a function that takes the rows of a split.")
        return found
    import evaluate

    try:
        module = evaluate.load(name, keep_in_memory=True)
    except Exception as error:  # evaluate raises what its module's own imports do
        raise ConfigError(
            f"eval.metrics={name} is not a module that evaluate can load: {first_line(error)}. Give the path of its script, or "
            "the dotted path of a function that takes the rows."
        ) from error

    def computed(rows: Rows) -> Any:
        columns = {}
        for argument, fields in FIELDS.items():
            if (field := next((field for field in fields if field in rows[0]), None)) is None:
                known = ", ".join(rows[0])
                raise ValueError(
                    f"{name} needs {argument}, a field of the rows called {' or '.join(fields)}; these have {known}"
                )
            columns[argument] = [row[field] for row in rows]
        return module.compute(**columns)

    return computed


def is_function(name: str) -> bool:
    """Say whether a name is the dotted path of a function: else it is a module of ``evaluate``, or the path of its script."""
    return is_dotted(name) and not name.endswith(".py")


def compute(metrics: Mapping[str, Metric], rows: Rows, taken: Collection[str]) -> dict[str, Any]:
    """Compute the metrics on all rows of a split.

    Args:
        taken: the names of the task's own metrics.

    Raises:
        TrainingError: a metric fails, returns something other than a dict or a number, or uses a name that is taken.
    """
    found: dict[str, Any] = {}
    for name, metric in metrics.items():
        try:
            result = metric(rows)
        except Exception as error:  # whatever the user's code, or a package of evaluate, raises
            raise TrainingError(f"eval.metrics={name} failed on {len(rows)} rows: {type(error).__name__}: {error}") from error
        if isinstance(result, numbers.Number) or getattr(result, "ndim", None) == 0:
            result = {name.rpartition(".")[2] if is_function(name) else Path(name).stem: result}
        if not isinstance(result, Mapping):
            raise TrainingError(f"eval.metrics={name} returned {format_value(result)}, which is neither a dict nor a number.")
        for key, value in result.items():
            if key in taken or key in found:
                raise TrainingError(
                    f"eval.metrics={name} returned {key}, which is already computed. Return it under a different name."
                )
            found[key] = value
    return found

"""Errors that refuse or stop a run, and functions that format values, types and the nearest valid name in their messages."""

from __future__ import annotations

import difflib
import math
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin

from hftune.secrecy import without_secrets


class _Said:
    """A message without secrets: it may be about an address, and what it says is printed, logged and sent to trackers."""

    def __init__(self, *said: object):
        super().__init__(*(without_secrets(part) if isinstance(part, str) else part for part in said))


class ConfigError(_Said, ValueError):
    """A recipe that cannot be run as written. Holds every problem found, one sentence each."""

    def __init__(self, problems: str | Sequence[str], recipe: str | None = None):
        self.problems = [*map(without_secrets, [problems] if isinstance(problems, str) else problems)]
        self.recipe = recipe
        super().__init__(self._text())

    def _text(self) -> str:
        if len(self.problems) == 1:
            return self.problems[0]
        name = f"Recipe {self.recipe!r}" if self.recipe else "The recipe"
        return "\n  ".join([f"{name} has {len(self.problems)} problems:", *self.problems])


class DataError(_Said, ValueError):
    """Data that cannot be trained on, such as a wrong column, an empty text or a label out of range. Names split and row."""


class TrainingError(_Said, RuntimeError):
    """Training that had to stop, for example because the loss is not finite. Names step, process and samples."""


class Interrupted(RuntimeError):
    """Training that a signal asked to stop. It can resume; the message says from which step, and how."""


class ElsewhereError(TrainingError):
    """A different process failed, so this one has to stop, too. The message is the report of the failed process."""


_KINDS = {
    float: "a number",
    int: "a whole number",
    bool: "true or false",
    str: "a string",
    list: "a list such as [a,b]",
    dict: "a section of keys",
    types.NoneType: "null",
}


def did_you_mean(value: Any, choices: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" for the choice that is most similar to ``value``, or "" if none is similar."""
    if not isinstance(value, str):
        return ""
    nearest = difflib.get_close_matches(value.lower(), list(choices), n=1)
    return f" Did you mean {nearest[0]!r}?" if nearest else ""


def first_line(error: BaseException) -> str:
    """Return the class of an error and the first line of its message, a part of a sentence: "ValueError: no such file"."""
    return without_secrets(f"{type(error).__name__}: {error}".strip().partition("\n")[0].rstrip(".: "))


def message_of(error: BaseException) -> str:
    """Return the first line of an error's message; with its class if the message says little without, as that of KeyError."""
    line = str(error).strip().partition("\n")[0].rstrip(".")
    return first_line(error) if isinstance(error, (KeyError, ArithmeticError)) or not line else line


def format_value(value: Any) -> str:
    """Format a value as recipes write it, in one line: YAML reads it back as the same value. Texts are always in quotes."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{format_value(key)}: {format_value(item)}' for key, item in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(format_value, value))}]"
    if isinstance(value, str):
        if value.isprintable() and not set("'\\") & set(value):
            return f"'{value}'"
        escapes = {'"': '\\"', "\\": "\\\\"}  # YAML's others are Python's
        return f'"{"".join(escapes.get(x) or (x if x.isprintable() else x.encode("unicode_escape").decode()) for x in value)}"'
    if isinstance(value, float) and not math.isfinite(value):
        return {"nan": ".nan", "inf": ".inf", "-inf": "-.inf"}[repr(value)]
    return {None: "null", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else repr(value)


def is_number(value: Any) -> bool:
    """Return whether a value, such as a metric, is a single number that a float can hold, and not true or false."""
    return isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**1000)


def cut(text: str, length: int) -> str:
    """Return a text, its end left out if it has more characters."""
    return text if len(text) <= length else f"{text[: length - 1]}\N{HORIZONTAL ELLIPSIS}"


def first_few(names: Iterable[Any], most: int = 5) -> str:
    """Name the first few, and say how many more there are: "a, b and 4 more"."""
    named = [*map(str, names)]
    return ", ".join(named[:most]) + (f" and {len(named) - most} more" if len(named) > most else "")


def type_problem(hint: Any, value: Any, default: Any = None) -> str:
    """Describe how ``value`` does not match the type ``hint``: "is not a number, such as 5e-05."."""
    if get_origin(hint) is Literal:
        return f"is not one of {', '.join(get_args(hint))}.{did_you_mean(value, get_args(hint))}"
    parts = get_args(hint) if get_origin(hint) in (types.UnionType, Union) else (hint,)
    if choices := next((part for part in parts if get_origin(part) is Literal), None):
        return f"is not one of {', '.join(get_args(choices))}, null.{did_you_mean(value, get_args(choices))}"
    if isinstance(default, tuple):
        default = f"[{','.join(map(str, default))}]"
    has_example = isinstance(default, (int, float, str)) and default != "" and hint is not bool
    example = f", such as {default}" if has_example else ""
    return f"is not {' or '.join(map(_kind, parts))}{example}."


def holds(kind: type, hint: Any) -> bool:
    """Return whether a type is ``kind``, or a union or list that contains it: holds(str, list[str])."""
    return (get_origin(hint) or hint) is kind or any(
        holds(kind, part) for part in get_args(hint) if isinstance(part, type) or get_args(part)
    )


def _kind(hint: Any) -> str:
    origin = get_origin(hint) or hint
    return f"a list of {len(get_args(hint))} numbers" if origin is tuple else _KINDS.get(origin, str(hint))

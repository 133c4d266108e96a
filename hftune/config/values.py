"""Turns values as recipes write them into those that a key's type asks for. Knows no keys."""

from __future__ import annotations

import re
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from hftune.config.layers import Written

_ODD_NUMBER = re.compile(r"[-+]?(\d[\d_]*(:[0-5]?\d)+(\.[\d_]*)?|0[\d_]+)")
_BOOLEANS = {**dict.fromkeys(("true", "yes", "on", "y"), True), **dict.fromkeys(("false", "no", "off", "n"), False)}
SUPPORTED = (int, float, bool, str, list, tuple, dict, Any, Literal, Union, types.UnionType, types.NoneType)


class WrongType(ValueError):
    """A value that a type does not take. A text says why, if there is more to say than the type."""


def unsupported(hint: Any) -> Any:
    """Return the first part of a type that values cannot be turned into; None if there is none."""
    kind = get_origin(hint) or hint
    if kind not in SUPPORTED:
        return hint
    parts = [part for part in get_args(hint) if kind is not Literal and part is not Ellipsis]
    return next((found for part in parts if (found := unsupported(part)) is not None), None)


def convert(value: Any, hint: Any = Any, is_resolved: bool = False) -> Any:
    """Return a value as a type wants it. A text that refers to other values stays as it is until it is resolved.

    Args:
        value: of a layer: plain data with ``Written`` numbers; or from Python.
        is_resolved: it is what a reference led to, which may be a number for a text.

    Raises:
        WrongType: it cannot be one; or it is not what the text looks like, such as 1:30, which YAML 1.1 reads as 90.
    """
    if isinstance(value, str) and "${" in value and not is_resolved:
        return value
    kinds = get_args(hint) if get_origin(hint) in (types.UnionType, Union) else (hint,)
    if value is None:
        if {types.NoneType, Any} & {*kinds}:
            return None
        raise WrongType
    errors, plain = [], value.value if isinstance(value, Written) else value

    def is_exact(kind: Any) -> bool:
        return kind is Any or (get_origin(kind) is not Literal and isinstance(plain, get_origin(kind) or kind))

    for kind in sorted(kinds, key=is_exact, reverse=True):
        if kind is not types.NoneType:
            try:
                return _convert(value, kind, is_resolved)
            except WrongType as error:
                errors.append(error)
    raise next((error for error in errors if error.args), errors[0])


def _convert(value: Any, kind: Any, is_resolved: bool) -> Any:
    number = value.value if isinstance(value, Written) else value
    origin, parts = get_origin(kind) or kind, get_args(kind)
    if origin is Literal:
        return _choice(number, value, parts)
    if origin is str:
        return _text(value, is_resolved)
    if isinstance(value, Written) and not isinstance(number, bool) and _ODD_NUMBER.fullmatch(value.text):
        raise WrongType(
            f"YAML reads {value.text} as the number {number}. Write {number}, or put a text in quotes: '{value.text}'."
        )
    if origin is Any:
        if isinstance(value, Mapping):
            return {convert(name): convert(item, Any, is_resolved) for name, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [convert(item, Any, is_resolved) for item in value]
        return str(number) if isinstance(number, Path) else number
    if origin is bool:
        if isinstance(number, str) and number.lower() in _BOOLEANS:
            return _BOOLEANS[number.lower()]
        if isinstance(number, bool):
            return number
        raise WrongType
    if origin in (int, float):
        return _number(number, origin)
    if origin in (list, tuple) and isinstance(value, (list, tuple)):
        if origin is tuple and len(value) != len(parts):
            raise WrongType
        inner = parts if origin is tuple else (parts or (Any,)) * len(value)
        return origin(convert(item, part, is_resolved) for item, part in zip(value, inner, strict=True))
    if origin is dict and isinstance(value, Mapping):
        names, items = parts or (Any, Any)
        return {convert(name, names): convert(item, items, is_resolved) for name, item in value.items()}
    raise WrongType


def _choice(number: Any, value: Any, choices: tuple[Any, ...]) -> Any:
    if number is False:  # as YAML reads a bare no or off
        number = next((word for word in ("no", "off") if word in choices), number)
    for candidate in (number, value.text if isinstance(value, Written) else number):
        if candidate in choices and type(candidate) is type(choices[choices.index(candidate)]):
            return candidate
    raise WrongType


def _text(value: Any, is_resolved: bool) -> str:
    if isinstance(value, Written):
        return value.text
    if isinstance(value, (str, Path)):
        return str(value)
    if isinstance(value, (int, float)):
        if is_resolved:
            return str(value)
        raise WrongType("this key takes a text. Quote it.")
    raise WrongType


def _number(value: Any, kind: type) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, str) if kind is int else (int, float, str)):
        raise WrongType
    try:
        return kind(value)
    except ValueError:
        raise WrongType from None

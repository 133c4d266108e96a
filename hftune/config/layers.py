"""Reads the layers of a recipe, its files and what was typed, as they are written. Knows no keys and no types."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from hftune.config.shipped_files import recipe_path
from hftune.errors import ConfigError, format_value, message_of

_YAML = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's is ten times as fast, where PyYAML was built with it
_NAME = re.compile(r"[A-Za-z_][\w.]*")
_FLOAT = re.compile(
    r"^([-+]?\d[\d_]*(\.[\d_]*)?([eE][-+]?\d+)?|\.\d[\d_]*([eE][-+]?\d+)?|[-+]?\d[\d_]*(:[0-5]?\d)+\.[\d_]*|[-+]?\.inf|\.nan)$",
    re.IGNORECASE,
)
"""What is a number besides whole ones. YAML 1.1 alone takes 5e-5 for a text."""


@dataclass(frozen=True)
class Written:
    """A number, true or false, and how it is written: for a key typed as text, 1e3, 1.10 and no are texts."""

    value: float
    text: str

    def __repr__(self) -> str:
        return self.text


@dataclass
class Layer:
    """What one recipe file, or the command line, sets."""

    values: dict[str, Any]
    """As they are nested in YAML; numbers, true and false are ``Written``."""
    path: Path | None = None
    """None: the command line."""
    replaced: list[str] = field(default_factory=list)
    """Keys that are not inherited from the layers below."""

    @property
    def origin(self) -> str:
        return "" if self.path is None else str(self.path)

    def locate(self, problem: str) -> str:
        return problem if self.path is None else f"{problem} ({self.path})"


class _Loader(_YAML):  # type: ignore[valid-type, misc]
    """Reads 5e-5 as a number, dates as texts, and refuses a key that is given twice."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith((":timestamp", ":float"))]
        for first, resolvers in _YAML.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen = set()
        for name in (name for name, _ in node.value if isinstance(name.value, str) and not name.tag.endswith(":merge")):
            if name.value in seen:
                where = "while constructing a mapping", node.start_mark
                raise yaml.constructor.ConstructorError(*where, f"found duplicate key {name.value}", name.start_mark)
            seen.add(name.value)
        return super().construct_mapping(node, deep)


def _written(loader: Any, node: Any) -> Written:
    construct = {"int": loader.construct_yaml_int, "float": loader.construct_yaml_float, "bool": loader.construct_yaml_bool}
    return Written(construct[node.tag.rpartition(":")[2]](node), node.value)


for _kind in ("int", "float", "bool"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_kind}", _written)
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, [*"-+.0123456789"])


def read_files(path: Path, above: tuple[Path, ...] = ()) -> list[Layer]:
    """Read a recipe file and the ``base`` it names, the lowest first, or raise ConfigError."""
    origin = f" ({path})"
    try:
        with path.open(encoding="utf-8-sig") as file:
            raw = yaml.load(file, _Loader)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    raw = {} if raw is None else raw
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} is not a recipe: at its top level it needs keys such as task: and train:.")
    base = raw.pop("base", None)
    layer = Layer(raw, path, _replaced(raw, origin))
    if base is None:
        if layer.replaced:
            raise ConfigError(f"replace={format_value(layer.replaced)} has no effect without a base.{origin}")
        return [layer]
    if not isinstance(base := base.text if isinstance(base, Written) else base, str):
        raise ConfigError(f"base={format_value(base)} is not the name or the path of a recipe.{origin}")
    beside = path.parent / base
    try:
        below = beside if beside.is_file() else recipe_path(base, key="base")
    except ConfigError as error:
        raise ConfigError(f"{error}{origin}") from error
    above = (*above, path.resolve())
    if below.resolve() in above:
        raise ConfigError(f"base={base} leads back to {below.resolve()}: a recipe cannot be its own base.{origin}")
    return [*read_files(below, above), layer]


def read_overrides(overrides: Sequence[str | Mapping[str, Any]]) -> Layer:
    """Read words such as ``train.lr=3e-5``, and mappings, whose keys may be dotted, in their order; or raise ConfigError."""
    values: dict[str, Any] = {}
    for override in overrides:
        for name, value in override.items() if isinstance(override, Mapping) else [_read_word(override)]:
            if not (isinstance(name, str) and _NAME.fullmatch(name)):
                raise ConfigError(f"{name!r} is not a key of a recipe, such as train.lr.")
            if name == "base":
                raise ConfigError("base=... belongs in a recipe file; here, name the recipe itself: recipe=...")
            for part in reversed(name.split(".")):
                value = {part: value}
            merge(values, value)
    return Layer(values, None, _replaced(values, ""))


def merge(values: dict[str, Any], others: Mapping[str, Any]) -> None:
    """Put other values over nested ones: mappings are merged, all else is replaced."""
    for name, other in others.items():
        if isinstance(other, Mapping):
            if not isinstance(values.get(name), dict):
                values[name] = {}
            merge(values[name], other)
        else:
            values[name] = other


def remove(values: Any, full_key: str) -> None:
    """Remove the values of a key and everything below it."""
    *sections, last = full_key.split(".")
    for name in sections:
        values = values.get(name) if isinstance(values, dict) else None
    if isinstance(values, dict):
        values.pop(last, None)


def _read_word(word: str) -> tuple[str, Any]:
    """Read ``section.key=value``."""
    name, equals, text = word.partition("=") if isinstance(word, str) else ("", "", "")
    if not (equals and _NAME.fullmatch(name)):
        hint = " Unpack the list: Recipe.load(name, *overrides)." if isinstance(word, (list, tuple)) else ""
        raise ConfigError(f"{word!r} is not of the form section.key=value, such as train.lr=3e-5.{hint}")
    try:
        return name, yaml.load(text, _Loader)
    except (ValueError, yaml.YAMLError) as error:
        reason = getattr(error, "problem", None) or message_of(error)
        raise ConfigError(f"{word} cannot be read: {reason}.") from error


def _replaced(raw: dict[str, Any], origin: str) -> list[str]:
    """Remove the key ``replace`` from a layer and return it, or raise ConfigError."""
    names = raw.pop("replace", None)
    if names is None or (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        return names or []
    raise ConfigError(f"replace={format_value(names)} is not a list of keys, such as [task.model_config].{origin}")

"""The JSON schema of recipes, with which editors complete keys and mark errors. Imports nothing heavy.

It says what the definitions of the keys say: types, bounds, choices, defaults and sentences. What keys require of each other is
checked when a recipe is loaded. ``hftune schema`` prints it; ``make`` writes it into recipes/, whose files name it.

Draft 7 is the newest draft that all editors understand. The schema must accept whatever ``Recipe.load`` accepts, including what
YAML 1.1 (PyYAML) and YAML 1.2 (editors) read differently: a bare ``no`` is false or a text, ``5e-5`` a text or a
number.
"""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import yaml

from hftune.config import every
from hftune.config.every import Every
from hftune.config.keys import Key, Rule, keys_of
from hftune.config.reference import task_types
from hftune.config.sections import SECTIONS, RunConfig
from hftune.config.shipped_files import recipe_names, recipe_path

REFERENCE = r"\$\{"
"""Pattern of texts that refer to other values, such as ``${seed}``: they can stand for a value of any type."""
DOTTED = r"^[^.\s]+(\.[^.\s]+)+$"
"""Pattern of dotted paths."""
PLAIN = {
    int: ("integer", r"^[-+\d][\d_]*$"),
    float: ("number", r"^[-+.\d][-+.\d_eE]*$"),
    bool: ("boolean", "^([Tt]rue|[Ff]alse|[Yy]es|[Nn]o|[Oo]n|[Oo]ff)$"),
}
"""The name of each plain type in JSON schema, and a pattern of the texts that ``Recipe.load`` reads as such a value."""
ANY_TEXT = {"type": ["string", "number", "boolean"]}
"""Where a text is due, such as a run's name, 1e3 and no are texts, as they are written."""
BOUNDS = {"gt": "exclusiveMinimum", "ge": "minimum", "lt": "exclusiveMaximum", "le": "maximum"}


def schema() -> dict[str, Any]:
    """Return the schema of a recipe file."""
    base = "Recipe to build on: the name of a shipped one, or the path of a file."
    replace = "Keys or whole sections that are not inherited from the base, such as task.model_config."
    of_files = {
        "base": _choice(recipe_names(), r"\.ya?ml$") | {"description": base},
        "replace": {"type": ["array", "null"], "items": {"type": "string"}, "description": replace},
    }
    # Whatever its type; the keys of each type are in "definitions".
    any_task = {"type": ["object", "null"], "description": "What is learned.", "properties": _task_type()}
    named = {"required": ["task"], "properties": {"task": {"type": "object", "required": ["type"]}}}
    has_a_task = {"if": {"not": {"required": ["base"]}}, "then": named}
    sections = {name: _section(type_, name) for name, type_ in SECTIONS.items()}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "description": "A recipe of hftune.",
        "type": "object",
        "properties": {**of_files, **_properties(RunConfig), "task": any_task, **sections},
        "additionalProperties": False,
        "allOf": [has_a_task, *_each_task()],
        "definitions": {name: _section(type_, "task", _task_type()) for name, type_ in task_types().items()},
    }


def metrics(type_: type) -> list[str]:
    """Return what ``eval.metric`` can be with a shipped task and its defaults."""
    return ["loss", *type_().metric_directions]


def task_of(recipe: str | Path) -> str:
    """Return the ``task.type`` of a recipe's file, or of the one that it builds on; empty if none can be found."""
    try:
        path = recipe_path(recipe)
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        beside = path.parent / str(values.get("base"))
        return (values.get("task") or {}).get("type") or task_of(beside if beside.is_file() else values["base"])
    except (OSError, KeyError, AttributeError, ValueError, yaml.YAMLError, RecursionError):
        return ""


def _task_type() -> dict[str, Any]:
    text = "What is learned: a task of hftune, or the dotted path of your own class."
    return {"type": _choice([*task_types()], DOTTED) | {"description": text}}


def _each_task() -> list[dict[str, Any]]:
    """Choose the keys of ``task`` by ``task.type``, or else by the base. If the base is a file, any task's keys will do."""
    no_type = {"not": {"type": "object", "required": ["type"]}}
    known: dict[str, Any] = {}
    rules = []
    recipes_of: dict[str, list[str]] = {name: [] for name in task_types()}
    for recipe in recipe_names():
        recipes_of[task_of(recipe)].append(recipe)
    for name, recipes in recipes_of.items():
        typed = {"type": "object", "properties": {"type": {"const": name}}, "required": ["type"]}
        is_typed = {"properties": {"task": typed}, "required": ["task"]}
        inherits = {"properties": {"task": no_type, "base": {"enum": recipes}}, "required": ["base"]}
        type_ = task_types()[name]
        eval_ = {"properties": {"metric": {"examples": metrics(type_)}}}
        then = {"properties": {"task": {"$ref": f"#/definitions/{name}"}, "eval": eval_}}
        rules.append({"if": {"anyOf": [is_typed, inherits]}, "then": then})
        for key, value in _properties(type_, "task").items():
            known.setdefault(key, {"description": value["description"]})
    unknown = {"properties": {"task": no_type, "base": {"not": {"enum": recipe_names()}}}}
    any_key = {"properties": {"task": {"properties": {**_task_type(), **known}, "additionalProperties": False}}}
    return [*rules, {"if": unknown, "then": any_key}]


def _section(type_: type, name: str, extra: dict[str, Any] | None = None) -> dict[str, Any]:
    """The schema of one section; an empty one, null, sets nothing."""
    return {
        "type": ["object", "null"],
        "description": " ".join((type_.__doc__ or "").split()),
        "properties": {**(extra or {}), **_properties(type_, name)},
        "additionalProperties": False,
    }


def _properties(type_: type, section: str = "") -> dict[str, Any]:
    properties = {}
    for described in keys_of(type_, section).values():
        key = described.name.rpartition(".")[2]
        properties[key] = _key(described) | {"description": described.text}
        if described.default is not dataclasses.MISSING:
            properties[key]["default"] = described.default
    return properties


def _key(described: Key) -> dict[str, Any]:
    if described.name == "resume":
        return {**ANY_TEXT, "examples": ["auto", "never"]}
    if described.rule.read == Every.read:
        return _either([{**_value(int, Rule()), "minimum": 1}, _choice(("epoch", "never"), every.PATTERN)])
    return _value(described.type, described.rule)


def _value(hint: Any, rule: Rule) -> dict[str, Any]:
    """The schema of a value of this type, or of a reference to one."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        value = _either([_value(arg, rule) for arg in args if arg is not types.NoneType])
        return _or_null(value) if types.NoneType in args else value
    if origin is Literal:
        return _choice([*args, *([False] if {"no", "off"} & {*args} else [])])
    if origin in (list, tuple):  # tuples here have elements of one type
        size = {"minItems": len(args), "maxItems": len(args)} if origin is tuple else {}
        return _either([{"type": ["array"], "items": _value(args[0], rule), **size}, _text("")])
    if origin is dict:  # null empties the one of the base
        return {"type": ["object", "null", "string"], "pattern": REFERENCE}
    if hint is Any:  # which the task checks
        return {}
    if hint is str:
        return _choice(rule.choices, DOTTED if rule.own else "") if rule.choices else ANY_TEXT
    kind, text = PLAIN[hint]
    said = f"Must be of type {kind}, or refer to such a value, as in ${{seed}}."
    bounds = {word: value for name, word in BOUNDS.items() if (value := getattr(rule, name)) is not None}
    return {**_text(text), "type": [kind, "string"], **bounds, "patternErrorMessage": said}  # else editors show the pattern


def _choice(names: Sequence[Any], pattern: str = "") -> dict[str, Any]:
    """One of these names, or a text that matches the pattern."""
    return _either([{"enum": [*names]}, _text(pattern)])


def _text(pattern: str) -> dict[str, Any]:
    """A text that matches the pattern, or a reference."""
    return {"type": ["string"], "pattern": f"{pattern}|{REFERENCE}" if pattern else REFERENCE}


def _either(values: list[dict[str, Any]]) -> dict[str, Any]:
    flat = [part for value in values for part in value.get("anyOf", [value])]
    return {"anyOf": flat} if len(flat) > 1 else flat[0]


def _or_null(value: dict[str, Any]) -> dict[str, Any]:
    if "anyOf" in value:
        first, *others = value["anyOf"]
        return {"anyOf": [_or_null(first), *others]}
    kind = "enum" if "enum" in value else "type"
    null = None if kind == "enum" else "null"
    return value if null in value[kind] else {**value, kind: [*value[kind], null]}


def schema_text() -> str:
    """Return the schema as JSON."""
    return json.dumps(schema(), indent=1, ensure_ascii=False)


if __name__ == "__main__":
    print(schema_text())

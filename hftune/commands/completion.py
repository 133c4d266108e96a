"""``hftune completion``: print a script that completes commands, options, recipes, keys and values in a shell.

All words are part of the script, so that completing starts no Python. They come from the argument parsers and from the JSON
schema of recipes. Each is a line ``context|word|description``, where the context is what stands before the word:

    commands                       commands
    train                          what a command takes, such as ``recipe=`` and ``train.``
    train -                        its options
    slurm --config                 values of an option; an empty word if any text will do
    recipe=                        recipes
    train.                         keys of a section
    train.schedule=                values of a key
    task. ImageClassification      the same for one task only; for ``any`` if the task is not known
    task of yelp                   the task of a recipe

The scripts are in completion.bash, .zsh and .fish; they look words up by context.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from hftune.commands.recipes import purpose
from hftune.config.shipped_files import config_names, recipe_names, recipe_path

SHELLS = ("bash", "zsh", "fish")
Line = tuple[str, str, str]
"""Context, word, description."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help='shell; in its startup file: eval "$(hftune completion bash)"')


def run(options: argparse.Namespace) -> int:
    """Print the script. ``options.commands`` holds the parser of each command."""
    print(script(options.shell, options.commands), end="")
    return 0


def script(shell: str, commands: dict[str, argparse.ArgumentParser]) -> str:
    """Return the shell's functions with all words inserted."""
    from hftune.config.schema import schema as make_schema  # imports all tasks

    schema = make_schema()
    names = {("configs", "name"): config_names(), ("slurm", "config"): config_names(), ("train", "help"): _sections(schema)}
    lines = [line for name, parser in commands.items() for line in _command(name, parser, names)]
    lines += [*_recipes(), *_keys(schema, [name for name, parser in commands.items() if _takes_recipe(parser)])]
    if shell == "bash":  # it shows no descriptions
        lines = [(context, word, "") for context, word, _ in lines]
    table = "\n".join("|".join(line) for line in dict.fromkeys(lines))
    quoted = "'{}'".format(table.replace("\\", r"\\").replace("'", r"\'")) if shell == "fish" else shlex.quote(table)
    return Path(__file__).with_suffix(f".{shell}").read_text(encoding="utf-8").replace("@TABLE@", quoted)


def _command(name: str, parser: argparse.ArgumentParser, names: dict[tuple[str, str], list[str]]) -> Iterator[Line]:
    """Yield a command, its options, and what both take: their choices, or else what ``names`` has for command and argument."""
    yield "commands", name, _first_sentence(parser.description)
    for action in parser._actions:
        values = action.choices or names.get((name, action.dest), ())
        text = _first_sentence((action.help or "") % vars(action))
        for option in action.option_strings:
            yield f"{name} -", option, text
            yield from ((f"{name} {option}", value, "") for value in values or ([] if action.nargs == 0 else [""]))
        if not action.option_strings:
            yield from ((name, value, "") for value in values)


def _recipes() -> Iterator[Line]:
    """Yield the shipped recipes with their tasks; own ones are files, in which the shells look for a base or task.type."""
    from hftune.config.schema import recipes_by_task

    for task, recipes in recipes_by_task().items():
        yield f"task of {task}", task, ""
        yield from ((f"task of {recipe}", task, "") for recipe in recipes)
    for name in recipe_names():
        yield "recipe=", f"recipe={name}", purpose(recipe_path(name).read_text(encoding="utf-8"))


def _keys(schema: dict[str, Any], with_recipe: list[str]) -> Iterator[Line]:
    """Yield the keys of recipes and their values; the top level for each command that takes a recipe."""
    from hftune.config.reference import task_types
    from hftune.config.schema import metrics

    sections = _sections(schema)
    plain = {name: part for name, part in schema["properties"].items() if name not in ("base", "recipe", *sections)}
    for command in with_recipe:
        yield command, "recipe=", "a shipped recipe, or the path of one"
        yield from ((command, f"{name}.", _first_sentence(schema["properties"][name]["description"])) for name in sections)
        yield from ((command, f"{name}=", _first_sentence(part["description"])) for name, part in plain.items())
    yield from _values("", plain)
    for task, type_ in task_types().items():
        for choice, metric in product((task, "any"), metrics(type_)):
            yield f"eval.metric= {choice}", f"eval.metric={metric}", ""
    for name in sections:
        if name != "task":
            yield from _section(name, schema["properties"][name]["properties"], "")
    for task, part in schema["definitions"].items():
        yield from _section("task", part["properties"], f" {task}")
        yield from _section("task", part["properties"], " any")


def _takes_recipe(parser: argparse.ArgumentParser) -> bool:
    return any(action.dest == "words" for action in parser._actions)


def _sections(schema: dict[str, Any]) -> list[str]:
    return [name for name, part in schema["properties"].items() if "properties" in part]


def _section(name: str, properties: dict[str, Any], suffix: str) -> Iterator[Line]:
    """Yield the keys of a section, with ``suffix`` if they are those of one task, and their values."""
    for key, part in properties.items():
        end = "." if "object" in part.get("type", ()) else "="  # task.data_files.train=...
        yield f"{name}.{suffix}", f"{name}.{key}{end}", _first_sentence(part["description"])
    yield from _values(f"{name}.", properties)


def _values(prefix: str, properties: dict[str, Any]) -> Iterator[Line]:
    """Yield the values of keys that have names to choose from; those of a list as a list of one."""
    for key, part in properties.items():
        for alternative in part.get("anyOf", [part]):
            yield from ((f"{prefix}{key}=", f"{prefix}{key}={value}", "") for value in _names(alternative))
            listed = alternative.get("items", {})
            for value in (value for item in listed.get("anyOf", [listed]) for value in _names(item)):
                yield f"{prefix}{key}=", f"{prefix}{key}=[{value}]", ""


def _names(part: dict[str, Any]) -> list[str]:
    truth = ["true", "false"] if "boolean" in part.get("type", ()) else []
    return [value for value in (*part.get("enum", ()), *part.get("examples", ()), *truth) if isinstance(value, str)]


def _first_sentence(text: str) -> str:
    return " ".join(text.split()).partition(". ")[0].rstrip(".")

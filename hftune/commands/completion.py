"""``hftune completion``: print a script with which a shell completes commands, options, recipes, keys and values.

The scripts are click's. At each Tab they call hftune, with the words typed so far in the environment.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

SHELLS = ("bash", "zsh", "fish")
ASKED = "_HFTUNE_COMPLETE"
"""Environment variable in which the scripts ask for words."""
BREAKS = ("=", ":")
"""Where bash cuts words; it is told only what follows the last of them."""
ParserOf = Callable[[str], argparse.ArgumentParser | None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help='shell; in its startup file: eval "$(hftune completion bash)"')


def run(options: argparse.Namespace) -> int:
    """Print the script."""
    script = _shell(options.shell).source()
    # A key is not the end of a word: its value follows.
    print(script.replace("-o nosort", "-o nosort -o nospace").replace("unsorted", "unsorted -S ''"))
    return 0


def answer(commands: Mapping[str, str], parser_of: ParserOf) -> int:
    """Print the words that a script has asked for, each in the form that its shell reads."""
    from click.shell_completion import CompletionItem

    shell = _shell(os.environ[ASKED].partition("_")[0])
    before, word = shell.get_completion_args()
    cut = 0
    while shell.name == "bash" and before and (before[-1] in BREAKS or word[:1] in BREAKS):
        word = before.pop() + word
        cut = max(map(word.rfind, BREAKS)) + 1
    for text, about in dict(words(commands, parser_of, before, word)).items():
        print(shell.format_completion(CompletionItem(text[cut:], help=about or None)))
    return 0


def _shell(name: str) -> Any:
    from click.shell_completion import get_completion_class

    return get_completion_class(name)(None, {}, "hftune", ASKED)


def words(commands: Mapping[str, str], parser_of: ParserOf, before: Sequence[str], word: str) -> Iterator[tuple[str, str]]:
    """Yield each word that could be meant, with a description.

    Args:
        commands: with what each does.
        before: the words before it; the first is the command.
    """
    parser = parser_of(before[0]) if before else None
    actions = [] if parser is None else parser._actions
    asking = next((action for action in actions if before[-1] in action.option_strings and action.nargs != 0), None)
    if not before:
        found: Iterable[tuple[str, str]] = commands.items()
    elif asking is not None:
        found = ((choice, "") for choice in _choices(before[0], asking))
    elif word.startswith("-"):
        found = ((option, action.help or "") for action in actions for option in action.option_strings)
    elif any(action.dest == "words" for action in actions):
        found = _recipe_words(before, word)
    else:
        found = ((choice, "") for action in actions for choice in _choices(before[0], action))
    yield from ((text, about.partition(". ")[0]) for text, about in found if text.startswith(word))


def _choices(command: str, action: argparse.Action) -> Sequence[str]:
    from hftune.config.sections import SECTIONS
    from hftune.config.shipped_files import config_names

    if (command, action.dest) in (("configs", "name"), *((name, "config") for name in ("slurm", "k8s", "sky"))):
        return config_names()
    return ["task", *SECTIONS] if (command, action.dest) == ("train", "help") else [*map(str, action.choices or ())]


def _recipe_words(before: Sequence[str], word: str) -> Iterator[tuple[str, str]]:
    """Yield recipes and keys; keys of the task that the recipe before has, or of any; values of a key that has choices."""
    from hftune.commands.recipes import purpose
    from hftune.config.every import Every
    from hftune.config.reference import all_keys, task_types
    from hftune.config.schema import metrics, task_of
    from hftune.config.sections import SECTIONS
    from hftune.config.shipped_files import recipe_names, recipe_path
    from hftune.errors import holds

    name, equals, _ = word.partition("=")
    if name == "recipe":
        yield from ((f"recipe={each}", purpose(recipe_path(each).read_text(encoding="utf-8"))) for each in recipe_names())
        yield from ((f"recipe={path}", "") for path in Path().glob("*.yaml"))
        return
    recipe = next((other.partition("=")[2] for other in before if other.startswith("recipe=")), None)
    task = task_types().get(task_of(recipe)) if recipe is not None else None
    keys = all_keys(task)
    if not equals and "." not in word:
        yield "recipe=", "a shipped recipe, or the path of one"
        yield from ((f"{section}.", " ".join((type_.__doc__ or "").split())) for section, type_ in SECTIONS.items())
        yield "task.", "What is learned."
    if not equals:
        for key, (described, *_) in keys.items():
            if ("." in key) == ("." in word):
                yield f"{key}{'.' if holds(dict, described.type) and not holds(list, described.type) else '='}", described.text
    elif name == "eval.metric":
        tasks = [task] if task is not None else task_types().values()
        yield from ((f"{name}={metric}", "") for each in tasks for metric in metrics(each))
    elif name in keys:
        described = keys[name][0]
        values = ["true", "false"] if described.type is bool else [*described.texts]
        values += ["epoch", "never"] if described.rule.read == Every.read else ["auto", "never"] if name == "resume" else []
        is_list = isinstance(described.default, list)
        yield from ((f"{name}=[{value}]" if is_list else f"{name}={value}", "") for value in values)

"""All keys of recipes, what they change, and the pages that are made of them. Imports nothing heavy.

``python -m hftune.config.reference`` prints docs/configuration.md; ``--help train`` shows one section.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
from functools import cache

from hftune import tasks
from hftune.config.keys import Effect, Key, Resume, effects, keys_of
from hftune.config.sections import SECTIONS, RunConfig
from hftune.errors import format_value


def task_types() -> dict[str, type]:
    """Return the shipped tasks by their bare names in ``task.type``."""
    return {name: getattr(tasks, name) for name in tasks.__all__}


@cache
def all_keys(task_type: type | None = None) -> dict[str, list[Key]]:
    """Return the definitions of all keys, by their names as they are typed: with those of one task, or of all shipped tasks."""
    tasks = [task_type] if task_type is not None else [*task_types().values()]
    found: dict[str, list[Key]] = {}
    for section, type_ in [("", RunConfig), *SECTIONS.items(), *(("task", type_) for type_ in tasks)]:
        for described in keys_of(type_, section).values():
            found.setdefault(described.name, []).append(described)
    return found


def definitions(name: str, task_type: type | None = None) -> tuple[list[Key], str]:
    """Return the definitions of a key, or of the mapping that it is in, and its name in there: "train" in task.data_files."""
    outer, inner = name, ""
    while outer not in all_keys(task_type) and "." in outer:
        outer, _, last = outer.rpartition(".")
        inner = f"{last}.{inner}".removesuffix(".")
    return all_keys(task_type).get(outer, []), inner


def effects_of(name: str) -> frozenset[Effect]:
    """Return what a key can change, or a key inside a mapping, such as task.data_files.train.

    Tasks of one's own are not imported. Their keys can change what those of the same name change in hftune's tasks, and others
    can change anything.
    """
    if name == "task.type":
        return effects("model")
    if "dropout" in name.rpartition(".")[2] or "drop_path" in name:
        return effects("forward backward")
    found, inner = definitions(name)
    changed = [described.rule.inside.get(inner, described.rule.changes) for described in found]
    return frozenset[Effect]().union(*changed) if changed else effects("unknown")


def resume_rule(name: str, task_type: type | None = None) -> Resume:
    """Say whether a resumed run may change a key, or a key inside a mapping."""
    found, _ = definitions(name, task_type)
    if not found:  # of a task of one's own; or one that there is no longer
        return "fixed" if name.startswith("task.") else "free"
    return found[0].rule.resume


def section_text(name: str) -> str | None:
    """Format the keys of ``task`` or of a section such as ``train`` for a terminal; None for any other name."""
    if name == "task":
        return "\n\n".join(f"task.type: {kind}\n{_columns('task', type_)}" for kind, type_ in task_types().items())
    return _columns(name, SECTIONS[name]) if name in SECTIONS else None


def _default(described: Key) -> str:
    if described.default is dataclasses.MISSING:
        return "required"
    is_text = isinstance(described.default, str) and described.default.strip()
    return described.default if is_text else format_value(described.default).replace("''", '""')


def _columns(section: str, type_: type) -> str:
    rows = [(f"{described.name}={_default(described)}", described.text) for described in keys_of(type_, section).values()]
    width = max(len(left) for left, _ in rows)
    wrapped = [(left, textwrap.wrap(text, 118 - width) or [""]) for left, text in rows]
    return "\n".join(f"  {left:<{width}}  {f'{chr(10)}{chr(32) * (width + 4)}'.join(lines)}" for left, lines in wrapped)


def markdown() -> str:
    """Return the whole reference as a page."""
    pages = [INTRODUCTION.format(checkpoint=section_text("checkpoint")), _page("Top level", "", RunConfig)]
    pages += [_page(f"`{name}`", name, type_) for name, type_ in SECTIONS.items()]
    pages += [_page(f"`task`: {kind}", "task", type_) for kind, type_ in task_types().items()]
    return "\n".join(pages)


INTRODUCTION = """# Configuration

```console
$ python -m hftune.run --help checkpoint
{checkpoint}
```

Every key of a recipe with its default. Any of them can be set in a recipe file or on the command line, as
`train.lr=3e-5`; `--help` and a section print its keys in the terminal.

This page is generated from the code by `make docs`.
"""


def _page(title: str, section: str, type_: type) -> str:
    described = keys_of(type_, section).values()
    rows = [f"| `{each.name}` | `{_default(each)}` | {_escape(each.text).replace('|', chr(92) + '|')} |" for each in described]
    intro = _escape(inspect.cleandoc(type_.__doc__ or ""))
    return "\n".join([f"## {title}\n", f"{intro}\n", "| key | default | description |", "|---|---|---|", *rows, ""])


def _escape(text: str) -> str:
    """Keep Markdown from reading <recipe> as HTML and ** as bold, outside of backticks."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else part.replace("<", "&lt;").replace("*", r"\*") for part in parts)


if __name__ == "__main__":
    print(markdown(), end="")

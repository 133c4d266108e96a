"""The reference of all recipe keys, generated from the dataclasses and the docstring of each field. Imports nothing heavy.

``python -m hftune.config.reference`` prints it; ``make docs`` writes it to docs/configuration.md; ``--help train`` shows one
section.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
from functools import cache
from itertools import pairwise

from hftune import tasks
from hftune.config.sections import (
    AdapterConfig,
    CheckpointConfig,
    EvalConfig,
    ParallelConfig,
    RunConfig,
    TrackConfig,
    TrainConfig,
    key_of,
)
from hftune.errors import format_value

SECTIONS = {
    "": RunConfig,
    "train": TrainConfig,
    "adapter": AdapterConfig,
    "eval": EvalConfig,
    "checkpoint": CheckpointConfig,
    "parallel": ParallelConfig,
    "track": TrackConfig,
}


def task_types() -> dict[str, type]:
    """Return the shipped tasks by their bare names in ``task.type``."""
    return {name: getattr(tasks, name) for name in tasks.__all__}


def fields(type_: type) -> list[tuple[str, str, str]]:
    """Return (key, default, docstring) of each field, inherited ones first."""
    texts: dict[str, str] = {}
    for kind in reversed([kind for kind in type_.__mro__ if dataclasses.is_dataclass(kind)]):
        texts |= _docstrings(kind)
    return [(key_of(item.name), _default(item), texts.get(item.name, "")) for item in dataclasses.fields(type_)]


@cache
def _docstrings(type_: type) -> dict[str, str]:
    """Return the docstrings below the fields that a class itself declares."""
    (class_,) = ast.parse(textwrap.dedent(inspect.getsource(type_))).body
    assert isinstance(class_, ast.ClassDef)
    return {
        node.target.id: inspect.cleandoc(after.value.value)  # type: ignore[arg-type, union-attr]  # a name, a str
        for node, after in pairwise(class_.body)
        if isinstance(node, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
    }


def _default(item: dataclasses.Field) -> str:
    if item.default_factory is not dataclasses.MISSING:
        return str(item.default_factory())
    return "required" if item.default is dataclasses.MISSING else format_value(item.default).strip("'") or '""'


def section_text(name: str) -> str | None:
    """Format the keys of ``task`` or of a section such as ``train`` for a terminal; None for any other name."""
    if name == "task":
        parts = [f"task.type: {kind}\n{_columns('task', type_)}" for kind, type_ in task_types().items()]
        return "\n\n".join(parts)
    return _columns(name, SECTIONS[name]) if name in SECTIONS and name else None


def _columns(section: str, type_: type) -> str:
    rows = [(f"{section}.{key}={default}", text) for key, default, text in fields(type_)]
    width = max(len(left) for left, _ in rows)
    wrapped = [(left, textwrap.wrap(text, 118 - width) or [""]) for left, text in rows]
    return "\n".join(f"  {left:<{width}}  {f'{chr(10)}{chr(32) * (width + 4)}'.join(lines)}" for left, lines in wrapped)


def markdown() -> str:
    """Return the whole reference as a page."""
    pages = [INTRODUCTION]
    for name, type_ in SECTIONS.items():
        pages.append(_page(f"`{name}`" if name else "Top level", f"{name}." if name else "", type_))
    pages += [_page(f"`task`: {kind}", "task.", type_) for kind, type_ in task_types().items()]
    return "\n".join(pages)


INTRODUCTION = """# Configuration

Every key of a recipe with its default. Any of them can be set in a recipe file or on the command line, as
`train.lr=3e-5`. `python -m hftune.run --help train` prints one section in the terminal.

This page is generated from the code by `make docs`.
"""


def _page(title: str, prefix: str, type_: type) -> str:
    rows = [f"| `{prefix}{key}` | `{default}` | {_cell(text)} |" for key, default, text in fields(type_)]
    intro = _escape(inspect.cleandoc(type_.__doc__ or ""))
    return "\n".join([f"## {title}\n", f"{intro}\n", "| key | default | description |", "|---|---|---|", *rows, ""])


def _cell(text: str) -> str:
    """Put a docstring on one line: a newline would end the row of the table."""
    return _escape(" ".join(text.split())).replace("|", r"\|")


def _escape(text: str) -> str:
    """Keep Markdown from reading <recipe> as HTML and ** as bold, outside of backticks."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else part.replace("<", "&lt;").replace("*", r"\*") for part in parts)


if __name__ == "__main__":
    print(markdown(), end="")

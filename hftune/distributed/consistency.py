"""What all processes of a job must have in common, and how two of them are told apart. Knows no training.

Facts are plain values by name, some of them by name again (``code`` by file, ``packages`` by name, ``recipe`` by key), so
that a message can say what exactly differs.
"""

from __future__ import annotations

import inspect
import json
import os
import platform
import socket
import time
from collections.abc import Mapping, Sequence
from functools import cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from hftune.config.recipe import Recipe, flat
from hftune.config.shipped_files import PACKAGE
from hftune.errors import ConfigError, format_value
from hftune.task import Task

PACKAGES = ("accelerate", "datasets", "numpy", "pillow", "safetensors", "tokenizers", "torch", "transformers")
SHOWN = 3
"""Differences to spell out; the rest are counted."""
EARLY_S = 20.0
"""For the main process to come as far as this one."""


def facts(recipe: Recipe | None) -> dict[str, Any]:
    """Return what this process brings along: who it is, and all that could make it train something else."""
    own = {"host": socket.gethostname(), "pid": os.getpid(), "code": dict(code()), "packages": dict(packages())}
    if recipe is not None:
        own["code"] = own["code"] | code_of(recipe.task)
        own["recipe"] = flat(OmegaConf.to_container(OmegaConf.create(recipe.to_yaml()))) | recipe.environment_digests()
    return own


@cache
def code() -> Mapping[str, str]:
    """Hash each file of hftune."""
    return {f"hftune/{path.relative_to(PACKAGE).as_posix()}": _hash(path) for path in sorted(PACKAGE.rglob("*.py"))}


def code_of(task: Task) -> dict[str, str]:
    """Hash the file of a task that is not hftune's."""
    module = inspect.getmodule(type(task))
    path = getattr(module, "__file__", None)
    if path is None or module.__name__.startswith("hftune."):
        return {}
    return {Path(path).name: _hash(Path(path))}


@cache
def packages() -> Mapping[str, str]:
    """Return the versions of Python and of the packages that results depend on."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "missing"
    return found


def differences(own: Mapping[str, Any], main: Mapping[str, Any]) -> dict[str, str]:
    """Say in which facts a process differs from the main one: by kind, what it has instead."""
    said = {}
    for kind in _NAMES:
        mine, theirs = own.get(kind, {}), main.get(kind, {})
        names = [name for name in {**theirs, **mine} if mine.get(name) != theirs.get(name)]
        if names:
            shown = [_describe(kind, name, mine, theirs) for name in names[:SHOWN]]
            rest = [f"and {len(names) - SHOWN} more"] if len(names) > SHOWN else []
            said[kind] = f"another {_NAMES[kind]}: {', '.join([*shown, *rest])}"
    return said


_NAMES = {"code": "code", "packages": "version", "recipe": "recipe", "data": "data set", "commits": "commit"}
_WAYS_OUT = {
    "code": "Install the same hftune, and put the same task file, on all machines.",
    "packages": "Install the same versions on all machines.",
    "recipe": "Start all with the same recipe and the same key=value words.",
    "data": "Give all machines the same files, or the same data set of the Hub at the same revision.",
    "commits": "A repository changed on the Hub meanwhile: pin it, with task.model_revision or task.dataset_revision.",
}


def _describe(kind: str, name: str, mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    if kind in ("code", "data"):
        return name if name in mine and name in theirs else f"{name} ({'too many' if name in mine else 'missing'})"
    return f"{name} {_spell(mine, name)} instead of {_spell(theirs, name)}"


def _spell(values: Mapping[str, Any], name: str) -> str:
    value = values.get(name, "nothing")
    return value if isinstance(value, str) else format_value(value)


def disagreement(ranks: Sequence[int], own: Mapping[str, Any], main: Mapping[str, Any]) -> str | None:
    """Say how these processes, which have the same facts, differ from the main one, and what to do; None where they do not."""
    found = differences(own, main)
    if not found:
        return None
    who = f"Process {ranks[0]}" if len(ranks) == 1 else f"Processes {', '.join(map(str, ranks))}"
    return (
        f"{who} on {own['host']} {'has' if len(ranks) == 1 else 'have'} {'; '.join(found.values())}. "
        f"Compared with process 0 on {main['host']}. {' '.join(_WAYS_OUT[kind] for kind in found)}"
    )


def check_early(store: Any | None, rank: int, own: Mapping[str, Any]) -> None:
    """Compare with the main process over the launcher's store, before anything is loaded. All processes call it.

    It waits for a moment only: the same is compared, with the data, once all have joined. It asks again and again, as a wait
    would block the connection for the signs of life, too.

    Args:
        store: None if there is none.

    Raises:
        ConfigError: this process differs from the main one.
    """
    until = time.monotonic() + EARLY_S
    if store is None:
        return
    if rank == 0:
        store.set("facts", json.dumps(own))
        return
    while not store.check(["facts"]):
        if time.monotonic() > until:
            return
        time.sleep(EARLY_S / 100)
    if found := disagreement([rank], own, json.loads(store.get("facts"))):
        raise ConfigError(found)


def _hash(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()[:16]

"""Compares what all processes of a job must have in common: code, packages, recipe, data. Independent of training.

A fingerprint is plain values by name, most of them mappings (``code`` by file, ``packages`` by name, ``recipe`` by key), so
that a message can say exactly what differs.
"""

from __future__ import annotations

import json
import os
import pickle
import platform
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from hftune.batch_plan import known_lengths
from hftune.config.own_code import hashes_of
from hftune.config.recipe import Recipe, code_of_sections, flat
from hftune.config.shipped_files import PACKAGE
from hftune.data.digest import content_digest
from hftune.errors import ConfigError, format_value
from hftune.task import Task

PACKAGES = ("accelerate", "datasets", "numpy", "pillow", "safetensors", "tokenizers", "torch", "transformers")
SHOWN = 3
"""Differences to list; the rest are counted."""
EARLY_S = 20.0
"""How long to wait for the main process in the early comparison."""


def fingerprint(recipe: Recipe | None) -> dict[str, Any]:
    """Return who this process is, and everything that could make it train something different."""
    result: dict[str, Any] = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "code": dict(code()),
        "packages": dict(packages()),
    }
    if recipe is not None:
        result["code"] |= users_code(recipe)
        plain = json.loads(json.dumps(recipe.to_dict(), default=str))  # as the early comparison sends it
        result["recipe"] = flat(plain) | recipe.environment_digests()
    return result


@cache
def code() -> Mapping[str, str]:
    """Hash each file of hftune."""
    return {
        f"hftune/{path.relative_to(PACKAGE).as_posix()}": sha256(path.read_bytes()).hexdigest()[:16]
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def users_code(recipe: Recipe) -> dict[str, str]:
    """Hash the user's code that every process computes with: of the task, the optimizer and the schedule."""
    named = code_of_sections(recipe.train, recipe.eval, recipe.track)
    modules = [name.rpartition(".")[0] for key, name in named if key in ("train.optimizer", "train.schedule")]
    return hashes_of([*(kind.__module__ for kind in type(recipe.task).__mro__), *modules])


@cache
def packages() -> Mapping[str, str]:
    """Return the versions of Python and of the packages that results depend on."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "missing"
    return versions


def differences(own: Mapping[str, Any], main: Mapping[str, Any]) -> dict[str, str]:
    """Say in what a process differs from the main process: by kind, what it has instead."""
    result = {}
    for kind, (words, _) in _KINDS.items():
        mine, theirs = own.get(kind, {}), main.get(kind, {})
        names = [name for name in {**theirs, **mine} if mine.get(name) != theirs.get(name)]
        if names:
            shown = [
                f"{name}{'' if name in mine and name in theirs else ' (extra)' if name in mine else ' (missing)'}"
                if kind in ("code", "data")
                else f"{name} {_format(mine, name)} instead of {_format(theirs, name)}"
                for name in names[:SHOWN]
            ]
            rest = [f"and {len(names) - SHOWN} more"] if len(names) > SHOWN else []
            result[kind] = f"{words}: {', '.join([*shown, *rest])}"
    return result


_KINDS = {
    "code": ("different code", "Install the same version of hftune on all machines, and use the same task file."),
    "packages": ("different versions", "Install the same versions on all machines."),
    "recipe": ("a different recipe", "Start all processes with the same recipe and the same overrides."),
    "data": ("different data", "Use the same files on all machines, or the same revision of the data set on the Hub."),
    "commits": (
        "different commits",
        "The repository has just changed on the Hub: pin it with task.model_revision or task.dataset_revision.",
    ),
}
"""What of a process may differ, and what to do about it."""


def _format(values: Mapping[str, Any], name: str) -> str:
    value = values.get(name, "nothing")
    return value if isinstance(value, str) else format_value(value)


def disagreement(ranks: Sequence[int], own: Mapping[str, Any], main: Mapping[str, Any]) -> str | None:
    """Say how these processes, all with one fingerprint, differ from the main process, and what to do; None if they do not."""
    different = differences(own, main)
    if not different:
        return None
    who = f"process {ranks[0]}" if len(ranks) == 1 else f"processes {', '.join(map(str, ranks))}"
    return (
        f"Compared with process 0 on {main['host']}, {who} on {own['host']} {'has' if len(ranks) == 1 else 'have'} "
        f"{'; '.join(different.values())}. {remedies(different)}"
    )


def remedies(kinds: Iterable[str]) -> str:
    """Say what to do about differences of these kinds."""
    return " ".join(_KINDS[kind][1] for kind in kinds)


def check_same(collectives: Any, own: Mapping[str, Any]) -> None:
    """Compare each process's fingerprint with the main process's. Collective.

    Args:
        collectives: a strategy, or anything else with ``broadcast`` and ``gather_to_main``.
        own: this process's fingerprint.

    Raises:
        ConfigError: on all processes, naming those that differ, their host, and in what.
    """
    main = collectives.broadcast(own)
    different = [(own, collectives.process_index)] if differences(own, main) else []
    others = collectives.broadcast(collectives.gather_to_main(different))
    if others:
        first = {name: value for name, value in others[0][0].items() if name != "pid"}
        ranks = [rank for other, rank in others if first.items() <= other.items()]
        raise ConfigError(disagreement(ranks, first, main))


def data_digests(task: Task, datasets: Mapping[str, Any]) -> dict[str, str]:
    """Return the digest of each split, such as ``{"train data": "all:..."}``.

    It is of all that the data set holds, the samples' lengths, and eight samples spread over it as the model would see them.
    """
    digests = {}
    for split in filter(datasets.__contains__, ("train", "eval", *(f"eval/{name}" for name in task.eval_sets), "test")):
        dataset, count = datasets[split], len(datasets[split])
        digest = sha256(content_digest(dataset).encode())
        known: Any = range(count)
        if (lengths := task.lengths(dataset)) is not None:
            known, lengths = known_lengths(lengths)
            digest.update(lengths.tobytes())
        batch = task.collate([dataset[index] for index in sorted({int(known[n * (len(known) - 1) // 7]) for n in range(8)})])
        values = {name: _plain(value) if hasattr(value, "tolist") else repr(_plain(value)) for name, value in batch.items()}
        digest.update(pickle.dumps(values))
        digests[f"{split} data"] = f"all:{digest.hexdigest()}"
    return digests


def _plain(value: Any) -> Any:
    """Return what equal values have in common on all processes; of objects, whose text may be an address, only the type."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return value if isinstance(value, (str, bytes, int, float, type(None))) else type(value).__name__


def check_early(store: Any | None, rank: int, own: Mapping[str, Any]) -> None:
    """Compare with the main process over the launcher's store, before anything is loaded. All processes call it.

    It waits EARLY_S at most: the same is compared again, with the data, once all processes have joined. It polls, because a
    blocking wait would also block the heartbeat, which shares the connection.

    Args:
        store: None if there is none.

    Raises:
        ConfigError: this process differs from the main process.
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
    if message := disagreement([rank], own, json.loads(store.get("facts"))):
        raise ConfigError(message)

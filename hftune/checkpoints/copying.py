"""What of an output folder is copied elsewhere, to other machines or into a bucket, and how a copy takes its place.

A copy changes as a whole: nothing is placed before everything has arrived and each checkpoint is right by its SHA-256. Then the
logs are placed first and the checkpoints last: a checkpoint that is there has all that belongs to it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

from hftune.atomic import atomic_path, remove, write_text
from hftune.checkpoints.checkpointer import path_of, remove_checkpoint, steps

CHECKPOINTS = "checkpoints"
BEGUN = ".begun"
"""File in the output folder: the launchers and processes of the job that wrote its checkpoints."""
RUN_ID = f"{CHECKPOINTS}/.run_id"
"""File with a random word that all copies of a run have in common. It goes with the checkpoints when a run starts over."""
MODELS = ("model", "model_last")
"""Folders that are replaced as one."""
GROWING = ("samples", "tensorboard")
"""Folders whose files are copied one by one."""
SUFFIXES = (".json", ".jsonl", ".yaml", ".html", ".bin")
"""Of the files beside them."""
INCOMING = ".incoming"
"""Folder of what has arrived so far."""


def read_id(folder: Path) -> str:
    """Return the word that the copies of a run have in common; empty if there is none."""
    path = folder / RUN_ID
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def write_id(folder: Path, run: str) -> None:
    """Let the checkpoints in a folder be those of this run."""
    (folder / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
    write_text(folder / RUN_ID, run)


def progress_of(folder: Path) -> tuple[int, int]:
    """Return how often training has started or resumed in a folder, and the step of the newest checkpoint; 0 if there is none.

    Of two folders of a run, it has gone on from the one with the greater pair.
    """
    ledger, starts = folder / "ledger.jsonl", 0
    if ledger.is_file():
        with ledger.open("rb") as lines:
            starts = sum(b'"after_step"' in line for line in lines)
    return starts, max((int(name[-8:]) for name in manifests(folder)), default=0)


def inside(name: str) -> str:
    """Return the name of a file in the output folder.

    Raises:
        ValueError: it leads out of the folder.
    """
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise ValueError(f"{name!r} leads out of the output folder")
    return name


def about(found: os.stat_result) -> tuple[int, int, int]:
    """Return inode, size and time of change of a file."""
    return found.st_ino, found.st_size, found.st_mtime_ns


def manifests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of the manifest of each checkpoint by its path in the folder, in the order of the steps."""
    found = {}
    for step in steps(folder / CHECKPOINTS):
        path = path_of(folder / CHECKPOINTS, step)
        with suppress(OSError, ValueError, LookupError):  # without one it is broken
            found[f"{CHECKPOINTS}/{path.name}"] = json.loads((path / "manifest.json").read_text(encoding="utf-8"))["sha256"]
    return found


def layout(folder: Path) -> dict[str, Any]:
    """Return what changes when a checkpoint or a model is written, replaced or removed."""
    return {**manifests(folder), **{name: (folder / name).stat().st_ino for name in MODELS if (folder / name).is_dir()}}


def wanted(folder: Path) -> dict[str, list[str]]:
    """Return the files that a resume needs, see ``by_unit``; of the checkpoints the newest, and that of the best model."""
    found, roots = [path for path in folder.iterdir() if path.suffix in SUFFIXES], [*MODELS, *GROWING]
    if checkpoints := [*manifests(folder)]:
        progress = json.loads((folder / checkpoints[-1] / "progress.json").read_text(encoding="utf-8"))
        best = f"{CHECKPOINTS}/{path_of(folder, progress['state'].get('best_step') or 0).name}"
        roots += {best, checkpoints[-1]} & {*checkpoints}
    found += [path for root in roots for path in (folder / root).rglob("*")]
    parts = [path.relative_to(folder).parts for path in found if path.is_file()]
    seen = ["/".join(names) for names in parts if not any(name.startswith(".") for name in names)]
    return by_unit([*seen, *([BEGUN] if (folder / BEGUN).is_file() else [])])


def by_unit(names: Iterable[str]) -> dict[str, list[str]]:
    """Group files by what is replaced as one, a checkpoint, a model or a single file, in the order in which to place them."""
    units: dict[str, list[str]] = {}
    for name in sorted(names, key=lambda name: (name.startswith(CHECKPOINTS), name)):
        units.setdefault(unit_of(name), []).append(name)
    return units


def unit_of(name: str) -> str:
    """Return the checkpoint or the model that a file belongs to; its own name if it belongs to none."""
    first, *others = PurePosixPath(name).parts
    return f"{first}/{others[0]}" if first == CHECKPOINTS else first if first in MODELS else name


def place(incoming: Path, folder: Path, run: str, checkpoints: Mapping[str, str], models: Collection[str]) -> None:
    """Move what has arrived from a folder inside into its place, and remove what does not belong to it.

    Args:
        run: see ``read_id``.
        checkpoints: what ``manifests`` says of those that belong to it.
        models: the names of those that do.
    """
    arrived = by_unit(path.relative_to(incoming).as_posix() for path in incoming.rglob("*") if path.is_file())
    if read_id(folder) != run:  # this copy may be replaced
        remove(folder / CHECKPOINTS)
        write_id(folder, run)
    for name in arrived:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(folder / name) as temporary:
            (incoming / name).rename(temporary)
    for name, digest in manifests(folder).items():
        if checkpoints.get(name) != digest:  # it may be of an abandoned part of the run
            remove_checkpoint(folder / name)
    for name in {*MODELS} - {*models}:
        remove(folder / name)
    remove(incoming)

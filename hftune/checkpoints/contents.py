"""Lists what is in an output folder and belongs to a resume, so that another machine can have it. Independent of networks."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import Any

from hftune.checkpoints.atomic_files import sha256_of
from hftune.checkpoints.checkpointer import path_of, steps

CHECKPOINTS = "checkpoints"
WHOLE = ("model", "model_last")
"""Folders that are replaced as one."""
GROWING = ("samples", "tensorboard")
"""Folders whose files are copied one by one."""
SUFFIXES = (".json", ".jsonl", ".yaml", ".html", ".bin")
"""Of the files beside them."""
HIDDEN = (".begun", ".run_id")
"""Of the hidden ones: whose checkpoints these are."""
SLICE = 8 << 20
"""Bytes that are read at once."""

Sums = dict[str, tuple[int, str]]
"""Size in bytes and SHA-256 of files, by their path in the folder."""


class Changed(Exception):
    """A file is not what the list of contents says, because it was replaced meanwhile: a new list is needed."""


@dataclass(frozen=True)
class Contents:
    """What is in an output folder."""

    version: int
    """Counts up with every change worth copying."""
    is_final: bool
    """There will be no further version."""
    files: Sums
    """What a resume needs; of the checkpoints, the newest one and that of the best step."""
    checkpoints: dict[str, str]
    """The SHA-256 of the manifest of every checkpoint, by its path in the folder."""

    @classmethod
    def from_json(cls, text: bytes) -> Contents:
        """Read what a server has sent, and refuse names that lead out of the folder.

        Raises:
            Changed: it is none.
        """
        values = json.loads(text)
        files = {name: (int(size), str(digest)) for name, (size, digest) in values.pop("files").items()}
        found = cls(files=files, **values)
        for name in (*found.files, *found.checkpoints):
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                raise Changed(f"{name!r} leads out of the output folder")
        return found

    def units(self) -> dict[str, Sums]:
        """Return the files by what is replaced as one: a checkpoint, a model, or a single file."""
        units: dict[str, Sums] = {}
        for name, about in self.files.items():
            units.setdefault(unit_of(name), {})[name] = about
        return units


def unit_of(name: str) -> str:
    """Return the folder that is replaced as one with this file; the file itself if there is none."""
    parts = PurePosixPath(name).parts
    if parts[0] == CHECKPOINTS:
        return "/".join(parts[:2])
    return parts[0] if parts[0] in WHOLE else name


@dataclass
class Digests:
    """The SHA-256 of files, computed again only if they have changed."""

    _known: dict[Path, tuple[tuple[int, int, int], str]] = field(default_factory=dict)

    def of(self, path: Path) -> tuple[int, str]:
        """Return size and SHA-256 of a file as it is now; if it grows meanwhile, of what was there before."""
        about = path.stat()
        mark = (about.st_ino, about.st_size, about.st_mtime_ns)
        if self._known.get(path, (None,))[0] != mark:
            self._known[path] = mark, sha256_of_start(path, about.st_size)
        return about.st_size, self._known[path][1]


def sha256_of_start(path: Path, size: int) -> str:
    """Return the SHA-256 of the first ``size`` bytes of a file."""
    digest = sha256()
    with path.open("rb") as file:
        while size > 0 and (data := file.read(min(size, SLICE))):
            digest.update(data)
            size -= len(data)
    return digest.hexdigest()


def contents(folder: Path, digests: Digests, version: int = 0, is_final: bool = False) -> Contents:
    """List an output folder.

    Raises:
        OSError: something was replaced meanwhile.
    """
    files: Sums = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        is_ours = path.name in HIDDEN or (path.suffix in SUFFIXES and not path.name.startswith("."))
        if path.is_dir() and path.name in (*WHOLE, *GROWING) and not path.is_symlink():
            files |= {file.relative_to(folder).as_posix(): digests.of(file) for file in _visible(path)}
        elif is_ours and path.is_file():
            files[path.name] = digests.of(path)
    manifests = dict(_manifests(folder))
    checkpoints = {name: manifest["sha256"] for name, manifest in manifests.items()}
    for name in _needed(folder, list(manifests)):
        file = folder / name / "manifest.json"
        files |= {f"{name}/{other}": (about["bytes"], about["sha256"]) for other, about in manifests[name]["files"].items()}
        files[f"{name}/manifest.json"] = (file.stat().st_size, sha256_of(file))
    return Contents(version, is_final, files, checkpoints)


def _visible(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(parent) / name for name in names if not name.startswith("."))


def _manifests(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield path and manifest of each checkpoint, in the order of their steps; not of those without one."""
    for step in steps(folder / CHECKPOINTS):
        path = path_of(folder / CHECKPOINTS, step)
        with suppress(OSError, ValueError):
            manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
            if {"sha256", "files"} <= manifest.keys():
                yield f"{CHECKPOINTS}/{path.name}", manifest


def _needed(folder: Path, names: list[str]) -> list[str]:
    """Return the newest checkpoint, and that of the best step, whose adapters are scored at the end."""
    if not names:
        return []
    progress = json.loads((folder / names[-1] / "progress.json").read_text(encoding="utf-8"))
    best = f"{CHECKPOINTS}/{path_of(folder, progress['state'].get('best_step') or 0).name}"
    return [name for name in names if name in (best, names[-1])]

"""Checkpoints: everything a run needs to resume as if it had never stopped. Main process only; independent of the loop.

A checkpoint is a folder, ``checkpoints/step_00000120``:

- ``model.safetensors``, ``optimizer.safetensors``: tensors by parameter name, independent of the number of processes.
- ``progress.json``: the state of the loop and everything else that is not a tensor. ``recipe.yaml``: the recipe.
- ``manifest.json``: the format version, size and SHA-256 of every file, and its own SHA-256.

It is written under a temporary name, flushed to disk and renamed: a folder with the final name is complete. Nothing in it is
ever executed: tensors are safetensors, the rest is JSON.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from hftune.atomic import GrowingFile, atomic_path, restore, sha256_of
from hftune.config.sections import CheckpointConfig
from hftune.models.tensor_file import Pieces, taken, write_tensors

FORMAT = 2
"""Version of the layout, and of what a training that goes on from it draws and computes. 1: torch's dropout, padded batches."""

PROGRESS = ("state", "values", "digests", "run_ids", "micro_batch_size")
"""Keys that training needs in ``progress.json``."""

Tensors = Mapping[str, Mapping[str, Tensor | Pieces]]
"""Groups of tensors by name: {"model": {...}, "optimizer": {...}}; each group is a file."""


class BrokenCheckpoint(ValueError):
    """A checkpoint that does not verify. Names the file, and how it differs from what was written."""


@dataclass
class Checkpoint:
    """A verified checkpoint on disk."""

    path: Path
    step: int
    progress: dict[str, Any]
    """Contents of ``progress.json``."""
    tensors: dict[str, dict[str, Tensor]]
    """On the CPU, by file and name."""
    hashes: dict[str, str] = field(default_factory=dict)
    """SHA-256 of the files of tensors, by group; the same as of any other checkpoint of equal tensors."""


def open_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint and verify every byte of it.

    Raises:
        BrokenCheckpoint: a file is missing or has changed, or this version of hftune cannot read it.
    """
    with _readable(path):
        manifest = _verify(path)
        tensors = {}
        for file in sorted(path / name for name in manifest["files"] if name.endswith(".safetensors")):
            try:
                tensors[file.stem] = load_file(file)
            except SafetensorError as error:
                raise BrokenCheckpoint(f"{file.name} is not a safetensors file ({error})") from error
        try:
            progress = json.loads((path / "progress.json").read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise BrokenCheckpoint(f"progress.json cannot be read ({type(error).__name__})") from error
        if missing := [name for name in PROGRESS if not isinstance(progress, dict) or name not in progress]:
            raise BrokenCheckpoint(f"progress.json lacks {', '.join(missing)}: a different version of hftune wrote it")
        return Checkpoint(path, manifest["step"], progress, tensors, tensor_hashes(manifest["files"]))


def verify(path: Path) -> dict[str, Any]:
    """Verify every byte of a checkpoint without loading it, and return its manifest. Raises as ``open_checkpoint``."""
    with _readable(path):
        return _verify(path)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn errors of the file system, such as a missing permission, into a BrokenCheckpoint, which is skipped with a notice."""
    try:
        yield
    except OSError as error:
        name = Path(error.filename or path).name
        raise BrokenCheckpoint(f"{name} cannot be read: {error.strerror or error}") from error


def _verify(path: Path) -> dict[str, Any]:
    if not (path / "manifest.json").is_file():
        raise BrokenCheckpoint("manifest.json is missing")
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        digest = manifest.pop("sha256")
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
        raise BrokenCheckpoint(f"manifest.json cannot be read ({type(error).__name__})") from error
    if manifest.get("format") != FORMAT:
        raise BrokenCheckpoint(
            f"its format is {manifest.get('format')!r}, and this hftune reads format {FORMAT}: a different version wrote it"
        )
    if digest != _digest(manifest):
        raise BrokenCheckpoint("manifest.json has changed since it was written (its SHA-256 differs)")
    if not isinstance(manifest.get("files"), dict) or not isinstance(manifest.get("step"), int):
        raise BrokenCheckpoint("manifest.json lists no files or no step: hftune did not write it")
    for name, expected in manifest["files"].items():
        file = path / name
        if Path(name).name != name:  # two of one stem would pass for each other
            raise BrokenCheckpoint(f"manifest.json names {name}, which is no file of this folder: hftune did not write it")
        if not file.is_file():
            raise BrokenCheckpoint(f"{name} is missing")
        if not isinstance(expected, dict) or not (isinstance(expected.get("bytes"), int) and "sha256" in expected):
            raise BrokenCheckpoint(f"manifest.json gives no size and SHA-256 for {name}: hftune did not write it")
        if (size := file.stat().st_size) != expected["bytes"]:
            raise BrokenCheckpoint(f"{name} has {size:,} bytes instead of the {expected['bytes']:,} that were written")
        if sha256_of(file) != expected["sha256"]:
            raise BrokenCheckpoint(f"{name} has changed since it was written (its SHA-256 differs)")
    return manifest


def tensor_hashes(files: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return the SHA-256 of each group of tensors from the ``files`` of a manifest: ``{"model": ..., "optimizer": ...}``."""
    return {Path(name).stem: about["sha256"] for name, about in sorted(files.items()) if name.endswith(".safetensors")}


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def steps(folder: Path) -> list[int]:
    """List the steps of the checkpoints in a folder, ascending. They are not verified."""
    matches = (re.fullmatch(r"step_(\d{8,})", path.name) for path in folder.glob("step_*"))
    return sorted(int(match[1]) for match in matches if match)


def path_of(folder: Path, step: int) -> Path:
    """Return the path of a step's checkpoint."""
    return folder / f"step_{step:08d}"


def newest(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest checkpoint that verifies, and the reason for skipping each newer one."""
    skipped = []
    for step in reversed(steps(folder)):
        path = path_of(folder, step)
        try:
            return open_checkpoint(path), skipped
        except BrokenCheckpoint as error:
            skipped.append(f"Skipped {path}: {error}.")
    return None, skipped


@dataclass
class Checkpointer:
    """Writes checkpoints in a background thread, one at a time. Main process only.

    What ``config`` keeps and the one of the best step stay. An older one is removed only after a newer one is complete.
    """

    folder: Path
    config: CheckpointConfig
    failure: str | None = None
    """Why the last checkpoint could not be written; None again once the next one is begun."""
    last: int | None = None
    """Step of the last one that was written."""
    on_written: Callable[[int, dict[str, str]], None] | None = field(default=None, repr=False)
    """Called from the writing thread with the step of a complete checkpoint, and its ``tensor_hashes``."""
    is_ours: Callable[[], bool] = field(default=lambda: True, repr=False)
    """Whether this process still has the output folder; see ``only_writer``."""
    begun: int = 0
    """Step of the last one that was begun."""
    _writer: threading.Thread | None = field(default=None, repr=False)

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is in progress."""
        return self._writer is not None and self._writer.is_alive()

    def wait(self) -> None:
        """Wait until the checkpoint in progress is complete or has failed."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None

    def write(
        self,
        step: int,
        tensors: Tensors,
        progress: Mapping[str, Any],
        recipe: str,
        best_step: int | None,
        logs: Sequence[GrowingFile],
    ) -> None:
        """Start writing a checkpoint; ``tensors`` must not change until ``wait`` returns.

        Args:
            logs: files that grow with the run, flushed to disk before the checkpoint gets its final name.
        """

        def write() -> None:
            try:
                with (
                    taken(tensors),
                    atomic_path(path_of(self.folder, step)) as folder,
                ):  # replaces one of the same step, before its evaluation
                    folder.mkdir(parents=True)
                    files = _write_files(folder, step, tensors, progress, recipe)
                    for log in logs:  # no checkpoint of steps that the ledger has no room for
                        log.flush()
                    if not self.is_ours():  # its machine was stopped for a while
                        raise OSError("another process has taken over the folder")
                self.last = step
                if self.on_written is not None:
                    self.on_written(step, tensor_hashes(files))
                kept = {best_step} | self.config.kept(there := steps(self.folder))
                for other in there:
                    if other not in kept:
                        remove_checkpoint(path_of(self.folder, other))
            except Exception as error:  # whatever it is, training continues, and the main thread reports it
                self.failure = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"

        self.wait()
        self.begun, self.failure = step, None
        # Not a daemon: the interpreter waits for it on exit. A process that the heartbeat ends leaves a partial checkpoint.
        self._writer = threading.Thread(target=write, name="checkpoint")
        self._writer.start()


def _write_files(
    folder: Path, step: int, tensors: Tensors, progress: Mapping[str, Any], recipe: str
) -> dict[str, dict[str, Any]]:
    """Write the files of a checkpoint; return what the manifest says of each."""
    for name, group in tensors.items():
        write_tensors(folder / f"{name}.safetensors", group)
    (folder / "progress.json").write_text(json.dumps(progress, indent=1), encoding="utf-8")
    (folder / "recipe.yaml").write_text(recipe, encoding="utf-8")
    files = {path.name: {"bytes": path.stat().st_size, "sha256": sha256_of(path)} for path in sorted(folder.iterdir())}
    manifest = {"format": FORMAT, "step": step, "files": files}
    manifest["sha256"] = _digest(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    return files


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint. It is renamed first, so that a kill leaves no partial one under its name."""
    if path.exists():
        path.rename(gone := path.with_name(f".{path.name}.removed"))
        shutil.rmtree(gone, ignore_errors=True)


def tidy(folder: Path) -> None:
    """Clean up after a kill: remove partial checkpoints, and give one that was set aside its name back."""
    for path in folder.glob(".step_*.replaced"):
        restore(path.with_name(path.name.removeprefix(".").removesuffix(".replaced")))
    for kind in ("writing", "removed"):
        for path in folder.glob(f".step_*.{kind}"):
            shutil.rmtree(path, ignore_errors=True)

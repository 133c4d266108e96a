"""A run's objects in a bucket: how they are listed, read and written, and brought to this machine. Independent of training.

The objects have the names of the files of an output folder; those of a checkpoint or model have a word in between that no other
one has: checkpoints/step_00000010/4f0c.../manifest.json. ``bucket.json`` is written last: it lists them with their SHA-256, and
says which run they are and which process writes.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from fsspec import AbstractFileSystem
from fsspec.callbacks import Callback as Meter
from fsspec.implementations.local import LocalFileSystem

from hftune.atomic import atomic_path, remove, sha256_of, write_text
from hftune.checkpoints.checkpointer import BrokenCheckpoint, path_of, verify
from hftune.checkpoints.copying import CHECKPOINTS, MODELS, inside, unit_of
from hftune.checkpoints.export import ABOUT
from hftune.config import addresses
from hftune.config.addresses import address_problem, file_system, is_address, local_name
from hftune.data.cache import copy_folder, locked
from hftune.errors import ConfigError

INDEX = "bucket.json"
PROBE = ".probe"
START_S = 60.0
"""In which a bucket has to answer, or to send something, before training and in commands."""
KEYS = "those of the environment: they must allow listing, reading, writing and removing objects"

Entry = dict[str, Any]
"""Of a file: ``bytes``, ``sha256``; and ``at``, the name of its object, if that is not its own."""
T = TypeVar("T")


@dataclass(frozen=True)
class Index:
    """The contents of bucket.json."""

    run: str = ""
    """The word that all copies of the run have in common; empty before anything was uploaded."""
    starts: int = 0
    step: int = 0
    """See ``progress_of``."""
    writer: str = ""
    """A random word of the process that has the address."""
    who: str = ""
    """That process, for people."""
    files: dict[str, Entry] = field(default_factory=dict)

    @property
    def checkpoints(self) -> list[int]:
        """The steps of the checkpoints, ascending."""
        return sorted({int(unit_of(name).rpartition("_")[2]) for name in self.files if name.startswith(f"{CHECKPOINTS}/step_")})

    @property
    def objects(self) -> set[str]:
        """The names of the objects."""
        return {entry.get("at", name) for name, entry in self.files.items()}

    def of(self, unit: str) -> list[str]:
        """Return the files of a checkpoint or a model."""
        return [name for name in self.files if unit_of(name) == unit]


def checkpoint_name(step: int) -> str:
    """Return the name of a step's checkpoint."""
    return path_of(Path(CHECKPOINTS), step).as_posix()


class Place:
    """An address, and the objects under it. Errors are those of the library.

    Args:
        address: without keys and endpoints.
        key: of a recipe that names it, for messages; empty if none does.
    """

    def __init__(self, address: str, key: str):
        self.address, self.named = address, f"{key}={address}" if key else address
        self.fs, root = file_system(address)
        self._root = root.rstrip("/")
        self.moved_at = time.monotonic()
        """When bytes were last on their way."""
        self._sent: dict[str, str] = {}
        """The SHA-256 of what this process has put there, by name."""
        self._meter = Meter()
        self._meter.call = self.moved  # all its methods do
        self._is_local = isinstance(self.fs, LocalFileSystem)

    def moved(self, **_: Any) -> None:
        """Note that bytes are on their way."""
        self.moved_at = time.monotonic()

    def read(self) -> Index | None:
        """Return what is there; None if no run is."""
        try:
            text = self.fs.cat_file(f"{self._root}/{INDEX}")
        except FileNotFoundError:
            return None
        try:
            index = Index(**json.loads(text))
        except TypeError as error:
            raise ConfigError(f"{self.address}/{INDEX} was written by a different version of hftune, or by none.") from error
        except ValueError as error:
            raise ConfigError(f"{self.address}/{INDEX} is damaged. Remove it, and the address is as good as new.") from error
        for name in {*index.files, *index.objects}:
            inside(name)
        return index

    def write(self, index: Index) -> None:
        """Say what is there now."""
        with self._whole(INDEX) as path:
            self.fs.pipe_file(path, json.dumps(asdict(index), indent=1).encode())
        self.moved()

    def put(self, file: Path, name: str, sha256: str) -> None:
        """Upload a file, unless an attempt before has."""
        if self._sent.get(name) != sha256:
            put = partial(AbstractFileSystem.put_file, self.fs) if self._is_local else self.fs.put_file  # its own says nothing
            with self._whole(name) as path:
                put(str(file), path, callback=self._meter)
            self._sent[name] = sha256
            self.moved()

    @contextmanager
    def _whole(self, name: str) -> Iterator[str]:
        """Yield where to write an object, so that it is there as a whole or not at all, on a disk as in a bucket."""
        if self._is_local:
            with atomic_path(Path(self._root) / name) as temporary:
                yield str(temporary)
        else:
            yield f"{self._root}/{name}"

    def get(self, name: str, entry: Entry, file: Path) -> bool:
        """Download a file, see ``patiently``; return whether it is there."""
        part = file.with_name(f"{file.name}.part")
        part.parent.mkdir(parents=True, exist_ok=True)

        def get() -> bool:
            get_file = partial(AbstractFileSystem.get_file, self.fs) if self._is_local else self.fs.get_file
            try:
                get_file(f"{self._root}/{entry.get('at', name)}", str(part), callback=self._meter)
            except FileNotFoundError:
                return False
            return True

        if is_there := patiently(get, self):
            part.rename(file)
        return is_there

    def probe(self) -> set[str]:
        """Write an object, remove it, and list those among which may be some that nothing lists, as a kill came before."""
        self.fs.pipe_file(f"{self._root}/{PROBE}", b"a new object\n")
        self.remove(PROBE)
        names = [name for folder in (CHECKPOINTS, *MODELS) for name in self.fs.find(f"{self._root}/{folder}")]
        return {name.partition(f"{self._root}/")[2] for name in names}

    def remove(self, name: str) -> None:
        """Remove an object."""
        self._sent.pop(name, None)  # also if the answer is lost
        with suppress(FileNotFoundError):
            self.fs.rm_file(f"{self._root}/{name}")


def opened(address: str, key: str) -> Place:
    """Return an address as a place, or raise ConfigError if the package of its protocol is missing."""
    return addresses.patiently(lambda: Place(address, key), f"{key}={address}" if key else address)


def check_bucket(output_dir: str) -> None:
    """Raise ConfigError if ``output_dir`` is an address at which objects cannot be read, written and removed."""
    if is_address(output_dir):
        place = opened(output_dir, "output_dir")
        patiently(place.read, place)
        patiently(place.probe, place)


def patiently(action: Callable[[], T], place: Place) -> T:
    """Do something with a bucket, see ``addresses.patiently``; but no longer than until nothing has moved for START_S.

    Raises:
        ConfigError: it is in vain, for the reason that it names.
    """
    result, failed = Future[T](), list[Exception]()

    def once() -> T:
        try:
            return action()
        except Exception as error:  # each attempt of a library may take a while, and time be up before the last
            failed.append(error)
            raise

    def attempt() -> None:
        try:
            result.set_result(addresses.patiently(once, place.named, keys=KEYS))
        except BaseException as error:
            result.set_exception(error)

    place.moved()
    threading.Thread(target=attempt, name="hftune bucket", daemon=True).start()  # a library may wait for much longer
    while time.monotonic() < place.moved_at + START_S:
        with suppress(TimeoutError):
            return result.result(0.1)
    if failed:
        raise ConfigError(addresses.what_is_wrong(place.named, failed[-1], KEYS)) from failed[-1]
    raise ConfigError(f"{place.named} does not answer. Check the network and the endpoint.")


def download(place: Place, index: Index, folder: Path, step: int) -> str | None:
    """Download a checkpoint; return why it cannot be used, None if it can."""
    unit = checkpoint_name(step)
    missing = next((name for name in index.of(unit) if not place.get(name, index.files[name], folder / name)), None)
    try:
        if missing is None:
            verify(folder / unit)
            if sha256_of(folder / unit / "manifest.json") == index.files[f"{unit}/manifest.json"]["sha256"]:
                return None
        reason = "manifest.json is of another checkpoint" if missing is None else f"{Path(missing).name} is missing"
    except BrokenCheckpoint as error:
        reason = str(error)
    remove(folder / unit)
    return f"Skipped {place.address}/{unit}: {reason}."


def fetched(address: str, *parts: str, key: str = "") -> Path:
    """Bring a run in a bucket, or a part of it, into the cache of this machine, as far as it is not there; return its path.

    Args:
        address: of an ``output_dir``, or of a model or checkpoint in it.
        parts: what is needed besides these, logs, the recipe and results: "model", "checkpoints".
        key: as of ``Place``.

    Raises:
        ConfigError: no run is there; or it cannot be reached.
    """
    part = re.search(rf"/({CHECKPOINTS}/step_\d+|{'|'.join(MODELS)})/?$", address)
    root, rest = (address[: part.start()], part[1]) if part else (address.rstrip("/"), "")
    if (problem := address_problem(root)) is not None:
        raise ConfigError(f"{root}: {problem}")
    if part and patiently((place := opened(address.rstrip("/"), key)).read, place) is not None:  # a run of that name
        root, rest = place.address, ""
    place, folder = opened(root, key), copy_folder("runs", root) / local_name(root).name
    with locked(folder):  # processes of this machine may do the same
        renew(place, folder, {*parts, rest})
    return folder / rest


def renew(place: Place, folder: Path, parts: set[str]) -> None:
    """Bring a copy of a run to what is in its bucket now; of checkpoints and models, only these parts."""
    index = patiently(place.read, place)
    if index is None:
        raise ConfigError(
            f"{place.address} holds no run: there is no {INDEX}. Name the output_dir of a run, as it was trained."
        )
    old = json.loads((folder / INDEX).read_text(encoding="utf-8")) if (folder / INDEX).is_file() else {}
    have = {name: entry for name, entry in old.items() if index.files.get(name) == entry}
    for name in {*old, *index.files} - have.keys():
        remove(folder / inside(name))
        with suppress(OSError):  # which is no checkpoint without files
            (folder / name).parent.rmdir()
    folder.mkdir(exist_ok=True)

    def is_needed(name: str) -> bool:
        kinds = {unit_of(name), name.partition("/")[0]}
        return name.endswith(ABOUT) or bool(kinds & parts) or not kinds & {CHECKPOINTS, *MODELS}

    names = [name for name in index.files if name not in have and is_needed(name)]
    if names:
        total = sum(index.files[name]["bytes"] for name in names)
        print(f"Fetching {total / 1e6:,.1f} MB from {place.address} ...", file=sys.stderr, flush=True)
    for name in names:
        is_there = place.get(name, index.files[name], folder / name)
        if not is_there or (unit_of(name) != name and sha256_of(folder / name) != index.files[name]["sha256"]):
            raise ConfigError(f"{place.address}/{name} is missing or has changed since it was written.")
        have[name] = index.files[name]
        write_text(folder / INDEX, json.dumps(have))

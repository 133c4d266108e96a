"""Keeps a run in a bucket: uploads its output folder in the background, and brings it to a machine that does not have it.

Only the main process writes there. What bucket.json lists is whole, see objects.py:

- the objects of a checkpoint or model have names that no other one ever has, also if it takes the place of one;
- logs grow, and a resume cuts them; so they are there before the checkpoint that they belong to, and are not compared.

Losing the network costs time: what cannot be uploaded is tried again, until the end of the run and PATIENCE_S beyond.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from hftune.atomic import remove, sha256_of, write_text
from hftune.checkpoints.checkpointer import steps
from hftune.checkpoints.copying import (
    BEGUN,
    CHECKPOINTS,
    INCOMING,
    MODELS,
    about,
    by_unit,
    layout,
    manifests,
    place,
    progress_of,
    read_id,
    unit_of,
    wanted,
    write_id,
)
from hftune.checkpoints.objects import Entry, Index, checkpoint_name, download, opened, patiently
from hftune.checkpoints.resume import Member, is_restarted, member
from hftune.config.addresses import is_for_good
from hftune.config.sections import CheckpointConfig
from hftune.distributed.rounds import present_round
from hftune.errors import ConfigError, TrainingError, first_line

OUTGOING = ".outgoing"
"""Folder on this machine of what is being uploaded: links, which keep the contents whatever becomes of the names."""
ADDRESS = ".address"
"""File in a working copy: what it is a copy of."""
ATTEMPTS = 100
"""To link what is to be uploaded, while it may be replaced."""
LOOK_S = 1.0
"""Between two looks for a new checkpoint or model."""
LOGS_S = 60.0
"""After which logs are uploaded also without one,"""
LOGS_SHARE = 10
"""or this many times as long as that took before."""
PATIENCE_S = 600.0
"""Without a byte sent, after which the end of a run waits no longer."""
ROUND_S = 30.0
"""The same at the end of a round of an elastic job, which goes on."""
RETRY_S = 2.0
"""Between the first two attempts to upload; later ones are rarer,"""
MOST_RETRY_S = 60.0
"""up to this."""


class TakenOver(Exception):
    """Another process writes to this address now."""


class Bucket:
    """What a run has in a bucket, and the thread that brings its folder there. Main process only.

    Args:
        address: ``output_dir``.
        folder: its working copy, which this process has locked.
        is_ours: whether this process still has it.
    """

    def __init__(self, address: str, folder: Path, is_ours: Callable[[], bool]):
        self.address, self.folder, self.is_ours = address.rstrip("/"), folder, is_ours
        self.place = opened(self.address, "output_dir")
        self.index = Index()
        self.failure: str | None = None
        """Why the last attempt to upload failed; None if it did not."""
        self.config = CheckpointConfig()
        self._word = secrets.token_hex(8)
        self._had: tuple[int, int] | None = None
        """If it did not answer before training: ``progress_of`` the folder then."""
        self._is_over = False
        """Whether nothing more may be uploaded."""
        self._leftovers: set[str] = set()
        """Objects to remove unless the list has them."""
        self._known: dict[str, tuple[Any, Entry]] = {}
        self._ends = threading.Event()
        self._thread: threading.Thread | None = None

    # Before training

    def claim(self, resume: str, group: Sequence[Member] | None = None) -> list[str]:
        """Bring the folder to what is there if that is newer. Return what a user should know.

        Another process may go on writing there: a run that is refused, or fails before its first step, takes nothing from it.

        Args:
            group: see ``find_start``.

        Raises:
            ConfigError: it cannot be reached or written; or a different run is there.
        """
        try:
            self.index, self._leftovers = patiently(self._look, self.place)
        except ConfigError as error:
            if not (present_round() and steps(self.folder / CHECKPOINTS)):
                raise
            self._had = progress_of(self.folder)
            return [f"{error} This round goes on from {self.folder}."]  # and takes the address over once it answers
        found = self.index
        if resume == "never" and not self._is_restart(found, member() if group is None else group):
            return [f"{self.address} holds an earlier run; this run replaces it."] if found.files else []
        while True:
            try:
                return self._fetch(self.index)
            except ConfigError:
                found, self._leftovers = patiently(self._look, self.place)
                if found == self.index:
                    raise
                self.index = found  # its writer went on meanwhile, and removed what was to be fetched

    def _look(self) -> tuple[Index, set[str]]:
        """Return what is there, without a writer, after a look whether this process may list, write and remove objects."""
        found, leftovers = self.place.read() or Index(), self.place.probe()
        return replace(found, writer=""), leftovers

    def _take(self) -> None:
        """Let this process be the one that writes, and go on from what is there now.

        Raises:
            TakenOver: another run is there; or, if nothing was known of it before training, one that has come further.
        """
        who = f"process {os.getpid()} on {socket.gethostname()}"
        while True:  # until nobody else writes in the same moment
            found = self.place.read() or Index()
            is_other = found.run not in ("", self.index.run or read_id(self.folder))
            if is_other or (self._had is not None and (found.starts, found.step) > self._had):
                raise TakenOver(f"{found.who} has gone on at {self.address} meanwhile")
            self.place.write(index := replace(found, writer=self._word, who=who))
            if self.place.read() == index:
                self.index = index
                return

    def _is_restart(self, found: Index, group: Sequence[Member]) -> bool:
        """Whether the same job has written what is there, from another machine; see ``is_restarted``."""
        if not (self.folder / BEGUN).is_file() and BEGUN in found.files:
            self.place.get(BEGUN, {}, self.folder / BEGUN)
        return is_restarted(self.folder, group)

    def _fetch(self, found: Index) -> list[str]:
        has_steps, note = bool(steps(self.folder / CHECKPOINTS)), self.folder / ADDRESS
        if has_steps and note.is_file() and (other := note.read_text(encoding="utf-8")) != self.address:
            raise ConfigError(
                f"output_dir={self.address} has the same working copy on this machine as {other}, {self.folder}, which holds a "
                "run of that one. Remove that folder, or set output_dir=... to an address of another name."
            )
        if has_steps and found.run and read_id(self.folder) != found.run:
            raise ConfigError(
                f"output_dir={self.address} holds a different run than its working copy on this machine, {self.folder}. Remove "
                "that folder to resume the one in the bucket; or set output_dir=... to a new address, or resume=never to "
                "replace both."
            )
        if not found.checkpoints or (has_steps and progress_of(self.folder) >= (found.starts, found.step)):
            return []
        total = sum(entry["bytes"] for name, entry in found.files.items() if not name.startswith(CHECKPOINTS))
        total += sum(found.files[name]["bytes"] for name in found.of(checkpoint_name(found.checkpoints[-1])))
        print(f"Fetching {total / 1e6:,.1f} MB from {self.address}, which {found.who} has written ...", flush=True)
        incoming = self.folder / INCOMING
        remove(incoming)
        notices, models = self._receive(found, incoming)
        place(incoming, self.folder, found.run, manifests(incoming), models)
        return notices

    def _receive(self, found: Index, incoming: Path) -> tuple[list[str], set[str]]:
        """Download the newest intact checkpoint, that of the best model, and all that belongs to them.

        Returns:
            What a user should know, and which models have arrived.
        """
        notices: list[str] = []

        def take(step: int) -> bool:
            if (problem := download(self.place, found, incoming, step)) is not None:
                notices.append(problem)
            return problem is None

        newest = next(filter(take, reversed(found.checkpoints)), None)
        if newest is None:
            raise ConfigError(f"{' '.join(notices)} No intact checkpoint is left. resume=never removes them and starts over.")
        progress = json.loads((incoming / checkpoint_name(newest) / "progress.json").read_text(encoding="utf-8"))
        best = progress["state"].get("best_step")
        if best != newest and best in found.checkpoints:
            take(best)
        models = {unit_of(name) for name in found.files} & {*MODELS}
        for name, entry in found.files.items():
            if name.startswith(CHECKPOINTS) or unit_of(name) not in {name, *models}:
                continue
            is_there = self.place.get(name, entry, incoming / name)
            if not is_there or (unit_of(name) in models and sha256_of(incoming / name) != entry["sha256"]):
                notices.append(f"Skipped {self.address}/{unit_of(name)}: {Path(name).name} is missing or has changed.")
                models.discard(unit_of(name))
        for name in {*MODELS} - models:
            remove(incoming / name)
        return notices, models

    # In training

    def begin(self, config: CheckpointConfig) -> None:
        """From here on upload what changes in the folder, until ``finish``."""
        self.config = config
        if not read_id(self.folder):
            write_id(self.folder, secrets.token_hex(8))
        write_text(self.folder / ADDRESS, self.address)
        self._thread = threading.Thread(target=self._follow, name="hftune bucket", daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        seen, uploaded_at, failed_at, wait_s, logs_s = None, 0.0, 0.0, RETRY_S, LOGS_S
        while not self._is_over:
            is_last, now = self._ends.is_set(), time.monotonic()
            try:
                changed = None
                with suppress(FileNotFoundError):  # it is just being replaced
                    changed = layout(self.folder)
                if is_last or changed != seen or now > uploaded_at + logs_s:
                    self.upload()
                    if changed == seen:  # whole logs: the longer they are, the more rarely
                        logs_s = max(LOGS_S, LOGS_SHARE * (time.monotonic() - now))
                    seen, uploaded_at = changed, now
                    if self.failure is not None:
                        print(f"note: {self.address} is up to date again, after {now - failed_at:.0f} s.", flush=True)
                    self.failure, wait_s = None, RETRY_S
                    if is_last:
                        return
                self._ends.wait(LOOK_S)
            except TakenOver as error:
                if self._is_over:  # the run has ended without it
                    return
                self._is_over, self.failure = True, str(error)
                print(f"warning: {error}. Nothing more is uploaded; training continues in {self.folder}.", flush=True)
            except Exception as error:  # whatever a library raises: training is worth more than its copy
                if self.failure is None:
                    failed_at = now
                    again = "Training continues, and it is tried again"
                    print(f"warning: {self.address} cannot be written: {first_line(error)}. {again}.", flush=True)
                self.failure = first_line(error)
                if is_last and is_for_good(error):
                    return
                if is_last:
                    time.sleep(min(wait_s, LOOK_S))
                else:
                    self._ends.wait(wait_s)
                wait_s = min(2 * wait_s, MOST_RETRY_S)

    def upload(self) -> None:
        """Bring what is in the folder now to the bucket.

        Raises:
            TakenOver: another process has the address.
            Exception: the network is down, or whatever a library raises.
        """
        self._check_writer()
        outgoing = self.folder / OUTGOING
        try:
            files = self._pin(outgoing)
            run, (starts, step) = read_id(self.folder), progress_of(outgoing)
            if self.index.run not in ("", run):  # a kill must not leave its list with files of this one
                self._commit(replace(self.index, run=run, starts=0, step=0, files={}))
            files = self._named(files)
            changed = [name for name, entry in files.items() if self.index.files.get(name) != entry]
            self._leftovers |= {files[name]["at"] for name in changed if "at" in files[name]}  # until the list has them
            for name in sorted(changed, key=lambda name: (name.startswith(CHECKPOINTS), name)):
                self._check_writer()
                self.place.put(outgoing / name, files[name].get("at", name), files[name]["sha256"])
        finally:
            remove(outgoing)
        self._commit(replace(self.index, run=run, starts=starts, step=step, files=self._kept(files, step) | files))
        for name in self._leftovers - self.index.objects:
            self._check_writer()
            self.place.remove(name)
            self._leftovers.remove(name)

    def _named(self, files: dict[str, Entry]) -> dict[str, Entry]:
        """Give each checkpoint and model objects of its own, which nothing replaces; one that is there as it is has them."""
        named = {**files}
        for unit, names in by_unit(files).items():
            known = {name: self.index.files[name] for name in self.index.of(unit)}
            if {name: one["sha256"] for name, one in known.items()} == {name: files[name]["sha256"] for name in names}:
                named |= known
            elif names != [unit]:
                word = sha256("".join([self._word, *(files[name]["sha256"] for name in names)]).encode()).hexdigest()[:16]
                named |= {name: {**files[name], "at": f"{unit}/{word}{name.removeprefix(unit)}"} for name in names}
        return named

    def _pin(self, outgoing: Path) -> dict[str, Entry]:
        """Link what is to be uploaded as it is at one moment, but what grows is copied; return what the index says of it."""
        for _ in range(ATTEMPTS):
            remove(outgoing)
            with suppress(FileNotFoundError):  # it was replaced or removed meanwhile
                before = layout(self.folder)
                for names in wanted(self.folder).values():
                    for name in names:
                        pin(self.folder / name, outgoing / name)
                if layout(self.folder) == before:
                    break
        else:
            raise OSError(f"{self.folder} changes all the time")
        found: dict[str, Entry] = {}
        for file in sorted(path for path in outgoing.rglob("*") if path.is_file()):
            name = file.relative_to(outgoing).as_posix()
            if name.startswith(CHECKPOINTS) and file.name != "manifest.json":
                listed = json.loads((file.parent / "manifest.json").read_text(encoding="utf-8"))["files"]
                if file.name in listed:
                    found[name] = listed[file.name]
            else:
                found[name] = self._entry(file, name)
        return found

    def _entry(self, file: Path, name: str) -> Entry:
        """Return what the index says of a file, which is hashed once."""
        now = about(file.stat())
        if self._known.get(name, (None,))[0] != now:
            self._known[name] = now, {"bytes": now[1], "sha256": sha256_of(file)}
        return self._known[name][1]

    def _kept(self, files: Mapping[str, Entry], step: int) -> dict[str, Entry]:
        """Return the entries of checkpoints that were uploaded before and stay: those that the folder would keep."""
        there = sorted({one for index in (self.index, Index(files={**files})) for one in index.checkpoints if one <= step})
        units = {checkpoint_name(one) for one in self.config.kept(there)} if there else set()
        return {name: entry for name, entry in self.index.files.items() if unit_of(name) in units and name not in files}

    def _check_writer(self) -> None:
        if self._is_over or not self.is_ours():
            raise TakenOver(f"{self.folder} was taken over by another process")
        if not self.index.writer:  # this is the first upload
            self._take()
        found = self.place.read()
        if found is not None and found.writer != self.index.writer:
            raise TakenOver(f"{found.who} has taken over {self.address}")

    def _commit(self, index: Index) -> None:
        if index != self.index:
            self._check_writer()
            self._leftovers |= self.index.objects
            self.place.write(index)
            self.index = index

    # At the end

    def finish(self, kind: type[BaseException] | None, *_: Any) -> None:
        """Upload the rest, and wait for it; as the exit of a context.

        Raises:
            TrainingError: it could not be uploaded, and nothing else has failed.
        """
        if self._thread is None:
            return
        try:
            self._wait(kind)
        finally:  # what it is doing comes to an end, and no more: the folder may be another run's from here on
            self._is_over = True
            self._ends.set()

    def _wait(self, kind: type[BaseException] | None) -> None:
        if kind is KeyboardInterrupt or self._thread is None:
            return
        began, patience_s = time.monotonic(), ROUND_S if present_round() is not None and kind is not None else PATIENCE_S
        self.place.moved_at = began
        self._ends.set()
        self._thread.join(LOOK_S)
        if self._thread.is_alive():
            until = f"for at most {patience_s:g} s in which nothing moves"
            print(f"Waiting for the last upload to {self.address}, {until} ...", flush=True)
        while self._thread.is_alive() and time.monotonic() < self.place.moved_at + patience_s:
            self._thread.join(0.1)
        waited = f"{time.monotonic() - began:.1f} s"
        if not self._thread.is_alive() and self.failure is None:
            print(f"{self.address} has everything; the last upload took {waited}.", flush=True)
            return
        why = self.failure or "the last upload did not come to an end"
        then = "" if self._is_over else " The same command on this machine uploads the rest."
        text = f"{self.folder} has what was saved, but {self.address} has not: {why} (waited {waited}).{then}"
        if kind is None:
            raise TrainingError(text)
        print(f"warning: {text}", flush=True)


def pin(file: Path, other: Path) -> None:
    """Keep the contents that a file has now under another name: by a link, or a copy of what grows."""
    other.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix != ".jsonl" and not file.name.startswith("events.out"):
        with suppress(OSError):  # this file system may have no links
            os.link(file, other)
            return
    shutil.copyfile(file, other)

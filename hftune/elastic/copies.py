"""Copies of the main machine's output folder on other machines, if the machines of an elastic job have no common file system.

The launchers copy; the training knows nothing of it. The first machine of a round trains in its own folder. After each
checkpoint its launcher sends what a resume needs to ``checkpoint.copies`` other launchers, which put it into their folders. If
the first machine is lost, the one with the newest state becomes the first (membership.py), and its processes simply resume.

What is copied, and how a copy takes its place as a whole, is in checkpoints/copying.py: buckets share it.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, BinaryIO

from hftune.atomic import remove
from hftune.checkpoints.checkpointer import steps, tidy, verify
from hftune.checkpoints.copying import (
    BEGUN,
    CHECKPOINTS,
    INCOMING,
    MODELS,
    about,
    by_unit,
    inside,
    layout,
    manifests,
    place,
    progress_of,
    read_id,
    wanted,
    write_id,
)
from hftune.checkpoints.lock import only_writer
from hftune.distributed.rounds import present_job
from hftune.elastic.membership import Machine, State
from hftune.errors import ConfigError
from hftune.launchers.rendezvous import say

SLICE_BYTES = 8 << 20
HELLO_S = 0.5
"""For a caller to say who it is. Machines that only see whether they reach this one say nothing."""
LOOK_S = 0.5
"""Between two looks for a new checkpoint."""
SILENT_S = 60.0
"""Without a byte, after which a connection counts as broken."""
VERIFY_S = 1800.0
"""For a receiver to verify what has arrived: a large model on a slow disk takes minutes."""
RETRY_S = 2.0
"""Between two attempts to connect."""
COME_S = 5.0
"""For a machine that has just come to connect, before this one leaves."""


class Copies:
    """This launcher's part: in each round it sends its folder to others, or receives that of the first machine.

    Args:
        folder: the output folder of this machine.
        copies: how many other machines keep a copy.
        resume: as in the recipe.
        is_here: whether a machine is in the job, by its id.
    """

    def __init__(self, folder: Path, copies: int, resume: str, is_here: Callable[[str], bool]):
        self.folder, self.copies, self.resume, self.is_here = folder, copies, resume, is_here
        self.round, self.version = -1, 0
        """``version`` counts the requests for a copy of the present state."""
        self.changed = threading.Condition()
        self.moved_at = float("-inf")
        """When something last arrived here."""
        self.senders: list[Sender] = []
        self._receiver: Receiver | None = None
        self._first = self._token = ""
        self._others: set[str] = set()
        """Machines of the round of which this one is the first."""
        self.agreed: set[str] = set()
        """Those of them that keep a copy, or have said that they do not."""
        self._said: set[str] = set()

    def state(self) -> State:
        """Return what the folder holds."""
        return State(read_id(self.folder), *progress_of(self.folder))

    def run(self) -> str:
        """Return the word that the copies of the run have in common; empty before there is one."""
        return read_id(self.folder) if has_begun(self.folder) else ""

    def newest(self) -> str:
        """Return the name of the newest checkpoint; empty if there is none."""
        return max((path.name for path in (self.folder / CHECKPOINTS).glob("step_*")), default="")

    def begin(self, number: int, me: Machine, members: Sequence[Machine]) -> None:
        """Take part in a round of these machines, whose first one is this or another one."""
        self.round, (first, *others) = number, members
        self._others = {one.id for one in others} if first.id == me.id else set()
        if first.id != self._first:
            self.stop()
            self._first, self._token = first.id, me.token if first.id == me.id else ""
        if first.id != me.id and (self._receiver is None or not self._receiver.is_alive()):
            self._receiver = Receiver(self, me, first)
            self._receiver.start()

    def accept(self, connection: socket.socket) -> None:
        """Serve another launcher if this machine is the first one and the caller knows its token; else hang up."""
        connection.settimeout(HELLO_S)
        token = ""
        with suppress(OSError, ValueError):
            token, machine, host = connection.recv(1024).decode().split()
        if not (self._token and hmac.compare_digest(token.encode(), self._token.encode())):
            connection.close()
            return
        for before in self.senders:
            if before.machine == machine:
                before.stop()
        self.senders = [one for one in self.senders if one.machine != machine and one.is_alive()]
        sender = Sender(self, Channel(connection), machine, host)
        sender.start()
        self.senders.append(sender)

    @property
    def num_kept(self) -> int:
        """How many other machines keep a copy."""
        return sum(bool(one.is_chosen) and one.is_there for one in self.senders)

    def complete(self) -> None:
        """Wait until the copies have all that this machine has now, or their machines are gone."""
        until = time.monotonic() + (COME_S if has_something(self.folder) else 0.0)
        with self.changed:
            self.version += 1
            self.changed.notify_all()
            while any(one.is_awaited for one in self.senders) or (
                time.monotonic() < until and any(map(self.is_here, self._others - self.agreed))
            ):
                self.changed.wait(LOOK_S)

    def stop(self) -> None:
        """End copying. Nothing is written to this machine's folder afterwards."""
        self._first = self._token = ""
        for sender in self.senders:
            sender.stop()
        if self._receiver is not None:
            self._receiver.stop()
        self.senders, self._receiver, self.agreed = [], None, set()

    def say(self, text: str) -> None:
        """Say something once."""
        if text not in self._said:
            self._said.add(text)
            say(text)


class Channel:
    """A connection between two launchers: lines of JSON, and bytes of files."""

    def __init__(self, connection: socket.socket):
        connection.settimeout(SILENT_S)
        self._connection, self._file = connection, connection.makefile("rb")

    def say(self, **words: Any) -> None:
        """Send a line; without words, a sign of life."""
        self._connection.sendall(json.dumps(words).encode() + b"\n")

    def hear(self, timeout_s: float = SILENT_S) -> dict[str, Any]:
        """Return the next line with words."""
        self._connection.settimeout(timeout_s)
        words: dict[str, Any] = {}
        while not words:
            line = self._file.readline()
            if not line.endswith(b"\n"):
                raise ConnectionError("the connection broke off")
            words = json.loads(line)
        self._connection.settimeout(SILENT_S)
        return words

    def send(self, file: BinaryIO, start: int, size: int) -> None:
        """Send the bytes of a file from ``start`` to ``size``."""
        if size > start and self._connection.sendfile(file, start, size - start) != size - start:
            raise ConnectionError("the file has become shorter")

    def receive(self, file: BinaryIO, count: int) -> None:
        """Write the next ``count`` bytes to a file."""
        while count:
            if not (data := self._file.read(min(count, SLICE_BYTES))):
                raise ConnectionError("the connection broke off")
            count -= file.write(data)

    def close(self) -> None:
        """Let both ends fail, also in other threads."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


class Sender(threading.Thread):
    """Sends the folder of this machine to one other launcher, and again after each checkpoint."""

    def __init__(self, copies: Copies, channel: Channel, machine: str, host: str):
        super().__init__(name="hftune sender", daemon=True)
        self.copies, self.channel, self.machine, self.host = copies, channel, machine, host
        self.is_chosen: bool | None = None
        """Whether the other one keeps a copy; None before that is clear."""
        self.version = -1
        """Of what the other one has, see Copies."""
        self._round = -1
        self._sent: dict[str, tuple[int, int, int]] = {}
        """What ``about`` said of each file that the other one has."""
        self._there: dict[str, str] = {}
        """The checkpoints that the other one has, as ``manifests``."""

    @property
    def is_there(self) -> bool:
        """Whether the other machine is there, and connected."""
        return self.is_alive() and self.copies.is_here(self.machine)

    @property
    def is_awaited(self) -> bool:
        """Whether the other machine is there, and is to get the present state; or may be, as it has just come."""
        if self.is_chosen is None:
            return self.is_there and has_something(self.copies.folder)
        return self.is_chosen and self.is_there and self.version < self.copies.version

    def stop(self) -> None:
        """Make this thread end soon."""
        self.channel.close()

    def run(self) -> None:
        newest = None
        with suppress(OSError, ValueError, LookupError):  # the other one has gone; if it is still there, it comes again
            is_chosen = self._agree()
            while is_chosen:
                version, now = self.copies.version, manifests(self.copies.folder)
                if (version, now) == (self.version, newest) or not self._send():
                    self._pause()
                else:
                    newest = now
                    with self.copies.changed:
                        self.version = version
                        self.copies.changed.notify_all()
        if self.is_chosen and not any(one is not self and one.machine == self.machine for one in self.copies.senders):
            self.copies.agreed.discard(self.machine)
        self.channel.close()

    def _pause(self) -> None:
        self.channel.say()
        with self.copies.changed:
            self.copies.changed.wait(LOOK_S)

    def _agree(self) -> bool:
        """Once there is a checkpoint, find out whether the other machine has a folder of its own and may keep a copy in it."""
        copies = self.copies
        while not has_something(copies.folder):
            self._pause()
        if not read_id(copies.folder):
            write_id(copies.folder, secrets.token_hex(8))
        # The other one tries to create a file that is here. Over NFS, it might not see one for a minute.
        mark = copies.folder / f".seen-{secrets.token_hex(8)}"
        mark.touch()
        try:
            self.channel.say(mark=mark.name, run=read_id(copies.folder))
            answer = self.channel.hear()
        finally:
            mark.unlink(missing_ok=True)
        self._there = answer["checkpoints"]
        if not answer["is_own"] or answer["refusal"]:
            self.is_chosen = False
        if refusal := answer["refusal"]:
            copies.say(f"{self.host} keeps no copy of output_dir: {refusal.removesuffix('.')}.")
        elif answer["is_own"]:
            with copies.changed:  # two machines may answer at once
                self.is_chosen = copies.num_kept < copies.copies
            if self.is_chosen or copies.copies == 0:
                who = self.host if self.is_chosen else "none"
                kept = f"{who} keeps a copy of output_dir (checkpoint.copies={copies.copies})"
                copies.say(f"The machines have no common file system: {kept}.")
        self.channel.say(is_chosen=self.is_chosen)
        copies.agreed.add(self.machine)
        return bool(self.is_chosen)

    def _send(self) -> bool:
        """Send what the other one lacks; return False if something was replaced in this moment."""
        folder = self.copies.folder
        if self._round != self.copies.round:  # the processes of a new round may have cut the logs
            self._round = self.copies.round
            self._sent = {name: was for name, was in self._sent.items() if not name.endswith(".jsonl")}
        with ExitStack() as stack:  # what is open can be read to its end, whatever becomes of its name
            try:
                before, opened = layout(folder), {}
                units = wanted(folder)
                for unit, names in units.items():
                    is_there = unit in self._there and self._there[unit] == before[unit]
                    if not is_there and any(self._sent.get(name) != about((folder / name).stat()) for name in names):
                        opened |= {name: stack.enter_context((folder / name).open("rb")) for name in names}
                if layout(folder) != before:
                    return False
            except (OSError, LookupError):
                return False
            for name, file in opened.items():
                inode, size, _ = now = about(os.fstat(file.fileno()))
                was = self._sent.get(name, now)
                start = was[1] if name.endswith(".jsonl") and was[0] == inode and was[1] < size else 0
                self.channel.say(file=name, start=start, size=size)
                self.channel.send(file, start, size)
                self._sent[name] = now
        checkpoints = {name: digest for name, digest in before.items() if name not in MODELS}
        self.channel.say(run=read_id(folder), checkpoints=checkpoints, models=[name for name in MODELS if name in before])
        self.channel.hear(VERIFY_S)
        self._there = {name: before[name] for name in checkpoints if name in units or self._there.get(name) == before[name]}
        return True


class Receiver(threading.Thread):
    """Puts what the first machine sends into the folder of this one. What goes wrong is tried again and never ends the job."""

    def __init__(self, copies: Copies, me: Machine, first: Machine):
        super().__init__(name="hftune receiver", daemon=True)
        self.copies, self.folder, self.me, self.first = copies, copies.folder, me, first
        self._channel: Channel | None = None
        self._ends = threading.Event()
        self._is_ours: Callable[[], bool] = lambda: True

    def stop(self) -> None:
        """End this thread, and wait for it."""
        self._ends.set()
        if self._channel is not None:
            self._channel.close()
        self.join()

    def run(self) -> None:
        while not self._ends.is_set():
            try:
                if not self._follow():
                    return
            except (ConnectionError, TimeoutError):
                pass  # if the first machine is lost, all hear of it elsewhere
            except (OSError, ValueError, LookupError) as error:
                self.copies.say(
                    f"The copy of output_dir on {self.me.host} is not up to date, as {self.folder} could not be renewed: "
                    f"{error}. Training goes on, and it is tried again."
                )
            self._ends.wait(RETRY_S)

    def _follow(self) -> bool:
        """Copy until the connection breaks; return False if this machine does not keep a copy."""
        connection = socket.create_connection((self.first.address, self.first.port), timeout=RETRY_S)
        channel = self._channel = Channel(connection)
        try:
            if self._ends.is_set():  # it was not there yet for ``stop`` to close
                return False
            connection.sendall(f"{self.first.token} {self.me.id} {self.me.host}\n".encode())
            asked = channel.hear()
            with ExitStack() as held:
                is_own = is_first_to_create(self.folder / inside(asked["mark"]))
                refusal = self._prepare(asked["run"], held) if is_own else None
                channel.say(is_own=is_own, refusal=refusal, checkpoints=manifests(self.folder))
                if not channel.hear()["is_chosen"]:
                    return False
                while True:
                    self._receive(channel, self.folder / INCOMING)
        finally:
            channel.close()
            remove(self.folder / INCOMING)

    def _prepare(self, run: str, held: ExitStack) -> str | None:
        """Lock this machine's folder for its copy; return why it cannot have one, None if it can."""
        if steps(self.folder / CHECKPOINTS) and read_id(self.folder) != run and self.copies.resume != "never":
            return "output_dir holds another run there"
        try:
            self._is_ours = held.enter_context(only_writer(self.folder))
        except ConfigError as error:
            return str(error)
        tidy(self.folder / CHECKPOINTS)
        return None

    def _receive(self, channel: Channel, incoming: Path) -> None:
        """Do what one line says."""
        words = channel.hear()
        if name := words.get("file"):
            path, start = incoming / inside(name), words["start"]
            path.parent.mkdir(parents=True, exist_ok=True)
            if start:
                shutil.copyfile(self.folder / name, path)
                os.truncate(path, start)
            with path.open("ab") as file:
                channel.receive(file, words["size"] - start)
        else:
            self._place(incoming, words["run"], words["checkpoints"], words["models"])
            channel.say(is_done=True)
        self.copies.moved_at = time.monotonic()

    def _place(self, incoming: Path, run: str, checkpoints: dict[str, str], models: list[str]) -> None:
        arrived = by_unit(path.relative_to(incoming).as_posix() for path in incoming.rglob("*") if path.is_file())
        for name in arrived.keys() & checkpoints.keys():
            verify(incoming / name)
        if self._ends.is_set() or not self._is_ours():
            raise ConnectionAbortedError
        place(incoming, self.folder, run, checkpoints, models)


def has_begun(folder: Path) -> bool:
    """Whether the present job trains in this folder. Until it does, what is there may be removed, as with resume=never."""
    path = folder / BEGUN
    return path.is_file() and f"job {present_job()}" in json.loads(path.read_text(encoding="utf-8"))


def has_something(folder: Path) -> bool:
    """Whether there is a checkpoint of the present job in this folder."""
    return has_begun(folder) and bool(manifests(folder))


def is_first_to_create(path: Path) -> bool:
    """Create a file, and return whether it was not there yet; see ``Sender._agree``. It is removed again."""
    with suppress(OSError):  # a folder that cannot be written is nobody else's, either
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            path.touch(exist_ok=False)
        except FileExistsError:
            return False
        path.unlink()
    return True

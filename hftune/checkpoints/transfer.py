"""Copies an output folder to another machine: what a resume needs, checked byte for byte. Independent of training and torch.

One machine serves its folder over HTTP on the training network, and only to those who know a random token; the other asks for
what has changed. Nothing is placed before everything has arrived and its SHA-256 is right. Then the logs are placed first and
the checkpoints last: a checkpoint that is there has all that belongs to it.
"""

from __future__ import annotations

import hmac
import json
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

from hftune.atomic import atomic_path, remove
from hftune.checkpoints.atomic_files import sha256_of
from hftune.checkpoints.checkpointer import path_of, remove_checkpoint
from hftune.checkpoints.contents import CHECKPOINTS, SLICE, WHOLE, Changed, Contents, Digests, Sums, contents

INCOMING = ".incoming"
"""Folder of what has arrived so far."""
SILENT_S = 10.0
"""After so long without a word a receiver counts as gone."""
CONNECT_S = 3.0
"""How long to wait for a connection: who ends a copy may have to wait for it, too."""
ANSWER_S = 60.0
"""How long to wait for an answer, for which the source may have to read a large model."""
WAIT_S = 2.0
"""How long a request for news stays open while there are none; well below SILENT_S."""


class Source:
    """Serves a folder to those who know the token, from threads of its own, until ``close``.

    Args:
        address: of this machine on the training network; nothing listens on its other addresses.
        is_final: the folder does not change any more.
    """

    def __init__(self, folder: Path, address: str, token: str, is_final: bool = False):
        self.folder, self.token = folder, token
        self._digests, self._changed = Digests(), threading.Condition()
        self._version, self._is_final = 1, is_final
        self._lists = threading.Lock()
        self._listed: dict[str, Contents] = {}
        """What each receiver copies now, or has copied last."""
        self._has: dict[str, int] = {}
        """The version that each receiver has whole."""
        self._heard: dict[str, float] = {}
        """When each receiver was last there."""
        self._server = _Server((address, 0), self)
        self.address = address, self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.1,), name="copies", daemon=True).start()

    def renew(self) -> None:
        """Say that there is something new to copy. From any thread; returns at once."""
        with self._changed:
            self._version += 1
            self._changed.notify_all()

    def is_in_use(self, step: int) -> bool:
        """Say whether this checkpoint is being copied, so that it must stay."""
        name = f"{CHECKPOINTS}/{path_of(self.folder, step).name}/manifest.json"
        with self._changed:
            return any(
                name in listed.files and self._has[receiver] < listed.version and not self._is_silent(receiver)
                for receiver, listed in self._listed.items()
            )

    def finish(self, receivers: Sequence[str], mark: Callable[[], None]) -> None:
        """Wait until every receiver has everything, or has been silent for SILENT_S.

        Args:
            receivers: their names.
            mark: called now and then, as a sign of life.
        """
        with self._changed:
            self._is_final, self._version = True, self._version + 1
            self._heard = {name: time.monotonic() for name in receivers}
            self._changed.notify_all()
            while any(self._has.get(name, 0) < self._version and not self._is_silent(name) for name in receivers):
                self._changed.wait(0.5)
                mark()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()

    def news(self, receiver: str, has: int) -> Contents | None:
        """Return the contents once there is a newer version than a receiver has; None if there was none for WAIT_S."""
        with self._changed:
            self._has[receiver] = has
            self._hear(receiver)
            if not self._changed.wait_for(lambda: self._version > has or self._is_final, WAIT_S) or self._version <= has:
                return None
            version, is_final = self._version, self._is_final
        with self._lists:
            listed = contents(self.folder, self._digests, version, is_final)
        with self._changed:
            self._listed[receiver] = listed
            self._hear(receiver)
        return listed

    def _is_silent(self, receiver: str) -> bool:
        return time.monotonic() - self._heard.get(receiver, 0.0) > SILENT_S and not self._lists.locked()

    def _hear(self, receiver: str) -> None:
        self._heard[receiver] = time.monotonic()
        self._changed.notify_all()

    def send(self, connection: socket.socket, receiver: str, name: str, start: int, size: int) -> None:
        """Send the bytes of a file from ``start`` to ``size``."""
        with (self.folder / name).open("rb") as file:
            while start < size:
                sent = connection.sendfile(file, start, min(SLICE, size - start))
                if not sent:
                    raise ConnectionError(f"{name} has become shorter")
                start += sent
                with self._changed:
                    self._hear(receiver)

    def has_file(self, receiver: str, name: str, size: int) -> bool:
        """Say whether a file was listed for a receiver, and still has so many bytes."""
        path, listed = self.folder / name, self._listed.get(receiver)
        return listed is not None and name in listed.files and path.is_file() and path.stat().st_size >= size


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], source: Source):
        self.source = source
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """As HTTPServer, which then looks its own name up: that may take many seconds."""
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def handle_error(self, *_: Any) -> None:
        """The receiver has gone, and will ask again if it lives."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = ANSWER_S
    server: _Server

    def do_GET(self) -> None:
        source, url = self.server.source, urlsplit(self.path)
        if not hmac.compare_digest(self.headers.get("Authorization", "").encode(), f"Bearer {source.token}".encode()):
            self._answer(403)
            return
        asked = {key: values[0] for key, values in parse_qs(url.query).items()}
        if url.path == "/news":
            try:
                listed = source.news(asked["receiver"], int(asked["has"]))
            except (OSError, ValueError, KeyError):  # replaced in this moment
                self._answer(409)
                return
            self._answer(*((204, b"") if listed is None else (200, json.dumps(asdict(listed)).encode())))
        elif url.path == "/file" and source.has_file(asked["receiver"], asked["name"], size := int(asked["size"])):
            start = int(asked["start"])
            self.send_response(200)
            self.send_header("Content-Length", str(size - start))
            self.end_headers()
            self.wfile.flush()
            source.send(self.connection, asked["receiver"], asked["name"], start, size)
        else:
            self._answer(409)

    def _answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        if status != 204:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Say nothing: the terminal is the training's."""


class Receiver:
    """Copies a served folder into one of this machine.

    Args:
        name: tells this receiver from the others of the source.
        is_ours: says whether this process may still write the folder.
    """

    def __init__(
        self,
        folder: Path,
        address: tuple[str, int],
        token: str,
        name: str,
        is_ours: Callable[[], bool] = lambda: True,
    ):
        self.folder, self._name, self._is_ours = folder, name, is_ours
        self.address, self._token = address, token
        self._digests, self._connection = Digests(), self._new_connection()
        self._is_closed = False

    def _new_connection(self) -> HTTPConnection:
        return HTTPConnection(*self.address, timeout=CONNECT_S)  # which, unlike urllib, knows no proxies

    def close(self) -> None:
        """End what goes on in another thread, which then fails."""
        self._is_closed = True
        with suppress(OSError, AttributeError):
            self._connection.sock.shutdown(socket.SHUT_RDWR)

    def update(self, has: int = 0) -> Contents | None:
        """Make the folder like the source's, if that has a newer version than ``has``; return what it holds now.

        Raises:
            Changed: something was replaced meanwhile; try again.
            OSError: the source does not answer, or the folder cannot be written.
            HTTPException: the source's answer broke off.
        """
        try:
            return self._update(has)
        except BaseException:
            self._connection.close()
            self._connection = self._new_connection()
            raise

    def _update(self, has: int) -> Contents | None:
        text = self._get("/news", has=has)
        if not text:
            return None
        theirs, own = Contents.from_json(text), contents(self.folder, self._digests)
        remove(self.folder / INCOMING)
        try:
            wanted = self._fetch(theirs, own)
            self._check_open()
            self._place(wanted)
            self._clear(theirs, own)
        finally:
            remove(self.folder / INCOMING)
        return theirs

    def _fetch(self, theirs: Contents, own: Contents) -> list[str]:
        """Fetch everything that differs, beside its place; return what it is, in the order in which to place it."""
        owned = own.units()
        wanted = {name: files for name, files in theirs.units().items() if not _is_there(name, files, owned, theirs, own)}
        for files in wanted.values():
            for name, (size, digest) in files.items():
                self._fetch_file(name, size, digest, own.files.get(name, (0, ""))[0])
        return sorted(wanted, key=lambda name: (name.startswith(f"{CHECKPOINTS}/"), name))

    def _fetch_file(self, name: str, size: int, digest: str, own_size: int) -> None:
        """Fetch a file; of a log that has grown, only the end."""
        path = self.folder / INCOMING / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".jsonl") and own_size <= size:
            shutil.copyfile(self.folder / name, path) if own_size else path.touch()
            self._append(path, name, size)
            if sha256_of(path) == digest:
                return
        path.unlink(missing_ok=True)
        self._append(path, name, size)
        if sha256_of(path) != digest:
            raise Changed(f"{name} was replaced while it was copied")

    def _append(self, path: Path, name: str, size: int) -> None:
        with path.open("ab") as file:
            if (start := file.tell()) < size:
                for data in self._read("/file", name=name, start=start, size=size):
                    file.write(data)

    def _place(self, names: list[str]) -> None:
        for name in names:
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            with atomic_path(self.folder / name) as temporary:
                (self.folder / INCOMING / name).rename(temporary)

    def _clear(self, theirs: Contents, own: Contents) -> None:
        """Remove the checkpoints and models that the source does not have; they may be of an abandoned part of the run."""
        for name, digest in own.checkpoints.items():
            if theirs.checkpoints.get(name) != digest and name not in theirs.units():
                remove_checkpoint(self.folder / name)
        for name in {*WHOLE} - theirs.units().keys():
            remove(self.folder / name)

    def _get(self, path: str, **asked: Any) -> bytes:
        return b"".join(self._read(path, **asked))

    def _read(self, path: str, **asked: Any) -> Iterator[bytes]:
        self._check_open()
        if self._connection.sock is None:
            self._connection.connect()
            self._connection.sock.settimeout(ANSWER_S)  # type: ignore[attr-defined]  # connect has set it
        url = f"{path}?{urlencode({'receiver': self._name, **asked})}"
        self._connection.request("GET", url, headers={"Authorization": f"Bearer {self._token}"})
        response = self._connection.getresponse()
        if response.status == 403:
            raise ConnectionRefusedError("the other machine does not know this one")
        if response.status == 409:
            response.read()
            raise Changed("a file was replaced while it was copied")
        while data := response.read(SLICE):
            self._check_open()
            yield data
        if response.length:
            raise HTTPException("the answer broke off")

    def _check_open(self) -> None:
        if self._is_closed or not self._is_ours():
            raise ConnectionAbortedError("another process has taken over, or this one ends")


def _is_there(name: str, files: Sums, owned: Mapping[str, Sums], theirs: Contents, own: Contents) -> bool:
    if name in theirs.checkpoints:
        return own.checkpoints.get(name) == theirs.checkpoints[name]
    return owned.get(name) == files

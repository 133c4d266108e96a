"""A small Hub on loopback: repositories with commits, as huggingface_hub 2, datasets 5 and transformers 5 ask the real one for them.

Every repository is a folder of commits, ROOT/<models or datasets>/<owner>/<name>/<commit>/..., and ROOT/hub.json says which commit
a revision means, which old names redirect, and what is wrong with a repository. Every request is logged in ROOT/log.txt.

    python -m tests.support.hub ROOT PORT HOST      serves a folder that a Hub was filled in, from a network namespace, say
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import threading
import time
import urllib.parse
from collections import Counter
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

SLOW_S = 30.0
"""A slow repository keeps everyone who wants a file waiting for so long."""
CUT_AFTER = 1000
"""Bytes of a file that come through before the connection of a repository with a broken one is cut."""


class Hub:
    """A Hub that a test fills, starts, and asks what was fetched."""

    handler: type[BaseHTTPRequestHandler]

    def __init__(self, root: Path):
        self.root = root
        self.state: dict[str, dict[str, Any]] = {"revisions": {}, "redirects": {}, "faults": {}, "private": {}}

    def commit(self, kind: str, name: str, files: Mapping[str, bytes], revision: str = "main") -> str:
        """Add a commit to a repository of ``kind`` "models" or "datasets", and return its SHA-1; earlier ones stay."""
        digest = hashlib.sha1(f"{kind} {name}".encode())
        for path, data in sorted(files.items()):
            digest.update(path.encode() + hashlib.sha1(data).digest())
        folder = self.root / kind / name / digest.hexdigest()
        for path, data in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)
        self.state["revisions"].setdefault(f"{kind}/{name}", {})[revision] = folder.name
        self._write()
        return folder.name

    def rename(self, kind: str, old: str, new: str) -> None:
        """Redirect an old name, as the real Hub does: models may be asked for without an owner, data sets may not."""
        self.state["redirects"][f"{kind}/{old}"] = new
        self._write()

    def break_(self, kind: str, name: str, fault: str | None) -> None:
        """Make a repository gated, cut (in mid-file, always), cut once (each file), slow; None: whole again."""
        self.state["faults"][f"{kind}/{name}"] = fault
        self._write()

    def _write(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        (self.root / "hub.json").write_text(json.dumps(self.state))

    def start(self) -> str:
        """Serve from a thread of this process; return the address for HF_ENDPOINT."""
        self._server = serve(self.root, "127.0.0.1", 0, self.handler)
        self._server.hub = self
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{self._server.server_port}"

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def requests(self) -> list[list[str]]:
        """All requests so far: method, path, status."""
        path = self.root / "log.txt"
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def fetched(self) -> Counter[str]:
        """How often each file was sent in full: "datasets/ylecun/mnist/mnist/train-00000-of-00001.parquet"."""
        found: Counter[str] = Counter()
        for method, path, status in self.requests():
            if method == "GET" and status == "200" and (place := re.fullmatch(r"/(datasets/)?(\S+)/resolve/[^/]+/(\S+)", path)):
                found[f"{place[1] or 'models/'}{place[2]}/{place[3]}"] += 1
        return found

    def forget(self) -> None:
        """Empty the log."""
        (self.root / "log.txt").unlink(missing_ok=True)


def serve(root: Path, host: str, port: int, handler: type[BaseHTTPRequestHandler]) -> ThreadingHTTPServer:
    """Return a server of ROOT, not yet running."""
    server = ThreadingHTTPServer((host, port), handler)
    server.root, server.lock, server.cut = root, threading.Lock(), set()
    server.daemon_threads = True
    return server


class Handler(BaseHTTPRequestHandler):
    """Answers what the libraries ask: about a repository, about its tree, and for its files."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def log_request(self, code: Any = "-", size: Any = "-") -> None:
        with self.server.lock, (self.server.root / "log.txt").open("a") as file:
            file.write(f"{self.command} {urllib.parse.unquote(self.path)} {int(code)}\n")

    def do_GET(self) -> None:
        self.state = json.loads((self.server.root / "hub.json").read_text())
        url = urllib.parse.urlsplit(self.path)
        parts = [urllib.parse.unquote(part) for part in url.path.strip("/").split("/")]
        length = int(self.headers.get("Content-Length", 0))
        form = urllib.parse.parse_qs(self.rfile.read(length).decode()) if length else {}
        try:
            if parts[0] == "api":
                return self.answer(parts[1], parts[2:], url.query, form, "api/" + parts[1])
            kind = "datasets" if parts[0] == "datasets" else "models"
            rest = parts[1:] if kind == "datasets" else parts
            return self.answer(kind, rest, url.query, form, "datasets" if kind == "datasets" else "")
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    do_HEAD = do_POST = do_GET

    def answer(self, kind: str, parts: list[str], query: str, form: dict[str, list[str]], prefix: str) -> None:
        """Answer a question about a repository; ``prefix`` stands before its name in the address."""
        for count in (1, 2):  # old names had no owner
            if new := self.state["redirects"].get(f"{kind}/{'/'.join(parts[:count])}"):
                there = "/".join([prefix, new, *(urllib.parse.quote(part, safe="") for part in parts[count:])]).strip("/")
                return self.send(307, headers={"Location": f"/{there}{query and '?' + query}"})
        name, rest = "/".join(parts[:2]), parts[2:]
        revisions = self.state["revisions"].get(f"{kind}/{name}")
        if revisions is None:  # to a stranger, the Hub does not say whether a repository is missing or private
            headers = {"X-Error-Message": "Invalid username or password.", "WWW-Authenticate": "Bearer"}
            return self.send(401, {"error": "Invalid username or password."}, headers)
        call, revision, path = (rest[0] if rest else "revision"), (rest[1] if len(rest) > 1 else "main"), "/".join(rest[2:])
        commit = revisions.get(revision, revision)
        folder = self.server.root / kind / name / commit
        if not folder.is_dir():
            return self.send(404, {"error": f"Invalid rev id: {revision}"}, {"X-Error-Code": "RevisionNotFound"})
        if call == "revision":
            private = self.state["private"].get(f"{kind}/{name}", False)
            return self.send(200, {"_id": "1", "id": name, "sha": commit, "private": private, "gated": False, "siblings": []})
        if call == "tree":
            if not (folder / path).is_dir():
                return self.send(404, {"error": "no such path"}, {"X-Error-Code": "EntryNotFound"})
            found = (folder / path).rglob("*") if "recursive=true" in query.lower() else (folder / path).iterdir()
            return self.send(200, [describe(entry, folder) for entry in sorted(found)])
        if call == "paths-info":
            found = [folder / path for path in form.get("paths", []) if (folder / path).exists()]
            return self.send(200, [describe(entry, folder) for entry in found])
        if call == "resolve":
            return self.resolve(kind, name, folder / path, commit)
        return self.send(404, {"error": "no such call"})

    def resolve(self, kind: str, name: str, file: Path, commit: str) -> None:
        """Send a file, or say why not."""
        if self.state["faults"].get(f"{kind}/{name}") == "gated":
            code = 403 if "Authorization" in self.headers else 401
            return self.send(
                code, headers={"X-Error-Code": "GatedRepo", "X-Error-Message": f"Access to {kind} {name} is restricted."}
            )
        if not file.is_file():
            headers = {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found", "X-Repo-Commit": commit}
            return self.send(404, headers=headers)
        return self.send_file(file, self.state["faults"].get(f"{kind}/{name}"), {"X-Repo-Commit": commit})

    def send_file(self, file: Path, fault: str | None, headers: dict[str, str]) -> None:
        """Send a file, or the part of it that was asked for, as well as the repository can."""
        data, code, start = file.read_bytes(), 200, 0
        if fault == "slow" and self.command == "GET":
            time.sleep(SLOW_S)
        headers |= {"ETag": f'"{etag(file)}"', "Accept-Ranges": "bytes", "X-Linked-Size": str(len(data))}
        if wanted := self.headers.get("Range"):
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start, stop = int(first), int(last) + 1 if last else len(data)
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
            data, code = data[start:stop], 206
        is_cut = fault == "cut" or (fault == "cut once" and file not in self.server.cut)
        if is_cut and self.command == "GET" and start + len(data) > CUT_AFTER:
            self.server.cut.add(file)
            self.send(code, data, headers, most=max(0, CUT_AFTER - start))
            self.close_connection = True
            return
        self.send(code, data, headers)

    def send(self, code: int, body: Any = b"", headers: Mapping[str, str] | None = None, most: int | None = None) -> None:
        """Send an answer, or its first ``most`` bytes."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(code)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/octet-stream" if isinstance(body, bytes) else "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[:most])


def etag(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


def describe(entry: Path, folder: Path) -> dict[str, Any]:
    """Describe a file or a folder as the Hub's tree does."""
    path = entry.relative_to(folder).as_posix()
    if entry.is_dir():
        return {"type": "directory", "path": path, "size": 0, "oid": "0" * 40}
    return {"type": "file", "path": path, "size": entry.stat().st_size, "oid": etag(entry)}


Hub.handler = Handler

if __name__ == "__main__":
    serve(Path(sys.argv[1]), sys.argv[3], int(sys.argv[2]), Handler).serve_forever()

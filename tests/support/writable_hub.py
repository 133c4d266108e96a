"""A Hub on loopback that can be pushed to, as huggingface_hub 2 does without Xet: repositories, branches, LFS, commits.

HF_HUB_DISABLE_XET=1 goes with it: Xet has a server and a protocol of its own.
"""

from __future__ import annotations

import base64
import hashlib
import json
import urllib.parse
from pathlib import Path
from typing import Any

import yaml

from tests.support.hub import Handler, Hub

LFS = (".safetensors", ".bin", ".png")


class WritingHandler(Handler):
    """Answers what the library asks when it writes, and passes on what it reads."""

    def do_GET(self) -> None:
        if self.path.startswith("/api/whoami-v2"):
            return self.whoami()
        return super().do_GET()

    do_HEAD = do_GET

    def do_POST(self) -> None:
        parts = [urllib.parse.unquote(part) for part in urllib.parse.urlsplit(self.path).path.strip("/").split("/")]
        if parts[:3] == ["api", "repos", "create"]:
            return self.create(json.loads(self.body()))
        if parts == ["api", "validate-yaml"]:
            return self.validate(json.loads(self.body())["content"])
        if parts[0] == "api" and len(parts) > 4 and parts[4] in ("branch", "preupload", "commit"):
            return self.write("/".join(parts[2:4]), parts[4], parts[5], self.body())
        if parts[-3:] == ["lfs", "objects", "batch"]:
            return self.lfs(json.loads(self.body()))
        return super().do_GET()

    def do_PUT(self) -> None:
        digest, data = self.path.rsplit("/", 1)[1], self.body()
        if hashlib.sha256(data).hexdigest() != digest:
            return self.send(400, {"error": "not what was announced"})
        self.server.hub.objects[digest] = data
        return self.send(200, {})

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        data = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data

    def account(self) -> dict[str, Any] | None:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        return self.server.hub.accounts.get(token)

    def refuse(self, code: int, message: str) -> None:
        self.send(code, {"error": message}, {"X-Error-Message": message})

    def whoami(self) -> None:
        if self.server.hub.is_down:
            return self.refuse(503, "Service unavailable")
        account = self.account()
        if account is None:
            return self.refuse(401, "Invalid username or password.")
        orgs = [{"name": name} for name in account["orgs"]]
        return self.send(
            200, {"type": "user", "name": account["name"], "orgs": orgs, "auth": {"accessToken": {"role": account["role"]}}}
        )

    def may_write(self, owner: str) -> bool:
        account = self.account()
        return account is not None and account["role"] == "write" and owner in (account["name"], *account["orgs"])

    def validate(self, card: str) -> None:
        """Check the metadata of a README.md, of all that the real Hub checks the licence alone."""
        found = yaml.safe_load(card.split("---")[1])
        licence = found.get("license")
        errors = [] if licence in (None, "mit", "apache-2.0", "other") else [{"message": '"license" must be one of [mit, ...]'}]
        self.send(400 if errors else 200, {"errors": errors, "warnings": []})

    def create(self, asked: dict[str, Any]) -> None:
        hub, owner = self.server.hub, asked["organization"]
        if not self.may_write(owner):
            return self.refuse(403, f'You don\'t have the rights to create a model under the namespace "{owner}".')
        name = f"{owner}/{asked['name']}"
        if f"models/{name}" in hub.state["revisions"]:
            return self.send(409, {"error": "You already created this model repo", "url": f"{hub.address}/{name}"})
        hub.state["private"][f"models/{name}"] = asked.get("visibility") == "private"
        hub.commit("models", name, {".gitattributes": b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"})
        return self.send(200, {"url": f"{hub.address}/{name}", "name": name})

    def write(self, name: str, what: str, revision: str, data: bytes) -> None:
        hub = self.server.hub
        if not self.may_write(name.partition("/")[0]):
            return self.refuse(403, "Forbidden: you must have write access.")
        revisions = hub.state["revisions"][f"models/{name}"]
        if what == "branch":
            if revision in revisions:
                return self.send(409, {"error": "Reference already exists"})
            hub.commit("models", name, hub.files(name), revision)
            return self.send(200, {})
        if what == "preupload":
            modes = [
                {"path": file["path"], "uploadMode": "lfs" if file["path"].endswith(LFS) else "regular", "shouldIgnore": False}
                for file in json.loads(data)["files"]
            ]
            return self.send(200, {"files": modes})
        files, (header, *operations) = hub.files(name, revision), map(json.loads, data.splitlines())
        for operation in operations:
            value = operation["value"]
            is_lfs = operation["key"] == "lfsFile"
            files[value["path"]] = hub.objects[value["oid"]] if is_lfs else base64.b64decode(value["content"])
        commit = hub.commit("models", name, files, revision)
        hub.messages.append(header["value"]["summary"])
        return self.send(200, {"success": True, "commitOid": commit, "commitUrl": f"{hub.address}/{name}/commit/{commit}"})

    def lfs(self, asked: dict[str, Any]) -> None:
        address = self.server.hub.address
        actions = [{"upload": {"href": f"{address}/lfs/{item['oid']}"}} for item in asked["objects"]]
        objects = [{**item, "actions": action} for item, action in zip(asked["objects"], actions, strict=True)]
        self.send(200, {"transfer": "basic", "objects": objects})


class WritableHub(Hub):
    """A Hub with accounts, each with a token: "secret" belongs to tester, who is a member of the organization team."""

    handler = WritingHandler

    def __init__(self, root: Path):
        super().__init__(root)
        self.accounts = {
            "secret": {"name": "tester", "orgs": ["team"], "role": "write"},
            "reader": {"name": "tester", "orgs": [], "role": "read"},
        }
        self.objects: dict[str, bytes] = {}
        self.messages: list[str] = []
        """Of all commits that were pushed."""
        self.is_down = False
        self._write()

    def start(self) -> str:
        self.address = super().start()
        return self.address

    def files(self, name: str, revision: str = "main") -> dict[str, bytes]:
        """Return the files of a model repository."""
        folder = self.root / "models" / name / self.state["revisions"][f"models/{name}"][revision]
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

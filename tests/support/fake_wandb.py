"""A small W&B server on loopback, enough for wandb 0.31 online, for `wandb sync`, `resume`, `resume_from` and artifacts.

    with FakeWandb() as server:
        env = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": FakeWandb.KEY, "WANDB_MODE": "online"}
        ...
        run = server.runs["RUN_ID"]     # .history .summary .config .exit_code .files, and .told("tags")
        server.artifacts                # name, type, aliases, metadata, files {path: bytes}
        server.operations               # Counter of GraphQL operations

It keeps what it is told and answers with the least that the client wants. It checks no rights and forgets all at the end.
"""

from __future__ import annotations

import base64
import gzip
import json
import re
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import quote, unquote, urlparse

HISTORY = "wandb-history.jsonl"
LINES = {"history": HISTORY, "events": "wandb-events.jsonl", "log": "output.log"}

USER = {"id": "u1", "entity": "tester", "username": "tester", "email": "t@localhost", "flags": "{}", "teams": {"edges": []}}
VERSIONS = {"max_cli_version": "9.9.9", "min_cli_version": "0.1.0"}
ANSWERS: dict[str, dict[str, Any]] = {
    "Viewer": {"viewer": USER},
    "GetDefaultEntity": {"viewer": USER},
    "ServerFeaturesQuery": {"serverInfo": {"features": []}},
    "ServerInfo": {"serverInfo": {"cliVersionInfo": VERSIONS, "latestLocalVersionInfo": None}},
    "RunStoppedStatus": {"project": {"run": {"stopped": False}}},
    "OrgFeatureFlags": {"organization": {"featureFlags": []}},
    "OrganizationCoreWeaveOrganizationID": {"entity": {"organization": None}},
    "NotifyScriptableRunAlert": {"notifyScriptableRunAlert": {"success": True}},
    "MarkRunFilesUploaded": {"markRunFilesUploaded": {"success": True}},
}
"""What is answered to operations whatever they say; the others are methods of FakeWandb."""


@dataclass
class Run:
    id: str
    project: str
    upserts: list[dict[str, Any]] = field(default_factory=list)
    lines: dict[str, list[str]] = field(default_factory=dict)  # by file of the file stream
    files: dict[str, bytes] = field(default_factory=dict)  # uploaded
    preempting: bool = False
    exit_code: int | None = None
    summed: dict[str, Any] = field(default_factory=dict)  # all writers' summaries, the later on top

    def told(self, name: str, default: Any = None) -> Any:
        """What UpsertBucket last said of a field."""
        return next((u[name] for u in reversed(self.upserts) if u.get(name) is not None), default)

    @property
    def history(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines.get(HISTORY, []) if line]

    @property
    def summary(self) -> dict[str, Any]:
        return self.summed or json.loads(self.told("summaryMetrics", "{}"))

    @property
    def config(self) -> dict[str, Any]:
        return {name: item["value"] for name, item in json.loads(self.told("config", "{}")).items()}

    def rewind(self, step: int) -> None:
        """Drop the rows after ``step``, as the server does for ``resume_from``."""
        kept = [line for line in self.lines.get(HISTORY, []) if json.loads(line)["_step"] <= step]
        self.lines[HISTORY], self.summed = kept, {}


class FakeWandb:
    KEY = "local-" + "0" * 40
    ENTITY = "tester"

    def __init__(self, port: int = 0):
        self.runs: dict[str, Run] = {}
        self.artifacts: list[dict[str, Any]] = []
        self.alerts: list[dict[str, Any]] = []
        self.operations: Counter[str] = Counter()
        self.unknown: list[str] = []  # what it could not answer: look here first
        self.down = False  # True: answer 503
        self.dies_at: str | None = None  # operation with which it goes down
        self.late_s = 0.0  # before each answer
        self.rewinds = True  # False: as a self-managed server, which cannot
        self.lock = threading.RLock()
        server = self

        class Handler(_Handler):
            fake = server

        self.http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.http.daemon_threads = True
        self.http.handle_error = lambda *_: None  # clients that hang up
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"

    def __enter__(self) -> FakeWandb:
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.http.shutdown()
        self.http.server_close()

    def graphql(self, name: str, query: str, v: dict[str, Any]) -> dict[str, Any] | None:
        if name == "NotifyScriptableRunAlert":
            self.alerts.append(v)
        try:
            if name in ANSWERS:
                return ANSWERS[name]
            if (answer := getattr(self, f"on_{name}", None)) is not None:
                return answer(v)
        except (LookupError, StopIteration, TypeError, ValueError) as error:
            query = f"{error!r} {query}"
        self.unknown.append(f"{name} {json.dumps(v)[:300]} {query[:600]}")
        return None

    def _project(self, name: str) -> dict[str, Any]:
        return {"id": "p1", "name": name, "entity": {"id": "e1", "name": self.ENTITY}}

    def _bucket(self, run: Run) -> dict[str, Any]:
        count = {f"{k}LineCount": len(run.lines.get(f, [])) for k, f in LINES.items()}
        return {
            "id": f"bucket-{run.id}",
            "name": run.id,
            "displayName": run.told("displayName", run.id),
            "description": None,
            "config": run.told("config", "{}"),
            "sweepName": None,
            "project": self._project(run.project),
            **count,
        }

    def on_UpsertBucket(self, v):
        run_id = v.get("name") or next((r.id for r in self.runs.values() if f"bucket-{r.id}" == v.get("id")), None)
        inserted = run_id not in self.runs
        run = self.runs.setdefault(run_id, Run(run_id, v.get("project") or "uncategorized"))
        run.upserts.append(v)
        return {"upsertBucket": {"bucket": self._bucket(run), "inserted": inserted}}

    def on_RunResumeStatus(self, v):
        run = self.runs.get(v["name"])
        if run is None:
            return {"model": {**self._project(v["project"]), "bucket": None}}
        bucket = self._bucket(run) | {f"{k}Tail": json.dumps(run.lines.get(f, [])[-1:]) for k, f in LINES.items() if k != "log"}
        bucket |= {"summaryMetrics": json.dumps(run.summary), "tags": run.told("tags", []), "notes": run.told("notes")}
        return {"model": {**self._project(run.project), "bucket": bucket | {"wandbConfig": json.dumps({"t": 1})}}}

    def on_RewindRun(self, v):
        run = self.runs.get(v["runName"]) if self.rewinds else None
        if run is None:
            return {"rewindRun": None}
        run.rewind(int(v["metricValue"]))
        return {"rewindRun": {"rewoundRun": self._bucket(run)}}

    def on_Run(self, v):
        if (run := self.runs.get(v["name"])) is None:
            return {"project": {"run": None}}
        about = dict.fromkeys(("id", "name", "displayName"), run.id) | dict.fromkeys(
            ("config", "summaryMetrics", "systemMetrics"), "{}"
        )
        rest = {"projectId": "1", "state": "crashed", "user": {"name": "t", "username": "t"}, "tags": []}
        return {"project": {"run": {**about, **rest, "historyLineCount": len(run.history)}}}

    def on_RunHistoryKeys(self, v):
        run = self.runs.get(v["name"])
        steps = [row["_step"] for row in run.history] if run else []
        return {"project": {"run": run and {"historyKeys": {"lastStep": max(steps, default=-1)}}}}

    def on_QueryRunInfo(self, v):
        return {"project": {"run": {"displayName": v["run"], "summaryMetrics": "{}"}}}

    def on_ArtifactType(self, v):
        found = next((a["type"] for a in self.artifacts if a["name"] == v["name"].split(":")[0]), None)
        return {"project": {"artifact": {"artifactType": {"name": found}} if found else None}}

    def on_CreateRunFiles(self, v):
        files = [{"name": f, "uploadUrl": f"{self.url}/put/run/{v['run']}/{quote(f, safe='')}"} for f in v["files"]]
        return {"createRunFiles": {"runID": f"bucket-{v['run']}", "uploadHeaders": [], "files": files}}

    def on_CreateArtifact(self, v):
        i = v["input"]
        made = {"id": f"art-{len(self.artifacts)}", "name": i["artifactCollectionName"], "type": i["artifactTypeName"]}
        made |= {"aliases": [a["alias"] for a in i.get("aliases") or []], "metadata": json.loads(i.get("metadata") or "{}")}
        made |= {"digest": i["digest"], "client_id": i["clientID"], "files": {}, "committed": False}
        self.artifacts.append(made)
        pending = {"id": made["id"], "state": "PENDING", "artifactSequence": {"latestArtifact": None}}
        return {"createArtifact": {"artifact": pending}}

    def _manifest(self, artifact_id):
        url = f"{self.url}/put/manifest/{artifact_id}/manifest.json"
        file = {"id": f"file-{artifact_id}", "uploadUrl": url, "uploadHeaders": []}
        return {"artifactManifest": {"id": f"man-{artifact_id}", "file": file}}

    def on_CreateArtifactManifest(self, v):
        return {"createArtifactManifest": self._manifest(v["artifactID"])}

    def on_UpdateArtifactManifest(self, v):
        return {"updateArtifactManifest": self._manifest(v["artifactManifestID"].removeprefix("man-"))}

    def on_CreateArtifactFiles(self, v):
        nodes = []
        for f in v.get("artifactFiles") or v["input"]["artifactFiles"]:
            url = f"{self.url}/put/artifact/{f['artifactID']}/{quote(f['name'], safe='')}"
            where = {"storagePath": f"x/{f['name']}", "uploadUrl": url, "uploadHeaders": [], "uploadMultipartUrls": None}
            nodes.append({**where, "artifact": {"id": f["artifactID"]}})
        return {"createArtifactFiles": {"files": {"edges": [{"node": node} for node in nodes]}}}

    def on_CommitArtifact(self, v):
        made = next(a for a in self.artifacts if a["id"] == v["artifactID"])
        made["committed"] = True
        return {"commitArtifact": {"artifact": {"id": made["id"], "digest": made["digest"]}}}

    def on_ClientIDMapping(self, v):
        found = next((a["id"] for a in self.artifacts if a["client_id"] == v["clientID"]), None)
        return {"clientIDMapping": {"serverID": found} if found else None}

    def stream(self, run_id: str, body: dict[str, Any]) -> dict[str, Any]:
        run = self.runs[run_id]
        for name, part in (body.get("files") or {}).items():
            lines, at = run.lines.setdefault(name, []), part["offset"]
            lines.extend([""] * (at - len(lines)))
            lines[at : at + len(part["content"])] = part["content"]
            if name == "wandb-summary.json":
                run.summed |= json.loads(part["content"][-1])
        run.preempting |= bool(body.get("preempting"))
        if body.get("complete"):
            run.exit_code = body.get("exitcode")
        return {"exitcode": None, "limits": {}}

    def put(self, kind: str, owner: str, name: str, data: bytes) -> None:
        if kind == "run":
            self.runs[owner].files[name] = data
        elif kind == "artifact":
            next(a for a in self.artifacts if a["id"] == owner)["files"][name] = data


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    fake: FakeWandb

    def log_message(self, *args: object) -> None:
        pass

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            data = b""
            while size := int(self.rfile.readline().split(b";")[0], 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        return gzip.decompress(data) if self.headers.get("Content-Encoding") == "gzip" else data

    def answer(self, value: Any, code: int = 200) -> None:
        data = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def do_POST(self) -> None:
        data, path = self.body(), urlparse(self.path).path
        time.sleep(self.fake.late_s)
        if self.fake.down:
            return self.answer({"error": "down"}, 503)
        user = base64.b64encode(f"api:{self.fake.KEY}".encode()).decode()
        if "Authorization" in self.headers and self.headers["Authorization"] != f"Basic {user}":
            return self.answer({"errors": [{"message": "invalid key"}]}, 401)
        with self.fake.lock:
            if path == "/graphql":
                asked = json.loads(data)
                named = re.search(r"(?:query|mutation)\s+(\w+)", asked["query"])
                name = asked.get("operationName") or (named[1] if named else "unnamed")
                self.fake.operations[name] += 1
                if name == self.fake.dies_at:
                    self.fake.down = True
                    return self.answer({"error": "down"}, 503)
                if (answer := self.fake.graphql(name, asked["query"], asked.get("variables") or {})) is None:
                    return self.answer({"errors": [{"message": f"no {name}"}]}, 400)
                return self.answer({"data": answer})
            if found := re.fullmatch(r"/files/[^/]+/[^/]+/([^/]+)/file_stream", path):
                self.fake.operations["file_stream"] += 1
                return self.answer(self.fake.stream(found[1], json.loads(data or b"{}")))
            if path.startswith("/sdk/otel/"):  # the client's own telemetry
                return self.answer({})
            self.fake.unknown.append(f"POST {path}")
        return self.answer({"error": "unknown"}, 404)

    def do_PUT(self) -> None:
        data, parts = self.body(), urlparse(self.path).path.split("/")
        time.sleep(self.fake.late_s)
        if self.fake.down:
            return self.answer({"error": "down"}, 503)
        with self.fake.lock:
            self.fake.operations["put"] += 1
            self.fake.put(parts[2], parts[3], unquote(parts[4]), data)
        return self.answer({})

    def do_GET(self) -> None:
        time.sleep(self.fake.late_s)
        if self.fake.down:
            return self.answer({"error": "down"}, 503)
        if urlparse(self.path).path not in ("", "/"):  # that is the question whether the server is there
            self.fake.unknown.append(f"GET {self.path}")
        return self.answer({})

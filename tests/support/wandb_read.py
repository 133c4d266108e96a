"""What an offline .wandb file holds, for tests: read("…/run-ID.wandb") -> dict. wandb 0.31 ships no reader of its own.

LevelDB blocks of 32 KiB with protobuf Records. A killed run's file ends in the middle or is empty: what is whole is returned.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK = 32768


def payloads(path: Path) -> Iterator[bytes]:
    raw = Path(path).read_bytes()
    if raw[:4] != b":W&B":
        return
    at, whole = 7, b""
    while at + 7 <= len(raw):
        left = BLOCK - at % BLOCK
        if left < 7:
            at += left
            continue
        crc, size, kind = struct.unpack("<IHB", raw[at : at + 7])
        data = raw[at + 7 : at + 7 + size]
        if len(data) < size or zlib.crc32(data, zlib.crc32(bytes([kind]))) != crc:
            return
        at += 7 + size
        whole = data if kind in (1, 2) else whole + data
        if kind in (1, 4):
            yield whole


def enter(values: dict[str, Any], items: Any) -> None:
    """Set each item, whose key may be a path."""
    for item in items:
        *outer, last = [item.key] if item.key else item.nested_key
        place = values
        for name in outer:
            place = place.setdefault(name, {})
        place[last] = json.loads(item.value_json)


def read(path: Path) -> dict[str, Any]:
    from wandb.proto.wandb_internal_pb2 import Record

    found: dict[str, Any] = {name: [] for name in ("history", "artifacts", "alerts")}
    found |= {name: {} for name in ("config", "summary", "metrics")} | {"preempting": False, "exit_code": None, "run": None}
    for payload in payloads(path):
        record = Record()
        record.ParseFromString(payload)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run = record.run
            names = {"id": "run_id", "project": "project", "name": "display_name", "group": "run_group", "job_type": "job_type"}
            found["run"] = {name: getattr(run, own) for name, own in names.items()} | {
                "tags": list(run.tags),
                "notes": run.notes,
            }
            enter(found["config"], run.config.update)
        elif kind == "config":
            enter(found["config"], record.config.update)
        elif kind == "history":
            found["history"].append({"_step": record.history.step.num})
            enter(found["history"][-1], record.history.item)
        elif kind == "summary":
            enter(found["summary"], record.summary.update)
        elif kind == "metric":
            m = record.metric
            found["metrics"][m.name or m.glob_name] = {"hidden": m.options.hidden}
        elif kind == "artifact":
            a = record.artifact
            about = {"name": a.name, "type": a.type, "aliases": list(a.aliases), "metadata": json.loads(a.metadata or "{}")}
            found["artifacts"].append({**about, "files": {e.path: e.size for e in a.manifest.contents}})
        elif kind == "alert":
            found["alerts"].append((record.alert.title, record.alert.text, record.alert.level))
        elif kind == "preempting":
            found["preempting"] = True
        elif kind == "exit":
            found["exit_code"] = record.exit.exit_code
    return found

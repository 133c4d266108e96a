"""What a replay is computed from that its run was not: rows, code, versions, hardware, processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hftune.data.digest import row_hashes
from hftune.data.row_hashes import read_rows
from hftune.distributed.consistency import fingerprint
from hftune.replay.differences import KINDS, Difference, Rows, differences_between, row_difference
from hftune.tracking.hardware import hardware

if TYPE_CHECKING:
    from hftune.replay.engine import Replayer


def environment_differences(replayer: Replayer) -> list[Difference]:
    """Return the differences between the run, at the present step, and this replay of it. Main process only.

    Their texts have both values: "torch 2.12.0 | 2.13.0".
    """
    start, strategy = dict(replayer.terms.start), replayer.strategy
    own, then = fingerprint(replayer.recipe), dict(start.get("hardware", {}))
    then.pop("others", None)  # of processes on other machines
    start["hardware"] = then
    now: dict[str, Any] = {
        "code": own["code"],
        "packages": own["packages"],
        "hardware": hardware(strategy.device),
        "commits": replayer.task.commits(),
        "world_size": strategy.num_processes,
        "strategy": start.get("strategy") if replayer.change.without else type(strategy).__name__,
        "data": {
            split: {**about, "digest": replayer.digests.get(f"{split} data", about.get("digest"))}
            for split, about in start.get("data", {}).items()
        },
    }
    step, rows = max(replayer.step, 1), _rows(replayer)
    found = [*differences_between(start, {**start, **now}, step, has_rows=rows is not None)]
    if rows is not None and (difference := row_difference(*rows, start["plan"], step, step)) is not None:
        found.append(difference)
    return sorted(found, key=lambda difference: KINDS.index(difference.kind))


def _rows(replayer: Replayer) -> Rows | None:
    """Return the hashes of the run's training rows, and of those here; None if they are the same, or not known."""
    then = replayer.terms.start.get("data", {}).get("train", {}).get("digest")
    if then in (None, replayer.digests["train data"]):
        return None
    known = read_rows(replayer.history.folder)
    here = None if known is None else row_hashes(replayer.datasets["train"])
    return None if known is None or here is None else (known, here)

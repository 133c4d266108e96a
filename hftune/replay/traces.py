"""What is known of each step of a run, and of what it was computed from: its ledger, or other files in its place."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from hftune.data.row_hashes import read_rows, root
from hftune.errors import ConfigError
from hftune.replay.ledger import read_ledger
from hftune.replay.run_record import RunRecord, mapping

LOGGED = {"loss": "train/loss_step", "grad_norm": "train/grad_norm", "lr": "train/lr"}
"""Values of a step by their names in metrics.jsonl, which has them every ``train.log_every`` steps."""


class Steps(Protocol):
    """What ``part`` needs of a run: a Trace has it, and a LedgerRecord."""

    @property
    def starts(self) -> Sequence[Mapping[str, Any]]: ...

    @property
    def steps(self) -> Mapping[int, Mapping[str, Any]]: ...

    def start_of(self, step: int) -> Mapping[str, Any]: ...


@dataclass
class Trace:
    """The steps of a run as its folder shows them."""

    steps: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """By number: digest, num_samples, loss, grad_norm, lr, items; or skipped. Any of them may be unknown."""
    starts: Sequence[Mapping[str, Any]] = ()
    """The lines with which training started and resumed, in the order of the file."""
    rows: np.ndarray | None = None
    """(N, 16) uint8, a hash of each row of the training split; None if they are not known."""
    missing: list[str] = field(default_factory=list)
    """What cannot be compared, a sentence each."""
    problems: list[str] = field(default_factory=list)
    """What is wrong with the ledger, a sentence each."""

    def start_of(self, step: int) -> Mapping[str, Any]:
        """Return the start under which a step was computed."""
        earlier = [start for start in self.starts if start["after_step"] < step]
        return earlier[-1] if earlier else {}


@dataclass(frozen=True)
class Segment:
    """Steps of two runs, each of which computed them under one start."""

    steps: Sequence[int]
    starts: tuple[Mapping[str, Any], Mapping[str, Any]]


def segments(a: Steps, b: Steps) -> Iterator[Segment]:
    """Cut the steps that both runs have into segments, ascending."""
    common = sorted(a.steps.keys() & b.steps.keys())
    bounds = {start["after_step"] for run in (a, b) for start in run.starts}
    cuts = sorted({bisect_right(common, bound) for bound in bounds} - {0, len(common)})
    for begin, end in pairwise([0, *cuts, len(common)]):
        if begin < end:
            yield Segment(common[begin:end], (a.start_of(common[begin]), b.start_of(common[begin])))


def read_trace(run: RunRecord) -> Trace:
    """Return what is known of a run's steps. What is absent becomes a sentence in ``missing``."""
    try:
        ledger = read_ledger(run.folder)
    except ConfigError as error:
        steps = logged_steps(run)
        reason = (
            "has no ledger" if not (run.folder / "ledger.jsonl").exists() else f"has a ledger that cannot be read ({error})"
        )
        missing = f"{run.name} {reason}: samples, code and hardware are not compared; {said_of_log(steps)}."
        return Trace(steps, [start_of_files(run)] if steps else [], missing=[missing])
    rows, missing = rows_of(run, ledger.starts)
    return Trace(ledger.steps, ledger.starts, rows, [missing] if missing else [], ledger.problems())


def logged_steps(run: RunRecord) -> dict[int, dict[str, Any]]:
    """Return the steps of metrics.jsonl with their values, as a ledger names them."""
    steps: dict[int, dict[str, Any]] = {}
    for name, key in LOGGED.items():
        if key in run.log.curves:
            numbers, values = run.log.curves[key].ordered()
            for step, value in zip(numbers.tolist(), values.tolist(), strict=True):
                steps.setdefault(step, {"step": step})[name] = value
    return {step: line for step, line in sorted(steps.items()) if "loss" in line}


def said_of_log(steps: Mapping[int, Any]) -> str:
    """Say what metrics.jsonl has of the single steps."""
    if not steps:
        return "metrics.jsonl has no losses of single steps either"
    return f"losses are the {len(steps):,} that metrics.jsonl has, up to step {max(steps):,}"


def start_of_files(run: RunRecord) -> dict[str, Any]:
    """Return what recipe.yaml and run.json say of a run, as a start line does. They are those of its last start."""
    facts = run.facts
    data = {
        split: {"rows": about.get("samples"), "digest": about.get("digest")}
        for split, about in mapping(facts.get("data")).items()
        if isinstance(about, Mapping)
    }
    known = {
        "recipe": run.recipe,
        "data": data,
        "packages": mapping(facts.get("versions") or run.result.get("versions")),
        "commits": mapping(facts.get("commits") or run.result.get("commits")),
        "world_size": facts.get("processes") or run.result.get("world_size"),
        "precision": facts.get("precision"),
        "hardware": {"device": facts["device"]} if facts.get("device") else {},
        "code": {"commit of the current folder": git["commit"]} if (git := mapping(facts.get("git"))).get("commit") else {},
    }
    return {"after_step": 0, **{name: value for name, value in known.items() if value}}


def is_whole(start: Mapping[str, Any]) -> bool:
    """Return whether a start line names all code, libraries and hardware; one made of other files names some."""
    return start.get("format") == 2


def are_unequal(digest_a: Any, digest_b: Any) -> bool:
    """Return whether two digests of data are known to differ."""
    return None not in (digest_a, digest_b) and digest_a != digest_b


def rows_of(run: RunRecord, starts: Sequence[Mapping[str, Any]]) -> tuple[np.ndarray | None, str]:
    """Return the hashes of a run's training rows, or None and the reason."""
    roots = {mapping(mapping(start.get("data")).get("train")).get("root") for start in starts}
    if len(roots) > 1:
        return None, f"The data of {run.name} changed on its way: of the rows, only the digests are compared."
    if not roots or None in roots:
        return None, f"{run.name} has no hashes of its rows: of the data, only the digests are compared."
    try:
        rows = read_rows(run.folder)
    except (ConfigError, OSError, ValueError):
        rows = None
    if rows is None:
        return None, f"{run.name} has lost rows.bin: which rows differ is not known."
    if root(rows) not in roots:
        return None, f"rows.bin of {run.name} is not the one that its ledger names: which rows differ is not known."
    return rows, ""

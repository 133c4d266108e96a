"""receipt.json: what a run was and what came out of it, small enough to be signed and given away before anybody verifies it.

A statement as in-toto defines it: its subjects are the files of the exported models, its predicate is the run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hftune.atomic import atomic_path, sha256_of
from hftune.errors import ConfigError
from hftune.replay.history import path_of
from hftune.replay.ledger import read_ledger

NAME = "receipt.json"
STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "urn:hftune:receipt:1"
"""The kind of statement, and its version."""
MODELS = ("model", "model_last")
"""The exports of a run that a receipt is about."""
FOR_PEOPLE = {"README.md"}
"""Files of an export that may be edited."""

Hashes = dict[str, str]
"""The SHA-256 of files, by name."""


@dataclass(frozen=True)
class Receipt:
    """A receipt as it was read."""

    exports: Hashes
    """Of the files of the exported models, by their paths in the output folder."""
    num_lines: int
    """Of the ledger."""
    end: str
    """SHA-256 of the ledger's last line, which stands for all of them."""
    starts: list[dict[str, Any]]
    """What the ledger says of each time training started: recipe, plan, data, code, packages, hardware."""
    checkpoints: dict[int, Hashes]
    """By step: the tensors of the checkpoints that were in the folder."""

    @property
    def models(self) -> list[str]:
        """The folders of the exported models."""
        return sorted({name.partition("/")[0] for name in self.exports})


def make_receipt(folder: Path) -> Receipt:
    """Make the receipt of a finished run.

    Raises:
        ConfigError: the run has not finished, or its folder contradicts the ledger.
    """
    record = read_ledger(folder)
    if not (folder / "result.json").is_file():
        raise ConfigError(f"{folder} has no result.json: the run has not finished. Let it finish, or resume it, first.")
    if record.problems:
        raise ConfigError(f"The ledger of {folder} was changed after the run. {' '.join(record.problems)}")
    kept = {step: hashes_of(line) for step, line in sorted(record.checkpoints.items()) if path_of(folder, step).is_dir()}
    if record.last not in kept:
        raise ConfigError(f"{folder} has no checkpoint of its last step, {record.last:,}, to which a receipt pins the weights.")
    if changed := [*changed_checkpoints(kept, folder)]:
        raise ConfigError(f"{folder} is not as the run left it: {'; '.join(changed)}.")
    return Receipt(export_hashes(folder), len(record.lines), record.end, [*map(facts_of, record.starts)], kept)


def write_receipt(receipt: Receipt, path: Path) -> None:
    """Write it, or raise ConfigError."""
    statement = {
        "_type": STATEMENT,
        "subject": [{"name": name, "digest": {"sha256": digest}} for name, digest in receipt.exports.items()],
        "predicateType": PREDICATE,
        "predicate": {
            "ledger": {"lines": receipt.num_lines, "end": receipt.end},
            "checkpoints": {str(step): hashes for step, hashes in receipt.checkpoints.items()},
            "starts": receipt.starts,
        },
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(path) as temporary:
            temporary.write_text(json.dumps(statement, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}. Name another: --output FILE.") from error


def read_receipt(path: Path) -> Receipt:
    """Read a receipt, or raise ConfigError."""
    try:
        statement = json.loads(path.read_text(encoding="utf-8"))
        if statement["predicateType"] != PREDICATE:
            raise ValueError(f"its predicateType is {statement['predicateType']!r}, and not {PREDICATE!r}")
        predicate = statement["predicate"]
        exports = {item["name"]: item["digest"]["sha256"] for item in statement["subject"]}
        if len(exports) < len(statement["subject"]):
            raise ValueError("it names a file twice")
        if outside := [name for name in exports if name.partition("/")[0] not in MODELS or ".." in name.split("/")]:
            raise ValueError(f"its file {outside[0]!r} is in neither of {' and '.join(MODELS)}")
        if not predicate["starts"]:
            raise ValueError("it says of no training how it started")
        checkpoints = {int(step): dict(hashes) for step, hashes in predicate["checkpoints"].items()}
        num_lines, end = int(predicate["ledger"]["lines"]), str(predicate["ledger"]["end"])
        return Receipt(exports, num_lines, end, [*map(dict, predicate["starts"])], checkpoints)
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file. hftune receipt RUN writes one.") from None
    except (OSError, KeyError, TypeError, AttributeError, ValueError, OverflowError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        raise ConfigError(f"{path} is not a receipt that this hftune can read: {reason}.") from error


def export_hashes(folder: Path) -> Hashes:
    """Hash the files of a run's exported models.

    Raises:
        ConfigError: there are none; or there is a link to a folder, or a pipe, whose content would not be hashed.
    """
    paths = [path for name in MODELS for path in sorted((folder / name).rglob("*"))]
    for path in paths:
        if (path.is_symlink() and path.is_dir()) or not (path.is_file() or path.is_dir()):
            raise ConfigError(f"{path} is neither a file nor a folder of its own, so no hash can stand for it: remove it.")
    files = [path for path in paths if path.is_file() and path.name not in FOR_PEOPLE]
    if not files:
        raise ConfigError(f"{folder} holds neither model nor model_last: there is no weight that a receipt could be about.")
    return {path.relative_to(folder).as_posix(): sha256_of(path) for path in files}


def changed_checkpoints(expected: Mapping[int, Hashes], folder: Path) -> Iterator[str]:
    """Say of each file of checkpoints that it is missing, that it was changed, or that its hash was not noted."""
    for step, hashes in expected.items():
        found = {path.stem for path in path_of(folder, step).glob("*.safetensors")}
        for name in sorted((found | {"model", "optimizer"}) - hashes.keys()):
            yield f"checkpoint {step}: no hash of {name}.safetensors was noted"
        for name, digest in hashes.items():
            path = path_of(folder, step) / f"{name}.safetensors"
            if name not in found or not path.is_file():
                yield f"checkpoint {step}: {path.name} is missing"
            elif sha256_of(path) != digest:
                yield f"checkpoint {step}: {path.name} is not the one that was noted when it was written"


def hashes_of(line: Mapping[str, Any]) -> Hashes:
    """Return the hashes of tensor files in a ledger's line about a checkpoint."""
    return {name: value for name, value in line.items() if isinstance(value, str) and name != "prev"}


def facts_of(start: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a start line of the ledger says, without its link to the line before."""
    return {name: value for name, value in start.items() if name != "prev"}

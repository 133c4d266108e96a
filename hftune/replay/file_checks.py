"""What can be verified of a receipt from the files alone: that they are those it pins, and do not contradict each other.

This takes seconds, and needs neither data nor model. An owner who makes every hash anew passes it; see ``verification``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from hftune.checkpoints.atomic_files import sha256_of
from hftune.config import Recipe
from hftune.data.row_hashes import NAME as ROWS
from hftune.replay.audit import audit
from hftune.replay.history import History
from hftune.replay.ledger import LedgerRecord
from hftune.replay.receipt import Receipt, changed_checkpoints, export_hashes, hashes_of, without_prev

SHOWN = 5
"""Problems of one kind that are listed; the others are counted."""
PER_START = ("recipe", "data", "code", "packages", "hardware", "commits")
"""Facts about a start that hold many values: differences are shown one by one."""


@dataclass
class Check:
    """One thing that was verified, or not."""

    name: str
    text: str = ""
    """What holds, if there are no problems."""
    problems: list[str] = field(default_factory=list)
    """What does not, a sentence each without its full stop."""


def check_files(receipt: Receipt, history: History) -> Iterator[Check]:
    """Yield what the files of a run say about its receipt.

    Raises:
        ConfigError: the recipe cannot be read here, for example because it names code that is not trusted.
    """
    record, folder = history.ledger, history.folder
    yield check_chain(receipt, record)
    yield Check("receipt", "its facts are the ledger's", first(different_facts(receipt.starts, record.starts)))
    yield check_plan(history)
    yield check_checkpoints(receipt, record, folder)
    yield check_exports(receipt, folder)
    yield check_rows_file(record, folder)


def check_chain(receipt: Receipt, record: LedgerRecord) -> Check:
    """Check that the ledger's lines follow each other, and end as the receipt says."""
    problems = first(sentence.rstrip(".") for sentence in record.problems)
    if record.end != receipt.end:
        problems.append(
            f"its {len(record.lines):,} lines end in {record.end[:12]}, the receipt's {receipt.num_lines:,} lines in "
            f"{receipt.end[:12]}: lines were changed or added after the receipt was made"
        )
    return Check("chain", f"{len(record.lines):,} lines, each with the hash of the one before", problems)


def different_facts(receipt: list[dict[str, Any]], ledger: list[dict[str, Any]]) -> Iterator[str]:
    """Say where a receipt's account of the starts differs from the ledger's."""
    if len(receipt) != len(ledger):
        yield f"training started {len(ledger)} times by the ledger, and {len(receipt)} times by the receipt"
        return
    for given, line in zip(receipt, map(without_prev, ledger), strict=True):
        before, now = flat(given), flat(line)
        for key in sorted(before.keys() | now.keys()):
            if before.get(key) != now.get(key):
                yield f"{key} is {now.get(key)} in the ledger and {before.get(key)} in the receipt"


def flat(start: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts about a start by one key each: "recipe: train.lr"."""
    facts = {}
    for key, value in start.items():
        if key in PER_START and isinstance(value, Mapping):
            facts |= {f"{key}: {name}": item for name, item in leaves(value)}
        else:
            facts[key] = value
    return facts


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested sections with their full keys."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def check_plan(history: History) -> Check:
    """Check that each step used the samples of its plan, at the learning rate of its recipe."""
    proof, chain = audit(history.folder), history.ledger.problems
    problems = [*(sentence.rstrip(".") for sentence in proof.problems if sentence not in chain), *wrong_rates(history)]
    left_out = f", {len(proof.skipped):,} left out" if proof.skipped else ""
    return Check("plan", f"{proof.steps:,} steps{left_out}, with the samples and learning rates of the recipe", first(problems))


def wrong_rates(history: History) -> Iterator[str]:
    """Say at which steps the ledger's learning rate, or its plan, does not follow from the recipe in force."""
    from hftune.optim.schedules import lr_at

    recipes: dict[int, Recipe] = {}
    for step, line in history.ledger.steps.items():
        start = history.ledger.starts_of[step]
        if id(start) not in recipes:
            recipe = recipes[id(start)] = history.recipe_at(step, to_run=False)
            for key, own in (("seed", recipe.seed), ("batch_size", recipe.train.batch_size)):
                if start["plan"][key] != own:
                    yield f"the plan from step {step} on has {key} {start['plan'][key]}, the recipe {own}"
        if not line.get("skipped"):
            expected = lr_at(step - 1, start["num_steps"], recipes[id(start)].train, start["steps_per_epoch"])
            if not math.isclose(line.get("lr") or 0.0, expected, rel_tol=1e-12):
                yield f"step {step} has a learning rate of {line.get('lr')}, the recipe's schedule makes it {expected:g}"


def check_checkpoints(receipt: Receipt, record: LedgerRecord, folder: Path) -> Check:
    """Check that the checkpoints are those of the receipt, and of the ledger."""
    problems = [*changed_checkpoints(receipt.checkpoints, folder)]
    for step, hashes in receipt.checkpoints.items():
        if hashes != hashes_of(record.checkpoints.get(step, {})):
            problems.append(f"checkpoint {step} has other hashes in the ledger than in the receipt")
    problems += [
        f"training started from a checkpoint {start['after_step']} that is not the one in the ledger"
        for start in record.starts
        if "checkpoint" in start
        for noted in [noted_before(record, start)]
        if noted and noted != hashes_of(start["checkpoint"])
    ]
    if (last := max(record.steps)) not in receipt.checkpoints:
        problems.append(f"there is none of the last step, {last:,}")
    return Check(
        "checkpoints", f"{len(receipt.checkpoints)}, with the hashes that were noted when they were written", first(problems)
    )


def noted_before(record: LedgerRecord, start: Mapping[str, Any]) -> dict[str, str]:
    """Return the last hashes that the ledger noted for the checkpoint that a start resumes from, before that start."""
    before = record.lines[: next(index for index, line in enumerate(record.lines) if line is start)]
    noted = [hashes_of(line) for line in before if line.get("checkpoint") == start["after_step"]]
    return noted[-1] if noted else {}


def check_exports(receipt: Receipt, folder: Path) -> Check:
    """Check that the exported models are those of the receipt, file by file."""
    found = export_hashes(folder)
    problems = []
    for name in sorted(found.keys() | receipt.exports.keys()):
        if name not in found:
            problems.append(f"{name} is missing")
        elif name not in receipt.exports:
            problems.append(f"{name} is not in the receipt")
        elif found[name] != receipt.exports[name]:
            problems.append(f"{name} is not the receipt's")
    return Check("export", f"{len(found)} files of {' and '.join(exported(receipt))}", first(problems))


def exported(receipt: Receipt) -> list[str]:
    """Return the folders of the models in a receipt."""
    return sorted({name.partition("/")[0] for name in receipt.exports})


def check_rows_file(record: LedgerRecord, folder: Path) -> Check:
    """Check that the hashes of the rows are those that the ledger stands on."""
    roots = {start["data"]["train"].get("root") for start in record.starts} - {None}
    if not roots:
        return Check("rows", "not checked: the run noted no hash of each row")
    if not (folder / ROWS).is_file():
        return Check("rows", problems=[f"{ROWS} is missing"])
    count = record.starts[-1]["data"]["train"]["rows"]
    problems = [] if roots == {sha256_of(folder / ROWS)} else [f"{ROWS} does not hold the rows that the ledger was begun with"]
    return Check("rows", f"the hashes of {count:,} rows", problems)


def first(problems: Iterator[str] | list[str]) -> list[str]:
    """Return the first few problems of a kind, and how many follow."""
    left = iter(problems)
    shown, more = list(islice(left, SHOWN)), sum(1 for _ in left)
    return [*shown, f"and {more:,} more like these"] if more else shown

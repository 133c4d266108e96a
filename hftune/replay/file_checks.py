"""Verifies a receipt from the files alone: that they are those it pins, and do not contradict each other.

This takes seconds, and needs neither data nor model. An owner who makes every hash anew passes it; see ``verification``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from hftune.atomic import sha256_of
from hftune.config import Recipe
from hftune.data.row_hashes import NAME as ROWS
from hftune.replay.audit import audit
from hftune.replay.history import History
from hftune.replay.receipt import Receipt, changed_checkpoints, export_hashes, facts_of, hashes_of
from hftune.replay.run_record import flat

MAX_SHOWN = 5
"""How many problems of one kind are listed; the others are counted."""


@dataclass
class Check:
    """One thing that was verified, or not."""

    name: str
    text: str = ""
    """What holds, if there are no problems."""
    problems: list[str] = field(default_factory=list)
    """What does not, a sentence each without its full stop."""


def first_few(problems: Iterable[str]) -> list[str]:
    """Return the first few problems of a kind, and how many follow."""
    left = iter(problems)
    shown, more = [*islice(left, MAX_SHOWN)], sum(1 for _ in left)
    return [*shown, f"and {more:,} more like these"] if more else shown


def check_files(receipt: Receipt, history: History) -> Iterator[Check]:
    """Check that the files of a run are those that its receipt pins, and do not contradict each other."""
    record, folder = history.ledger, history.folder
    problems = first_few(sentence.rstrip(".") for sentence in record.problems)
    if record.end != receipt.end:
        problems.append(
            f"its {len(record.lines):,} lines end in {record.end[:12]}, the receipt's {receipt.num_lines:,} lines in "
            f"{receipt.end[:12]}: lines were changed or added after the receipt was made"
        )
    yield Check("chain", f"{len(record.lines):,} lines, each with the hash of the one before", problems)

    facts = [*map(facts_of, record.starts)]
    if len(receipt.starts) != len(facts):
        problems = [f"training started {len(facts)} times by the ledger, and {len(receipt.starts)} times by the receipt"]
    else:
        problems = first_few(
            f"{key} is {now.get(key)} in the ledger and {before.get(key)} in the receipt"
            for now, before in zip(map(flat, facts), map(flat, receipt.starts), strict=True)
            for key in sorted(before.keys() | now.keys())
            if before.get(key) != now.get(key)
        )
    yield Check("receipt", "its facts are the ledger's", problems)

    proof = audit(folder)
    problems = [sentence.rstrip(".") for sentence in proof.problems if sentence not in record.problems]
    skipped = f", {len(proof.skipped):,} skipped" if proof.skipped else ""
    text = f"{proof.steps:,} steps{skipped}, with the samples and learning rates of the recipe"
    yield Check("plan", text, first_few([*problems, *_wrong_rates(history)]))

    problems = [*changed_checkpoints(receipt.checkpoints, folder)]
    for step, hashes in receipt.checkpoints.items():
        if hashes != hashes_of(record.checkpoints.get(step, {})):
            problems.append(f"checkpoint {step} has other hashes in the ledger than in the receipt")
    if record.last not in receipt.checkpoints:
        problems.append(f"there is none of the last step, {record.last:,}")
    text = f"{len(receipt.checkpoints)}, with the hashes that were noted when they were written"
    yield Check("checkpoints", text, first_few(problems))

    found = export_hashes(folder)
    problems = [f"{name} is missing" for name in sorted(receipt.exports.keys() - found.keys())]
    problems += [f"{name} is not in the receipt" for name in sorted(found.keys() - receipt.exports.keys())]
    problems += [f"{name} is not the receipt's" for name, own in receipt.exports.items() if found.get(name, own) != own]
    yield Check("export", f"{len(found)} files of {' and '.join(receipt.models)}", first_few(problems))

    about, path = [start["data"]["train"] for start in record.starts], folder / ROWS
    roots = {one.get("root") for one in about} - {None}
    if not roots:
        yield Check("rows", "not checked: the run noted no hash of each row")
    elif not path.is_file():
        yield Check("rows", problems=[f"{ROWS} is missing"])
    else:
        problems = [] if roots == {sha256_of(path)} else [f"{ROWS} does not hold the rows that the ledger was begun with"]
        yield Check("rows", f"the hashes of {about[-1]['rows']:,} rows", problems)


def _wrong_rates(history: History) -> Iterator[str]:
    """Say at which steps the ledger's learning rate, or its plan, does not follow from the recipe in force."""
    from hftune.optim.schedules import lr_at  # imports torch

    recipes: dict[int, Recipe] = {}
    for step, line in history.ledger.steps.items():
        start = history.ledger.starts_of[step]
        if id(start) not in recipes:
            recipe = recipes[id(start)] = history.recipe_at(step, to_run=False)
            for key, own in (("seed", recipe.seed), ("batch_size", recipe.train.batch_size)):
                if start["plan"][key] != own:
                    yield f"the plan from step {step} on has {key} {start['plan'][key]}, the recipe {own}"
        if not line.get("skipped"):
            train, lr = recipes[id(start)].train, line.get("lr") or 0.0
            expected = lr_at(step - 1, start["num_steps"], train, start["steps_per_epoch"], history.falls[step])
            if not math.isclose(lr, expected, rel_tol=1e-12):
                yield f"step {step} has a learning rate of {line.get('lr')}, the recipe's schedule makes it {expected:g}"

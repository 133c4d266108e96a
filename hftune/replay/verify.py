"""Verifies a receipt: the files of the run first, which needs neither data nor model, then segments that are computed again.

A segment are the steps from one checkpoint to the next. The verifier draws segments after the owner has given the receipt away,
so nobody can know which parts need to be true. An owner who makes every hash anew passes the files, and not the segments.
"""

from __future__ import annotations

import math
import random
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Any

from hftune.checkpoints.atomic_files import sha256_of
from hftune.config import Recipe
from hftune.data.row_hashes import NAME as ROWS
from hftune.errors import ConfigError
from hftune.optim.schedules import lr_at
from hftune.replay.audit import audit
from hftune.replay.history import History
from hftune.replay.receipt import Hashes, Receipt, changed_checkpoints, export_hashes, facts_of, hashes_of
from hftune.replay.run_record import flat
from hftune.tracking.console import duration

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


def verify(receipt: Receipt, history: History, count: int | None, seed: str | None) -> Iterator[Check | str]:
    """Check and compute what was asked for; yield what was found, and sentences between. Collective.

    Args:
        count: of segments to compute again; 0: none, None: all.
        seed: equal seeds draw equal segments. None: a new one.

    Raises:
        ConfigError: the receipt is of another run; the recipe cannot be run here.
    """
    record, folder = history.ledger, history.folder
    if missing := [step for step in receipt.checkpoints if step not in record.steps]:
        raise ConfigError(f"{folder} has no step {missing[0]:,}: the receipt is of another run.")
    start, resumes = receipt.starts[0], len(receipt.starts) - 1
    processes = f"{start['world_size']} process{'es' if start['world_size'] > 1 else ''} ({start['hardware'].get('device')})"
    resumed = f", resumed {resumes} time{'s' if resumes > 1 else ''}" if resumes else ""
    yield f"{folder}: {history.last:,} steps on {processes}{resumed}; receipt {receipt.end[:12]}."
    yield from check_files(receipt, history)
    lost = next((step for step in range(1, history.last + 1) if step not in record.steps), None)
    if lost is not None:
        yield f"Nothing was computed again: the ledger has no step {lost:,}."
    elif count == 0:
        yield "Nothing was computed again: an owner can make every hash anew. --segments 5 replays some of the run."
    else:
        yield from _compute_again(receipt, history, count, seed)


# The files


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
    yield Check("receipt", "its facts are the ledger's", first_few(_different_facts(receipt.starts, facts)))
    proof = audit(folder)
    wrong = [sentence.rstrip(".") for sentence in proof.problems if sentence not in record.problems]
    skipped = f", {len(proof.skipped):,} skipped" if proof.skipped else ""
    text = f"{proof.steps:,} steps{skipped}, with the samples and learning rates of the recipe"
    yield Check("plan", text, first_few([*wrong, *_wrong_rates(history)]))
    wrong = [*changed_checkpoints(receipt.checkpoints, folder)]
    for step, hashes in receipt.checkpoints.items():
        if hashes != hashes_of(record.checkpoints.get(step, {})):
            wrong.append(f"checkpoint {step} has other hashes in the ledger than in the receipt")
    if record.last not in receipt.checkpoints:
        wrong.append(f"there is none of the last step, {record.last:,}")
    text = f"{len(receipt.checkpoints)}, with the hashes that were noted when they were written"
    yield Check("checkpoints", text, first_few(wrong))
    found = export_hashes(folder)
    text = f"{len(found)} files of {' and '.join(receipt.models)}"
    yield Check("export", text, first_few(_different_exports(receipt.exports, found)))
    yield _check_rows_file(history)


def _different_facts(receipt: Sequence[Mapping[str, Any]], ledger: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if len(receipt) != len(ledger):
        yield f"training started {len(ledger)} times by the ledger, and {len(receipt)} times by the receipt"
        return
    for before, now in zip(map(flat, receipt), map(flat, ledger), strict=True):
        for key in sorted(before.keys() | now.keys()):
            if before.get(key) != now.get(key):
                yield f"{key} is {now.get(key)} in the ledger and {before.get(key)} in the receipt"


def _wrong_rates(history: History) -> Iterator[str]:
    """Say at which steps the ledger's learning rate, or its plan, does not follow from the recipe in force."""
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


def _different_exports(receipt: Hashes, found: Hashes) -> Iterator[str]:
    for name in sorted(found.keys() | receipt.keys()):
        if name not in found:
            yield f"{name} is missing"
        elif name not in receipt:
            yield f"{name} is not in the receipt"
        elif found[name] != receipt[name]:
            yield f"{name} is not the receipt's"


def _check_rows_file(history: History) -> Check:
    """Check that the hashes of the rows are those that the ledger stands on."""
    about, path = [start["data"]["train"] for start in history.ledger.starts], history.folder / ROWS
    roots = {one.get("root") for one in about} - {None}
    if not roots:
        return Check("rows", "not checked: the run noted no hash of each row")
    if not path.is_file():
        return Check("rows", problems=[f"{ROWS} is missing"])
    problems = [] if roots == {sha256_of(path)} else [f"{ROWS} does not hold the rows that the ledger was begun with"]
    return Check("rows", f"the hashes of {about[-1]['rows']:,} rows", problems)


# The segments


@dataclass(frozen=True, order=True)
class Segment:
    """The steps after one checkpoint, up to and including that of another."""

    start: int
    """Step of the checkpoint that it starts from; 0 for the first weights."""
    end: int

    def __str__(self) -> str:
        return f"{self.start + 1}-{self.end}" if self.end > self.start + 1 else str(self.end)

    @property
    def title(self) -> str:
        """The segment in words, such as "steps 11-20"."""
        return f"step{'s' if len(self) > 1 else ''} {self}"

    def __len__(self) -> int:
        return self.end - self.start


def segments_between(checkpoints: Iterable[int]) -> list[Segment]:
    """Cut a run at the steps of its checkpoints."""
    return [Segment(start, end) for start, end in pairwise([0, *sorted(checkpoints)])]


@dataclass(frozen=True)
class Draw:
    """Which segments are computed again."""

    always: list[Segment]
    """The first one, which pins the first weights, and the last one, which makes the model."""
    drawn: list[Segment]
    """At random among all others."""
    left: list[Segment]
    """The others of these."""

    @property
    def chosen(self) -> list[Segment]:
        return sorted([*self.always, *self.drawn])

    @property
    def chance_to_miss_one(self) -> float:
        """The probability that one forged segment, somewhere among those that were drawn from, would not have been drawn."""
        return len(self.left) / (len(self.drawn) + len(self.left)) if self.left else 0.0


def draw(segments: Sequence[Segment], count: int | None, seed: str) -> Draw:
    """Draw the segments to compute again.

    Args:
        count: how many in all; at least the first and the last. None: all of them.
        seed: equal seeds draw equal segments.
    """
    always = sorted({segments[0], segments[-1]})
    middle = [segment for segment in segments if segment not in always]
    wanted = len(middle) if count is None else min(len(middle), max(0, count - len(always)))
    drawn = sorted(random.Random(seed).sample(middle, wanted))
    return Draw(always, drawn, [segment for segment in middle if segment not in drawn])


def _compute_again(receipt: Receipt, history: History, count: int | None, seed: str | None) -> Iterator[Check | str]:
    """Compute parts of the run again. Collective."""
    from hftune.replay.verification import Verification  # imports torch

    with Verification(receipt, history) as verification:
        yield verification.check_data()
        yield verification.check_weights()
        yield verification.check_speed()
        seed = verification.replayer.strategy.broadcast(seed or secrets.token_hex(8))
        if not verification.segments:
            yield "Nothing was computed again: no checkpoint is intact."
            return
        draws = draw(verification.segments, count, seed)
        middle = len(draws.drawn) + len(draws.left)
        num_steps, step_s = sum(map(len, draws.chosen)), history.seconds_per_step()
        took = "" if step_s is None else f", which took the run {duration(num_steps * step_s)}"
        which = ", ".join(map(str, draws.always)) if draws.left else "all segments"
        if draws.left and draws.drawn:
            which += f"; and of the {middle} others, drawn with seed {seed}: {', '.join(map(str, draws.drawn))}"
        yield f"Replaying {num_steps:,} steps{took}: {which}."
        for segment in draws.chosen:
            yield verification.check_segment(segment)
    if not draws.left:
        yield "Every step was computed again."
        return
    missed = f"would have been missed with a chance of {100 * draws.chance_to_miss_one:.0f} %; --all leaves none."
    yield (
        f"Not replayed: {len(draws.left)} of {len(draws.left) + len(draws.chosen)} segments. One forged segment among the "
        f"{middle} that were drawn from {missed}"
    )

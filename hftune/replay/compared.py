"""Runs beside each other: where they part and why, and how sure the differences of their losses and metrics are.

Independent of how it is shown: ``hftune compare`` prints it, as text or JSON, and the report has it as sections.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hftune.replay.causes import changes_on_the_way
from hftune.replay.differences import Parting, part
from hftune.replay.paired import Evaluation, TrainingLoss, evaluation, training_loss
from hftune.replay.run_record import RunRecord
from hftune.replay.seeds import Method, MethodDifference, method_differences, methods_of
from hftune.replay.traces import Trace, is_whole, read_trace, segments


@dataclass
class Pair:
    """Two runs."""

    a: str
    b: str
    parting: Parting
    training: TrainingLoss | None
    evaluation: Evaluation


@dataclass
class RunFacts:
    """What is said of one run."""

    name: str
    folder: str
    title: str
    num_steps: int
    processes: Any
    is_finished: bool
    changes: list[tuple[int, list[str]]]
    """What it changed when it was resumed: from which step on, and what."""
    has_several_recipes: bool
    """Whether this includes recipe or data, beyond keys that do not change the training."""
    missing: list[str]
    problems: list[str]
    can_be_replayed: bool
    """Whether its ledger says all that its steps follow from."""
    metrics: dict[str, float]


@dataclass
class Comparison:
    """Several runs. All but the first are compared with the first."""

    runs: list[RunFacts]
    pairs: list[Pair]
    methods: list[Method]
    """Empty unless there are more than two runs, and some recipe was trained with several seeds."""
    method_differences: list[MethodDifference]

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)


def compare(runs: Sequence[RunRecord]) -> Comparison:
    """Compare runs with the first of them."""
    first = read_trace(runs[0])
    facts, pairs = [facts_of(runs[0], first)], []
    for run in runs[1:]:
        trace = read_trace(run)  # one at a time: of 100,000 steps each takes 150 MB
        facts.append(facts_of(run, trace))
        pairs.append(Pair(runs[0].name, run.name, part(first, trace), training_loss(first, trace), evaluation(runs[0], run)))
    methods = (
        methods_of(runs, [own.metrics for own in facts], [own.has_several_recipes for own in facts]) if len(runs) > 2 else []
    )
    return Comparison(facts, pairs, methods, method_differences(methods))


def facts_of(run: RunRecord, trace: Trace) -> RunFacts:
    """Collect what is said of one run."""
    starts = [(segment.steps[0], segment.starts[0]) for segment in segments(trace, trace)]
    changes = changes_on_the_way(starts)
    processes = [start.get("world_size") for _, start in starts] or [run.facts.get("processes")]
    return RunFacts(
        name=run.name,
        folder=str(run.folder),
        title=run.title,
        num_steps=max(trace.steps, default=run.log.last_step),
        processes=processes[-1],
        is_finished=run.is_finished,
        changes=[(step, [one.text.replace(" | ", " -> ") for one in differences]) for step, differences in changes],
        has_several_recipes=any(one.kind in ("recipe", "data") and one.effects for _, found in changes for one in found),
        missing=trace.missing,
        problems=trace.problems,
        can_be_replayed=bool(trace.starts) and all(map(is_whole, trace.starts)),
        metrics=last_metrics(run),
    )


def last_metrics(run: RunRecord) -> dict[str, float]:
    """Return the best metric, the metrics of the last evaluation, and those of the test, by name."""
    found: dict[str, float] = {}
    if point := run.best_point():
        found[f"best {point[0]}"] = point[2]
    for part_of_data, prefix in (("eval/", ""), ("test/", "test ")):
        for key, curve in run.log.curves.items():
            if key.startswith(part_of_data) and (value := curve.last()) is not None:
                found[prefix + key.removeprefix(part_of_data)] = value
    return found

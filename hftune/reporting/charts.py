"""Which curves of one run, or of several, belong in one chart of the page."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hftune.metrics.records import chart_key, place_of, record_of
from hftune.replay.run_record import Curve, RunRecord

GROUPS = {"train": "Training", "eval": "Evaluation", "perf": "Speed", "perf/*": "Machines", "": "Other"}
"""Headings, by the first part of a metric's name."""
POINTS = 48_000
"""Points of all curves of a page together: about 17 bytes each."""
POINTS_PER_CURVE = (200, 3000)
"""Least and greatest number of points to which a curve is thinned."""
NOT_SMOOTHED = ("train/lr", "perf/slowest_rank")
"""Curves without noise, or whose mean says nothing."""


@dataclass
class Line:
    """One curve in a chart."""

    run_index: int
    label: str
    curve: Curve
    is_smoothed: bool
    """Whether smoothing may be applied: not to evaluations, each of which counts."""
    best: tuple[int, float] | None = None
    """Step and value of the best model."""


@dataclass
class Chart:
    """Curves with one vertical axis."""

    key: str
    """Of its metric, or of its first; with * for the processes or hosts that it compares."""
    title: str
    unit: str
    group: str
    lines: list[Line] = field(default_factory=list)


def make_charts(runs: Sequence[RunRecord]) -> list[Chart]:
    """Sort the curves of these runs into charts, in reading order: training, evaluation, speed, then what an own task logs.

    Within a group the metrics that pick the best model come first, then the order in which the runs log them.
    """
    found: dict[str, Chart] = {}
    is_single = len(runs) == 1
    joins_losses = is_single and {"train/loss", "eval/loss"} <= runs[0].log.curves.keys()
    keys = dict.fromkeys(key for run in runs for key in run.log.curves if not key.startswith("test/"))
    losses = [[run.log.curves.get(key) for key in ("train/loss", "train/loss_step")] for run in runs]
    if all(single in (None, loss) for loss, single in losses):  # every step is logged: both are the same curve
        keys.pop("train/loss_step", None)
    picked = {f"eval/{point[0]}" for run in runs if (point := run.best_point())}
    groups = [*GROUPS]
    for key in sorted(keys, key=lambda key: (groups.index(group_of(key)), key not in picked)):
        name = "train/loss" if joins_losses and chart_key(key) == "eval/loss" else chart_key(key)
        if name not in found:
            found[name] = Chart(name, record_of(name).title, record_of(name).unit, GROUPS[group_of(name)])
        for run_index, run in enumerate(runs):
            if key in run.log.curves:
                found[name].lines.append(make_line(run_index, run, key, is_single))
    if joins_losses:
        found["train/loss"].title = "Loss"
    charts = [*found.values()]
    if len(runs) == 2 and (difference := loss_difference(*runs)):
        charts.insert(1, difference)
    return charts


def group_of(key: str) -> str:
    """Return the key in GROUPS for a metric."""
    first = key.partition("/")[0]
    return "perf/*" if chart_key(key).startswith("perf/*") else first if first in GROUPS else ""


def make_line(run_index: int, run: RunRecord, key: str, is_single: bool) -> Line:
    """Describe one curve of a run."""
    part = place_of(key)
    if is_single:
        label = part or {"train/loss": "training", "eval/loss": "evaluation"}.get(key, record_of(key).title.lower())
    else:
        label = f"{run.name} {part}".rstrip()
    point = run.best_point()
    best = point[1:] if point and key == f"eval/{point[0]}" else None
    return Line(run_index, label, run.log.curves[key], not key.startswith("eval/") and key not in NOT_SMOOTHED, best)


def loss_difference(a: RunRecord, b: RunRecord) -> Chart | None:
    """Return the chart of what the training losses of two runs differ by, which curves on top of each other hide."""
    if not all("train/loss" in run.log.curves for run in (a, b)):
        return None
    (steps_a, losses_a), (steps_b, losses_b) = (run.log.curves["train/loss"].ordered() for run in (a, b))
    steps, of_a, of_b = np.intersect1d(steps_a, steps_b, assume_unique=True, return_indices=True)
    differences = losses_b[of_b] - losses_a[of_a]
    if not differences.any():
        return None
    curve = Curve(array("q", steps.tolist()), array("d", differences.tolist()))
    line = Line(1, f"{b.name} less {a.name}", curve, is_smoothed=True)
    return Chart("train/loss_difference", "Difference of the training losses", "", GROUPS["train"], [line])


def notes_on_curves(run: RunRecord) -> Iterator[str]:
    """Say which metrics were not finite somewhere."""
    for key, curve in run.log.curves.items():
        if missing := len(curve.values) - len(curve.finite()):
            yield f"{key} was not a finite number in {missing:,} of its {len(curve.values):,} points."


def chart_data(runs: Sequence[RunRecord], charts: Sequence[Chart]) -> dict[str, Any]:
    """Return what report.js draws."""
    limit = point_limit(charts)
    return {
        "runs": [{"name": run.name, "epochs": run.log.epochs_per_step} for run in runs],
        "charts": [
            {
                "title": chart.title,
                "unit": chart.unit,
                "group": chart.group,
                "key": chart.key,
                "lines": [
                    {
                        "run": line.run_index,
                        "label": line.label,
                        "points": line.curve.thinned(limit),
                        "means": line.curve.means(limit) if line.is_smoothed else None,
                        "smooth": line.is_smoothed,
                        "best": line.best,
                    }
                    for line in chart.lines
                ],
            }
            for chart in charts
        ],
    }


def point_limit(charts: Sequence[Chart]) -> int:
    """Return the number of points that each curve of a page may have."""
    least, most = POINTS_PER_CURVE
    return max(least, min(most, POINTS // max(1, sum(len(chart.lines) for chart in charts))))

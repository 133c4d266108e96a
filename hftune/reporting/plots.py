"""Plots for papers: the charts of report.html as PNG files of a column's width, by matplotlib (pip install "hftune[plots]")."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hftune.reporting.charts import Chart, make_charts
from hftune.reporting.confusion import names_of
from hftune.reporting.run_record import RunRecord, read_run, run_names

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#6656b8", "#4b525b")
"""After Okabe and Ito, for colour-blind readers, as in report.css; later curves repeat them with other dashes."""
DASHES = ("-", "--", ":", "-.")
FEW = 60
"""Points of an evaluation's curve up to which each is marked."""
MOST_COUNTS = 12
"""Classes up to which a confusion matrix shows its counts."""
SETTINGS: dict[Any, Any] = {
    "figure.figsize": (3.4, 2.4),  # inches: a column of a paper
    "figure.dpi": 100,
    "savefig.dpi": 300,
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e7ea",
    "axes.axisbelow": True,
    "lines.linewidth": 1.2,
    "legend.frameon": False,
}
WIDE_FONTS = (
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "Source Han Sans SC",
    "Microsoft YaHei",
    "PingFang SC",
)
"""Fonts with Chinese characters, for class names; those that are installed are used."""


def write_plots(folders: Sequence[Path], output: Path) -> list[Path]:
    """Draw each chart of these runs into a PNG file, and return the paths.

    Raises:
        OSError: a file cannot be written.
    """
    import matplotlib
    from matplotlib import font_manager
    from matplotlib.figure import Figure  # not pyplot, which would look for a screen

    runs = [read_run(folder, name) for folder, name in zip(folders, run_names(folders), strict=True)]
    output.mkdir(parents=True, exist_ok=True)
    fonts = [name for name in WIDE_FONTS if name in font_manager.get_font_names()]
    paths = []
    with matplotlib.rc_context({**SETTINGS, "font.family": ["DejaVu Sans", *fonts]}):
        for chart in make_charts(runs):
            paths.append(save(draw_chart(Figure(layout="constrained"), chart), output / f"{file_name(chart.key)}.png"))
        for run in runs:
            if "eval" in run.log.matrices:
                name = "confusion_matrix" if len(runs) == 1 else f"confusion_matrix_{file_name(run.name)}"
                paths.append(save(draw_matrix(Figure(layout="constrained"), run), output / f"{name}.png"))
    return paths


def file_name(key: str) -> str:
    """Return a metric's key, or a run's name, as the name of a file: "train/loss" is "train_loss"."""
    return re.sub(r"[^\w.-]+", "_", key.replace("/*/", "_")).strip("_.") or "plot"


def save(figure: Figure, path: Path) -> Path:
    figure.savefig(path)
    return path


def draw_chart(figure: Figure, chart: Chart) -> Figure:
    """Draw the curves of a chart, all of their points."""
    axes = figure.add_subplot()
    scale = 100 if chart.unit == "%" else 1
    for index, line in enumerate(chart.lines):
        steps, values = line.curve.ordered()
        color, dash = COLORS[index % len(COLORS)], DASHES[index // len(COLORS) % len(DASHES)]
        marker = "o" if (not line.is_smoothed and len(steps) <= FEW and chart.key != "train/lr") or len(steps) == 1 else None
        axes.plot(steps, values * scale, label=line.label, marker=marker, markersize=2.5, color=color, linestyle=dash)
        if line.best:
            step, value = line.best
            axes.plot([step], [value * scale], "o", markersize=7, fillstyle="none", color=color)
    axes.set_xlabel("step")
    axes.set_ylabel(f"{chart.title} ({chart.unit})" if chart.unit else chart.title)
    if len(chart.lines) > 1:
        axes.legend(fontsize=7)
    return figure


def draw_matrix(figure: Figure, run: RunRecord) -> Figure:
    """Draw a run's last confusion matrix: the colour is the share of the row, the number the count."""
    _, matrix = run.log.matrices["eval"]
    counts, names = np.array(matrix, dtype=float), names_of(run.class_names, len(matrix))
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    side = min(max(2.8, 0.42 * len(names) + 1.2), 7.0)
    figure.set_size_inches(side, side)
    axes: Axes = figure.add_subplot()
    axes.grid(visible=False)
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    axes.set_xlabel("predicted")
    axes.set_ylabel("true")
    if len(names) <= 4 * MOST_COUNTS:
        places = range(len(names))
        axes.set_xticks(places, names, rotation=45, ha="right", rotation_mode="anchor")
        axes.set_yticks(places, names)
    if len(names) <= MOST_COUNTS:
        for row, column in np.ndindex(counts.shape):
            color = "white" if shares[row, column] > 0.55 else "black"
            axes.text(column, row, f"{counts[row, column]:,.0f}", ha="center", va="center", color=color, fontsize=7)
    return figure

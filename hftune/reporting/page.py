"""``report.html``: one file that shows a run, or compares several, without a network. Reads nothing but their folders."""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from hftune.checkpoints.atomic_files import write_text
from hftune.replay.run_record import read_run, run_names
from hftune.reporting.charts import chart_data, make_charts
from hftune.reporting.comparison import several_runs
from hftune.reporting.elements import Html, cut, escape
from hftune.reporting.sections import one_run
from hftune.tracking.console import warning

REPORT = "report.html"
SLOW_S, SHARE = 0.5, 0.05
"""A report that takes longer, as that of a million lines, is written so rarely that it takes this share of the time."""


class Reporter:
    """Writes the report of a run in training. If it cannot, it says so once: training is worth more than its report."""

    def __init__(self) -> None:
        self._has_failed = False
        self._not_before = 0.0

    def write(self, folder: Path, say: Callable[[str], None], is_last: bool = False) -> None:
        """Write report.html, unless writing it takes so long that it would slow the training down. Main process only.

        Args:
            say: prints a line.
            is_last: write it in any case.
        """
        began = time.monotonic()
        if began < self._not_before and not is_last:
            return
        try:
            write_report(folder)
        except Exception as error:  # whatever the files in the folder may lead to
            if not self._has_failed:
                reason = f"{type(error).__name__}: {error}".partition("\n")[0].rstrip(".")
                what = f"{folder / REPORT} could not be written: {reason}."
                say(warning(f"{what} Training continues; hftune report {folder} tries again."))
            self._has_failed = True
        seconds = time.monotonic() - began
        if seconds > SLOW_S:
            self._not_before = began + seconds / SHARE


def write_report(folder: Path) -> Path:
    """Write report.html into the folder of a run, and return its path."""
    path = folder / REPORT
    write_text(path, page([folder]))
    return path


def page(folders: Sequence[Path], are_selected: bool = False) -> str:
    """Return the page of one run, or of several side by side, as HTML.

    Args:
        are_selected: whether these are the best of more runs: then their means over the seeds would be too good.
    """
    runs = [read_run(folder, name) for folder, name in zip(folders, run_names(folders), strict=True)]
    body = one_run(runs[0]) if len(runs) == 1 else several_runs(runs, are_selected)
    title = runs[0].title if len(runs) == 1 else f"Comparison: {', '.join(run.name for run in runs)}"
    text = document(title, body, chart_data(runs, make_charts(runs)))
    return text.encode("utf-8", "replace").decode("utf-8")  # a text may hold half a surrogate pair, which no file can


def document(title: str, body: Html, data: Mapping[str, Any]) -> str:
    """Return the page around its body. Its policy forbids the browser every request, and every script but our two."""
    library, script = asset("uPlot.iife.min.js"), asset("report.js")
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in (library, script)
    )
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {hashes}"
    # No "<" in the data, so that no text can end the script element.
    json_text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    head = [
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        '<link rel="icon" href="data:,">',
        f"<title>{escape(cut(title, 100))}</title>",
        f"<style>{asset('uPlot.min.css')}{asset('report.css')}</style>",
    ]
    scripts = [
        f'<script type="application/json" id="data">{json_text}</script>',
        f"<script>{library}</script>",
        f"<script>{script}</script>",
    ]
    return "\n".join(["<!doctype html>", '<html lang="en">', *head, body, *scripts, "</html>", ""])


def asset(name: str) -> str:
    return (files("hftune.reporting") / "assets" / name).read_text(encoding="utf-8")

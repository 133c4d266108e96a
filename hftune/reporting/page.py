"""``report.html``: one file that shows a run, or compares several, without a network. Reads nothing but their folders."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader

from hftune.atomic import write_text
from hftune.checkpoints.run_folder import REPORT
from hftune.errors import cut
from hftune.replay.run_record import plain, read_run, run_names
from hftune.reporting.blocks import number
from hftune.reporting.charts import chart_data, make_charts
from hftune.reporting.comparison import comparison_sections
from hftune.reporting.sections import key_facts, sections_of

SCRIPTS = ("uPlot.iife.min.js", "report.js")
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
"""Characters that HTML does not allow."""


def write_report(folder: Path, result: Mapping[str, Any] | None = None) -> Path:
    """Write report.html into the folder of a run, and return its path; ``result``: of result.json, before it is written."""
    path = folder / REPORT
    write_text(path, page([folder], result=result))
    return path


def page(folders: Sequence[Path], are_selected: bool = False, result: Mapping[str, Any] | None = None) -> str:
    """Return the page of one run, or of several side by side, as HTML.

    Its policy forbids the browser every request, and every script but our two.

    Args:
        are_selected: whether these are the best of more runs: then their means over the seeds would be too good.
        result: of a run that is about to write it; None: read from the folder.
    """
    runs = [read_run(folder, name, result) for folder, name in zip(folders, run_names(folders), strict=True)]
    sections = sections_of(runs[0]) if len(runs) == 1 else comparison_sections(runs, are_selected)
    assets = {path.name: path.read_text(encoding="utf-8") for path in (files("hftune.reporting") / "assets").iterdir()}
    digests = (hashlib.sha256(assets[name].encode()).digest() for name in SCRIPTS)
    hashes = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    data = json.dumps(chart_data(runs, make_charts(runs)), separators=(",", ":"), allow_nan=False)
    template = environment().get_template("page.html")
    text = template.render(
        title=runs[0].title if len(runs) == 1 else f"Comparison: {', '.join(run.name for run in runs)}",
        runs=runs,
        key_facts=key_facts(runs[0]) if len(runs) == 1 else [],
        sections=[section for section in sections if section],
        policy=f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {hashes}",
        assets=assets,
        data=data.replace("<", "\\u003c"),  # so that no text can end the script element
        written=f"{datetime.now(UTC):%Y-%m-%d %H:%M}",
    )
    return text.encode("utf-8", "replace").decode("utf-8")  # a text may hold half a surrogate pair, which no file can


@functools.cache  # compiling the templates takes as long as filling them in
def environment() -> Environment:
    """Return what fills in the templates: every text is escaped, and has no characters that HTML does not allow."""
    found = Environment(
        loader=PackageLoader("hftune.reporting"), autoescape=True, trim_blocks=True, lstrip_blocks=True, finalize=allowed
    )
    found.filters |= {"number": number, "cut": cut, "plain": plain}
    found.filters["percent"] = lambda share: "\N{EN DASH}" if share is None else f"{share:.0%}"
    return found


def allowed(value: Any) -> Any:
    return CONTROL.sub("\N{REPLACEMENT CHARACTER}", value) if type(value) is str else value

"""Writes a run's report while it trains, and the card of its model at its end. Reads nothing but the output folder."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hftune.atomic import write_text
from hftune.callbacks import Begin, Callback, End, EvaluationDone
from hftune.checkpoints.run_folder import REPORT
from hftune.errors import first_line
from hftune.tracking.console import warning
from hftune.tracking.jsonl import strict_json

SLOW_S, SHARE = 0.5, 0.05
"""A report that takes longer, as that of a million lines, is written so rarely that it takes this share of the time."""


class Report(Callback):
    """Writes report.html after each evaluation. If it cannot, it says so once: training is worth more than its report."""

    def __init__(self) -> None:
        self._has_failed = False
        self._not_before = 0.0

    def on_begin(self, begin: Begin) -> None:
        self.folder = begin.output_dir

    def on_evaluation(self, evaluation: EvaluationDone) -> None:
        if evaluation.split == "eval" and time.monotonic() >= self._not_before:
            self.write()

    def on_end(self, end: End) -> None:
        self.write(json.loads(strict_json(end.result.to_json())))

    def write(self, result: Mapping[str, Any] | None = None) -> None:
        from hftune.reporting.page import write_report  # imports scipy and jinja2, for which the first step need not wait

        began = time.monotonic()
        try:
            write_report(self.folder, result)
        except Exception as error:  # whatever the files in the folder may lead to
            if not self._has_failed:
                what = f"{self.folder / REPORT} could not be written: {first_line(error)}."
                print(warning(f"{what} Training continues; hftune report {self.folder} tries again."), flush=True)
            self._has_failed = True
        seconds = time.monotonic() - began
        if seconds > SLOW_S:
            self._not_before = began + seconds / SHARE


class Card(Callback):
    """Writes the model card at the end. It is for show: if it fails, that costs one line on the terminal and not the run."""

    def on_begin(self, begin: Begin) -> None:
        self.recipe = begin.recipe

    def on_end(self, end: End) -> None:
        from hftune.reporting.card import CARD, card, read_facts

        path: Path = end.result.model_dir / CARD
        try:
            write_text(path, card(read_facts(end.result.output_dir, self.recipe, end.result.to_json())))
        except Exception as error:  # a task of the user's own may return anything
            print(warning(f"{path} could not be written: {first_line(error)}. Everything else is saved."), flush=True)

"""What a replay shows of the samples behind a loss: the worst ones, odd ones, and whether batch or update is to blame."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hftune.checkpoints.atomic_files import explain_write_errors, write_lines
from hftune.replay.earlier_weights import EarlierWeights
from hftune.replay.history import History
from hftune.replay.oddity import Oddity, oddities, token_columns
from hftune.replay.samples import SampleRecord, look_inside
from hftune.replay.verdict import BATCH, losses_of, suspect_of, usual_loss, verdict
from hftune.strategies.base import StepBatch, StepReport
from hftune.task import Task, ask
from hftune.tracking.console import columns_of, one_line, short
from hftune.tracking.image_grid import write_image
from hftune.tracking.jsonl import strict_json

if TYPE_CHECKING:
    from hftune.replay.engine import Replayer

SAMPLES = "samples.jsonl"
PICTURES = "pictures"
PIPED = 120
"""Columns of a line where there is no terminal."""
OUTSTANDING = 3.0
"""A sample stands out if it has so many times its share of the loss."""
MOST_ODD = 5
"""Odd samples that are named in the terminal."""


class Inspection:
    """Looks into steps while they are replayed: hand ``look`` to ``Replayer.advance``, on all processes.

    Args:
        history: of the run.
        first: the first of the steps that are looked into.
        last: the last of them.
        worst: samples to show; 0: none are looked at.
        why: whether to say in any case if batch or update is to blame. It needs a replay that begins EARLIER steps before.
    """

    def __init__(self, history: History, first: int, last: int, worst: int = 0, why: bool = False):
        self.first, self.last, self.worst, self.why = first, last, worst, why
        losses = losses_of(history.ledger.steps)
        self.suspect = suspect_of(losses, first, last)
        self.usual = usual_loss(losses, self.suspect)
        self.earlier = EarlierWeights(self.suspect)
        self.records: dict[int, list[SampleRecord]] = {}
        """Of each step that was looked into; on the main process."""

    def look(self, replayer: Replayer, batch: StepBatch, report: StepReport) -> None:
        """Take the notes of one step; see ``Replayer.advance``. Collective.

        Raises:
            ConfigError: see ``whole_model``.
        """
        if self.why or self.worst:
            self.earlier.look(replayer, batch, report)
        if self.worst and self.first <= replayer.step <= self.last:
            records = look_inside(replayer, batch, report, pictures=self.worst)
            if records is not None:
                self.records[replayer.step] = records

    def findings(self, replayer: Replayer) -> Findings:
        """Return what was found. Main process only."""
        ranked = [(step, record) for step, records in self.records.items() for record in records]
        ranked.sort(key=lambda pair: _order(pair[1]))
        said = verdict(self.suspect, self.earlier.losses, self.usual) if self.why or len(self.earlier.losses) > 1 else []
        return Findings(replayer.task, replayer.datasets["train"], ranked, self.worst, self.suspect, self.earlier.losses, said)


def _order(record: SampleRecord) -> tuple[bool, float]:
    """Sort by loss, the greatest first, and before it what is not a number."""
    return not math.isnan(record.loss), -record.loss


class Findings:
    """What an inspection found, for a person, for a file and for programs.

    Args:
        task: of the run.
        dataset: its training split, not augmented.
        ranked: step and record of each sample that was looked at, the greatest loss first.
        worst: how many of them to show.
        suspect: the step that ``said`` is about.
        losses: of its batch, by the step after which the weights were those.
        said: the verdict.
    """

    def __init__(
        self,
        task: Task,
        dataset: Any,
        ranked: Sequence[tuple[int, SampleRecord]],
        worst: int,
        suspect: int,
        losses: Mapping[int, float],
        said: Sequence[str],
    ):
        self.task, self.dataset, self.suspect, self.losses, self.said = task, dataset, suspect, losses, said
        self.ranked = [
            (step, record if place < worst else replace(record, picture=None)) for place, (step, record) in enumerate(ranked)
        ]
        self.shown = self.ranked[:worst]

    @cached_property
    def odd(self) -> Mapping[int, Oddity]:
        """How odd each sample is that was looked at, by its number; empty if they are neither texts nor images."""
        return oddities(self.task, self.dataset, [record.sample for _, record in self.ranked]) if self.ranked else {}

    @property
    def outstanding(self) -> list[int]:
        """Samples that are shown and have far more than their share of the loss of their step."""
        counts = {step: sum(other == step for other, _ in self.ranked) for step, _ in self.ranked}
        return [record.sample for step, record in self.shown if record.loss_share * counts[step] > OUTSTANDING]

    def lines(self, width: int | None = None) -> list[str]:
        """Return the lines for a terminal of this width; None: there is none."""
        return [
            *(self._table(width or PIPED) if self.shown else []),
            *self._summary(),
            *self._odd_line(),
            *self.said,
        ]

    def _table(self, width: int) -> list[str]:
        """Return a line for each of the worst samples."""
        records = [record for _, record in self.shown]
        cells: dict[str, list[str]] = {"loss": [short(record.loss) for record in records]}
        cells["of it"] = [_percent(record.loss_share) for record in records]
        cells["gradient"] = [_percent(record.gradient_share) for record in records]
        if len({step for step, _ in self.ranked}) > 1:
            cells["step"] = [f"{step:,}" for step, _ in self.shown]
        cells["sample"] = [str(record.sample) for record in records]
        rows = [row_in_data(self.task, self.dataset, record.sample) for record in records]
        if rows != [record.sample for record in records] and None not in rows:
            cells["row"] = [str(row) for row in rows]
        columns = [[head, *values] for head, values in cells.items()]
        widths = [max(map(len, column)) for column in columns]
        lines = [
            "  ".join(cell.rjust(size) for cell, size in zip(line, widths, strict=True)) for line in zip(*columns, strict=True)
        ]
        for head, values in self._words(records).items():
            size = max(columns_of(value)[-1] if value else 0 for value in (head, *values))
            column = [head, *values]
            lines = [f"{line}  {_padded(value, size)}" for line, value in zip(lines, column, strict=True)]
        return [one_line_of(f"  {line}", width) for line in lines]

    def _words(self, records: Sequence[SampleRecord]) -> dict[str, list[str]]:
        """Return the columns of words: label and prediction, the file of the picture, and the text."""
        columns = {
            "label -> said": [answer_of(self.task, record.answer) for record in records],
            "picture": ["" if record.picture is None else picture_name(step, record.sample) for step, record in self.shown],
            "text": [one_line(text_of(self.task, self.dataset[record.sample]), PIPED) for record in records],
        }
        return {head: values for head, values in columns.items() if any(values)}

    def _summary(self) -> list[str]:
        """Say whether few samples make the loss."""
        if not self.shown:
            return []
        step, worst = self.shown[0]
        count = sum(number == step for number, _ in self.ranked)
        shown = [record for number, record in self.shown if number == step]
        if broken := sum(number == step and not math.isfinite(record.loss_sum) for number, record in self.ranked):
            return [f"{broken} of the {count} samples of step {step:,} have a loss that is not finite."]
        if not any(record.sample in self.outstanding for record in shown):
            share = _percent(worst.loss_share)
            return [f"No sample stands out: the worst of the {count} of step {step:,} makes {share} of its loss."]
        share = _percent(math.fsum(record.loss_share for record in shown))
        who = f"The worst {len(shown)} of the {count} samples" if len(shown) > 1 else f"One of the {count} samples"
        return [f"{who} of step {step:,} make{'s' if len(shown) == 1 else ''} {share} of its loss."]

    def _odd_line(self) -> list[str]:
        odd = sorted((found for found in self.odd.values() if found.is_odd), key=lambda found: -found.distance)
        if not odd:
            return []
        named = ", ".join(f"{found.sample} ({found})" for found in odd[:MOST_ODD])
        rest = f", and {len(odd) - MOST_ODD} more in {SAMPLES}" if len(odd) > MOST_ODD else ""
        return [f"Odd samples here: {named}{rest}."]

    @property
    def to_leave_out(self) -> list[int]:
        """Samples that a replay without them may explain, in the order of their numbers; none if the weights are to blame."""
        return [] if self.said and not self.said[-1].startswith(BATCH) else sorted(set(self.outstanding))

    def why(self) -> dict[str, Any]:
        """Return the verdict, for replay.json."""
        losses = {str(step): loss for step, loss in sorted(self.losses.items())}
        return {"why": {"step": self.suspect, "losses": losses, "said": [*self.said]}} if self.said else {}

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each sample that was looked at, the greatest loss first."""
        return [self._row(step, record) for step, record in self.ranked]

    def _row(self, step: int, record: SampleRecord) -> dict[str, Any]:
        row: dict[str, Any] = {
            "step": step,
            "sample": record.sample,
            "row": row_in_data(self.task, self.dataset, record.sample),
            "micro_batch": record.micro_batch,
            "items": record.items,
            "loss": record.loss,
            "loss_share": record.loss_share,
            "grad_norm": record.grad_norm,
            "gradient_share": record.gradient_share,
            **{name: name_of(self.task, value) for name, value in record.answer.items()},
        }
        if text := text_of(self.task, self.dataset[record.sample]):
            row["text"] = text
        if record.picture is not None:
            row["picture"] = f"{PICTURES}/{picture_name(step, record.sample)}"
        return row | (self.odd[record.sample].to_dict() if record.sample in self.odd else {})

    def write(self, folder: Path) -> list[Path]:
        """Write samples.jsonl and the pictures of the worst samples into the folder of a replay; return what was written.

        Raises:
            TrainingError: a file cannot be written.
        """
        if not self.ranked:
            return []
        path = folder / SAMPLES
        with explain_write_errors(path):
            folder.mkdir(parents=True, exist_ok=True)
            write_lines(path, (strict_json(row, ensure_ascii=False) + "\n" for row in self.rows()))
        pictures = [(folder / PICTURES / picture_name(step, record.sample), record.picture) for step, record in self.shown]
        for file, picture in pictures:
            if picture is not None:
                write_image(file, picture)
        return [path, *(file for file, picture in pictures if picture is not None)]


# How a sample is shown


def describe(replayer: Replayer, rows: Sequence[int]) -> list[dict[str, Any]]:
    """Return what samples of the training split are, by their numbers: their row in the data, and the text."""
    task, dataset = replayer.task, replayer.datasets["train"]
    return [{"sample": row, "row": row_in_data(task, dataset, row), "text": text_of(task, dataset[row])} for row in rows]


def text_of(task: Task, example: Any) -> str:
    """Return a sample as text: its tokens decoded, what the task marks, or the texts that are in it; "" if it is none."""
    columns, tokenizer = token_columns(example), None
    if columns and hasattr(type(task), "text_tokenizer"):
        tokenizer = ask(task, "text_tokenizer", None)
    if tokenizer is not None:
        return " | ".join(tokenizer.decode(np.asarray(example[name]).tolist(), skip_special_tokens=True) for name in columns)
    if hasattr(type(task), "marked"):
        return "".join(piece for piece, _ in ask(task, "marked", [], example))
    texts = [value for value in example.values() if isinstance(value, str)] if isinstance(example, Mapping) else []
    return " | ".join(texts)


def row_in_data(task: Task, dataset: Any, sample: int) -> Any:
    """Return the row of a training sample in the data, which differs from its number if only some rows are used.

    None if a sample is no row, such as a block of a running text.
    """
    if getattr(task, "texts_run_on", False):
        return None
    if not hasattr(task, "row_of"):
        return sample
    example = dataset[sample]
    index = int(example["row"]) if isinstance(example, Mapping) and "row" in example else sample  # a chat may be several
    return ask(task, "row_of", lambda index: index, "train")(index)


def answer_of(task: Task, answer: Mapping[str, Any]) -> str:
    """Return label and prediction for a line; "" if the task has none."""
    if not answer:
        return ""
    label, prediction = (answer[name] for name in ("label", "prediction"))
    if is_by_token(task, label):
        wrong = sum(one != other for one, other in zip(label, prediction, strict=True))
        return f"{wrong} of {len(label)} wrong"
    return f"{name_of(task, label)} -> {name_of(task, prediction)}"


def is_by_token(task: Task, label: Any) -> bool:
    """Say whether a label is one number for each word, and not one for each class."""
    return isinstance(label, list) and getattr(task, "kind", None) != "multi_label_classification"


def name_of(task: Task, value: Any) -> Any:
    """Return the name of a class, those of several, or a number as it is."""
    labels = task.labels
    if labels is None:
        return round(value, 4) if isinstance(value, float) else value
    if isinstance(value, list):
        numbers = value if is_by_token(task, value) else [number for number, flag in enumerate(value) if flag]
        return ", ".join(str(labels[number]) for number in numbers) or "none"
    return str(labels[value]) if isinstance(value, int) else value


def picture_name(step: int, sample: int) -> str:
    return f"step_{step}_sample_{sample}.png"


def _percent(share: float | None) -> str:
    if share is None or math.isnan(share):
        return "" if share is None else "?"
    return f"{100 * share:.{0 if abs(share) >= 0.1 else 1}f} %"


def _padded(text: str, width: int) -> str:
    """Fill up with spaces to a width on the terminal."""
    return text + " " * (width - (columns_of(text)[-1] if text else 0))


def one_line_of(line: str, width: int) -> str:
    """Cut a line at the width of the terminal; its spaces are kept."""
    ends = columns_of(line := line.rstrip())
    if not ends or ends[-1] <= width:
        return line
    return line[: sum(end < width for end in ends)].rstrip() + "\N{HORIZONTAL ELLIPSIS}"

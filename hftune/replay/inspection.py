"""What a replay shows of the samples behind a loss: the worst ones, outliers, and whether batch or update is to blame."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hftune.atomic import explain_write_errors, write_lines
from hftune.batch_plan import BatchPlan
from hftune.replay.history import History
from hftune.replay.outliers import find_outliers, token_columns
from hftune.replay.samples import SampleRecord, batch_loss, look_inside
from hftune.replay.spikes import EARLIER, Verdict, judge_spike, losses_of, suspect_of, usual_loss
from hftune.strategies.base import StepBatch, StepReport
from hftune.task import Task, ask
from hftune.tracking.console import aligned, fitted, one_line, short
from hftune.tracking.jsonl import strict_json
from hftune.tracking.predictions import write_image

if TYPE_CHECKING:
    from hftune.replay.engine import Replayer

SAMPLES, PICTURES = "samples.jsonl", "pictures"
PIPED_WIDTH = 120
"""Columns of a line where there is no terminal."""
OUTSTANDING = 3.0
"""A sample stands out if it has this many times its share of the loss."""
MAX_OUTLIERS = 5
"""How many outliers are named in the terminal."""


class Inspection:
    """Looks into steps while they are replayed, and says what was found.

    Hand ``look`` to ``Replayer.advance``, on all processes; ``finish``, and then show it on the main one.

    Args:
        history: of the run.
        first: the first of the steps that are looked into.
        last: the last of them.
        worst: how many samples to show; 0: none are looked at.
        why: whether to say in any case if batch or update is to blame. It needs a replay that begins EARLIER steps before.
    """

    def __init__(self, history: History, first: int, last: int, worst: int = 0, why: bool = False):
        self.first, self.last, self.worst, self.why = first, last, worst, why
        losses = losses_of(history.ledger.steps)
        self.suspect = suspect_of(losses, first, last)
        """The step that the verdict is about."""
        self.usual = usual_loss(losses, self.suspect)
        self.losses: dict[int, float] = {}
        """Of its batch under its own dropout, by the step after which the weights were those; its own loss is the last."""
        self.records: dict[int, list[SampleRecord]] = {}
        """Of each step that was looked into; on the main process."""
        self.verdict: Verdict | None = None
        self._loaded: tuple[BatchPlan, StepBatch] | None = None

    def look(self, replayer: Replayer, batch: StepBatch, report: StepReport) -> None:
        """Take the notes of one step; see ``Replayer.advance``. Collective.

        Raises:
            ConfigError: see ``samples.whole_model``.
        """
        if replayer.step == self.suspect:
            self.losses[self.suspect - 1] = report.loss
        elif self.suspect - EARLIER <= replayer.step < self.suspect:
            if self._loaded is None or self._loaded[0] is not replayer.plan:  # a resume may have changed the micro-batches
                self._loaded = replayer.plan, replayer.batch_of(self.suspect)
            self.losses[replayer.step - 1] = batch_loss(replayer, self._loaded[1], self.suspect)
        if self.worst and self.first <= replayer.step <= self.last:
            records = look_inside(replayer, batch, report, pictures=self.worst)
            if records is not None:
                self.records[replayer.step] = records

    def finish(self, replayer: Replayer) -> None:
        """Rank the samples and judge the suspect, before anything is shown. Main process only."""
        self.task, self.dataset = replayer.task, replayer.datasets["train"]
        self.ranked = [(step, record) for step, records in self.records.items() for record in records]
        self.ranked.sort(key=lambda pair: (not math.isnan(pair[1].loss), -pair[1].loss))  # what is not a number comes first
        self.shown = self.ranked[: self.worst]
        samples = sorted({record.sample for _, record in self.ranked})
        self.outliers = find_outliers(self.dataset, samples) if samples else {}
        """How far each sample that was looked at is from the others; empty for neither texts nor images."""
        if self.why or len(self.losses) > 1:
            self.verdict = judge_spike(self.suspect, self.losses, self.usual)
        self.rows = [self._row(place, *pair) for place, pair in enumerate(self.ranked)]
        """Of samples.jsonl: one for each sample that was looked at, the greatest loss first."""

    @property
    def outstanding(self) -> list[int]:
        """Samples that are shown and have far more than their share of the loss of their step."""
        counts = {step: len(records) for step, records in self.records.items()}
        return sorted({record.sample for step, record in self.shown if record.loss_share * counts[step] > OUTSTANDING})

    @property
    def to_leave_out(self) -> list[int]:
        """Samples that a replay without them may explain; none if the weights are to blame."""
        return self.outstanding if self.verdict is None or self.verdict.blames_batch else []

    def lines(self, width: int | None = None) -> list[str]:
        """Return the lines for a terminal of this width; None: there is none."""
        lines = [*self._table(width or PIPED_WIDTH), *self._share_of_few()] if self.shown else []
        found = sorted((pair for pair in self.outliers.items() if pair[1].reasons), key=lambda pair: -pair[1].distance)
        if found:
            named = ", ".join(f"{sample} ({'; '.join(one.reasons)})" for sample, one in found[:MAX_OUTLIERS])
            rest = f", and {len(found) - MAX_OUTLIERS} more in {SAMPLES}" if len(found) > MAX_OUTLIERS else ""
            lines.append(f"Outliers in this step: {named}{rest}.")
        return [*lines, *(self.verdict.sentences if self.verdict else [])]

    def _table(self, width: int) -> list[str]:
        rows, num_steps = self.rows[: self.worst], len(self.records)
        numbers = {
            "loss": [short(row["loss"]) for row in rows],
            "of it": [percent(row["loss_share"]) for row in rows],
            "gradient": [percent(row["gradient_share"]) for row in rows],
            "step": [f"{row['step']:,}" for row in rows] if num_steps > 1 else [],
            "sample": [str(row["sample"]) for row in rows],
            "row": [str(row["row"]) for row in rows],
        }
        if numbers["row"] == numbers["sample"] or "None" in numbers["row"]:
            del numbers["row"]
        words = {
            "label -> predicted": [answer_of(self.task, record.answer) for _, record in self.shown],
            "picture": [row.get("picture", "").rpartition("/")[2] for row in rows],
            "text": [one_line(row.get("text", ""), PIPED_WIDTH) for row in rows],
        }
        columns = [[head, *values] for head, values in (numbers | words).items() if any(values)]
        lines = aligned([*zip(*columns, strict=True)], right=sum(map(any, numbers.values())))
        return [fitted(line, width) for line in lines]

    def _share_of_few(self) -> list[str]:
        """Say whether few samples make the loss of the step with the worst one."""
        step = self.shown[0][0]
        of_step, shown = self.records[step], [record for number, record in self.shown if number == step]
        if broken := sum(not math.isfinite(record.loss_sum) for record in of_step):
            return [f"{broken} of the {len(of_step)} samples of step {step:,} have a loss that is not finite."]
        if not {record.sample for record in shown} & {*self.outstanding}:
            share = percent(shown[0].loss_share)
            return [f"No sample stands out: the worst of the {len(of_step)} of step {step:,} makes {share} of its loss."]
        share = percent(math.fsum(record.loss_share for record in shown))
        who, make = (f"The worst {len(shown)}", "make") if len(shown) > 1 else ("One", "makes")
        return [f"{who} of the {len(of_step)} samples of step {step:,} {make} {share} of its loss."]

    def summary(self) -> dict[str, Any]:
        if self.verdict is None:
            return {}
        losses = {str(step): loss for step, loss in sorted(self.losses.items())}
        return {"why": {"step": self.suspect, "losses": losses, "said": self.verdict.sentences}}

    def _row(self, place: int, step: int, record: SampleRecord) -> dict[str, Any]:
        names = ("micro_batch", "items", "loss", "loss_share", "grad_norm", "gradient_share")
        row = {"step": step, "sample": record.sample, "row": row_in_data(self.task, self.dataset, record.sample)}
        row |= {name: getattr(record, name) for name in names}
        row |= {name: name_of(self.task, value) for name, value in record.answer.items()}
        if text := text_of(self.task, self.dataset[record.sample]):
            row["text"] = text
        if record.picture is not None and place < self.worst:
            row["picture"] = f"{PICTURES}/step_{step}_sample_{record.sample}.png"
        return row | (self.outliers[record.sample].row if record.sample in self.outliers else {})

    def write(self, folder: Path) -> None:
        """Write samples.jsonl and the pictures of the worst samples into the folder of a replay.

        Raises:
            TrainingError: a file cannot be written.
        """
        if not self.ranked:
            return
        with explain_write_errors(folder / SAMPLES):
            folder.mkdir(parents=True, exist_ok=True)
            write_lines(folder / SAMPLES, (strict_json(row, ensure_ascii=False) + "\n" for row in self.rows))
        for row, (_, record) in zip(self.rows, self.shown, strict=False):
            if record.picture is not None:
                write_image(folder / row["picture"], record.picture)


# How a sample is shown


def text_of(task: Task, example: Any) -> str:
    """Return a sample as text: its tokens decoded, what the task marks, or the texts that are in it; "" if it is none."""
    columns = token_columns(example)
    if columns and (tokenizer := ask(task, "text_tokenizer", None) if hasattr(type(task), "text_tokenizer") else None):
        return " | ".join(tokenizer.decode(np.asarray(example[name]).tolist(), skip_special_tokens=True) for name in columns)
    if hasattr(type(task), "marked"):
        return "".join(piece for piece, _ in ask(task, "marked", [], example))
    texts = [value for value in example.values() if isinstance(value, str)] if isinstance(example, Mapping) else []
    return " | ".join(texts)


def row_in_data(task: Task, dataset: Any, sample: int) -> Any:
    """Return the row of a training sample in the data, which differs from its number if only some rows are used.

    None if a sample is no row, such as a block of a running text.
    """
    if getattr(task, "samples_are", None) == "blocks":
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
    label, prediction = answer["label"], answer["prediction"]
    if is_by_token(task, label):
        return f"{sum(map(lambda a, b: a != b, label, prediction))} of {len(label)} wrong"
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


def percent(share: float) -> str:
    return "?" if math.isnan(share) else f"{100 * share:.{0 if abs(share) >= 0.1 else 1}f} %"

"""Predicts the rows of a table on the processes of this job, part by part, so that a kill costs one part. Trains nothing.

The rows of a part are sorted by length and dealt to the processes by cost; what a row gets depends on neither.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils.memory import should_reduce_batch_size
from PIL import Image
from rich.text import Text
from torch import nn

from hftune import __version__
from hftune.atomic import atomic_path, write_lines, write_text
from hftune.batch_plan import BatchPlan, MicroBatch, balance
from hftune.build import choose_strategy
from hftune.checkpoints.export import readable
from hftune.commands.predict_data import ABOUT, Job, flat, output_columns, output_rows, parts_folder, stamps
from hftune.config import ParallelConfig, TrackConfig
from hftune.config.sections import FORWARD
from hftune.data.table import WRITTEN, write_table
from hftune.distributed.collectives import Collectives
from hftune.distributed.consistency import check_same, fingerprint
from hftune.distributed.session import Session
from hftune.errors import ConfigError, DataError, TrainingError
from hftune.inference import load_for_all
from hftune.settle import unread_names
from hftune.tracking.console import Bar, duration, is_terminal, note, short
from hftune.tracking.jsonl import read_object, strict_json

PART = 2000
"""Rows that are predicted, and written, together."""
CPU_TOKENS = 2048
"""Padded tokens of a batch on CPUs at most: with more, the activations leave the caches."""
PROGRESS_INTERVAL_S = 10.0
"""Seconds between progress lines when stderr is not a terminal."""

Prediction = dict[str, Any] | None


def compute(job: Job, kind: type[Parts] | None = None) -> bool:
    """Predict all rows and write them. Collective. Return whether this is the main process.

    Args:
        kind: what becomes of the predictions: ``Parts``, or a subclass.

    Raises:
        ConfigError: the model cannot be loaded, or --columns names a column that there is not.
        DataError: a row cannot be predicted.
        TrainingError: the memory does not suffice, or a file cannot be written.
    """
    # Which processes share the work does not depend on how the training was spread, nor do trackers matter.
    recipe = replace(job.recipe, track=TrackConfig(), parallel=ParallelConfig())
    precision = job.mixed_precision or recipe.train.mixed_precision
    recipe = replace(recipe, train=replace(recipe.train, mixed_precision=precision, **FORWARD))
    with Session(recipe) as session:
        session.progress.stage("loading the model")
        model = load_for_all(recipe, job.model)
        group = choose_strategy(session.join(), recipe, session.progress)
        own = fingerprint(recipe) | {"data": {f"--data {job.table.name}": job.table.digest}}
        own["recipe"] |= {f"--{name.replace('_', '-')}": value for name, value in job.compared().items()}
        check_same(group, own)
        unread_names(group, model)
        parts = (kind or Parts)(job)
        if group.is_main:
            for sentence in job.notices:
                print(note(sentence), flush=True)
        waiting = group.on_main(parts.open)
        meter = Meter(group.is_main, len(job.table), len(job.table) - sum(map(len, waiting)))
        try:
            with group.predicting(model) as (usable, finish):
                for part in waiting:
                    session.progress.stage(f"predicting rows {part.start} to {part.stop - 1}")
                    rows = predict_part(job, usable, part, group, meter)
                    finish()
                    gathered = group.gather_to_main(rows)
                    group.on_main(partial(parts.write, part, gathered or ()))
        finally:
            meter.close()
        session.progress.stage(f"writing {job.output}")
        group.on_main(parts.join)
    return group.is_main


def predict_part(job: Job, model: nn.Module, part: range, group: Collectives, meter: Meter) -> list[tuple[int, Prediction]]:
    """Return this process's share of the predictions of some rows, with their numbers. Collective."""
    found: list[tuple[int, Prediction]] = []
    rows_N = np.arange(part.start, part.stop)[~job.empty[part.start : part.stop]]
    max_tokens = CPU_TOKENS if group.device.type == "cpu" else None
    micro_batches = plan(lengths_of(job, rows_N, group), job.batch_size, max_tokens) if len(rows_N) else []
    share = balance([micro_batch.cost for micro_batch in micro_batches], group.num_processes)[group.process_index]
    for index in share:
        numbers = rows_N[micro_batches[index].samples].tolist()
        group.progress.samples(numbers)
        try:
            with naming_rows(job, numbers), torch.no_grad(), group.accelerator.autocast():
                rows = job.predict(model, numbers)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not should_reduce_batch_size(error):
                raise
            raise TrainingError(f"Out of memory with {len(numbers)} rows at a time. Lower --batch-size.") from error
        if len(rows) != len(numbers):
            raise RuntimeError(f"{type(job.recipe.task).__name__}.predict returned {len(rows)} rows for {len(numbers)} inputs.")
        if any(isinstance(value, Image.Image) for row in rows[:1] for value in row.values()):
            raise ConfigError("The predictions are images, which no table holds. Use --input and a folder as --output.")
        found += zip(numbers, rows, strict=True)
        meter.advance(len(numbers) * group.num_processes, part.stop)
    return found


def lengths_of(job: Job, rows_N: np.ndarray, group: Collectives) -> np.ndarray:
    """Return the lengths by which rows are sorted, (N,) int, in tokens or a quarter of their characters. Collective.

    On CPUs they are tokens, although these are counted for nothing else: batches of 32 Yelp reviews, sorted among 2,000, are
    2.5 % padding by tokens and 13 % by characters. GPUs are too fast for that to pay.
    """
    if group.device.type != "cpu":
        return job.sizes[rows_N] // 4 + 1
    shares = np.array_split(rows_N, group.num_processes)
    own = shares[group.process_index]
    with naming_rows(job, own.tolist()):
        counted = job.recipe.task.input_lengths(job.inputs(own.tolist())) if len(own) else []
    if group.any_process(counted is None):
        return job.sizes[rows_N] // 4 + 1
    return np.array(group.broadcast(group.gather_to_main(counted or [])))


@contextmanager
def naming_rows(job: Job, numbers: Sequence[int]) -> Iterator[None]:
    """Name the row of the table in messages on an input, whose index counts among the inputs given."""
    try:
        yield
    except DataError as error:
        said = re.sub(r"^Input (\d+)", lambda match: f"Row {numbers[int(match[1])]}", str(error))
        raise DataError(f"--data {job.table.name}: {said}") from error


def plan(lengths_N: np.ndarray, batch_size: int, max_tokens: int | None) -> list[MicroBatch]:
    """Sort rows by length, the longest first, and cut them into batches: of ``batch_size`` rows and ``max_tokens`` at most."""
    count, lengths_N = len(lengths_N), np.maximum(lengths_N, 1)  # a text may have no token
    tokens = max(max_tokens, int(lengths_N.max())) if max_tokens is not None else None
    sizes: dict[str, Any] = {"micro_batch_size": batch_size, "micro_batch_tokens": tokens}
    return BatchPlan(count, count, **sizes, lengths=lengths_N, shuffle=False).epoch(0)[0]


class Parts:
    """The finished parts in a folder beside the output, from which a killed prediction goes on. Main process only."""

    def __init__(self, job: Job):
        self.job = job
        self.folder = parts_folder(job.output)
        count = len(job.table)
        self.all = [range(start, min(start + PART, count)) for start in range(0, count, PART)]

    def open(self) -> list[range]:
        """Return the parts that are still to be predicted; those of a different prediction are removed."""
        job, path = self.job, self.folder / ABOUT
        about = {
            "input": job.table.digest,
            "model": stamps(readable(job.model)),
            "task": sha256(json.dumps(job.recipe.to_dict()["task"], sort_keys=True, default=str).encode()).hexdigest(),
            "options": {**job.options, "columns": job.columns, "empty": int(job.empty.sum()), "precision": job.mixed_precision},
            "version of hftune": __version__,
        }
        before = read_object(path)
        if self.folder.is_dir() and before != about:
            changed = [name for name in about if before.get(name) != about[name]]
            print(note(f"{self.folder} belongs to a different {' and '.join(changed)}: starting over."), flush=True)
            shutil.rmtree(self.folder)
        self.folder.mkdir(exist_ok=True)
        write_text(path, json.dumps(about))
        waiting = [part for part in self.all if not self.path(part).is_file()]  # they are written atomically
        if len(waiting) < len(self.all):
            done = sum(map(len, self.all)) - sum(map(len, waiting))
            print(note(f"Going on after {done:,} of {len(job.table):,} rows, which are predicted already."), flush=True)
        return waiting

    def path(self, part: range) -> Path:
        return self.folder / f"rows_{part.start:09d}.jsonl"

    def write(self, part: range, gathered: Sequence[tuple[int, Prediction]]) -> None:
        """Write the predictions of a part, in order; at the first one, check the names of the columns."""
        placed: dict[int, Prediction] = dict.fromkeys(part) | dict(gathered)
        if len(gathered) != int((~self.job.empty[part.start : part.stop]).sum()):
            raise RuntimeError(f"{len(gathered)} predictions came back for rows {part.start} to {part.stop - 1}.")
        write_lines(self.path(part), (strict_json(placed[number], ensure_ascii=False) + "\n" for number in part))
        self.columns()

    def rows(self) -> Iterator[Prediction]:
        for path in filter(Path.is_file, map(self.path, self.all)):
            with path.open(encoding="utf-8") as file:
                yield from map(json.loads, file)

    def columns(self) -> dict[str, tuple[str, str]]:
        """Return the columns to write, by what the first prediction has; see ``output_columns``."""
        first = next((row for row in self.rows() if row is not None), {})
        return output_columns(self.job, list(flat(first, "probabilities" in self.job.options)))

    def table(self) -> tuple[list[str], Iterator[dict[str, Any]], dict[str, Any]]:
        """Return columns and rows of the output, and the features of those columns that are of the data."""
        columns = self.columns()
        renamed = [name for name, (source, own) in columns.items() if source == "data" and name != own]
        if self.job.selected is None and renamed:
            print(note(f"The data's own values are in {', '.join(renamed)}."), flush=True)
        of_data = {name: own for name, (source, own) in columns.items() if source == "data"}
        features = {name: self.job.table.rows.features[own] for name, own in of_data.items()}
        return list(columns), output_rows(self.job, columns, self.rows()), features

    def join(self) -> None:
        columns, rows, features = self.table()
        try:
            with atomic_path(self.job.output) as temporary:
                write_table(temporary, WRITTEN[self.job.output.suffix.lower()], columns, rows, features)
        except OSError as error:
            raise TrainingError(f"{self.job.output} cannot be written: {error.strerror or error}.") from error
        shutil.rmtree(self.folder, ignore_errors=True)


class Meter:
    """Shows how far the prediction is, on the main process: a bar on a terminal, a line now and then elsewhere."""

    def __init__(self, enabled: bool, total: int, done: int):
        self.total, self.done, self.first = total, done, done
        self.began = self.said = time.monotonic()
        self.enabled = enabled
        self.bar = Bar(sys.stderr) if enabled and is_terminal(sys.stderr) else None
        if self.bar is not None:
            self.bar.open()

    def advance(self, count: int, most: int) -> None:
        """Note that all processes together have predicted about ``count`` more rows, and no row after ``most``."""
        self.done = min(self.done + count, most)
        now, label = time.monotonic(), f"row {self.done:,}/{self.total:,}"
        per_s = max((self.done - self.first) / max(now - self.began, 1e-6), 1e-6)
        cells = [f"{duration((self.total - self.done) / per_s)} left", f"{short(per_s)} rows/s"]
        if self.bar is not None and self.bar.is_due():
            self.bar.draw(label, self.done, self.total, map(Text, cells))
        elif self.bar is None and self.enabled and now - self.said > PROGRESS_INTERVAL_S:
            self.said = now
            print("  ".join([label, *cells]), flush=True)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()

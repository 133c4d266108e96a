"""``hftune predict --data``: what is predicted for which rows, and where it goes; checked before torch is imported.

``commands/predict_rows.py`` computes it, on all processes.
"""

from __future__ import annotations

import argparse
import inspect
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hftune.commands.arguments import argv_of_one
from hftune.config.recipe import Recipe, type_name
from hftune.data.columns import TEXTS, Role, is_number, is_text
from hftune.data.files import PACKED
from hftune.data.table import CHUNK, WRITTEN, Table, read_table, writable
from hftune.distributed.process_info import ProcessInfo
from hftune.errors import ConfigError, DataError, did_you_mean, first_few
from hftune.task import Task

if TYPE_CHECKING:
    import numpy as np
    from torch import nn

ABOUT = "about.json"
"""What unfinished predictions depend on, in the folder of their parts."""
PATHS = {"image": "an image", "mask": "an image", "audio": "a recording"}
"""Inputs that a table may name by their paths."""


@dataclass
class Job:
    """What to predict. The same on every process."""

    recipe: Recipe
    model: Path
    table: Table
    columns: dict[str, str]
    """Of the table, by what the task calls them."""
    sizes: np.ndarray
    """(N,) int64: characters of each input, to sort by; 1 for images and recordings."""
    empty: np.ndarray
    """(N,) bool: rows without a prediction."""
    output: Path
    selected: list[str] | None
    """Columns to write; None for all."""
    options: dict[str, Any]
    """Arguments of ``Task.predict``."""
    batch_size: int
    mixed_precision: Literal["no", "bf16", "fp16"] | None
    """None: that of the run's evaluations."""
    notices: list[str]
    """What a user should know, one sentence each."""

    def inputs(self, rows: Sequence[int]) -> list[Any]:
        found = self.table.rows.select_columns(list(self.columns.values()))[list(rows)]
        values = {role: found[column] for role, column in self.columns.items()}
        for role in PATHS.keys() & values.keys():
            values[role] = [located(self.table, value) for value in values[role]]
        return self.recipe.task.raw_inputs(values)

    def compared(self) -> dict[str, Any]:
        """Return what must be the same on all processes besides recipe and rows, by option, JSON-serializable."""
        return self.options

    def predict(self, model: nn.Module, numbers: Sequence[int]) -> list[dict[str, Any]]:
        """Return the predictions for the rows with these numbers."""
        return self.recipe.task.predict(model, self.inputs(numbers), **self.options)


def located(table: Table, value: Any) -> Any:
    """Return the path of an image or recording beside the table's file, or as it is; anything else unchanged."""
    if not isinstance(value, str):
        return value
    beside = (table.folder or Path()) / value
    return beside if beside.exists() else Path(value)


def prepare(options: argparse.Namespace, reads: Callable[[Task], Mapping[str, str | None]] | None = None) -> Job:
    """Check the arguments, and every row.

    Args:
        reads: returns what is read of a row, for a task, or refuses it; by default its ``input_columns``.

    Raises:
        ConfigError, DataError: they cannot be predicted, or not be written.
    """
    check_output(options.output)
    data = Path(options.data).expanduser()
    if data.is_file() and options.output.exists() and options.output.samefile(data):
        raise ConfigError(f"--output {options.output} is the table itself, which would be overwritten. Name a different file.")
    if bad := [word for word in options.map if not re.fullmatch(r"[^=]+=.+", word)]:
        raise ConfigError(f"--map {bad[0]} is not NAME=COLUMN, such as --map text=review.")
    given = dict(word.split("=", 1) for word in options.map)
    from hftune.checkpoints.export import read_about, readable
    from hftune.checkpoints.run_folder import check_answers, open_run
    from hftune.tracking.console import hide_reports

    recipe, model = open_run(options.folder, options.trust_code)
    task = recipe.task
    check_answers(task)
    check_probabilities(task, options.probabilities)
    wanted = task.input_columns() if reads is None else reads(task)
    hide_reports()
    trained_on = read_about(readable(model)).get("columns", {})
    rows = read_table(options.data, getattr(task, "dataset_config", None), audio="audio" in wanted)
    table = flattened(rows, wanted, {**given, **trained_on})
    columns = find_columns(task, table, given, trained_on, wanted)
    sizes, empty = scan(table, columns)
    names = " or ".join(map(repr, columns.values()))
    if empty.all():
        raise DataError(f"--data {table.name}: no row has an input in column {names}.")
    if empty.any() and options.empty == "refuse":
        raise DataError(
            f"--data {table.name} has no input in column {names} at row {first_few(empty.nonzero()[0].tolist())} (counted "
            "from 0). Fill them in; or give them no prediction: --empty null."
        )
    return Job(
        recipe,
        model,
        table,
        columns,
        sizes,
        empty,
        options.output,
        selected=None if options.columns is None else [name.strip() for name in options.columns.split(",")],
        options={"probabilities": True} if options.probabilities else {},
        batch_size=options.batch_size or recipe.eval.batch_size,
        mixed_precision=options.mixed_precision,
        notices=[
            f"Predicting from column {column!r} as the {name}. --map {name}=COLUMN names a different one."
            for name, column in columns.items()
            if name not in given and column not in (wanted[name], trained_on.get(f"{name}_column"))
        ],
    )


def compute(job: Job, options: argparse.Namespace, module: str) -> int:
    """Compute a job on the processes of this job, or on those that --processes starts, and print where its output is.

    Args:
        module: that imports torch, and whose ``compute`` takes the job and says whether this is the main process.
    """
    if options.processes is not None:
        from hftune.launchers.local import start_processes

        words = [*argv_of_one(options), f"--output={options.output}"]
        start_processes("hftune.cli", words, options.processes, (module, *job.recipe.task.libraries))
    elif import_module(module).compute(job):  # only once everything has been checked
        print(options.output, flush=True)
    return 0


def check_output(path: Path | None) -> None:
    """Raise ConfigError if the predictions have nowhere to go, or something would be removed that is not theirs."""
    if path is None:
        raise ConfigError(f"--data needs a file for the predictions: --output FILE ({', '.join(WRITTEN)}).")
    if path.suffix.lower() not in WRITTEN:
        packed = " Compress it afterwards." if path.suffix.lower() in PACKED else ""
        raise ConfigError(f"--output {path}: its name does not end in one of {', '.join(WRITTEN)}.{packed}")
    if path.is_dir():
        raise ConfigError(f"--output {path} is a folder. Name a file.")
    if not ProcessInfo.from_environment().is_main:
        return
    folder, parts = path.resolve().parent, parts_folder(path)
    if not folder.is_dir():
        raise ConfigError(f"--output {path}: there is no folder {folder}. Create it.")
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"--output {path} cannot be written: no permission for {folder}.")
    if parts.exists() and not (parts / ABOUT).is_file() and not (parts.is_dir() and not any(parts.iterdir())):
        raise ConfigError(
            f"{parts} has the name of the folder for unfinished predictions, but holds something else. Move it away, or name "
            "a different --output."
        )


def parts_folder(output: Path) -> Path:
    """Return the folder of the finished parts, beside the output."""
    return output.with_name(f"{output.name}.parts")


def stamps(folder: Path) -> list[list[Any]]:
    """Return name, bytes and time of change of each file of a model."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    return sorted([str(file.relative_to(folder)), file.stat().st_size, file.stat().st_mtime_ns] for file in files)


def check_probabilities(task: Task, asked: bool) -> None:
    """Raise ConfigError if probabilities are asked for that the task does not have."""
    if asked and "probabilities" not in inspect.signature(type(task).predict).parameters:
        raise ConfigError(f"--probabilities: {type_name(type(task))} predicts no classes. Leave it out.")


def flattened(table: Table, wanted: Mapping[str, str | None], given: Mapping[str, str]) -> Table:
    """Give the texts of a column with several, such as translation, columns of their own if one of them is read."""
    names = {column for column in (*wanted.values(), *given.values()) if column is not None}
    is_nested = any(column.partition(".")[0] in table.columns for column in names - {*table.columns})
    return replace(table, rows=table.rows.flatten()) if is_nested else table


def find_columns(
    task: Task,
    table: Table,
    given: Mapping[str, str],
    trained_on: Mapping[str, str],
    wanted: Mapping[str, str | None],
) -> dict[str, str]:
    """Return the table's columns that are ``wanted``, by name, as ``Task.input_columns`` says what a task predicts from.

    Each is what ``given`` (--map) says, or the recipe, or the column that was trained on (see ``Task.read_columns``); or else
    the only one that it can be.

    Raises:
        ConfigError: the task reads no columns, or ``given`` names something else than its columns.
        DataError: a column is missing, or holds numbers.
    """
    columns, features = table.columns, table.rows.features
    if not wanted:
        raise ConfigError(
            f"{type_name(type(task))} does not say which columns of a table it predicts from. Give it a method input_columns."
        )
    if odd := [name for name in given if name not in wanted]:
        raise ConfigError(f"--map {odd[0]}={given[odd[0]]}: this task's inputs are called {', '.join(wanted)}.")
    has, found = f"It has: {', '.join(columns)}.", {}
    texts = [column for column in columns if is_text(features[column])]
    for name, column in wanted.items():
        role, same = task.columns.get(name, Role("text", TEXTS)), trained_on.get(f"{name}_column")
        usual = same if column is None and same in columns else column
        named = [column for column in columns if column in (name, *role.usual)]
        known = [column for column in columns if column in role.usual_inputs]
        guesses = [guess for guess in (named, known, texts) if len(guess) == 1] if usual is None else []
        if (asked := given.get(name)) is not None and asked not in columns:
            raise DataError(f"--map {name}={asked}: {table.name} has no such column. {has}{did_you_mean(asked, columns)}")
        if asked is not None or usual in columns:
            found[name] = asked or usual
        elif guesses or len(columns) == 1:
            found[name] = (guesses or [columns])[0][0]
        else:
            could_be = "several columns that could be" if len(texts) > 1 or named or known else "no column that could be"
            what = f"no column {usual!r}" if usual is not None else f"{could_be} the {name}"
            raise DataError(f"--data {table.name} has {what}. {has} Name the right one: --map {name}=COLUMN.")
        if name not in PATHS and is_number(features[found[name]]):
            raise DataError(
                f"--data {table.name}: column {found[name]!r} holds numbers, not texts. Name a different one: "
                f"--map {name}=COLUMN."
            )
    return found


def scan(table: Table, columns: Mapping[str, str]) -> tuple[np.ndarray, np.ndarray]:
    """Return the size of each row's input, (N,) int64, and whether it is empty, (N,) bool.

    Raises:
        DataError: an image or recording that a row names is not there.
    """
    import datasets
    import numpy as np

    names = list(columns.values())
    rows = table.rows.select_columns(names)
    for name in names:
        if isinstance(rows.features[name], datasets.Image):
            rows = rows.cast_column(name, datasets.Image(decode=False))
    sizes, empty = np.ones(len(rows), np.int64), np.zeros(len(rows), bool)
    for start in range(0, len(rows), CHUNK):
        chunk = rows[start : start + CHUNK]
        for role, name in columns.items():
            for index, value in enumerate(chunk[name], start):
                empty[index] |= value is None or value == [] or (isinstance(value, str) and not value.strip())
                if role not in PATHS:
                    sizes[index] += size(value)
                elif isinstance(value, str) and value and not located(table, value).is_file():
                    raise DataError(f"--data {table.name} names {PATHS[role]} that is not there, at row {index}: {value}.")
    return sizes, empty


def size(value: Any) -> int:
    """Return the number of characters of a text, or of the texts of a list."""
    return len(value) if isinstance(value, str) else sum(map(size, value)) if isinstance(value, list) else 0


def flat(row: Mapping[str, Any], probabilities: bool = True) -> dict[str, Any]:
    """Return a prediction as cells: the probabilities of the classes each in a column, named after its class, or nowhere.

    That of a class whose name is taken, such as "label", is in NAME_probability.
    """
    others = {name: value for name, value in row.items() if name != "probabilities"}
    shares = row.get("probabilities", {}) if probabilities else {}
    taken = {*others, *shares}
    return {
        **{free(name, "_probability", taken) if name in others else name: share for name, share in shares.items()},
        **others,
    }


def free(name: str, suffix: str, taken: Collection[str]) -> str:
    """Append the suffix to a name, again until it is not taken."""
    while name in taken:
        name += suffix
    return name


def output_columns(job: Job, fields: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return the columns to write, each with where it comes from ("data" or "prediction") and its name there.

    A column of the data that is called as one of the predictions is written as NAME_given; see ``free``.

    Args:
        fields: names of what is predicted.

    Raises:
        ConfigError: --columns names one that there is not.
    """
    features = job.table.rows.features
    data = [name for name in job.table.columns if writable(features[name])]
    taken = {*fields, *data}
    there = {free(name, "_given", taken) if name in fields else name: ("data", name) for name in data}
    there |= {name: ("prediction", name) for name in fields}
    if job.selected is None:
        return there
    if missing := [name for name in job.selected if name not in there]:
        hint = did_you_mean(missing[0], there)
        raise ConfigError(f"--columns: there is no column {missing[0]!r}. There are: {', '.join(there)}.{hint}")
    return {name: there[name] for name in job.selected}


def output_rows(
    job: Job, columns: Mapping[str, tuple[str, str]], predictions: Iterator[Mapping[str, Any] | None]
) -> Iterator[dict[str, Any]]:
    """Yield the rows to write, in the order of the data; ``predictions`` has one for each row, None for an empty input."""
    given = [name for source, name in columns.values() if source == "data"]
    rows, count = job.table.rows.select_columns(given), len(job.table)
    for start in range(0, count, CHUNK):
        stop = min(start + CHUNK, count)
        chunk = rows[start:stop] if given else {}
        for index in range(stop - start):
            prediction = flat(next(predictions) or {}, "probabilities" in job.options)
            yield {
                name: chunk[source_name][index] if source == "data" else prediction.get(source_name)
                for name, (source, source_name) in columns.items()
            }

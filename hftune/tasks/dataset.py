"""The base of tasks on a data set of the user's: the keys that say where its rows come from, its splits, and its columns.

datasets is imported inside the methods, so that mistyped recipes are refused without waiting for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from hftune.config.keys import key
from hftune.data.columns import Role, check_column, chosen, find_columns, is_label
from hftune.data.files import model_commit
from hftune.data.hub import known
from hftune.data.sources import (
    INSTEAD,
    NO_EVAL_DATA,
    Source,
    held_out_key,
    held_out_problems,
    names_eval_data,
    set_entry,
    set_problems,
    set_source,
)
from hftune.errors import format_value
from hftune.task import Task

if TYPE_CHECKING:
    from datasets import Dataset

    from hftune.data.mixture import Mixture


@dataclass
class DatasetTask(Task):
    """A task whose samples are the rows of a data set, or are made of them. A subclass names the columns by their roles."""

    dataset: str | None = key(None, changes="data")
    """Data set name on the Hub (owner/name), or module:function that returns rows, or, with query, the URL of a database. With
    data_files: their format (json, csv, parquet, arrow or text), only needed if their suffixes do not show it."""
    dataset_revision: str | None = key(None, changes="data")
    """Commit, tag or branch of the data set on the Hub, such as refs/convert/parquet. null: the newest commit."""
    dataset_config: str | None = key(None, changes="data")
    """Configuration (subset) of the data set on the Hub, if it has several. null: the only one."""
    data_dir: str | None = key(None, changes="data")
    """Folder of the Hub repository to read instead of the whole repository, if its README does not list its files."""
    data_files: dict[str, Any] | None = key(None, changes="data", inside={"eval": "output", "test": "output"})
    """Your own files: data_files.train, data_files.eval and, optionally, data_files.test, each a path, a glob or a list of
    them. Used instead of dataset. Without eval, set eval_share, or eval.every=never."""
    storage_options: dict[str, Any] = key(dict, changes="nothing", resume="harmless")
    """What fsspec is given to reach data_files that are elsewhere, such as endpoint_url for s3://. By default, what the
    environment says counts. A secret must be a reference, such as secret: ${oc.env:KEY}."""
    sheet: str | None = key(None, changes="data")
    """Sheet to read of data_files that are Excel files. null: the first."""
    query: dict[str, Any] | None = key(None, changes="data", inside={"eval": "output", "test": "output"})
    """If dataset is the URL of a database, such as sqlite:///reviews.db: what selects the rows, query.train, query.eval and,
    optionally, query.test, each with ORDER BY. Without eval, set eval_share, or eval.every=never."""
    train_split: str = key("train", changes="data")
    """Split of the data set to train on."""
    eval_split: str | None = key("validation", changes="output")
    """Split of the data set to evaluate on while training, and to choose the best model by."""
    test_split: str | None = key(None, changes="output")
    """Split of the data set on which the best model is evaluated once, at the end. null: none, unless there are
    data_files.test."""
    eval_share: float | None = key(None, changes="data")
    """Share of the training rows to hold out and evaluate on, such as 0.1, if there are no evaluation data: random rows, the
    same in every run, of each class its share. null: the evaluation data are files or a split of their own."""
    eval_fold: list[int] | None = key(None, changes="data")
    """Instead of eval_share, one of several folds: its number, from 0, and the number of folds, such as [0, 5].
    max_train_samples are then the rows of all folds together. `hftune folds` sets it; it takes neither language models nor
    images with masks."""
    max_train_samples: int | None = key(None, ge=1, changes="data")
    """Number of training rows to use, a random subset that is the same in every run. null: all."""
    max_eval_samples: int | None = key(None, ge=1, changes="output")
    """Number of evaluation rows to use, a random subset that is the same in every run. null: all."""

    columns: ClassVar[Mapping[str, Role]] = {}
    """The columns that the task reads, by the names of their fields without ``_column``, those of raw inputs first."""
    default_share: ClassVar[float | None] = None
    """What ``eval_share`` is if nothing else provides evaluation data. None: such a recipe is refused."""
    texts_run_on: ClassVar[bool] = False
    """Whether the rows are pieces of a running text, of which consecutive ones are held out, not random ones."""
    rows_are: ClassVar[str] = "rows"
    """What notices call the rows."""
    num_repeated = 0
    """Training rows that are left out because they equal an earlier one."""
    instead_of_hub: ClassVar[str] = INSTEAD
    """Keys to set if the Hub cannot be reached."""

    def validate(self) -> list[str]:
        return [*self.field_problems()]

    def field_problems(self) -> Iterator[str]:
        """Yield what is wrong with the fields, for ``validate``."""
        yield from self.data_problems()
        yield from set_problems(self)
        for field in ("label_names", "label_columns"):
            for name, count in Counter(getattr(self, field, None) or ()).items():
                if count > 1:  # classes of one name could not be told apart
                    yield f"task.{field} lists {format_value(name)} {count} times. Give each class a name of its own."

    def data_problems(self) -> Iterator[str]:
        """Yield what is wrong with the keys that say where the rows come from, and which of them are evaluated on."""
        yield from held_out_problems(self)
        needs_eval = self.evaluates and self.default_share is None and held_out_key(self) is None
        yield from self.source.problems(needs_eval)
        if needs_eval and self.eval_split is None and not self.data_files and ":" not in (self.dataset or ""):
            yield f"task.eval_split=null names no evaluation data. Name a split, {NO_EVAL_DATA}."

    # Where the rows come from

    @cached_property
    def source(self) -> Source:
        """Where the rows come from."""
        return Source(
            *(self.dataset, self.data_files, self.data_dir, self.dataset_config, self.dataset_revision),
            instead=self.instead_of_hub,
            options=self.storage_options,
            queries=self.query,
            sheet=self.sheet,
        )

    @cached_property
    def set_sources(self) -> dict[str, Source]:
        """Where the rows of each of ``eval.sets`` come from, by split: "eval/NAME"."""
        return {f"eval/{name}": set_source(self, name) for name in self.eval_sets}

    def source_of(self, split: str) -> Source:
        """Return where the rows of a split come from."""
        return self.set_sources.get(split, self.source)

    @cached_property
    def model_commit(self) -> str | None:
        """Commit of the model that is loaded from the Hub; None for folders and new models."""
        return model_commit(self.model, self.model_revision) if hasattr(self, "model") else None

    def commits(self) -> dict[str, str]:
        sets = {source.dataset_key: source.commit for source in self.set_sources.values()}
        return known({"task.model": self.model_commit, **sets, "task.dataset": self.source.commit})

    @property
    def source_splits(self) -> dict[str, str]:
        """Names of the splits in the data set, by split; that of the training rows for those that are held out of them.

        Files have no names of splits; a function is called with "train", "eval" and "test".
        """
        splits = {"train": self.train_split}
        if self.evaluates:
            is_held_out = held_out_key(self) is not None or self.eval_split is None
            splits["eval"] = self.train_split if is_held_out else str(self.eval_split)
        named = self.data_files or self.query
        if "test" in named if named else None not in (self.test_split, self.dataset):
            splits["test"] = self.test_split or ""
        sets = {f"eval/{name}": str(set_entry(self, name).get("split") or "train") for name in self.eval_sets}
        return {**splits, **sets}

    @property
    def held_out_share(self) -> float | None:
        """Share of the training rows to evaluate on; None if others are named, or none are needed."""
        is_default = self.eval_share is None and self.eval_fold is None and self.evaluates and not names_eval_data(self)
        return self.default_share if is_default else self.eval_share

    @property
    def row_counts(self) -> dict[str, int | None]:
        """Number of rows to use, by split; None for all."""
        counts = {"train": self.max_train_samples, "eval": self.max_eval_samples, "test": None}
        return {**counts, **dict.fromkeys(self.set_sources, self.max_eval_samples)}

    @property
    def mixed(self) -> Mixture | None:
        """The data sets that the training rows consist of; None if there is one."""
        return None

    def load_source(self, split: str, source_split: str) -> Dataset:
        """Return all rows of a split of the data set, for a split ("train", "eval", "eval/NAME" or "test") of the recipe."""
        from hftune.data.rows import load_split

        return load_split(self.source_of(split), split, source_split)

    @cached_property
    def unchecked_rows(self) -> dict[str, Dataset]:
        """The rows of each split, before their columns have been checked."""
        from hftune.data.mixture import renamed
        from hftune.data.rows import take
        from hftune.data.splits import Split

        splits = {name: Split.of(self, name, self.row_counts, self.texts_run_on) for name in self.source_splits}
        sources: dict[str, Dataset] = {}
        for split, source_split in self.source_splits.items():
            is_held_out = split == "eval" and splits[split].holds_out
            sources[split] = sources["train"] if is_held_out else self.load_source(split, source_split)
            if split in self.set_sources:
                entry = set_entry(self, split.removeprefix("eval/"))
                sources[split] = renamed(entry, self.source_of(split), sources[split], split)
        train = sources["train"]
        label_column = self.stratify_by(train) if any(split.holds_out for split in splits.values()) else None
        sizes = None if self.mixed is None else [*map(len, self.mixed.sources)]
        return {
            split: take(rows, splits[split], label_column, sizes if rows is train else None) for split, rows in sources.items()
        }

    # Which columns are read

    def find_columns(self, rows: Dataset) -> dict[str, str]:
        """Return the columns of the training rows that the task reads, by their fields: by default as ``columns`` says.

        Fields whose names end in ``_column`` without a role name columns that must exist.
        """
        others = [item.name for item in fields(self) if item.name.endswith("_column")]
        others = [name for name in others if name.removesuffix("_column") not in self.columns]
        named = {name: column for name in others if (column := getattr(self, name)) is not None}
        return {**find_columns(self.columns, self, rows), **named}

    @cached_property
    def read_columns(self) -> dict[str, str]:
        """The columns that are read, by their fields."""
        return self.find_columns(self.unchecked_rows["train"])

    def columns_for(self, name: str) -> list[str]:
        """Return the columns with a role."""
        one, several = f"{name}_column", f"{name}_columns["
        return [column for field, column in self.read_columns.items() if field == one or field.startswith(several)]

    @property
    def text_columns_read(self) -> list[str]:
        """The columns that must hold texts."""
        return [column for name, role in self.columns.items() if role.kind == "text" for column in self.columns_for(name)]

    def stratify_by(self, rows: Dataset) -> str | None:
        """Return the column of the classes, of each of which ``eval_share`` is held out; None: of any rows.

        Args:
            rows: the training split.
        """
        column = self.find_columns(rows).get("label_column")
        return column if column is not None and is_label(rows.features[column]) else None

    @cached_property
    def rows(self) -> dict[str, Dataset]:
        """The rows of each split, whose columns have been checked."""
        for split, rows in self.unchecked_rows.items():
            for name, column in self.read_columns.items():
                check_column(rows, f"task.{name}", column, split)
        self.check_rows(self.unchecked_rows)
        return self.unchecked_rows

    def check_rows(self, rows: Mapping[str, Dataset]) -> None:
        """Raise DataError if the columns do not hold what the task needs."""

    def row_of(self, split: str) -> Callable[[int], Any]:
        """Return a function that translates an index of a split to the row of the data, for messages."""
        from hftune.data.rows import row_numbers

        def name(index: int) -> Any:
            (row,) = row_numbers(self.rows[split], [index])
            is_trained_on = split == "train" or (split == "eval" and held_out_key(self) is not None)
            return self.mixed.row_name(row) if self.mixed is not None and is_trained_on else row

        return name

    @property
    def fold_rows(self) -> list[int] | None:
        from hftune.data.rows import row_numbers

        return row_numbers(self.rows["eval"], range(len(self.rows["eval"]))) if self.eval_fold else None

    @property
    def fold_data(self) -> str | None:
        from hftune.data.rows import digest_of_all

        return digest_of_all(self.rows["eval"]) if self.eval_fold else None

    # What is said of them

    def row_notices(self) -> list[str]:
        """Return notices of keys without effect, of columns that were chosen, and of rows held out or left out."""
        from hftune.data import notices

        rows, what = self.rows, self.rows_are
        counts = {split: notices.num_rows(own) for split, own in rows.items()}
        counts["train"] = counts["train"][0], counts["train"][1] - self.num_repeated
        limited = {} if self.eval_fold else {split: counts[split] for split in rows if self.row_counts[split] is not None}
        messages = notices.ignored_splits(self)
        for name, column in self.read_columns.items():
            messages += chosen(f"task.{name}", getattr(self, name, column), column, rows["train"].column_names)
        messages += notices.held_out(self, counts["train"][1], what)
        return messages + notices.left_out(limited, what)

    def input_columns(self) -> dict[str, str | None]:
        found: dict[str, str | None] = {}
        for name in (name for name, role in self.columns.items() if "predict" not in role.optional_in):
            several = getattr(self, f"{name}_columns", None) or ()
            found |= {column: column for column in several} or {name: getattr(self, f"{name}_column", None)}
        return found

    def some_rows(self) -> Dataset:
        """Return the first two rows that are evaluated on, or else trained on, as examples."""
        rows = self.rows.get("eval", self.rows["train"])
        return rows.select(range(min(2, len(rows))))

    def example_inputs(self) -> list:
        """Return what ``some_rows`` hold in the ``input_columns``, as raw inputs."""
        columns = [self.some_rows()[self.read_columns.get(f"{name}_column", name)] for name in self.input_columns()]
        return list(columns[0]) if len(columns) == 1 else [list(values) for values in zip(*columns, strict=True)]

"""What tasks on images and recordings share: keys for folders of files, and the classes of what they classify.

datasets is imported inside the methods, so that mistyped recipes are refused without waiting for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from hftune.config.keys import key
from hftune.data.columns import check_kind
from hftune.data.sources import FOLDER_FORMATS, folder_problems, held_out_key
from hftune.tasks.dataset import DatasetTask
from hftune.tasks.problems import SingleLabel

if TYPE_CHECKING:
    from datasets import Dataset
    from torch import Tensor, nn
    from transformers import PreTrainedConfig

    from hftune.data.labels import Classes
    from hftune.task import Batch


@dataclass
class FolderTask(DatasetTask):
    """A task whose data set may be a folder of files, of which a tenth is held out unless evaluation data are named."""

    eval_split: str | None = key(None, changes="output")
    """Split of the data set to evaluate on while training, and to choose the best model by, such as validation. null: samples
    held out of the training samples, unless data_files.eval or a function provides others."""
    eval_share: float | None = key(None, changes="data")
    """Share of the training samples to hold out and evaluate on: random ones, the same in every run, of each class its share.
    null: 0.1 if nothing else provides evaluation data."""

    default_share = 0.1
    folder_keys: ClassVar[Sequence[str]] = ()
    """Keys of splits that a folder of idx files must have."""

    def data_problems(self) -> Iterator[str]:
        dataset = self.dataset or ""
        if self.eval_split is not None and (held_out := held_out_key(self)) and not self.data_files and ":" not in dataset:
            yield (
                f"{held_out} takes evaluation {self.rows_are} from the training {self.rows_are}, but "
                f"task.eval_split={self.eval_split} names others. Set one of them to null."
            )
        yield from super().data_problems()
        splits = {f"task.{name}": value for name in self.folder_keys if (value := getattr(self, name)) is not None}
        if self.data_dir is not None or not self.data_files:
            yield from folder_problems(dataset, self.data_dir, splits)

    def check_rows(self, rows: Mapping[str, Dataset]) -> None:
        for split, own in rows.items():
            for name, role in self.columns.items():
                for column in self.columns_for(name) if role.kind == "image" else ():
                    check_kind(own, column, split, "image")

    def row_notices(self) -> list[str]:
        # The columns of folders always have the same names.
        return [line for line in super().row_notices() if "chosen from" not in line or self.dataset not in FOLDER_FORMATS]


class Pretrained(FolderTask):
    """What tasks share that have a model of transformers for such samples, with the fields model, model_config."""

    auto_class: ClassVar[str] = ""
    """Of transformers, which finds the models that do what the task is."""
    does: ClassVar[str] = ""
    """What these models do, for messages."""
    examples: ClassVar[str] = ""
    """Names of such models, for messages."""

    @property
    def _model_name(self) -> str:
        """The key and value that name the model, for messages."""
        return f"task.model={self.model}" if self.model is not None else "task.model_config"

    def checked_config(self) -> PreTrainedConfig:
        """Return the config of the model that the recipe names, or of the new model, as it is before it knows the data.

        Raises:
            ConfigError: transformers has no such model for the task.
        """
        from hftune.models.image_processor import check_does
        from hftune.models.pretrained import load_config

        config = load_config(self.model, self.model_config, self.model_commit)
        check_does(config, self.auto_class, self._model_name, self.does, self.examples)
        return config


class Classified(FolderTask):
    """What tasks share that classify such samples, with the fields label_column, label_names and label_smoothing."""

    @cached_property
    def _raw_labels(self) -> dict[str, list[Any]]:
        from hftune.data.labels import read_labels

        column = self.read_columns["label_column"]
        return {split: read_labels(rows, column, split, self.row_of(split)) for split, rows in self.rows.items()}

    @cached_property
    def _classes(self) -> Classes:
        from hftune.data.labels import Classes, class_names, names_of

        def find() -> list[str]:
            elsewhere = [label for split, labels in self._raw_labels.items() if split != "train" for label in labels]
            return class_names(self._raw_labels["train"], "train", self.row_of("train"), elsewhere=elsewhere)

        feature = self.rows["train"].features[self.read_columns["label_column"]]
        return Classes.of(self.label_names, names_of(feature), find)

    @property
    def labels(self) -> Sequence[str]:  # type: ignore[override]  # known only with the data
        """Class names in the order of the class numbers."""
        return self.label_names or self._classes.names

    def class_numbers(self) -> dict[str, list[int]]:
        """Return the class number of each sample, by split.

        Raises:
            DataError: a label is not one of the classes, or a class has no training samples.
        """
        from hftune.data.labels import check_learnt

        rows = self.rows["train"]
        numbers = {split: self._classes.numbers(own, split, self.row_of(split)) for split, own in self._raw_labels.items()}
        if not self.label_names and (self.max_train_samples is None or len(rows) == rows.data.num_rows):
            check_learnt(numbers, self.labels, self.row_of, self.rows_are)
        return numbers

    def class_counts(self, dataset: Any) -> dict[str, int]:
        return self._classes.counts(self.numbers_of(dataset))

    def numbers_of(self, dataset: Any) -> Sequence[int]:
        """Return the class number of each sample of a split that ``datasets`` returned."""
        return dataset.labels

    @property
    def fold_data(self) -> str | None:
        """Digest of the labels of all samples: reading the files would take long."""
        from hftune.data.digest import content_digest
        from hftune.data.rows import row_numbers

        if not self.eval_fold:
            return None
        rows = self.rows["eval"]
        numbers = sorted(row for own in (self.rows["train"], rows) for row in row_numbers(own, range(len(own))))
        labels = rows.data.column(self.read_columns["label_column"]).to_pylist()
        return content_digest([(row, str(labels[row])) for row in numbers])

    @property
    def _problem(self) -> SingleLabel:
        return SingleLabel(self.labels, label_smoothing=self.label_smoothing)

    def loss(self, outputs: Any, target: Tensor) -> Tensor:
        return self._problem.loss(logits(outputs), target)

    def predictions(self, outputs: Any, model: nn.Module, batch: Batch) -> list[dict[str, Any]]:
        """Return rows of label and prediction (class numbers), the probabilities of both, and the loss."""
        return self._problem.rows(logits(outputs), batch["labels"])

    def describe(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return self._problem.describe(rows)

    def caption(self, row: Mapping[str, Any]) -> str:
        return f"{row['label']}, predicted {row['prediction']} ({row['probability']:.2f})"

    def metrics(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        return self._problem.metrics(rows)


def logits(outputs: Any) -> Tensor:
    """Return the logits (N, K) of a network, which returns them, or of a model of transformers."""
    return getattr(outputs, "logits", outputs)


def head_notice(name: str, config: PreTrainedConfig, labels: Sequence[str]) -> str:
    """Say whether the model that ``name`` names keeps its head, whose classes are in its config."""
    theirs = [config.id2label[number] for number in range(config.num_labels)]
    if theirs == list(labels):
        return f"{name} has the same classes: its head is kept, if it has one."
    if len(theirs) == len(labels):
        return f"{name} has as many classes, but other names ({', '.join(theirs[:3])}, ...): its head is kept, if it has one."
    return f"{name} gets a new head, for {len(labels)} classes instead of {len(theirs)}."

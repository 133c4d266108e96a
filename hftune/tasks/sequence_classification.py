"""Text classification, such as Yelp's stars, topics or sentiment, with AutoModelForSequenceClassification.

torch, transformers and datasets are imported inside the methods, so that mistyped recipes are refused without waiting for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from hftune.tasks.classification import count_classes, evaluation_rows, most_probable, named
from hftune.tasks.text import TextTask, beginning

if TYPE_CHECKING:
    import numpy as np
    from datasets import Dataset
    from torch import Tensor
    from transformers import PreTrainedModel

    from hftune.task import Batch, Direction


@dataclass
class SequenceClassification(TextTask):
    """Classify texts. The loss is cross-entropy; an item is a text."""

    model: str | None = "google-bert/bert-base-cased"
    """Model name on the Hub (owner/name) or local folder. null: a new model built from model_config, with a WordPiece tokenizer
    trained on the texts."""
    eval_split: str = "test"
    """Split of the data set on the Hub to evaluate on."""
    text_column: str | None = None
    """Column of the texts. null: text, or another usual name, or the only column of texts."""
    label_column: str | None = None
    """Column of the labels: class numbers from 0, or class names. null: label, or another usual name, or the only column that
    may hold labels."""
    label_names: list[str] | None = None
    """Class names in the order of the class numbers: the names that the data set uses, in any order, or a new name for each of
    its classes, in the data set's order. null: the data set's names, or else the distinct labels of the training split."""
    ordinal: bool = False
    """Whether the classes are grades, such as stars, and label_names lists them from lowest to highest. Adds the metric mae,
    the mean distance between true and predicted grade."""
    max_length: int = 512
    """Maximum length of a text in tokens; longer texts are truncated at the end."""

    auto_class = "AutoModelForSequenceClassification"

    @property
    def metric_directions(self) -> dict[str, Direction]:  # type: ignore[override]  # depends on ordinal
        return {"accuracy": "max", "macro_f1": "max", **({"mae": "min"} if self.ordinal else {})}

    def columns(self, rows: Dataset) -> dict[str, str]:
        from hftune.data.columns import LABELS, TEXTS, choose, is_label, is_text

        text = choose("task.text_column", self.text_column, rows, is_text, TEXTS)
        label = choose("task.label_column", self.label_column, rows, is_label, LABELS, taken=[text])
        return {"text_column": text, "label_column": label}

    @cached_property
    def labels(self) -> list[str]:  # type: ignore[override]  # known only with the data
        """Class names in the order of the class numbers."""
        from hftune.data.cache import cached_value
        from hftune.data.labels import class_names

        if names := self.label_names or self._data_label_names:
            return list(names)

        def find() -> list[str]:
            return class_names(self._raw_labels("train"), "train", self._row_of("train"), self.ordinal)

        return cached_value(["class names", self._rows["train"]._fingerprint, self._label, self.ordinal], find)

    @property
    def _data_label_names(self) -> list[str] | None:
        return getattr(self._rows["train"].features[self._label], "names", None)

    def _raw_labels(self, split: str) -> list[Any]:
        from hftune.data.labels import read_labels

        return read_labels(self._rows[split], self._label, split, self._row_of(split))

    @property
    def _label(self) -> str:
        """Column of the labels."""
        return self._columns["label_column"]

    def _row_of(self, split: str) -> Callable[[int], int]:
        from hftune.data.text import row_numbers

        return lambda index: row_numbers(self._rows[split], [index])[0]

    def encode(self, rows: dict[str, list]) -> dict[str, list]:
        from hftune.data.text import to_ids

        ids, cut = to_ids(rows[self._columns["text_column"]], self.text_tokenizer, self.max_length)
        return {"input_ids": ids, "cut": cut}

    def targets(self, split: str) -> dict[str, np.ndarray]:
        """Return the class numbers, label (N,) int64."""
        import numpy as np

        from hftune.data.labels import class_numbers

        numbers = class_numbers(self._raw_labels(split), self.labels, self._data_label_names, split, self._row_of(split))
        return {"label": np.array(numbers, np.int64)}

    def encoded_by(self) -> Any:
        return [self.max_length, self.labels, self._data_label_names]

    def class_counts(self, dataset: Any) -> dict[str, int]:
        from hftune.data.texts import column_of

        return count_classes(column_of(dataset, "label"), self.labels)

    def notices(self, datasets: Mapping[str, Any], model: PreTrainedModel) -> list[str]:
        messages = super().notices(datasets, model)
        if self.ordinal and not self.label_names:
            messages.append(f"task.ordinal=true: the grades from lowest to highest are {', '.join(self.labels)}.")
        return messages

    def loss(self, outputs: Any, target: Tensor) -> Tensor:
        from torch.nn.functional import cross_entropy

        return cross_entropy(outputs.logits.float(), target, reduction="sum")

    def predictions(self, outputs: Any, model: PreTrainedModel, batch: Batch) -> list[dict[str, Any]]:
        """Return rows of label and prediction (class numbers), and the probabilities of both."""
        return evaluation_rows(outputs.logits, batch["labels"])

    def describe(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the rows with the beginning of each text, class names, and the error that ``named`` explains."""
        texts = self._rows["eval"][self._text_columns[0]]
        return [{"text": beginning(text), **row} for text, row in zip(texts, named(rows, self.labels), strict=True)]

    def metrics(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        from hftune.metrics.classification import Accuracy, ConfusionMatrix, MacroF1, MeanAbsoluteError

        pairs = {"predictions": [row["prediction"] for row in rows], "references": [row["label"] for row in rows]}
        count = len(self.labels)
        return {
            **Accuracy().compute(**pairs),
            **MacroF1().compute(**pairs, num_labels=count),
            **(MeanAbsoluteError().compute(**pairs) if self.ordinal else {}),
            **ConfusionMatrix().compute(**pairs, num_labels=count),
        }

    def transformers_pipeline(self) -> dict[str, Any]:
        return {"task": "text-classification", "truncation": True, "max_length": self.max_length}

    def example_inputs(self) -> list[str]:
        return self._rows["eval"][:2][self._text_columns[0]]

    def predict(self, model: PreTrainedModel, inputs: list[str]) -> list[dict[str, Any]]:
        """Return the most probable label of each text, by name, and its probability."""
        from hftune.data.text import check_inputs, to_ids
        from hftune.data.texts import Ragged

        check_inputs(inputs)
        ids, _ = to_ids(inputs, self.text_tokenizer, self.max_length)
        ids_NT, mask_NT = Ragged.of(ids).padded(self.text_tokenizer.pad_token_id)
        logits_NC = model(input_ids=ids_NT.to(model.device), attention_mask=mask_NT.to(model.device)).logits
        names = model.config.id2label
        return [{"label": names[label], "probability": probability} for label, probability in most_probable(logits_NC)]

"""Text classification, such as Yelp's stars, topics or sentiment, with AutoModelForSequenceClassification.

torch, transformers and datasets are imported inside the methods, so that mistyped recipes are refused without waiting for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hftune.errors import ConfigError
from hftune.tasks.classification import count_classes, evaluation_rows, most_probable, named
from hftune.tasks.text import TextTask, beginning
from hftune.tasks.validation import bound_problems

if TYPE_CHECKING:
    import numpy as np
    from datasets import Dataset
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from hftune.data.texts import Texts
    from hftune.task import Batch, Direction


@dataclass
class SequenceClassification(TextTask):
    """Classify texts. The loss is cross-entropy; an item is a text."""

    model: str | None = "google-bert/bert-base-cased"
    """Model name on the Hub (owner/name) or local folder. null: a new model built from model_config, with a WordPiece tokenizer
    trained on the texts."""
    dataset: str = "Yelp/yelp_review_full"
    """Data set name on the Hub (owner/name), or module:function that returns rows. With data_files: their format (json, csv,
    parquet, arrow or text), only needed if their suffixes do not show it."""
    eval_split: str = "test"
    """Split of the data set on the Hub to evaluate on."""
    vocab_size: int = 4096
    """Vocabulary size of the trained tokenizer, if model is null."""
    text_column: str = "text"
    """Column of the texts."""
    label_column: str = "label"
    """Column of the labels: class numbers from 0, or class names."""
    label_names: list[str] | None = None
    """Class names in the order of the class numbers: the names that the data set uses, in any order, or a new name for each of
    its classes, in the data set's order. null: the data set's names, or else the distinct labels of the training split."""
    ordinal: bool = False
    """Whether the classes are grades, such as stars, and label_names lists them from lowest to highest. Adds the metric mae,
    the mean distance between true and predicted grade."""
    max_length: int = 512
    """Maximum length of a text in tokens; longer texts are truncated at the end."""

    @property
    def metric_directions(self) -> dict[str, Direction]:  # type: ignore[override]  # depends on ordinal
        return {"accuracy": "max", "macro_f1": "max", **({"mae": "min"} if self.ordinal else {})}

    def validate(self) -> list[str]:
        from hftune.data.files import model_folder_problems

        return [
            *self._split_problems(),
            *model_folder_problems(self.model, self.model_config),
            *bound_problems(self, {"max_length": 3, "vocab_size": 100, "max_train_samples": 1, "max_eval_samples": 1}),
        ]

    @cached_property
    def _rows(self) -> dict[str, Dataset]:
        columns = {"task.text_column": self.text_column, "task.label_column": self.label_column}
        return self._load_rows(columns, texts=[self.text_column], stratify_by=self.label_column)

    @cached_property
    def labels(self) -> list[str]:  # type: ignore[override]  # known only with the data
        """Class names in the order of the class numbers."""
        from hftune.data.cache import cached_value
        from hftune.data.labels import class_names

        if names := self.label_names or self._data_label_names:
            return list(names)

        def find() -> list[str]:
            return class_names(self._raw_labels("train"), "train", self._row_of("train"), self.ordinal)

        return cached_value(["class names", self._rows["train"]._fingerprint, self.label_column, self.ordinal], find)

    @property
    def _data_label_names(self) -> list[str] | None:
        return getattr(self._rows["train"].features[self.label_column], "names", None)

    def _raw_labels(self, split: str) -> list[Any]:
        from hftune.data.labels import read_labels

        return read_labels(self._rows[split], self.label_column, split, self._row_of(split))

    def _row_of(self, split: str) -> Callable[[int], int]:
        from hftune.data.text import row_numbers

        return lambda index: row_numbers(self._rows[split], [index])[0]

    @cached_property
    def text_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the model, or one trained on the training texts."""
        from hftune.data.cache import cached_value
        from hftune.models.pretrained import load_tokenizer, train_wordpiece, wordpiece_tokenizer

        if self.model is not None:
            return load_tokenizer(self.model, commit=self.model_commit)
        rows, column = self._rows["train"], self.text_column
        key = ["wordpiece", rows._fingerprint, column, self.vocab_size, version("tokenizers")]
        return wordpiece_tokenizer(cached_value(key, lambda: train_wordpiece(rows[column], self.vocab_size)))

    def datasets(self) -> dict[str, Texts]:
        """Return the tokenized splits, with columns input_ids (tokens), cut (bool) and label (int)."""
        return {split: self._tokenized(split) for split in self._rows}

    def _tokenized(self, split: str) -> Texts:
        import numpy as np

        from hftune.data import text
        from hftune.data.cache import mapped
        from hftune.data.labels import class_numbers
        from hftune.data.texts import cached_texts, flat_arrays

        rows, tokenizer, labels, data_names = self._rows[split], self.text_tokenizer, self.labels, self._data_label_names
        settings: dict[str, Any] = {"column": self.text_column, "max_length": self.max_length}

        def make() -> dict[str, Any]:
            numbers = class_numbers(self._raw_labels(split), labels, data_names, split, self._row_of(split))
            encoded = mapped(rows, text.tokenize, f"Tokenizing {split}", tokenizer=tokenizer, **settings)
            return {**flat_arrays(encoded), "label": np.array(numbers, np.int64)}

        key = [rows._fingerprint, text.tokenizer_key(tokenizer), settings, self.label_column, labels, data_names]
        return cached_texts(key, make)

    def class_counts(self, dataset: Any) -> dict[str, int]:
        from hftune.data.texts import column_of

        return count_classes(column_of(dataset, "label"), self.labels)

    def notices(self, datasets: Mapping[str, Any], model: PreTrainedModel) -> list[str]:
        from hftune.data.text import cut_notices

        messages = self._row_notices(self._rows, self.text_column)
        messages += cut_notices(datasets, "cut", f"Texts longer than task.max_length={self.max_length} tokens")
        if self.ordinal and not self.label_names:
            messages.append(f"task.ordinal=true: the grades from lowest to highest are {', '.join(self.labels)}.")
        return messages

    def build_model(self) -> PreTrainedModel:
        """Load the model, or build a new one, with the class names in its config."""
        from transformers import AutoModelForSequenceClassification

        from hftune.models.pretrained import load_config, load_model, max_positions

        names = dict(enumerate(self.labels))
        overrides = {**self.model_config, "id2label": names, "label2id": {name: number for number, name in names.items()}}
        overrides["pad_token_id"] = self.text_tokenizer.pad_token_id
        if self.model is None:
            overrides["vocab_size"] = len(self.text_tokenizer)
        config = load_config(self.model, overrides, self.model_commit)
        model = load_model(AutoModelForSequenceClassification, self.model, config, self.model_commit)
        positions = max_positions(model)
        if positions is not None and positions < self.max_length:
            raise ConfigError(f"task.max_length={self.max_length} exceeds the model's {positions} positions. Lower it.")
        return model

    def lengths(self, dataset: Any) -> np.ndarray:
        from hftune.data.texts import lengths_of

        return lengths_of(dataset, "input_ids")

    def collate(self, examples: Sequence[dict[str, Any]]) -> Batch:
        """Pad to the longest text: input_ids and attention_mask (N, T) int64, labels (N,) int64."""
        from hftune.data.texts import ragged, values

        ids_NT, mask_NT = ragged(examples, "input_ids").padded(self.text_tokenizer.pad_token_id)
        return {"input_ids": ids_NT, "attention_mask": mask_NT, "labels": values(examples, "label")}

    def loss(self, outputs: Any, target: Tensor) -> Tensor:
        from torch.nn.functional import cross_entropy

        return cross_entropy(outputs.logits.float(), target, reduction="sum")

    def predictions(self, outputs: Any, model: PreTrainedModel, batch: Batch) -> list[dict[str, Any]]:
        """Return rows of label and prediction (class numbers), and the probabilities of both."""
        return evaluation_rows(outputs.logits, batch["labels"])

    def describe(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the rows with the beginning of each text, class names, and the error that ``named`` explains."""
        texts = self._rows["eval"][self.text_column]
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

    def load(self, directory: Path) -> PreTrainedModel:
        from transformers import AutoModelForSequenceClassification

        from hftune.models.pretrained import load_tokenizer

        self.text_tokenizer = load_tokenizer(str(directory))
        return self._load_saved(AutoModelForSequenceClassification, directory)

    def transformers_pipeline(self) -> dict[str, Any]:
        return {"task": "text-classification", "truncation": True, "max_length": self.max_length}

    def example_inputs(self) -> list[str]:
        return self._rows.get("eval", self._rows["train"])[:2][self.text_column]

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

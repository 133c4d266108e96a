"""Text in, one of several classes out: Yelp's stars, topics, sentiment. For AutoModelForSequenceClassification.

torch, transformers and datasets are imported inside the methods, so that a mistyped recipe is refused before they load.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hftune.errors import ConfigError
from hftune.tasks.classification import evaluation_rows, most_probable
from hftune.tasks.text import TextTask
from hftune.tasks.validation import bound_problems

if TYPE_CHECKING:
    import datasets
    import numpy as np
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from hftune.task import Batch, Direction


@dataclass
class SequenceClassification(TextTask):
    """Classify texts. The loss is cross-entropy, an item is a text."""

    model: str | None = "google-bert/bert-base-cased"
    """Name on the Hub (owner/name) or local folder. null: a fresh model from model_config, with a tokenizer trained on the
    texts."""
    dataset: str = "Yelp/yelp_review_full"
    """Name on the Hub (owner/name); or module:function that returns rows. With data_files, their format (json, csv, parquet,
    arrow or text), if their names do not tell."""
    eval_split: str = "test"
    """Split of the Hub's data set to evaluate on."""
    vocab_size: int = 4096
    """Size of the trained tokenizer's vocabulary, where model is null."""
    text_column: str = "text"
    """Column of the texts."""
    label_column: str = "label"
    """Column of the classes: numbers from 0, or names."""
    label_names: list[str] | None = None
    """Names of the classes, in order: the data set's own names, in whatever order, or a new name for each of its classes. null:
    the data set's own, or the distinct labels of the training split."""
    ordinal: bool = False
    """The classes are grades, in the order of label_names, lowest first: also report mae, the mean distance between true and
    predicted grade."""
    max_length: int = 512
    """Longest text in tokens; what is longer is cut at the end."""

    @property
    def metric_directions(self) -> dict[str, Direction]:
        return {"accuracy": "max", "macro_f1": "max", **({"mae": "min"} if self.ordinal else {})}

    def validate(self) -> list[str]:
        from hftune.data.files import data_file_problems, model_folder_problems

        return [
            *data_file_problems(self.dataset, self.data_files),
            *model_folder_problems(self.model, self.model_config),
            *bound_problems(self, {"max_length": 3, "vocab_size": 100, "max_train_samples": 1, "max_eval_samples": 1}),
        ]

    @cached_property
    def _rows(self) -> dict[str, datasets.Dataset]:
        columns = {"task.text_column": self.text_column, "task.label_column": self.label_column}
        return self._load_rows(columns, texts=[self.text_column])

    @cached_property
    def labels(self) -> list[str]:
        """Names of the classes, in the order of their numbers."""
        from hftune.data.labels import class_names

        if names := self.label_names or self._own_label_names:
            return list(names)
        return class_names(self._raw_labels("train"), "train", self._row_of("train"), self.ordinal)

    @property
    def _own_label_names(self) -> list[str] | None:
        return getattr(self._rows["train"].features[self.label_column], "names", None)

    def _raw_labels(self, split: str) -> list[Any]:
        from hftune.data.labels import read_labels

        return read_labels(self._rows[split], self.label_column, split, self._row_of(split))

    def _row_of(self, split: str) -> Callable[[int], int]:
        from hftune.data.text import row_numbers

        return lambda place: row_numbers(self._rows[split], [place])[0]

    @cached_property
    def text_tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's own tokenizer, or one trained on the training texts."""
        from hftune.models.pretrained import load_tokenizer, train_wordpiece

        if self.model is not None:
            return load_tokenizer(self.model, commit=self.model_commit)
        return train_wordpiece(self._rows["train"][self.text_column], self.vocab_size)

    def datasets(self) -> dict[str, datasets.Dataset]:
        """Return the tokenised splits: columns input_ids (list of int), length (int), cut (bool), label (int)."""
        return {split: self._tokenized(split) for split in ("train", "eval")}

    def _tokenized(self, split: str) -> datasets.Dataset:
        from hftune.data import text
        from hftune.data.cache import cached_map
        from hftune.data.labels import class_numbers

        rows = self._rows[split]
        encoded = cached_map(
            rows,
            text.tokenize,
            key=[text.tokenizer_key(self.text_tokenizer), self.text_column, self.max_length],
            note=f"Tokenising {split}",
            tokenizer=self.text_tokenizer,
            column=self.text_column,
            max_length=self.max_length,
        )
        numbers = class_numbers(self._raw_labels(split), self.labels, self._own_label_names, split, self._row_of(split))
        return encoded.add_column("label", numbers).with_format("numpy")

    def notices(self, datasets: Mapping[str, datasets.Dataset], model: PreTrainedModel) -> list[str]:
        from hftune.data.text import cut_notices

        said = self._row_notices(self._rows, self.text_column)
        said += cut_notices(datasets, "cut", f"Texts longer than task.max_length={self.max_length} tokens")
        if self.ordinal and not self.label_names:
            said.append(f"task.ordinal=true: the grades are, lowest first, {', '.join(self.labels)}.")
        return said

    def build_model(self) -> PreTrainedModel:
        """Load or draw the model, with label names in its config."""
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
            raise ConfigError(f"task.max_length={self.max_length} is more than the {positions} positions of the model.")
        return model

    def lengths(self, dataset: datasets.Dataset) -> np.ndarray:
        from hftune.data.text import lengths

        return lengths(dataset)

    def collate(self, examples: list[dict[str, Any]]) -> Batch:
        """Pad to the longest: input_ids and attention_mask (N, T) int64, labels (N,) int64."""
        import torch

        from hftune.data.text import pad

        ids_NT, mask_NT = pad([example["input_ids"] for example in examples], self.text_tokenizer.pad_token_id)
        labels_N = torch.tensor([int(example["label"]) for example in examples])
        return {"input_ids": ids_NT, "attention_mask": mask_NT, "labels": labels_N}

    def loss(self, outputs: Any, target: Tensor) -> Tensor:
        from torch.nn.functional import cross_entropy

        return cross_entropy(outputs.logits.float(), target, reduction="sum")

    def predictions(self, outputs: Any, model: PreTrainedModel, batch: Batch) -> list[dict[str, Any]]:
        """Return rows of label and prediction (class numbers) and the prediction's probability."""
        return evaluation_rows(outputs.logits, batch["labels"])

    def metrics(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        from hftune.metrics.classification import Accuracy, ConfusionMatrix, MacroF1, MeanAbsoluteError

        said = {"predictions": [row["prediction"] for row in rows], "references": [row["label"] for row in rows]}
        count = len(self.labels)
        return {
            **Accuracy().compute(**said),
            **MacroF1().compute(**said, num_labels=count),
            **(MeanAbsoluteError().compute(**said) if self.ordinal else {}),
            **ConfusionMatrix().compute(**said, num_labels=count),
        }

    def load(self, directory: Path) -> PreTrainedModel:
        from transformers import AutoModelForSequenceClassification

        from hftune.models.pretrained import load_tokenizer

        self.text_tokenizer = load_tokenizer(str(directory))
        return self._load_saved(AutoModelForSequenceClassification, directory)

    def transformers_pipeline(self) -> dict[str, Any]:
        return {"task": "text-classification", "truncation": True, "max_length": self.max_length}

    def example_inputs(self) -> list[str]:
        return self._rows["eval"][:2][self.text_column]

    def predict(self, model: PreTrainedModel, inputs: list[str]) -> list[dict[str, Any]]:
        """Return each text's most probable label, by name, and its probability."""
        from hftune.data.text import check_inputs, pad, to_ids

        check_inputs(inputs)
        ids, _ = to_ids(inputs, self.text_tokenizer, self.max_length)
        ids_NT, mask_NT = pad(ids, self.text_tokenizer.pad_token_id)
        logits_NC = model(input_ids=ids_NT.to(model.device), attention_mask=mask_NT.to(model.device)).logits
        names = model.config.id2label
        return [{"label": names[label], "probability": probability} for label, probability in most_probable(logits_NC)]

"""Text classification and regression with AutoModelForSequenceClassification: of texts such as reviews, or pairs of texts.

torch, transformers and datasets are imported inside the methods, so that mistyped recipes are refused without waiting for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from hftune.config.keys import key
from hftune.data.columns import LABELS, TEXTS, Role, is_label, is_list, is_number
from hftune.errors import DataError, did_you_mean, format_value
from hftune.metrics.records import directions
from hftune.tasks.problems import PROBLEMS, MultiLabel, Problem, Regression, SingleLabel
from hftune.tasks.text import TextTask, beginning, check_inputs

if TYPE_CHECKING:
    import numpy as np
    from datasets import Dataset
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedModel

    from hftune.data.labels import Classes
    from hftune.task import Batch, Direction

BALANCED = "balanced"
"""Value of ``class_weights``."""


@dataclass
class SequenceClassification(TextTask):
    """Classify texts or pairs of texts, or predict a number. The loss is cross-entropy, and an item is a text. With several
    labels per text: binary cross-entropy, and a label of a text. For numbers: the squared error, and a text."""

    model: str | None = key("google-bert/bert-base-cased", changes="model")
    """Model name on the Hub (owner/name) or local folder. null: a new model built from model_config, with a WordPiece tokenizer
    trained on the texts."""
    eval_split: str | None = key("test", changes="output")
    """Split of the data set to evaluate on while training, and to choose the best model by."""
    problem_type: Literal["single_label_classification", "multi_label_classification", "regression"] | None = None
    """What is predicted, in transformers' terms: one class of each text, any number of labels, or a number. null: by the label
    column, which holds classes, lists or decimal numbers."""
    text_column: str | None = None
    """Column of the texts. null: text, or another usual name, or the only column of texts."""
    text_columns: list[str] | None = None
    """Columns of the two texts of a pair, such as [premise, hypothesis], instead of text_column."""
    label_column: str | None = None
    """Column of the labels: class names, or class numbers (from 0 if label_names is set); lists of them if texts can have
    several; or numbers to predict. null: label, or another usual name, or the only column that may hold them."""
    label_columns: list[str] | None = None
    """Columns of 0 and 1, one for each label that texts can have, instead of label_column."""
    label_names: list[str] | None = None
    """Class names in the order of the class numbers: the names that the data set uses, in any order, or a new name for each of
    its classes, in the data set's order. null: the data set's names, or else the distinct labels of the training split."""
    ordinal: bool = False
    """Whether the classes are grades, such as stars, and label_names lists them from lowest to highest. Adds the metric mae,
    the mean distance between true and predicted grade."""
    class_weights: Any = None
    """Weight of each class in the loss: balanced, so that all classes count the same in total, or a mapping such as {spam: 5},
    where classes that are not named have 1. A text counts as many items as the weight of its class. With several labels per
    text, the weight of the texts that have a label. null: 1."""
    label_smoothing: float = key(0.0, ge=0, lt=1, changes="forward backward")
    """Share of each target that is spread over all classes, from 0 to below 1."""
    focal_gamma: float = key(0.0, ge=0, changes="forward backward")
    """Exponent of the focal loss: each cross-entropy is multiplied by (1 - p) ** focal_gamma, where p is the probability of the
    true answer, so that what is easy counts less. 2 is usual; 0 is cross-entropy."""
    max_length: int = key(512, ge=3)
    """Maximum length of a text, or of a pair together, in tokens; longer texts are truncated at the end."""

    auto_class = "AutoModelForSequenceClassification"
    prepares_as_needed = True

    @property
    def metric_directions(self) -> dict[str, Direction | None]:  # type: ignore[override]  # depends on the kind
        if self.problem_type is None and "rows" not in vars(self):  # any kind, which only the data tell
            return {name: direction for kind in PROBLEMS.values() for name, direction in kind.directions.items()}
        return {**PROBLEMS[self.kind].directions, **directions(*(("mae",) if self.ordinal else ()))}

    def field_problems(self) -> Iterator[str]:
        yield from super().field_problems()
        if self.text_columns is not None:
            if len(self.text_columns) != 2:
                yield f"task.text_columns={self.text_columns} must be the two columns of a pair, such as [premise, hypothesis]."
            if self.text_column is not None:
                yield f"task.text_column={self.text_column} and task.text_columns are both set. Set one of them to null."
        if self.label_columns is not None:
            if len(self.label_columns) < 2:
                yield f"task.label_columns={self.label_columns} must be at least two columns of 0 and 1."
            for key in ("label_column", "label_names"):
                if (value := getattr(self, key)) is not None:
                    yield f"task.{key}={format_value(value)} has no place beside task.label_columns. Set it to null."
            if self.problem_type not in (None, "multi_label_classification"):
                yield f"task.label_columns is for problem_type=multi_label_classification, not for {self.problem_type}."
        if isinstance(weights := self.class_weights, Mapping):
            for name, weight in weights.items():
                if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight < float("inf"):
                    yield f"task.class_weights.{name}={format_value(weight)} must be a number above 0."
        elif weights not in (None, BALANCED):
            yield (
                f"task.class_weights={format_value(weights)} is neither balanced nor a mapping from class names to weights, "
                "such as {spam: 5}."
            )
        if weights == BALANCED and self.bad_rows == "skip":
            yield "task.class_weights=balanced counts all rows, the bad ones too. With task.bad_rows=skip, give the weights."
        if self.label_smoothing and self.focal_gamma:
            yield "task.label_smoothing and task.focal_gamma contradict each other. Set one of them to 0."
        if self.problem_type not in (None, "single_label_classification"):
            yield from self._needless(self.problem_type)

    def _needless(self, kind: str) -> Iterator[str]:
        """Yield keys that are set and have no effect with a kind other than classes."""
        if self.ordinal:
            yield f"task.ordinal=true is for classes, not for task.problem_type={kind}. Set it to false."
        if self.label_smoothing:
            yield f"task.label_smoothing={self.label_smoothing} is for classes, not for task.problem_type={kind}. Set it to 0."
        if kind == "regression":
            for key in ("class_weights", "focal_gamma", "label_names"):
                if value := getattr(self, key):
                    yield f"task.{key}={format_value(value)} is for classes, not for task.problem_type={kind}. Leave it out."

    @property
    def columns(self) -> dict[str, Role]:  # type: ignore[override]  # depends on the kind
        kinds = {
            "single_label_classification": "label",
            "multi_label_classification": "list of labels",
            "regression": "number",
            None: "label, number or list of labels",
        }
        return {"text": Role("text", TEXTS), "label": Role(kinds[self.problem_type], LABELS, optional_in={"predict"})}

    def stratify_by(self, rows: Dataset) -> str | None:
        return super().stratify_by(rows) if self.problem_type in (None, "single_label_classification") else None

    @cached_property
    def kind(self) -> str:
        """What is predicted: ``problem_type``, or what the labels look like."""
        if self.problem_type is not None:
            return self.problem_type
        feature = None if self.label_columns else self.rows["train"].features[self.read_columns["label_column"]]
        if feature is None or is_list(feature):
            kind = "multi_label_classification"
        else:
            kind = "regression" if is_number(feature) and not is_label(feature) else "single_label_classification"
        if kind == "regression" and [*self._needless(kind)]:  # whoever names classes does not want numbers predicted
            return "single_label_classification"
        if kind == "multi_label_classification" and (problems := [*self._needless(kind)]):
            raise DataError(" ".join(problems))
        return kind

    @cached_property
    def _classes(self) -> Classes:
        from hftune.data.cache import cached_value
        from hftune.data.labels import Classes, class_names, names_of

        def find() -> list[str]:
            (labels, indices), row_of = self._raw_labels("train"), self.row_of("train")
            elsewhere = [label for split in self.rows if split != "train" for label in self._raw_labels(split)[0]]
            return class_names(labels, "train", lambda place: row_of(indices[place]), self.ordinal, elsewhere)

        if self.label_columns:
            return Classes(self.label_columns, None, are_labels=False)
        feature = self.rows["train"].features[self.read_columns["label_column"]]
        depends_on = [
            "class names",
            [rows._fingerprint for rows in self.rows.values()],
            self.read_columns["label_column"],
            self.kind,
            self.ordinal,
        ]
        return Classes.of(
            self.label_names, names_of(getattr(feature, "feature", feature)), lambda: cached_value(depends_on, find)
        )

    @property
    def labels(self) -> Sequence[str] | None:  # type: ignore[override]  # known only with the data
        """Class names in the order of the class numbers; None for regression."""
        return None if self.kind == "regression" else self.label_names or self._classes.names

    def _raw_labels(self, split: str) -> tuple[list[Any], Sequence[int]]:
        """Return the labels as they are in the data, those of lists one after the other, and the index of the row of each."""
        from hftune.data.labels import read_label_lists, read_labels

        rows, row_of = self.rows[split], self.row_of(split)
        if self.kind == "multi_label_classification":
            return read_label_lists(rows, self.read_columns["label_column"], split, row_of)
        return read_labels(rows, self.read_columns["label_column"], split, row_of), range(len(rows))

    def encode(self, rows: dict[str, list]) -> dict[str, list]:
        texts = [rows[column] for column in self.text_columns_read]
        return self._tokens(texts, None if len(texts) == 1 else self.named_config)

    def _tokens(self, texts: Sequence[Sequence[str]], config: PreTrainedConfig | None) -> dict[str, list]:
        """Tokenize texts, or pairs of texts for a model with this config."""
        from hftune.data.tokenized import pair_ids, to_ids

        tokenizer = self.text_tokenizer
        first, *others = texts
        if not others:
            ids, cut = to_ids(first, tokenizer, self.max_length)
            return {"input_ids": ids, "cut": cut}
        return pair_ids(first, others[0], tokenizer, self.max_length, self.has_types(config))

    def targets(self, split: str) -> dict[str, np.ndarray]:
        """Return label: class numbers (N,) int64; 0 and 1 for each label (N, K) float32; or numbers (N,) float32."""
        import numpy as np

        from hftune.data.labels import flags_of, read_flags, read_targets

        rows, row_of = self.rows[split], self.row_of(split)
        if self.kind == "regression":
            return {"label": read_targets(rows, self.read_columns["label_column"], split, row_of)}
        if self.label_columns:
            return {"label": read_flags(rows, self.label_columns, split, row_of)}
        labels, indices = self._raw_labels(split)
        numbers = self._classes.numbers(labels, split, lambda place: row_of(indices[place]))
        if self.kind == "single_label_classification":
            return {"label": np.array(numbers, np.int64)}
        return {"label": flags_of(numbers, indices, len(rows), len(self._classes.names))}

    def encoded_by(self) -> Any:
        has_types = len(self.text_columns_read) > 1 and self.has_types(self.named_config)
        return [self.max_length, self.kind, None if self.kind == "regression" else asdict(self._classes), has_types]

    def class_counts(self, dataset: Any) -> dict[str, int]:
        from hftune.data.tokenized import column_of

        if (
            self.labels is None
            or self.bad_rows == "skip"
            or (getattr(dataset, "is_in_place", False) and self.class_weights != BALANCED)
        ):
            return {}  # as only a pass over all rows would tell
        labels = column_of(dataset, "label")
        if labels.ndim == 1:
            return self._classes.counts(labels)
        return dict(zip(self.labels, labels.sum(0).astype(int).tolist(), strict=True))

    @cached_property
    def _problem(self) -> Problem:
        labels, weights = self.labels or [], self._weights
        if self.kind == "single_label_classification":
            return SingleLabel(labels, weights, self.label_smoothing, self.focal_gamma, self.ordinal)
        return MultiLabel(labels, weights, self.focal_gamma) if self.kind == "multi_label_classification" else Regression()

    @cached_property
    def _weights(self) -> list[float] | None:
        """Weights of the classes, in their order.

        Raises:
            DataError: a weight is for a class that does not exist, or no training text has a class.
        """
        labels = self.labels
        if not self.class_weights or labels is None:
            return None
        if self.class_weights != BALANCED:
            if unknown := [name for name in self.class_weights if str(name) not in labels]:
                raise DataError(
                    f"task.class_weights.{unknown[0]} names no class. Classes: {', '.join(labels[:10])}."
                    f"{did_you_mean(unknown[0], labels)}"
                )
            given = {str(name): float(weight) for name, weight in self.class_weights.items()}
            return [given.get(name, 1.0) for name in labels]
        train = self.datasets()["train"]
        counts = self.class_counts(train)
        if absent := [name for name, count in counts.items() if count == 0]:
            raise DataError(
                f"task.class_weights=balanced: no text of the train split has the label {absent[0]!r}. "
                f"{'Remove it from task.label_names, or give' if self.label_names else 'Give'} the weights as a mapping."
            )
        if self.kind == "single_label_classification":
            return [len(train) / (len(labels) * count) for count in counts.values()]
        return [(len(train) - count) / count for count in counts.values()]

    def notices(self, datasets: Mapping[str, Any], model: PreTrainedModel) -> list[str]:
        messages = super().notices(datasets, model)
        if self.problem_type is None:
            evidence, column = "there are several label columns", self.read_columns.get("label_column")
            if self.label_columns is None:
                dtype = str(getattr(self.rows["train"].features[column], "dtype", "list"))
                holds = "texts" if dtype.endswith("string") else "whole numbers" if "int" in dtype else "decimal numbers"
                evidence = f"column {column!r} holds {'lists' if self.kind == 'multi_label_classification' else holds}"
            messages.append(f"task.problem_type={self.kind}: {evidence}.")
        messages += [] if self.labels is None else self._classes.notices()
        if self.ordinal and not self.label_names:
            messages.append(f"task.ordinal=true: the grades from lowest to highest are {', '.join(self.labels or [])}.")
        return messages

    def config_overrides(self) -> dict[str, Any]:
        number = {"num_labels": 1} if self.labels is None else {}
        return {**super().config_overrides(), **number, "problem_type": self.kind}

    def loss(self, outputs: Any, target: Tensor) -> Tensor:
        return self._problem.loss(outputs.logits, target)

    def item_logits(self, outputs: Any, target: Tensor) -> Tensor | None:
        return self._problem.item_logits(outputs.logits)

    def num_items(self, target: Tensor) -> float:
        """Return the number of texts, or the sum of their classes' weights; with several labels per text, of all answers."""
        return self._problem.num_items(target)

    def predictions(self, outputs: Any, model: PreTrainedModel, batch: Batch) -> list[dict[str, Any]]:
        return self._problem.rows(outputs.logits, batch["labels"])

    def describe(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the rows with the beginning of each text, class names, and an error that tells how wrong a prediction is."""
        columns = [self.rows[self.described][column] for column in self.text_columns_read]
        described = self._problem.describe(rows)
        return [
            {**dict(zip(("text", "text_pair"), map(beginning, texts), strict=False)), **row}
            for *texts, row in zip(*columns, described, strict=True)
        ]

    def metrics(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        return self._problem.metrics(rows)

    def transformers_pipeline(self) -> dict[str, Any]:
        every = {"top_k": None} if self.kind == "multi_label_classification" else {}
        return {"task": "text-classification", "truncation": True, "max_length": self.max_length, **every}

    def predict(self, model: PreTrainedModel, inputs: list[Any], probabilities: bool = False) -> list[dict[str, Any]]:
        """Return a row for each text or pair: its label and probability; its labels and all probabilities; or its value.

        A pair is a list of two texts, or a text with a tab between them. ``probabilities`` adds those of all classes.
        """
        texts = [list(inputs)] if self.text_columns is None else self.sides(inputs, " and ".join(self.text_columns))
        for side in texts:
            check_inputs(side)
        encoded = self._tokens(texts, model.config)
        names = [name for name in encoded if name != "cut"]
        batch = self.collate(
            [dict(zip(names, row, strict=True)) for row in zip(*(encoded[name] for name in names), strict=True)]
        )
        logits = model(**{name: tensor.to(model.device) for name, tensor in batch.items()}).logits
        names = [model.config.id2label[number] for number in range(model.config.num_labels)]
        return PROBLEMS[model.config.problem_type].answers(logits, names, probabilities)

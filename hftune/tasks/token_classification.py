"""Token classification with AutoModelForTokenClassification: a tag for each word, such as names of people and places.

torch, transformers and datasets are imported inside the methods, so that mistyped recipes are refused without waiting for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from hftune.config.keys import key
from hftune.data.columns import TEXTS, Role
from hftune.data.tags import (
    bracketed,
    checked_words,
    entities_of,
    first_tokens,
    is_entity_scheme,
    joins_words,
    named_tags,
    read_tags,
    tag_names,
    windows,
    word_ids,
)
from hftune.metrics.records import directions
from hftune.tasks.late_rows import late_rows_each
from hftune.tasks.text import NO_LABEL, TokenTask, beginning, with_places

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from hftune.data.labels import Classes
    from hftune.task import Batch

TAGS = ("ner_tags", "tags", "labels", "pos_tags", "upos")
"""Usual names of a column of tags."""


@dataclass
class TokenClassification(TokenTask):
    """Tag the words of texts. The loss is cross-entropy at the first token of each word; an item is a word."""

    model: str | None = key("google-bert/bert-base-cased", changes="model")
    """Model name on the Hub (owner/name) or local folder. null: a new model built from model_config, with a WordPiece tokenizer
    trained on the words."""
    words_column: str | None = None
    """Column of lists of words. null: tokens or words, or the only column of lists of texts."""
    tags_column: str | None = None
    """Column of lists of tags, a name or a number for each word. null: ner_tags or another usual name, or the only column of
    such lists."""
    label_names: list[str] | None = None
    """Tags in the order of their numbers, such as [O, B-PER, I-PER]: the names that the data set uses, in any order, or a new
    name for each, in the data set's order. null: the data set's names, or else the distinct tags of the training split."""
    max_length: int = key(512, ge=3)
    """Maximum length of a text in tokens. The words beyond it are neither trained nor scored."""

    metric_directions = directions("f1", "precision", "recall", "accuracy")
    sample_fields = ("tagged", "predicted")
    auto_class = "AutoModelForTokenClassification"
    prepares_as_needed = True
    columns: ClassVar[Mapping[str, Role]] = {
        "words": Role("list of texts", ("tokens", "words"), usual_inputs=TEXTS),
        "tags": Role("list of labels", TAGS, optional_in={"predict"}),
    }

    @property
    def _words(self) -> str:
        return self.read_columns["words_column"]

    @property
    def _tags(self) -> str:
        return self.read_columns["tags_column"]

    @cached_property
    def _classes(self) -> Classes:
        from hftune.data.cache import cached_value
        from hftune.data.labels import Classes

        depends_on = ["tags", self.rows["train"]._fingerprint, self._tags]
        return Classes.of(
            self.label_names,
            self._names_in("train"),
            lambda: cached_value(depends_on, lambda: tag_names(self._read("train"), self._tags)),
        )

    @property
    def labels(self) -> Sequence[str]:  # type: ignore[override]  # known only with the data
        """Tags in the order of their numbers."""
        return self.label_names or self._classes.names

    def _names_in(self, split: str) -> list[str] | None:
        """Return the names that a split has for the numbers of its tags, if it has any."""
        return getattr(getattr(self.rows[split].features[self._tags], "feature", None), "names", None)

    def _read(self, split: str) -> list[list[Any]]:
        return read_tags(self.rows[split], self._words, self._tags, split, self.row_of(split))

    def training_texts(self) -> list[str]:
        return [" ".join(words) for words in self.rows_to_learn(self._words)[self._words][:] if words]

    @cached_property
    def text_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the model, or one trained on the words; it says which word a token belongs to."""
        from hftune.models.pretrained import load_tokenizer, with_tokens

        tokenizer = with_places(super().text_tokenizer, self.model, "which word a token belongs to")
        if self.model is not None and joins_words(tokenizer):
            return with_tokens(load_tokenizer(self.model, commit=self.model_commit, add_prefix_space=True), self.new_tokens)
        return tokenizer

    def targets(self, split: str) -> Mapping[str, np.ndarray]:
        """Check the tags, which ``encode`` translates."""
        tags, row_of = self._read(split), self.row_of(split)
        rows = [index for index, listed in enumerate(tags) for _ in listed]
        self._classes.numbers([tag for listed in tags for tag in listed], split, lambda place: row_of(rows[place]))
        return {}

    def encode(self, rows: dict[str, list]) -> dict[str, list]:
        ids, words, cut = word_ids(rows[self._words], self.text_tokenizer, self.max_length)
        labels = []
        for tags, words_of_tokens in zip(rows[self._tags], words, strict=True):
            numbers = self._classes.numbers(tags, "", int) if tags else []
            labels.append([NO_LABEL if word is None else numbers[word] for word in first_tokens(words_of_tokens)])
        return {"input_ids": ids, "labels": labels, "cut": cut}

    def encoder(self, split: str) -> Callable[[dict[str, list]], dict[str, list]]:
        """Return ``encode`` for the rows of a split, given names instead of the numbers that they have in this split."""
        names = self._names_in(split)
        return lambda rows: self.encode({**rows, self._tags: named_tags(rows[self._tags], names)})

    def encoded_by(self) -> Any:
        return [self.max_length, asdict(self._classes)]

    def notices(self, datasets: Mapping[str, Any], model: PreTrainedModel) -> list[str]:
        return [*super().notices(datasets, model), *self._classes.notices()]

    def class_counts(self, dataset: Any) -> dict[str, int]:
        if "train" in self.later:
            return {}
        labels = dataset.column("labels").flat
        return self._classes.counts(labels[labels != NO_LABEL])

    def predictions(self, outputs: Any, model: PreTrainedModel, batch: Batch) -> list[dict[str, Any]]:
        """Return rows of label and prediction: lists of the tag numbers of the words, but for those that were cut off."""

        def row(labels: list[int], predicted: list[int]) -> dict[str, Any]:
            pairs = [pair for pair in zip(labels, predicted, strict=True) if pair[0] != NO_LABEL]
            return {"label": [label for label, _ in pairs], "prediction": [prediction for _, prediction in pairs]}

        return late_rows_each(row, batch["labels"], outputs.logits.argmax(-1))

    def describe(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return texts with their tags in brackets, true and predicted, and the number of words whose tag is wrong."""
        described = []
        for words, row in zip(self._tagged_words(), rows, strict=True):
            true, predicted = ([self.labels[number] for number in row[name]] for name in ("label", "prediction"))
            wrong = sum(one != other for one, other in zip(true, predicted, strict=True))
            tagged = {"tagged": beginning(bracketed(words, true)), "predicted": beginning(bracketed(words, predicted))}
            described.append({"text": beginning(" ".join(words)), **tagged, "error": wrong})
        return described

    def _tagged_words(self) -> list[list[str]]:
        """Return the words of each text of the described split that have a token, and therefore a tag."""
        texts = self.rows[self.described][self._words]
        _, words, _ = word_ids(texts, self.text_tokenizer, self.max_length)
        return [
            [text[word] for word in first_tokens(of_tokens) if word is not None]
            for text, of_tokens in zip(texts, words, strict=True)
        ]

    def metrics(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        from hftune.metrics.entities import tag_metrics

        true, predicted = ([[self.labels[number] for number in row[key]] for row in rows] for key in ("label", "prediction"))
        return tag_metrics(true, predicted, self.labels, is_entity_scheme(self.labels))

    def transformers_pipeline(self) -> dict[str, Any]:
        return {"task": "token-classification", "aggregation_strategy": "first"}

    def example_inputs(self) -> list[str]:
        return [" ".join(words) for words in self.some_rows()[self._words]]

    def predict(self, model: PreTrainedModel, inputs: list[Any]) -> list[dict[str, Any]]:
        """Return the entities of each text, with their places in it; or its words and tags, if these are not of entities.

        A text is cut into words and punctuation marks, or is a list of words already. One that is longer than the maximum is
        read in overlapping windows.
        """
        texts = [checked_words(value, index) for index, value in enumerate(inputs)]
        names = model.config.id2label
        rows: list[dict[str, Any]] = []
        for text, found in zip(texts, self._word_tags(model, [[word.text for word in text] for text in texts]), strict=True):
            kept, tags = [text[word] for word in found], [names[tag] for tag, _ in found.values()]
            if is_entity_scheme(names.values()):
                rows.append({"entities": entities_of(kept, tags, [probability for _, probability in found.values()])})
            else:
                rows.append({"words": [word.text for word in kept], "tags": tags})
        return rows

    def _word_tags(self, model: PreTrainedModel, texts: list[list[str]]) -> list[dict[int, tuple[int, float]]]:
        """Return, for each text, the number and probability of the tag of each of its words that has a token, in their order.

        Where windows overlap, a word has the tag of the window in which it is farther from both ends.
        """
        found: list[dict[int, tuple[int, int, float]]] = [{} for _ in texts]
        ids, words, texts_of = windows(texts, self.text_tokenizer, self.max_length)
        for start in range(0, len(ids), len(texts)):  # as many at once as there are texts
            batch = self.collate([{"input_ids": row} for row in ids[start : start + len(texts)]])
            logits_NTK = model(**{name: tensor.to(model.device) for name, tensor in batch.items()}).logits
            tops_NT, tags_NT = (values.tolist() for values in logits_NTK.float().softmax(-1).max(-1))
            for window, (tops_T, tags_T) in enumerate(zip(tops_NT, tags_NT, strict=True), start):
                of_text, last = found[texts_of[window]], len(words[window]) - 1
                for place, word in enumerate(first_tokens(words[window])):
                    if word is not None and (word not in of_text or min(place, last - place) > of_text[word][0]):
                        of_text[word] = (min(place, last - place), tags_T[place], tops_T[place])
        return [{word: (tag, top) for word, (_, tag, top) in sorted(of_text.items())} for of_text in found]

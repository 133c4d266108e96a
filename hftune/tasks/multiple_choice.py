"""Multiple choice with AutoModelForMultipleChoice: which of several texts answers a question, or goes on with another one.

torch, transformers and datasets are imported inside the methods, so that mistyped recipes are refused without waiting for them.
Shape suffixes: B samples, K choices of the one with the most, N choices of all, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from hftune.config.keys import key
from hftune.data.choices import ANSWERS, CHOICE, CHOICES, CONTEXTS, QUESTIONS, gathered, right_choices, sides, texts_of
from hftune.data.columns import Role, find_columns
from hftune.errors import DataError
from hftune.metrics.records import directions
from hftune.tasks.late_rows import late_rows
from hftune.tasks.text import ManyTexts, beginning, check_inputs, token_loss

if TYPE_CHECKING:
    import numpy as np
    from datasets import Dataset
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedModel

    from hftune.task import Batch


@dataclass
class MultipleChoice(ManyTexts):
    """Choose the right one of several texts. The model gives each a score; the loss is the cross-entropy of the right one.

    An item is a question. Questions may have different numbers of choices.
    """

    model: str | None = key("google-bert/bert-base-cased", changes="model")
    """Model name on the Hub (owner/name) or local folder. null: a new model built from model_config, with a WordPiece tokenizer
    trained on the texts."""
    context_column: str | None = None
    """Column of what the model reads besides question and choice, such as an article. null: context, article, passage, sent1 or
    premise, if there is one. "": nothing."""
    question_column: str | None = None
    """Column of the questions, or of the beginnings that the choices go on with. null: question, or another usual name."""
    choices_column: str | None = None
    """Column of lists of choices, or of {text, label} with lists. null: choices, options or endings."""
    choices_columns: list[str] | None = None
    """Columns with a choice each, such as [ending0, ending1], instead of choices_column. null: those with usual names, if there
    is no column of lists."""
    answer_column: str | None = None
    """Column that names the right choice: its label, its letter (A for the first), its number (0 for the first), or its text;
    in all rows in the same way. null: answer, answerKey or label."""
    max_length: int = key(512, ge=3)
    """Maximum length of context, question and a choice together, in tokens; of the two texts that the model reads, the longer
    one is truncated at the end."""

    auto_class = "AutoModelForMultipleChoice"
    metric_directions = directions("accuracy")
    sample_fields = ("question", "answer", "chosen")
    settled_fields = ("context_column", "choices_columns")
    columns: ClassVar[Mapping[str, Role]] = {
        "context": Role("text", CONTEXTS, optional_in={"train", "predict"}),
        "question": Role("text", QUESTIONS),
        "choices": Role("list of texts", CHOICES),
        "answer": Role("label", ANSWERS, optional_in={"predict"}),
    }

    def field_problems(self) -> Iterator[str]:
        yield from super().field_problems()
        if self.choices_columns is not None and len(self.choices_columns) < 2:
            yield f"task.choices_columns={self.choices_columns} must be two columns at least."
        if self.choices_columns and self.choices_column:
            yield f"task.choices_column={self.choices_column} and task.choices_columns are both set. Set one of them to null."

    # Data

    def find_columns(self, rows: Dataset) -> dict[str, str]:
        """Return the columns, and settle on those that are not in all data."""
        names, settled = rows.column_names, copy(self)
        if self.context_column is None:
            taken = {self.question_column, self.choices_column, self.answer_column, *(self.choices_columns or ())}
            self.context_column = next((name for name in CONTEXTS if name in {*names} - taken), "")
        settled.context_column = self.context_column or None
        if self.choices_column is None and self.choices_columns is None and not {*CHOICES} & {*names}:
            settled.choices_columns = sorted(filter(CHOICE.fullmatch, names)) or None
        found = find_columns(self.columns, settled, rows)
        self.choices_columns = settled.choices_columns
        return found

    @property
    def compared_columns(self) -> list[str]:
        return [*super().compared_columns, *self.columns_for("choices")]

    def _read(self, rows: Any) -> Iterator[tuple[Any, Any, Any]]:
        """Yield context, question and choices of rows, given as lists of the values of each column."""
        choices = [rows[column][:] for column in self.columns_for("choices")]
        contexts = rows[self.context_column][:] if self.context_column else [None] * len(choices[0])
        listed = choices[0] if self.choices_columns is None else gathered(choices)
        return zip(contexts, rows[self.read_columns["question_column"]][:], listed, strict=True)

    def training_texts(self) -> Iterator[str]:
        rows = self.rows_to_learn(self.read_columns["question_column"])
        for context, question, choices in self._read(rows):
            yield from (context or "", question, *filter(None, texts_of(choices)))

    def targets(self, split: str) -> dict[str, np.ndarray]:
        """Return label, the number of the right choice (N,) int64, and what ``rows_of`` needs."""
        import numpy as np

        rows, row_of = self.rows[split], self.row_of(split)

        def name(index: int) -> str:
            return f"Row {row_of(index)} of the {split} split"

        choices = [own for _, _, own in self._read(rows)]
        for index, own in enumerate(choices):
            if wrong := problem_of(own):
                raise DataError(f"{name(index)} has {wrong}.")
        labels = right_choices(rows[self.read_columns["answer_column"]][:], choices, name)
        return {"label": np.array(labels, np.int64), **self.places_of(split)}

    def encode(self, rows: dict[str, list]) -> dict[str, list]:
        return self._tokens([*self._read(rows)], self.named_config)

    def _tokens(self, rows: Sequence[tuple[Any, Any, Any]], config: PreTrainedConfig) -> dict[str, list]:
        from hftune.data.tokenized import pair_ids

        pairs = [sides(context, question, texts_of(choices)) for context, question, choices in rows]
        firsts, seconds = zip(*(pair for of_row in pairs for pair in of_row), strict=True)
        found = pair_ids(firsts, seconds, self.text_tokenizer, self.max_length, self.has_types(config))
        encoded: dict[str, list] = {name: [] for name in (*found, "texts")}
        start = 0
        for count in map(len, pairs):
            part = {name: values[start : start + count] for name, values in found.items()}
            encoded["cut"].append(any(part.pop("cut")))
            encoded["texts"].append([*map(len, part["input_ids"])])
            for name, texts in part.items():
                encoded[name].append([number for text in texts for number in text])
            start += count
        return encoded

    def encoded_by(self) -> Any:
        return [self.max_length, self.has_types(self.named_config)]

    # Loss and evaluation

    def inputs(self, batch: Batch) -> dict[str, Tensor]:
        """Return each choice as a question with a single one, (N, 1, T): the model scores it by itself in any case."""
        return {name: tensor_NT[:, None] for name, tensor_NT in super().inputs(batch).items()}

    def collate(self, examples: Sequence[dict[str, Any]]) -> Batch:
        """Add places, (B, K) int64: where the choices of each sample are among those of all; -1 where it has no more."""
        import torch
        from torch.nn.utils.rnn import pad_sequence

        batch = super().collate(examples)
        places = torch.arange(len(batch["input_ids"])).split(batch["texts"].tolist())
        return {**batch, "places": pad_sequence(places, batch_first=True, padding_value=-1)}

    def target(self, batch: Batch) -> dict[str, Tensor]:
        return {name: batch[name] for name in ("labels", "places")}

    def num_items(self, target: Mapping[str, Tensor]) -> int:
        return len(target["labels"])

    def loss(self, outputs: Any, target: Mapping[str, Tensor]) -> Tensor:
        return self.sample_losses(outputs, target).sum()

    def sample_losses(self, outputs: Any, target: Mapping[str, Tensor]) -> Tensor:
        return token_loss(_scores(outputs, target)[:, None], target["labels"][:, None], "none")

    def predictions(self, outputs: Any, model: PreTrainedModel, batch: Batch) -> list[dict[str, Any]]:
        """Return rows of question, choices, label and prediction (numbers of choices), and the probabilities of both."""
        return late_rows(self._rows, _scores(outputs, batch).float().softmax(1), batch)

    def _rows(self, shares_BK: Tensor, batch: Batch) -> list[dict[str, Any]]:
        rows = []
        found = zip(self._read(self.rows_of(batch)), batch["labels"].tolist(), shares_BK.tolist(), strict=True)
        for (_, question, choices), label, share in found:
            row = {"question": beginning(question), "choices": [*map(beginning, texts_of(choices))], "label": label}
            chosen = max(range(len(share)), key=share.__getitem__)
            probabilities = {"probability": round(share[chosen], 6), "label_probability": round(share[label], 6)}
            rows.append({**row, "prediction": chosen, **probabilities})
        return rows

    def describe(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the rows with the right choice and the chosen one, and what the probability of the right one lacks to 1."""
        return [
            {
                **row,
                "answer": row["choices"][row["label"]],
                "chosen": row["choices"][row["prediction"]],
                "error": round(1 - row["label_probability"], 6),
            }
            for row in rows
        ]

    def metrics(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        return {"accuracy": sum(row["label"] == row["prediction"] for row in rows) / len(rows)}

    # Use

    def input_columns(self) -> dict[str, str | None]:
        context = {"context": self.context_column} if self.context_column else {}
        choices = {name: name for name in self.choices_columns or ()} or {"choices": self.choices_column}
        return {**context, "question": self.question_column, **choices}

    def raw_inputs(self, rows: Mapping[str, list]) -> list:
        others = {name: values for name, values in rows.items() if name in ("context", "question")}
        choices = {name: values for name, values in rows.items() if name not in others}
        listed = choices["choices"] if self.choices_columns is None else gathered([*choices.values()])
        return [list(values) for values in zip(*others.values(), listed, strict=True)]

    def example_inputs(self) -> list:
        rows = self._read(self.some_rows())
        return ["\t".join(filter(None, (context, question, *texts_of(choices)))) for context, question, choices in rows]

    def predict(self, model: PreTrainedModel, inputs: list[Any]) -> list[dict[str, Any]]:
        """Return of each input the chosen text as answer, its number from 0 as index, and its probability.

        An input is a list of the question and the list of the choices, the context before them if the task has one; or a text
        with tabs between all of them.
        """
        rows, before = [], 1 + bool(self.context_column)
        for index, value in enumerate(inputs):
            given = value.split("\t") if isinstance(value, str) else value
            given = [*given[:before], given[before:]] if isinstance(value, str) else given
            if not isinstance(given, (list, tuple)) or len(given) != before + 1 or problem_of(given[-1]):
                raise DataError(
                    f"Input {index} is no {'context, ' if before > 1 else ''}question and list of two choices or more: give a "
                    "list of them, or a text with tabs between all of them."
                )
            rows.append((*((None,) if before == 1 else ()), *given))
        for texts in [*zip(*rows, strict=True)][-before - 1 : -1]:
            check_inputs(texts)
        columns = self._tokens(rows, model.config)
        batch = self.collate([dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)])
        batch = {name: tensor.to(model.device) for name, tensor in batch.items()}
        shares = _scores(model(**self.inputs(batch)), batch).float().softmax(1).tolist()
        found = []
        for (_, _, choices), share in zip(rows, shares, strict=True):
            chosen = max(range(len(share)), key=share.__getitem__)
            found.append({"answer": texts_of(choices)[chosen], "index": chosen, "probability": round(share[chosen], 6)})
        return found


def _scores(outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the scores of the choices of each sample, (B, K), -inf where it has no more."""
    places_BK = batch["places"]
    return outputs.logits.flatten()[places_BK.clamp(min=0)].masked_fill(places_BK < 0, float("-inf"))


def problem_of(choices: Any) -> str | None:
    """Return what is wrong with choices, a part of a sentence; None if nothing is."""
    texts = texts_of(choices) if isinstance(choices, (list, tuple, dict)) else []
    if len(texts) < 2:
        return "fewer than two choices"
    return "an empty choice" if any(not isinstance(text, str) or not text.strip() for text in texts) else None

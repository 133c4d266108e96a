"""Chats: a language model learns the assistant's part of conversations, as its chat template writes them.

torch, transformers and datasets are imported inside the methods, so that mistyped recipes are refused without waiting for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from hftune.config.keys import key
from hftune.data.chats import ChatError, ChatFormat, chat_of, fitted
from hftune.data.messages import BadChat
from hftune.errors import DataError
from hftune.metrics.records import directions
from hftune.tasks.blocks import perplexity, token_rows
from hftune.tasks.chat_task import ChatTask
from hftune.tasks.late_rows import late_rows
from hftune.tasks.text import TokenTask, beginning, score_names, text_scores

if TYPE_CHECKING:
    from datasets import Dataset
    from torch import Tensor
    from transformers import GenerationConfig, PreTrainedModel

    from hftune.data.tokenized import Texts
    from hftune.task import Batch, Direction

MESSAGES = ("messages", "conversations", "conversation", "chat")
"""Usual names of a column of chats."""
SCORES = ("exact_match", "rouge")
"""What ``task.scores`` may name."""
MAX_NEW_TOKENS = 256
"""Tokens of an answer that an evaluation scores, if neither the recipe nor the model says how many."""


@dataclass
class Chats(ChatTask, TokenTask):
    """Learn to answer in chats. The loss is cross-entropy of the answers, each with the token that ends it; an item is a token.

    Every trained token is predicted from the very tokens that inference would feed. A chat is one sample where its template
    allows that, or else several, each with the answers that it writes alike.
    """

    messages_column: str | None = None
    """Column of the chats: lists of messages, each with role and content. null: messages, or what is usual, if there is one."""
    prompt_column: str | None = None
    """Instead of messages_column: column of prompts, texts or lists of messages. null: prompt, if completion is there, too."""
    completion_column: str | None = None
    """Column of the answers to prompt_column, texts or lists of messages. null: completion."""
    train_on: Literal["assistant", "last", "all"] = "assistant"
    """assistant: all answers. last: the last answer of each chat that is not marked with "train": false. all: every token, the
    users' messages included. A message with "train": false is not trained on."""
    too_long: Literal["refuse", "drop", "cut"] = "refuse"
    """What to do with longer chats: refuse the data, drop these chats, or cut their last messages, as whole turns."""
    generation: dict[str, Any] | None = key(None, changes="output")
    """Settings with which evaluations generate the last answer of each sample, such as {max_new_tokens: 64}: fields of
    transformers' GenerationConfig. Without do_sample, they take the likeliest token. The export keeps its base's settings.
    null: only the loss is computed."""
    scores: list[str] = key(lambda: ["exact_match"], choices=SCORES, changes="output")
    """Metrics of the generated answers: exact_match and rouge (both in [0, 1])."""
    language: str = "en"
    """Language of the answers (ISO 639-1), by which ROUGE cuts words."""

    scored_head = True
    prepares_as_needed = True

    @property
    def metric_directions(self) -> dict[str, Direction | None]:  # type: ignore[override]  # depends on scores
        if self.generation is None:
            return directions("perplexity")
        return directions("perplexity", *score_names(self.scores, SCORES, self.language))

    @property
    def sample_fields(self) -> Sequence[str]:
        return ("prompt", "answer", "perplexity" if self.generation is None else "generated")

    def field_problems(self) -> Iterator[str]:
        yield from super().field_problems()
        if (self.prompt_column is None) != (self.completion_column is None):
            missing = "prompt" if self.prompt_column is None else "completion"
            yield f"task.{missing}_column is missing: set both columns, or messages_column instead."
        if self.messages_column is not None and self.prompt_column is not None:
            yield "task.messages_column and task.prompt_column both name the chats. Leave one of them out."
        if self.too_long == "drop" and (self.prepare == "as_needed" or self.bad_rows == "skip"):
            key = "prepare=as_needed" if self.prepare == "as_needed" else "bad_rows=skip"
            yield f"task.too_long=drop looks at all chats at the start, unlike task.{key}. Use refuse and task.bad_rows=skip."
        if self.generation is not None and self.train_on == "all":
            yield "task.generation compares answers, which task.train_on=all does not know. Set that to assistant or last."

    # Data

    def messages_of(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        return chat_of(row, self.read_columns)[0]

    def find_columns(self, rows: Dataset) -> dict[str, str]:
        """Return the columns of the chats, and that of their tools, if there is one."""
        names = rows.column_names
        tools = self.tools_column or ("tools" if "tools" in names else None)
        found = {} if tools is None else {"tools_column": tools}
        if self.messages_column is not None:
            return {"messages_column": self.messages_column, **found}
        if self.prompt_column is not None and self.completion_column is not None:
            return {"prompt_column": self.prompt_column, "completion_column": self.completion_column, **found}
        usual = [name for name in MESSAGES if name in names]
        if usual:
            return {"messages_column": usual[0], **found}
        if {"prompt", "completion"} <= {*names}:
            return {"prompt_column": "prompt", "completion_column": "completion", **found}
        raise DataError(
            "The train split has no column of chats, such as messages, and none of prompt and completion. It has: "
            f"{', '.join(names)}. Set task.messages_column, or task.prompt_column and task.completion_column."
        )

    def datasets(self) -> dict[str, Texts]:
        """Return the samples of each split: input_ids and labels (NO_LABEL where nothing is trained), their row, and lost: how
        many answers of the row were cut, in the first of its samples."""
        import numpy as np

        found = dict(super().datasets())
        for split, samples in self._known(found).items():
            lengths = self.lengths(samples)
            if count := int((lengths > self.max_length).sum()):  # where such chats are dropped or cut, none is left
                worst = int(lengths.argmax())
                row = self.row_of(split)(int(np.asarray(samples.column("row"))[worst]))
                raise DataError(
                    f"The {split} split has {count:,} {'chat' if count == 1 else 'chats'} longer than task.max_length="
                    f"{self.max_length} tokens; the longest has {lengths[worst]:,}{self.of_these(samples, worst)}, at row "
                    f"{row}. Raise it, or set "
                    "task.too_long=drop to leave these chats out, or cut to leave out their last turns."
                )
        return found

    def of_these(self, samples: Texts, index: int) -> str:
        """Return what many of the tokens of a sample are, part of a sentence."""
        return ""

    def _known(self, datasets: Mapping[str, Any]) -> dict[str, Texts]:
        """Return the splits whose samples are made before training."""
        return {split: samples for split, samples in datasets.items() if split not in self.later}

    @property
    def _settings(self) -> dict[str, Any]:
        return {"train_on": self.train_on, "max_length": self.max_length, "too_long": self.too_long}

    def encoded_by(self) -> Any:
        return [self.chat_format.key, self._settings]

    def encoder(self, split: str) -> Callable[[dict[str, list]], dict[str, list]]:
        """Return what makes one sample of each row of a split, or raises DataError."""

        def one_each(rows: dict[str, list]) -> dict[str, list]:
            indices = [*range(len(rows[next(iter(rows))]))]
            try:
                found = encode(rows, indices, self.chat_format, self.read_columns, **self._settings)
            except BadChat as error:
                raise DataError(self._about_row(split, *error.args)) from error
            for index in indices:
                lengths = [len(ids) for ids, row in zip(found["input_ids"], found["row"], strict=True) if row == index]
                if len(lengths) > 1:
                    reason = f"It is {len(lengths)} samples, as its template writes it. Set task.prepare=all."
                    raise DataError(self._about_row(split, index, reason))
                if not lengths or lengths[0] > self.max_length:
                    reason = f"It is longer than task.max_length={self.max_length}. Raise that, or set task.bad_rows=skip."
                    raise DataError(self._about_row(split, index, reason))
            return found

        return one_each

    def tokenized(self, split: str) -> Any:
        from hftune.data.tokenized import flat_arrays

        if split in self.later:
            return super().tokenized(split)

        def arrays(encoded: Dataset) -> dict[str, Any]:
            if len(encoded) == 0:
                raise DataError(
                    f"No chat of the {split} split has at most task.max_length={self.max_length} tokens. Raise it; or, if the "
                    "template repeats much, change task.template_options."
                )
            return flat_arrays(encoded)

        return self.written("chats", split, encode, self._settings, arrays)

    def notices(self, datasets: Mapping[str, Any], model: PreTrainedModel) -> list[str]:
        import numpy as np

        from hftune.data import notices

        messages, known = super().notices(datasets, model), self._known(datasets)
        messages += notices.shared({split: self.compared(samples) for split, samples in known.items()}, "chats")
        for split, samples in known.items():
            total, used = len(self.rows[split]), len(np.unique(np.asarray(samples.column("row"))))
            if used < total:
                messages.append(
                    f"Dropped {total - used:,} of {total:,} chats of the {split} split, longer than "
                    f"task.max_length={self.max_length} tokens."
                )
            lost = np.asarray(samples.column("lost"))
            if lost.any():
                messages.append(
                    f"Cut {int((lost > 0).sum()):,} of {total:,} chats of the {split} split to task.max_length="
                    f"{self.max_length} tokens: {int(lost.sum()):,} answers are left out."
                )
            if len(samples) > used:
                messages.append(
                    f"The {used:,} chats of the {split} split are {len(samples):,} samples: the template writes earlier turns "
                    "differently once a later one follows."
                )
        return messages

    def compared(self, samples: Texts) -> Any:
        """Return the column by which samples are the same as others."""
        return samples.column("input_ids")

    # Evaluation

    def build_model(self) -> PreTrainedModel:
        model = super().build_model()
        self._evaluation_settings(model.generation_config)  # refuses what the recipe cannot ask for
        return model

    def predictions(self, outputs: Any, model: PreTrainedModel, batch: Batch) -> list[dict[str, Any]]:
        """Return rows of prompt (its end), answer (the last one), tokens (number trained), loss (sum over them), perplexity,
        and generated, if the recipe has settings for it."""
        prompts: list[list[int]] = []
        sums = token_rows(outputs, batch["labels"])

        def made(ids_NT: Tensor, labels_NT: Tensor) -> list[dict[str, Any]]:
            rows = []
            for ids, labels, row in zip(ids_NT.tolist(), labels_NT.tolist(), sums, strict=True):
                before, prompt, answer = self.answer_of(ids, labels)
                prompts.append(before)
                rows.append({"prompt": prompt, "answer": beginning(answer) if self.generation is None else answer, **row})
            return rows

        rows = late_rows(made, batch["input_ids"], batch["labels"])
        if self.generation is None:
            return rows
        rows = [*rows]  # fills in the prompts
        settings = self._evaluation_settings(model.generation_config)
        answers = self._generate(model, prompts, settings, beside=self.beside_batch(batch))
        return [{**row, "generated": self._text(ids)} for row, ids in zip(rows, answers, strict=True)]

    def beside_batch(self, batch: Batch) -> Any:
        """Return what ``beside`` does, of the prompts of a batch."""
        return None

    def _evaluation_settings(self, own: GenerationConfig) -> GenerationConfig:
        """Return a model's settings, changed as the recipe says: without chance, unless it asks for samples.

        Raises:
            ConfigError: task.generation has an unknown key, or values that cannot be used together.
        """
        from hftune.models.generation import changed, tidy

        given = self.generation or {}
        config = tidy(deepcopy(own), {"do_sample": False, **given})
        config.do_sample = bool(given.get("do_sample"))
        config.max_new_tokens = config.max_new_tokens or MAX_NEW_TOKENS
        return changed(config, given)

    def describe(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the rows with the mean loss of the trained tokens as their error."""
        return [{**row, "error": round(row["loss"] / row["tokens"], 6)} for row in rows]

    def metrics(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {
            "perplexity": perplexity(math.fsum(row["loss"] for row in rows), sum(row["tokens"] for row in rows))
        }
        if self.generation is None:
            return found
        texts, answers = [row["generated"] for row in rows], [row["answer"] for row in rows]
        return found | text_scores(self.scores, texts, answers, self.language)

    def marked(self, example: Mapping[str, Any]) -> list[tuple[str, bool]]:
        """Return the text of a sample in pieces, each with whether it is trained."""
        return self.pieces_of(example["input_ids"], example["labels"])


def encode(
    rows: dict[str, list],
    indices: list[int],
    chats: ChatFormat,
    columns: Mapping[str, str],
    train_on: str,
    max_length: int,
    too_long: str,
) -> dict[str, list]:
    """Make samples of some rows, given as lists of the values of each column; see ``Chats.datasets``.

    Raises:
        BadChat: a row cannot be trained on.
    """
    found: dict[str, list] = {"input_ids": [], "labels": [], "row": [], "lost": []}
    for place, index in enumerate(indices):
        try:
            row = {name: values[place] for name, values in rows.items()}
            messages, tools = chats.read(row, columns, completion_only=train_on != "all")
            whole = chats.samples(messages, tools, train_on)
        except ChatError as error:
            raise BadChat(index, str(error)) from error
        samples = whole if too_long == "refuse" else fitted(whole, max_length, too_long)  # those refused are counted later
        lost = sum(len(sample.ends) for sample in whole) - sum(len(sample.ends) for sample in samples)
        found["input_ids"] += [sample.input_ids for sample in samples]
        found["labels"] += [sample.labels for sample in samples]
        found["row"] += [index] * len(samples)
        found["lost"] += [lost, *[0] * (len(samples) - 1)] if samples else []
        for name, values in chats.beside(messages, samples).items():
            found.setdefault(name, []).extend(values)
    return found

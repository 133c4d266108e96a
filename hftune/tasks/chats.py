"""Chats: a language model learns the assistant's part of conversations, as its chat template writes them.

torch, transformers and datasets are imported inside the methods, so that mistyped recipes are refused without waiting for them.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from hftune.config.keys import key
from hftune.data.chats import ChatError, ChatFormat, fitted, messages_of, tools_of
from hftune.data.columns import TEXTS, Role
from hftune.data.messages import as_messages, without_nulls
from hftune.errors import ConfigError, DataError
from hftune.hooks import Hooks
from hftune.metrics.records import directions
from hftune.tasks.language_modeling import perplexity, token_rows
from hftune.tasks.text import MAX_SHOWN, NO_LABEL, TokenTask, beginning, pieces, score_names, text_scores

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
    from transformers.generation import BaseStreamer

    from hftune.data.tokenized import Texts
    from hftune.task import Batch, Direction

MESSAGES = ("messages", "conversations", "conversation", "chat")
"""Usual names of a column of chats."""
SCORES = ("exact_match", "rouge")
"""What ``task.scores`` may name."""
LEARNED = 2**16
"""Chats that the tokenizer of a new model is trained on, at most: more make hardly another vocabulary."""
MAX_NEW_TOKENS = 256
"""Tokens of an answer that an evaluation scores, if neither the recipe nor the model says how many."""
MAX_REPLY_TOKENS = 1024
"""Tokens of an answer that a user asked for, if the model does not say how many."""


@dataclass
class Chats(TokenTask):
    """Learn to answer in chats. The loss is cross-entropy of the answers, each with the token that ends it; an item is a token.

    Every trained token is predicted from the very tokens that inference would feed. A chat is one sample where its template
    allows that, or else several, each with the answers that it writes alike.
    """

    model: str | None = key("HuggingFaceTB/SmolLM2-360M-Instruct", changes="model")
    """Causal language model: name on the Hub (owner/name) or local folder. null: a new model built from model_config, with a
    byte-level tokenizer trained on the chats."""
    messages_column: str | None = None
    """Column of the chats: lists of messages, each with role and content. null: messages, or what is usual, if there is one."""
    tools_column: str | None = None
    """Column of the tools that a chat may call: their JSON schemas. null: tools, if there is one."""
    prompt_column: str | None = None
    """Instead of messages_column: column of prompts, texts or lists of messages. null: prompt, if completion is there, too."""
    completion_column: str | None = None
    """Column of the answers to prompt_column, texts or lists of messages. null: completion."""
    train_on: Literal["assistant", "last", "all"] = "assistant"
    """assistant: all answers. last: the last answer of each chat that is not marked with "train": false. all: every token, the
    users' messages included. A message with "train": false is not trained on."""
    max_length: int = key(2048, ge=3)
    """Maximum length of a chat in tokens."""
    too_long: Literal["refuse", "drop", "cut"] = "refuse"
    """What to do with longer chats: refuse the data, drop these chats, or cut their last messages, as whole turns."""
    chat_template: str | None = None
    """File with the chat template, in Jinja, such as chat_template.jinja. null: the tokenizer's own; ChatML for a new model."""
    template_options: dict[str, Any] = field(default_factory=dict)
    """Variables of the chat template, such as {enable_thinking: false}; `hftune predict` passes them as well."""
    date: str | None = None
    """Date that a template writes which asks for today's, such as 2026-11-23. null: the day on which the run starts, which a
    resumed run keeps."""
    generation: dict[str, Any] | None = key(None, changes="output")
    """Settings with which evaluations generate the last answer of each sample, such as {max_new_tokens: 64}: fields of
    transformers' GenerationConfig. Without do_sample, they take the likeliest token. The export keeps its base's settings.
    null: only the loss is computed."""
    scores: list[str] = key(lambda: ["exact_match"], choices=SCORES, changes="output")
    """Metrics of the generated answers: exact_match and rouge (both in [0, 1])."""
    language: str = "en"
    """Language of the answers (ISO 639-1), by which ROUGE cuts words."""

    auto_class = "AutoModelForCausalLM"
    columns: ClassVar[Mapping[str, Role]] = {
        "prompt": Role("text or messages", ("prompt", "question", "instruction"), optional_in={"train"}, usual_inputs=TEXTS)
    }
    fold_rows = None  # a chat may be several samples
    samples_are = "samples"
    scored_head = True
    prepares_as_needed = True
    settled_fields = ("date",)
    libraries = (*TokenTask.libraries, "hftune.data.chats", "hftune.data.tokenized", "hftune.models.generation")

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
        if self.chat_template is not None and not Path(self.chat_template).expanduser().is_file():
            yield f"task.chat_template={self.chat_template}: there is no such file."
        if self.date is not None:
            try:
                datetime.date.fromisoformat(self.date)
            except ValueError:
                yield f"task.date={self.date} is not a date, such as 2026-11-23."
        if self.too_long == "drop" and (self.prepare == "as_needed" or self.bad_rows == "skip"):
            key = "prepare=as_needed" if self.prepare == "as_needed" else "bad_rows=skip"
            yield f"task.too_long=drop looks at all chats at the start, unlike task.{key}. Use refuse and task.bad_rows=skip."
        if self.generation is not None and self.train_on == "all":
            yield "task.generation compares answers, which task.train_on=all does not know. Set that to assistant or last."

    # Data

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

    @cached_property
    def text_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the model, with its chat template; or, for a new model, a byte-level one trained on the chats.

        Raises:
            ConfigError: there is no chat template.
        """
        tokenizer = super().text_tokenizer
        if self.chat_template is not None:
            tokenizer.chat_template = Path(self.chat_template).expanduser().read_text(encoding="utf-8")
        if not tokenizer.chat_template:
            raise ConfigError(
                f"task.model={self.model} has no chat template, so it is not known how to write a chat. Set "
                "task.chat_template to a file with one; or take a model with one, such as HuggingFaceTB/SmolLM2-360M-Instruct."
            )
        return tokenizer

    def new_tokenizer(self, cached: Callable[[Callable[[], Any]], Any]) -> PreTrainedTokenizerBase:
        from hftune.data.byte_tokenizer import END_OF_TURN, PAD, TURN, chat_tokenizer, train_bytes

        special = (PAD, TURN, END_OF_TURN)
        return chat_tokenizer(cached(lambda: train_bytes(self.training_texts(), self.vocab_size, special)))

    def training_texts(self) -> Iterator[str]:
        from hftune.batch_plan import spread

        rows = self.rows["train"]
        learned = spread(len(rows), LEARNED).tolist()
        for start in range(0, len(learned), 1000):  # of rows in place, too, reading one by one takes a millisecond each
            some = learned[start : start + 1000]
            columns = rows[some]
            for place, index in enumerate(some):
                try:
                    messages, _ = chat_of({name: values[place] for name, values in columns.items()}, self.read_columns)
                except ChatError as error:
                    raise DataError(self._about_row("train", index, str(error))) from error
                for message in messages:
                    yield message["role"]
                    yield message["content"]

    def _about_row(self, split: str, index: int, reason: str) -> str:
        return f"The {split} split cannot be trained on, at row {self.row_of(split)(index)}: {reason}"

    @cached_property
    def chat_format(self) -> ChatFormat:
        """How the model's template writes chats, and where its generation stops."""
        today = None if self.date is None else datetime.date.fromisoformat(self.date)
        stops = _as_list(self.own_generation.eos_token_id)
        return ChatFormat(self.text_tokenizer, options=self.template_options, stops=stops, today=today)

    def datasets(self) -> dict[str, Texts]:
        """Return the samples of each split: input_ids and labels (NO_LABEL where nothing is trained), their row, and lost: how
        many answers of the row were cut, in the first of its samples."""
        if self.chat_format.dated:
            self.date = self.chat_format.today.isoformat()
        import numpy as np

        found = {split: self.tokenized(split) for split in self.rows}
        for split, samples in self._known(found).items():
            lengths = self.lengths(samples)
            if count := int((lengths > self.max_length).sum()):  # where such chats are dropped or cut, none is left
                worst = int(lengths.argmax())
                row = self.row_of(split)(int(np.asarray(samples.column("row"))[worst]))
                raise DataError(
                    f"The {split} split has {count:,} {'chat' if count == 1 else 'chats'} longer than task.max_length="
                    f"{self.max_length} tokens; the longest has {lengths[worst]:,}, at row {row}. Raise it, or set "
                    "task.too_long=drop to leave these chats out, or cut to leave out their last turns."
                )
        return found

    def _known(self, datasets: Mapping[str, Any]) -> dict[str, Texts]:
        """Return the splits whose samples are made before training."""
        return {split: samples for split, samples in datasets.items() if split not in self.later}

    @property
    def _least_in_place(self) -> float:
        return math.inf if self.prepare == "auto" else super()._least_in_place  # a late chat may be several samples

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
        from hftune.data.cache import idle_cores, mapped
        from hftune.data.tokenized import cached_texts, flat_arrays, tokenizer_key

        if split in self.later:
            return super().tokenized(split)
        rows, tokenizer, settings = self.rows[split], self.text_tokenizer, self._settings

        def make() -> dict[str, Any]:
            given = {"chats": self.chat_format, "columns": self.read_columns, **settings}
            try:
                encoded = mapped(rows, encode, f"Tokenizing {split}", idle_cores(len(rows)), numbered=True, **given)
            except BadChat as error:
                raise DataError(self._about_row(split, *error.args)) from error
            if len(encoded) == 0:
                raise DataError(
                    f"No chat of the {split} split has at most task.max_length={self.max_length} tokens. Raise it; or, if the "
                    "template repeats much, change task.template_options."
                )
            return flat_arrays(encoded)

        depends_on = [rows._fingerprint, tokenizer_key(tokenizer), self.read_columns, self.chat_format.key, settings]
        return cached_texts(["chats", *depends_on], make)

    def samples_of_each(self, dataset: Any) -> list[int]:
        import numpy as np

        if "train" in self.later:
            return super().samples_of_each(dataset)
        ends = np.cumsum(self.mixed.sizes(self.rows["train"]))
        counts = np.diff(np.searchsorted(dataset.column("row"), ends), prepend=0).tolist()
        if 0 in counts:
            raise DataError(
                f"task.datasets: all chats of {self.mixed.names[counts.index(0)]} are longer than task.max_length="
                f"{self.max_length} tokens, and task.too_long={self.too_long} leaves them out. Raise the first, or leave this "
                "data set out."
            )
        return counts

    def notices(self, datasets: Mapping[str, Any], model: PreTrainedModel) -> list[str]:
        import numpy as np

        from hftune.data import notices

        messages, known = super().notices(datasets, model), self._known(datasets)
        messages += notices.shared({split: samples.column("input_ids") for split, samples in known.items()}, "chats")
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
        if self.chat_format.dated:
            messages.append(f"The chat template writes the date: task.date={self.date}, in all chats and after a resume.")
        new = sorted({*self.chat_format.stops} - {*_as_list(self.own_generation.eos_token_id)})
        if self.model is not None and new:
            names = ", ".join(self.text_tokenizer.convert_ids_to_tokens(new))
            messages.append(f"Generation with the trained model stops at {names} as well, which ends the template's answers.")
        return messages

    # Model

    @cached_property
    def named_config(self) -> PreTrainedConfig:
        """The config of the model. Its padding stays as it is: with the end token as padding, some models never train it."""
        from hftune.models.pretrained import load_config

        if self.model is not None:
            return super().named_config
        tokens = self.text_tokenizer
        fresh = {"vocab_size": len(tokens), "bos_token_id": None, "eos_token_id": tokens.eos_token_id}
        return load_config(None, {**self.model_config, **fresh})

    def build_model(self) -> PreTrainedModel:
        """Load the model, or build a new one. It keeps its generation settings, and learns where the template's answers end."""
        config = self.named_config
        words = config.get_text_config().vocab_size
        if words < len(self.text_tokenizer):
            raise ConfigError(
                f"task.model={self.model} has weights for {words} tokens, but its tokenizer writes {len(self.text_tokenizer)}."
            )
        model = self.load_model(config)
        model.generation_config = self._generation_of(self.own_generation)
        self._evaluation_settings(model.generation_config)  # refuses what the recipe cannot ask for
        return model

    def _generation_of(self, own: GenerationConfig) -> GenerationConfig:
        """Return a model's own settings with the stops of its chats, as its export has them."""
        from hftune.models.generation import tidy

        config = tidy(deepcopy(own))
        config.update(eos_token_id=list(self.chat_format.stops), pad_token_id=self.text_tokenizer.pad_token_id, max_length=None)
        return config

    def inputs(self, batch: Batch) -> dict[str, Any]:
        return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "use_cache": False}

    # Evaluation

    def predictions(self, outputs: Any, model: PreTrainedModel, batch: Batch) -> list[dict[str, Any]]:
        """Return rows of prompt (its end), answer (the last one), tokens (number trained), loss (sum over them), perplexity,
        and generated, if the recipe has settings for it."""
        prompts, rows = [], []
        for ids, labels, row in zip(
            batch["input_ids"].tolist(), batch["labels"].tolist(), token_rows(outputs, batch["labels"]), strict=True
        ):
            start = end = max(place for place, label in enumerate(labels) if label != NO_LABEL)
            while start > 0 and labels[start - 1] != NO_LABEL:  # to where the last answer begins
                start -= 1
            prompts.append(ids[: start + 1])
            prompt, answer = self._text(prompts[-1]).strip(), self._text(labels[start : end + 1])
            shown = prompt if len(prompt) <= MAX_SHOWN else f"\N{HORIZONTAL ELLIPSIS}{prompt[1 - MAX_SHOWN :]}"
            rows.append({"prompt": shown, "answer": beginning(answer) if self.generation is None else answer, **row})
        if self.generation is None:
            return rows
        texts = self._generate(model, prompts, self._evaluation_settings(model.generation_config))
        return [{**row, "generated": text} for row, text in zip(rows, texts, strict=True)]

    def _text(self, ids: Sequence[int]) -> str:
        return self.text_tokenizer.decode(ids, skip_special_tokens=True)

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

    def _generate(
        self,
        model: PreTrainedModel,
        prompts: Sequence[Sequence[int]],
        config: GenerationConfig,
        streamer: BaseStreamer | None = None,
    ) -> list[str]:
        """Return the model's answer to each prompt, cut where the model's positions end, whatever prompts are beside it."""
        from hftune.data.tokenized import Ragged
        from hftune.models.pretrained import max_positions

        positions, most = max_positions(model), config.max_new_tokens or MAX_REPLY_TOKENS
        pad = self.text_tokenizer.pad_token_id
        rooms = [most if positions is None else min(most, max(1, positions - len(prompt))) for prompt in prompts]
        answers: dict[int, str] = {}
        for room in sorted(set(rooms)):  # only one, unless a prompt leaves less
            places = [place for place, own in enumerate(rooms) if own == room]
            limited = deepcopy(config)
            limited.max_new_tokens = room
            ids_NT, mask_NT = Ragged.of([prompts[place] for place in places]).padded(pad, "left")
            given = {"input_ids": ids_NT.to(model.device), "attention_mask": mask_NT.to(model.device)}
            texts_NT = model.generate(**given, generation_config=limited, streamer=streamer)[:, ids_NT.shape[1] :]
            answers |= zip(places, map(self._text, texts_NT.tolist()), strict=True)
        return [answers[place] for place in range(len(prompts))]

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
        labels = list(map(int, example["labels"]))
        ids = [*map(int, example["input_ids"]), labels[-1]]  # a sample ends with a trained token
        return pieces(self.text_tokenizer, ids, [False, *(label != NO_LABEL for label in labels)])

    # Use

    def load(self, directory: Path) -> PreTrainedModel:
        model = super().load(directory)
        self.own_generation = model.generation_config
        model.generation_config = self._generation_of(model.generation_config)  # the recipe's may have changed since
        return model

    def example_inputs(self) -> list[str]:
        """Return what the user says first in two chats: MLflow keeps texts, but no lists of messages."""
        chats = [chat_of(row, self.read_columns)[0] for row in self.some_rows()]
        return [message["content"] for chat in chats for message in chat if message["role"] == "user"][:2]

    def raw_inputs(self, rows: Mapping[str, list]) -> list:
        """Return what some rows of a table ask: texts, or lists of messages, which may be JSON text."""
        return [as_messages(without_nulls(value)) for value in Hooks.raw_inputs(self, rows)]

    def input_lengths(self, inputs: list) -> list[int] | None:
        return [len(self.prompt_ids(index, value)) for index, value in enumerate(inputs)]

    def prompt_ids(self, index: int, value: Any) -> list[int]:
        """Return the tokens of a raw input with the number ``index``: a text, a list of messages, or these with their tools.

        Raises:
            DataError: it cannot be answered.
        """
        if isinstance(value, str) and not value.strip():
            raise DataError(f"Input {index} is an empty text.")
        messages = [{"role": "user", "content": value}] if isinstance(value, str) else value
        row = messages if isinstance(messages, Mapping) else {"messages": messages}
        try:
            chat = messages_of(row, has_answer=False, as_written=True)
            if chat[-1]["role"] not in ("user", "tool"):
                raise ChatError(f"The last message is the {chat[-1]['role']}'s, so that there is nothing to answer.")
            return self.chat_format.prompt(chat, tools_of(row, "tools", as_written=True))
        except ChatError as error:
            raise DataError(f"Input {index} cannot be answered: {error}") from error

    def reply(self, model: PreTrainedModel, messages: list[dict[str, Any]], streamer: BaseStreamer | None = None) -> str:
        """Return the answer to a chat; a streamer of transformers gets its tokens as they are generated, without gradients."""
        import torch

        from hftune.models.generation import tidy

        config = tidy(deepcopy(model.generation_config), {"num_beams": 1})
        config.num_beams = 1  # beams cannot be streamed
        with torch.no_grad():
            return self._generate(model, self._prompts(model, [messages]), config, streamer)[0]

    def predict(self, model: PreTrainedModel, inputs: list[Any]) -> list[dict[str, Any]]:
        """Return the answer to each input as ``generated``: a text, a list of messages, or {messages, tools}."""
        prompts = self._prompts(model, inputs)
        return [{"generated": text} for text in self._generate(model, prompts, model.generation_config)]

    def _prompts(self, model: PreTrainedModel, inputs: Sequence[Any]) -> list[list[int]]:
        """Return the tokens of raw inputs, or raise DataError if one leaves the model no position for an answer."""
        from hftune.models.pretrained import max_positions

        prompts, positions = [self.prompt_ids(index, value) for index, value in enumerate(inputs)], max_positions(model)
        for index, prompt in enumerate(prompts):
            if positions is not None and len(prompt) >= positions:
                raise DataError(
                    f"Input {index} has {len(prompt):,} tokens, which leaves no room for an answer: the model has "
                    f"{positions:,} positions. Shorten it."
                )
        return prompts


class BadChat(Exception):
    """A row that cannot be trained on: its index and the reason."""


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
            messages, tools = chat_of(row, columns, completion_only=train_on != "all")
            whole = chats.samples(messages, tools, train_on)
        except ChatError as error:
            raise BadChat(index, str(error)) from error
        samples = whole if too_long == "refuse" else fitted(whole, max_length, too_long)  # those refused are counted later
        lost = sum(len(sample.ends) for sample in whole) - sum(len(sample.ends) for sample in samples)
        found["input_ids"] += [sample.input_ids for sample in samples]
        found["labels"] += [sample.labels for sample in samples]
        found["row"] += [index] * len(samples)
        found["lost"] += [lost, *[0] * (len(samples) - 1)] if samples else []
    return found


def chat_of(
    row: Mapping[str, Any], columns: Mapping[str, str], completion_only: bool = True
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """Return the checked messages of a row and its tools, or raise ChatError.

    Args:
        columns: see ``Chats.find_columns``.
        completion_only: see ``messages_of``.
    """
    names = [columns[key] for key in ("messages_column", "prompt_column", "completion_column") if key in columns]
    tools = columns.get("tools_column")
    return messages_of(row, names, completion_only=completion_only), None if tools is None else tools_of(row, tools)


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]

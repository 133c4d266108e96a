"""The base of tasks on conversations: their model, its chat template, and answers from the finished model.

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
from typing import TYPE_CHECKING, Any, ClassVar

from hftune.config.keys import key
from hftune.data.chats import ChatError, ChatFormat
from hftune.data.columns import TEXTS, Role
from hftune.data.messages import BadChat, as_messages, without_nulls
from hftune.errors import ConfigError, DataError
from hftune.hooks import Hooks
from hftune.tasks.text import MAX_SHOWN, NO_LABEL, TextTask, pieces

if TYPE_CHECKING:
    from datasets import Dataset
    from torch import Tensor
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
    from transformers.generation import BaseStreamer

    from hftune.data.tokenized import Texts
    from hftune.task import Batch

LEARNED = 2**16
"""Chats that the tokenizer of a new model is trained on, at most: more make hardly another vocabulary."""
ASKED = {"messages_column": "messages", "tools_column": "tools", "image_column": "images"}
"""What a raw input has its messages, their tools and their pictures by."""
MAX_REPLY_TOKENS = 1024
"""Tokens of an answer that a user asked for, if the model does not say how many."""


@dataclass
class ChatTask(TextTask):
    """Base of tasks that learn from conversations, as the model's chat template writes them.

    A subclass says in ``messages_of`` where a row has its messages, and makes samples of them in ``tokenized``.
    """

    model: str | None = key("HuggingFaceTB/SmolLM2-360M-Instruct", changes="model")
    """Causal language model: name on the Hub (owner/name) or local folder. null: a new model built from model_config, with a
    byte-level tokenizer trained on the chats."""
    tools_column: str | None = None
    """Column of the tools that a chat may call: their JSON schemas. null: tools, if there is one."""
    max_length: int = key(2048, ge=3)
    """Maximum length of a chat in tokens."""
    chat_template: str | None = None
    """File with the chat template, in Jinja, such as chat_template.jinja. null: the tokenizer's own; ChatML for a new model."""
    template_options: dict[str, Any] = field(default_factory=dict)
    """Variables of the chat template, such as {enable_thinking: false}; `hftune predict` passes them as well."""
    date: str | None = None
    """Date that a template writes which asks for today's, such as 2026-11-23. null: the day on which the run starts, which a
    resumed run keeps."""

    auto_class = "AutoModelForCausalLM"
    columns: ClassVar[Mapping[str, Role]] = {
        "prompt": Role("text or messages", ("prompt", "question", "instruction"), optional_in={"train"}, usual_inputs=TEXTS)
    }
    generates: ClassVar[bool] = True
    """Whether the model writes answers, and so has generation settings; if not, it reads chats to their very end."""
    rows_each: ClassVar[int] = 1000
    """Rows that are worth a process of their own when they are tokenized."""
    fold_rows = None  # a chat may be several samples
    samples_are = "samples"
    settled_fields = ("date",)
    libraries = (*TextTask.libraries, "hftune.data.chats", "hftune.data.tokenized", "hftune.models.generation")

    def field_problems(self) -> Iterator[str]:
        yield from super().field_problems()
        if self.chat_template is not None and not Path(self.chat_template).expanduser().is_file():
            yield f"task.chat_template={self.chat_template}: there is no such file."
        if self.date is not None:
            try:
                datetime.date.fromisoformat(self.date)
            except ValueError:
                yield f"task.date={self.date} is not a date, such as 2026-11-23."

    # Data

    def messages_of(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the checked messages of a row, or raise ChatError."""
        raise NotImplementedError

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
                    messages = self.messages_of({name: values[place] for name, values in columns.items()})
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
        stops = _as_list(self.own_generation.eos_token_id) if self.generates else []
        return self.new_format(options=self.template_options, stops=stops, today=today)

    def new_format(self, **how: Any) -> ChatFormat:
        """Return a ``ChatFormat`` of the tokenizer, with these arguments."""
        return ChatFormat(self.text_tokenizer, **how)

    def datasets(self) -> Mapping[str, Any]:
        if self.chat_format.dated:
            self.date = self.chat_format.today.isoformat()
        return super().datasets()

    @property
    def _least_in_place(self) -> float:
        return math.inf if self.prepare == "auto" else super()._least_in_place  # a late chat may be several samples

    def written(
        self,
        name: str,
        split: str,
        encode: Callable[..., dict[str, list]],
        settings: Mapping[str, Any],
        arrays: Callable[[Dataset], dict[str, Any]],
    ) -> Texts:
        """Return the samples of a split, by ``name`` in the cache: the arrays of what ``encode`` makes of its rows.

        Raises:
            DataError: naming the row for which ``encode`` raised BadChat.
        """
        from hftune.data.cache import idle_cores, mapped
        from hftune.data.tokenized import cached_texts

        rows = self.rows[split]

        def make() -> dict[str, Any]:
            given = {"chats": self.chat_format, "columns": self.read_columns, **settings}
            try:
                return arrays(
                    mapped(rows, encode, f"Tokenizing {split}", idle_cores(len(rows), self.rows_each), numbered=True, **given)
                )
            except BadChat as error:
                raise DataError(self._about_row(split, *error.args)) from error

        return cached_texts([name, *self.depends_on(split), settings], make)

    def depends_on(self, split: str) -> list[Any]:
        """Return what the tokens of a split depend on, but for settings."""
        from hftune.data.tokenized import tokenizer_key

        rows = self.rows[split]
        return [rows._fingerprint, tokenizer_key(self.text_tokenizer), self.read_columns, self.chat_format.key]

    def samples_of_each(self, dataset: Any) -> list[int]:
        from hftune.data.mixture import samples_of_rows

        if "train" in self.later:
            return super().samples_of_each(dataset)
        counts = samples_of_rows(dataset.column("row"), self.mixed.sizes(self.rows["train"]))
        if 0 in counts:
            raise DataError(
                f"task.datasets: no row of {self.mixed.names[counts.index(0)]} has at most task.max_length="
                f"{self.max_length} tokens and is good, so that all are left out. Raise it, or leave this data set out."
            )
        return counts

    def notices(self, datasets: Mapping[str, Any], model: PreTrainedModel) -> list[str]:
        messages = super().notices(datasets, model)
        if self.chat_format.dated:
            messages.append(f"The chat template writes the date: task.date={self.date}, in all chats and after a resume.")
        if not self.generates or self.model is None:
            return messages
        if new := sorted({*self.chat_format.stops} - {*_as_list(self.own_generation.eos_token_id)}):
            names = ", ".join(self.text_tokenizer.convert_ids_to_tokens(new))
            messages.append(f"Generation with the trained model stops at {names} as well, which ends the template's answers.")
        return messages

    def answer_of(self, ids: Sequence[int], labels: Sequence[int]) -> tuple[list[int], str, str]:
        """Return the tokens before the last answer of a sample, the end of their text, and the text of the answer."""
        start = end = max(place for place, label in enumerate(labels) if label != NO_LABEL)
        while start > 0 and labels[start - 1] != NO_LABEL:  # to where the last answer begins
            start -= 1
        before = [*ids[: start + 1]]
        prompt = self._text(before).strip()
        shown = prompt if len(prompt) <= MAX_SHOWN else f"\N{HORIZONTAL ELLIPSIS}{prompt[1 - MAX_SHOWN :]}"
        return before, shown, self._text(labels[start : end + 1])

    def pieces_of(self, ids: Any, labels: Any) -> list[tuple[str, bool]]:
        """Return the text of a sample in pieces, each with whether it is trained; ``ids`` and ``labels`` are its arrays."""
        labels = list(map(int, labels))
        ids = [*map(int, ids), labels[-1]][: 1 + len(labels)]  # a sample ends with a trained token, which may not be read
        return pieces(self.text_tokenizer, ids, [False, *(label != NO_LABEL for label in labels)])

    # Model

    @cached_property
    def named_config(self) -> PreTrainedConfig:
        """The config of the model. Its padding stays as it is: with the end token as padding, some models never train it."""
        from hftune.models.pretrained import load_config

        if self.model is not None:
            return super().named_config
        tokens = self.text_tokenizer
        fresh = {"vocab_size": len(tokens), "bos_token_id": None, "eos_token_id": tokens.eos_token_id}
        return load_config(None, self.new_config(fresh))

    def new_config(self, of_tokens: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of a new model's config, with those that follow from its tokenizer."""
        return {**self.model_config, **of_tokens}

    def build_model(self) -> PreTrainedModel:
        """Load the model, or build a new one. It keeps its generation settings, and learns where the template's answers end."""
        config = self.named_config
        words = config.get_text_config().vocab_size
        if words + len(self.new_tokens or ()) < len(self.text_tokenizer):
            raise ConfigError(
                f"task.model={self.model} has weights for {words} tokens, but its tokenizer writes {len(self.text_tokenizer)}."
            )
        model = self.load_model(config)
        if self.generates:
            model.generation_config = self._generation_of(self.own_generation)
        return model

    def _generation_of(self, own: GenerationConfig) -> GenerationConfig:
        """Return a model's own settings with the stops of its chats, as its export has them."""
        from hftune.models.generation import tidy

        config = tidy(deepcopy(own))
        config.update(eos_token_id=list(self.chat_format.stops), pad_token_id=self.text_tokenizer.pad_token_id, max_length=None)
        return config

    def inputs(self, batch: Batch) -> dict[str, Any]:
        return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "use_cache": False}

    def _text(self, ids: Sequence[int]) -> str:
        return self.text_tokenizer.decode(ids, skip_special_tokens=True)

    def _generate(
        self,
        model: PreTrainedModel,
        prompts: Sequence[Sequence[int]],
        config: GenerationConfig,
        streamer: BaseStreamer | None = None,
        keys: Sequence[Sequence[int]] = (),
        beside: Any = None,
    ) -> list[list[int]]:
        """Return the tokens of the model's answer to each prompt, cut where the model's positions end, whatever prompts are
        beside it; drawn at random, if each has a key, see ``KeyedDraws``.

        Args:
            beside: what the model gets of all prompts beside their tokens, see ``prompt_inputs``: they are answered together.
        """
        from hftune.data.tokenized import Ragged
        from hftune.models.generation import KeyedDraws, tidy
        from hftune.models.pretrained import max_positions

        positions, most = max_positions(model), config.max_new_tokens or MAX_REPLY_TOKENS
        pad = self.text_tokenizer.pad_token_id
        rooms = [most if positions is None else min(most, max(1, positions - len(prompt))) for prompt in prompts]
        answers: dict[int, list[int]] = {}
        for room in sorted(set(rooms)) if beside is None else [max(rooms)]:  # only one, unless a prompt leaves less
            places = [place for place, own in enumerate(rooms) if own == room or beside is not None]
            limited = deepcopy(config)
            limited.max_new_tokens = room
            ids_NT, mask_NT = Ragged.of([prompts[place] for place in places]).padded(pad, "left")
            given = {name: value.to(model.device) for name, value in self.prompt_inputs(ids_NT, mask_NT, beside).items()}
            num_read = given["input_ids"].shape[1]
            if keys:
                given["logits_processor"] = [KeyedDraws([keys[place] for place in places], limited, num_read)]
                limited.do_sample, limited.num_beams, limited.num_return_sequences = False, 1, 1
                tidy(limited)
            texts_NT = model.generate(**given, generation_config=limited, streamer=streamer)[:, num_read:]
            answers |= zip(places, texts_NT.tolist(), strict=True)
        return [answers[place][:room] for place, room in enumerate(rooms)]

    def prompt_inputs(self, ids_NT: Tensor, mask_NT: Tensor, beside: Any) -> dict[str, Any]:
        """Return what the model is given to answer prompts, padded on the left, which may get longer by that.

        Args:
            beside: what ``beside`` returned, or None.
        """
        return {"input_ids": ids_NT, "attention_mask": mask_NT}

    def beside(self, inputs: Sequence[Any]) -> Any:
        """Return what the model gets of raw inputs beside their tokens; None, the default: nothing."""
        return None

    # Use

    def load(self, directory: Path) -> PreTrainedModel:
        model = super().load(directory)
        if self.generates:
            self.own_generation = model.generation_config
            model.generation_config = self._generation_of(model.generation_config)  # the recipe's may have changed since
        return model

    def example_inputs(self) -> list[str]:
        """Return what the user says first in two chats: MLflow keeps texts, but no lists of messages."""
        chats = [self.messages_of(row) for row in self.some_rows()]
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
        try:
            chat, tools = self.chat_format.read(row_of(value), ASKED, has_answer=False, as_written=True)
            if chat[-1]["role"] not in ("user", "tool"):
                raise ChatError(f"The last message is the {chat[-1]['role']}'s, so that there is nothing to answer.")
            return self.chat_format.prompt(chat, tools)
        except ChatError as error:
            raise DataError(f"Input {index} cannot be answered: {error}") from error

    def reply(self, model: PreTrainedModel, messages: list[dict[str, Any]], streamer: BaseStreamer | None = None) -> str:
        """Return the answer to a chat; a streamer of transformers gets its tokens as they are generated, without gradients."""
        import torch

        from hftune.models.generation import tidy

        config = tidy(deepcopy(model.generation_config), {"num_beams": 1})
        config.num_beams = 1  # beams cannot be streamed
        with torch.no_grad():
            prompts = self._prompts(model, [messages])
            return self._text(self._generate(model, prompts, config, streamer, beside=self.beside([messages]))[0])

    def predict(self, model: PreTrainedModel, inputs: list[Any]) -> list[dict[str, Any]]:
        """Return the answer to each input as ``generated``: a text, a list of messages, or {messages, tools}."""
        prompts = self._prompts(model, inputs)
        answers = self._generate(model, prompts, model.generation_config, beside=self.beside(inputs))
        return [{"generated": self._text(ids)} for ids in answers]

    def sample(
        self,
        model: PreTrainedModel,
        inputs: Sequence[Any],
        keys: Sequence[Sequence[Sequence[int]]],
        settings: Mapping[str, Any],
        at_once: int,
    ) -> list[list[tuple[str, bool]]]:
        """Return answers to each input of ``predict`` that are drawn at random, and whether each is whole: not cut for length.

        Args:
            keys: of each input, one for each of its answers, see ``hftune.models.generation.KeyedDraws``.
            settings: of the model's generation that are to be others, such as {"temperature": 0.7}.
            at_once: answers that are generated together.
        """
        config = deepcopy(model.generation_config)
        config.update(do_sample=True, **settings)
        stops, found = {*self.chat_format.stops}, []
        asked = zip(self._prompts(model, inputs), inputs, keys, strict=True)
        drawn = [(prompt, value, key) for prompt, value, own in asked for key in own]
        for start in range(0, len(drawn), at_once):
            prompts, values, some = zip(*drawn[start : start + at_once], strict=True)
            texts = self._generate(model, prompts, config, keys=some, beside=self.beside(values))
            found += [(self._text(ids), not stops.isdisjoint(ids)) for ids in texts]
        answers = iter(found)
        return [[next(answers) for _ in own] for own in keys]

    def _prompts(self, model: PreTrainedModel, inputs: Sequence[Any]) -> list[list[int]]:
        """Return the tokens of raw inputs, or raise DataError if one leaves the model no position for an answer."""
        from hftune.models.pretrained import max_positions

        prompts, positions = [self.prompt_ids(index, value) for index, value in enumerate(inputs)], max_positions(model)
        for index, prompt in enumerate(prompts):
            if positions is not None and len(prompt) + self.generates > positions:
                needs = "which leaves no room for an answer: " if self.generates else "and "
                raise DataError(
                    f"Input {index} has {len(prompt):,} tokens, {needs}the model has {positions:,} positions. Shorten it."
                )
        return prompts


def row_of(value: Any) -> Mapping[str, Any]:
    """Return a raw input, a text, a list of messages or a mapping with them, as a row of ASKED columns."""
    messages = [{"role": "user", "content": value}] if isinstance(value, str) else value
    return messages if isinstance(messages, Mapping) else {"messages": messages}


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]

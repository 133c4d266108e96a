"""Chats to samples: every trained token is predicted from the very tokens that inference would feed the model.

The tokens of an answer are found by rendering. For each answer of a chat, the template writes what inference would feed (the
messages before it, with the generation prompt) and the chat up to the answer. What the second has beyond the first, up to the
first token at which generation stops, is what the model would have to generate. No template needs marks for this.

Several answers share a sample if the template writes the chat up to each of them in the same way. Otherwise, as for templates
that drop the thoughts of earlier answers, an answer has a sample of its own.
"""

from __future__ import annotations

import datetime
import inspect
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from hftune.data.messages import THOUGHTS, ChatError, is_trained, messages_of, texts_of, tools_of
from hftune.errors import ConfigError, did_you_mean

__all__ = ["NO_LABEL", "TOO_LONG", "TRAIN_ON", "ChatError", "ChatFormat", "ChatSample", "fitted", "messages_of", "tools_of"]

NO_LABEL = -100
"""Label of a position that predicts nothing; hftune.tasks.text has the same, for tasks."""
TRAIN_ON = ("assistant", "last", "all")
"""Which tokens are trained: of all answers, of the last one, or all tokens."""
TOO_LONG = ("refuse", "drop", "cut")
"""What becomes of chats that are too long: an error, nothing, or the answers that fit."""
_PROBE = ({"role": "user", "content": "one"}, {"role": "assistant", "content": "@@two@@"}, {"role": "user", "content": "three"})
_SYSTEM = {"role": "system", "content": "zero"}
_CALL = {"type": "function", "id": "abcdefghi", "function": {"name": "find", "arguments": {"what": "one"}}}
_PROBE_CALL = (
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "name": "find", "tool_call_id": "abcdefghi", "content": "two"},
)


@dataclass(frozen=True)
class ChatSample:
    """Tokens of a chat. Position i of ``labels`` has the token that follows position i of ``input_ids``, or NO_LABEL."""

    input_ids: list[int]
    labels: list[int]
    ends: tuple[int, ...]
    """After how many positions each of its answers ends; the last one ends with the sample."""

    def cut(self, max_length: int) -> ChatSample | None:
        """Return the sample up to the last answer that ends within ``max_length`` positions; None if none does."""
        ends = tuple(end for end in self.ends if end <= max_length)
        if ends == self.ends:
            return self
        return ChatSample(self.input_ids[: ends[-1]], self.labels[: ends[-1]], ends) if ends else None


def fitted(samples: Sequence[ChatSample], max_length: int, too_long: str) -> list[ChatSample]:
    """Return the samples of a chat that have at most ``max_length`` positions.

    Args:
        too_long: "refuse" raises ChatError if one is longer; "drop" then returns none; "cut" leaves out the answers, each as a
            whole, that end beyond it. No answer ever loses its end, since the model would learn not to stop.
    """
    longest = max((len(sample.input_ids) for sample in samples), default=0)
    if longest <= max_length:
        return list(samples)
    if too_long == "refuse":
        raise ChatError(f"It has {longest:,} tokens, more than task.max_length={max_length:,}.")
    return [kept for sample in samples if (kept := sample.cut(max_length))] if too_long == "cut" else []


def chat_of(
    row: Mapping[str, Any], columns: Mapping[str, str], completion_only: bool = True, **how: Any
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """Return the checked messages of a row and its tools, or raise ChatError.

    Args:
        columns: of the messages, or of prompt and completion, and of the tools, by the fields of ``Chats`` that name them.
        completion_only: see ``messages_of``; ``how``: its other arguments.
    """
    names = [columns[key] for key in ("messages_column", "prompt_column", "completion_column") if key in columns]
    tools, messages = columns.get("tools_column"), messages_of(row, names, completion_only=completion_only, **how)
    return messages, None if tools is None else tools_of(row, tools, how.get("as_written", False))


class _Turn(NamedTuple):
    """An answer: ``prompt`` is what inference renders before it, ``whole`` that and what it generates, with a stop token."""

    place: int
    prompt: str
    whole: str


class _Tokens(NamedTuple):
    """A chat as tokens; ``spans`` are the first position and the one after the last of each answer."""

    ids: list[int]
    spans: list[tuple[int, int]]
    places: set[int]


class ChatFormat:
    """A tokenizer with its chat template, the template's options and the tokens at which generation stops.

    Args:
        template: the template, in Jinja. None: that of the tokenizer.
        options: variables of the template, such as enable_thinking; see ``task.template_options``.
        stops: tokens at which the checkpoint's generation stops, all of its generation_config's eos_token_id.
        today: the date that the template's strftime_now sees. None: the current date. A run that stores it trains on the same
            tokens on every day on which it is resumed; ``dated`` tells whether it matters.

    Raises:
        ConfigError: there is no template, it is not valid, an option is not one of its own, or nothing ends its answers.
    """

    def __init__(
        self,
        tokenizer: Any,
        template: str | None = None,
        options: Mapping[str, Any] | None = None,
        stops: Collection[int] = (),
        today: datetime.date | None = None,
    ):
        self.tokenizer, self.template, self.options = tokenizer, template, dict(options or {})
        self.today = today or datetime.date.today()
        if template is None and not tokenizer.chat_template:
            raise ConfigError("The tokenizer has no chat template. Set task.chat_template to a file with one.")
        self._check()
        self.stops = sorted({*stops, tokenizer.eos_token_id} - {None})
        self._learn_stop()

    def read(
        self, row: Mapping[str, Any], columns: Mapping[str, str], completion_only: bool = True, **how: Any
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
        """Return what ``chat_of`` does, with all that ``samples`` needs."""
        return chat_of(row, columns, completion_only, **how)

    def beside(self, messages: Sequence[Mapping[str, Any]], samples: Sequence[ChatSample]) -> dict[str, list[Any]]:
        """Return further columns of the samples of a chat, by name."""
        return {}

    def samples(
        self, messages: Sequence[Mapping[str, Any]], tools: list | None = None, train_on: str = "assistant"
    ) -> list[ChatSample]:
        """Return the samples of a chat, in the order of their last answers.

        Args:
            messages: checked messages, see ``messages_of``. Answers with "train": false are not trained.
            tools: JSON schemas of the tools that the model may call.
            train_on: "assistant" trains all answers, "last" the last one, "all" also trains what lies between them. What
                several samples have in common is then trained in the first of them only.

        Raises:
            ChatError: the template cannot write this chat such that its answers are what inference would generate.
        """
        self._check_control_tokens(messages, tools)
        places = [place for place, message in enumerate(messages) if is_trained(message)]
        if not places:
            raise ChatError("There is no message of the assistant to train on.")
        untrained = [place for place, message in enumerate(messages) if message.get("train") is False]
        if train_on == "all" and untrained:
            raise ChatError(f'Message {untrained[0]} has "train": false, which contradicts task.train_on=all.')
        turns = [self._turn(messages, place, tools) for place in (places[-1:] if train_on == "last" else places)]
        for tool in tools or []:
            name = tool.get("function", tool).get("name")
            if isinstance(name, str) and not any(name in turn.prompt for turn in turns):
                raise ChatError(f"The chat template leaves out the tool {name!r}. It may not know tools.")
        groups: list[_Tokens] = []  # as few sequences as hold all turns
        while turns:
            groups.insert(0, self._joined(turns))
            turns = [turn for turn in turns if turn.place not in groups[0].places]
        samples, before = [], []
        for ids, spans, _ in groups:
            trained = [(max(1, _num_common(before, ids)), len(ids))] if train_on == "all" else spans
            labels = [NO_LABEL] * (len(ids) - 1)
            for start, stop in trained:
                labels[start - 1 : stop - 1] = ids[start:stop]
            samples.append(ChatSample(ids[:-1], labels, tuple(stop - 1 for _, stop in spans)))
            before = ids
        return samples

    def whole(self, messages: Sequence[Mapping[str, Any]], tools: list | None = None) -> ChatSample:
        """Return a chat to its very end, as transformers' ``apply_chat_template`` writes it, for models that score its answers.

        Its labels, one fewer than its tokens, are what follows the prompt of the first answer that is to be trained.

        Raises:
            ChatError: the template cannot write this chat, or writes no answer.
        """
        self._check_control_tokens(messages, tools)
        ids = self._ids(self._render(messages, tools))
        first = next(place for place, message in enumerate(messages) if is_trained(message))
        start = max(1, _num_common(self._ids(self._render(messages[:first], tools, prompt=True)), ids))
        if start >= len(ids):
            raise ChatError(f"Message {first}: the chat template leaves it out.")
        return ChatSample(ids, [NO_LABEL] * (start - 1) + ids[start:], (len(ids),))

    def prompt(self, messages: Sequence[Mapping[str, Any]], tools: list | None = None) -> list[int]:
        """Return the tokens that inference feeds the model for its next answer."""
        self._check_control_tokens(messages, tools)
        return self._ids(self._render(messages, tools, prompt=True))

    @property
    def key(self) -> list[Any]:
        """All that samples depend on beside the tokenizer and the messages, for caches and digests."""
        date = str(self.today) if self.dated else None
        return [self._template(None), self._template([]), json.dumps(self.options, sort_keys=True), self.stops, date]

    @cached_property
    def dated(self) -> bool:
        """Whether the template writes the date, so that the samples are others on another day."""
        days, are_rendered = (datetime.date(2001, 2, 3), datetime.date(2012, 11, 10)), False
        for probe in (_PROBE[:1], (_SYSTEM, *_PROBE[:1])):  # some templates want a system message, others know none
            try:
                one, other = (self._render(probe, None, prompt=True, today=day) for day in days)
            except ChatError:
                continue
            if one != other:
                return True
            are_rendered = True
        return not are_rendered and "strftime_now" in self._template(None) + self._template([])

    def _check(self) -> None:
        fixed = inspect.signature(self.tokenizer.apply_chat_template).parameters.keys() | {"messages", "strftime_now"}
        templates = self._template(None), self._template([])
        words = set(re.findall(r"[A-Za-z_]\w*", " ".join(re.findall(r"{[{%].*?[%}]}", "".join(templates), re.DOTALL))))
        for name in self.options:
            if name in fixed:
                raise ConfigError(f"task.template_options.{name} is no option: chats set it themselves.")
            if name not in words:
                hint = did_you_mean(name, words)
                raise ConfigError(f"task.template_options.{name} has no effect: the chat template does not mention it.{hint}")
        if any(re.search(r"\bstrftime_now\s*\(", _frozen(template, self.today)) for template in templates):
            raise ConfigError(
                "The chat template calls strftime_now with a format that is no text, so that the date cannot be frozen. Set "
                "task.chat_template to a copy with the format, or the date, written out."
            )

    def _template(self, tools: list | None) -> str:
        return self.tokenizer.get_chat_template(self.template, tools)

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: list | None,
        prompt: bool = False,
        today: datetime.date | None = None,
    ) -> str:
        """Return what the template writes.

        Raises:
            ChatError: it refuses the messages.
        """
        shown = [*map(self._shown, messages)]
        template = _frozen(self._template(tools), today or self.today)
        try:
            return self.tokenizer.apply_chat_template(
                shown, tools=tools, chat_template=template, add_generation_prompt=prompt, tokenize=False, **self.options
            )
        except Exception as error:  # templates are programs, and fail in all ways
            raise ChatError(f"Message {len(shown) - 1}: the chat template refuses the chat up to here: {error}") from error

    def _shown(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return a message as the template reads it."""
        return {key: value for key, value in message.items() if key != "train"}

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]  # templates write <s> themselves

    def _learn_stop(self) -> None:
        """Add the token that ends the template's answers, if none of the stops does, as for base models."""
        try:
            alone, followed = (
                self._render(messages, None).partition(_PROBE[1]["content"])[2] for messages in (_PROBE[:2], _PROBE)
            )
        except ChatError as error:
            if type(error.__cause__).__name__ == "TemplateSyntaxError":
                raise ConfigError(f"The chat template is not valid Jinja: {error.__cause__}.") from error
            return  # it takes other chats than the plainest one, and each row tells
        if not set(self.stops).isdisjoint(self._ids(alone)):
            return
        added = set(self.tokenizer.get_added_vocab().values())
        stop = next((token for token in self._ids(followed) if token in added), None)
        if stop is None:
            raise ConfigError(
                f"The chat template writes {(alone or followed)[:20]!r} after an answer, which holds no special token of the "
                "tokenizer, so that generation could not stop. Let it write {{ eos_token }} there."
            )
        self.stops = sorted({*self.stops, stop})

    @cached_property
    def _stop_texts(self) -> list[str]:
        return sorted(map(self.tokenizer.convert_ids_to_tokens, self.stops), key=lambda text: (-len(text), text))

    @cached_property
    def _control_tokens(self) -> re.Pattern[str]:
        added = self.tokenizer.added_tokens_decoder.values()
        texts = {token.content for token in added if token.special} | {*self.tokenizer.all_special_tokens, *self._stop_texts}
        return re.compile("|".join(map(re.escape, sorted(texts, key=lambda text: (-len(text), text)))))

    def _check_control_tokens(self, messages: Sequence[Mapping[str, Any]], tools: list | None) -> None:
        """Raise ChatError if a text holds a special token's, which the tokenizer would read as the token."""
        places = [(f"Message {place} holds", message) for place, message in enumerate(messages)]
        for subject, value in [*places, ("The tools hold", tools)]:
            for text in texts_of(value):
                if found := self._control_tokens.search(text):
                    raise ChatError(
                        f"{subject} the text {found[0]!r}, which the tokenizer reads as a special token. Rewrite it."
                    )

    def _turn(self, messages: Sequence[Mapping[str, Any]], place: int, tools: list | None) -> _Turn:
        prompt, whole = self._render(messages[:place], tools, prompt=True), self._render(messages[: place + 1], tools)
        message = messages[place]
        answer = self._until_stop(_written(prompt, whole, messages, place), message, place)
        # Templates may move thoughts that are inside of the content.
        contents = re.split(r"</?\w+>", message["content"])
        thoughts = [message[key] for key in THOUGHTS if isinstance(message.get(key), str)]
        names = [call.get("function", call)["name"] for call in message.get("tool_calls", [])]
        if left_out := [text for text in (*contents, *thoughts, *names) if text.strip() not in answer]:
            raise ChatError(f"Message {place}: the chat template leaves out {_short(left_out[0])}.")
        return _Turn(place, prompt, prompt + answer)

    def _until_stop(self, written: str, message: Mapping[str, Any], place: int) -> str:
        """Return the answer up to the first stop token; only space and more of them may follow."""
        ends = [(written.find(stop), stop) for stop in self._stop_texts if stop in written]
        if not ends:
            closing = self._closings[bool(message.get("tool_calls"))]
            if closing is None:
                stops = ", ".join(self._stop_texts)
                raise ChatError(
                    f"Message {place}: the chat template ends the answer with {_short(written[-20:])}, and writes none of the "
                    f"tokens at which generation stops: {stops}."
                )
            return written + closing
        start, stop = min(ends)
        rest = written[start + len(stop) :]
        for text in self._stop_texts:
            rest = rest.replace(text, "")
        if rest.strip():
            raise ChatError(
                f"Message {place}: in its answer, {stop}, at which generation stops, is followed by {_short(rest)}."
            )
        return written[: start + len(stop)]

    @cached_property
    def _closings(self) -> list[str | None]:
        """What the model must generate after an answer, and after one with tool calls, that the template ends only by beginning
        the next message, whose first token is one at which generation stops, such as <|user|>; None if it is none."""
        closings: list[str | None] = []
        for probe in (_PROBE, _PROBE_CALL):
            try:
                alone, followed = self._render(probe[:2], None), self._render(probe, None)
            except ChatError:
                alone = followed = ""
            rest = followed[len(alone) :] if followed.startswith(alone) else ""
            stop = next((text for text in self._stop_texts if rest.lstrip().startswith(text)), None)
            closings.append(None if stop is None else rest[: rest.index(stop) + len(stop)])
        return closings

    def _joined(self, turns: list[_Turn]) -> _Tokens:
        """Return the tokens of the last turn, with all earlier turns that have the same text and tokens there."""
        last = turns[-1]
        ids, spans, places = self._ids(last.whole), [], set()
        for place, prompt, whole in turns:
            if not last.whole.startswith(whole):
                continue
            prompt_ids = self._ids(prompt)
            start = len(prompt_ids)
            if ids[:start] == prompt_ids:
                stop = next((position for position in range(start, len(ids)) if ids[position] in self.stops), None)
                if stop is None:
                    raise ChatError(f"Message {place}: the tokenizer splits the token that ends the answer.")
                spans.append((start, stop + 1))
                places.add(place)
        if last.place in places:
            return _Tokens(ids, spans, places)
        # Tokenized apart, as in inference, where no token can straddle the border of prompt and answer.
        prompt_ids = self._ids(last.prompt)
        apart = prompt_ids + self._ids(last.whole.removeprefix(last.prompt))
        if self.tokenizer.decode(apart) != self.tokenizer.decode(ids):
            raise ChatError(f"Message {last.place}: prompt and answer cannot be tokenized apart.")
        return _Tokens(apart, [(len(prompt_ids), len(apart))], {last.place})


@lru_cache(maxsize=8)
def _frozen(template: str, today: datetime.date) -> str:
    """Return the template with the date in the place of each call of strftime_now, which transformers binds to the clock."""
    now = datetime.datetime(today.year, today.month, today.day)
    return re.sub(r"\bstrftime_now\s*\(\s*(['\"])(.*?)\1\s*\)", lambda call: json.dumps(now.strftime(call[2])), template)


def _written(prompt: str, whole: str, messages: Sequence[Mapping[str, Any]], place: int) -> str:
    """Return what the template writes for an answer after its generation prompt.

    Some templates write the beginning of a chat in another way once an answer follows: Mistral's put the system prompt into
    the last message if that is the user's. The answer is then what follows the last message and the generation prompt, and
    its prompt is still what inference feeds.
    """
    if whole.startswith(prompt):
        return whole[len(prompt) :]
    asked = messages[place - 1]["content"].strip()
    tail = prompt[prompt.rfind(asked) :] if asked and asked in prompt else ""
    if tail and tail in whole and not any(tail in text for text in texts_of(messages[place])):
        return whole.rpartition(tail)[2]
    same = prompt.rfind("\n", 0, _num_common(prompt, whole)) + 1  # the line on which they differ says more than the character
    raise ChatError(
        f"Message {place}: the chat template prompts for an answer with {_short(prompt[same:])}, where it writes "
        f"{_short(whole[same:])} for this one."
    )


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:40]}...")


def _num_common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return how many tokens or characters two sequences have in common at their beginning."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))

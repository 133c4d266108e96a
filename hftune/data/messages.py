"""The messages of a chat, read from a row and checked. Independent of templates and tokenizers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hftune.errors import DataError, did_you_mean

ROLES = ("system", "developer", "user", "assistant", "tool")
OTHER_NAMES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant", "function": "tool"}
"""Roles as other formats call them."""
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Keys under which a message holds the model's thoughts; transformers gives templates all of them for any of them."""
PARTS = "parts"
"""Key of a message that may have pictures, with its content as a list of parts, each {"type": "text", "text": ...} or
{"type": "image"}, the latter with its source unless that is in a column of its own."""
PLACEHOLDER = "<image>"
"""What stands for a picture in a text of a chat, in the data of LLaVA and of many others, whatever the model's own token is."""
_PLACEHOLDER = re.compile(rf"\n?{PLACEHOLDER}\n?")  # templates write what is between pictures and text


class ChatError(DataError):
    """A chat that cannot be trained on: one sentence, with the number of the message, from 0. The caller adds the row."""


class BadChat(Exception):
    """A row that cannot be trained on: its index and the reason."""


def messages_of(
    row: Mapping[str, Any],
    columns: Sequence[str] = ("messages",),
    has_answer: bool = True,
    completion_only: bool = True,
    as_written: bool = False,
    pictured: bool = False,
) -> list[dict[str, Any]]:
    """Return the checked messages of a row, as templates take them.

    Args:
        columns: the column of the messages; or two, of the prompt and of its completion, each a text or messages. Messages
            may be JSON text, in which nulls and numbers stay as they were written.
        has_answer: refuse a chat without an answer to train on.
        completion_only: mark the answers in a prompt as not trained.
        as_written: the row is no row of a data set, so its nulls stay, too.
        pictured: messages may have pictures, and PARTS; they may also be LLaVA's, which have from and value.

    Raises:
        ChatError: a message lacks something, or the roles are out of order.
    """
    if len(columns) == 1:
        messages = _listed(row, columns[0], "messages", as_written)
    else:
        roles = ("user", "assistant")
        prompt, completion = (_listed(row, column, role, as_written) for column, role in zip(columns, roles, strict=True))
        if completion_only:
            prompt = [
                {**message, "train": False} if isinstance(message, dict) and message.get("role") == "assistant" else message
                for message in prompt
            ]
        messages = prompt + completion
    if not messages:
        raise ChatError("There are no messages.")
    checked = [_message(message, place, pictured) for place, message in enumerate(messages)]
    _check_order(checked)
    if has_answer and not any(is_trained(message) for message in checked):
        raise ChatError("There is no message of the assistant to train on.")
    return checked


def tools_of(row: Mapping[str, Any], column: str, as_written: bool = False) -> list[dict[str, Any]] | None:
    """Return the JSON schemas of the tools that a row offers, from a list or from JSON text; None if it offers none.

    Args:
        as_written: see ``messages_of``.
    """
    tools = _parsed(row.get(column), column, as_written)
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list) or not all(
        isinstance(tool, dict) and isinstance(tool.get("function", tool), dict) for tool in tools
    ):
        raise ChatError(f"Column {column!r} does not hold a list of JSON schemas, one a tool.")
    return tools


def is_trained(message: Mapping[str, Any]) -> bool:
    """Return whether the message is an answer of the assistant that is not marked with "train": false."""
    return message["role"] == "assistant" and message.get("train") is not False


def texts_of(value: Any) -> Iterator[str]:
    """Yield all texts inside a message or a tool, at any depth; keys, too, since templates write them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield str(key)
            yield from texts_of(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from texts_of(inner)


def without_nulls(value: Any) -> Any:
    """Return the value without null entries: a data set gives all rows the keys of all others, null where a row lacks them."""
    if isinstance(value, Mapping):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value


def as_messages(value: Any) -> Any:
    """Return the messages that a text holds as JSON; any other value unchanged, such as a question."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        messages = json.loads(value)
    except json.JSONDecodeError:
        return value
    is_chat = bool(messages) and all(isinstance(message, dict) and "role" in message for message in messages)
    return messages if is_chat else value


def _listed(row: Mapping[str, Any], column: str, role: str, as_written: bool) -> list[Any]:
    """Return the messages of a column; a text of a prompt or of a completion becomes one."""
    value = row.get(column)
    if role != "messages" and isinstance(value, str):
        return [{"role": role, "content": value}]
    value = _parsed(value, column, as_written)
    if not isinstance(value, list):
        raise ChatError(f"Column {column!r} holds {_kind(value)}, not a list of messages.")
    return value


def _parsed(value: Any, column: str, as_written: bool) -> Any:
    """Return the value of a column without nulls, or its JSON text read, in which they stay; an empty text is nothing."""
    if not isinstance(value, str):
        return value if as_written else without_nulls(value)
    try:
        return json.loads(value) if value.strip() else None
    except json.JSONDecodeError as error:
        raise ChatError(f"Column {column!r} is not valid JSON: {error}.") from error


def _message(message: Any, place: int, pictured: bool = False) -> dict[str, Any]:
    """Return the message without keys that are null, its content as one text, the arguments of its calls as dicts."""
    if not isinstance(message, dict):
        raise ChatError(f"Message {place} is {_kind(message)}, not a mapping with role and content.")
    message = {key: value for key, value in message.items() if value is not None}
    if pictured and message.keys() >= {"from", "value"} and "role" not in message:
        role = message.pop("from")
        message |= {"role": OTHER_NAMES.get(role, role), "content": message.pop("value")}
    if "role" not in message:
        keys = ", ".join(message) or "nothing"
        raise ChatError(f"Message {place} has no role, only {keys}. A message has the keys role and content.")
    if (role := message["role"]) not in ROLES:
        known = OTHER_NAMES.get(role) if isinstance(role, str) else None
        hint = f" Call it {known!r}." if known else did_you_mean(role, ROLES)
        raise ChatError(f"Message {place} has the role {role!r}. The roles are {', '.join(ROLES)}.{hint}")
    if role == "assistant" and (weight := message.pop("weight", None)) is not None:  # in the format of OpenAI
        if weight not in (0, 1):
            raise ChatError(f'Message {place} has "weight": {weight!r}. It is 1, or 0 for an answer that is not trained.')
        message.setdefault("train", bool(weight))
    if "train" in message and (not isinstance(message["train"], bool) or (message["train"] and role != "assistant")):
        raise ChatError(
            f'Message {place} has "train": {message["train"]!r}. It is true or false, and true only for the assistant.'
        )
    if calls := message.pop("tool_calls", None):
        if role != "assistant":
            raise ChatError(f"Message {place} has tool_calls, which only messages of the assistant have.")
        message["tool_calls"] = [_call(call, place) for call in (calls if isinstance(calls, list) else [calls])]
    message["content"], parts = _content(message, place, pictured)
    if pictured:
        message[PARTS] = parts
    if is_trained(message) and not (message["content"].strip() or calls):
        raise ChatError(f'Message {place} is an empty answer. Remove it, or set "train": false.')
    return message


def _content(message: dict[str, Any], place: int, pictured: bool) -> tuple[str, list[dict[str, Any]]]:
    """Return the content as one text, "" beside tool calls, where templates would write None; and its parts, see ``PARTS``."""
    if "content" not in message and ("tool_calls" in message or any(key in message for key in THOUGHTS)):
        return "", []
    content = message.get("content")
    given = [content] if isinstance(content, str) else content
    if not isinstance(given, list) or (not given and message["role"] != "assistant"):
        raise ChatError(f"Message {place} has {_kind(content)} in the place of its content. It is a text.")
    parts: list[dict[str, Any]] = []
    for part in given:
        is_dict = isinstance(part, dict)
        kind = part.get("type", "text") if is_dict else "text"
        if pictured and kind in ("image", "image_url"):
            if message["role"] == "assistant":
                raise ChatError(f"Message {place} is an answer with a picture. Models write text only.")
            parts.append({**part, "type": "image"})
            continue
        text = part.get("text") if is_dict and kind == "text" else part
        if not isinstance(text, str):
            kind = part.get("type") if is_dict else _kind(part)
            known = "text and images" if pictured else "text"
            raise ChatError(f"Message {place} has content of the type {kind}. Only {known} can be trained on.")
        is_split = pictured and message["role"] != "assistant"
        for number, piece in enumerate(_PLACEHOLDER.split(text) if is_split else [text]):
            parts += [{"type": "image"}] if number else []
            parts += [{"type": "text", "text": piece}] if piece else []
    return "".join(part["text"] for part in parts if part["type"] == "text"), parts


def _call(call: Any, place: int) -> dict[str, Any]:
    """Return a tool call with its arguments as a dict."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ChatError(
            f'Message {place} has a tool call without a name. It is {{"function": {{"name": ..., "arguments": ...}}}}.'
        )
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError as error:
            raise ChatError(f"Message {place} has a tool call whose arguments are not valid JSON: {error}.") from error
    if not isinstance(arguments, dict):
        raise ChatError(f"Message {place} has a tool call with {_kind(arguments)} as arguments. They are a mapping.")
    function = {**function, "arguments": arguments}
    return {**call, "function": function} if "function" in call else function


def _check_order(messages: list[dict[str, Any]]) -> None:
    """Raise ChatError at the first message that cannot follow the one before it."""
    before = None
    for place, message in enumerate(messages):
        role = message["role"]
        if role in ("system", "developer") and before not in (None, "system", "developer"):
            raise ChatError(f"Message {place} has the role {role}, which comes first, before {before}.")
        if role == "assistant" and before == "assistant":
            raise ChatError(f"Message {place} is the assistant's, like the one before it. Join the two.")
        if role == "assistant" and before not in ("user", "tool") and is_trained(message):
            raise ChatError(
                f'Message {place} is the assistant\'s, but answers nothing. Set "train": false to keep it untrained.'
            )
        if role == "tool" and before != "tool" and not messages[place - 1].get("tool_calls"):
            raise ChatError(f"Message {place} is the result of a tool, but no message with tool_calls precedes it.")
        before = role


def _kind(value: Any) -> str:
    return "nothing" if value is None else type(value).__name__

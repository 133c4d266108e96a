"""Preference pairs: a chosen and a rejected answer to one prompt, read from the layouts that people have, and tokenized.

Independent of losses and models.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from hftune.data.chats import ChatError, ChatFormat, ChatSample
from hftune.data.messages import BadChat, as_messages, is_trained, messages_of, tools_of, without_nulls

PROMPTS = ("prompt", "question", "instruction", "input")
"""Usual names of a column of prompts."""
SIDES = ("chosen", "rejected")
PROBLEMS = (
    "with equal answers",
    "with an empty answer",
    "longer than task.max_length={max_length} tokens",
    "that cannot be written as chats",
    "with a prompt behind which no answer to another prompt fits (task.max_length={max_length})",
    "whose prompts differ",
    "with an empty prompt",
    "without a label",
    "without a finite margin",
)
"""Why a sample cannot be compared: problem k, from 1, of ``encoded``."""
EQUAL, EMPTY, LONG, UNWRITABLE, ALONE, UNLIKE, UNASKED, UNJUDGED, NO_MARGIN = range(1, 1 + len(PROBLEMS))
PAIR = {"chosen": [], "chosen_labels": [], "rejected": [], "rejected_labels": [], "margin": 0.0}
"""What ``pair_tokens`` returns, of a row with a problem."""
_HH_TURN = re.compile(r"\n\n(Human|Assistant):")
_HH_ROLES = {"Human": "user", "Assistant": "assistant"}


class BadPair(ChatError):
    """A sample with nothing to compare; ``problem`` is the number of one of PROBLEMS."""

    def __init__(self, problem: int):
        super().__init__(f"It is one {PROBLEMS[problem - 1]}.")
        self.problem = problem


def pair_of(row: Mapping[str, Any], columns: Mapping[str, str]) -> list[list[dict[str, Any]]]:
    """Return the conversations with the chosen and with the rejected answer, as checked messages.

    What both begin with is their prompt, whose answers are marked as not trained: it may be in a column of its own, as in
    TRL's layout, or in both texts, as in HH-RLHF and UltraFeedback.

    Args:
        columns: by fields: chosen_column, rejected_column; and, if there are any, prompt_column and system_column.

    Raises:
        BadPair: the answers are equal, one is empty, or their prompts are, or differ.
        ChatError: an answer has no prompt, or the messages are out of order.
    """
    both = [conversation_of(row, columns, f"{side}_column") for side in SIDES]
    if both[0] == both[1]:
        raise BadPair(EQUAL)
    common, most = 0, min(map(len, both)) - 1
    while common < most and both[0][common] == both[1][common]:
        common += 1
    ends = [chat[common] for chat in both]
    if ends[0] != ends[1] and any(message.get("role") != "assistant" for message in ends):
        raise BadPair(UNLIKE)
    marked = [
        [{**message, "train": False} if message.get("role") == "assistant" else message for message in chat[:common]]
        + chat[common:]
        for chat in both
    ]
    return [messages_of({"messages": chat}) for chat in marked]


def conversation_of(row: Mapping[str, Any], columns: Mapping[str, str], answer: str) -> list[dict[str, Any]]:
    """Return a row's prompt with an answer, or the answer alone if it is a whole conversation, as messages not yet checked.

    Args:
        columns: see ``pair_of``.
        answer: field that names the column of the answer.

    Raises:
        BadPair: the answer or the prompt is empty.
        ChatError: it has no prompt.
    """
    chat = listed(row[columns[answer]], "assistant")
    if chat and chat[0].get("role") == "assistant":
        prompt = listed(row[columns["prompt_column"]], "user") if "prompt_column" in columns else []
        if prompt and prompt[-1].get("role") == "assistant" and not prompt[-1].get("content"):
            prompt.pop()  # HH-RLHF's prompts end in "Assistant:"
        if not prompt and "prompt_column" in columns:
            raise BadPair(UNASKED)
        if not prompt:
            raise ChatError("Its answers have no prompt. Set task.prompt_column.")
        chat = prompt + chat
    system = row[columns["system_column"]] if "system_column" in columns else None
    if system and not (chat and chat[0].get("role") == "system"):
        chat = [{"role": "system", "content": system}, *chat]
    if not chat or not (str(chat[-1].get("content") or "").strip() or chat[-1].get("tool_calls")):
        raise BadPair(EMPTY)
    if any(message.get("role") == "user" and not str(message.get("content") or "").strip() for message in chat):
        raise BadPair(UNASKED)
    return chat


def encoded(
    rows: dict[str, list],
    indices: list[int],
    read: Callable[..., list[Any]],
    empty: Mapping[str, Any],
    drops: bool,
    **settings: Any,
) -> dict[str, list]:
    """Return what ``read`` makes of each row, by the names in ``empty``; row, its index; and problem.

    Args:
        rows: lists of the values of each column.
        read: takes a row, and the settings.
        empty: what a row with a problem has instead.

    Returns:
        as lists of a value for each row; problem is 0 or the number of one of PROBLEMS.

    Raises:
        BadChat: ``read`` raised ChatError; unless ``drops``.
    """
    found: dict[str, list] = {name: [] for name in (*empty, "row", "problem")}
    for place, index in enumerate(indices):
        problem, values = 0, list(empty.values())
        try:
            values = read({name: column[place] for name, column in rows.items()}, **settings)
        except BadPair as error:
            problem = error.problem
        except ChatError as error:
            if not drops:
                raise BadChat(index, str(error)) from error
            problem = UNWRITABLE
        for name, value in zip(found, (*values, index, problem), strict=True):
            found[name].append(value)
    return found


def _margin(row: Mapping[str, Any], columns: Mapping[str, str]) -> float:
    margin = row[columns["margin_column"]] if "margin_column" in columns else 0.0
    if margin is None or (isinstance(margin, float) and not math.isfinite(margin)):
        raise BadPair(NO_MARGIN)
    if isinstance(margin, bool) or not isinstance(margin, (int, float)):
        raise ChatError(f"Its margin is {margin!r}, which is no number.")
    return float(margin)


def pair_tokens(
    row: Mapping[str, Any], chats: ChatFormat, columns: Mapping[str, str], max_length: int, whole: bool
) -> list[Any]:
    """Tokenize a row: chosen and chosen_labels, rejected and rejected_labels; and margin, 0 without a column of margins.

    Args:
        whole: as ``ChatFormat.whole`` does.

    Raises:
        BadPair: it has a problem.
        ChatError: it cannot be written as chats.
    """
    both = zip(SIDES, pair_of(row, columns), strict=True)
    samples = [sample_of(row, messages, side, chats, columns, whole) for side, messages in both]
    if samples[0] == samples[1]:
        raise BadPair(EQUAL)
    if max(len(sample.input_ids) for sample in samples) > max_length:
        raise BadPair(LONG)
    return [*(part for sample in samples for part in (sample.input_ids, sample.labels)), _margin(row, columns)]


def sample_of(
    row: Mapping[str, Any],
    messages: list[dict[str, Any]],
    what: str,
    chats: ChatFormat,
    columns: Mapping[str, str],
    whole: bool,
) -> ChatSample:
    """Return a row's messages as the only sample that the template makes of them, or raise ChatError."""
    tools = tools_of(row, columns["tools_column"]) if "tools_column" in columns else None
    first, *others = [chats.whole(messages, tools)] if whole else chats.samples(messages, tools)
    if others:
        count = sum(map(is_trained, messages))
        raise ChatError(f"The template writes the {count} {what} answers differently once a later one follows.")
    return first


def listed(value: Any, role: str) -> list[dict[str, Any]]:
    """Return the messages of a value: a list, also as JSON text; turns of HH-RLHF; or a text, the message of a role."""
    value = as_messages(without_nulls(value))
    if isinstance(value, str) and _HH_TURN.match(value):
        _, *parts = _HH_TURN.split(value)
        turns = zip(parts[::2], parts[1::2], strict=True)
        return [{"role": _HH_ROLES[name], "content": text.strip()} for name, text in turns]
    if isinstance(value, str) or value is None:
        return [{"role": role, "content": value or ""}]
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise ChatError(f"It holds {type(value).__name__}, where a text or a list of messages should be.")
    return list(value)

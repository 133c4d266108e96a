"""Single answers to prompts, each judged as desirable or undesirable, and answers to other prompts beside them, tokenized.

Independent of losses and models.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from itertools import repeat
from typing import TYPE_CHECKING, Any, cast

from hftune.data.messages import ChatError, messages_of
from hftune.data.preferences import LONG, UNJUDGED, BadPair, conversation_of, listed, sample_of

if TYPE_CHECKING:
    import numpy as np

    from hftune.data.chats import ChatFormat
    from hftune.data.tokenized import Ragged, Texts

TEXTS = ("completion", "mismatched")
"""Texts of a sample: the prompt with its own answer, and with one to another prompt."""
JUDGED = {"completion": [], "completion_labels": [], "label": False, "start": 0, "prompt": 0}
"""What ``judged_tokens`` returns, of a row with a problem."""


def judged_of(row: Mapping[str, Any], columns: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the conversation with the answer that is judged, as checked messages; what is before it is not trained.

    In a completion of several messages, all answers are judged; in a whole conversation, the last one.

    Args:
        columns: by fields: completion_column; and, if there are any, prompt_column and system_column.

    Raises:
        BadPair: the answer or the prompt is empty.
        ChatError: there is no prompt, or no answer, or the messages are out of order.
    """
    chat, given = conversation_of(row, columns, "completion_column"), listed(row[columns["completion_column"]], "assistant")
    if chat[-1].get("role") != "assistant":
        raise ChatError("It does not end with an answer of the assistant.")
    start = len(chat) - (len(given) if given[0].get("role") == "assistant" else 1)
    before = [{**message, "train": False} if message.get("role") == "assistant" else message for message in chat[:start]]
    return messages_of({"messages": [*before, *chat[start:]]})


def judged_tokens(
    row: Mapping[str, Any], chats: ChatFormat, columns: Mapping[str, str], max_length: int, whole: bool
) -> list[Any]:
    """Tokenize a row: completion and completion_labels; label; start, the tokens of the prompt; and prompt, their digest.

    Args:
        whole: as ``ChatFormat.whole`` does.

    Raises:
        BadPair: it has a problem.
        ChatError: it cannot be written as a chat.
    """
    import numpy as np

    label = row[columns["label_column"]]
    if label is None:
        raise BadPair(UNJUDGED)
    sample = sample_of(row, judged_of(row, columns), "completion", chats, columns, whole)
    ids, labels = sample.input_ids, sample.labels
    if len(ids) > max_length:
        raise BadPair(LONG)
    start = 1 + next(place for place, target in enumerate(labels) if target >= 0)
    digest = blake2b(np.asarray(ids[:start], np.int64).tobytes(), digest_size=8).digest()
    return [ids, labels, label, start, int.from_bytes(digest, "big", signed=True)]


def others_of(starts_N: np.ndarray, sizes_N: np.ndarray, prompts_N: np.ndarray, max_length: int) -> np.ndarray:
    """Return for each sample the next one, (N,) int64, whose prompt is different and whose answer fits behind its own prompt.

    The first one follows the last. -1: there is none.

    Args:
        starts_N: tokens of the prompts.
        sizes_N: tokens of prompts and answers together.
        prompts_N: the same number for equal prompts.
        max_length: of a prompt and an answer together, in tokens.
    """
    import numpy as np

    count, answers_N, rooms_N = len(sizes_N), sizes_N - starts_N, max_length - starts_N
    others_N = np.full(count, -1, np.int64)
    if (prompts_N == prompts_N[0]).all():
        return others_N
    waiting = np.flatnonzero(rooms_N >= answers_N.min())
    # A long run of answers to one prompt is passed at once.
    begins_N = np.flatnonzero(prompts_N != np.roll(prompts_N, 1))
    ends_N = np.append(begins_N, begins_N[0] + count)[np.searchsorted(begins_N, np.arange(count), "right")]
    firsts_N = ends_N - np.arange(count)
    for distance in range(count):
        others = (waiting + firsts_N[waiting] + distance) % count
        fits = (answers_N[others] <= rooms_N[waiting]) & (prompts_N[others] != prompts_N[waiting])
        others_N[waiting[fits]] = others[fits]
        waiting = waiting[~fits]
        if not len(waiting):
            break
    return others_N


def mismatched(samples: Texts, kept_K: np.ndarray, others_K: np.ndarray) -> dict[str, Any]:
    """Return the arrays of mismatched and mismatched_labels: the prompts of some samples, each with the answer of another."""
    import numpy as np

    from hftune.data.cache import Stream
    from hftune.data.tokenized import OFFSETS, column_of

    arrays: dict[str, Any] = {}
    for end, less in (("", 0), ("_labels", 1)):  # labels are one place ahead
        column, starts_N = cast("Ragged", samples.column(f"completion{end}")), column_of(samples, "start") - less
        firsts_N, lasts_N = column.offsets[:-1], column.offsets[1:]
        own_KP = np.stack([firsts_N, firsts_N + starts_N], 1)[kept_K]
        other_KP = np.stack([firsts_N + starts_N, lasts_N], 1)[others_K]
        bounds = np.stack([own_KP, other_KP], 1).reshape(-1, 2)
        ends = np.cumsum(np.diff(bounds).reshape(-1, 2).sum(1), dtype=np.int64)
        arrays[f"mismatched{end}{OFFSETS}"] = np.concatenate([[0], ends])
        parts = (flat[start:stop] for flat, (start, stop) in zip(repeat(column.flat), bounds.tolist()))
        arrays[f"mismatched{end}"] = Stream(np.int32, (int(ends[-1]),), parts)
    return arrays

"""Answers that are spans of a context, as in SQuAD: layouts, checks, windows of tokens. Independent of tasks and models.

Shape suffixes: N windows, T tokens of the longest one, L tokens of the longest answer, K spans.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from hftune.errors import DataError

if TYPE_CHECKING:
    import datasets
    from torch import Tensor

Span = tuple[int, int]
"""First character, and the one after the last."""


def flat_rows(rows: datasets.Dataset) -> datasets.Dataset:
    """Return a row for each question of SQuAD's own files, which nest them in paragraphs of articles; other rows as they are.

    A row of such a file is all of it (``data``), or an article (``paragraphs``).
    """
    if not {"data", "paragraphs"} & {*rows.column_names} or "context" in rows.column_names:
        return rows
    from datasets import Features, List, Value

    text = Value("string")
    answers = {"text": List(text), "answer_start": List(Value("int64"))}
    features = Features({"id": text, "context": text, "question": text, "answers": answers})
    return rows.map(_questions, batched=True, batch_size=1, remove_columns=rows.column_names, features=features)


def _questions(rows: dict[str, list]) -> dict[str, list]:
    articles = (
        [article for data in rows["data"] for article in data] if "data" in rows else [{"paragraphs": rows["paragraphs"][0]}]
    )
    found: dict[str, list] = {"id": [], "context": [], "question": [], "answers": []}
    for paragraph in (paragraph for article in articles for paragraph in article["paragraphs"]):
        for question in paragraph["qas"]:
            given = answers_of(question.get("answers"))
            answers = {"text": [text for text, _ in given], "answer_start": [start for _, start in given]}
            row = {"id": str(question.get("id")), "context": paragraph["context"], "question": question["question"]}
            for name, value in {**row, "answers": answers}.items():
                found[name].append(value)
    return found


def answers_of(value: Any) -> list[tuple[str, int]]:
    """Return the texts of answers and where they start: of {text, answer_start} with lists, or a list of such mappings."""
    if isinstance(value, dict):
        return [*zip(value["text"] or (), value["answer_start"] or (), strict=True)]
    return [(answer["text"], answer["answer_start"]) for answer in value or ()]


def span_of(context: str, value: Any) -> Span | None:
    """Return the place of the first of some answers, without the white space around it; None if there is none."""
    if not (given := answers_of(value)):
        return None
    text, start = given[0]
    return _stripped(context, start, start + len(text))


def check_answers(contexts: Sequence[str], answers: Sequence[Any], name: Callable[[int], str]) -> None:
    """Check that each context has its answers where they say.

    Args:
        name: what messages call the row with this index.

    Raises:
        DataError: naming the row, the answer and what is there.
    """
    for index, (context, value) in enumerate(zip(contexts, answers, strict=True)):
        try:
            given = answers_of(value)
        except ValueError as error:
            raise DataError(f"{name(index)} has more texts of answers than places (answer_start), or fewer.") from error
        for text, start in given:
            if not text or not text.strip():
                raise DataError(f"{name(index)} has an empty answer. A question without an answer has an empty list of them.")
            if start is None or start < 0 or context[start : start + len(text)] != text:
                raise DataError(f"{name(index)}: {_misplaced(context, text, start)}")


def _misplaced(context: str, text: str, start: int | None) -> str:
    there = "" if start is None or start < 0 else context[start : start + len(text)]
    where = context.find(text)
    hint = "The context does not have it at all" if where < 0 else f"It is at {where}"
    return (
        f"the answer {text[:60]!r} is not in the context at answer_start={start}, where it has {there[:60]!r}. {hint}. "
        "Places are counted in characters, from 0."
    )


def check_questions(questions: Sequence[str], tokenizer: Any, max_length: int, stride: int, name: Callable[[int], str]) -> None:
    """Check that each question leaves room for a window of its context, which has to be longer than the stride.

    Raises:
        DataError: naming the row and the room.
    """
    most = max_length - tokenizer.num_special_tokens_to_add(pair=True) - stride - 1
    for index, ids in enumerate(_ids(questions, tokenizer)):
        if len(ids) > most:
            left = max_length - tokenizer.num_special_tokens_to_add(pair=True) - len(ids)
            raise DataError(
                f"{name(index)} has a question of {len(ids)} tokens, which leaves {max(left, 0)} of task.max_length="
                f"{max_length} to windows of the context, and these overlap by task.stride={stride}. Raise task.max_length, "
                "lower task.stride, or shorten the question."
            )


def _ids(questions: Sequence[str], tokenizer: Any) -> Iterator[list[int]]:
    settings = {"add_special_tokens": False, "return_attention_mask": False, "return_token_type_ids": False, "verbose": False}
    for start in range(0, len(questions), 1000):
        some = [question.strip() for question in questions[start : start + 1000]]
        yield from tokenizer(some, **settings)["input_ids"]


def windows_of(
    questions: Sequence[str],
    contexts: Sequence[str],
    spans: Sequence[Span | None],
    tokenizer: Any,
    max_length: int,
    stride: int,
    token_types: bool,
    places: bool,
) -> dict[str, list]:
    """Tokenize questions with their contexts, a long one in several windows, of which two in a row share ``stride`` tokens.

    Args:
        spans: where in its context the answer of each question is.
        token_types: whether to return them.
        places: whether to return where the tokens are.

    Returns:
        of each question, lists of the tokens of all its windows, one after the other: ``input_ids``, ``token_type_ids``, and
        ``from`` and ``to``, their first character in the context and the one after the last, without the white space around
        them, -1 outside of it and of white space alone; and of one number for each window: ``texts``, its tokens; ``null``,
        the position of no answer; ``start`` and ``end``, the first and the last token of the answer, or twice that position if
        the window does not have all of it. And ``lost``: whether no window has it.
    """
    encoded = tokenizer(
        [question.strip() for question in questions],
        [*contexts],
        truncation="only_second",
        max_length=max_length,
        stride=stride,
        return_overflowing_tokens=True,
        return_attention_mask=False,
        return_token_type_ids=token_types,
        verbose=False,
    )
    of_tokens = ["input_ids", *(["token_type_ids"] if token_types else [])]
    names = [*of_tokens, *(("from", "to") if places else ()), "texts", "null", "start", "end"]
    found: dict[str, list] = {name: [[] for _ in questions] for name in names}
    found["lost"] = [span is not None for span in spans]
    for index, row in enumerate(encoded["overflow_to_sample_mapping"]):
        window, ids, span = encoded[index], encoded["input_ids"][index], spans[row]
        for name in of_tokens:
            found[name][row] += encoded[name][index]
        if places:
            for offsets, side in zip(window.offsets, window.sequence_ids, strict=True):
                start, end = _stripped(contexts[row], *offsets) if side == 1 else (0, 0)
                found["from"][row].append(start if start < end else -1)
                found["to"][row].append(end if start < end else -1)
        ends = [None, None] if span is None else [window.char_to_token(place, 1) for place in (span[0], span[1] - 1)]
        null = ids.index(tokenizer.cls_token_id) if tokenizer.cls_token_id in ids else 0  # as in BERT
        if None in ends:
            ends = [null, null]
        else:
            found["lost"][row] = False
        for name, number in zip(("texts", "null", "start", "end"), (len(ids), null, *ends), strict=True):
            found[name][row].append(number)
    return found


def _stripped(context: str, start: int, end: int) -> Span:
    """Return the place of a part of a context without the white space around it, which tokens of some models have."""
    text = context[start:end]
    start += len(text) - len(text.lstrip())
    return start, start + len(text.strip())


def best_spans(
    starts_NT: Tensor, ends_NT: Tensor, from_NT: Tensor, to_NT: Tensor, longest: int, count: int
) -> list[list[tuple[float, int, int]]]:
    """Return the best spans of each window: score, first character, and the one after the last; the best come first.

    The score is the sum of the logits of the first and the last token. All spans of the context are compared, unlike in BERT's
    script, which pairs the best starts with the best ends.

    Args:
        from_NT, to_NT: the characters of each token, -1 outside of the context.
        longest: tokens of a span at most.
        count: spans of a window to return at most.

    Source: Devlin et al., "BERT" (2018), section 4.2.
    """
    from torch.nn.functional import pad

    outside_NT, low = from_NT < 0, float("-inf")
    starts_NT, ends_NT = (logits_NT.float().masked_fill(outside_NT, low) for logits_NT in (starts_NT, ends_NT))
    ends_NTL = pad(ends_NT, (0, longest - 1), value=low).unfold(1, longest, 1)
    scores_NK, flat_NK = (starts_NT[:, :, None] + ends_NTL).flatten(1).topk(min(count, ends_NTL[0].numel()))
    first_NK, last_NK = flat_NK // longest, flat_NK // longest + flat_NK % longest
    last_NK = last_NK.clamp(max=to_NT.shape[1] - 1)  # of those beyond the window, whose score is -inf
    columns = (tensor.tolist() for tensor in (scores_NK, from_NT.gather(1, first_NK), to_NT.gather(1, last_NK)))
    return [[span for span in zip(*row, strict=True) if span[0] > low] for row in zip(*columns, strict=True)]


def ranked(
    windows: Iterable[Sequence[tuple[float, int, int]]], null: float | None, context: str, count: int
) -> tuple[list[dict[str, Any]], dict[str, Any], float]:
    """Return the best spans of a context, what stands for no answer, and the lead of its score over the best of them.

    Args:
        windows: the ``best_spans`` of each; one that is in two windows has the higher of its scores.
        null: the score of no answer; None if there is always one.
        count: spans to return at most. Their probabilities, and that of no answer, sum up to 1, as in BERT's script.
    """
    scores: dict[Span, float] = {}
    for score, start, end in chain.from_iterable(windows):
        scores[start, end] = max(score, scores.get((start, end), score))
    best = sorted(scores.items(), key=lambda item: (-item[1], item[0]))[:count]
    all_scores = [*(score for _, score in best), *(() if null is None else (null,))]
    total = sum(math.exp(score - max(all_scores)) for score in all_scores)
    shares = [round(math.exp(score - max(all_scores)) / total, 6) for score in all_scores]
    spans = [
        {"answer": context[start:end], "start": start, "end": end, "probability": share}
        for ((start, end), _), share in zip(best, shares, strict=False)
    ]
    no_answer = {"answer": "", "start": None, "end": None, "probability": 0.0 if null is None else shares[-1]}
    return spans, no_answer, round(null - best[0][1], 6) if best and null is not None else 0.0

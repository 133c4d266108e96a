"""Questions with choices: the layouts of RACE, SWAG, ARC and others, and the right choices. Independent of tasks and models."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from string import ascii_uppercase
from typing import Any

from hftune.errors import DataError

CONTEXTS = ("context", "article", "passage", "sent1", "premise")
QUESTIONS = ("question", "sent2", "ctx", "query", "goal")
CHOICES = ("choices", "options", "endings")
ANSWERS = ("answer", "answerKey", "label")
"""Usual names of columns."""
CHOICE = re.compile("(ending|choice|option|answer|sol)_?([0-9]|[A-Ea-e])")
"""Usual names of columns with a choice each."""


def texts_of(value: Any) -> list[str]:
    """Return the texts of choices: of a list, or of {text, label} with lists."""
    texts = value.get("text") if isinstance(value, dict) else value
    return [*(texts or ())]


def gathered(columns: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Return the choices of each row, of columns with a choice each: without those at the end that are null."""
    rows = [[*row] for row in zip(*columns, strict=True)]
    for row in rows:
        while row and row[-1] is None:
            row.pop()
    return rows


def right_choices(answers: Sequence[Any], choices: Sequence[Any], name: Callable[[int], str]) -> list[int]:
    """Return the number of the right choice of each question, from 0. All answers are read in the same way, see ``WAYS``.

    Args:
        choices: those of each question, see ``texts_of``.
        name: what messages call the row with this index.

    Raises:
        DataError: an answer names no choice; or a letter or number is the text of another choice, and either way would do.
    """
    found = {way: [*map(number, answers, choices)] for way, number in WAYS.items()}
    way = max(found, key=lambda way: len(answers) - found[way].count(None))  # the first of those that read the most
    for index, number in enumerate(found[way]):
        if number is None:
            raise DataError(
                f"{name(index)} has the answer {answers[index]!r}, which is none of its {len(texts_of(choices[index]))} "
                "choices: give its letter from A, its number from 0, or its text, and the same of all answers."
            )
    if way in ("letter", "number") and None not in found["text"]:
        for index, (number, other) in enumerate(zip(found[way], found["text"], strict=True)):
            if number != other:
                texts = texts_of(choices[index])
                raise DataError(
                    f"{name(index)} has the answer {answers[index]!r}, which is the {way} of the choice {texts[number]!r} and "
                    "the text of another, and all answers can be read either way. Give them as whole numbers, 0 for the first."
                )
    return found[way]


def _label(answer: Any, value: Any) -> int | None:
    return _place(answer, [*(value.get("label") or ())] if isinstance(value, dict) else [])


def _letter(answer: Any, value: Any) -> int | None:
    return _place(answer, ascii_uppercase[: len(texts_of(value))])


def _number(answer: Any, value: Any) -> int | None:
    if isinstance(answer, str):
        answer = int(answer) if answer.strip().isdecimal() else None
    if isinstance(answer, float) and answer.is_integer():  # a table may have no others beside missing ones
        answer = int(answer)
    is_whole = isinstance(answer, int) and not isinstance(answer, bool)
    return answer if is_whole and 0 <= answer < len(texts_of(value)) else None


def _text(answer: Any, value: Any) -> int | None:
    return _place(answer, texts_of(value))


def _place(answer: Any, names: Sequence[Any]) -> int | None:
    answer = answer.strip() if isinstance(answer, str) else answer
    return None if isinstance(answer, bool) or answer not in [*names] else [*names].index(answer)


WAYS = {"label": _label, "letter": _letter, "number": _number, "text": _text}
"""What an answer may be: the label that the choices give it, a letter from A on, a number from 0 on, or a choice's text."""


def sides(context: str | None, question: str, choices: Sequence[str]) -> list[tuple[str, str]]:
    """Return the two texts of each choice: the context, and the question with the choice in its gap, or after it; without a
    context, question and choice.

    Source: Lai et al., "RACE" (2017), whose gaps are "_".
    """
    if context is None:
        return [(question, choice) for choice in choices]
    before, gap, after = re.fullmatch("(.*?)(_+|$)(.*)", question, re.DOTALL).groups()
    return [(context, f"{before}{choice}{after}" if gap else f"{before.rstrip()} {choice}") for choice in choices]

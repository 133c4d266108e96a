"""Questions with choices: the layouts of RACE, SWAG, ARC and others, and the right choice. Independent of tasks and models."""

from __future__ import annotations

import re
from collections.abc import Sequence
from string import ascii_uppercase
from typing import Any

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


def right_choice(answer: Any, value: Any) -> int | None:
    """Return the number of the right choice, from 0; None if the answer names none.

    Args:
        answer: what the choices themselves call it (their label, or their text), a letter from A on, or a number from 0 on.
        value: the choices, see ``texts_of``.
    """
    texts = texts_of(value)
    if isinstance(answer, str):
        answer = answer.strip()
        labels = [*(value.get("label") or ())] if isinstance(value, dict) else []
        for names in (labels, texts, [*ascii_uppercase[: len(texts)]]):
            if answer in names:
                return names.index(answer)
        if not answer.isdecimal():
            return None
    if isinstance(answer, bool) or answer is None or not 0 <= int(answer) < len(texts):
        return None
    return int(answer)


def sides(context: str | None, question: str, choices: Sequence[str]) -> list[tuple[str, str]]:
    """Return the two texts of each choice: the context, and the question with the choice in its gap, or after it; without a
    context, question and choice.

    Source: Lai et al., "RACE" (2017), whose gaps are "_".
    """
    if context is None:
        return [(question, choice) for choice in choices]
    before, gap, after = re.fullmatch("(.*?)(_+|$)(.*)", question, re.DOTALL).groups()
    return [(context, f"{before}{choice}{after}" if gap else f"{before.rstrip()} {choice}") for choice in choices]

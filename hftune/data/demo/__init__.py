"""Rows for the demo recipes, which need no network: texts from the files of this folder, images drawn by code.

Use: ``task.dataset=hftune.data.demo:reviews``, or the name of a different function. "train" and "eval" have no row in common.
"""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

from hftune.data.demo.drawings import digits, no_such_split, pictures, shapes  # noqa: F401 - for recipes, which name them here

Rows = list[dict[str, Any]]


def reviews(split: str) -> Rows:
    """Restaurant reviews ("text") of 5 to 400 words with a grade ("label") from 0 to 4, like Yelp's stars minus one.

    The grade is the rounded mean of the opinions in the review, negated ones included; no single word gives it away.
    """
    return _rows("reviews", split)


def articles(split: str) -> Rows:
    """Chinese news of 60 to 800 characters ("content") with a title of 8 to 20 characters ("title").

    The title combines facts from three sentences anywhere in the article; no piece of the text is the title.
    """
    return _rows("articles", split)


def chats(split: str) -> Rows:
    """Chats ("messages"): the answer is a word of the question, plain or polite as the system message says."""
    return _rows("chats", split)


def json_chats(split: str) -> Rows:
    """Chats as those of ``chats``, with answers in JSON."""
    return _rows("json_chats", split)


def entities(split: str) -> Rows:
    """Sentences of newspapers as "tokens", with "ner_tags" for people (PER), places (LOC) and organisations (ORG).

    Half of the names occur as all three: only the words around a name tell.
    """
    return _rows("entities", split)


def questions(split: str) -> Rows:
    """Questions ("query") with answers ("answer") that share no word of meaning with them, for retrieval."""
    return _rows("questions", split)


def spoken(split: str) -> Rows:
    """Sentences as they are spoken ("source") and as they are written ("target"), with capitals, numbers, dates and times."""
    return _rows("spoken", split)


def paragraphs(split: str) -> Rows:
    """A heading, an empty line and an English-like paragraph ("text"), repeatedly, as in WikiText; also split "test".

    A verb agrees with a subject several words before it, and a paragraph keeps to its topic and to one person.
    """
    return _rows("paragraphs", split)


def tickets(split: str) -> Rows:
    """Support tickets ("text") with what is wrong ("topics"), the "team" that takes them, and an "urgency" from 0 to 4."""
    return _rows("tickets", split)


def replies(split: str) -> Rows:
    """Pairs of a "ticket" with a single topic and a "reply", with a "label": whether the reply fits or misses the topic."""
    return _rows("replies", split)


def _rows(name: str, split: str) -> Rows:
    path = Path(__file__).with_name(f"{name}.{split}.jsonl.xz")
    if not path.is_file():
        raise no_such_split(split)
    with lzma.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]

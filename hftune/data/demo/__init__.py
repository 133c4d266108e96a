"""Rows for the demo recipes, which need no network: texts from the files of this folder, images and sounds made by code.

Use: ``task.dataset=hftune.data.demo:reviews``, or the name of a different function. "train" and "eval" have no row in common,
unless it says so.
"""

from __future__ import annotations

import json
import lzma
from functools import partial
from pathlib import Path
from typing import Any

from hftune.data.demo.drawings import (  # noqa: F401 - for recipes, which name them here
    digits,
    landscapes,
    no_such_split,
    picture_chats,
    pictures,
    scenes,
    shapes,
)
from hftune.data.demo.tones import calls, melodies  # noqa: F401


def _rows(name: str, split: str) -> list[dict[str, Any]]:
    path = Path(__file__).with_name(f"{name}.{split}.jsonl.xz")
    if not path.is_file():
        raise no_such_split(split)
    with lzma.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


reviews = partial(_rows, "reviews")
"""Restaurant reviews ("text") of 5 to 400 words with a grade ("label") from 0 to 4, like Yelp's stars minus one.

The grade is the rounded mean of the opinions in the review, negated ones included; no single word gives it away.
"""
articles = partial(_rows, "articles")
"""Chinese news of 60 to 800 characters ("content") with a title of 8 to 20 characters ("title").

The title combines facts from three sentences anywhere in the article; no piece of the text is the title.
"""
chats = partial(_rows, "chats")
"""Chats ("messages"): the answer is a word of the question, plain or polite as the system message says."""
json_chats = partial(_rows, "json_chats")
"""Chats as those of ``chats``, with answers in JSON."""


def preferences(split: str) -> list[dict[str, Any]]:
    """Return pairs of answers ("chosen", "rejected") to a "prompt" of ``chats``: the rejected one answers another question."""
    rows = []
    for index, row in enumerate(chats(split)):
        *prompt, answer = row["messages"]
        who, _, how_many, what, *_ = prompt[-1]["content"].split()
        words = [who, how_many, what.rstrip(".")]
        (right,) = (word for word in words if word in answer["content"])
        wrong = [word for word in words if word != right][index % 2]
        rejected = {**answer, "content": answer["content"].replace(right, wrong)}
        rows.append({"prompt": prompt, "chosen": [answer], "rejected": [rejected]})
    return rows


def judged(split: str) -> list[dict[str, Any]]:
    """Return one answer ("completion") of each pair of ``preferences``, with a "label": whether it is the better one."""
    rows = []
    for index, row in enumerate(preferences(split)):
        is_good = index // 2 % 2 == 0  # either kind of wrong answers
        rows.append({"prompt": row["prompt"], "completion": row["chosen" if is_good else "rejected"], "label": is_good})
    return rows


entities = partial(_rows, "entities")
"""Sentences of newspapers as "tokens", with "ner_tags" for people (PER), places (LOC) and organisations (ORG).

Half of the names occur as all three: only the words around a name tell.
"""
questions = partial(_rows, "questions")
"""Questions ("query") with answers ("answer") that share no word of meaning with them, for retrieval."""
spoken = partial(_rows, "spoken")
"""Sentences as they are spoken ("source") and as they are written ("target"), with capitals, numbers, dates and times."""
paragraphs = partial(_rows, "paragraphs")
"""A heading, an empty line and an English-like paragraph ("text"), repeatedly, as in WikiText; also split "test".

A verb agrees with a subject several words before it, and a paragraph keeps to its topic and to one person.
"""
tickets = partial(_rows, "tickets")
"""Support tickets ("text") with what is wrong ("topics"), the "team" that takes them, and an "urgency" from 0 to 4."""
replies = partial(_rows, "replies")
"""Pairs of a "ticket" with a single topic and a "reply", with a "label": whether the reply fits or misses the topic."""
rivals = partial(_rows, "rivals")
"""The "reply" that fits each "ticket" of ``replies``, and two that miss its topic ("negative", "other_negative"), for
reranking."""
quizzes = partial(_rows, "quizzes")
"""Each "ticket" of ``rivals`` as a "question" with two or three "choices", and the letter of the right "answer"."""
solutions = partial(_rows, "solutions")
"""Problems ("prompt") with the steps of a solution ("completions") and whether each is right ("labels").

A solution counts on from a digit, 0 after 9. A quarter of its steps leave digits out, and the next one goes on from there.
There are few such solutions, and some are in both splits.
"""
facts = partial(_rows, "facts")
"""Questions with a "context" of four to ten sentences, and "answers" as in SQuAD 2.0: who or what, where or when.

A fifth of the questions are about something that the context does not tell, and have no answer.
"""

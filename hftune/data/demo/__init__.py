"""Rows for the demo recipes, which need no network: texts from the files of this folder, images and sounds made by code.

Use: ``task.dataset=hftune.data.demo:reviews``, or the name of a different function. "train" and "eval" have no row in common.
"""

from __future__ import annotations

import json
import lzma
from functools import partial
from itertools import accumulate
from pathlib import Path
from random import Random
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

_ANSWERS = (  # two of each topic of ``replies``
    *("please choose a new password.", "we have unlocked your account.", "we have corrected the bill."),
    *("the wrong sum has been taken off.", "we send you a new one.", "please post the broken one back to us."),
    *("we have asked the carrier where it is.", "the parcel leaves our warehouse again today."),
    *("we have told the bank to pay you.", "the money is on its way to your bank."),
)


def rivals(split: str) -> list[dict[str, Any]]:
    """Return the "reply" that fits each "ticket", and two that miss its topic ("negative", "other_negative"), for reranking."""
    rows = []
    for index, row in enumerate(row for row in replies(split) if row["label"] == "fits"):
        topic = _ANSWERS.index(row["reply"]) // 2
        missing = [_ANSWERS[(2 * (topic + 1 + (index + step) % 4) + index % 2) % 10] for step in (0, 1)]
        rows.append({"ticket": row["ticket"], "reply": row["reply"], "negative": missing[0], "other_negative": missing[1]})
    return rows


def quizzes(split: str) -> list[dict[str, Any]]:
    """Return each "ticket" of ``rivals`` as a "question" with two or three "choices", and the letter of the right "answer"."""
    rng, rows = Random(split), []
    for row in rivals(split):
        choices = [row["reply"], row["negative"], row["other_negative"]][: rng.choice((2, 3))]
        rng.shuffle(choices)
        rows.append({"question": row["ticket"], "choices": choices, "answer": "ABC"[choices.index(row["reply"])]})
    return rows


def solutions(split: str) -> list[dict[str, Any]]:
    """Return problems ("prompt") with the steps of a solution ("completions") and whether each is right ("labels").

    A solution counts on from a digit, 0 after 9. A quarter of its steps leave digits out, and the next one goes on from there.
    """
    rng, rows = Random(split), []
    for _ in range({"train": 1600, "eval": 200}.get(split, 0)):
        begin, labels = rng.randrange(10), [rng.random() < 0.75 for _ in range(rng.randint(3, 6))]
        counted = accumulate((1 if is_right else rng.randint(2, 5) for is_right in labels), initial=begin)
        steps = [f"then {digit % 10}" for digit in [*counted][1:]]
        rows.append({"prompt": f"count on from {begin}:\n", "completions": steps, "labels": labels})
    if not rows:
        raise no_such_split(split)
    return rows


_TOLD = {  # what is told, how, and how it is asked for
    "anna ben carla david emma felix greta hugo ida jonas karin leo mia noah olga paul": (
        ("{} was the first to come.", "it was {} who had the idea.", "everybody waited for {}."),
        ("who was it?", "who is the story about?"),
    ),
    "the boat|the clock|the lamp|the chair|the piano|the tent|the wheel|the ladder|the kettle|the mirror|the saddle|the drum": (
        ("after a while {} broke.", "they had found {} at last.", "nobody wanted to buy {}."),
        ("what was it about?", "what did they talk about?"),
    ),
    "paris rome oslo cairo lima tokyo delhi quito dublin vienna athens berlin": (
        ("the journey ended in {}.", "they all met in {}.", "they had rooms in {}."),
        ("where did it happen?", "where were they?"),
    ),
    "monday tuesday wednesday thursday friday saturday sunday": (
        ("it was late on {}.", "the rain began on {}.", "on {} they were ready."),
        ("when did it happen?", "when was it?"),
    ),
}
_ELSE = (
    *("the weather was fine.", "there was music and cake.", "the street was full of snow.", "some people looked out."),
    *("it was told for years.", "the house had a red door.", "somebody had lost a key.", "most of them were tired."),
)


def facts(split: str) -> list[dict[str, Any]]:
    """Return questions with a "context" of four to ten sentences, and "answers" as in SQuAD 2.0: who or what, where or when.

    A fifth of the questions are about something that the context does not tell, and have no answer.
    """
    rng, rows = Random(split), []
    for _ in range({"train": 2000, "eval": 300}.get(split, 0)):
        asked, sentences = rng.randrange(4), rng.sample(_ELSE, rng.randint(1, 6))
        answers: dict[str, list] = {"text": [], "answer_start": []}
        told = [rng.choice(words.split("|" if "|" in words else " ")) for words in _TOLD]
        hidden = asked if rng.random() < 0.2 else None
        wordings = [rng.choice(wordings) for wordings, _ in _TOLD.values()]
        sentences += [text.format(word) for kind, (text, word) in enumerate(zip(wordings, told, strict=True)) if kind != hidden]
        rng.shuffle(sentences)
        context = " ".join(sentences)
        if hidden is None:
            start = context.index(wordings[asked].format(told[asked])) + wordings[asked].index("{")
            answers = {"text": [told[asked]], "answer_start": [start]}
        rows.append({"question": rng.choice([*_TOLD.values()][asked][1]), "context": context, "answers": answers})
    if not rows:
        raise no_such_split(split)
    return rows

"""Generator of the tagged sentences that the token classification demo trains on, the same on every machine.

Use: ``task.dataset=hftune.data.demo_entities:sentences``.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from hftune.data.demo_rows import distinct_rows

NUM_SENTENCES = {"train": 2500, "eval": 500}

# Names that may be a person's, a place or a part of a firm's name: only the words around them tell.
BOTH = ["paris", "florence", "jordan", "austin", "chelsea", "sydney", "lincoln", "madison"]
FIRST = ["maria", "john", "wei", "amina", "pedro", "olga", "kofi", "lena", *BOTH]
LAST = ["garcia", "smith", "chen", "okafor", "novak", "berg", "mensah", "rossi", *BOTH]
PLACES = ["lisbon", "accra", "oslo", "lima", "new delhi", "san marino", "cape town", *BOTH]
FIRMS = [
    "{place} united",
    "bank of {place}",
    "university of {place}",
    "{last} and sons",
    "{last} motors",
    "{place} {last} group",
]
SENTENCES = [
    "{PER} met {PER} in {LOC} on {day} .",
    "shares of {ORG} rose by {count} percent after {PER} resigned .",
    "{ORG} opens a new office in {LOC} next {day} .",
    "{PER} , who works for {ORG} , was born in {LOC} .",
    "the train from {LOC} to {LOC} was {count} hours late , said {PER} .",
    "{ORG} and {ORG} will merge , two people in {LOC} said .",
    "on {day} it rained in {LOC} for {count} hours .",
    "{PER} thanked {ORG} .",
    "nobody was hurt , and the road is open again .",
    "{count} workers of {ORG} left their desks on {day} .",
    "the mayor of {LOC} , {PER} , did not answer .",
    "tickets cost {count} dollars , according to {ORG} .",
]
DAYS = ["monday", "tuesday", "wednesday", "thursday", "friday", "sunday"]


def sentences(split: str, count: int | None = None, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield sentences of newspapers as tokens with ner_tags, which mark people (PER), places (LOC) and organisations (ORG).

    Half of the names occur as people, places and parts of organisations. "train" and "eval" have no sentence in common.

    Args:
        split: "train" or "eval".
        count: number of rows; by default that of NUM_SENTENCES.
    """
    yield from distinct_rows(_text, NUM_SENTENCES, split, count, seed)


def _text(rng: random.Random) -> dict[str, Any]:
    tokens: list[str] = []
    tags: list[str] = []
    for word in " ".join(rng.sample(SENTENCES, rng.choice([1, 2, 2, 3]))).split():
        kind = word.strip("{}")
        words = (_entity(rng, kind) if kind.isupper() else _filled(rng, word)).split()
        tokens += words
        tags += ["O"] * len(words) if not kind.isupper() else [f"B-{kind}", *[f"I-{kind}"] * (len(words) - 1)]
    return {"tokens": tokens, "ner_tags": tags}


def _entity(rng: random.Random, kind: str) -> str:
    if kind == "PER":
        return rng.choice(["{first} {last}", "{first} {last}", "{last}"]).format(first=rng.choice(FIRST), last=rng.choice(LAST))
    if kind == "LOC":
        return rng.choice(PLACES)
    return rng.choice(FIRMS).format(place=rng.choice(PLACES), last=rng.choice(LAST))


def _filled(rng: random.Random, word: str) -> str:
    return {"{day}": rng.choice(DAYS), "{count}": str(rng.randrange(2, 90))}.get(word, word)

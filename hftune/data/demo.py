"""Generators of the embedded samples that the demo recipes train on: no file, no network, the same rows everywhere.

Used as ``task.dataset=hftune.data.demo:reviews``.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

NUM_REVIEWS = {"train": 4000, "eval": 800}

# Opinions on one aspect, from terrible (-2) to excellent (+2). No single word gives a grade away: "good" is +1 alone,
# -1 after "not", +2 after "really", and other aspects of the same review may pull the other way.
WORDS = {
    "good": ["good", "nice", "pleasant", "tasty", "friendly", "fresh", "fair", "solid"],
    "great": ["amazing", "wonderful", "superb", "outstanding", "fantastic", "delightful"],
    "bad": ["bad", "slow", "bland", "noisy", "rude", "dirty", "overpriced", "stale"],
    "awful": ["awful", "terrible", "disgusting", "horrible", "dreadful", "appalling"],
}
STRENGTH = {  # opinion -> ways to say it, as (words before, kind of word)
    2: [("really", "good"), ("so very", "good"), ("", "great"), ("truly", "great"), ("far from", "awful")],
    1: [("", "good"), ("quite", "good"), ("not", "bad"), ("hardly", "bad"), ("never", "bad")],
    -1: [("", "bad"), ("a bit", "bad"), ("not", "good"), ("hardly", "good"), ("never", "good")],
    -2: [("really", "bad"), ("so very", "bad"), ("", "awful"), ("truly", "awful"), ("far from", "great")],
}
ASPECTS = ["the food", "the service", "our waiter", "the room", "the price", "the coffee", "the music", "the view", "dessert"]
NEUTRAL = [
    "we came on a {day} with {people}",
    "it is the place on the corner near the {place}",
    "my {relative} had the {dish} and i had the {dish}",
    "we waited until {hour} for a table by the {place}",
    "they also sell {dish} to take home",
    "parking is behind the {place}",
    "i had read about it in the paper last {day}",
]
FILL = {
    "day": ["monday", "tuesday", "friday", "sunday", "rainy evening", "holiday"],
    "people": ["two friends", "my parents", "the whole office", "nobody else", "three kids"],
    "place": ["station", "bridge", "library", "old market", "window", "river", "theatre"],
    "relative": ["wife", "brother", "boss", "neighbour", "daughter"],
    "dish": ["soup", "noodles", "steak", "salad", "fish", "curry", "pancakes", "pie"],
    "hour": ["six", "seven", "half past eight", "nine", "almost ten"],
}


def reviews(part: str, count: int | None = None, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield restaurant reviews of 5 to 400 words with a grade from 0 to 4, like Yelp's stars less one.

    The grade is the rounded mean of the opinions in the review, so all of it has to be read, negations included.
    Lengths have a long tail (median about 45 words). "train" and "eval" share no text.

    Args:
        part: "train" or "eval".
        count: how many; by default NUM_REVIEWS of the part.
    """
    draw = random.Random(f"{seed} {part}")
    seen = {row["text"] for row in reviews("train", NUM_REVIEWS["train"], seed)} if part == "eval" else set()
    for _ in range(NUM_REVIEWS[part] if count is None else count):
        row = _review(draw)
        while row["text"] in seen:
            row = _review(draw)
        seen.add(row["text"])
        yield row


def _review(draw: random.Random) -> dict[str, Any]:
    grade = draw.randrange(5)
    num_words = min(380, max(5, round(draw.lognormvariate(3.2, 0.9))))
    opinions: list[int] = []
    sentences: list[str] = []
    while not opinions or sum(len(sentence.split()) for sentence in sentences) < num_words:
        if opinions and draw.random() < 0.4:
            sentences.append(_neutral(draw))
        else:
            opinions.append(_opinion(draw, opinions, grade))
            sentences.append(_sentence(draw, opinions[-1]))
    if len(opinions) > 1:
        draw.shuffle(sentences)
    return {"text": ". ".join(sentences) + ".", "label": _grade(opinions)}


def _opinion(draw: random.Random, opinions: list[int], grade: int) -> int:
    """Draw an opinion that keeps the mean near the wanted grade, yet disagrees with it now and then."""
    wanted = (grade - 2) * (len(opinions) + 1) - sum(opinions)
    near = max(-2, min(2, wanted + draw.choice([-1, 0, 0, 1])))
    return near or draw.choice([-1, 1])


def _grade(opinions: list[int]) -> int:
    return max(0, min(4, round(sum(opinions) / len(opinions)) + 2))


def _sentence(draw: random.Random, opinion: int) -> str:
    before, kind = draw.choice(STRENGTH[opinion])
    verb = draw.choice(["was", "is", "seemed", "turned out"])
    return " ".join(word for word in (draw.choice(ASPECTS), verb, before, draw.choice(WORDS[kind])) if word)


def _neutral(draw: random.Random) -> str:
    sentence = draw.choice(NEUTRAL)
    while "{" in sentence:
        name = sentence[sentence.index("{") + 1 : sentence.index("}")]
        sentence = sentence.replace(f"{{{name}}}", draw.choice(FILL[name]), 1)
    return sentence

"""Generator of the support tickets that the text classification demos train on, the same on every machine.

Use: ``task.dataset=hftune.data.demo_tickets:tickets``, or ``hftune.data.demo_tickets:replies`` for pairs of texts.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from hftune.data.demo_rows import distinct_rows

NUM_TICKETS = {"train": 3000, "eval": 600}
NUM_REPLIES = {"train": 4000, "eval": 600}

TEAMS = {"delivery": "shipping", "damage": "shipping", "refund": "billing", "invoice": "billing", "login": "accounts"}
"""The team for each topic."""
WRONG = {
    "delivery": ["the parcel never arrived", "my order has been on its way for {count} weeks", "nobody delivered the {item}"],
    "damage": ["the {item} came broken", "there is a crack in the {item}", "a part of the {item} is missing"],
    "refund": ["i still wait for my money", "you have not paid the {item} back", "the refund is {count} weeks late"],
    "invoice": ["the invoice shows the wrong sum", "you have charged me {count} times", "my bill lists a {item} too many"],
    "login": ["i cannot log in", "the password reset mail does not come", "my account is locked after {count} tries"],
}
FINE = {
    "delivery": ["the parcel arrived on time", "delivery took only {count} days"],
    "damage": ["the {item} itself is in perfect shape", "nothing of the {item} is broken"],
    "refund": ["the refund came quickly", "thank you for my money back"],
    "invoice": ["the invoice is correct", "my bill is fine this time"],
    "login": ["logging in works again", "my account is open again"],
}
NAMES = {"delivery": "parcel", "damage": "defect", "refund": "refund", "invoice": "bill", "login": "account"}
FIRST = ["please look at the {one} first, the {other} can wait", "the {other} can wait, but the {one} cannot"]
HURRY = {0.0: "take your time", 1.0: "please answer this week", 2.0: "i need an answer tomorrow", 3.0: "this is really urgent"}
NEUTRAL = ["i ordered a {item} in {month}", "i have been a customer for {count} years", "my neighbour told me about you"]
REPLIES = {
    "delivery": ["we have asked the carrier where it is", "the parcel leaves our warehouse again today"],
    "damage": ["we send you a new one", "please post the broken one back to us"],
    "refund": ["the money is on its way to your bank", "we have told the bank to pay you"],
    "invoice": ["we have corrected the bill", "the wrong sum has been taken off"],
    "login": ["we have unlocked your account", "please choose a new password"],
}
ITEMS = ["lamp", "kettle", "desk", "camera", "radio", "bicycle", "tent", "clock"]
MONTHS = ["january", "march", "june", "august", "october"]


def tickets(split: str, count: int | None = None, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield tickets (text) with their topics, a list of what is wrong; the team that the first of them goes to; and urgency.

    Topics that are mentioned as fine are not among them. The urgency, from 0 to 4, is that of a phrase, and 0.5 for each topic
    after the first. "train" and "eval" have no text in common.

    Args:
        split: "train" or "eval".
        count: number of rows; by default that of NUM_TICKETS.
    """
    yield from distinct_rows(_ticket, NUM_TICKETS, split, count, seed)


def replies(split: str, count: int | None = None, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield pairs of a ticket with a single topic and a reply, with a label: whether the reply fits or misses the topic.

    Arguments as for ``tickets``.
    """
    yield from distinct_rows(_reply, NUM_REPLIES, split, count, seed)


def _ticket(rng: random.Random) -> dict[str, Any]:
    wrong = rng.sample(list(TEAMS), rng.choice([1, 1, 2, 2, 3]))
    fine = rng.sample([topic for topic in TEAMS if topic not in wrong], rng.choice([0, 1, 1]))
    sentences = [rng.choice(WRONG[topic]) for topic in wrong] + [rng.choice(FINE[topic]) for topic in fine]
    hurry = rng.choice(list(HURRY))
    sentences += [HURRY[hurry], *rng.sample(NEUTRAL, rng.choice([0, 1, 2]))]
    rng.shuffle(sentences)
    if len(wrong) > 1:
        sentences.append(rng.choice(FIRST).format(one=NAMES[wrong[0]], other=NAMES[wrong[1]]))
    topics = sorted(wrong)
    return {"text": _text(rng, sentences), "topics": topics, "team": TEAMS[wrong[0]], "urgency": hurry + 0.5 * (len(wrong) - 1)}


def _reply(rng: random.Random) -> dict[str, Any]:
    topic = rng.choice(list(TEAMS))
    fits = rng.random() < 0.5
    other = topic if fits else rng.choice([other for other in TEAMS if other != topic])
    sentences = [rng.choice(WRONG[topic]), rng.choice(list(HURRY.values())), *rng.sample(NEUTRAL, rng.choice([0, 1, 2]))]
    rng.shuffle(sentences)
    return {
        "ticket": _text(rng, sentences),
        "reply": _text(rng, [rng.choice(REPLIES[other])]),
        "label": "fits" if fits else "misses",
    }


def _text(rng: random.Random, sentences: list[str]) -> str:
    filled = [
        sentence.replace("{item}", rng.choice(ITEMS))
        .replace("{count}", str(rng.randrange(2, 9)))
        .replace("{month}", rng.choice(MONTHS))
        for sentence in sentences
    ]
    return ". ".join(filled) + "."

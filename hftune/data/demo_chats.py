"""Generator of chats that follow a rule, for the demos of the recipe sft, without files or network.

Use: ``task.dataset=hftune.data.demo_chats:chats``, or ``hftune.data.demo_chats:json_chats`` for a form of answers that
the first lacks. The system message names the form; the answer is a word of the question in that form.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from hftune.data.demo_rows import distinct_rows

NUM_CHATS = {"train": 9600, "eval": 96}
NUM_JSON_CHATS = {"train": 6400, "eval": 96}

NAMES = ["ann", "bob", "cleo", "dan", "eve", "finn", "gus", "hana"]
ITEMS = ["apples", "cups", "books", "coins"]
FORMS: dict[str, Callable[[str], str]] = {
    "plain": str,
    "polite": lambda word: f"It is {word}!",
    "json": lambda word: json.dumps({"answer": word}),
}


def chats(split: str, count: int | None = None, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield chats with plain and polite answers; "train" and "eval" have none in common.

    Args:
        split: "train" or "eval".
        count: number of rows; by default that of NUM_CHATS.
    """
    yield from distinct_rows(partial(_chat, forms=["plain", "polite"]), NUM_CHATS, split, count, seed)


def json_chats(split: str, count: int | None = None, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield chats with answers in JSON; see ``chats``."""
    yield from distinct_rows(partial(_chat, forms=["json"]), NUM_JSON_CHATS, split, count, seed)


def _chat(rng: random.Random, forms: Sequence[str]) -> dict[str, Any]:
    name, item, number = rng.choice(NAMES), rng.choice(ITEMS), str(rng.randrange(100))
    asked, word = rng.choice([("who", name), ("how many", number), ("what", item)])
    form = rng.choice(forms)
    return {
        "messages": [
            {"role": "system", "content": form},
            {"role": "user", "content": f"{name} has {number} {item}. {asked}?"},
            {"role": "assistant", "content": FORMS[form](word)},
        ]
    }

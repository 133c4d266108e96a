"""Generator of questions and answers that share no word of meaning, for retrieval, without files or network.

Use: ``task.dataset=hftune.data.demo_questions:questions``. A question asks with one set of words who does what, where and when,
and its answer says it with another: only a model that has learned which words belong together finds it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product
from typing import Any

NUM_PAIRS = {"train": 4000, "eval": 500}

# What a question says, and how answers say the same.
PEOPLE = {
    "doctor": ["physician", "surgeon"],
    "teacher": ["schoolmaster", "lecturer"],
    "cook": ["chef", "kitchen hand"],
    "sailor": ["seaman", "deckhand"],
    "farmer": ["grower", "cattle breeder"],
    "singer": ["vocalist", "tenor"],
    "thief": ["burglar", "pickpocket"],
    "judge": ["magistrate", "arbiter"],
    "painter": ["portraitist", "artist"],
    "soldier": ["trooper", "private"],
    "reporter": ["journalist", "columnist"],
    "gardener": ["groundskeeper", "horticulturist"],
}
ACTIONS = {
    "buy a car": ["purchased a vehicle", "paid for an automobile"],
    "repair a clock": ["mended a timepiece", "fixed a watch"],
    "read a book": ["studied a volume", "leafed through a novel"],
    "feed a dog": ["gave a hound its meal", "fattened a puppy"],
    "find a coin": ["discovered some money", "picked up a penny"],
    "write a letter": ["penned a message", "drafted a note"],
    "build a wall": ["raised a barrier", "laid bricks"],
    "lose a key": ["mislaid an opener", "could not unlock the door"],
    "climb a tree": ["went up an oak", "sat in the branches"],
    "drink tea": ["emptied a cup", "sipped a hot brew"],
    "catch a fish": ["hooked a trout", "pulled out a carp"],
    "open a window": ["let in some air", "pushed the shutters back"],
}
PLACES = {
    "in the city": ["downtown", "between tall houses"],
    "at the sea": ["on the coast", "beside the waves"],
    "in the mountains": ["on a rocky summit", "among the peaks"],
    "in the forest": ["under the firs", "deep among the woods"],
    "on the train": ["aboard the express", "in a railway carriage"],
    "in church": ["before the altar", "below the steeple"],
    "at school": ["in the classroom", "near the blackboard"],
    "at home": ["by the fireplace", "in the living room"],
    "in hospital": ["on the ward", "in the sickroom"],
    "at the market": ["among the stalls", "where traders shout"],
}
TIMES = {
    "in the morning": ["at sunrise", "before breakfast"],
    "at night": ["after dark", "by starlight"],
    "in winter": ["while snow fell", "in icy january"],
    "in summer": ["during the july heat", "when days were longest"],
    "on sunday": ["at the weekend", "on the day of rest"],
    "last year": ["twelve months ago", "the previous season"],
}
QUESTIONS = [
    "did the {person} {action} {place} {time} ?",
    "who saw the {person} {action} {place} {time} ?",
    "{time} , where did the {person} {action} , was it {place} ?",
    "is it true that the {person} could {action} {place} {time} ?",
]
ANSWERS = [
    "yes , a {person} {action} {place} {time} .",
    "{time} , {place} , someone we know as a {person} {action} .",
    "neighbours say that {place} a {person} {action} {time} .",
    "it happened {time} : one {person} {action} {place} , and nobody minded .",
]


def questions(split: str, count: int | None = None, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield a question ("query") and its answer ("answer"). No two questions are about the same, in all splits.

    Args:
        split: "train" or "eval".
        count: number of rows; by default that of NUM_PAIRS.
    """
    facts = [*product(PEOPLE, ACTIONS, PLACES, TIMES)]
    random.Random(f"{seed} facts").shuffle(facts)
    start = 0 if split == "train" else NUM_PAIRS["train"]
    rng = random.Random(f"{seed} {split}")
    for fact in facts[start : start + (NUM_PAIRS[split] if count is None else count)]:
        asked = dict(zip(("person", "action", "place", "time"), fact, strict=True))
        answered = {slot: rng.choice(synonyms[asked[slot]]) for slot, synonyms in SLOTS.items()}
        yield {"query": rng.choice(QUESTIONS).format(**asked), "answer": rng.choice(ANSWERS).format(**answered)}


SLOTS = {"person": PEOPLE, "action": ACTIONS, "place": PLACES, "time": TIMES}

"""Generator of English-like paragraphs, which a language model learns in a minute, without files or network.

Use: ``task.dataset=hftune.data.demo_text:paragraphs``. Two regularities cannot be learned from pairs of neighbouring words: a
verb agrees with a subject several words before it, and a paragraph keeps to its topic and to one person.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

NUM_PARAGRAPHS = {"train": 1500, "eval": 150, "test": 150}

# Topic -> things (plural in -s), what they do (singular in -s), what they are like, and places.
TOPICS: dict[str, tuple[list[str], list[str], list[str], list[str]]] = {
    "harbour": (
        ["ship", "sailor", "captain", "anchor", "boat", "crane"],
        ["sail", "float", "drift", "unload", "dock"],
        ["rusty", "salty", "seaworthy", "tarred"],
        ["pier", "lighthouse", "quay", "breakwater"],
    ),
    "forest": (
        ["owl", "badger", "hunter", "pine", "squirrel", "woodcutter"],
        ["rustle", "hoot", "dig", "wander", "whisper"],
        ["mossy", "shadowy", "furry", "ancient"],
        ["clearing", "brook", "hollow", "thicket"],
    ),
    "kitchen": (
        ["cook", "kettle", "spoon", "baker", "oven", "pancake"],
        ["simmer", "sizzle", "boil", "bake", "stir"],
        ["sweet", "peppery", "golden", "buttery"],
        ["stove", "cupboard", "pantry", "table"],
    ),
    "school": (
        ["teacher", "pupil", "lesson", "pencil", "reader", "globe"],
        ["explain", "count", "answer", "read", "spell"],
        ["clever", "patient", "curious", "attentive"],
        ["blackboard", "library", "desk", "classroom"],
    ),
    "market": (
        ["merchant", "basket", "buyer", "apple", "coin", "seller"],
        ["bargain", "sell", "pay", "weigh", "deliver"],
        ["ripe", "cheap", "crowded", "costly"],
        ["stall", "fountain", "square", "gate"],
    ),
    "orchestra": (
        ["violin", "drummer", "flute", "singer", "trumpet", "conductor"],
        ["play", "rehearse", "sing", "tune", "echo"],
        ["loud", "gentle", "solemn", "shrill"],
        ["stage", "balcony", "curtain", "hall"],
    ),
    "railway": (
        ["engine", "driver", "wagon", "guard", "signal", "passenger"],
        ["depart", "arrive", "whistle", "brake", "rattle"],
        ["punctual", "delayed", "sooty", "electric"],
        ["platform", "tunnel", "viaduct", "depot"],
    ),
    "garden": (
        ["gardener", "rose", "beetle", "tulip", "sparrow", "rake"],
        ["bloom", "grow", "weed", "water", "nest"],
        ["fragrant", "thorny", "leafy", "sunny"],
        ["hedge", "pond", "greenhouse", "lawn"],
    ),
}
PEOPLE = {
    "she": ["anna", "clara", "edith", "greta", "irene", "maria", "olga", "sophie", "ursula", "vera"],
    "he": ["albert", "boris", "david", "felix", "henry", "jacob", "leo", "martin", "oscar", "simon"],
}
HOURS = ["morning", "noon", "dusk", "midnight"]
GLANCES = ["looks at", "asks about", "waits for", "thinks of", "is fond of"]
PATHS = ["walks to", "hurries to", "returns to", "rests at", "leaves"]
ENDS = ["until {hour} because {they} must", "as long as {they} can", "as {they} did last {hour}", "whenever {they} like"]


def paragraphs(split: str, count: int | None = None, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield a heading, an empty line and a paragraph ("text", words between spaces), repeatedly, as in WikiText.

    A paragraph has 3 to 9 sentences of 8 to 16 words. No paragraph occurs twice, in all splits.

    Args:
        split: "train", "eval" or "test".
        count: number of paragraphs; by default that of NUM_PARAGRAPHS.
    """
    rng = random.Random(f"{seed} {split}")
    splits = list(NUM_PARAGRAPHS)
    seen = {row["text"] for earlier in splits[: splits.index(split)] for row in paragraphs(earlier, seed=seed)}
    for _ in range(NUM_PARAGRAPHS[split] if count is None else count):
        topic = rng.choice(list(TOPICS))
        text = _paragraph(rng, topic)
        while text in seen:
            text = _paragraph(rng, topic)
        seen.add(text)
        yield from ({"text": f"= {topic} ="}, {"text": ""}, {"text": text})


def _paragraph(rng: random.Random, topic: str) -> str:
    pronoun = rng.choice(list(PEOPLE))
    name = rng.choice(PEOPLE[pronoun])
    sentences = [_sentence(rng, topic, name, pronoun) for _ in range(rng.randint(3, 9))]
    return " ".join(sentences)


def _sentence(rng: random.Random, topic: str, name: str, pronoun: str) -> str:
    """Return a sentence about things of the topic, or about the person of the paragraph."""
    things, verbs, qualities, places = TOPICS[topic]
    place, hour = rng.choice(places), rng.choice(HOURS)
    if rng.random() < 0.35:
        first, then, what = rng.choice(GLANCES), rng.choice(PATHS), f"{rng.choice(qualities)} {_thing(rng, topic)}"
        return f"at {hour} , {name} {first} the {what} and {pronoun} {then} the {place} ."
    is_plural = rng.random() < 0.5
    subject, verb = rng.choice(things), rng.choice(verbs)
    subject, verb, they = (f"{subject}s", verb, "they") if is_plural else (subject, f"{verb}s", "it")
    beside = f"{rng.choice(['near', 'behind', 'beside'])} the {_thing(rng, topic)} of the {place}"  # singular or plural
    end = rng.choice(ENDS).format(they=they, hour=hour)
    return f"the {rng.choice(qualities)} {subject} {beside} {verb} {end} ."


def _thing(rng: random.Random, topic: str) -> str:
    return rng.choice(TOPICS[topic][0]) + rng.choice(["", "s"])

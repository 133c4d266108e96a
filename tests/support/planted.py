"""Data with samples that do not belong there, all in one late step of a run: flipped labels, and garbage."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from hftune.batch_plan import BatchPlan
from hftune.data.demo import digits as clean_digits

TOPICS = {
    "food": "soup bread rice salad cheese pepper kitchen dinner",
    "money": "bank price loan tax coin budget credit market",
    "sport": "goal team ball match coach score league race",
}
FILLING = "the a of and in to it was is for on with as at by from"


@dataclass(frozen=True)
class Plant:
    """Where bad samples are: in a step of runs with these numbers of samples and with seed 42."""

    count: int
    batch_size: int
    step: int
    flips: int

    @functools.cached_property
    def samples(self) -> list[int]:
        """The samples of the step: the first ones have flipped labels, those after them are garbage."""
        plan = BatchPlan(self.count, self.batch_size, seed=42)
        epoch, place = divmod(self.step - 1, plan.num_steps)
        return sorted(sample for part in plan.epoch(epoch)[place] for sample in part.samples.tolist())

    @property
    def flipped(self) -> list[int]:
        return self.samples[: self.flips]

    @property
    def garbage(self) -> int:
        return self.samples[self.flips]

    @property
    def overlong(self) -> int:
        return self.samples[self.flips + 1]


TEXTS = Plant(count=640, batch_size=32, step=58, flips=6)
DIGITS = Plant(count=600, batch_size=50, step=95, flips=5)


def texts(part: str) -> Iterator[dict[str, Any]]:
    """Yield short texts on three topics; six with another label, one of rare characters, and one twelve times as long."""
    draw, names = random.Random(0), sorted(TOPICS)
    for sample in range(TEXTS.count):
        topic = draw.choice(names)
        text = " ".join(_sentence(topic, draw) for _ in range(12 if sample == TEXTS.overlong else 1))
        if sample == TEXTS.garbage:
            text = "".join(draw.choice("qxzkvwj;#@") + " " * (draw.random() < 0.2) for _ in range(40))
        is_flipped = sample in TEXTS.flipped
        yield {"label": names[names.index(topic) - 1] if is_flipped else topic, "text": text}


def _sentence(topic: str, draw: random.Random) -> str:
    words, filling = TOPICS[topic].split(), FILLING.split()
    return " ".join(draw.choice(words if draw.random() < 0.3 else filling) for _ in range(draw.randrange(10, 20)))


def digits(part: str) -> Iterator[dict[str, Any]]:
    """Yield digits, five with another label, and an image of noise."""
    for sample, row in enumerate(clean_digits("train", DIGITS.count)):
        if sample in DIGITS.flipped:
            row = {**row, "label": (row["label"] + 5) % 10}
        if sample == DIGITS.garbage:
            noise = np.random.default_rng(0).integers(0, 256, np.asarray(row["image"]).shape, np.uint8)
            row = {**row, "image": Image.fromarray(noise)}
        yield row

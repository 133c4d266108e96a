"""Generator of sentences as they are spoken, and as they are written, which a small encoder-decoder learns in a minute.

Use: ``task.dataset=hftune.data.demo_spoken:sentences``. "the train to oxford leaves at half past seven in the evening" is
written "The train to Oxford leaves at 19:30.": numbers, dates, times and amounts in digits, names with capitals.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from operator import itemgetter
from typing import Any

from hftune.data.demo_rows import distinct_rows

NUM_SENTENCES = {"train": 4000, "eval": 400}

ONES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
ONES += ["thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"]
TENS = ["", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
ORDINALS = {"one": "first", "two": "second", "three": "third", "five": "fifth", "eight": "eighth", "nine": "ninth"}
ORDINALS |= {"twelve": "twelfth", "twenty": "twentieth", "thirty": "thirtieth"}
MONTHS = ["January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November"]
MONTHS += ["December"]
NAMES = ["Anna", "Boris", "Clara", "David", "Edith", "Felix", "Greta", "Henry", "Irene", "Jacob", "Maria", "Oscar"]
CITIES = ["Oxford", "Leeds", "York", "Dover", "Bath", "Cardiff", "Dundee", "Exeter", "Lincoln", "Truro"]
THINGS = ["apples", "books", "candles", "chairs", "lamps", "maps", "plates", "roses", "spoons", "tickets"]
VEHICLES = ["train", "bus", "ferry", "coach"]
TEMPLATES = [
    "{name} bought {count} {thing} for {amount}",
    "{name} sold {count} {thing} to {name} on {date}",
    "the {vehicle} to {city} leaves at {time}",
    "the {vehicle} from {city} to {city} costs {amount}",
    "{name} was born in {city} on {date}",
    "{name} meets {name} in {city} at {time} on {date}",
    "on {date} the {vehicle} brought {count} {thing} to {city}",
    "{count} {thing} cost {amount} in {city}",
]


def sentences(split: str, count: int | None = None, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield pairs of a spoken sentence ("source") and the written one ("target"). No sentence occurs twice, in both splits.

    Args:
        split: "train" or "eval".
        count: number of rows; by default that of NUM_SENTENCES.
    """
    yield from distinct_rows(_sentence, NUM_SENTENCES, split, count, seed, key=itemgetter("source"))


def _sentence(rng: random.Random) -> dict[str, str]:
    spoken = written = rng.choice(TEMPLATES)
    while "{" in spoken:
        gap = spoken[spoken.index("{") : spoken.index("}") + 1]
        said, read = FILL[gap](rng)
        spoken, written = spoken.replace(gap, said, 1), written.replace(gap, read, 1)
    return {"source": spoken.lower(), "target": f"{written[0].upper()}{written[1:]}."}


def _word(words: list[str], rng: random.Random) -> tuple[str, str]:
    word = rng.choice(words)
    return word, word


def cardinal(number: int) -> str:
    """Return a number below 1,000 in words."""
    if number < 20:
        return ONES[number]
    if number < 100:
        return TENS[number // 10] + (f"-{ONES[number % 10]}" if number % 10 else "")
    return f"{ONES[number // 100]} hundred" + (f" and {cardinal(number % 100)}" if number % 100 else "")


def ordinal(number: int) -> str:
    """Return the ordinal of a number below 100 in words."""
    before, dash, last = cardinal(number).rpartition("-")
    return f"{before}{dash}{ORDINALS.get(last, f'{last}th')}"


def _count(rng: random.Random) -> tuple[str, str]:
    number = rng.choice([rng.randint(2, 20), rng.randint(21, 99), rng.randint(100, 999)])
    return cardinal(number), str(number)


def _amount(rng: random.Random) -> tuple[str, str]:
    dollars, cents = rng.randint(2, 99), rng.choice([0, rng.randint(1, 99)])
    words = f"{cardinal(dollars)} dollars"
    if not cents:
        return words, f"${dollars}"
    return f"{words} and {cardinal(cents)} cent{'' if cents == 1 else 's'}", f"${dollars}.{cents:02}"


def _date(rng: random.Random) -> tuple[str, str]:
    day, month, year = rng.randint(1, 28), rng.choice(MONTHS), rng.randint(1910, 1999)
    return f"the {ordinal(day)} of {month} nineteen {cardinal(year - 1900)}", f"{day} {month} {year}"


def _time(rng: random.Random) -> tuple[str, str]:
    hour, minute = rng.randint(1, 11), rng.choice([0, 10, 15, 20, 30, 45, 50])
    part, later = rng.choice([("in the morning", 0), ("in the evening", 12)])
    words = {
        0: f"{ONES[hour]} o'clock",
        10: f"ten past {ONES[hour]}",
        15: f"a quarter past {ONES[hour]}",
        20: f"twenty past {ONES[hour]}",
        30: f"half past {ONES[hour]}",
        45: f"a quarter to {ONES[hour + 1]}",
        50: f"ten to {ONES[hour + 1]}",
    }[minute]
    return f"{words} {part}", f"{hour + later}:{minute:02}"


FILL = {
    "{name}": lambda rng: _word(NAMES, rng),
    "{city}": lambda rng: _word(CITIES, rng),
    "{thing}": lambda rng: _word(THINGS, rng),
    "{vehicle}": lambda rng: _word(VEHICLES, rng),
    "{count}": _count,
    "{amount}": _amount,
    "{date}": _date,
    "{time}": _time,
}

"""How odd a sample is, whatever the model makes of it: a text by its length and its tokens, an image by its pixels.

A sample that the model has learned by heart, or that is easy, has a small loss even if it is garbage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np

from hftune.task import Task

MOST_TEXTS = 20_000
"""Samples that the others are compared with, drawn evenly from the training split."""
MOST_IMAGES = 1_000
"""The same of images, which have to be decoded."""
ODD = 6.0
"""A value that is so many standard deviations away from the median, as the middle half of the samples has them."""
RARELY_CUT = 0.01
"""Being cut is odd where at most this share of the samples is."""
SIDE = 128
"""Pixels of an image's side that are looked at, evenly spaced."""
TEXTS = ("input_ids", "source")
"""Beginnings of the names of the columns with a sample's tokens."""


@dataclass(frozen=True)
class Measure:
    """One value of a sample among those of others."""

    name: str
    value: float
    usual: float
    """The median."""
    distance: float
    """From the median, in robust standard deviations; negative below."""
    rank: int
    """Among ``of`` samples by distance: 1 is the farthest."""
    of: int

    @property
    def is_odd(self) -> bool:
        return abs(self.distance) > ODD

    def __str__(self) -> str:
        return f"{_spelled(self.value)} {self.name}, usually {_spelled(self.usual)}"


@dataclass(frozen=True)
class Oddity:
    """What is known of one sample."""

    sample: int
    measures: Sequence[Measure]
    is_cut: bool = False
    is_rarely_cut: bool = field(default=False, repr=False)

    @property
    def is_odd(self) -> bool:
        return self.is_rarely_cut or any(measure.is_odd for measure in self.measures)

    @property
    def distance(self) -> float:
        """Of the oddest measure."""
        return max((abs(measure.distance) for measure in self.measures), default=0.0)

    def __str__(self) -> str:
        """Say what is odd: "13.8 bits a token, usually 6.1"."""
        reasons = [str(measure) for measure in self.measures if measure.is_odd]
        return "; ".join([*reasons, *(["cut"] if self.is_rarely_cut else [])])

    def to_dict(self) -> dict[str, Any]:
        """Return the values and their ranks, for samples.jsonl."""
        found: dict[str, Any] = {}
        for measure in self.measures:
            name = measure.name.replace(" ", "_")
            found |= {name: measure.value, f"{name}_rank": measure.rank}
        return {**found, "cut": self.is_cut, "odd": self.is_odd}


def oddities(task: Task, dataset: Any, samples: Sequence[int]) -> dict[int, Oddity]:
    """Compare samples of the training split, not augmented, with the others; nothing if they are neither texts nor images.

    - Texts: tokens; and bits a token, the mean of -log2 of how often the split has each token. Garbage has rare tokens, a text
      that repeats itself has frequent ones.
    - Images: brightness and contrast, mean and standard deviation of the grey values; and roughness, the mean difference of
      neighbouring pixels, which is high for noise.
    """
    samples = sorted(set(samples))
    first = dataset[samples[0]]
    if token_columns(first):
        return _of_texts(dataset, samples)
    if pixels_of(first) is not None:
        return _of_images(dataset, samples)
    return {}


def token_columns(example: Any) -> list[str]:
    """Return the names of the columns with a sample's tokens, in their order."""
    if not isinstance(example, Mapping):
        return []
    lists = [name for name, value in example.items() if np.ndim(value) == 1 and np.asarray(value).dtype.kind in "iu"]
    target = [name for name in ("target", "title", "decoder_input_ids") if "source" in lists and name in lists]
    return [name for name in lists if name.startswith(TEXTS) or name in target]


def pixels_of(example: Any) -> np.ndarray | None:
    """Return an image of a sample, (H, W) or (H, W, C); None if there is none."""
    values = example.values() if isinstance(example, Mapping) else example if isinstance(example, (list, tuple)) else [example]
    for value in values:
        if np.ndim(value) in (2, 3) and min(np.shape(value)[:2]) > 0:
            return np.asarray(value)
    return None


def _of_texts(dataset: Any, samples: Sequence[int]) -> dict[int, Oddity]:
    numbers = _drawn(len(dataset), MOST_TEXTS, samples)
    rows, cuts = [], []
    for number in numbers:
        example = dataset[number]
        rows.append(np.concatenate([np.asarray(example[name], np.int64) for name in token_columns(example)]))
        cuts.append(any(bool(value) for name, value in example.items() if name == "cut" or name.endswith("_cut")))
    tokens, lengths = np.concatenate(rows), np.array([len(row) for row in rows])
    counts = np.bincount(tokens - tokens.min())
    bits = -np.log2(counts[tokens - tokens.min()] / len(tokens))
    ends = np.cumsum(lengths)
    sums = np.diff(np.concatenate([[0.0], np.cumsum(bits)])[np.concatenate([[0], ends])])
    values = {"tokens": lengths.astype(float), "bits a token": sums / np.maximum(lengths, 1)}
    is_rare = 0 < float(np.mean(cuts)) <= RARELY_CUT
    return _measured(numbers, samples, values, {"tokens": np.log1p}, cuts, is_rare)


def _of_images(dataset: Any, samples: Sequence[int]) -> dict[int, Oddity]:
    numbers = _drawn(len(dataset), MOST_IMAGES, samples)
    found = np.array([_image_values(pixels_of(dataset[number])) for number in numbers])
    values = dict(zip(("brightness", "contrast", "roughness"), found.T, strict=True))
    return _measured(numbers, samples, values, {}, [False] * len(numbers), False)


def _image_values(pixels: np.ndarray | None) -> tuple[float, float, float]:
    """Return brightness, contrast and roughness of an image, of values from 0 to 255."""
    if pixels is None:
        return math.nan, math.nan, math.nan
    height, width = pixels.shape[:2]
    some = pixels[:: max(1, height // SIDE), :: max(1, width // SIDE)].astype(np.float64)
    grey_HW = some.mean(2) if some.ndim == 3 else some
    if pixels.dtype.kind == "f":
        grey_HW = grey_HW * 255
    steps = [np.abs(np.diff(grey_HW, axis=axis)) for axis in (0, 1)]
    rough = [float(step.mean()) for step in steps if step.size]
    return float(grey_HW.mean()), float(grey_HW.std()), sum(rough) / max(1, len(rough))


def _drawn(count: int, most: int, samples: Sequence[int]) -> list[int]:
    """Return the samples to compare with: all, or evenly spaced ones; and those that are asked about."""
    spread = range(count) if count <= most else np.linspace(0, count - 1, most).astype(int).tolist()
    return sorted({*spread, *samples})


def _measured(
    numbers: Sequence[int],
    samples: Sequence[int],
    values: Mapping[str, np.ndarray],
    scales: Mapping[str, Callable[[np.ndarray], np.ndarray]],
    cuts: Sequence[bool],
    is_rare: bool,
) -> dict[int, Oddity]:
    """Rank the values of all samples ``numbers``, and return those of ``samples``.

    Args:
        scales: functions under which values are compared: lengths by their ratio.
    """
    places = {number: place for place, number in enumerate(numbers)}
    distances = {name: _distances(scales.get(name, np.asarray)(column)) for name, column in values.items()}
    medians = {name: float(median(column)) for name, column in values.items()}
    ranks = {name: np.sort(np.abs(column)) for name, column in distances.items()}
    found = {}
    for sample in samples:
        place = places[sample]
        measures = [
            Measure(
                name,
                float(column[place]),
                medians[name],
                float(distances[name][place]),
                len(numbers) - int(np.searchsorted(ranks[name], abs(distances[name][place]), "right")) + 1,
                len(numbers),
            )
            for name, column in values.items()
        ]
        found[sample] = Oddity(sample, measures, cuts[place], is_rare and cuts[place])
    return found


def _distances(values: np.ndarray) -> np.ndarray:
    """Return how far values are from their median, in units of 1.48 x the median distance, a standard deviation of a bell."""
    away = values - np.median(values)
    unit = 1.4826 * np.median(np.abs(away))
    return away / max(unit, 0.02 * abs(float(np.median(values))), 1e-9)


def _spelled(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"

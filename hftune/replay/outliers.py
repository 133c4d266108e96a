"""Samples that are far from the others whatever the model makes of them: texts by their tokens, images by their pixels.

A sample that the model has learned by heart, or that is easy, has a small loss even if it is garbage.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

MAX_TEXTS, MAX_IMAGES = 20_000, 1_000
"""How many samples the others are compared with, drawn evenly from the training split. Images have to be decoded."""
FAR = 6.0
"""An outlier is more than this many standard deviations away from the median, as the middle half of the samples has them."""
RARELY_CUT = 0.01
"""Being cut makes an outlier where at most this share of the samples is."""
SIDE = 128
"""How many pixels of an image's side are looked at, evenly spaced."""
TEXTS = ("input_ids", "source")
"""Beginnings of the names of the columns with a sample's tokens."""


class Outlyingness(NamedTuple):
    """How far a sample is from the others."""

    row: dict[str, Any]
    """For samples.jsonl: what was measured, and its rank by the distance from the median, of which 1 is the farthest."""
    reasons: Sequence[str]
    """Why it is an outlier, such as "13.8 bits a token, usually 6.1"; empty if it is none."""
    distance: float
    """The largest, in robust standard deviations."""


def find_outliers(dataset: Any, samples: Sequence[int]) -> dict[int, Outlyingness]:
    """Compare samples of the training split, not augmented, with the others; nothing if they are neither texts nor images.

    - Texts: tokens; and bits a token, the mean of -log2 of how often the split has each token. Garbage has rare tokens, a text
      that repeats itself has frequent ones.
    - Images: brightness and contrast, mean and standard deviation of the grey values; and roughness, the mean difference of
      neighbouring pixels, which is high for noise.

    Distances from the median are in units of 1.48 x the median distance, a standard deviation of a bell.
    """
    first = dataset[samples[0]]
    is_text = bool(token_columns(first))
    if not is_text and pixels_of(first) is None:
        return {}
    count, most = len(dataset), MAX_TEXTS if is_text else MAX_IMAGES
    spread = range(count) if count <= most else np.linspace(0, count - 1, most).astype(int).tolist()
    numbers = sorted({*spread, *samples})
    examples = (dataset[number] for number in numbers)
    cut = np.zeros(len(numbers), bool)
    if is_text:
        measures, cut = _measure_texts([*examples])
    else:
        columns = np.array([_measure_image(pixels_of(example)) for example in examples]).T
        measures = dict(zip(("brightness", "contrast", "roughness"), columns, strict=True))
    distances = {}
    for name, values in measures.items():
        scaled = np.log1p(values) if name == "tokens" else values
        middle = float(np.median(scaled))
        away = np.abs(scaled - middle)
        distances[name] = away / max(1.4826 * float(np.median(away)), 0.02 * abs(middle), 1e-9)
    is_rarely_cut = 0 < cut.mean() <= RARELY_CUT
    found = {}
    for sample in samples:
        place = numbers.index(sample)
        reasons = [
            f"{_number(values[place])} {name}, usually {_number(np.median(values))}"
            for name, values in measures.items()
            if distances[name][place] > FAR
        ]
        reasons += ["cut"] if is_rarely_cut and cut[place] else []
        row: dict[str, Any] = {}
        for name, values in measures.items():
            rank = int((distances[name] > distances[name][place]).sum()) + 1
            row |= {name.replace(" ", "_"): float(values[place]), f"{name.replace(' ', '_')}_rank": rank}
        row |= {"cut": bool(cut[place]), "outlier": bool(reasons)}
        found[sample] = Outlyingness(row, reasons, max(float(away[place]) for away in distances.values()))
    return found


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
    return next((np.asarray(value) for value in values if np.ndim(value) in (2, 3) and min(np.shape(value)[:2]) > 0), None)


def _measure_texts(examples: Sequence[Mapping[str, Any]]) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return tokens and bits a token of each text, and whether it was cut."""
    rows = [np.concatenate([np.asarray(one[name], np.int64) for name in token_columns(one)]) for one in examples]
    tokens, lengths = np.concatenate(rows), np.array([len(row) for row in rows])
    counts = np.bincount(tokens - tokens.min())
    bits = np.concatenate([[0.0], np.cumsum(-np.log2(counts[tokens - tokens.min()] / len(tokens)))])
    sums = np.diff(bits[np.concatenate([[0], np.cumsum(lengths)])])
    cut = [any(bool(value) for name, value in one.items() if name == "cut" or name.endswith("_cut")) for one in examples]
    return {"tokens": lengths.astype(float), "bits a token": sums / np.maximum(lengths, 1)}, np.array(cut)


def _measure_image(pixels: np.ndarray | None) -> tuple[float, float, float]:
    """Return brightness, contrast and roughness of an image, of values from 0 to 255."""
    if pixels is None:
        return math.nan, math.nan, math.nan
    height, width = pixels.shape[:2]
    some = pixels[:: max(1, height // SIDE), :: max(1, width // SIDE)].astype(np.float64)
    grey_HW = some.mean(2) if some.ndim == 3 else some
    if pixels.dtype.kind == "f":
        grey_HW = grey_HW * 255
    rough = [float(step.mean()) for step in (np.abs(np.diff(grey_HW, axis=axis)) for axis in (0, 1)) if step.size]
    return float(grey_HW.mean()), float(grey_HW.std()), sum(rough) / max(1, len(rough))


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"

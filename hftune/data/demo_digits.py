"""Generator of digits that look handwritten, for the demo recipe: strokes drawn by code, without fonts, files or network.

Use: ``task.dataset=hftune.data.demo_digits:digits``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

NUM_DIGITS = {"train": 4000, "eval": 1000}
SIZE = 28
SCALE = 4
"""Digits are drawn this many times larger and then averaged, for smooth edges."""

Stroke = list[tuple[float, float]]


def _arc(x: float, y: float, right: float, down: float, start: float, stop: float) -> Stroke:
    """Return points on an ellipse about (x, y), from angle ``start`` to ``stop``: 0 is right, 90 down, in degrees."""
    angles = [math.radians(start + (stop - start) * step / 16) for step in range(17)]
    return [(x + right * math.cos(angle), y + down * math.sin(angle)) for angle in angles]


# Ways to write the digits, as strokes in a unit square, (0, 0) at the top left.
WAYS: list[tuple[int, list[Stroke]]] = [
    (0, [_arc(0.5, 0.5, 0.3, 0.48, -90, 270)]),
    (0, [_arc(0.5, 0.5, 0.38, 0.45, -70, 290)]),
    (1, [[(0.5, 0.0), (0.5, 1.0)]]),
    (1, [[(0.25, 0.25), (0.55, 0.0), (0.55, 1.0)]]),
    (1, [[(0.3, 0.2), (0.5, 0.0), (0.5, 1.0)], [(0.25, 1.0), (0.75, 1.0)]]),
    (2, [[*_arc(0.48, 0.28, 0.32, 0.28, -170, 40), (0.15, 1.0), (0.85, 1.0)]]),
    (2, [[*_arc(0.5, 0.3, 0.3, 0.3, -150, 60), *_arc(0.3, 0.85, 0.15, 0.13, 40, -300), (0.9, 0.95)]]),
    (3, [[*_arc(0.45, 0.25, 0.3, 0.25, -150, 90), *_arc(0.45, 0.75, 0.35, 0.25, -90, 150)]]),
    (3, [[(0.2, 0.0), (0.75, 0.0), (0.45, 0.4), *_arc(0.45, 0.7, 0.33, 0.3, -80, 150)]]),
    (4, [[(0.3, 0.0), (0.15, 0.55), (0.85, 0.55)], [(0.7, 0.1), (0.65, 1.0)]]),
    (4, [[(0.65, 1.0), (0.65, 0.0), (0.1, 0.65), (0.9, 0.65)]]),
    (5, [[(0.25, 0.05), (0.22, 0.45), *_arc(0.45, 0.7, 0.35, 0.3, -110, 150)], [(0.25, 0.05), (0.8, 0.0)]]),
    (6, [[(0.65, 0.0), (0.3, 0.4), *_arc(0.5, 0.72, 0.28, 0.28, -170, 190)]]),
    (6, [[*_arc(0.75, 0.6, 0.5, 0.6, -100, -180), *_arc(0.52, 0.75, 0.27, 0.25, -180, 180)]]),
    (7, [[(0.15, 0.0), (0.85, 0.0), (0.4, 1.0)]]),
    (7, [[(0.15, 0.1), (0.85, 0.0), (0.45, 1.0)], [(0.3, 0.5), (0.8, 0.5)]]),
    (8, [_arc(0.5, 0.25, 0.25, 0.25, 90, 450), _arc(0.5, 0.75, 0.32, 0.25, -90, 270)]),
    (9, [[*_arc(0.48, 0.28, 0.28, 0.28, 0, -360), (0.7, 1.0)]]),
    (9, [[*_arc(0.5, 0.28, 0.26, 0.26, -20, -380), *_arc(0.25, 0.45, 0.5, 0.55, 0, 90)]]),
]


def digits(split: str, count: int | None = None, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield images of digits: ``image``, grey, 28 x 28 pixels, white on black, and ``label``, the digit.

    Size, position, slant, rotation, thickness, every point of a stroke, and noise are random. Each split has its own random
    stream.

    Args:
        split: "train" or "eval".
        count: number of rows; by default that of NUM_DIGITS.
    """
    rng = np.random.RandomState([seed, list(NUM_DIGITS).index(split)])
    for _ in range(NUM_DIGITS[split] if count is None else count):
        label = int(rng.randint(10))
        yield {"image": _write(label, rng), "label": label}


def _write(digit: int, rng: np.random.RandomState) -> Image.Image:
    ways = [strokes for number, strokes in WAYS if number == digit]
    strokes = ways[rng.randint(len(ways))]
    canvas = Image.new("L", (SIZE * SCALE, SIZE * SCALE))
    pen, thickness = ImageDraw.Draw(canvas), int(rng.randint(6, 15))
    width, height, angle, slant = rng.uniform([9, 13, -0.25, -0.3], [16, 20, 0.25, 0.3])
    cos, sin = math.cos(angle), math.sin(angle)
    turn = np.array([[cos, -sin], [sin, cos]]) @ np.array([[width, slant * height], [0, height]])
    middle = SIZE / 2 + rng.uniform(-2, 2, size=2)
    for stroke in strokes:
        points = np.array(stroke) - 0.5 + rng.normal(0, 0.015, size=(len(stroke), 2)) + rng.normal(0, 0.02, size=2)
        path = [tuple(point) for point in (points @ turn.T + middle) * SCALE]
        pen.line(path, fill=255, width=thickness, joint="curve")
        for x, y in (path[0], path[-1]):  # round ends
            pen.ellipse((x - thickness / 2, y - thickness / 2, x + thickness / 2, y + thickness / 2), fill=255)
    ink = np.asarray(canvas.reduce(SCALE), dtype=np.float32) * rng.uniform(0.6, 1.0)
    noisy = ink + rng.normal(0, 1, size=ink.shape) * rng.uniform(0, 25)
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8))

"""Generator of coloured shapes for the demo recipe of image classification: drawn by code, without files or network.

Use: ``task.dataset=hftune.data.demo_shapes:shapes``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

NUM_SHAPES = {"train": 1000, "eval": 200}
NAMES = ("circle", "cross", "ring", "square", "star", "triangle")
SCALE = 2
"""Shapes are drawn this many times larger and then averaged, for smooth edges."""


def shapes(split: str, count: int | None = None, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield images of shapes: ``image``, RGB, with sides of 40 to 64 pixels, and ``label``, the name of the shape.

    Size, position, rotation, colours and noise are random. Each split has its own random stream.

    Args:
        split: "train" or "eval".
        count: number of rows; by default that of NUM_SHAPES.
    """
    rng = np.random.RandomState([seed, list(NUM_SHAPES).index(split)])
    for _ in range(NUM_SHAPES[split] if count is None else count):
        name = NAMES[rng.randint(len(NAMES))]
        yield {"image": _draw(name, rng), "label": name}


def _draw(name: str, rng: np.random.RandomState) -> Image.Image:
    width, height = (int(value) for value in rng.randint(40, 65, size=2))
    ground, colour = rng.randint(0, 90, size=3), rng.randint(130, 256, size=3)
    canvas = Image.new("RGB", (width * SCALE, height * SCALE), tuple(ground.tolist()))
    radius = rng.uniform(0.28, 0.42) * min(canvas.size)
    x, y = (rng.uniform(radius, side - radius) for side in canvas.size)
    turn, pen, ink = rng.uniform(0, 2 * math.pi), ImageDraw.Draw(canvas), tuple(colour.tolist())
    if name in ("circle", "ring"):
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=ink)
        if name == "ring":
            inner = 0.55 * radius
            pen.ellipse((x - inner, y - inner, x + inner, y + inner), fill=tuple(ground.tolist()))
    else:
        pen.polygon([(x + radius * a, y + radius * b) for a, b in _corners(name, turn)], fill=ink)
    pixels = np.asarray(canvas.reduce(SCALE), dtype=np.float32)
    noisy = pixels + rng.normal(0, 1, size=pixels.shape) * rng.uniform(0, 12)
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8))


def _corners(name: str, turn: float) -> list[tuple[float, float]]:
    """Return the corners of a polygon on and within the unit circle."""
    if name == "cross":  # twelve corners, the inner four nearer to the middle
        angle, inner = 0.32, 0.32 * math.sqrt(2)
        polar = [
            corner
            for arm in range(4)
            for corner in (
                (arm * math.pi / 2 - angle, 1.0),
                (arm * math.pi / 2 + angle, 1.0),
                (arm * math.pi / 2 + math.pi / 4, inner),
            )
        ]
    else:
        points = {"square": 4, "triangle": 3, "star": 10}[name]
        polar = [(2 * math.pi * point / points, 0.42 if name == "star" and point % 2 else 1.0) for point in range(points)]
    return [(radius * math.cos(turn + angle), radius * math.sin(turn + angle)) for angle, radius in polar]

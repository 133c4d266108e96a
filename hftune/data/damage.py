"""Random damage for image restoration: strokes, rectangles and scribbles over an image. Independent of data sets and tasks."""

from __future__ import annotations

import math

import numpy as np
from PIL import Image, ImageDraw


def draw_mask(height: int, width: int, rng: np.random.RandomState) -> np.ndarray:
    """Return a mask (H, W) bool of damaged pixels: 2 to 20 percent of the image (8 on average), never 0.

    Has one or two kinds of damage, sized relative to the image's shorter side. All randomness comes from ``rng``.
    """
    canvas = Image.new("L", (width, height))
    pen, side = ImageDraw.Draw(canvas), min(height, width)
    available = (_strokes, _rectangles, _scribbles)
    kinds = [available[index] for index in rng.permutation(len(available))[: rng.randint(1, 3)]]
    area = height / side * (width / side)  # in squares of the shorter side, so that long images get more damage
    for kind in kinds:
        for _ in range(max(1, round(area * rng.randint(3, 8) / len(kinds)))):
            kind(pen, width, height, side, rng)
    return np.asarray(canvas) > 0


def _strokes(pen: ImageDraw.ImageDraw, width: int, height: int, side: int, rng: np.random.RandomState) -> None:
    """Draw a wandering brush stroke with round ends."""
    thickness = max(2, round(side * rng.uniform(0.03, 0.09)))
    angle, turn = rng.uniform(0, 2 * math.pi), rng.normal(0, 0.5)
    points = [(rng.uniform(0, width - 1), rng.uniform(0, height - 1))]
    for _ in range(rng.randint(2, 6)):
        x, y = points[-1]
        length = side * rng.uniform(0.1, 0.3)
        points.append((x + length * math.cos(angle), y + length * math.sin(angle)))
        angle += turn + rng.normal(0, 0.3)
    pen.line(points, fill=255, width=thickness, joint="curve")
    for x, y in (points[0], points[-1]):
        pen.ellipse((x - thickness / 2, y - thickness / 2, x + thickness / 2, y + thickness / 2), fill=255)


def _rectangles(pen: ImageDraw.ImageDraw, width: int, height: int, side: int, rng: np.random.RandomState) -> None:
    """Draw a filled rectangle."""
    right, down = np.maximum(2, side * rng.uniform(0.08, 0.22, size=2)).round()
    left, top = rng.uniform(0, width - right), rng.uniform(0, height - down)
    pen.rectangle((left, top, left + right - 1, top + down - 1), fill=255)


def _scribbles(pen: ImageDraw.ImageDraw, width: int, height: int, side: int, rng: np.random.RandomState) -> None:
    """Draw a line of small illegible letters, like a watermark or a date."""
    size = side * rng.uniform(0.06, 0.12)
    thickness = max(1, round(size * 0.25))
    x, y = rng.uniform(0, width / 2), rng.uniform(0, height - size)
    for _ in range(rng.randint(5, 12)):
        letter = rng.uniform(0, size, size=(rng.randint(3, 6), 2)) + np.array([x, y])
        pen.line([tuple(point) for point in letter], fill=255, width=thickness, joint="curve")
        x += size * 1.2

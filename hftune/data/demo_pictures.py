"""Generator of pictures for the demo recipe: sky, sun and hills drawn by code, without files or network.

Use: ``task.dataset=hftune.data.demo_pictures:pictures``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

NUM_PICTURES = {"train": 120, "eval": 24}


def pictures(split: str, count: int | None = None, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield pictures: ``image``, RGB, with sides of 40 to 56 pixels.

    Args:
        split: "train" or "eval"; each has its own random stream.
        count: number of rows; by default that of NUM_PICTURES.
    """
    rng = np.random.RandomState([seed, list(NUM_PICTURES).index(split)])
    for _ in range(NUM_PICTURES[split] if count is None else count):
        width, height = (4 * rng.randint(10, 15, size=2)).tolist()
        yield {"image": _paint(width, height, rng)}


def _paint(width: int, height: int, rng: np.random.RandomState) -> Image.Image:
    top, bottom = rng.uniform([60, 90, 130], [200, 220, 256]), rng.uniform([150, 120, 80], [256, 220, 200])
    share_H11 = np.linspace(0, 1, height)[:, None, None]
    sky = np.broadcast_to(top * (1 - share_H11) + bottom * share_H11, (height, width, 3))
    image = Image.fromarray(sky.astype(np.uint8))
    pen = ImageDraw.Draw(image)
    x, y, radius = rng.uniform(0, width), rng.uniform(0, height / 2), rng.uniform(3, 9)
    pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=(255, 240, int(rng.randint(120, 220))))
    across = np.arange(width + 1)
    for depth in range(rng.randint(1, 4)):  # hills, one in front of the other
        base = height * (0.5 + 0.15 * depth)
        waves = [rng.uniform(1, 5) * np.sin(across / rng.uniform(5, 14) + rng.uniform(0, 6)) for _ in range(2)]
        line = base + (waves[0] + waves[1])
        colour = tuple(int(value) for value in rng.uniform([20, 70, 20], [110, 170, 90]) * (1 - 0.15 * depth))
        pen.polygon([*zip(across.tolist(), line.tolist(), strict=True), (width, height), (0, height)], fill=colour)
    return image

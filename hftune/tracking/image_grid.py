"""Combines images of samples into one file. Independent of tasks and trackers.

Shape suffixes: H and W height and width, C channels (red, green, blue).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from hftune.atomic import atomic_path, explain_write_errors

GAP = 4
"""White pixels between two images."""


def grid(images: Sequence[np.ndarray]) -> np.ndarray:
    """Set images (H, W, C) uint8, of several sizes, one below the other, on white."""
    width = max(image_HWC.shape[1] for image_HWC in images)
    height = sum(image_HWC.shape[0] for image_HWC in images) + GAP * (len(images) - 1)
    canvas_HWC, top = np.full((height, width, 3), 255, np.uint8), 0
    for image_HWC in images:
        canvas_HWC[top : top + image_HWC.shape[0], : image_HWC.shape[1]] = image_HWC
        top += image_HWC.shape[0] + GAP
    return canvas_HWC


def write_image(path: Path, pixels_HWC: np.ndarray) -> None:
    """Write a PNG atomically, and create its folder if there is none.

    Raises:
        TrainingError: it cannot be written.
    """
    with explain_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(path) as temporary:
            Image.fromarray(pixels_HWC).save(temporary, format="PNG")

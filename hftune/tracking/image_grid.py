"""Combines images of samples into one file. Independent of tasks and trackers.

Shape suffixes: H and W height and width, C channels (red, green, blue).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from hftune.atomic import atomic_path
from hftune.checkpoints.atomic_files import explain_write_errors

GAP = 4
"""White pixels between two pictures."""


def grid(pictures: Sequence[np.ndarray]) -> np.ndarray:
    """Set pictures (H, W, C) uint8, of several sizes, one below the other, on white."""
    width = max(picture.shape[1] for picture in pictures)
    height = sum(picture.shape[0] for picture in pictures) + GAP * (len(pictures) - 1)
    canvas_HWC, top = np.full((height, width, 3), 255, np.uint8), 0
    for picture in pictures:
        canvas_HWC[top : top + picture.shape[0], : picture.shape[1]] = picture
        top += picture.shape[0] + GAP
    return canvas_HWC


def write_picture(path: Path, pixels_HWC: np.ndarray) -> None:
    """Write a PNG atomically, and create its folder if there is none.

    Raises:
        TrainingError: it cannot be written.
    """
    with explain_write_errors(path):
        path.parent.mkdir(exist_ok=True)
        with atomic_path(path) as temporary:
            Image.fromarray(pixels_HWC).save(temporary, format="PNG")

"""Random changes of training images, on arrays (H, W, C) uint8 and with Pillow. All random numbers come from the caller.

Independent of tasks. Shape suffixes: H and W height and width, C channels (1 grey, 3 red, green and blue).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.random import RandomState
from PIL import Image, ImageEnhance, ImageOps

ASPECTS = (3 / 4, 4 / 3)
"""Width by height of random crops. Source: Szegedy et al. 2014, https://arxiv.org/abs/1409.4842, section 6."""
ERASED_SHARES, ERASED_ASPECTS = (0.02, 1 / 3), (0.3, 3.3)
"""Share of the image and aspect of erased boxes. Source: Zhong et al. 2017, https://arxiv.org/abs/1708.04896."""
NUM_OPERATIONS = 2
"""Operations that ``rand_augment`` applies one after the other."""
ATTEMPTS = 10
"""Draws of a box until one lies within the image."""


def vary(
    pixels_HWC: np.ndarray,
    amounts: Mapping[str, Any],
    size: tuple[int, int],
    resample: int,
    fill: Sequence[int],
    rng: RandomState,
) -> np.ndarray:
    """Return an image changed in all ways that ``amounts`` asks for; see ``task.augmentation``.

    Args:
        size: height and width of the result, to which crops are scaled.
        resample: Pillow's filter that scales them.
        fill: colour of erased boxes.
    """
    if smallest := amounts.get("crop"):
        pixels_HWC = cut(pixels_HWC, crop_box(pixels_HWC.shape[:2], smallest, rng), size, resample)
    if (share := amounts.get("flip")) and rng.rand() < share:
        pixels_HWC = pixels_HWC[:, ::-1]
    if magnitude := amounts.get("rand_augment"):
        pixels_HWC = rand_augment(pixels_HWC, magnitude, rng)
    if strength := amounts.get("color"):
        pixels_HWC = jitter(pixels_HWC, strength, rng)
    if amounts.get("shift") or amounts.get("rotate"):
        angle, right, down = rng.uniform(-1, 1, size=3).tolist()
        rotate, shift = amounts.get("rotate", 0), amounts.get("shift", 0)
        pixels_HWC = move(pixels_HWC, angle * rotate, right * shift, down * shift)
    if (share := amounts.get("erase")) and rng.rand() < share:
        pixels_HWC = erase(pixels_HWC, fill, rng)
    return pixels_HWC


def move(pixels_HWC: np.ndarray, angle: float, right: float, down: float) -> np.ndarray:
    """Rotate an image about its centre (degrees, counter-clockwise), then shift it (pixels). Uncovered pixels are black.

    Bilinear, by Pillow: about 20 microseconds for 28 x 28 pixels.
    """
    height, width = pixels_HWC.shape[:2]
    cos, sin = math.cos(math.radians(angle)), math.sin(math.radians(angle))
    x, y = width / 2, height / 2
    # Pillow wants the inverse transform, from the result to the source: shift back, then rotate back.
    back = (cos, -sin, x - cos * (x + right) + sin * (y + down), sin, cos, y - sin * (x + right) - cos * (y + down))
    return to_array(to_image(pixels_HWC).transform((width, height), Image.Transform.AFFINE, back, Image.Resampling.BILINEAR))


def crop_box(size: Sequence[int], smallest: float, rng: RandomState) -> tuple[int, int, int, int]:
    """Draw top, left, height and width of a box in an image of a size (height, width): at least the share ``smallest``."""
    height, width = size
    box_height, box_width = min(height, round(width / ASPECTS[0])), min(width, round(height * ASPECTS[1]))
    middle = (height - box_height) // 2, (width - box_width) // 2, box_height, box_width
    return _draw_box(height, width, (smallest, 1.0), ASPECTS, rng) or middle


def cut(pixels_HWC: np.ndarray, box: tuple[int, int, int, int], size: tuple[int, int], resample: int) -> np.ndarray:
    """Cut out a box (top, left, height, width), and scale it to ``size``, height and width."""
    top, left, height, width = box
    corners = (left, top, left + width, top + height)
    return to_array(to_image(pixels_HWC).resize(size[::-1], Image.Resampling(resample), corners))


def _draw_box(
    height: int, width: int, shares: tuple[float, float], aspects: tuple[float, float], rng: RandomState
) -> tuple[int, int, int, int] | None:
    """Draw top, left, height and width of a box, by its share of the area and its aspect; None if no draw lies within."""
    for _ in range(ATTEMPTS):
        area = height * width * rng.uniform(*shares)
        aspect = math.exp(rng.uniform(math.log(aspects[0]), math.log(aspects[1])))
        box_height, box_width = round(math.sqrt(area / aspect)), round(math.sqrt(area * aspect))
        if 0 < box_height <= height and 0 < box_width <= width:
            return rng.randint(height - box_height + 1), rng.randint(width - box_width + 1), box_height, box_width
    return None


def jitter(pixels_HWC: np.ndarray, strength: float, rng: RandomState) -> np.ndarray:
    """Multiply brightness, contrast and saturation, in this order, by random factors from 1 - strength to 1 + strength."""
    image = to_image(pixels_HWC)
    for enhance in (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color):
        image = enhance(image).enhance(rng.uniform(1 - strength, 1 + strength))
    return to_array(image)


def erase(pixels_HWC: np.ndarray, fill: Sequence[int], rng: RandomState) -> np.ndarray:
    """Paint a random box, at most a third of the image."""
    box = _draw_box(pixels_HWC.shape[0], pixels_HWC.shape[1], ERASED_SHARES, ERASED_ASPECTS, rng)
    if box is None:
        return pixels_HWC
    top, left, height, width = box
    erased_HWC = pixels_HWC.copy()
    erased_HWC[top : top + height, left : left + width] = fill
    return erased_HWC


def _affine(image: Image.Image, *coefficients: float) -> Image.Image:
    """Transform an image; uncovered pixels are grey. As Pillow wants them, coefficients lead from result to source."""
    return image.transform(image.size, Image.Transform.AFFINE, coefficients, Image.Resampling.BILINEAR, fillcolor=_grey(image))


def _grey(image: Image.Image) -> Any:
    return 128 if image.mode == "L" else (128, 128, 128)


Operation = Callable[[Image.Image, float], Image.Image]
OPERATIONS: tuple[Operation, ...] = (
    lambda image, strength: image,
    lambda image, strength: ImageOps.autocontrast(image),
    lambda image, strength: ImageOps.equalize(image),
    lambda image, strength: ImageOps.solarize(image, round(256 * (1 - abs(strength)))),
    lambda image, strength: ImageOps.posterize(image, 8 - round(4 * abs(strength))),
    lambda image, strength: ImageEnhance.Color(image).enhance(1 + 0.9 * strength),
    lambda image, strength: ImageEnhance.Contrast(image).enhance(1 + 0.9 * strength),
    lambda image, strength: ImageEnhance.Brightness(image).enhance(1 + 0.9 * strength),
    lambda image, strength: ImageEnhance.Sharpness(image).enhance(1 + 0.9 * strength),
    lambda image, strength: image.rotate(30 * strength, Image.Resampling.BILINEAR, fillcolor=_grey(image)),
    lambda image, strength: _affine(image, 1, 0.3 * strength, 0, 0, 1, 0),
    lambda image, strength: _affine(image, 1, 0, 0, 0.3 * strength, 1, 0),
    lambda image, strength: _affine(image, 1, 0, 0.33 * strength * image.width, 0, 1, 0),
    lambda image, strength: _affine(image, 1, 0, 0, 0, 1, 0.33 * strength * image.height),
)
"""RandAugment's, each with a strength in [-1, 1]: colours, rotation, shears and shifts.
Source: Cubuk et al. 2019, https://arxiv.org/abs/1909.13719, with AutoAugment's ranges, https://arxiv.org/abs/1805.09501."""


def rand_augment(pixels_HWC: np.ndarray, magnitude: float, rng: RandomState) -> np.ndarray:
    """Apply two random operations, with a magnitude in [0, 10] and a random sign."""
    image = to_image(pixels_HWC)
    for _ in range(NUM_OPERATIONS):
        operation, sign = OPERATIONS[rng.randint(len(OPERATIONS))], 2 * rng.randint(2) - 1
        image = operation(image, sign * magnitude / 10)
    return to_array(image)


def mixup(pixels_HWC: np.ndarray, other_HWC: np.ndarray, share: float) -> np.ndarray:
    """Return share * image + (1 - share) * other, float32. Source: Zhang et al. 2017, https://arxiv.org/abs/1710.09412."""
    return np.float32(share) * pixels_HWC.astype(np.float32) + np.float32(1 - share) * other_HWC.astype(np.float32)


def cutmix(pixels_HWC: np.ndarray, other_HWC: np.ndarray, share: float, rng: RandomState) -> tuple[np.ndarray, float]:
    """Replace a box of about 1 - share of an image by that of another one. Return it and the share that was kept.

    The box has the image's aspect and a random centre; what lies outside is cut off.
    Source: Yun et al. 2019, https://arxiv.org/abs/1905.04899.
    """
    height, width = pixels_HWC.shape[:2]
    side = math.sqrt(1 - share)
    y, x, half_height, half_width = rng.randint(height), rng.randint(width), int(height * side) // 2, int(width * side) // 2
    rows = slice(max(0, y - half_height), min(height, y + half_height))
    columns = slice(max(0, x - half_width), min(width, x + half_width))
    mixed_HWC = pixels_HWC.copy()
    mixed_HWC[rows, columns] = other_HWC[rows, columns]
    replaced = (rows.stop - rows.start) * (columns.stop - columns.start)
    return mixed_HWC, 1 - replaced / (height * width)


def to_image(pixels_HWC: np.ndarray) -> Image.Image:
    """Return an array as a Pillow image, grey or RGB."""
    return Image.fromarray(pixels_HWC[..., 0] if pixels_HWC.shape[-1] == 1 else pixels_HWC)


def to_array(image: Image.Image) -> np.ndarray:
    """Return a grey or RGB image as (H, W, C) uint8."""
    pixels = np.asarray(image)
    return pixels if pixels.ndim == 3 else pixels[..., None]

"""Images with masks of class numbers: checked before training; masks, and images to be cropped, are decoded on access.

Shape suffixes: N images, H and W height and width, C channels (red, green, blue), K classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
from PIL import Image

from hftune.data.images import EncodedImages, Images, channels, checked, checked_rows, name_of, open_stored, upright_size
from hftune.data.restoration_images import check_sizes
from hftune.errors import DataError

IGNORED = -100
"""Label of pixels without a class: torch's ignore_index."""
MAX_NUMBER = 2**16 - 1
"""Largest number that a mask can hold."""


@dataclass(frozen=True)
class MaskNumbers:
    """What the numbers in masks mean."""

    ignore_index: int | None
    """Number of pixels without a class; None: there is none."""
    reduce_labels: bool
    """Whether 0 has no class, and the first class is 1."""

    def number_of(self, label: int) -> int:
        return label + self.reduce_labels

    def labels(self, numbers: np.ndarray) -> np.ndarray:
        """Return class numbers from 0 on, int32, and IGNORED, of the same shape."""
        labels = numbers.astype(np.int32) - self.reduce_labels
        labels[labels < 0] = IGNORED
        if self.ignore_index is not None:
            labels[numbers == self.ignore_index] = IGNORED
        return labels


@dataclass
class SegmentedImages(EncodedImages):
    """A data set of images with masks. A sample has an image (H, W, C) uint8 and a mask (H, W) int32 of labels.

    Masks have the size of the image's file; images that of the model, unless they are to be cropped.
    """

    numbers: MaskNumbers
    ends_N: np.ndarray
    """Where the numbers in each mask end in ``found``."""
    found: np.ndarray
    """Different numbers in all masks, one mask after the other."""
    pixels: np.ndarray
    """How many pixels of the mask have each, int64."""
    decoded: Images | None = None
    """The images as the model is given them. None: they are decoded on access, whole."""
    scales_masks: bool = False
    """Whether masks get the size of these images, too, for training."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        row, name = self.rows[index], name_of(self.rows, index, self.split)
        mask_HW = self.numbers.labels(read_mask(*open_stored(row["mask"], name)))
        if self.decoded is None:
            image, image_name = open_stored(row["image"], name)
            return {"image": channels(checked(image, image_name), image_name, 3), "mask": mask_HW}
        image_HWC = self.decoded[index]["image"]
        if self.scales_masks:
            mask_HW = cut_mask(mask_HW, (0, 0, *mask_HW.shape), image_HWC.shape[:2])
        return {"image": image_HWC, "mask": mask_HW}

    @property
    def labels(self) -> np.ndarray:
        """The label of each of ``found``."""
        return self.numbers.labels(self.found)

    def images_with(self, num_classes: int) -> list[int]:
        """Return how many images show each class."""
        labels = self.labels
        return np.bincount(labels[labels != IGNORED], minlength=num_classes).tolist()

    @property
    def ignored_share(self) -> float:
        """Share of all pixels without a class."""
        return float(self.pixels[self.labels == IGNORED].sum() / self.pixels.sum())


def checked_masks(rows: datasets.Dataset, split: str, numbers: MaskNumbers) -> SegmentedImages:
    """Check the size of every image, and every mask, before training begins; only once while the files stay as they are.

    Args:
        rows: encoded images: the columns image and mask.

    Raises:
        DataError: one of them cannot be used.
    """

    def check(index: int) -> tuple[np.ndarray, np.ndarray]:
        row, name = rows[index], name_of(rows, index, split)
        if row["mask"] is None:
            raise DataError(f"{name} has no mask. Remove such rows.")
        image, image_name = open_stored(row["image"], name, decode=False)
        with image:
            has_transparency = image.has_transparency_data
            checked(open_stored(row["image"], name)[0] if has_transparency else image, image_name)
        mask, mask_name = open_stored(row["mask"], name, decode=False)
        with mask:
            if mask.format == "JPEG":
                raise DataError(f"{mask_name} is a mask in JPEG, which changes class numbers. Save masks as PNG.")
        sizes = {kind: upright_size(stored, name) for kind, stored in row.items()}
        check_sizes(sizes, {"image": image_name})
        counts = np.bincount(read_mask(*open_stored(row["mask"], name)).reshape(-1))
        return counts.nonzero()[0], counts[counts > 0]

    def arrays(counted: list[tuple[np.ndarray, np.ndarray]]) -> dict[str, np.ndarray]:
        found, pixels = zip(*counted, strict=True)
        ends_N = np.cumsum([len(one) for one in found])
        return {"ends": ends_N, "found": np.concatenate(found), "pixels": np.concatenate(pixels)}

    made = checked_rows(rows, check, arrays, "masks checked")
    return SegmentedImages(rows, split, numbers, made["ends"], made["found"], made["pixels"])


def check_labels(images: SegmentedImages, names: Sequence[str], row_of: Callable[[int], Any]) -> None:
    """Check that masks hold nothing but the numbers of classes, and each a pixel that has one.

    Args:
        row_of: translates an index of ``images`` to the row in the data, for messages.

    Raises:
        DataError: one does not; the message names the first one.
    """
    labels, numbers = images.labels, images.numbers
    if (wrong := (labels >= len(names)).nonzero()[0]).size:
        row, number = int(np.searchsorted(images.ends_N, wrong[0], side="right")), int(images.found[wrong[0]])
        first, last = numbers.number_of(0), numbers.number_of(len(names) - 1)
        ignored = "" if numbers.ignore_index is None else f", and {numbers.ignore_index} for no class (task.ignore_index)"
        raise DataError(
            f"The mask of row {row_of(row)} of the {images.split} split has {int(images.pixels[wrong[0]]):,} pixels of class "
            f"{number}; there are {len(names)} classes, {first} to {last} ({', '.join(names[:10])}){ignored}. Correct the "
            "mask, or task.label_names."
        )
    starts_N = np.concatenate([[0], images.ends_N[:-1]])
    classes_N = np.add.reduceat((labels != IGNORED).astype(np.int64), starts_N)
    if (empty := (classes_N == 0).nonzero()[0]).size:
        more = f" (and {empty.size - 1} more)" if empty.size > 1 else ""
        raise DataError(
            f"The mask of row {row_of(int(empty[0]))} of the {images.split} split{more} has no pixel with a class: all are "
            "ignored. Leave such images out."
        )


def read_mask(image: Image.Image, name: str) -> np.ndarray:
    """Return the class numbers in a mask, (H, W): grey values, or the places of colours in a palette.

    Raises:
        DataError: it has neither.
    """
    if image.mode not in ("1", "L", "P") and not image.mode.startswith("I"):
        numbers_HWC = np.asarray(image.convert("RGB"))
        if image.mode == "F" or (numbers_HWC != numbers_HWC[..., :1]).any():
            raise DataError(
                f"{name} is a mask in colours (Pillow mode {image.mode}), and it is unclear which class each stands for. Save "
                "masks as grey class numbers, or with a palette whose places are the class numbers."
            )
        return numbers_HWC[..., 0]
    numbers_HW = np.asarray(image)
    if image.mode.startswith("I") and not 0 <= numbers_HW.min() <= numbers_HW.max() <= MAX_NUMBER:
        raise DataError(f"{name} is a mask with numbers outside of 0 to {MAX_NUMBER}.")
    return numbers_HW.astype(np.uint8) if image.mode == "1" else numbers_HW


def cut_mask(mask_HW: np.ndarray, box: tuple[int, int, int, int], size: tuple[int, int]) -> np.ndarray:
    """Return a box (top, left, height, width) of a mask, scaled to a size (height, width): of each pixel, the nearest one."""
    top, left, height, width = box
    if size == (height, width):
        return mask_HW[top : top + height, left : left + width]
    rows = top + ((np.arange(size[0]) + 0.5) * height / size[0]).astype(int)
    columns = left + ((np.arange(size[1]) + 0.5) * width / size[1]).astype(int)
    return mask_HW[rows[:, None], columns]


def to_image(labels_HW: np.ndarray, numbers: MaskNumbers) -> Image.Image:
    """Return labels as a mask: their numbers, with a palette of colours, or in 16 bits if there are more than 256."""
    numbers_HW = labels_HW + numbers.reduce_labels
    if numbers_HW.max() > 255:
        return Image.fromarray(numbers_HW.astype(np.uint16))
    image = Image.fromarray(numbers_HW.astype(np.uint8))
    image.putpalette(COLOURS_N3.tobytes())
    return image


def painted(labels_HW: np.ndarray, numbers: MaskNumbers) -> np.ndarray:
    """Return labels in colours, (H, W, 3) uint8; pixels without a class are white."""
    colours_HW3 = COLOURS_N3[(labels_HW + numbers.reduce_labels) % 256]
    colours_HW3[labels_HW == IGNORED] = 255
    return colours_HW3


def _colours() -> np.ndarray:
    """Return PASCAL VOC's colours of 256 classes, (256, 3) uint8: the bits of the number, dealt to red, green and blue."""
    numbers_N = np.arange(256)
    colours_N3 = np.zeros((256, 3), np.uint8)
    for place in range(8):
        for colour in range(3):
            colours_N3[:, colour] |= ((numbers_N >> (3 * place + colour) & 1) << (7 - place)).astype(np.uint8)
    return colours_N3


COLOURS_N3 = _colours()

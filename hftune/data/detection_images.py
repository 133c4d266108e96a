"""Images with boxes around objects: read from columns or COCO's json, checked before training. Independent of tasks.

Shape suffixes: N images, M boxes of all images, H and W height and width, C channels (red, green, blue).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from hftune.data.columns import BOXES, CATEGORIES
from hftune.data.images import EncodedImages, Form, channels, checked, checked_rows, name_of, open_stored, upright_size
from hftune.data.labels import names_of
from hftune.errors import DataError

TOLERANCE = 1.0
"""Pixels by which a box may reach beyond its image, as rounded ones do; it is cut."""


@dataclass
class Objects:
    """The boxes of a split, one image after the other."""

    boxes_M4: np.ndarray
    """Left, top, right and bottom in pixels, float64."""
    labels: Sequence[Any]
    """Names or numbers of the categories, as the data have them."""
    crowd_M: np.ndarray
    """Whether a box is around a crowd, which is neither trained on nor scored."""
    image_M: np.ndarray
    """Index of the image of each box, ascending."""


@dataclass
class AnnotatedImages(EncodedImages):
    """A data set of images with boxes.

    A sample has an image (H, W, C) uint8; boxes (B, 4) float32: left, top, right and bottom, in [0, 1]; labels (B,), class
    numbers; crowd (B,) bool; and size, height and width of the image's file.
    """

    sizes_N2: np.ndarray
    boxes_M4: np.ndarray
    labels_M: np.ndarray
    crowd_M: np.ndarray
    ends_N: np.ndarray
    """Where the boxes of each image end."""
    form: Form | None = None
    """Form of the images that the model is given. None: images are whole."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        index = range(len(self))[index]
        image, name = open_stored(self.rows[index]["image"], name_of(self.rows, index, self.split))
        own, size = slice(self.ends_N[index - 1] if index else 0, self.ends_N[index]), self.sizes_N2[index]
        return {
            "image": channels(checked(image, name), name, 3) if self.form is None else self.form.pixels(image, name),
            "boxes": (self.boxes_M4[own] / np.tile(size[::-1], 2)).astype(np.float32),
            "labels": self.labels_M[own],
            "crowd": self.crowd_M[own],
            "size": tuple(size.tolist()),
        }

    def contents(self) -> dict[str, Any]:
        return {**super().contents(), "boxes": self.boxes_M4, "labels": self.labels_M}

    @property
    def num_boxes(self) -> int:
        """Number of boxes but for crowds."""
        return int((~self.crowd_M).sum())


def read_objects(rows: datasets.Dataset, column: str, split: str, box_format: str) -> Objects:
    """Read a column of objects: of each row, lists of boxes and of categories, and perhaps of crowds.

    Raises:
        DataError: a row has none, or not as many categories as boxes, or a box is not four numbers.
    """
    feature = rows.features[column]
    inner = getattr(feature, "feature", feature)
    box_name, category_name = (next((name for name in names if name in inner), None) for names in (BOXES, CATEGORIES))
    crowd_name = next((name for name in ("iscrowd", "is_crowd") if name in inner), None)
    if category_name is None:
        raise DataError(f"Column {column!r} of the {split} split has {', '.join(inner)}, but none of {', '.join(CATEGORIES)}.")
    kind = inner[category_name]
    names = names_of(getattr(kind, "feature", None) or kind)
    boxes, labels, crowds, images = [], [], [], []
    for index, objects in enumerate(rows[column][:]):
        name = name_of(rows, index, split)
        if objects is None:
            raise DataError(f"{name} has nothing in column {column!r}. An empty list of boxes means that there is no object.")
        if isinstance(objects, list):
            objects = {key: [one[key] for one in objects] for key in inner}
        own, categories = objects[box_name] or [], objects[category_name] or []
        if len(own) != len(categories):
            raise DataError(f"{name} has {len(own)} boxes and {len(categories)} categories in column {column!r}.")
        for box, category in zip(own, categories, strict=True):
            if len(box) != 4 or not np.isfinite(box).all():
                raise DataError(f"{name} has a box that is not four numbers: {box}.")
            if category is None:
                raise DataError(f"{name} has a box without a category in column {column!r}.")
            labels.append(names[category] if names and isinstance(category, int) and 0 <= category < len(names) else category)
        boxes += own
        crowds += (objects[crowd_name] or []) if crowd_name is not None else [False] * len(own)
        images += [index] * len(own)
    boxes_M4 = np.array(boxes, np.float64).reshape(-1, 4)
    if box_format == "xywh":
        boxes_M4[:, 2:] += boxes_M4[:, :2]
    return Objects(boxes_M4, labels, np.array(crowds, bool), np.array(images, np.int64))


def checked_boxes(
    rows: datasets.Dataset, split: str, objects: Objects, labels: Sequence[int], cuts: bool, row_of: Callable[[int], Any]
) -> AnnotatedImages:
    """Check each image and each box before training begins; the images only once while the files stay as they are.

    Args:
        labels: the class number of each box.
        cuts: whether boxes are cut to their image and left out if nothing remains, instead of refused.
        row_of: translates an index of the rows to the row in the data, for messages.

    Raises:
        DataError: an image cannot be used, or a box has no area or reaches beyond its image.
    """

    def check(index: int) -> tuple[int, int]:
        stored, name = rows[index]["image"], name_of(rows, index, split)
        image, image_name = open_stored(stored, name, decode=False)
        with image:
            checked(open_stored(stored, name)[0] if image.has_transparency_data else image, image_name)
        return upright_size(stored, name)

    sizes_N2 = checked_rows(rows, check, lambda sizes: {"sizes": np.array(sizes, np.int32)}, "image sizes")["sizes"]
    limits_M4 = np.tile(sizes_N2[objects.image_M][:, ::-1], 2).reshape(-1, 4)
    cut_M4 = np.clip(objects.boxes_M4, 0, limits_M4)
    beyond_M = np.abs(cut_M4 - objects.boxes_M4).max(1, initial=0) > TOLERANCE
    empty_M = ((objects.boxes_M4 if not cuts else cut_M4)[:, 2:] <= cut_M4[:, :2]).any(1)
    for bad_M, what in ((empty_M, "has no area"), (beyond_M, "reaches beyond the image")):
        if not cuts and bad_M.any():
            place, more = int(bad_M.argmax()), int(bad_M.sum()) - 1
            left, top, right, bottom = (f"{value:g}" for value in objects.boxes_M4[place])
            image = int(objects.image_M[place])
            height, width = sizes_N2[image].tolist()
            raise DataError(
                f"Row {row_of(image)} of the {split} split: the box from ({left}, {top}) to ({right}, {bottom}) {what}, which "
                f"is {width} x {height} pixels{f' (and {more} more)' if more else ''}. Correct it; check task.box_format; or "
                "set task.bad_boxes=cut, which cuts boxes to their image and leaves out those without an area."
            )
    kept_M = ~empty_M
    ends_N = np.searchsorted(objects.image_M[kept_M], np.arange(len(rows)), side="right")
    own = (cut_M4[kept_M], np.array(labels, np.int64)[kept_M], objects.crowd_M[kept_M])
    return AnnotatedImages(rows, split, sizes_N2, *own, ends_N)


def load_coco(folder: Path, split: str, source: str) -> datasets.Dataset:
    """Read the images of a split and their boxes from COCO's json: the only one in FOLDER/SPLIT, as exports of annotation tools
    have it, or FOLDER/annotations/instances_SPLIT.json, as COCO has it.

    Raises:
        DataError: beginning with ``source``, there is no such file, or it is not complete.
    """
    beside, central = sorted((folder / split).glob("*.json")), folder / "annotations" / f"instances_{split}.json"
    path = beside[0] if len(beside) == 1 else central
    if not path.is_file():
        raise DataError(f"{source}: there is neither one json file in {folder / split} nor a file {central}.")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        names = {one["id"]: one["name"] for one in found["categories"]}
        objects = {one["id"]: {"bbox": [], "category": [], "iscrowd": []} for one in found["images"]}
        for one in found["annotations"]:
            own = objects[one["image_id"]]
            own["bbox"].append([float(value) for value in one["bbox"]])
            own["category"].append(names.get(one["category_id"]))
            own["iscrowd"].append(bool(one.get("iscrowd", 0)))
        paths = [str(folder / split / one["file_name"]) for one in found["images"]]
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path} is not in COCO's layout (images, annotations, categories): {error!r}.") from error
    if unknown := [one for one in found["annotations"] if one["category_id"] not in names]:
        raise DataError(f"{path}: annotation {unknown[0].get('id')} has the unknown category {unknown[0]['category_id']}.")
    used = [names[number] for number in sorted({one["category_id"] for one in found["annotations"]})]
    kinds = {
        "bbox": datasets.List(datasets.List(datasets.Value("float64"))),
        "category": datasets.List(datasets.ClassLabel(names=used)),
        "iscrowd": datasets.List(datasets.Value("bool")),
    }
    features = datasets.Features({"image": datasets.Image(decode=False), "objects": kinds})
    columns = {"image": [{"path": path, "bytes": None} for path in paths], "objects": [*objects.values()]}
    return datasets.Dataset.from_dict(columns, features)


def cut_boxes(sample: Mapping[str, Any], box: Sequence[int], size: Sequence[int]) -> dict[str, Any]:
    """Return boxes, labels and crowds of what a box (top, left, height, width) of an image of a size (height, width) shows.

    Objects remain whose centre it shows, as in SSD. Source: Liu et al. 2015, https://arxiv.org/abs/1512.02325, section 2.2.
    """
    top, left, height, width = box
    corner, extent = np.array([left, top], np.float32), np.array([width, height], np.float32)
    points_B22 = (sample["boxes"].reshape(-1, 2, 2) * np.array(size[::-1], np.float32) - corner) / extent
    centre_B2 = points_B22.mean(1)
    is_shown = ((centre_B2 > 0) & (centre_B2 < 1)).all(1)
    boxes_B4 = points_B22.clip(0, 1).reshape(-1, 4)[is_shown]
    return {"boxes": boxes_B4, "labels": sample["labels"][is_shown], "crowd": sample["crowd"][is_shown]}

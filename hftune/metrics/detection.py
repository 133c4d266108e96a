"""Metrics of boxes, computed by pycocotools over a whole split. Independent of tasks."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def detection_metrics(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """Return COCO's metrics.

    Args:
        rows: one an image: ``boxes``, the true ones, each [x, y, width, height, class number, whether it is a crowd], and
            ``found``, each [x, y, width, height, class number, score]; in pixels of the image.
        names: of all classes.

    Returns:
        map, average precision over recall, classes and IoUs from 0.5 to 0.95; map_50 and map_75, of one IoU; mar_100, average
        recall with 100 boxes an image: in [0, 1], None without true boxes; and per_class, by its name, ap (None without true
        boxes) and support. Crowds count neither as found nor as missed.
        Source: Lin et al. 2014, https://arxiv.org/abs/1405.0312, and https://cocodataset.org/#detection-eval.
    """
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    def indexed(annotations: Sequence[dict[str, Any]]) -> COCO:
        found = COCO()
        found.dataset = {
            "images": [{"id": image} for image in range(len(rows))],
            "annotations": [{**one, "id": number} for number, one in enumerate(annotations, 1)],  # it takes 0 for none
            "categories": [{"id": number} for number in range(len(names))],
        }
        found.createIndex()
        return found

    def boxes(name: str) -> list[dict[str, Any]]:
        return [
            {"image_id": image, "bbox": box, "area": box[2] * box[3], "category_id": label, "iscrowd": 0, "last": last}
            for image, row in enumerate(rows)
            for *box, label, last in row[name]
        ]

    true = [{**one, "iscrowd": int(one["last"])} for one in boxes("boxes")]
    with contextlib.redirect_stdout(io.StringIO()):  # it prints what it does
        evaluation = COCOeval(indexed(true), indexed([{**one, "score": one["last"]} for one in boxes("found")]), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
    precision_TRK = evaluation.eval["precision"][:, :, :, 0, -1]  # of all sizes, with 100 boxes an image
    support = np.bincount([one["category_id"] for one in true if not one["iscrowd"]], minlength=len(names))
    return {
        "map": _mean(precision_TRK),
        "map_50": _mean(precision_TRK[0]),
        "map_75": _mean(precision_TRK[5]),
        "mar_100": _mean(evaluation.eval["recall"][:, :, 0, -1]),
        "per_class": {
            name: {"ap": _mean(precision_TRK[:, :, number]), "support": int(support[number])}
            for number, name in enumerate(names)
        },
    }


def _mean(values: np.ndarray) -> float | None:
    """Return the mean of values that are defined; pycocotools has -1 for those that are not."""
    defined = values[values > -1]
    return float(defined.mean()) if defined.size else None

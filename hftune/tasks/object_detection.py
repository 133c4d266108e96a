"""Object detection: boxes and classes of the objects in images, by the DETR family of transformers.

torch, datasets and Pillow are imported inside the methods, so that mistyped recipes are refused without waiting for them.
Shape suffixes: N samples, B boxes of a sample, H and W height and width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

from hftune.config.keys import key
from hftune.data.columns import IMAGES, Role
from hftune.errors import ConfigError, DataError
from hftune.metrics.records import directions
from hftune.tasks.late_rows import late_rows
from hftune.tasks.pretrained_images import PretrainedImageTask

if TYPE_CHECKING:
    import numpy as np
    from datasets import Dataset
    from torch import Tensor, nn
    from transformers import PreTrainedConfig

    from hftune.data.detection_images import AnnotatedImages, Objects
    from hftune.data.labels import Classes
    from hftune.task import Batch

MOST = 100
"""Boxes of an image that are scored, as COCO does."""
COLOURS = ("#e6194b", "#3cb44b", "#4363d8", "#f58231", "#911eb4", "#008080", "#9a6324", "#808000", "#000075", "#f032e6")
"""Of the boxes in sample images, by class number."""


@dataclass
class ObjectDetection(PretrainedImageTask):
    """Find objects in images. The loss is that of transformers, of each image alone; an item is a box.

    An image without boxes counts as one item.
    """

    dataset: str | None = key("coco", changes="data")
    """coco with data_dir: images with COCO's json; or a data set name on the Hub (owner/name); imagefolder, whose metadata have
    the boxes; parquet or arrow with data_files; or module:function that returns rows."""
    data_dir: str | None = key(None, changes="data")
    """Folder of coco or imagefolder, with a subfolder of images for each split. The json is the only one in that subfolder, or
    annotations/instances_SPLIT.json."""
    image_column: str | None = None
    """Column of the images. null: the only one that it could be."""
    objects_column: str | None = None
    """Column of the objects: of each image, lists of boxes (bbox) and of their classes (category). null: the only one that it
    could be."""
    label_names: list[str] | None = None
    """Class names in the order of the class numbers: the names that the data set uses, in any order, or a new name for each of
    its classes, in the data set's order. null: the data set's names, or else the distinct categories of the training split."""
    box_format: str = key("xywh", choices=("xywh", "xyxy"), changes="data")
    """What four numbers of a box mean, in pixels: left, top, width and height, as in COCO; or left, top, right and bottom."""
    bad_boxes: str = key("refuse", choices=("refuse", "cut"), changes="data")
    """What to do about boxes that have no area or reach beyond their image by more than a pixel: refuse them, or cut boxes to
    their image and leave out those without an area."""
    threshold: float = key(0.5, ge=0, lt=1, changes="output")
    """Score from which a box is listed in predictions and shown in sample images. Metrics count all boxes, by their scores."""

    boxes_per_image: float | None = key(None, gt=0, changes="forward backward")
    """For DETR and YOLOS, whose loss of classes is over all queries: boxes of an average image, by which it is divided. null:
    the mean of the training images."""

    auto_class, does = "AutoModelForObjectDetection", "detect objects"
    needs_whole = "always"  # sharded, RT-DETR's forward pass fails
    examples, example_type = "PekingU/rtdetr_r18vd or microsoft/conditional-detr-resnet-50", "rt_detr"
    shows_all = True
    columns: ClassVar[Mapping[str, Role]] = {
        "image": Role("image", IMAGES, usual_inputs=("file_name", "path", "file")),
        "objects": Role("objects", ("objects", "annotations"), optional_in={"predict"}),
    }
    fold_rows = None
    settled_fields = ("boxes_per_image",)
    metric_directions = directions("map", "map_50", "map_75", "mar_100")
    libraries = ("pycocotools.cocoeval",)

    def field_problems(self) -> Iterator[str]:
        from importlib.util import find_spec

        yield from super().field_problems()
        if self.dataset == "idx":
            yield "task.dataset=idx has images and labels, but no boxes. Use coco."
        if find_spec("pycocotools") is None:
            yield 'task.type=ObjectDetection needs pycocotools, which is not installed: pip install "hftune[detection]".'

    def load_source(self, split: str, source_split: str) -> Dataset:
        if self.dataset != "coco" or self.data_files or self.source_of(split) is not self.source:
            return super().load_source(split, source_split)
        from hftune.data.detection_images import load_coco

        return load_coco(Path(str(self.data_dir)).expanduser(), source_split, f"task.data_dir={self.data_dir}")

    @cached_property
    def _objects(self) -> dict[str, Objects]:
        from hftune.data.detection_images import read_objects

        column = self.read_columns["objects_column"]
        return {split: read_objects(rows, column, split, self.box_format) for split, rows in self.rows.items()}

    def _row_of_box(self, split: str) -> Any:
        return lambda index: self.row_of(split)(int(self._objects[split].image_M[index]))

    @cached_property
    def _classes(self) -> Classes:
        from hftune.data.columns import CATEGORIES
        from hftune.data.labels import Classes, class_names, names_of

        feature = self.rows["train"].features[self.read_columns["objects_column"]]
        inner = getattr(feature, "feature", feature)
        kind = next(inner[name] for name in CATEGORIES if name in inner)
        names = names_of(getattr(kind, "feature", None) or kind)
        labels = self._objects["train"].labels
        return replace(
            Classes.of(self.label_names, names, lambda: class_names(labels, "train", self._row_of_box("train"))), at_least=1
        )

    @property
    def labels(self) -> Sequence[str]:  # type: ignore[override]  # known only with the data
        """Class names in the order of the class numbers."""
        return self.label_names or self._classes.names

    @cached_property
    def _images(self) -> dict[str, AnnotatedImages]:
        from hftune.data.detection_images import checked_boxes

        _ = self._config  # refuses a model that does not detect objects before the data are read
        encoded = self.encoded_rows()
        return {
            split: checked_boxes(
                encoded[split],
                split,
                objects,
                self._classes.numbers(objects.labels, split, self._row_of_box(split)),
                self.bad_boxes == "cut",
                self.row_of(split),
            )
            for split, objects in self._objects.items()
        }

    def datasets(self) -> dict[str, AnnotatedImages]:
        """Return the splits; see ``AnnotatedImages`` for a sample."""
        if self.boxes_per_image is None:
            if not self._images["train"].num_boxes:
                raise DataError("The train split has no boxes.")
            self.boxes_per_image = self._images["train"].num_boxes / len(self._images["train"])
        whole = {"train"} if (self.augmentation or {}).get("crop") else {}
        return {split: replace(images, form=None if split in whole else self._form) for split, images in self._images.items()}

    @cached_property
    def _config(self) -> PreTrainedConfig:
        config = super()._config
        if hasattr(config, "num_denoising"):  # their number depends on the other images of a micro-batch
            config.num_denoising = 0
        return config

    @property
    def new_processor(self) -> str:  # type: ignore[override]  # each kind of model has one that makes boxes of its outputs
        from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING

        from hftune.models.detection_loss import INSTEAD

        if (kind := type(self._config)) not in IMAGE_PROCESSOR_MAPPING:  # D-FINE, whose loss is no sum over boxes, either
            raise ConfigError(f"{self._model_name}: transformers has no image processor for {kind.model_type}. {INSTEAD}")
        return str(IMAGE_PROCESSOR_MAPPING[kind]["pil"].__name__)

    def build_model(self) -> nn.Module:
        return self._summing(super().build_model())

    def load(self, directory: Path) -> nn.Module:
        return self._summing(super().load(directory))

    def _summing(self, model: nn.Module) -> nn.Module:
        """Return the model, with the loss of each image as a sum over its boxes."""
        from hftune.models.detection_loss import sum_over_boxes

        sum_over_boxes(model, self.boxes_per_image or 1.0, self._model_name)
        return model

    def class_counts(self, dataset: AnnotatedImages) -> dict[str, int]:
        """Return the number of boxes of each class."""
        return self._classes.counts(dataset.labels_M[~dataset.crowd_M])

    def notices(self, datasets: Mapping[str, AnnotatedImages], model: nn.Module) -> list[str]:
        from hftune.models.detection_loss import OVER_QUERIES

        messages = [*self.row_notices(), *self.encoded_notices({split: images.rows for split, images in datasets.items()})]
        messages += [*self._classes.notices(), *self.model_notices()]
        counts = ", ".join(f"{images.num_boxes:,} in {split}" for split, images in datasets.items())
        messages.append(f"Boxes: {counts}.")
        for split, images in datasets.items():
            if left_out := len(self._objects[split].labels) - len(images.labels_M):
                messages.append(f"task.bad_boxes=cut: {left_out:,} boxes of the {split} split have no area and are left out.")
        if hasattr(self._config, "num_denoising"):
            messages.append(f"{self._model_name} is trained without denoising queries, which depend on how a batch is divided.")
        if model.loss_type == OVER_QUERIES:
            messages.append(
                f"{self._model_name}: the loss of classes is divided by the average class weight of the queries for a box."
            )
        return messages

    def augment(self, example: dict[str, Any], rng: np.random.RandomState) -> dict[str, Any]:
        """Crop, scale and flip at random, image and boxes alike, and change the image's colours."""
        from hftune.data.detection_images import cut_boxes
        from hftune.data.image_augmentation import ATTEMPTS, crop_box, cut, jitter

        image_HWC, amounts = example["image"], self.augmentation or {}
        example = dict(example)
        if smallest := amounts.get("crop"):
            height, width = image_HWC.shape[:2]
            for attempt in range(ATTEMPTS):
                box = (0, 0, height, width) if attempt == ATTEMPTS - 1 else crop_box((height, width), smallest, rng)
                shown = cut_boxes(example, box, (height, width))
                if len(shown["labels"]) or not len(example["labels"]):  # else nothing is left of the objects
                    break
            example |= shown
            image_HWC = cut(image_HWC, box, self._form.shape[:2], self._form.resample)
        if (share := amounts.get("flip")) and rng.rand() < share:
            image_HWC = image_HWC[:, ::-1]
            example["boxes"] = example["boxes"][:, [2, 1, 0, 3]] * [-1, 1, -1, 1] + [1, 0, 1, 0]
        if strength := amounts.get("color"):
            image_HWC = jitter(image_HWC, strength, rng)
        return {**example, "image": image_HWC}

    def collate(self, examples: list[dict[str, Any]]) -> Batch:
        """Stack samples, padded with boxes of label -100.

        Returns:
            pixel_values (N, 3, H, W) float32; labels (N, B) int64 and boxes (N, B, 4) float32: centre, width and height, in
            [0, 1]; crowd (N, B) bool; and size (N, 2), height and width of the image's file.
        """
        import torch

        most = max(1, *(len(example["labels"]) for example in examples))
        labels_NB = torch.full((len(examples), most), -100)
        boxes_NB4 = torch.zeros(len(examples), most, 4)
        crowd_NB = torch.zeros(len(examples), most, dtype=torch.bool)
        for row, example in enumerate(examples):
            count, corners_B4 = len(example["labels"]), torch.as_tensor(example["boxes"], dtype=torch.float32)
            labels_NB[row, :count] = torch.as_tensor(example["labels"])
            boxes_NB4[row, :count, :2] = (corners_B4[:, :2] + corners_B4[:, 2:]) / 2
            boxes_NB4[row, :count, 2:] = corners_B4[:, 2:] - corners_B4[:, :2]
            crowd_NB[row, :count] = torch.as_tensor(example["crowd"])
        return {
            "pixel_values": self.normalized([example["image"] for example in examples]),
            **{"labels": labels_NB, "boxes": boxes_NB4, "crowd": crowd_NB},
            "size": torch.tensor([example["size"] for example in examples]),
        }

    def inputs(self, batch: Batch) -> dict[str, Any]:
        is_object_NB = (batch["labels"] >= 0) & ~batch["crowd"]
        labels = [
            {"class_labels": labels_B[is_object_B], "boxes": boxes_B4[is_object_B]}
            for labels_B, boxes_B4, is_object_B in zip(batch["labels"], batch["boxes"], is_object_NB, strict=True)
        ]
        return {"pixel_values": batch["pixel_values"], "labels": labels}

    def target(self, batch: Batch) -> Any:
        return {name: batch[name] for name in ("labels", "crowd")}

    def loss(self, outputs: Any, target: Any) -> Tensor:
        return outputs.loss.sum()

    def sample_losses(self, outputs: Any, target: Any) -> Tensor:
        return outputs.loss

    def num_items(self, target: Any) -> int:
        """Count boxes; an image without any counts as one."""
        return int(((target["labels"] >= 0) & ~target["crowd"]).sum(1).clamp(min=1).sum())

    def _found(self, outputs: Any, sizes: Sequence[Sequence[int]]) -> list[list[list[float]]]:
        """Return the boxes that a model finds: left, top, right, bottom in pixels, class number and score, the best first."""
        import torch

        found = self._form.processor.post_process_object_detection(
            outputs, threshold=0.0, target_sizes=torch.tensor(sizes, device=outputs.logits.device)
        )
        rows = []
        for one in found:
            order = one["scores"].float().argsort(descending=True, stable=True)[:MOST]
            columns = (one["boxes"][order].tolist(), one["labels"][order].tolist(), one["scores"][order].tolist())
            rows.append(
                [
                    [*(round(place, 2) for place in box), label, round(score, 6)]
                    for box, label, score in zip(*columns, strict=True)
                ]
            )
        return rows

    def predictions(self, outputs: Any, model: nn.Module, batch: Batch) -> list[dict[str, Any]]:
        """Return rows of the true boxes and the found ones; see ``detection_metrics``."""
        found = {"logits": outputs.logits, "pred_boxes": outputs.pred_boxes}
        return late_rows(self._rows, found, {name: value for name, value in batch.items() if name != "pixel_values"})

    def _rows(self, found: Mapping[str, Tensor], batch: Batch) -> list[dict[str, Any]]:
        outputs, sizes = SimpleNamespace(**found), batch["size"].tolist()
        rows = []
        columns = (batch[name].tolist() for name in ("boxes", "labels", "crowd"))
        for boxes, size, boxes_B4, labels_B, crowd_B in zip(self._found(outputs, sizes), sizes, *columns, strict=True):
            true = [
                [*(round(place, 2) for place in box), label, is_crowd]
                for box, label, is_crowd in zip(in_pixels(boxes_B4, size), labels_B, crowd_B, strict=True)
                if label >= 0
            ]
            wide = [[x, y, round(right - x, 2), round(bottom - y, 2), *rest] for x, y, right, bottom, *rest in boxes]
            rows.append({"boxes": true, "found": wide})
        return rows

    def describe(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return class names, and of the found boxes those above the threshold; the error is 1 minus the image's map_50."""
        from hftune.metrics.detection import detection_metrics

        described = []
        for row in rows:
            precision = detection_metrics([row], self.labels)["map_50"]
            found = [one for one in row["found"] if one[5] >= self.threshold]
            described.append(
                {
                    "objects": [[self.labels[label], *box] for *box, label, _ in row["boxes"]],
                    "found": [[self.labels[label], score, *box] for *box, label, score in found],
                    "error": round(1 - precision, 6) if precision is not None else float(len(found) > 0),
                }
            )
        return described

    def caption(self, row: Mapping[str, Any]) -> str:
        return f"{len(row['objects'])} objects, {len(row['found'])} found, error {row['error']:.2f}"

    def metrics(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        from hftune.metrics.detection import detection_metrics

        return detection_metrics(rows, self.labels)

    def sample_images(self, outputs: Any, model: nn.Module, batch: Batch, indices: Sequence[int]) -> list[np.ndarray]:
        """Return images with the true boxes beside the same with the boxes that are found."""
        import numpy as np
        from PIL import Image, ImageDraw

        images = self.shown(batch["pixel_values"][list(indices)])
        found = self._found(outputs, [self._form.shape[:2]] * len(batch["labels"]))
        pairs = []
        for index, image_HW3 in zip(indices, images, strict=True):
            places, labels = in_pixels(batch["boxes"][index].tolist(), image_HW3.shape[:2]), batch["labels"][index].tolist()
            true = [(x, y, x + w, y + h, label, 1.0) for (x, y, w, h), label in zip(places, labels, strict=True) if label >= 0]
            both = []
            for boxes in (true, [one for one in found[index] if one[5] >= self.threshold]):
                image = Image.fromarray(image_HW3)
                for *box, label, score in boxes:
                    pen, colour = ImageDraw.Draw(image), COLOURS[int(label) % len(COLOURS)]
                    pen.rectangle(
                        [min(box[0], box[2]), min(box[1], box[3]), max(box[0], box[2]), max(box[1], box[3])], outline=colour
                    )
                    said = self.labels[int(label)] + ("" if boxes is true else f" {score:.2f}")
                    pen.text((box[0] + 2, box[1] + 1), said, fill=colour)
                both.append(np.asarray(image))
            pairs.append(np.concatenate(both, axis=1))
        return pairs

    def predict(self, model: nn.Module, inputs: list) -> list[dict[str, Any]]:
        """Return ``boxes`` (left, top, right, bottom, in pixels), ``labels`` and ``scores`` of paths, Pillow images or arrays.

        Those with a score from ``threshold`` on, the best first.
        """
        from hftune.data.images import read_image

        images = [read_image(value, f"Input {index}") for index, value in enumerate(inputs)]
        pixel_values = self.normalized([self._form.pixels(image, name) for image, name in images])
        outputs = model(pixel_values=pixel_values.to(next(model.parameters()).device))
        rows = []
        for found in self._found(outputs, [(image.height, image.width) for image, _ in images]):
            kept = [one for one in found if one[5] >= self.threshold]
            rows.append(
                {
                    "boxes": [one[:4] for one in kept],
                    "labels": [self.labels[int(one[4])] for one in kept],
                    "scores": [one[5] for one in kept],
                }
            )
        return rows


def in_pixels(boxes_B4: Sequence[Sequence[float]], size: Sequence[int]) -> list[tuple[float, ...]]:
    """Return left, top, width and height in pixels of boxes of a micro-batch, in an image of a size (height, width)."""
    height, width = size
    return [((x - w / 2) * width, (y - h / 2) * height, w * width, h * height) for x, y, w, h in boxes_B4]

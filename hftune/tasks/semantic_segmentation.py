"""Semantic segmentation: a class for each pixel, by SegFormer, UperNet, or any other such model of transformers.

torch, datasets and Pillow are imported inside the methods, so that mistyped recipes are refused without waiting for them.
Shape suffixes: N samples, K classes, H and W height and width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from hftune.config.keys import key
from hftune.data.columns import IMAGES, Role
from hftune.errors import DataError, first_few
from hftune.metrics.records import directions
from hftune.tasks.late_rows import late_rows
from hftune.tasks.pretrained_images import PretrainedImageTask

if TYPE_CHECKING:
    import numpy as np
    from datasets import Dataset
    from torch import Tensor, nn
    from transformers import PreTrainedConfig

    from hftune.data.segmentation_images import MaskNumbers, SegmentedImages
    from hftune.task import Batch


@dataclass
class SemanticSegmentation(PretrainedImageTask):
    """Classify the pixels of images. The loss is cross-entropy; an item is a pixel that has a class."""

    data_dir: str | None = key(None, changes="data")
    """Folder with the images of imagefolder, one subfolder per split. Each has a subfolder for each column (image, mask), whose
    files are matched by name."""
    image_column: str | None = None
    """Column of the images. null: the only one that it could be; in folders, image."""
    mask_column: str | None = None
    """Column of the masks, images as large as their image: grey values, or places in a palette, are class numbers. null: the
    only one that it could be; in folders, mask."""
    label_names: list[str] | None = None
    """Class names in the order of the class numbers. null: the numbers in the training masks, from the first to the largest."""
    reduce_labels: bool = False
    """Whether 0 in a mask is no class, and 1 the first one, as in ADE20K. Pixels of 0 are then ignored."""
    ignore_index: int | None = key(255, ge=0)
    """Number in the masks of pixels that have no class: they are neither trained on nor scored. null: there is none."""

    auto_class, does = "AutoModelForSemanticSegmentation", "classify pixels"
    examples, example_type = "nvidia/mit-b0 or openmmlab/upernet-convnext-tiny", "segformer"
    new_processor, shows_all = "SegformerImageProcessorPil", True
    columns: ClassVar[Mapping[str, Role]] = {
        "image": Role("image", IMAGES, usual_inputs=("file_name", "path", "file")),
        "mask": Role(
            "image",
            ("mask", "label", "labels", "annotation", "annotations", "segmentation", "segmentation_mask"),
            optional_in={"predict"},
        ),
    }
    fold_rows = None
    metric_directions = directions("mean_iou", "pixel_accuracy")

    def field_problems(self) -> Iterator[str]:
        yield from super().field_problems()
        if self.dataset == "idx":
            yield "task.dataset=idx has images and labels, but no masks. Use imagefolder."

    def load_source(self, split: str, source_split: str) -> Dataset:
        return self.paired_rows(split, source_split, [self.image_column or "image", self.mask_column or "mask"])

    @property
    def _numbers(self) -> MaskNumbers:
        from hftune.data.segmentation_images import MaskNumbers

        return MaskNumbers(self.ignore_index, self.reduce_labels)

    @cached_property
    def _masks(self) -> dict[str, SegmentedImages]:
        from hftune.data.segmentation_images import checked_masks

        return {split: checked_masks(rows, split, self._numbers) for split, rows in self.encoded_rows().items()}

    @cached_property
    def _found_names(self) -> list[str]:
        return [str(self._numbers.number_of(label)) for label in range(int(self._masks["train"].labels.max()) + 1)]

    @property
    def labels(self) -> Sequence[str]:  # type: ignore[override]  # known only with the data
        """Class names in the order of the class numbers."""
        return self.label_names or self._found_names

    def datasets(self) -> dict[str, SegmentedImages]:
        """Return the splits; see ``SegmentedImages`` for a sample."""
        from hftune.data.images import decode_images
        from hftune.data.segmentation_images import check_labels

        form = self._form  # refuses a model that does not classify pixels before the data are read
        for split, images in self._masks.items():
            check_labels(images, self.labels, self.row_of(split))
        if len(self.labels) < 2:
            raise DataError(f"All pixels have the class {self.labels[0]!r}, but segmentation needs at least two classes.")
        whole = {"train"} if (self.augmentation or {}).get("crop") else {}
        return {
            split: replace(
                images,
                decoded=None if split in whole else decode_images(images.rows, "image", split, form),
                scales_masks=split == "train",
            )
            for split, images in self._masks.items()
        }

    @cached_property
    def _config(self) -> PreTrainedConfig:
        config = super()._config
        if hasattr(config, "use_auxiliary_head"):  # its logits are not among the outputs
            config.use_auxiliary_head = False
        return config

    def class_counts(self, dataset: SegmentedImages) -> dict[str, int]:
        """Return the number of images that show each class."""
        return dict(zip(self.labels, dataset.images_with(len(self.labels)), strict=True))

    def notices(self, datasets: Mapping[str, SegmentedImages], model: nn.Module) -> list[str]:
        messages = [*self.row_notices(), *self.encoded_notices({split: images.rows for split, images in datasets.items()})]
        messages += self.model_notices()
        if hasattr(self._config, "use_auxiliary_head"):
            messages.append(f"{self._model_name}: its auxiliary head is left out; only the loss of its main head is trained.")
        ignored = ", ".join(f"{images.ignored_share:.1%} of {split}" for split, images in datasets.items())
        messages.append(f"Pixels without a class: {ignored}.")
        if unseen := [name for name, count in self.class_counts(datasets["train"]).items() if not count]:
            messages.append(f"No training mask has a pixel of {first_few(unseen)}, which cannot be learned.")
        return messages

    def augment(self, example: dict[str, Any], rng: np.random.RandomState) -> dict[str, Any]:
        """Crop, scale and flip at random, image and mask alike, and change the image's colours."""
        from hftune.data.image_augmentation import ATTEMPTS, crop_box, cut, jitter
        from hftune.data.segmentation_images import IGNORED, cut_mask

        image_HWC, mask_HW, amounts = example["image"], example["mask"], self.augmentation or {}
        if smallest := amounts.get("crop"):
            size = self._form.shape[:2]
            for attempt in range(ATTEMPTS):
                is_last = attempt == ATTEMPTS - 1
                box = (0, 0, *mask_HW.shape) if is_last else crop_box(mask_HW.shape, smallest, rng)
                cut_HW = cut_mask(mask_HW, box, size)
                if (cut_HW != IGNORED).any():  # else there is nothing to learn from it
                    break
            image_HWC, mask_HW = cut(image_HWC, box, size, self._form.resample), cut_HW
        if (share := amounts.get("flip")) and rng.rand() < share:
            image_HWC, mask_HW = image_HWC[:, ::-1], mask_HW[:, ::-1]
        if strength := amounts.get("color"):
            image_HWC = jitter(image_HWC, strength, rng)
        return {**example, "image": image_HWC, "mask": mask_HW}

    def collate(self, examples: list[dict[str, Any]]) -> Batch:
        """Stack samples: masks are padded at the right and at the bottom if their sizes differ.

        Returns:
            pixel_values (N, 3, H, W) float32, of the model's size; labels (N, H, W) int64, -100 for pixels that do not count;
            and, only if sizes differ, size, height and width of each mask: numbers, which need no copy from a GPU.
        """
        import torch

        from hftune.data.restoration_images import stack
        from hftune.data.segmentation_images import IGNORED

        sizes = [example["mask"].shape for example in examples]
        # Padding is 0 in a stack.
        labels_NHW = torch.from_numpy(stack([example["mask"] - IGNORED for example in examples])).long() + IGNORED
        batch = {"pixel_values": self.normalized([example["image"] for example in examples]), "labels": labels_NHW}
        return {**batch, "size": sizes} if len(set(sizes)) > 1 else batch

    def inputs(self, batch: Batch) -> dict[str, Tensor]:
        return {"pixel_values": batch["pixel_values"]}

    def target(self, batch: Batch) -> Any:  # the size belongs to the labels
        return {name: value for name, value in batch.items() if name != "pixel_values"}

    def loss(self, outputs: Any, target: Any) -> Tensor:
        """Return the sum over pixels; the logits are scaled to the size of the mask, as the heads of transformers do it."""
        from torch.nn.functional import cross_entropy

        pairs = _scaled(outputs, target)
        # Not reduction="sum", which adds up in another order each time on GPUs: train.deterministic refuses it.
        losses = [cross_entropy(logits_nKHW, labels_nHW, reduction="none").sum() for logits_nKHW, labels_nHW in pairs]
        return sum(losses[1:], losses[0])

    def num_items(self, target: Any) -> int:
        """Count the pixels that have a class."""
        from hftune.data.segmentation_images import IGNORED

        return int((target["labels"] != IGNORED).sum())

    def predictions(self, outputs: Any, model: nn.Module, batch: Batch) -> list[dict[str, Any]]:
        """Return rows with the confusion of the pixels of each image, at the size of its mask; see ``confusion_of``."""
        from hftune.data.segmentation_images import IGNORED
        from hftune.metrics.segmentation import confusion_of

        def rows(pairs: Sequence[Sequence[Tensor]]) -> list[dict[str, Any]]:
            return [{"confusion": confusion_of(true_HW.numpy(), found_HW.numpy(), IGNORED)} for true_HW, found_HW in pairs]

        pairs = _one_by_one(outputs, self.target(batch))
        return late_rows(rows, [(labels_HW, logits_KHW.argmax(0)) for logits_KHW, labels_HW in pairs])

    def describe(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the classes in each image and what was found in their place; the error is the share of wrong pixels."""
        from hftune.metrics.segmentation import confusion_matrix, segmentation_metrics

        described = []
        for row in rows:
            matrix_KK = confusion_matrix(row["confusion"], len(self.labels))
            found = segmentation_metrics(matrix_KK, self.labels)
            described.append(
                {
                    "pixels": int(matrix_KK.sum()),
                    "classes": [name for name, count in zip(self.labels, matrix_KK.sum(1).tolist(), strict=True) if count],
                    "predicted": [name for name, count in zip(self.labels, matrix_KK.sum(0).tolist(), strict=True) if count],
                    **{name: round(found[name], 6) for name in ("mean_iou", "pixel_accuracy")},
                    "error": round(1 - found["pixel_accuracy"], 6),
                }
            )
        return described

    def caption(self, row: Mapping[str, Any]) -> str:
        return f"{', '.join(row['classes'])}: mean IoU {row['mean_iou']:.3f}, pixel accuracy {row['pixel_accuracy']:.3f}"

    def metrics(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        from hftune.metrics.segmentation import confusion_matrix, segmentation_metrics

        entries = (entry for row in rows for entry in row["confusion"])
        return segmentation_metrics(confusion_matrix(entries, len(self.labels)), self.labels)

    def sample_images(self, outputs: Any, model: nn.Module, batch: Batch, indices: Sequence[int]) -> list[np.ndarray]:
        """Return images with the image as the model is given it, the mask, and the prediction side by side."""
        import numpy as np

        from hftune.data.segmentation_images import IGNORED, cut_mask, painted

        pairs, strips = [*_one_by_one(outputs, self.target(batch))], []
        for index, image_HW3 in zip(indices, self.shown(batch["pixel_values"][list(indices)]), strict=True):
            logits_KHW, labels_HW = pairs[index]
            masks = [labels_HW.cpu().numpy(), logits_KHW.argmax(0).cpu().numpy()]
            masks[1][masks[0] == IGNORED] = IGNORED
            scaled = [cut_mask(mask_HW, (0, 0, *mask_HW.shape), image_HW3.shape[:2]) for mask_HW in masks]
            strips.append(np.concatenate([image_HW3, *(painted(mask_HW, self._numbers) for mask_HW in scaled)], axis=1))
        return strips

    def predict(self, model: nn.Module, inputs: list) -> list[dict[str, Any]]:
        """Return a mask of each path, Pillow image or uint8 array, with the image's size and the numbers of the data.

        A row's ``mask`` is a Pillow image with a palette; ``classes`` are the shares of its pixels, the largest first.
        """
        import numpy as np

        from hftune.data.images import read_image
        from hftune.data.segmentation_images import to_image

        images = [read_image(value, f"Input {index}") for index, value in enumerate(inputs)]
        pixel_values = self.normalized([self._form.pixels(image, name) for image, name in images])
        outputs, rows = model(pixel_values=pixel_values.to(next(model.parameters()).device)), []
        for logits_Khw, (image, _) in zip(outputs.logits.float(), images, strict=True):
            labels_HW = scaled_to(logits_Khw[None], (image.height, image.width))[0].argmax(0).cpu().numpy()
            shares_K = np.bincount(labels_HW.reshape(-1)) / labels_HW.size
            order = [label for label in np.argsort(-shares_K, kind="stable").tolist() if shares_K[label]]
            shares = {self.labels[label]: round(float(shares_K[label]), 4) for label in order}
            rows.append({"mask": to_image(labels_HW, self._numbers), "classes": shares})
        return rows


def _scaled(outputs: Any, target: Batch) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield logits (n, K, H, W), float32, and labels (n, H, W) of the masks' size: of a few samples at a time."""
    logits_NKhw, labels_NHW = outputs.logits.float(), target["labels"]
    if sizes := target.get("size"):
        for logits_Khw, labels_HW, (height, width) in zip(logits_NKhw, labels_NHW, sizes, strict=True):
            yield scaled_to(logits_Khw[None], (height, width)), labels_HW[None, :height, :width]
        return
    size = labels_NHW.shape[1:]
    count = max(1, AT_ONCE // (logits_NKhw.shape[1] * size.numel()))
    for logits_nKhw, labels_nHW in zip(logits_NKhw.split(count), labels_NHW.split(count), strict=True):
        yield scaled_to(logits_nKhw, size), labels_nHW


def _one_by_one(outputs: Any, target: Batch) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield logits (K, H, W) and labels (H, W) of each sample."""
    for logits_nKHW, labels_nHW in _scaled(outputs, target):
        yield from zip(logits_nKHW, labels_nHW, strict=True)


AT_ONCE = 2**22
"""Logits that are scaled at once: 16 MiB of float32."""


def scaled_to(logits_NKhw: Tensor, size: tuple[int, ...]) -> Tensor:
    """Return logits at a height and width, (N, K, H, W), as the heads of transformers' models scale them."""
    from torch.nn.functional import interpolate

    return interpolate(logits_NKhw, size=size, mode="bilinear", align_corners=False)

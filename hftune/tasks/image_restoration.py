"""Image restoration: scratches, holes or writing, marked by a mask, are removed by a U-Net or a network of your own.

torch, datasets and Pillow are imported inside the methods, so that mistyped recipes are refused without waiting for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar

from hftune.config.keys import key
from hftune.data.columns import Role
from hftune.metrics.records import REGIONS, directions
from hftune.tasks.images import ImageTask, check_same_network, network_problems, read_config, save_config, to_bytes
from hftune.tasks.late_rows import late_rows_each

if TYPE_CHECKING:
    import numpy as np
    from datasets import Dataset
    from torch import Tensor, nn

    from hftune.data.restoration_images import DamagedImages
    from hftune.models.unet import AnySize
    from hftune.task import Batch

SUSPICIOUS_SHARE = 0.6
"""Average share of masked pixels above which masks may be inverted."""


@dataclass
class ImageRestoration(ImageTask):
    """Restore damaged RGB images. The loss is the mean absolute error of a pixel's three colours; an item is a pixel."""

    network: str | None = key(None, changes="model")
    """Import path of your own network class, package.module.Class. It is called with damaged images (N, 3, H, W), in [0, 1],
    and masks (N, 1, H, W), 1 for damaged pixels, and returns images. null: hftune's U-Net, sized by width and depth."""
    network_args: dict[str, Any] = key(dict, changes="model")
    """Keyword arguments of your own network class."""
    data_dir: str | None = key(None, changes="data")
    """Folder with the images of imagefolder, one subfolder per split. Without mask_column, a split's folder holds clean images.
    With it, it has a subfolder for each column (image, mask, target), whose files are matched by name."""
    width: int = key(32, ge=8)
    """Channels of the U-Net at full resolution, a multiple of 8. They double each time height and width are halved."""
    depth: int = key(3, ge=1)
    """Number of times that the U-Net halves height and width, at least 1."""
    image_column: str = "image"
    """Column of the images."""
    mask_column: str | None = None
    """Column of the masks: white, or any colour at least half as bright, marks damage; transparent parts count as black. null:
    random masks, different in each epoch for training and always the same for evaluation."""
    target_column: str | None = None
    """Column of the undamaged images. null: the images are undamaged, and masked pixels are painted with fill."""
    fill: list[int] = key(lambda: [128, 128, 128], ge=0, le=255)
    """Colour (red, green, blue; 0 to 255) to paint damage with, if target_column is null."""
    crop: int | None = key(64, ge=16)
    """Size in pixels of the random square crops to train on, at least 16. null: whole images, as in evaluation."""
    flip: bool = True
    """Whether to flip training images left to right, each with probability 1/2."""
    mask_weight: float = key(1.0, gt=0)
    """Weight in the loss of pixels inside the mask, above 0; pixels outside have weight 1."""

    columns: ClassVar[Mapping[str, Role]] = {
        "image": Role("image", usual_inputs=("file_name", "path", "file")),
        "mask": Role("image", optional_in={"train"}),
        "target": Role("image", optional_in={"train", "predict"}),
    }
    fold_rows = None
    metric_directions = directions(*(f"{metric}{region}" for region in REGIONS for metric in ("l1", "psnr", "ssim")))

    def field_problems(self) -> Iterator[str]:
        yield from super().field_problems()
        yield from network_problems(self.network, self.network_args)
        if self.dataset == "idx":
            yield "task.dataset=idx has images and labels, but no masks. Use imagefolder."
        if self.width % 8:
            yield f"task.width={self.width} must be a multiple of 8."
        if self.target_column is not None and self.mask_column is None:
            yield f"task.target_column={self.target_column} needs task.mask_column, which marks the damaged pixels."
        if len(self.fill) != 3:
            yield f"task.fill={self.fill} must be three numbers: red, green and blue."

    def load_source(self, split: str, source_split: str) -> Dataset:
        columns = [column for name in self.columns if (column := getattr(self, f"{name}_column")) is not None]
        return self.paired_rows(split, source_split, columns)

    def datasets(self) -> dict[str, DamagedImages]:
        """Return the splits; see ``DamagedImages`` for a sample."""
        from hftune.data.restoration_images import checked_images

        encoded = self.encoded_rows()
        return {split: checked_images(rows, split, self.crop if split == "train" else None) for split, rows in encoded.items()}

    def build_model(self) -> AnySize:
        from hftune.models.custom import build_network
        from hftune.models.unet import AnySize, UNet

        return AnySize(build_network(self.network, self.network_args) if self.network else UNet(self.width, self.depth))

    def lengths(self, dataset: DamagedImages) -> np.ndarray | None:
        """Return the pixels of each image, or None if all are the same, as crops are."""
        return None if dataset.split == "train" and self.crop is not None else dataset.areas

    def sizes(self, dataset: DamagedImages) -> np.ndarray | None:
        """Return height and width of each image, or None if ``lengths`` does."""
        return None if self.lengths(dataset) is None else dataset.sizes

    def padded_length(self, sizes: Sequence[int]) -> int:
        return sizes[0] * sizes[1]

    def augment(self, example: dict[str, Any], rng: np.random.RandomState) -> dict[str, Any]:
        """Crop and flip at random, image, mask and target alike, and draw a mask if the data have none."""
        from hftune.data.damage import draw_mask
        from hftune.data.restoration_images import crop, flip

        height, width = example["mask"].shape
        if self.mask_column is None:
            example = {**example, "mask": draw_mask(height, width, rng)}
        if self.crop is not None:
            top, left = rng.randint(height - self.crop + 1), rng.randint(width - self.crop + 1)
            example = crop(example, top, left, self.crop)
        return flip(example) if self.flip and rng.rand() < 0.5 else example

    def collate(self, examples: list[dict[str, Any]]) -> Batch:
        """Stack samples, padded at the right and at the bottom if their sizes differ.

        Returns:
            image (N, 3, H, W), damaged, in [0, 1]; mask (N, 1, H, W), 1 for damaged pixels; labels (N, 4, H, W), the target and
            each pixel's weight in the loss, 0 for padding; and, only if sizes differ, size, the list of heights and widths.
        """
        import torch

        from hftune.data.restoration_images import stack

        def channels_first(arrays: list[np.ndarray]) -> Tensor:
            values_NHWC = torch.from_numpy(stack(arrays))
            return values_NHWC.permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.contiguous_format, copy=True) / 255

        image_N3HW = channels_first([example["image"] for example in examples])
        mask_N1HW = torch.from_numpy(stack([example["mask"] for example in examples]))[:, None]
        sizes = [example["mask"].shape for example in examples]
        if self.target_column is None:
            target_N3HW = image_N3HW
            fill_311 = torch.tensor(self.fill, dtype=torch.float32)[:, None, None] / 255
            image_N3HW = torch.where(mask_N1HW, fill_311, target_N3HW)
        else:
            target_N3HW = channels_first([example["target"] for example in examples])
        weight_N1HW = torch.where(mask_N1HW, self.mask_weight, 1.0)
        batch = {"image": image_N3HW, "mask": mask_N1HW.float()}
        if len(set(sizes)) > 1:
            batch["size"] = sizes
            for weight_1HW, (height, width) in zip(weight_N1HW, sizes, strict=True):
                weight_1HW[:, height:], weight_1HW[:, :, width:] = 0, 0
        return {**batch, "labels": torch.cat([target_N3HW, weight_N1HW], dim=1)}

    def loss(self, outputs: Tensor, target: Tensor) -> Tensor:
        target_N3HW, weight_N1HW = target[:, :3], target[:, 3:]
        return ((outputs.float() - target_N3HW).abs() * weight_N1HW).sum() / 3

    def num_items(self, target: Tensor) -> int:
        """Count pixels, padding excluded."""
        return int(target[:, 3].count_nonzero())

    def predictions(self, outputs: Tensor, model: nn.Module, batch: Batch) -> list[dict[str, Any]]:
        """Return rows of pixels, l1, mse and ssim, each for the whole image, inside the mask and outside the mask."""
        import torch

        from hftune.metrics.restoration import numbers_of, row_of

        numbers = [
            numbers_of(output_3HW.clamp(0, 1), target_3HW, mask_1HW[0])
            for _, mask_1HW, output_3HW, target_3HW in self._one_by_one(outputs, batch)
        ]
        return late_rows_each(row_of, torch.stack(numbers))

    def sample_images(self, outputs: Tensor, model: nn.Module, batch: Batch, indices: Sequence[int]) -> list[np.ndarray]:
        """Return images with the damaged image, its mask, the restored image and the target side by side."""
        import torch

        rows = list(self._one_by_one(outputs, batch))
        strips = []
        for image_3HW, mask_1HW, output_3HW, target_3HW in (rows[index] for index in indices):
            mask_3HW = mask_1HW.expand_as(image_3HW)
            strip_3HW = torch.cat([image_3HW, mask_3HW, output_3HW.float(), target_3HW], dim=2)
            strips.append(to_bytes(strip_3HW))
        return strips

    def _one_by_one(self, outputs: Tensor, batch: Batch) -> Iterator[tuple[Tensor, ...]]:
        """Yield image, mask, output and target of each sample, without their padding."""
        whole = [tuple(outputs.shape[2:])] * len(outputs)
        sizes = batch.get("size", whole)
        samples = zip(batch["image"], batch["mask"], outputs, batch["labels"][:, :3], strict=True)
        for (height, width), values in zip(sizes, samples, strict=True):
            yield tuple(value[:, :height, :width] for value in values)

    def describe(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the rows with the mean squared error of the damaged pixels, or of all where none is damaged, as the error."""
        return [{**row, "error": row["mse"] if row["mse_inside"] is None else row["mse_inside"]} for row in rows]

    def caption(self, row: Mapping[str, Any]) -> str:
        from hftune.metrics.restoration import psnr

        where = "" if row["mse_inside"] is None else " inside the mask"
        return f"PSNR {psnr(row['error']):.2f} dB{where}; SSIM {row['ssim']:.3f}"

    def metrics(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        from hftune.metrics.restoration import summarise

        return summarise(rows)

    def notices(self, datasets: Mapping[str, Any], model: AnySize) -> list[str]:
        crops = f"random squares of {self.crop} x {self.crop} pixels" if self.crop else "whole images"
        multiple = getattr(model.network, "multiple", 1)
        padded = f", padded to multiples of {multiple}" if multiple > 1 else ""
        messages = [f"Training on {crops}; evaluation on whole images{padded}.", *self.row_notices()]
        messages += self.encoded_notices({split: images.rows for split, images in datasets.items()})
        if shares := {split: fmean(images.marked.tolist()) for split, images in datasets.items() if len(images.marked)}:
            marked = ", ".join(f"{share:.1%} of {split}" for split, share in shares.items())
            doubt = " Are the masks inverted? White marks damage." if max(shares.values()) > SUSPICIOUS_SHARE else ""
            messages.append(f"The masks mark, on average, {marked}.{doubt}")
        for split, images in datasets.items():
            if images.num_converted:
                messages.append(f"Converted to RGB: {images.num_converted} of the images in the {split} split.")
        return messages

    def _network(self) -> dict[str, Any]:
        own = {"network": self.network, "network_args": dict(self.network_args)}
        return own if self.network else {"width": self.width, "depth": self.depth}

    def save(self, model: nn.Module, directory: Path) -> None:
        """Write model.safetensors, and config.json with what is needed to build the network."""
        super().save(model, directory)
        save_config(self._network(), directory)

    def load(self, directory: Path) -> nn.Module:
        """Load the network that ``save`` wrote.

        Raises:
            ConfigError: the recipe has a different network.
        """
        check_same_network(read_config(directory), self._network(), directory)
        return super().load(directory)

    def input_columns(self) -> dict[str, str | None]:
        mask = {} if self.mask_column is None else {"mask": self.mask_column}
        return {"image": self.image_column, **mask}

    def example_inputs(self) -> list:
        return []  # of a pair of images nothing can be made that MLflow keeps

    def predict(self, model: nn.Module, inputs: list) -> list[dict[str, Any]]:
        """Restore pairs of image and mask, each a path, a Pillow image or a uint8 array. A row's ``image`` is a Pillow image.

        Grey and transparent images are converted to RGB, with a warning.
        """
        from PIL import Image

        from hftune.data.restoration_images import read_pair

        pairs = [read_pair(value, index) for index, value in enumerate(inputs)]
        batch = self.collate([{"image": image_HWC, "mask": mask_HW, "target": image_HWC} for image_HWC, mask_HW in pairs])
        device = next(model.parameters()).device
        images = {name: batch[name].to(device) for name in ("image", "mask")}
        outputs = model(**{**self.inputs(batch), **images})
        restored = [to_bytes(output_3HW) for _, _, output_3HW, _ in self._one_by_one(outputs, batch)]
        return [{"image": Image.fromarray(pixels_HWC)} for pixels_HWC in restored]

"""Image classification, such as MNIST's digits, with a small convolutional network or one of your own.

torch, datasets and Pillow are imported inside the methods, so that mistyped recipes are refused without waiting for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hftune.errors import did_you_mean, format_value
from hftune.tasks.classification import count_classes, evaluation_rows, most_probable, named
from hftune.tasks.images import ImageTask, check_same_network
from hftune.tasks.validation import bound_problems

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn

    from hftune.data.images import Images, Layout, Source
    from hftune.task import Batch

SMALLEST_IMAGE = 16
"""Pixels per side that ConvNet needs. Defined here because that module imports torch."""
MAXIMUM = {"shift": None, "rotate": 180}
"""Largest values of the keys of ``augmentation``. None: the image size."""


@dataclass
class ImageClassification(ImageTask):
    """Classify images. The loss is cross-entropy; an item is an image."""

    network: str | None = None
    """Import path of your own network class, package.module.Class. It is called with normalized images (N, C, H, W), float32,
    and returns logits (N, classes). null: hftune's ConvNet, sized by width and dropout."""
    network_args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of your own network, such as {num_classes: 10}."""
    dataset: str = "ylecun/mnist"
    """Data set name on the Hub (owner/name); imagefolder or idx (MNIST's own files) with data_dir; parquet or arrow with
    data_files; or module:function that returns rows."""
    data_dir: str | None = None
    """Folder with the files of imagefolder or idx."""
    width: int = 1
    """Width multiplier of ConvNet: 1 means 10 and 20 channels and 50 features (21,840 parameters)."""
    dropout: float = 0.5
    """Dropout probability in ConvNet, of the second convolution's channels and of the features, in [0, 1)."""
    label_column: str = "label"
    """Column of the labels: class numbers from 0, or class names."""
    label_names: list[str] | None = None
    """Class names in the order of the class numbers: the names that the data set uses, in any order, or a new name for each of
    its classes, in the data set's order. null: the data set's names, or else the distinct labels of the training split."""
    image_size: int = 28
    """Height and width of the images in pixels, at least 16."""
    resize: bool = False
    """Whether to scale the shorter side of images to image_size and crop the longer. false: other sizes are refused."""
    mean: list[float] = field(default_factory=lambda: [0.1307])
    """Mean of the pixel values, in [0, 1]: one number for grey images, three (red, green, blue) for colour."""
    std: list[float] = field(default_factory=lambda: [0.3081])
    """Standard deviation of the pixel values, with as many numbers as mean. Inputs are (pixel - mean) / std."""
    augmentation: dict[str, Any] | None = None
    """Largest random shift (pixels) and rotate (degrees) of training images, varied in each epoch. null: no augmentation."""

    metric_directions = {"accuracy": "max"}

    def validate(self) -> list[str]:
        minimum = {"width": 1, "image_size": SMALLEST_IMAGE, "max_train_samples": 1, "max_eval_samples": 1}
        return [
            *self._split_problems(folders=("train_split", "eval_split")),
            *bound_problems(self, minimum),
            *self._network_problems(),
            *self._value_problems(),
        ]

    def _value_problems(self) -> Iterator[str]:
        if not 0 <= self.dropout < 1:
            yield f"task.dropout={self.dropout} must be in [0, 1)."
        if len(self.mean) not in (1, 3) or len(self.std) != len(self.mean):
            yield f"task.mean={self.mean} and task.std={self.std} must both hold one number (grey) or three (red, green, blue)."
        if not all(std > 0 for std in self.std):
            yield f"task.std={self.std} must be above 0."
        for name, value in (self.augmentation or {}).items():
            if name not in MAXIMUM:
                hint = did_you_mean(name, MAXIMUM)
                yield f"task.augmentation.{name} is not a key of a recipe. Keys: {', '.join(MAXIMUM)}.{hint}"
                continue
            maximum = MAXIMUM[name] or self.image_size
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= maximum:
                yield f"task.augmentation.{name}={format_value(value)} must be a number from 0 to {maximum}."

    @property
    def layout(self) -> Layout:
        """Size and number of channels of the images that the model is given."""
        from hftune.data.images import Layout

        return Layout(self.image_size, len(self.mean), self.resize)

    @property
    def _instead_of_hub(self) -> str:
        from hftune.data.images import INSTEAD

        return INSTEAD

    @cached_property
    def _sources(self) -> dict[str, Source]:
        return {split: self._source(split, source_split) for split, source_split in self._source_splits.items()}

    def _source(self, split: str, source_split: str) -> Source:
        from hftune.data.images import load_idx, load_rows
        from hftune.data.splits import Part

        part = Part.of(self, split, self._counts)
        if self.dataset == "idx":
            return load_idx(self.data_dir, source_split, part, self.layout)
        columns = {"task.image_column": self.image_column, "task.label_column": self.label_column}
        return load_rows(
            self.dataset, self.data_dir, self.data_files, source_split, split, part, columns, self.layout, self.dataset_commit
        )

    @property
    def fold_rows(self) -> list[int] | None:  # type: ignore[override]  # known only with the data
        """Image in the data of each sample of the eval split, if that is a fold."""
        return list(self._sources["eval"].rows) if self.eval_fold else None

    @cached_property
    def labels(self) -> list[str]:  # type: ignore[override]  # known only with the data
        """Class names in the order of the class numbers."""
        from hftune.data.labels import class_names

        if self.label_names:
            return list(self.label_names)
        train = self._sources["train"]
        return list(train.label_names or class_names(train.images.labels, "train", train.rows.__getitem__))

    def datasets(self) -> dict[str, Images]:
        """Return both splits. A sample has an image (H, W, C) uint8 and a label, its class number."""
        from hftune.data.images import Images
        from hftune.data.labels import class_numbers

        data_names = self._sources["train"].label_names
        return {
            split: Images(
                source.images.pixels_NHWC,
                class_numbers(source.images.labels, self.labels, data_names, split, row_of=source.rows.__getitem__),
            )
            for split, source in self._sources.items()
        }

    def build_model(self) -> nn.Module:
        from hftune.models.convnet import ConvNet
        from hftune.models.custom import Classifier, build_network

        if self.network is not None:
            return Classifier(build_network(self.network, self.network_args), len(self.labels))
        return ConvNet(**self._network(len(self.labels)))

    def _network(self, num_classes: int) -> dict[str, Any]:
        """Return what defines the network: the arguments of ConvNet, or path and arguments of your own network."""
        sizes = {"image_size": self.image_size, "in_channels": len(self.mean)}
        if self.network is not None:
            return {**self._own_network(), **sizes, "num_classes": num_classes}
        return {**sizes, "width": self.width, "num_classes": num_classes, "dropout": self.dropout}

    def class_counts(self, dataset: Images) -> dict[str, int]:
        return count_classes(dataset.labels, self.labels)

    def notices(self, datasets: Mapping[str, Images], model: nn.Module) -> list[str]:
        from hftune.data import notices

        totals = {split: (len(datasets[split]), source.total) for split, source in self._sources.items()}
        messages = [*notices.ignored_splits(self), *notices.held_out(self, totals["train"][1], "images")]
        messages += notices.left_out(self._kept(totals), "images")
        pixels = {split: images.pixels_NHWC for split, images in datasets.items()}
        if sum(pixels_NHWC.nbytes for pixels_NHWC in pixels.values()) > notices.MOST_BYTES:
            return messages
        return [*messages, *notices.shared(notices.shared_arrays(pixels), "images")]

    @property
    def augments(self) -> bool:
        return bool(self.augmentation)

    def augment(self, example: dict[str, Any], rng: np.random.RandomState) -> dict[str, Any]:
        """Rotate the image by up to ``rotate`` degrees and shift it by up to ``shift`` pixels, in either direction."""
        from hftune.data.images import move

        angle, right, down = rng.uniform(-1, 1, size=3).tolist()
        rotate, shift = self.augmentation.get("rotate", 0), self.augmentation.get("shift", 0)
        return {**example, "image": move(example["image"], angle * rotate, right * shift, down * shift)}

    def collate(self, examples: list[dict[str, Any]]) -> Batch:
        """Stack and normalize: image (N, C, H, W) float32, labels (N,) int64."""
        import numpy as np
        import torch

        pixels_NHWC = torch.from_numpy(np.stack([example["image"] for example in examples]))
        # A copy, although grey images already have this layout: with unusual strides, DDP would warn about the gradients.
        pixels_NCHW = pixels_NHWC.permute(0, 3, 1, 2).clone(memory_format=torch.contiguous_format)
        mean_C11, std_C11 = (torch.tensor(values)[:, None, None] for values in (self.mean, self.std))
        labels_N = torch.tensor([example["label"] for example in examples])
        return {"image": (pixels_NCHW.float() / 255 - mean_C11) / std_C11, "labels": labels_N}

    def loss(self, outputs: Tensor, target: Tensor) -> Tensor:
        from torch.nn.functional import cross_entropy

        return cross_entropy(outputs.float(), target, reduction="sum")

    def predictions(self, outputs: Tensor, model: nn.Module, batch: Batch) -> list[dict[str, Any]]:
        """Return rows of label and prediction (class numbers), and the probabilities of both."""
        return evaluation_rows(outputs, batch["labels"])

    def describe(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return named(rows, self.labels)

    def caption(self, row: Mapping[str, Any]) -> str:
        return f"{row['label']}, predicted {row['prediction']} ({row['probability']:.2f})"

    def sample_images(self, outputs: Tensor, model: nn.Module, batch: Batch, indices: Sequence[int]) -> list[np.ndarray]:
        """Return the images as the model is given them, in three channels."""
        import torch

        mean_C11, std_C11 = (torch.tensor(values)[:, None, None] for values in (self.mean, self.std))
        pixels_NCHW = batch["image"][list(indices)].float().cpu() * std_C11 + mean_C11
        pixels_N3HW = pixels_NCHW.expand(-1, 3, -1, -1)
        return list((pixels_N3HW.clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).numpy())

    def metrics(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        from hftune.metrics.classification import Accuracy, ConfusionMatrix

        pairs = {"predictions": [row["prediction"] for row in rows], "references": [row["label"] for row in rows]}
        return {**Accuracy().compute(**pairs), **ConfusionMatrix().compute(**pairs, num_labels=len(self.labels))}

    def save(self, model: nn.Module, directory: Path) -> None:
        """Write model.safetensors, and config.json with all that is needed to build the network and to prepare its inputs."""
        super().save(model, directory)
        network = self._network(len(self.labels))
        self._save_config({"model": network, "label_names": self.labels, "mean": self.mean, "std": self.std}, directory)

    def load(self, directory: Path) -> nn.Module:
        """Load the network and the class names that ``save`` wrote.

        Raises:
            ConfigError: the recipe has a different network.
        """
        config = self._saved_config(directory)
        check_same_network(config["model"], self._network(len(config["label_names"])), directory)
        self.label_names = config["label_names"]
        return super().load(directory)

    def example_inputs(self) -> list[np.ndarray]:
        pixels_NHWC = self._sources.get("eval", self._sources["train"]).images.pixels_NHWC[:2]
        return list(pixels_NHWC[..., 0] if pixels_NHWC.shape[-1] == 1 else pixels_NHWC)

    def predict(self, model: nn.Module, inputs: list) -> list[dict[str, Any]]:
        """Return the most probable label, by name, and its probability for each path, Pillow image or uint8 array."""
        from hftune.data.images import read_input

        images = [read_input(value, index, self.layout) for index, value in enumerate(inputs)]
        batch = self.collate([{"image": image, "label": 0} for image in images])
        outputs = model(batch["image"].to(next(model.parameters()).device))
        return [{"label": self.labels[label], "probability": probability} for label, probability in most_probable(outputs)]

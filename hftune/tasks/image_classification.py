"""Image classification with a pretrained model, a small convolutional network, or a network of your own.

torch, datasets and Pillow are imported inside the methods, so that mistyped recipes are refused without waiting for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hftune.config.keys import key
from hftune.data.columns import IMAGES, LABELS, Role
from hftune.metrics.records import directions
from hftune.task import Task
from hftune.tasks.folders import Classified, logits
from hftune.tasks.images import check_same_network, network_problems, read_config, save_config
from hftune.tasks.late_rows import late_rows
from hftune.tasks.pretrained_images import MIN_SIDE, PretrainedImageTask
from hftune.tasks.problems import SingleLabel

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn

    from hftune.data.images import Form, Images
    from hftune.task import Batch, Direction

MNIST_SIZE, MNIST_MEAN, MNIST_STD = 28, (0.1307,), (0.3081,)
"""What networks are given where the recipe does not say."""
TOP = 5
"""Classes among which the true one counts as found in ``top5_accuracy``."""
MAX_FEW = 10
"""More classes than this have a ``top5_accuracy``."""


@dataclass
class ImageClassification(PretrainedImageTask, Classified):
    """Classify images. The loss is cross-entropy; an item is an image."""

    model: str | None = key(None, changes="model")
    """Model name on the Hub (owner/name) or local folder: any image classifier of transformers, or the backbone of one, which
    gets a new head. null: a new model built from model_config, or a network."""
    model_config: dict[str, Any] = key(dict, changes="model")
    """Fields of the model's config to override; if model is null, the whole config of a new one, such as
    {model_type: vit, ...}."""
    network: str | None = key(None, changes="model")
    """Import path of your own network class, package.module.Class. It is called with normalized images (N, C, H, W), float32,
    and returns logits (N, classes). null: hftune's ConvNet, sized by width and dropout, if there is no model either."""
    network_args: dict[str, Any] = key(dict, changes="model")
    """Keyword arguments of your own network, such as {num_classes: 10}."""
    dataset: str | None = key("imagefolder", changes="data")
    """Data set name on the Hub (owner/name); imagefolder or idx (MNIST's own files) with data_dir; parquet or arrow with
    data_files; or module:function that returns rows."""
    data_dir: str | None = key(None, changes="data")
    """Folder with the files of imagefolder (train/CLASS/*.jpg, and so on) or idx."""
    width: int = key(1, ge=1)
    """Width multiplier of ConvNet: 1 means 10 and 20 channels and 50 features (21,840 parameters)."""
    dropout: float = key(0.5, ge=0, lt=1)
    """Dropout probability in ConvNet, of the second convolution's channels and of the features, in [0, 1)."""
    image_column: str | None = None
    """Column of the images. null: the only one of images."""
    label_column: str | None = None
    """Column of the labels: class names, or class numbers (from 0 if label_names is set). null: the only one that could be
    it."""
    label_names: list[str] | None = None
    """Class names in the order of the class numbers: the names that the data set uses, in any order, or a new name for each of
    its classes, in the data set's order. null: the data set's names, or else the distinct labels of the training split."""
    image_size: int | None = key(None, ge=MIN_SIDE)
    """Height and width of the images in pixels, at least 16. null: that of the model's image processor; 28 for networks."""
    resize: bool = False
    """Whether to scale the shorter side of images to image_size and crop the longer. false: other sizes are refused. For
    networks; models have their image processor, which takes images of any size."""
    mean: list[float] | None = None
    """Mean of the pixel values, in [0, 1]: one number for grey images, three (red, green, blue) for colour. null: that of the
    model's image processor; MNIST's for networks."""
    augmentation: dict[str, Any] | None = None
    """Random changes of training images, different in each epoch, in this order; 0 leaves one out. crop: smallest share of the
    image that a crop with a random aspect shows, such as 0.08. flip: probability of flipping left to right. rand_augment:
    magnitude of two random operations on colours or geometry, 0 to 10. color: largest relative change of brightness, contrast
    and saturation. shift (pixels) and rotate (degrees): largest movement. erase: probability of painting over a random box."""
    mixup: float = key(0.0, ge=0)
    """Parameter of the Beta distribution of mixup, such as 0.2: each training image is averaged with another one, and so are
    their labels. 0: no mixup. With cutmix as well, each image gets one of the two."""
    cutmix: float = key(0.0, ge=0)
    """Parameter of the Beta distribution of cutmix, such as 1.0: a box of each training image is replaced by that of another
    one, and the labels are averaged by area. 0: no cutmix."""
    label_smoothing: float = key(0.0, ge=0, lt=1, changes="forward backward")
    """Share of each label that is spread over all classes, in [0, 1), in the losses of training and evaluation."""

    columns: ClassVar[Mapping[str, Role]] = {
        "image": Role("image", IMAGES, usual_inputs=("file_name", "path", "file")),
        "label": Role("label", LABELS, optional_in={"predict"}),
    }
    folder_keys = ("train_split", "eval_split", "test_split")
    auto_class, does, new_processor = "AutoModelForImageClassification", "classify images", "ViTImageProcessorPil"
    examples, example_type = "google/vit-base-patch16-224-in21k or microsoft/resnet-50", "vit"
    amounts: ClassVar[Mapping[str, float | None]] = {
        **{"crop": 1, "flip": 1, "rand_augment": 10, "color": 1, "shift": None, "rotate": 180, "erase": 1}
    }

    @property
    def metric_directions(self) -> dict[str, Direction | None]:  # type: ignore[override]  # depends on the number of classes
        has_few = "_images" in vars(self) and len(self.labels) <= MAX_FEW
        return directions("accuracy", "macro_f1", "mcc", *(() if has_few else ("top5_accuracy",)))

    @property
    def _is_of_transformers(self) -> bool:
        return self.model is not None or bool(self.model_config)

    def field_problems(self) -> Iterator[str]:
        yield from super().field_problems()
        yield from network_problems(self.network, self.network_args)
        if not self._is_of_transformers:
            return
        if self.network is not None:
            yield f"task.network={self.network} and {self._model_name} exclude each other. Set one of them to null."
        for item in fields(self):
            if item.name in ("width", "dropout") and (value := getattr(self, item.name)) != item.default:
                yield (
                    f"task.{item.name}={value} is for hftune's ConvNet, but {self._model_name} is set. Leave it out, or use "
                    "task.model_config."
                )

    @property
    def default_size(self) -> int | None:  # type: ignore[override]  # that of a model is known only from its image processor
        return None if self._is_of_transformers else MNIST_SIZE

    @cached_property
    def _form(self) -> Any:
        """Form of the images that the model is given: a Preparation, as its image processor does it, or a Layout."""
        from hftune.data.images import Layout

        if self._is_of_transformers:
            return super()._form
        mean, std = tuple(self.mean or MNIST_MEAN), tuple(self.std or MNIST_STD)
        return Layout(self.image_size or MNIST_SIZE, self.resize, mean, std)

    @property
    def _training_form(self) -> Form:
        """Form of the training images before augmentation: uncropped, if crops are cut from images of several sizes."""
        from hftune.data.images import SPARE, Uncropped

        if not (self.augmentation or {}).get("crop") or not (self._is_of_transformers or self.resize):
            return self._form
        height, width, num_channels = self._form.shape
        return Uncropped(round(SPARE * min(height, width)), num_channels)

    def datasets(self) -> dict[str, Images]:
        """Return the splits. A sample has an image (H, W, C) uint8 and a label, its class number."""
        return dict(self._images)

    @cached_property
    def _images(self) -> dict[str, Images]:
        from hftune.data.images import decode_images

        _ = self._form  # refuses a model that does not classify images before the data are read
        rows, numbers = self.rows, self.class_numbers()
        forms, column = {"train": self._training_form}, self.read_columns["image_column"]
        decoded = {split: decode_images(own, column, split, forms.get(split, self._form)) for split, own in rows.items()}
        return {split: replace(images, labels=numbers[split]) for split, images in decoded.items()}

    def build_model(self) -> nn.Module:
        from hftune.models.convnet import ConvNet
        from hftune.models.custom import Classifier, build_network

        if self._is_of_transformers:
            return super().build_model()
        if self.network is not None:
            return Classifier(build_network(self.network, self.network_args), len(self.labels))
        return ConvNet(**self._network(len(self.labels)))

    def _network(self, num_classes: int) -> dict[str, Any]:
        """Return what defines the network: the arguments of ConvNet, or path and arguments of your own network."""
        height, _, num_channels = self._form.shape
        sizes = {"image_size": height, "in_channels": num_channels}
        if self.network is not None:
            return {"network": self.network, "network_args": dict(self.network_args), **sizes, "num_classes": num_classes}
        return {**sizes, "width": self.width, "num_classes": num_classes, "dropout": self.dropout}

    def notices(self, datasets: Mapping[str, Images], model: nn.Module) -> list[str]:
        from datasets import Image

        from hftune.data import notices

        info = self.rows["train"].info
        messages = [*self.row_notices(), *notices.unused_splits(self, () if self.data_files else info.splits or ())]
        messages += self._classes.notices()
        pixels: dict[str, Any] = {split: images.pixels for split, images in datasets.items() if images.shapes_N3 is None}
        if self._is_of_transformers or len(pixels) < len(datasets):
            messages += self.model_notices(self._training_form) if self._is_of_transformers else ()
            column = self.read_columns["image_column"]
            encoded = {split: rows.cast_column(column, Image(decode=False))[column] for split, rows in self.rows.items()}
            return [*messages, *notices.shared_files(encoded)]
        if sum(pixels_NHWC.nbytes for pixels_NHWC in pixels.values()) > notices.MAX_BYTES:
            return messages
        return [*messages, *notices.shared(pixels, "images")]

    @property
    def augments(self) -> bool:
        return super().augments or self.mixup > 0 or self.cutmix > 0

    def augment(self, example: dict[str, Any], rng: np.random.RandomState) -> dict[str, Any]:
        """Change the image at random, and mix it with another one if the recipe asks for that.

        The other image is any of the training split, drawn and changed with the same ``rng``. So an image and what it is mixed
        with depend on seed, epoch and sample only: not on the batch, which processes would have to share.
        """
        from hftune.data.image_augmentation import cutmix, mixup, vary

        fill = [round(255 * value) for value in self._form.mean]

        def varied(pixels_HWC: np.ndarray) -> np.ndarray:
            return vary(pixels_HWC, self.augmentation or {}, self._form.shape[:2], self._form.resample, fill, rng)

        example = {**example, "image": varied(example["image"])}
        if not (self.mixup or self.cutmix):
            return example
        training = self._images["train"]
        other = training[rng.randint(len(training))]
        pixels_HWC, other_HWC = example["image"], varied(other["image"])
        is_mixup = rng.rand() < 0.5 if self.mixup and self.cutmix else self.mixup > 0
        alpha = self.mixup if is_mixup else self.cutmix
        share = float(rng.beta(alpha, alpha))
        if is_mixup:
            mixed_HWC = mixup(pixels_HWC, other_HWC, share)
        else:
            mixed_HWC, share = cutmix(pixels_HWC, other_HWC, share, rng)
        return {**example, "image": mixed_HWC, "other_label": other["label"], "share": share}

    def collate(self, examples: list[dict[str, Any]]) -> Batch:
        """Stack and normalize: pixel_values, or image for networks, (N, C, H, W) float32.

        labels are (N,) int64; for mixed images, shares of the classes (N, K) float32.
        """
        import torch
        from torch.nn.functional import one_hot

        labels = torch.tensor([example["label"] for example in examples])
        if "share" in examples[0]:
            share_N1 = torch.tensor([[example["share"]] for example in examples])
            other_N = torch.tensor([example["other_label"] for example in examples])
            one_NK, other_NK = (one_hot(values_N, len(self.labels)) for values_N in (labels, other_N))
            labels = share_N1 * one_NK + (1 - share_N1) * other_NK
        return {self._input: self.normalized([example["image"] for example in examples]), "labels": labels}

    @property
    def _input(self) -> str:
        return "pixel_values" if self._is_of_transformers else "image"

    def predictions(self, outputs: Any, model: nn.Module, batch: Batch) -> list[dict[str, Any]]:
        """Return the rows, with many classes also ``rank``: how many classes come before the true one.

        Of equally probable ones, as there are many in bf16, the first comes first, which is also the one that is predicted.
        """
        rows, logits_NK, labels_N = super().predictions(outputs, model, batch), logits(outputs), batch["labels"]
        if logits_NK.shape[-1] <= MAX_FEW:
            return rows
        order_NK = logits_NK.argsort(dim=-1, descending=True, stable=True)
        rank_N = (order_NK == labels_N[:, None]).int().argmax(-1)
        return late_rows(lambda ranks_N: [{**row, "rank": int(rank)} for row, rank in zip(rows, ranks_N, strict=True)], rank_N)

    def sample_images(self, outputs: Tensor, model: nn.Module, batch: Batch, indices: Sequence[int]) -> list[np.ndarray]:
        """Return the images as the model is given them, in three channels."""
        return self.shown(batch[self._input][list(indices)])

    def metrics(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        from statistics import fmean

        top = {"top5_accuracy": fmean(row["rank"] < TOP for row in rows)} if "rank" in rows[0] else {}
        return {**super().metrics(rows), **top}

    def save(self, model: nn.Module, directory: Path) -> None:
        """Write a model of transformers and its image processor for ``from_pretrained``.

        Of a network: model.safetensors, and config.json with all that is needed to build it and to prepare its inputs.
        """
        if self._is_of_transformers:
            super().save(model, directory)
            return
        Task.save(self, model, directory)
        network = self._network(len(self.labels))
        inputs = {"mean": list(self._form.mean), "std": list(self._form.std)}
        save_config({"model": network, "label_names": self.labels, **inputs}, directory)

    def load(self, directory: Path) -> nn.Module:
        """Load the model and the class names that ``save`` wrote.

        Raises:
            ConfigError: the recipe has a different network.
        """
        if self._is_of_transformers:
            return super().load(directory)
        saved = read_config(directory)
        check_same_network(saved["model"], self._network(len(saved["label_names"])), directory)
        self.label_names = saved["label_names"]
        return Task.load(self, directory)

    def example_inputs(self) -> list[np.ndarray]:
        import numpy as np

        images = self._images.get("eval", self._images["train"])
        pixels_NHWC = np.stack([self._whole(images[index]["image"]) for index in range(min(2, len(images)))])
        return list(pixels_NHWC[..., 0] if pixels_NHWC.shape[-1] == 1 else pixels_NHWC)

    def predict(self, model: nn.Module, inputs: list, probabilities: bool = False) -> list[dict[str, Any]]:
        """Return the most probable label, by name, and its probability for each path, Pillow image or uint8 array.

        ``probabilities`` adds those of all classes.
        """
        from hftune.data.images import read_input

        images = [read_input(value, index, self._form) for index, value in enumerate(inputs)]
        batch = self.collate([{"image": image, "label": 0} for image in images])
        outputs = model(batch[self._input].to(next(model.parameters()).device))
        return SingleLabel.answers(logits(outputs), self.labels, probabilities)

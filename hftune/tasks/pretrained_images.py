"""What the tasks with an image model of transformers share: its config, its head, its image processor, and augmentation.

torch and transformers are imported inside the methods, so that mistyped recipes are refused without waiting for them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hftune.config.keys import key
from hftune.data.files import model_folder_problems
from hftune.errors import did_you_mean, format_value
from hftune.tasks.folders import Pretrained, head_notice
from hftune.tasks.images import ImageTask, to_bytes

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn
    from transformers import PreTrainedConfig

    from hftune.data.images import Form

MIN_SIDE = 16
"""Minimum of image_size in pixels."""


@dataclass
class PretrainedImageTask(ImageTask, Pretrained):
    """A task on images for which transformers has models with a head."""

    model: str | None = key(None, changes="model")
    """Model name on the Hub (owner/name) or local folder: one of transformers that does what the task is, or the backbone of
    one, which gets a new head. null: a new model built from model_config."""
    model_revision: str | None = key(None, changes="model")
    """Commit, tag or branch of the model on the Hub. null: the newest commit."""
    model_config: dict[str, Any] = key(dict, changes="model")
    """Fields of the model's config to override; if model is null, the whole config of a new one, such as
    {model_type: segformer, ...}."""
    label_names: list[str] | None = None
    """Class names in the order of the class numbers. null: those of the data."""
    image_size: int | None = key(None, ge=MIN_SIDE)
    """Height and width in pixels, at least 16, to which images are scaled for the model. null: that of its image processor."""
    mean: list[float] | None = None
    """Mean of the pixel values (red, green, blue), in [0, 1]. null: that of the model's image processor."""
    std: list[float] | None = key(None, gt=0)
    """Standard deviation of the pixel values, with as many numbers as mean. Inputs are (pixel - mean) / std."""
    augmentation: dict[str, Any] | None = None
    """Random changes of training images, different in each epoch, in this order; 0 leaves one out. crop: smallest share of the
    image that a crop with a random aspect shows, such as 0.3. flip: probability of flipping left to right. color: largest
    relative change of brightness, contrast and saturation."""

    example_type: ClassVar[str]
    """A model_type of theirs, for messages."""
    new_processor: ClassVar[str]
    """Class of transformers of the image processor of a new model."""
    shows_all: ClassVar[bool] = False
    """Whether the model must be given whole images, not the middle of them."""
    amounts: ClassVar[Mapping[str, float | None]] = {"crop": 1, "flip": 1, "color": 1}
    """Largest values of the keys of ``augmentation``. None: the image size."""
    default_size: ClassVar[int | None] = None
    """Image size where the recipe does not say. None: it is known only from the model."""

    @property
    def _is_of_transformers(self) -> bool:
        """Whether the model is one of transformers, pretrained or new, rather than a network."""
        return True

    def field_problems(self) -> Iterator[str]:
        yield from super().field_problems()
        mean, std = self.mean, self.std
        if self._is_of_transformers:
            yield from model_folder_problems(self.model, self.model_config, self.example_type)
            if mean is not None and len(mean) == 1:
                yield f"task.mean={mean} is for grey images, but {self._model_name} is given RGB. Give three numbers, or null."
        if (mean is None) != (std is None) or (mean is not None and (len(mean) not in (1, 3) or len(std or ()) != len(mean))):
            yield f"task.mean={mean} and task.std={std} must both hold one number (grey) or three (red, green, blue)."
        for name, value in (self.augmentation or {}).items():
            if name not in self.amounts:
                hint = did_you_mean(name, self.amounts)
                yield f"task.augmentation.{name} is not a key of a recipe. Keys: {', '.join(self.amounts)}.{hint}"
                continue
            maximum = self.amounts[name] or self.image_size or self.default_size or math.inf
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= maximum:
                most = f"number from 0 to {maximum}" if maximum < math.inf else "number that is not negative"
                yield f"task.augmentation.{name}={format_value(value)} must be a {most}."

    @cached_property
    def _config(self) -> PreTrainedConfig:
        config = self.checked_config()
        if self.model is None and self.image_size is not None and isinstance(getattr(config, "image_size", None), int):
            config.image_size = self.image_size
        return config

    @cached_property
    def _form(self) -> Any:
        """Form of the images that the model is given, as its image processor does it."""
        from hftune.models.image_processor import DEFAULT_SIZE, Preparation, load_image_processor, new_image_processor

        config = self._config
        if self.model is not None:
            own = (self.image_size, self.mean, self.std)
            processor = load_image_processor(self.model, self.model_commit, *own, self.new_processor, self.shows_all)
        else:
            side = getattr(config, "image_size", None)
            side = self.image_size or (side if isinstance(side, int) else DEFAULT_SIZE)
            processor = new_image_processor(side, self.mean, self.std, self.new_processor)
        return Preparation(processor, self._model_name)

    def build_model(self) -> nn.Module:
        import transformers

        from hftune.models.image_processor import check_takes
        from hftune.models.pretrained import load_model

        names = dict(enumerate(self.labels))
        config = deepcopy(self._config)
        config.id2label, config.label2id = names, {name: number for number, name in names.items()}
        model = load_model(getattr(transformers, self.auto_class), self.model, config, self.model_commit)
        check_takes(model, self._form, self._model_name)
        return model

    def model_notices(self, training_form: Form | None = None) -> Iterator[str]:
        """Say how images are prepared, and where the head comes from."""
        from hftune.data.images import Uncropped

        height, width, _ = self._form.shape
        mean, std = (", ".join(f"{value:.3g}" for value in values) for values in (self._form.mean, self._form.std))
        where = "as its image processor prepares them" if self.model is not None else "scaled without keeping their aspect"
        yield f"{self._model_name}: images are RGB, {height} x {width} pixels, {where}; mean {mean}; standard deviation {std}."
        if isinstance(training_form, Uncropped):
            yield f"Training crops are cut from whole images with at most {training_form.side} pixels on the shorter side."
        if self.model is None:
            return
        yield head_notice(self._model_name, self._config, self.labels)

    @property
    def augments(self) -> bool:
        return any((self.augmentation or {}).values())

    def normalized(self, images: Sequence[np.ndarray]) -> Tensor:
        """Return images (H, W, C) uint8 as the model is given them, (N, C, H, W) float32, scaled if they are still whole."""
        import numpy as np
        import torch

        pixels_NHWC = torch.from_numpy(np.stack([self._whole(image_HWC) for image_HWC in images]))
        pixels_NCHW = pixels_NHWC.permute(0, 3, 1, 2)  # channels last in memory, which makes convolutions faster
        if self._form.is_bgr:
            pixels_NCHW = pixels_NCHW.flip(1)
        mean_C11, std_C11 = self._normalization()
        return (pixels_NCHW.float() / 255 - mean_C11) / std_C11

    def _whole(self, pixels_HWC: np.ndarray) -> np.ndarray:
        """Return an image that ``augment`` should crop, but did not see, at the model's size."""
        from hftune.data.image_augmentation import to_image

        return pixels_HWC if pixels_HWC.shape == self._form.shape else self._form.pixels(to_image(pixels_HWC), "An image")

    def _normalization(self) -> Iterator[Tensor]:
        """Yield mean and std, (C, 1, 1) float32."""
        import torch

        return (torch.tensor(values)[:, None, None] for values in (self._form.mean, self._form.std))

    def shown(self, inputs_NCHW: Tensor) -> list[np.ndarray]:
        """Return images as the model is given them, (H, W, 3) uint8, from what ``normalized`` made of them."""
        mean_C11, std_C11 = self._normalization()
        pixels_NCHW = inputs_NCHW.float().cpu() * std_C11 + mean_C11
        if self._form.is_bgr:
            pixels_NCHW = pixels_NCHW.flip(1)
        return [to_bytes(image_3HW) for image_3HW in pixels_NCHW.expand(-1, 3, -1, -1)]

    def save(self, model: nn.Module, directory: Path) -> None:
        """Write the model and its image processor for ``from_pretrained``."""
        from hftune.models.kinds import FILE_SIZE

        model.save_pretrained(directory, max_shard_size=FILE_SIZE)
        self._form.processor.save_pretrained(directory)

    def load(self, directory: Path) -> nn.Module:
        """Load the model and the class names that ``save`` wrote."""
        import transformers

        from hftune.models.image_processor import Preparation, load_image_processor
        from hftune.models.pretrained import load_saved, saved_config

        config = saved_config(directory)
        self.label_names = [config.id2label[number] for number in range(config.num_labels)]
        self._form = Preparation(load_image_processor(str(directory), None, None, None, None), str(directory))
        return load_saved(getattr(transformers, self.auto_class), directory, config)

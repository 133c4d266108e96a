"""How a transformers model wants its images: those of its image processor, as uint8 arrays and two numbers for each colour.

Split in two, because arrays of uint8 are a quarter of the size of what the processor returns, and because augmentation comes
between its scaling and its normalization. Independent of tasks and data sets.

Shape suffixes: H and W height and width, C channels (always 3: red, green and blue).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from transformers import AutoImageProcessor, PreTrainedConfig, PreTrainedModel

from hftune.data.images import checked
from hftune.errors import ConfigError, message_of
from hftune.models.pretrained import CONFIG, folder_of

FILES = ("preprocessor_config.json", "processor_config.json")
DEFAULT_SIZE = 224
DEFAULT_MEAN = DEFAULT_STD = (0.5, 0.5, 0.5)
SECOND_HALF = ("do_rescale", "do_normalize", "do_flip_channel_order", "include_top")
"""Settings of what image processors do after scaling and cropping. include_top: EfficientNet's second normalization."""
TOLERANCE = 1e-4
"""Largest difference to what the processor itself returns, whose values are around 1."""


def check_does(config: PreTrainedConfig, auto_class: str, key: str, does: str, examples: str) -> None:
    """Raise ConfigError, beginning with ``key``, unless an auto class has a model of this kind.

    Args:
        does, examples: what models of the auto class do, and names of some, for the message.
    """
    if type(config) not in getattr(transformers, auto_class)._model_mapping:
        raise ConfigError(
            f"{key} is a {config.model_type} model, which does not {does}. Name one that does, such as {examples}."
        )
    if getattr(config, "num_channels", 3) != 3:
        raise ConfigError(
            f"{key} has num_channels={config.num_channels}. hftune gives a transformers model images in RGB, 3 channels."
        )


def load_image_processor(
    model: str,
    commit: str | None,
    side: int | None,
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
    kind: str = "ViTImageProcessorPil",
    whole: bool = False,
) -> Any:
    """Load a model's image processor, and change its size, mean and std unless they are None.

    Args:
        kind: that of a model without one, by its class.
        whole: whether it must show the whole image, as ``uncropped`` does.

    Raises:
        ConfigError: the model has no image processor, and not all three are given.
    """
    folder = folder_of(model, commit, (*CONFIG, *FILES))
    if not any((folder / name).is_file() for name in FILES):
        if side is None or mean is None or std is None:
            raise ConfigError(
                f"task.model={model} has no image processor ({FILES[0]}). Copy that file from the model that it was made of, "
                "or set task.image_size, task.mean and task.std as that model was trained."
            )
        return new_image_processor(side, mean, std, kind)
    try:
        processor = AutoImageProcessor.from_pretrained(folder, backend="pil", trust_remote_code=False)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"task.model={model} has an image processor that cannot be loaded: {message_of(error)}.") from error
    if whole:
        processor = uncropped(processor, side)
    elif side is not None:  # all sizes in proportion, so that it returns squares of ``side`` pixels
        factor = side / Preparation(processor, f"task.model={model}").shape[0]
        for key in ("size", "crop_size"):
            if sizes := getattr(processor, key, None):
                scaled = {name: round(value * factor) for name, value in dict(sizes).items() if isinstance(value, int)}
                setattr(processor, key, type(sizes)(**scaled))
    if mean is not None:
        processor.image_mean, processor.image_std = list(mean), list(std or processor.image_std)
    return processor


def new_image_processor(
    side: int, mean: Sequence[float] | None, std: Sequence[float] | None, kind: str = "ViTImageProcessorPil"
) -> Any:
    """Return an image processor of transformers for a new model: it scales images to squares, as ViT's does."""
    return getattr(transformers, kind)(
        size={"height": side, "width": side}, image_mean=list(mean or DEFAULT_MEAN), image_std=list(std or DEFAULT_STD)
    )


def uncropped(processor: Any, side: int | None) -> Any:
    """Return an image processor that scales images without keeping their aspect instead of cropping or padding them.

    So what a model says of a place in its input is about the same place of the image.

    Args:
        side: height and width that it scales to; None: as its sizes say, of which the shorter side counts.
    """
    sizes = dict((getattr(processor, "do_center_crop", None) and processor.crop_size) or processor.size)
    shortest = sizes.get("shortest_edge") or sizes.get("max_height")
    height, width = (side or sizes.get(name) or shortest for name in ("height", "width"))
    processor.size = type(processor.size)(height=height, width=width)
    for setting in ("do_center_crop", "keep_aspect_ratio", "do_pad"):
        if getattr(processor, setting, None):
            setattr(processor, setting, False)
    return processor


def check_takes(model: PreTrainedModel, preparation: Preparation, name: str) -> None:
    """Let the model classify one image, before a training does. Raise ConfigError, beginning with ``name``, if it cannot."""
    height, width, _ = preparation.shape
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            model(pixel_values=torch.zeros(1, 3, height, width))
    except (ValueError, RuntimeError, TypeError) as error:
        raise ConfigError(
            f"{name} does not take images of {height} x {width} pixels: {message_of(error)}. Correct task.image_size, or "
            "set it to null."
        ) from error
    finally:
        model.train(was_training)


class Preparation:
    """What an image processor does, in two halves: ``pixels``, then (pixels / 255 - mean) / std.

    Args:
        processor: of transformers, with its "pil" backend.
        name: for messages: "task.model=...".

    Raises:
        ConfigError: the processor does something different; it says what.
    """

    def __init__(self, processor: Any, name: str):
        self.processor, self.name = processor, name
        noise_HWC = np.random.RandomState(0).randint(0, 256, (360, 480, 3)).astype(np.uint8)
        found = [self._processed(Image.fromarray(image_HWC)) for image_HWC in (noise_HWC, noise_HWC[:, :300])]
        if found[0].shape != found[1].shape or found[0].ndim != 3 or found[0].shape[0] != 3:
            shapes = " and ".join(str(array.shape) for array in found)
            raise ConfigError(f"{name}: its image processor returns {shapes} for two images, not RGB images of one size.")
        self.shape: tuple[int, int, int] = (*found[0].shape[1:], 3)
        height, width, _ = self.shape  # mean, std and the order of colours follow from what becomes of black, white and red
        black, white, red = (
            self._processed(Image.new("RGB", (width, height), colour))[:, height // 2, width // 2].astype(float)
            for colour in ((0, 0, 0), (255, 255, 255), (255, 0, 0))
        )
        self.is_bgr, std = abs(red[2] - white[2]) < TOLERANCE, 1 / (white - black)
        self.std, self.mean = tuple(std.tolist()), tuple((-black * std).tolist())
        prepared_HWC = self.pixels(Image.fromarray(noise_HWC), name)
        if prepared_HWC.shape != self.shape or np.abs(self.normalized(prepared_HWC) - found[0]).max() > TOLERANCE:
            raise ConfigError(
                f"{name}: its image processor does more than scale, crop and normalize, which hftune cannot repeat."
            )

    @property
    def key(self) -> list[str]:
        return [self.processor.to_json_string(), transformers.__version__]

    def _processed(self, image: Image.Image, **options: bool) -> np.ndarray:
        images = self.processor(images=image, **options)["pixel_values"]
        return np.asarray(images[0])

    def pixels(self, image: Image.Image, name: str) -> np.ndarray:
        """Return an image as the model sees it before normalization: RGB, of its size, uint8.

        Raises:
            DataError: it is deeper than 8 bits or transparent.
        """
        off = {step: False for step in SECOND_HALF if hasattr(self.processor, step)}
        pixels_CHW = self._processed(checked(image, name).convert("RGB"), **off)
        return np.ascontiguousarray(np.moveaxis(pixels_CHW, 0, -1), dtype=np.uint8)

    def normalized(self, pixels_HWC: np.ndarray) -> np.ndarray:
        """Return (C, H, W) in the model's order of colours. For training, ``task.collate`` computes this on whole batches."""
        pixels_CHW = np.moveaxis(pixels_HWC, -1, 0)
        pixels_CHW = pixels_CHW[::-1] if self.is_bgr else pixels_CHW
        mean_C11, std_C11 = (np.array(values)[:, None, None] for values in (self.mean, self.std))
        return (pixels_CHW / 255 - mean_C11) / std_C11

    @property
    def resample(self) -> int:
        """Pillow's number of the filter that scales images."""
        found = getattr(self.processor, "resample", None)
        return int(Image.Resampling.BILINEAR if found is None else found)

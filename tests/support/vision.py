"""Tiny models of images with text, with their processors, of three families; and drawn pictures on disk."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageTextToText,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    LlavaImageProcessorPil,
    LlavaProcessor,
    ProcessorMixin,
    Qwen2VLImageProcessorPil,
    Qwen2VLProcessor,
)

from hftune.data.byte_tokenizer import END_OF_TURN, IMAGE, PAD, PICTURED_CHATML, TURN, chat_tokenizer, train_bytes
from hftune.models.pretrained import load_tokenizer
from hftune.tasks import VisionChats

TEXT = {
    **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"num_key_value_heads": 2, "initializer_range": 0.3, "max_position_embeddings": 512},
}
TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 8}
HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
TOKENS = {"llava": [IMAGE], "idefics3": [IMAGE, "<fake_token_around_image>", "<end_of_utterance>", "<global-img>"]}
TOKENS["qwen2_vl"] = TOKENS["qwen2_5_vl"] = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
TEMPLATES = {
    "llava": PICTURED_CHATML,
    "idefics3": PICTURED_CHATML,
    "qwen2_vl": PICTURED_CHATML.replace(IMAGE, "<|vision_start|><|image_pad|><|vision_end|>"),
}
TEMPLATES["qwen2_5_vl"] = TEMPLATES["qwen2_vl"]
FAMILIES = [*TEMPLATES]


class Qwen2VLImagesProcessor(Qwen2VLProcessor):
    """Qwen2VLProcessor without its processor of videos, which needs torchvision."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None):
        self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
        self.image_token_id, self.video_token_id = tokenizer.convert_tokens_to_ids([self.image_token, self.video_token])
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


@dataclass
class QwenChats(VisionChats):
    """VisionChats for a folder with Qwen2VLImagesProcessor."""

    @cached_property
    def processor(self) -> Any:
        return qwen_processor(self.model)

    def load(self, directory: Path) -> Any:
        model = super(VisionChats, self).load(directory)
        self.processor = qwen_processor(directory)
        return model


def qwen_processor(folder: str | Path) -> Any:
    tokenizer = load_tokenizer(str(folder))
    images = AutoImageProcessor.from_pretrained(folder, backend="pil")
    return Qwen2VLImagesProcessor(images, tokenizer, chat_template=tokenizer.chat_template)


def tiny_model(family: str, folder: Path) -> Path:
    """Save a tiny model of a family with a processor, and return its folder."""
    folder = folder / family
    tokens = TOKENS[family]
    trained = train_bytes(
        ["what is this? and this?", "a red circle. a blue ring."] * 20, 320, (PAD, TURN, END_OF_TURN, *tokens)
    )
    tokenizer = chat_tokenizer(trained, pictured=True)
    tokenizer.add_special_tokens({"additional_special_tokens": [TURN, *tokens]})
    tokenizer.chat_template = TEMPLATES[family]
    if family == "llava":
        images = LlavaImageProcessorPil(size={"height": 32, "width": 32}, do_center_crop=False, **HALF)
        of_text = {"num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"}
        processor = LlavaProcessor(images, tokenizer, patch_size=8, image_token=IMAGE, **of_text)
    elif family == "idefics3":
        sizes = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}
        processor = Idefics3Processor(Idefics3ImageProcessorPil(**sizes), tokenizer, image_seq_len=4)
    else:
        images = Qwen2VLImageProcessorPil(patch_size=8, min_pixels=16 * 16, max_pixels=48 * 48)
        processor = Qwen2VLImagesProcessor(images, tokenizer)
    processor.chat_template = tokenizer.chat_template
    text = {
        **TEXT,
        "vocab_size": len(tokenizer),
        "pad_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }
    ids = {"image_token_id": tokenizer.convert_tokens_to_ids(tokens[0])}
    if family == "llava":
        vision = {"model_type": "clip_vision_model", "image_size": 32, **TOWER}
        config = {"text_config": {"model_type": "llama", **text}, "vision_config": vision}
    elif family == "idefics3":
        config = {
            "text_config": {"model_type": "llama", **text},
            "vision_config": {"image_size": 32, **TOWER},
            "scale_factor": 2,
        }
    else:
        rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
        tower = {"depth": 2, "num_heads": 2, "patch_size": 8, "hidden_size": 32}
        own = {"embed_dim": 32} if family == "qwen2_vl" else {"out_hidden_size": 32, "intermediate_size": 64}
        config = {"text_config": {**text, "rope_parameters": rope}, "vision_config": {**tower, **own}}
        ids["video_token_id"] = tokenizer.convert_tokens_to_ids(tokens[1])
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(family, **config, **ids))
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def pictures_on_disk(folder: Path) -> list[Path]:
    """Save three pictures of different sizes and colours."""
    paths = []
    for name, size in {"red": (40, 24), "blue": (32, 32), "green": (20, 44)}.items():
        image = Image.new("RGB", size, name)
        image.paste("white", (3, 5, 14, 11))
        image.save(folder / f"{name}.png")
        paths.append(folder / f"{name}.png")
    return paths

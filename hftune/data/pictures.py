"""Chats with pictures: what a row has of them, and how a model's processor writes them among the tokens. Independent of tasks.

A processor writes a placeholder in the text of a chat as many image tokens as the model makes features of the picture. These
tokens are part of a sample, and counted in its length. The pixels are not: pictures are read again when their step comes.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, SupportsIndex

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from PIL import Image

from hftune.data.chats import NO_LABEL, ChatError, ChatFormat, ChatSample, chat_of
from hftune.data.images import check_depth, open_stored, read_image, state_of
from hftune.data.messages import PARTS, PLACEHOLDER
from hftune.data.tokenized import Texts
from hftune.errors import ConfigError, DataError, first_line

SOURCES = ("image", "path", "url", "image_url")
"""Keys under which a part of a message has its picture itself: a path, bytes, or a Pillow image."""
MAY_NAME = re.compile(rf"^(large_)?string|json|\b({'|'.join(SOURCES)}): ")
"""What the type of a column, as Arrow writes it, has if messages in it may have pictures themselves: JSON, or these keys."""
OF_TEXT = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "text_replacement_offsets")
"""What a processor returns beside the inputs that it makes of pictures."""


def pictured_chat(
    row: Mapping[str, Any], columns: Mapping[str, str], completion_only: bool = True, **how: Any
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None, list[Any]]:
    """Return the checked messages of a row, its tools, and its pictures, in their order, not yet opened.

    Pictures are in a column of their own, in the order of their places in the messages: parts {"type": "image"}, or
    placeholders in their texts. Without any place they come first in the first message of the user, as TRL has it. Or a part
    has its picture itself.

    Args:
        columns: see ``chat_of``; and image_column.

    Raises:
        ChatError: a message cannot be used, or there are not as many places as pictures.
    """
    messages, tools = chat_of(row, columns, completion_only, pictured=True, **how)
    given = row.get(columns["image_column"]) if "image_column" in columns else None
    given = [] if given is None else [*given] if isinstance(given, list | tuple) else [given]
    if given and not any(part["type"] == "image" for message in messages for part in message[PARTS]):
        first = next((message for message in messages if message["role"] == "user"), messages[0])
        first[PARTS] = [{"type": "image"}] * len(given) + first[PARTS]
    found, used = [], 0
    for place, message in enumerate(messages):
        for number, part in enumerate(message[PARTS]):
            if part["type"] == "image":
                if (source := _source(part)) is None:
                    source, used = (_source({"image": given[used]}) if used < len(given) else None), used + 1
                found.append(source)
                if isinstance(found[-1], str) and found[-1].startswith(("http:", "https:", "data:")):
                    raise ChatError(f"Message {place} has its picture at {found[-1][:60]}. Give the path of a file instead.")
                message[PARTS][number] = {"type": "image"}
    if used != len(given):
        places = f"{used} {'place' if used == 1 else 'places'} for pictures ({PLACEHOLDER}, or a part of the type image)"
        where = f"column {columns['image_column']!r} has" if "image_column" in columns else "there are"
        raise ChatError(f"Its messages have {places}, and {where} {len(given)}.")
    return messages, tools, found


def _source(part: Mapping[str, Any]) -> Any:
    """Return the picture that a part of a message has itself, None if it has none."""
    source = next((part[key] for key in SOURCES if part.get(key) is not None), None)
    return source["url"] if isinstance(source, Mapping) and "url" in source else source


def open_picture(source: Any, name: str, folder: str | None = None) -> Image.Image:
    """Return a picture of a row, as ``datasets.Image(decode=False)`` has it; or of a path, or a Pillow image.

    Args:
        folder: to which a path is relative.

    Raises:
        DataError: it cannot be read; the message begins with ``name``.
    """
    if isinstance(source, Mapping):
        image, name = open_stored({"bytes": None, "path": None, **source}, name)
    else:
        source = Path(folder or "").expanduser() / Path(source).expanduser() if isinstance(source, str | Path) else source
        image, name = read_image(source, name)
    check_depth(image, name)
    return image


def content_hash(source: Any, image: Image.Image) -> int:
    """Return a number that stands for a picture's content, int64: by its file, or by its pixels if it comes from none."""
    stored = source.get("bytes") if isinstance(source, Mapping) else None
    content = stored if stored is not None else image.tobytes() + repr((image.size, image.mode)).encode()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little", signed=True)


class PicturedFormat(ChatFormat):
    """A processor of pictures and texts, with its chat template; see ``ChatFormat``.

    Args:
        processor: of transformers, with a tokenizer and an image processor.
        folder: to which paths of pictures are relative.

    Raises:
        ConfigError: as ``ChatFormat``; or the processor has no image token.
    """

    def __init__(self, processor: Any, tokenizer: Any, folder: str | None = None, **how: Any):
        self.processor, self.folder = processor, folder
        if getattr(processor, "image_token", None) is None or not hasattr(processor, "image_processor"):
            raise ConfigError(
                f"task.model has a {type(processor).__name__}, which writes no tokens for pictures. Name a model of images "
                "with text, such as HuggingFaceTB/SmolVLM-256M-Instruct."
            )
        self.image_token, self.image_id = processor.image_token, tokenizer.convert_tokens_to_ids(processor.image_token)
        super().__init__(tokenizer, **how)

    def read(
        self, row: Mapping[str, Any], columns: Mapping[str, str], completion_only: bool = True, **how: Any
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
        """Return the messages of a row and its tools; what the processor writes for each picture is in its part.

        Raises:
            ChatError: also if a picture is missing, broken, or refused by the processor.
        """
        return self.opened(row, columns, completion_only, **how)[:2]

    def opened(
        self, row: Mapping[str, Any], columns: Mapping[str, str], completion_only: bool = True, **how: Any
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None, list[Image.Image]]:
        """Return what ``read`` does, and the pictures."""
        messages, tools, sources = pictured_chat(row, columns, completion_only, **how)
        try:
            pictures = [open_picture(source, f"Picture {place}", self.folder) for place, source in enumerate(sources)]
        except DataError as error:
            raise ChatError(str(error)) from error
        parts = [part for message in messages for part in message[PARTS] if part["type"] == "image"]
        written = self.written(pictures)
        for part, source, picture, text in zip(parts, sources, pictures, written, strict=True):
            part |= {"written": text, "hash": content_hash(source, picture)}
        return messages, tools, pictures

    def written(self, pictures: Sequence[Image.Image]) -> list[str]:
        """Return what the processor writes for each picture."""
        return [text for picture in pictures for text in self._processed([[picture]])[0]]

    def pixels(self, pictures: Sequence[Sequence[Image.Image]]) -> dict[str, Any]:
        """Return the inputs that a model takes of the pictures of samples, each with one or more, as tensors on the CPU."""
        return self._processed(pictures)[1]

    def _processed(self, pictures: Sequence[Sequence[Image.Image]]) -> tuple[list[str], dict[str, Any]]:
        texts = [self.image_token * len(own) for own in pictures]
        try:
            found = self.processor(
                images=[[*own] for own in pictures],
                text=texts,
                return_tensors="pt",
                padding=True,
                return_text_replacement_offsets=True,
            )
        except Exception as error:  # processors fail in all ways
            raise ChatError(f"The processor cannot take its picture: {first_line(error)}.") from error
        written = [place["replacement"] for own in found["text_replacement_offsets"] for place in own]
        return written, {name: value for name, value in found.items() if name not in OF_TEXT}

    @cached_property
    def blank(self) -> tuple[list[int], dict[str, Any]]:
        """The image tokens and the inputs of a white picture, for texts that have none; see ``hftune.tasks.vision_chats``."""
        (text,), pixels = self._processed([[Image.new("RGB", (32, 32), "white")]])
        return [self.image_id] * text.count(self.image_token), pixels

    @property
    def key(self) -> list[Any]:
        return [*super().key, type(self.processor).__name__, self.processor.to_json_string(), self.folder]

    def samples(
        self, messages: Sequence[Mapping[str, Any]], tools: list | None = None, train_on: str = "assistant"
    ) -> list[ChatSample]:
        """Return the samples of a chat; image tokens are trained in none of them."""
        found = super().samples(messages, tools, train_on)
        for sample in found:
            sample.labels[:] = [NO_LABEL if label == self.image_id else label for label in sample.labels]
        return found

    def beside(self, messages: Sequence[Mapping[str, Any]], samples: Sequence[ChatSample]) -> dict[str, list[Any]]:
        """Return the hashes of the pictures of each sample: those that come before its last answer."""
        parts = [part for message in messages for part in message[PARTS] if part["type"] == "image"]
        ends = [0, *accumulate(part["written"].count(self.image_token) for part in parts)]
        counts = [ends.index(sample.input_ids.count(self.image_id)) for sample in samples]
        return {"pictures": [np.array([part["hash"] for part in parts[:count]], np.int64) for count in counts]}

    def _shown(self, message: Mapping[str, Any]) -> dict[str, Any]:
        shown = super()._shown(message)
        parts = shown.pop(PARTS, None) or [{"type": "text", "text": shown["content"]}]
        return {**shown, "content": [part if part["type"] == "text" else {"type": "image"} for part in parts]}

    def _render(self, messages: Sequence[Mapping[str, Any]], *args: Any, **how: Any) -> str:
        """Return what the template writes, with the image tokens of each picture.

        Raises:
            ChatError: it refuses the messages, or leaves out a picture.
        """
        pieces = super()._render(messages, *args, **how).split(self.image_token)
        written = [part["written"] for message in messages for part in message.get(PARTS, ()) if part["type"] == "image"]
        if len(pieces) != len(written) + 1:
            raise ChatError(
                f"Message {len(messages) - 1}: up to here the chat template writes {len(pieces) - 1} times {self.image_token} "
                f"for {len(written)} pictures."
            )
        return pieces[0] + "".join(text + piece for text, piece in zip(written, pieces[1:], strict=True))

    def _check_control_tokens(self, messages: Sequence[Mapping[str, Any]], tools: list | None) -> None:
        super()._check_control_tokens([{**message, PARTS: None} for message in messages], tools)


class PicturedTexts(Texts):
    """Tokenized chats with pictures: a sample also has ``images``, a list of Pillow images, which are read on access.

    Args:
        load: returns the first pictures of a row: by its number, and how many.
    """

    def __init__(self, texts: Texts, load: Callable[[int, int], list[Image.Image]]):
        super().__init__(texts.contents())
        self.load = load

    def __getitem__(self, index: SupportsIndex) -> dict[str, Any]:  # type: ignore[override]  # no slices
        sample = super().__getitem__(index)
        return {**sample, "images": self.load(int(sample["row"]), len(sample["pictures"]))}


def undecoded(rows: datasets.Dataset) -> datasets.Dataset:
    """Return rows whose columns of images, or of lists of them, are read as they are stored."""
    for name, kind in rows.features.items():
        if isinstance(kind, datasets.Image):
            rows = rows.cast_column(name, datasets.Image(decode=False))
        elif isinstance(getattr(kind, "feature", None), datasets.Image):
            rows = rows.cast_column(name, datasets.List(datasets.Image(decode=False)))
    return rows


def states_of_pictures(rows: Any, columns: Mapping[str, str], folder: str | None) -> list[tuple[int, int] | None]:
    """Return size and time of change of each file that the rows name, None if it is missing; not of pictures in the rows."""
    paths: list[str] = []
    if "image_column" in columns:
        values = rows.data.column(columns["image_column"])
        while pa.types.is_list(values.type) or pa.types.is_large_list(values.type):
            values = pc.list_flatten(values)
        if pa.types.is_struct(values.type):
            values = pc.struct_field(values, "path").filter(pc.struct_field(values, "bytes").is_null())
        paths = [path for path in values.to_pylist() if isinstance(path, str)]
        rows = rows.remove_columns(columns["image_column"])
    texts = [columns[key] for key in ("messages_column", "prompt_column", "completion_column") if key in columns]
    if any(MAY_NAME.search(str(rows.features.arrow_schema.field(name).type)) for name in texts):
        for row in rows:
            with suppress(ChatError):  # which encoding it reports
                parts = [part for message in chat_of(row, columns, pictured=True)[0] for part in message[PARTS]]
                paths += [source for source in map(_source, parts) if isinstance(source, str)]
    return [state_of(Path(folder or "").expanduser() / Path(path).expanduser()) for path in paths]

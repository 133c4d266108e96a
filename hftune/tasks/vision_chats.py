"""Chats with pictures: a model of images with text learns the assistant's part, as its processor and template write the chats.

torch, transformers and datasets are imported inside the methods, so that mistyped recipes are refused without waiting for them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hftune.config.keys import key
from hftune.data.columns import IMAGES, Role
from hftune.errors import ConfigError, DataError, first_line
from hftune.tasks.chat_task import ASKED, ChatTask, row_of
from hftune.tasks.chats import Chats
from hftune.tasks.text import NO_LABEL

if TYPE_CHECKING:
    from datasets import Dataset
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from hftune.data.pictures import PicturedFormat, PicturedTexts
    from hftune.data.tokenized import Ragged, Texts
    from hftune.task import Batch

FITTING = "The two do not fit: copy the processor from the model that it was made of."
OF_TOKENS = ("input_ids", "attention_mask", "labels", "mm_token_type_ids", "packing")
"""What a batch has of tokens; the rest is made of pictures."""


@dataclass
class VisionChats(Chats):
    """Learn to answer in chats with pictures. As ``Chats``; the tokens that stand for pictures are read, and never trained.

    Pictures are opened before training, to be checked and to have their tokens counted, and again when their step comes.
    """

    model: str | None = key("HuggingFaceTB/SmolVLM-256M-Instruct", changes="model")
    """Model of images with text, with its processor: name on the Hub (owner/name) or local folder. null: a new LLaVA built from
    model_config, with a byte-level tokenizer trained on the chats."""
    image_column: str | None = None
    """Column of the pictures of each chat: one, or a list, as images or as paths of files. null: images or image, if there is
    one; or else pictures are named in the messages."""
    image_folder: str | None = key(None, changes="data")
    """Folder to which the paths of pictures are relative. null: the one from which training is started."""
    freeze_vision: bool = key(True, changes="model")
    """Whether the vision tower stays as it is, and gets no adapters. What connects it to the language model is trained."""

    auto_class = "AutoModelForImageTextToText"
    prepares_as_needed = False
    rows_each = 100
    columns: ClassVar[Mapping[str, Role]] = {**ChatTask.columns, "image": Role("image", IMAGES, optional_in={"train"})}
    libraries = (*Chats.libraries, "hftune.data.pictures")

    def field_problems(self) -> Iterator[str]:
        yield from super().field_problems()
        if self.image_folder is not None and not Path(self.image_folder).expanduser().is_dir():
            yield f"task.image_folder={self.image_folder}: there is no such folder."
        if self.model is None:
            if self.model_config.get("model_type") != "llava":
                yield "task.model=null builds a new LLaVA: set task.model_config.model_type=llava, or name a model."
            if self.freeze_vision:
                yield "task.freeze_vision=true would leave the vision tower of a new model as it was drawn. Set it to false."

    # The processor

    @cached_property
    def processor(self) -> Any:
        """What makes a model's inputs of pictures, and tokens of both."""
        from hftune.data.byte_tokenizer import IMAGE
        from hftune.models.pretrained import load_processor, new_processor

        if self.model is None:
            return new_processor(self.named_config, self.text_tokenizer, IMAGE)
        return load_processor(self.model, self.model_commit)

    def named_tokenizer(self) -> PreTrainedTokenizerBase:
        return self.processor.tokenizer

    def new_tokenizer(self, cached: Callable[[Callable[[], Any]], Any]) -> PreTrainedTokenizerBase:
        from hftune.data.byte_tokenizer import END_OF_TURN, IMAGE, PAD, TURN, chat_tokenizer, train_bytes

        special = (PAD, TURN, END_OF_TURN, IMAGE)
        trained = cached(lambda: train_bytes(self.training_texts(), self.vocab_size, special))
        return chat_tokenizer(trained, pictured=True)

    def new_format(self, **how: Any) -> PicturedFormat:
        from hftune.data.pictures import PicturedFormat

        return PicturedFormat(self.processor, self.text_tokenizer, self.image_folder, **how)

    @property
    def _format(self) -> PicturedFormat:
        return self.chat_format  # type: ignore[return-value]  # that of new_format

    # Data

    def load_source(self, split: str, source_split: str) -> Dataset:
        """Return all rows of a split, with images as they are stored."""
        from hftune.data.pictures import undecoded

        return undecoded(super().load_source(split, source_split))

    def find_columns(self, rows: Dataset) -> dict[str, str]:
        usual = (name for name in ("images", *IMAGES) if name in rows.column_names)
        column = self.image_column or next(usual, None)
        return super().find_columns(rows) | ({} if column is None else {"image_column": column})

    def messages_of(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        from hftune.data.pictures import pictured_chat

        return pictured_chat(row, self.read_columns)[0]

    def depends_on(self, split: str) -> list[Any]:
        from hftune.data.pictures import states_of_pictures

        return [*super().depends_on(split), states_of_pictures(self.rows[split], self.read_columns, self.image_folder)]

    def tokenized(self, split: str) -> PicturedTexts:
        """Return the samples of a split; besides what ``Chats`` says, with hashes of their pictures, and images on access."""
        from hftune.data.pictures import PicturedTexts

        return PicturedTexts(super().tokenized(split), partial(self._images, split))

    def _images(self, split: str, row: int, count: int) -> list[Any]:
        """Return the first pictures of a row."""
        from hftune.data.pictures import open_picture, pictured_chat

        if not count:
            return []
        sources, number = pictured_chat(self.rows[split][row], self.read_columns)[2][:count], self.row_of(split)(row)
        name = f"Row {number} of the {split} split, picture"
        return [open_picture(source, f"{name} {place}", self.image_folder) for place, source in enumerate(sources)]

    def datasets(self) -> dict[str, Texts]:
        found = super().datasets()
        self._made = found["train"]
        return found

    def of_these(self, samples: Texts, index: int) -> str:
        return f", {self._num_image_tokens(samples, index):,} of them of its pictures"

    def _num_image_tokens(self, samples: Texts, index: int) -> int:
        return int((samples.column("input_ids").take([index]).flat == self._format.image_id).sum())

    def compared(self, samples: Texts) -> Any:
        import numpy as np

        from hftune.data.tokenized import Ragged

        columns: list[Any] = [samples.column(name) for name in ("input_ids", "pictures")]
        both = zip(*(column.rows() for column in columns), strict=True)
        return Ragged.of([np.concatenate(own, dtype=np.int64) for own in both])

    def collate(self, examples: Sequence[dict[str, Any]]) -> Batch:
        """Pad the tokens as ``Chats``, and let the processor make the model's inputs of all pictures, in the order of the rows.

        These have no row for each sample: which ones belong to which follows from the image tokens. A batch without any gets a
        white picture, whose tokens are beyond the end of the first row, masked, so that every batch is computed by the vision
        tower: FSDP has all processes gather its weights together.
        """
        import torch
        from torch.nn.functional import pad

        examples = [*examples]  # each is read once
        batch = super().collate(examples)
        if pictures := [example["images"] for example in examples if example["images"]]:
            batch |= self._format.pixels(pictures)
        else:
            ids_NT, mask_NT, pixels = self._with_blank(batch["input_ids"], batch["attention_mask"], is_left=False)
            more = ids_NT.shape[1] - batch["labels"].shape[1]
            batch |= {"input_ids": ids_NT, "attention_mask": mask_NT, **pixels}
            batch["labels"] = pad(batch["labels"], (0, more), value=NO_LABEL)
        return {name: value.contiguous() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}

    def _with_blank(self, ids_NT: Tensor, mask_NT: Tensor, is_left: bool) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return tokens and mask with the tokens of a white picture where nothing reads them, and the inputs made of it."""
        import torch
        from torch.nn.functional import pad

        tokens, pixels = self._format.blank
        sides = (len(tokens), 0) if is_left else (0, len(tokens))
        ids_NT, mask_NT = pad(ids_NT, sides, value=self.text_tokenizer.pad_token_id), pad(mask_NT, sides)
        places = slice(len(tokens)) if is_left else slice(-len(tokens), None)
        ids_NT[0, places] = torch.tensor(tokens, device=ids_NT.device)
        return ids_NT, mask_NT, dict(pixels)

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """Return the tokens, their mask, what was made of pictures and, if the model asks for it, which tokens are images."""
        return {**super().inputs(batch), **self.beside_batch(batch), **self._kinds(batch["input_ids"])}

    def _kinds(self, ids_NT: Tensor) -> dict[str, Tensor]:
        if "mm_token_type_ids" not in self.processor.model_input_names:
            return {}
        return {"mm_token_type_ids": (ids_NT == self._format.image_id).int()}

    # The model

    @property
    def needs_whole(self) -> str | None:
        """Layers of a trained tower whose features are not read are found by a trial."""
        return super().needs_whole if self.freeze_vision else "to build"

    def new_config(self, of_tokens: Mapping[str, Any]) -> dict[str, Any]:
        from hftune.data.byte_tokenizer import IMAGE

        text = {**self.model_config.get("text_config", {}), **of_tokens}
        image_id = self.text_tokenizer.convert_tokens_to_ids(IMAGE)
        return {**self.model_config, "text_config": text, "image_token_id": image_id}

    def build_model(self) -> PreTrainedModel:
        """Load the model, or build a new one, and freeze its vision tower, or what of it does not count.

        Raises:
            ConfigError: the processor does not fit the model.
            DataError: it makes another number of features of pictures than they have tokens.
        """
        model = super().build_model()
        image_id, own = self._format.image_id, getattr(model.config, "image_token_id", None)
        if own not in (None, image_id):
            raise ConfigError(
                f"task.model={self.model}: its processor writes token {image_id} for pictures, and the model reads {own}. Copy "
                "the processor from the model that it was made of."
            )
        tower = model.get_encoder(modality="image")
        if tower is model:
            raise ConfigError(f"task.model={self.model} is a {type(model).__name__}, which has no vision tower that is known.")
        if self.freeze_vision:
            tower.requires_grad_(False)
        if all(parameter.device.type != "meta" for parameter in tower.parameters()):
            self._check_features(model, tower)
        return model

    def _check_features(self, model: PreTrainedModel, tower: Any) -> None:
        """Let the model make features of the pictures of two samples, those with the fewest and with the most image tokens.

        Parts of the tower that features do not depend on, such as layers behind the one that is read, are frozen.
        """
        import numpy as np
        import torch

        from hftune.models.trial import trying

        ids: Ragged = self._made.column("input_ids")  # type: ignore[assignment]
        counts_N = np.diff(np.concatenate([[0], np.cumsum(ids.flat == self._format.image_id)])[ids.offsets])
        order = np.argsort(counts_N, kind="stable")[np.count_nonzero(counts_N == 0) :]
        for index in {*map(int, order[[0, -1]])} if len(order) else ():
            number, sample = int(counts_N[index]), self._made[index]
            about = (
                f"The train split cannot be trained on, at row {self.row_of('train')(int(sample['row']))}: the processor of "
                f"task.model={self.model} writes {number:,} image tokens for its pictures, and the model "
            )
            try:
                with trying(model), torch.enable_grad():
                    found = model.get_image_features(**self._format.pixels([sample["images"]]), return_dict=True)
                    features = [own.flatten(0, -2) for own in found.pooler_output]
                    trained = [parameter for parameter in tower.parameters() if parameter.requires_grad]
                    total = torch.stack([own.float().sum() for own in features]).sum()
                    gradients = torch.autograd.grad(total, trained, allow_unused=True) if trained else ()
            except (RuntimeError, ValueError, TypeError) as error:
                raise DataError(f"{about}cannot read them: {first_line(error)}. {FITTING}") from error
            if (made := sum(map(len, features))) != number:
                raise DataError(f"{about}makes {made:,} features of them. {FITTING}")
            for parameter, gradient in zip(trained, gradients, strict=True):
                parameter.requires_grad_(gradient is not None)

    def notices(self, datasets: Mapping[str, Any], model: PreTrainedModel) -> list[str]:
        messages = super().notices(datasets, model)
        tower = model.get_encoder(modality="image").parameters()
        frozen = sum(parameter.numel() for parameter in tower if not parameter.requires_grad)
        if frozen and not self.freeze_vision and not hasattr(model, "peft_config"):
            messages.append(
                f"{frozen:,} parameters of the vision tower are behind the layer that is read, and stay as they are."
            )
        return messages

    # Evaluation and use

    def beside_batch(self, batch: Batch) -> dict[str, Any]:
        return {name: value for name, value in batch.items() if name not in OF_TOKENS}

    def beside(self, inputs: Sequence[Any]) -> dict[str, Any]:
        chats = [self._format.opened(row_of(value), ASKED, has_answer=False, as_written=True)[2] for value in inputs]
        pictures = [own for own in chats if own]
        return self._format.pixels(pictures) if pictures else dict(self._format.blank[1])

    def prompt_inputs(self, ids_NT: Tensor, mask_NT: Tensor, beside: Mapping[str, Any]) -> dict[str, Any]:
        if not bool((ids_NT == self._format.image_id).any()):  # what is beside them is of a white picture
            ids_NT, mask_NT, _ = self._with_blank(ids_NT, mask_NT, is_left=True)
        return {**super().prompt_inputs(ids_NT, mask_NT, None), **beside, **self._kinds(ids_NT)}

    def pieces_of(self, ids: Any, labels: Any) -> list[tuple[str, bool]]:
        return [(self._short(text), is_trained) for text, is_trained in super().pieces_of(ids, labels)]

    def _text(self, ids: Sequence[int]) -> str:
        return self._short(super()._text(ids))

    def _short(self, text: str) -> str:
        """Return a text with the number of image tokens in the place of many."""
        token = self._format.image_token
        return re.sub(rf"(?:{re.escape(token)})+", lambda run: f"<image x {len(run[0]) // len(token)}>", text)

    def raw_inputs(self, rows: Mapping[str, list]) -> list:
        """Return what some rows of a table ask, each with its pictures."""
        asked = super().raw_inputs({name: values for name, values in rows.items() if name != "image"})
        if "image" not in rows:
            return asked
        pictures = [own if isinstance(own, list) else [own] for own in rows["image"]]
        return [{**row_of(value), "images": own} for value, own in zip(asked, pictures, strict=True)]

    def save(self, model: PreTrainedModel, directory: Path) -> None:
        """Write model and processor for ``from_pretrained``."""
        super().save(model, directory)
        self.processor.chat_template = self.text_tokenizer.chat_template
        self.processor.save_pretrained(directory)

    def load(self, directory: Path) -> PreTrainedModel:
        from hftune.models.pretrained import load_processor

        self.processor = load_processor(str(directory))
        return super().load(directory)

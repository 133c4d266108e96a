"""Masked language modelling with AutoModelForMaskedLM: an encoder learns the language of texts of your own.

torch, transformers and datasets are imported inside the methods, so that mistyped recipes are refused without waiting for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from hftune.config.keys import key
from hftune.errors import ConfigError, DataError
from hftune.tasks.blocks import BlockTask
from hftune.tasks.text import NO_LABEL, check_inputs, pieces

if TYPE_CHECKING:
    import numpy as np
    from datasets import Dataset
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from hftune.data.masking import Masking, TextBlocks

BEST = 5
"""Tokens that ``predict`` names for each mask."""
INSTEAD = "Name an encoder such as answerdotai/ModernBERT-base; recipe=language_modeling trains decoders."


@dataclass
class MaskedLanguageModeling(BlockTask):
    """Predict masked tokens from those on both sides. The loss is cross-entropy; an item is a masked token. The texts of a
    split are joined and cut into blocks, or each is a sample. Each epoch has its own masks; those of evaluations are fixed."""

    text_column: str | None = None
    """Column of the texts; empty ones are left out. null: text or another usual name, or the only column of texts."""
    join_texts: bool = key(True, changes="data")
    """Whether texts are joined, with a separator between two of them, and cut into blocks of block_length tokens. false: no
    sample has two texts, and long ones are cut into several samples of equal length."""
    block_length: int = key(512, ge=4, changes="data")
    """Tokens of a sample at most, with the special ones before and after it."""
    masking: Literal["tokens", "words", "spans"] = key("tokens", changes="data")
    """What is masked as a whole: single tokens, words, or spans of 1 to 10 words, 3.8 in the mean, as in SpanBERT."""
    mlm_probability: float = key(0.15, gt=0, lt=1, changes="data")
    """Share of the tokens to mask and to predict, special ones not counted: of each sample, and at least one. 0.3 is usual for
    ModernBERT."""
    mask_replace_prob: float = key(0.8, ge=0, le=1, changes="data")
    """Share of these that are replaced by the mask token."""
    random_replace_prob: float = key(0.1, ge=0, le=1, changes="data")
    """Share of these that are replaced by other tokens, drawn at random. The remaining ones stay as they are."""

    auto_class = "AutoModelForMaskedLM"
    libraries = (*BlockTask.libraries, "hftune.data.masking")

    def field_problems(self) -> Iterator[str]:
        yield from super().field_problems()
        if self.mask_replace_prob + self.random_replace_prob > 1:
            yield (
                f"task.mask_replace_prob={self.mask_replace_prob} and task.random_replace_prob={self.random_replace_prob} are "
                "more than 1 together. Lower one of them."
            )

    @property
    def texts_run_on(self) -> bool:  # type: ignore[override]  # as its keys say
        return self.join_texts

    @cached_property
    def text_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the model, or, for a new one, WordPiece, trained on the texts.

        Raises:
            ConfigError: the model cannot fill masks.
        """
        from transformers import MODEL_FOR_MASKED_LM_MAPPING

        config, tokenizer = self.named_config, super().text_tokenizer
        what = f"task.model={self.model}" if self.model is not None else f"task.model_config.model_type={config.model_type}"
        if tokenizer.mask_token_id is None:
            raise ConfigError(f"{what} has a tokenizer without a mask token, and so cannot fill masks. {INSTEAD}")
        kind = "has an encoder and a decoder" if config.is_encoder_decoder else "is a decoder"
        is_decoder = config.is_encoder_decoder or getattr(config, "is_decoder", False)
        if is_decoder or type(config) not in MODEL_FOR_MASKED_LM_MAPPING:
            kind = kind if is_decoder else "has no head in transformers that fills masks"
            raise ConfigError(f"{what} {kind}. Masked language modelling takes encoders. {INSTEAD}")
        return tokenizer

    @cached_property
    def _masking(self) -> Masking:
        import numpy as np

        from hftune.data.masking import Masking

        tokenizer = self.text_tokenizer
        is_special = np.zeros(len(tokenizer), bool)
        is_special[tokenizer.all_special_ids] = True
        shares = self.mlm_probability, self.mask_replace_prob, self.random_replace_prob
        return Masking(self.masking, *shares, tokenizer.mask_token_id, is_special)

    def new_blocks(self, rows: Dataset, split: str, name: str, count: int | None) -> TextBlocks:
        from hftune.data.blocks import token_stream
        from hftune.data.masking import TextBlocks

        tokenizer, column = self.text_tokenizer, self.read_columns["text_column"]
        before, after = around = special_tokens(tokenizer)
        if self.masking != "tokens" and not knows_words(tokenizer):
            raise ConfigError(
                f"task.masking={self.masking}: the tokenizer of task.model={self.model} ({type(tokenizer).__name__}) does not "
                "say which word a token belongs to. Use tokens."
            )
        if self.block_length <= len(before) + len(after):
            raise ConfigError(f"task.block_length={self.block_length} has room for the special tokens alone. Raise it.")
        row_of = int if name == split else self.mixed.row_name
        stream = token_stream(rows, column, tokenizer, name, row_of, marks_words=True)
        separators = (tokenizer.sep_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
        separator = next(token for token in separators if token is not None) if self.join_texts else None
        masking = None if split == "train" else self._masking
        blocks = TextBlocks(stream, self.block_length, around, separator, count, masking)
        if not blocks.has_other(tokenizer.all_special_ids):
            raise DataError(
                f"The {name} split has nothing to mask in column {column!r}: {len(rows):,} rows without a token that "
                f"the tokenizer of task.model={self.model} knows. Use texts in its language."
            )
        return blocks

    def augment(self, example: Mapping[str, np.ndarray], rng: np.random.RandomState) -> dict[str, np.ndarray]:
        return self._masking(example, rng)

    def marked(self, example: Mapping[str, Any]) -> list[tuple[str, bool]]:
        return pieces(self.text_tokenizer, example["input_ids"].tolist(), example["labels"] != NO_LABEL)

    def transformers_pipeline(self) -> dict[str, Any]:
        return {"task": "fill-mask"}

    def example_inputs(self) -> list[str]:
        texts = (text.split()[:8] for text in self.rows.get("eval", self.rows["train"])[self.read_columns["text_column"]])
        masked = (" ".join([*words[:3], self.text_tokenizer.mask_token, *words[4:]]) for words in texts if len(words) > 4)
        return [text for text, _ in zip(masked, range(2), strict=False)]

    def predict(self, model: PreTrainedModel, inputs: list[str]) -> list[dict[str, Any]]:
        """Return each text ``filled`` with the likeliest token at each mask, and the BEST ``tokens`` of each mask.

        Raises:
            DataError: a text has no mask, or more tokens than the model reads at once.
        """
        check_inputs(inputs)
        tokenizer, rows = self.text_tokenizer, []
        encoded = tokenizer(inputs, verbose=False)["input_ids"]
        for index, ids in enumerate(encoded):
            if tokenizer.mask_token_id not in ids:
                raise DataError(f"Input {index} has no {tokenizer.mask_token}. Write it where a token is to be filled in.")
            if len(ids) > self.block_length:
                raise DataError(
                    f"Input {index} has {len(ids):,} tokens; the model was trained on {self.block_length} at most "
                    "(task.block_length). Shorten it."
                )
        batch = self.collate([{"input_ids": ids} for ids in encoded])
        logits_NTV = model(**{name: tensor.to(model.device) for name, tensor in batch.items()}).logits
        for text, ids, logits_TV in zip(inputs, encoded, logits_NTV, strict=True):
            places = [place for place, token in enumerate(ids) if token == tokenizer.mask_token_id]
            tops = logits_TV[places, : len(tokenizer)].float().softmax(-1).topk(BEST)
            tokens = [
                [
                    {"token": tokenizer.decode([token]).strip(), "probability": round(probability, 6)}
                    for token, probability in zip(*best, strict=True)
                ]
                for best in zip(tops.indices.tolist(), tops.values.tolist(), strict=True)
            ]
            filled = text
            for best in tokens:
                filled = filled.replace(tokenizer.mask_token, best[0]["token"], 1)
            rows.append({"filled": filled, "tokens": tokens})
        return rows


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Return the ids of the special tokens that a tokenizer puts before and after a text."""
    ids, inner = (tokenizer("a", add_special_tokens=adds)["input_ids"] for adds in (True, False))
    start = next(start for start in range(len(ids)) if ids[start : start + len(inner)] == inner)
    return ids[:start], ids[start + len(inner) :]


def knows_words(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether a tokenizer says which word a token belongs to."""
    return tokenizer.is_fast and len(set(tokenizer("a b c", add_special_tokens=False).word_ids())) == 3

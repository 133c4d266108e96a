"""A text as one stream of tokens, cut into blocks of equal length to learn from. Knows no model and no file."""

from __future__ import annotations

from collections.abc import Sequence

import datasets
import numpy as np
from transformers import PreTrainedTokenizerBase

from hftune.data.cache import cached_map
from hftune.data.text import drawn, tokenizer_key
from hftune.data.word_tokenizer import has_whole_words
from hftune.errors import DataError


class Blocks(Sequence):
    """Blocks of a stream: every token but the first is a label exactly once, however long the blocks are.

    Block k of length L holds ``input_ids``, the tokens from kL, and ``labels``, those from kL + 1: each one's successor. Only
    the last block may be shorter.

    Args:
        count: keep this many blocks, drawn at random once. None: all.
    """

    def __init__(self, stream: np.ndarray, block_length: int, count: int | None = None):
        self.stream, self.block_length = stream, block_length
        self.total = -(-(len(stream) - 1) // block_length)
        self.kept = drawn(self.total, count, seed=42)

    def __len__(self) -> int:
        return len(self.kept)

    def __getitem__(self, place: int) -> dict[str, np.ndarray]:
        start = self.kept[place] * self.block_length
        tokens = self.stream[start : start + self.block_length + 1].astype(np.int64)
        return {"input_ids": tokens[:-1], "labels": tokens[1:]}

    def contents(self) -> dict[str, np.ndarray]:
        """Return what there is to hash: see hftune.data.digest."""
        return {"stream": self.stream, "kept": self.kept, "block_length": np.array([self.block_length])}

    @property
    def lengths(self) -> np.ndarray:
        """Labels in each block, int32."""
        starts = self.kept * self.block_length
        return np.minimum(self.block_length, len(self.stream) - 1 - starts).astype(np.int32)


def token_stream(rows: datasets.Dataset, column: str, tokenizer: PreTrainedTokenizerBase, split: str) -> np.ndarray:
    """Return all rows' tokens in a row, int32: each row's words and <eos>; or, of other tokenizers, its text and a newline."""
    encoded = cached_map(
        rows, encode, [tokenizer_key(tokenizer), column], f"Tokenising {split}", tokenizer=tokenizer, column=column
    )
    chunks = encoded.data.column("input_ids").chunks
    return np.concatenate([chunk.flatten().to_numpy().astype(np.int32) for chunk in chunks])


def encode(batch: dict[str, list[str]], tokenizer: PreTrainedTokenizerBase, column: str) -> dict[str, list[list[int]]]:
    """Tokenise rows, each with its end."""
    lines = [text.rstrip("\r\n") for text in batch[column]]
    if has_whole_words(tokenizer):
        ids = tokenizer(lines, add_special_tokens=False, verbose=False)["input_ids"]
        return {"input_ids": [[*row, tokenizer.eos_token_id] for row in ids]}
    return {"input_ids": tokenizer([f"{line}\n" for line in lines], add_special_tokens=False, verbose=False)["input_ids"]}


def check_stream(stream: np.ndarray, block_length: int, split: str) -> None:
    """Raise DataError unless the stream fills a block."""
    if len(stream) <= block_length:
        raise DataError(
            f"task.block_length={block_length} needs {block_length + 1} tokens; the {split} split has {len(stream)}. "
            "Lower it, or give more text."
        )

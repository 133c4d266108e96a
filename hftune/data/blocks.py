"""Token streams, cut into blocks of equal length for language modeling. Independent of models and files."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import datasets
import numpy as np
from torch.utils.data import ConcatDataset
from transformers import PreTrainedTokenizerBase

from hftune.data.cache import Stream, cached_arrays, saying
from hftune.data.in_place import RowsInPlace
from hftune.data.pieces import ids_of
from hftune.data.rows import check_texts
from hftune.data.splits import subsample_indices
from hftune.data.tokenized import tokenizer_key
from hftune.data.word_tokenizer import has_whole_words
from hftune.errors import DataError

END = np.iinfo(np.int32).min
"""Ends each text in a stream whose words are marked; no token is marked so."""
AT_ONCE, AT_ONCE_BYTES = 1000, 2**22
"""Rows that are tokenized together, at most, and about how many bytes they may have."""


class Blocks(Sequence):
    """Blocks of a token stream: every token but the first is a label exactly once, whatever the block length.

    Block k of length L has ``input_ids``, the tokens from kL on, and ``labels``, the tokens from kL + 1 on. Only the last block
    may be shorter.

    Args:
        count: number of blocks to use, a random subset that is always the same. None: all.
    """

    def __init__(self, stream: np.ndarray, block_length: int, count: int | None = None):
        self.stream, self.block_length = stream, block_length
        self.total = self.num_blocks()
        self.indices = subsample_indices(self.total, count)

    def num_blocks(self) -> int:
        """Return the number of blocks that the stream has."""
        return -(-(len(self.stream) - 1) // self.block_length)

    def tokens(self, number: int) -> np.ndarray:
        """Return the part of the stream that a block reads."""
        start = number * self.block_length
        return self.stream[start : start + self.block_length + 1]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:  # type: ignore[override]  # no slices
        tokens = self.tokens(self.indices[index]).astype(np.int64)
        return {"input_ids": tokens[:-1], "labels": tokens[1:]}

    def share_of(self, token: int) -> float:
        parts = np.array_split(self.stream, 1 + len(self.stream) // 2**22)  # all together may not fit into memory
        return sum(int(np.count_nonzero(part == token)) for part in parts) / len(self.stream)

    def contents(self) -> dict[str, np.ndarray]:
        """Return the content to hash; see hftune.data.digest. Its names are hashed, too: checkpoints hold the digest."""
        return {"stream": self.stream, "kept": self.indices, "block_length": np.array([self.block_length])}

    def contents_by_row(self) -> dict[str, Iterator[np.ndarray]]:
        return {"tokens": map(self.tokens, self.indices)}

    @property
    def lengths(self) -> np.ndarray:
        """Number of labels in each block, int32."""
        starts = self.indices * self.block_length
        return np.minimum(self.block_length, len(self.stream) - 1 - starts).astype(np.int32)


class JoinedBlocks(ConcatDataset):
    """The blocks of several streams, one stream after the other. No block has tokens of two."""

    datasets: list[Blocks]

    @property
    def total(self) -> int:
        return sum(part.total for part in self.datasets)

    def contents(self) -> dict[str, np.ndarray]:
        """Return the content to hash; see hftune.data.digest."""
        return {f"{place}.{name}": value for place, part in enumerate(self.datasets) for name, value in part.contents().items()}

    def contents_by_row(self) -> dict[str, Iterator[np.ndarray]]:
        return {"tokens": chain.from_iterable(part.contents_by_row()["tokens"] for part in self.datasets)}

    def share_of(self, token: int) -> float:
        sizes = [len(part.stream) for part in self.datasets]
        return float(np.average([part.share_of(token) for part in self.datasets], weights=sizes))

    @property
    def lengths(self) -> np.ndarray:
        """Number of labels in each block, int32."""
        return np.concatenate([part.lengths for part in self.datasets])


def token_stream(
    rows: datasets.Dataset | RowsInPlace,
    column: str,
    tokenizer: PreTrainedTokenizerBase,
    split: str,
    row_of: Callable[[int], Any] = int,
    marks_words: bool = False,
) -> np.ndarray:
    """Return the tokens of all rows, int32: each row's words and <eos>, or, for other tokenizers, its text and a newline.

    The array is mapped from a file, which the processes of a machine share.

    Args:
        split: what messages call the rows.
        row_of: translates the number of a row for them.
        marks_words: instead give each row's text and END, each token that goes on with the word before it as ~id, and nothing
            of rows without a token.

    Raises:
        DataError: a row that is read in place has no text.
    """

    def make() -> dict[str, Any]:
        tokens = _tokens(rows.select_columns([column]), tokenizer, split, row_of, marks_words)
        return {"input_ids": Stream(np.int32, None, tokens)}

    kind = "marked stream" if marks_words else "stream"
    return cached_arrays([kind, rows._fingerprint, tokenizer_key(tokenizer), column], make)["input_ids"]


def _tokens(rows: Any, tokenizer: Any, split: str, row_of: Callable[[int], Any], marks_words: bool) -> Iterator[np.ndarray]:
    (column,) = rows.column_names
    newline, end = ("", array("i", [tokenizer.eos_token_id]).tobytes()) if has_whole_words(tokenizer) else ("\n", b"")
    if marks_words:
        newline, end = "", array("i", [END]).tobytes()
    size = max(1, min(AT_ONCE, len(rows) * AT_ONCE_BYTES // max(rows.data.nbytes, 1)))
    done, say = 0, saying(f"Tokenizing {split}", len(rows))
    for table in rows.with_format("arrow").iter(size):
        if table.column(0).null_count:
            some = rows.select(range(done, done + len(table))).read()
            check_texts(some, column, split, True, [*map(row_of, some.numbers.tolist())].__getitem__)
        lines = [text.rstrip("\r\n") + newline for text in table.column(0).to_pylist()]
        found = filter(None, ids_of(lines, tokenizer, marks_words=True)) if marks_words else ids_of(lines, tokenizer)
        yield np.frombuffer(end.join([*found, b""]), np.int32)
        say(done := done + len(lines))


def check_stream(stream: np.ndarray, block_length: int, split: str) -> None:
    """Raise DataError unless the stream fills at least one block."""
    if len(stream) <= block_length:
        raise DataError(
            f"task.block_length={block_length} needs {block_length + 1} tokens or more; the {split} split has {len(stream)}. "
            "Lower it, or use more text."
        )

"""Masked language modelling: blocks of text whose words are known, and which of their tokens are masked. Knows no model.

Shape suffixes: T tokens of a block, P of them that can be masked, U units (tokens, words or spans) that these form.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from hftune.data.blocks import END, Blocks

SPAN_LENGTHS = 0.8 ** np.arange(10)
"""Weights of spans of 1 to 10 words: SpanBERT's geometric distribution with p = 0.2, 3.8 words in the mean."""
NO_LABEL = -100
"""As cross_entropy's ``ignore_index``."""
EVALUATED = 33
"""Seeds the masks of evaluations, so that all runs are measured by the same ones, whatever their seeds."""


@dataclass(frozen=True)
class Masking:
    """Hides some tokens of a block, which become its labels.

    Source: Devlin et al., "BERT" (2019), section 3.1; Joshi et al., "SpanBERT" (2020), section 3.1. There, spans are drawn one
    by one and may overlap. Here, a text is cut into spans, of which some are taken, as words are: all tokens are equally likely
    to be masked.
    """

    units: Literal["tokens", "words", "spans"]
    share: float
    """Of the tokens that are no special ones. At least one unit of a block is masked."""
    mask_share: float
    """Of the masked tokens: become ``mask_token``."""
    random_share: float
    """Of the masked tokens: become other tokens, drawn at random. The remaining ones stay as they are."""
    mask_token: int
    is_special: np.ndarray
    """Whether each token of the vocabulary is a special one, which is neither masked nor drawn, (V,) bool."""

    def __call__(self, block: Mapping[str, np.ndarray], rng: np.random.RandomState) -> dict[str, np.ndarray]:
        """Return ``input_ids`` and ``labels`` of a block of ``TextBlocks``, (T,) int64: NO_LABEL where nothing is masked."""
        ids_T = block["input_ids"].copy()
        labels_T = np.full(len(ids_T), NO_LABEL)
        places_P = np.flatnonzero(~self.is_special[ids_T])
        if len(places_P) == 0:
            return {"input_ids": ids_T, "labels": labels_T}
        unit_P = self._units(places_P, block["begins_word"], rng)
        sizes_U = np.bincount(unit_P)
        order_U = rng.permutation(len(sizes_U))
        # Rounded at random, so that the share is right in the mean for blocks of any length.
        wanted = self.share * len(places_P) + rng.random_sample() - 0.5
        count = 1 + np.abs(np.cumsum(sizes_U[order_U]) - wanted).argmin()
        is_masked_U = np.zeros(len(sizes_U), bool)
        is_masked_U[order_U[:count]] = True
        chosen, unit = places_P[is_masked_U[unit_P]], unit_P[is_masked_U[unit_P]]
        labels_T[chosen] = ids_T[chosen]
        # A span is replaced as a whole; of a word, each token by itself, as in BERT.
        draws = rng.random_sample(len(sizes_U))[unit] if self.units == "spans" else rng.random_sample(len(chosen))
        drawn = self._others[rng.randint(len(self._others), size=len(chosen))]
        changed = np.where(draws < self.mask_share + self.random_share, drawn, ids_T[chosen])
        ids_T[chosen] = np.where(draws < self.mask_share, self.mask_token, changed)
        return {"input_ids": ids_T, "labels": labels_T}

    @cached_property
    def _others(self) -> np.ndarray:
        """The tokens that are no special ones."""
        return np.flatnonzero(~self.is_special)

    def _units(self, places_P: np.ndarray, begins_word_T: np.ndarray, rng: np.random.RandomState) -> np.ndarray:
        """Return the number of the unit of each token that can be masked, (P,)."""
        if self.units == "tokens":
            return np.arange(len(places_P))
        begins_P = begins_word_T[places_P]
        begins_P[0] = True
        begins_P[1:] |= np.diff(places_P) > 1  # behind a special token
        word_P = begins_P.cumsum() - 1
        if self.units == "words":
            return word_P
        num_words = word_P[-1] + 1
        lengths = 1 + rng.choice(len(SPAN_LENGTHS), size=num_words, p=SPAN_LENGTHS / SPAN_LENGTHS.sum())
        lengths = np.minimum(lengths, max(1, round(self.share * num_words)))  # or a short text would be a single span
        return np.searchsorted(lengths.cumsum(), word_P, side="right")


class TextBlocks(Blocks):
    """Blocks of a stream whose words are marked, between the special tokens that a tokenizer puts around a text.

    A block has ``input_ids``, (T,) int64, and ``begins_word``, (T,) bool; or, with ``masking``, what this makes of it.

    Args:
        stream: see ``token_stream``.
        block_length: tokens of a block at most, special ones included.
        around: the special tokens before and after a text.
        separator: a token between two texts of a block. None: a block has no two texts, and a long text is cut into blocks of
            equal length, to a token.
        count: as of ``Blocks``.
        masking: for evaluations, with the same masks each time.
    """

    def __init__(
        self,
        stream: np.ndarray,
        block_length: int,
        around: tuple[Sequence[int], Sequence[int]],
        separator: int | None,
        count: int | None = None,
        masking: Masking | None = None,
    ):
        self.around, self.separator, self.masking = around, separator, masking
        room = block_length - self.num_around
        if separator is None:
            ends = np.concatenate([start + np.flatnonzero(part == END) for start, part in _parts(stream)])
            begins = np.append(0, ends[:-1] + 1)
            pieces = -(-(ends - begins) // room)  # of each text
            text = np.repeat(np.arange(len(ends)), pieces)
            piece = np.arange(len(text)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
            cuts = [begins[text] + (ends - begins)[text] * place // pieces[text] for place in (piece, piece + 1)]
        else:
            last = max(0, len(stream) - 1)  # no separator behind the last text
            starts = np.arange(0, last, room)
            cuts = [starts, np.minimum(starts + room, last)]
        self.cuts = np.stack(cuts, 1)
        super().__init__(stream, block_length, count)

    def num_blocks(self) -> int:
        return len(self.cuts)

    @property
    def num_around(self) -> int:
        return sum(map(len, self.around))

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:  # type: ignore[override]  # no slices
        number = self.indices[index]
        marked = self.tokens(number).astype(np.int64)
        ids = np.where(marked < 0, ~marked, marked)
        if self.separator is not None:
            ids[marked == END] = self.separator
        (before, after), begins_word = self.around, marked >= 0
        block = {
            "input_ids": np.concatenate([before, ids, after]).astype(np.int64),
            "begins_word": np.concatenate([np.ones(len(before), bool), begins_word, np.ones(len(after), bool)]),
        }
        return block if self.masking is None else self.masking(block, np.random.RandomState([EVALUATED, number]))

    def tokens(self, number: int) -> np.ndarray:
        start, stop = self.cuts[number]
        return self.stream[start:stop]

    def share_of(self, token: int) -> float:
        return super().share_of(token) + super().share_of(~token)

    def has_other(self, ids: Sequence[int]) -> bool:
        """Return whether there is a token besides these, of which a stream has few."""
        none = [END, *ids, *(~token for token in ids)]
        return any(not np.isin(part, none).all() for _, part in _parts(self.stream))

    def contents(self) -> dict[str, np.ndarray]:
        around = np.array([*self.around[0], -1, *self.around[1], -1, -1 if self.separator is None else self.separator])
        return {**super().contents(), "around": around}

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens in each block, int32."""
        starts, stops = self.cuts[self.indices].T
        return (stops - starts + self.num_around).astype(np.int32)


def _parts(stream: np.ndarray, size: int = 2**24) -> Iterator[tuple[int, np.ndarray]]:
    """Yield parts of a stream, which may not fit into memory, each with where it starts."""
    return ((start, stream[start : start + size]) for start in range(0, max(1, len(stream)), size))

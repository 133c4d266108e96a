"""Tokenized texts: made by a tokenizer, kept as flat arrays in memory-mapped files, and padded. Independent of tasks.

Shape suffixes: N texts, T tokens of the longest one.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, SupportsIndex, overload

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hftune.data.as_needed import Sizes, TextsAsNeeded
from hftune.data.cache import Stream, cached_arrays
from hftune.data.pieces import pieces_of
from hftune.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor

OFFSETS = "_offsets"
"""End of the name of the array that says where the rows of another one begin."""


@dataclass(frozen=True)
class Ragged:
    """Rows of numbers of different lengths: row k is ``flat[offsets[k] : offsets[k + 1]]``."""

    flat: np.ndarray
    """All numbers: int32, int64 if they need it, or float32."""
    offsets: np.ndarray
    """(N + 1,) int64."""

    @property
    def lengths(self) -> np.ndarray:
        """Length of each row, (N,) int32."""
        return np.diff(self.offsets).astype(np.int32)

    def rows(self) -> list[np.ndarray]:
        return np.split(self.flat, self.offsets[1:-1])

    def take(self, indices: Sequence[int]) -> Ragged:
        """Copy some of the rows."""
        bounds = [(self.offsets[index], self.offsets[index + 1]) for index in indices]
        return Ragged.of([self.flat[start:end] for start, end in bounds])

    @classmethod
    def of(cls, rows: Sequence[Any]) -> Ragged:
        arrays = [np.asarray(row) for row in rows]
        return cls(np.concatenate(arrays), np.cumsum([0, *map(len, arrays)]))

    def without_last(self) -> Ragged:
        return Ragged(np.delete(self.flat, self.offsets[1:] - 1), self.offsets - np.arange(len(self.offsets)))

    def without_first(self) -> Ragged:
        return Ragged(np.delete(self.flat, self.offsets[:-1]), self.offsets - np.arange(len(self.offsets)))

    def padded(self, value: int, side: str = "right") -> tuple[Tensor, Tensor]:
        """Pad the rows to the longest of them. Return numbers, int64 or float32, and attention mask, int64, both (N, T)."""
        import torch

        lengths_N1, places_T = np.diff(self.offsets)[:, None], np.arange(np.diff(self.offsets).max(initial=0))
        mask_NT = places_T < lengths_N1 if side == "right" else places_T >= len(places_T) - lengths_N1
        padded_NT = np.full(mask_NT.shape, value, _wide(self.flat.dtype))
        padded_NT[mask_NT] = self.flat
        return torch.from_numpy(padded_NT), torch.from_numpy(mask_NT.astype(np.int64))


class Texts(Sequence):
    """A data set of tokenized texts. A sample is a dictionary of the columns: int64 arrays of tokens (float32 if they are
    fractions), and single values.

    The arrays are mapped from files, which all processes of a machine share, and samples are copied out of them on access.

    Args:
        arrays: by name; a column of tokens, int32 as a rule, has a second one beside it whose name ends in OFFSETS.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray]):
        self._arrays = arrays
        self._columns: dict[str, Ragged | np.ndarray] = {
            name: Ragged(array, arrays[name + OFFSETS]) if name + OFFSETS in arrays else array
            for name, array in arrays.items()
            if not name.endswith(OFFSETS)
        }

    def __len__(self) -> int:
        column = next(iter(self._columns.values()))
        return len(column.offsets) - 1 if isinstance(column, Ragged) else len(column)

    def __getitem__(self, index: SupportsIndex) -> dict[str, Any]:  # type: ignore[override]  # no slices
        row = range(len(self))[_whole(index)]  # also from the end
        return {
            name: column.take([row]).flat.astype(_wide(column.flat.dtype)) if isinstance(column, Ragged) else column[row]
            for name, column in self._columns.items()
        }

    def __getitems__(self, indices: Sequence[int]) -> Samples:
        return Samples(self, indices)

    def column(self, name: str) -> Ragged | np.ndarray:
        """Return a column: Ragged tokens, or an array of one value per sample."""
        return self._columns[name]

    def select(self, indices: Sequence[int]) -> Texts:
        """Copy some of the samples."""
        arrays: dict[str, np.ndarray] = {}
        for name, column in self._columns.items():
            if isinstance(column, Ragged):
                arrays[name], arrays[name + OFFSETS] = (rows := column.take(indices)).flat, rows.offsets
            else:
                arrays[name] = column[list(indices)]
        return Texts(arrays)

    def add_column(self, name: str, values: np.ndarray) -> None:
        """Give each sample a value, or an array, that is no part of the data's contents, as what a model makes of it."""
        self._columns[name] = values

    def to_dataset(self) -> datasets.Dataset:
        """Copy the samples into a data set of Hugging Face, for tools that want one, such as transformers' Trainer."""
        return datasets.Dataset.from_list(
            [{name: np.asarray(value).tolist() for name, value in sample.items()} for sample in self]
        )

    def contents(self) -> Mapping[str, np.ndarray]:
        return self._arrays

    def contents_by_row(self) -> Mapping[str, Ragged | np.ndarray]:
        return {name: column for name, column in self._columns.items() if name in self._arrays}


@dataclass(frozen=True)
class Samples(Sequence):
    """Some samples of ``Texts``, like a list of them, from which ``ragged`` and ``values`` take whole columns."""

    texts: Texts
    indices: Sequence[int]

    def __len__(self) -> int:
        return len(self.indices)

    @overload
    def __getitem__(self, index: SupportsIndex) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> Samples: ...
    def __getitem__(self, index: Any) -> dict[str, Any] | Samples:
        if isinstance(index, slice):
            return Samples(self.texts, self.indices[index])
        return self.texts[self.indices[_whole(index)]]


def _whole(index: SupportsIndex) -> int:
    try:
        return operator.index(index)
    except TypeError as error:
        raise TypeError(
            f"Tokenized texts are indexed by a whole number, not by {type(index).__name__}: use column(name) for a column, "
            "select(indices) for some of the samples, or to_dataset() for a datasets.Dataset."
        ) from error


def ragged(examples: Sequence[Mapping[str, Any]], name: str) -> Ragged:
    """Return a column of tokens of samples: of ``Texts``, or dictionaries from anywhere else."""
    column = examples.texts.column(name) if isinstance(examples, Samples) else None
    return column.take(examples.indices) if isinstance(column, Ragged) else Ragged.of([example[name] for example in examples])  # type: ignore[attr-defined]


def values(examples: Sequence[Mapping[str, Any]], name: str) -> Tensor:
    """Return a column with one value per sample, (N,), or one array, (N, K), likewise: int64, or float32 if they are floats."""
    import torch

    if isinstance(examples, Samples):
        found = np.asarray(examples.texts.column(name))[list(examples.indices)]
    else:
        found = np.asarray([np.asarray(example[name]) for example in examples])
    return torch.from_numpy(found.astype(_wide(found.dtype)))


def _wide(dtype: np.dtype) -> type:
    """Return the type of numbers in tensors."""
    return np.float32 if dtype.kind == "f" else np.int64


def column_of(dataset: Any, name: str) -> np.ndarray:
    """Return a column of one value per sample of ``Texts``, or of a ``datasets.Dataset`` of the user's own."""
    if isinstance(dataset, Texts | TextsAsNeeded):
        return np.asarray(dataset.column(name))
    return dataset.with_format("numpy", columns=[name])[:][name]


def lengths_of(dataset: Any, name: str) -> Any:
    """Return the number of tokens of each row of a column, int32, without reading them; of the same data sets."""
    if isinstance(dataset, TextsAsNeeded):
        return Sizes(dataset, [name]).sum()
    if isinstance(dataset, Texts):
        return dataset.column(name).lengths  # type: ignore[union-attr]
    table = dataset.with_format("arrow", columns=[name])[:]
    return pc.list_value_length(table[name]).to_numpy().astype(np.int32)


def sizes_of(dataset: Any, names: Sequence[str], less: Sequence[int] | int = 0) -> Any:
    """Return the number of tokens of each row of several columns, (N, K) int32, less some that are not read, likewise."""
    if isinstance(dataset, TextsAsNeeded):
        return Sizes(dataset, names, less)
    return np.stack([lengths_of(dataset, name) for name in names], axis=1) - np.array(less, np.int32)


def cut_apart(rows: Texts, of_each_text: Sequence[str]) -> Texts:
    """Return a sample for each text of rows that have several, as in ``ManyTexts``, and ``row``, whose it is."""
    names = ("texts", *of_each_text, "input_ids", "token_type_ids")
    columns = {name: rows.column(name) for name in names if name in rows.contents()}
    ragged: dict[str, Ragged] = {name: column for name, column in columns.items() if isinstance(column, Ragged)}
    counts, lengths = ragged["texts"].lengths, ragged["texts"].flat
    of_tokens, of_texts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]), np.arange(len(lengths) + 1)
    arrays: dict[str, np.ndarray] = {"row": np.repeat(np.arange(len(rows)), counts)}
    for name, column in ragged.items():
        arrays |= {name: column.flat, name + OFFSETS: of_tokens if name.endswith("_ids") else of_texts}
    return Texts(arrays)


def cached_texts(key: Any, make: Callable[[], Mapping[str, np.ndarray | Stream]]) -> Texts:
    """Write texts to the cache once and map them from there; see ``cached_arrays``."""
    return Texts(cached_arrays(["texts", key], make))


def flat_arrays(rows: datasets.Dataset) -> dict[str, np.ndarray | Stream]:
    """Return the columns of rows, lists of token ids or other numbers, or single values, as the arrays of ``Texts``.

    Raises:
        DataError: a column has lists of something else.
    """
    arrays: dict[str, np.ndarray | Stream] = {}
    for name in rows.column_names:
        chunks = rows.data.column(name).chunks
        if pa.types.is_list(chunks[0].type):
            lengths = [chunk.value_lengths().to_numpy() for chunk in chunks]
            arrays[name + OFFSETS] = offsets = np.cumsum(np.concatenate([[0], *lengths]), dtype=np.int64)
            numbers, kind = (chunk.flatten().to_numpy(zero_copy_only=False) for chunk in chunks), chunks[0].type.value_type
            dtype: type = np.float32 if pa.types.is_floating(kind) else np.int32
            if pa.types.is_integer(kind):
                bounds = [
                    bound for chunk in chunks for bound in pc.min_max(chunk.flatten()).as_py().values() if bound is not None
                ]
                dtype = np.int32 if all(-(2**31) <= bound < 2**31 for bound in bounds) else np.int64
            elif not (dtype is np.float32 or pa.types.is_boolean(kind) or pa.types.is_null(kind)):
                raise DataError(f"Column {name!r} of tokenized rows has lists of {kind}. They must be lists of numbers.")
            arrays[name] = Stream(dtype, (int(offsets[-1]),), numbers)
        else:
            arrays[name] = np.concatenate([chunk.to_numpy(zero_copy_only=False) for chunk in chunks])
    return arrays


def tokenizer_key(tokenizer: Any) -> list:
    """Return all that a tokenizer's output depends on, without the truncation settings that its last call left behind."""
    from hftune.data.jieba_tokenizer import JiebaTokenizer

    backend = json.loads(tokenizer.backend_tokenizer.to_str()) if tokenizer.is_fast else dict(tokenizer.init_kwargs)
    backend.update(truncation=None, padding=None, truncation_side=tokenizer.truncation_side)
    backend.update(eos_token=tokenizer.special_tokens_map.get("eos_token"))  # appended to rows by hftune.data.blocks
    libraries = ["datasets", "tokenizers", "transformers"]
    if isinstance(tokenizer, JiebaTokenizer):
        libraries.append("rjieba")
    return [
        type(tokenizer).__name__,
        sorted(tokenizer.get_vocab().items()),
        json.dumps(backend, sort_keys=True, default=repr),  # repr: two AddedTokens of the same text may differ in their flags
        [(library, version(library)) for library in libraries],
    ]


def truncated(tokenizer: Any, max_length: int, *texts: Sequence[Any], **settings: Any) -> tuple[Any, list[bool]]:
    """Tokenize texts, or pairs of texts, to at most ``max_length`` tokens, without attention masks.

    Returns:
        what the tokenizer returns, and for each text whether it has more tokens.
    """
    settings = {"return_attention_mask": False, "return_token_type_ids": False, "verbose": False, **settings}
    encoded = tokenizer(*map(list, texts), truncation=True, max_length=max_length, **settings)
    cut = [len(row) == max_length for row in encoded["input_ids"]]
    if full := [index for index, is_full in enumerate(cut) if is_full]:  # truncated, or of exactly this length
        uncut = tokenizer(*([side[index] for index in full] for side in texts), **settings)["input_ids"]
        for index, ids in zip(full, uncut, strict=True):
            cut[index] = len(ids) > max_length
    return encoded, cut


def to_ids(texts: Sequence[str], tokenizer: Any, max_length: int) -> tuple[list[Any], list[bool]]:
    """Return the token ids of each text, at most ``max_length``, and whether the text had more."""
    from transformers import PreTrainedTokenizerBase

    if not isinstance(tokenizer, PreTrainedTokenizerBase) or (pieces := pieces_of(tokenizer)) is None:
        encoded, cut = truncated(tokenizer, max_length, texts)
        return encoded["input_ids"], cut
    found = pieces.ids(texts)
    before, after = pieces.around(next((text for text, ids in zip(texts, found, strict=True) if ids), ""))
    most, keeps_end = 4 * max_length - len(before) - len(after), tokenizer.truncation_side == "left"
    kept = [ids if len(ids) <= most else ids[-most:] if keeps_end else ids[:most] for ids in found]
    return [np.frombuffer(before + ids + after, np.int32) for ids in kept], [len(ids) > most for ids in found]


def pair_ids(
    texts: Sequence[str], others: Sequence[str], tokenizer: Any, max_length: int, token_types: bool
) -> dict[str, list]:
    """Tokenize pairs of texts together, the longer one truncated first.

    Returns:
        input_ids; cut (whether tokens are missing); and, if asked for, token_type_ids, which tell the two texts apart.
    """
    encoded, cut = truncated(tokenizer, max_length, texts, others, return_token_type_ids=token_types)
    return {**encoded, "cut": cut}


def cut_notices(datasets: Mapping[str, Any], column: str, what: str) -> list[str]:
    """Return a notice of the share of truncated rows, by the flags in ``column``; nothing if there are none."""
    made = {split: rows for split, rows in datasets.items() if not isinstance(rows, TextsAsNeeded)}
    shares = {split: np.mean(column_of(rows, column)) for split, rows in made.items()}
    cut = " and ".join(f"{share:.1%} of {split}" for split, share in shares.items() if share)
    return [f"{what} are truncated at the end: {cut}."] if cut else []

"""Tokenizers of whole words, built from the words of a corpus. Independent of models and tasks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

UNKNOWN, END = "<unk>", "<eos>"
_BASIC_ENGLISH = {**{letter: f" {letter} " for letter in "'.,()!?"}, **dict.fromkeys(";:", " "), **{"<br />": " ", '"': ""}}


def train_words(texts: Iterable[str], kind: str, vocab_size: int | None = None) -> list[str]:
    """Return a vocabulary: <unk>, <eos>, then the words of the texts by frequency; ties are broken by text.

    Args:
        kind: "words", split at white space; or "basic_english", lower-cased, with punctuation split off.
        vocab_size: maximum number of tokens, with <unk> and <eos>; rarer words become <unk>. None: all words.

    Source of basic_english: torchtext.data.utils.get_tokenizer("basic_english"); both have 28,782 types on WikiText-2.
    """
    cut = _tokenizer([UNKNOWN, END], kind)
    normalize = cut.normalizer.normalize_str if cut.normalizer is not None else str
    split = cut.pre_tokenizer.pre_tokenize_str
    counts = Counter(word for word, _ in chain.from_iterable(split(normalize(text)) for text in texts))
    words = sorted(counts.keys() - {UNKNOWN, END}, key=lambda word: (-counts[word], word))
    return [UNKNOWN, END, *words][:vocab_size]


def word_tokenizer(vocabulary: Sequence[str], kind: str) -> PreTrainedTokenizerBase:
    """Build the tokenizer of a vocabulary that ``train_words`` returned."""
    tokenizer = _tokenizer(vocabulary, kind)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=UNKNOWN, eos_token=END, pad_token=END)


def _tokenizer(vocabulary: Sequence[str], kind: str) -> Tokenizer:
    words = {word: number for number, word in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if kind == "basic_english":
        replaced = [normalizers.Replace(pattern, content) for pattern, content in _BASIC_ENGLISH.items()]
        tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *replaced])
    return tokenizer


def has_whole_words(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the tokens of a tokenizer are whole words."""
    return tokenizer.is_fast and isinstance(tokenizer.backend_tokenizer.model, models.WordLevel)

"""Tokenizers whose tokens are whole words, made from the words of a corpus. Knows no model and no task."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import chain

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

UNKNOWN, END = "<unk>", "<eos>"
_BASIC_ENGLISH = {
    **{letter: f" {letter} " for letter in "'.,()!?"},
    **dict.fromkeys(";:", " "),
    **{"<br />": " ", '"': ""},
}


def train_word_tokenizer(texts: Iterable[str], kind: str, vocab_size: int | None = None) -> PreTrainedTokenizerBase:
    """Make a tokenizer of whole words: <unk>, <eos>, then the words of the texts by frequency; ties go by text.

    Args:
        kind: "words", split at white space, nothing changed; or "basic_english", lower-cased and with punctuation apart.
        vocab_size: most tokens, <unk> and <eos> included; rarer words are <unk>. None: all words.

    Source for basic_english: torchtext.data.utils.get_tokenizer("basic_english"), whose 28,782 types on WikiText-2 it gives.
    """
    cut = Tokenizer(models.WordLevel({UNKNOWN: 0, END: 1}, unk_token=UNKNOWN))
    cut.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if kind == "basic_english":
        replaced = [normalizers.Replace(pattern, content) for pattern, content in _BASIC_ENGLISH.items()]
        cut.normalizer = normalizers.Sequence([normalizers.Lowercase(), *replaced])
    normalize = cut.normalizer.normalize_str if cut.normalizer is not None else str
    split = cut.pre_tokenizer.pre_tokenize_str
    counts = Counter(word for word, _ in chain.from_iterable(split(normalize(text)) for text in texts))
    words = sorted(counts.keys() - {UNKNOWN, END}, key=lambda word: (-counts[word], word))
    vocabulary = [UNKNOWN, END, *words][:vocab_size]
    cut.model = models.WordLevel({word: number for number, word in enumerate(vocabulary)}, unk_token=UNKNOWN)
    return PreTrainedTokenizerFast(tokenizer_object=cut, unk_token=UNKNOWN, eos_token=END, pad_token=END)


def has_whole_words(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Say whether a tokenizer, loaded or made here, is one whose tokens are whole words."""
    return tokenizer.is_fast and isinstance(tokenizer.backend_tokenizer.model, models.WordLevel)

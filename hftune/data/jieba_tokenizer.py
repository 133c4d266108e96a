"""A tokenizer of Chinese words for transformers 5. Independent of models and tasks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from transformers import AddedToken, AutoTokenizer, BertTokenizerLegacy, PreTrainedConfig, PreTrainedTokenizerBase

from hftune.data.jieba_words import segment
from hftune.errors import ConfigError

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
MAX_UNKNOWN = 0.25
"""Share of [UNK] tokens above which a vocabulary is refused. A suitable one is far below, but not near 0: Lowin's first
checkpoints have no Latin letters, so that all Latin words of an article are unknown to them."""
MAX_CACHED = 50_000
"""Number of words outside the vocabulary whose pieces are cached; enough for the 42,000 of 5,000 articles."""

_HAN_WORD = re.compile("[\u3400-\u4dbf\u4e00-\u9fff]{2,}")
_COMMON_HAN = re.compile("[\u4e00-\u9fa5]+")  # assigned since Unicode 1.1, and unchanged by normalization
_NEEDLESS_SPACE = re.compile("(?<![0-9A-Za-z]) | (?![0-9A-Za-z])")


def lower(text: str) -> str:
    """Lower-case each character separately, as transformers 4 did: str.lower changes a Greek sigma at the end of a word."""
    return text.replace("\N{GREEK CAPITAL LETTER SIGMA}", "\N{GREEK SMALL LETTER SIGMA}").lower()


class JiebaTokenizer(BertTokenizerLegacy):
    """Tokenize Chinese by words: jieba's words if they are in the vocabulary, WordPiece for all others.

    Gives the same ids as Lowin's class of this name under transformers 4, with which the models were trained. There,
    ``do_lower_case`` (the default) lower-cased the text before segmentation. transformers 5 lower-cases only words that are
    not in the vocabulary, and never calls that class's ``_tokenize``.

    Python-backed (no offsets), yet faster than the Rust-backed BertTokenizer, because the pieces of words outside the
    vocabulary are cached.

    Source: github.com/LowinLi/chinese-bigbird, src/pretrain/jieba_tokenizer/jieba_t.py, with transformers 4.6.1.
    """

    model_input_names = ["input_ids", "token_type_ids", "attention_mask"]  # as BertTokenizer; its legacy class lacks them

    def __init__(self, vocab_file: str | Path | None = None, **kwargs: Any):
        if vocab_file is None:  # as from_pretrained passes if there is none
            raise ConfigError(
                f"{kwargs.get('name_or_path', 'JiebaTokenizer')} has no vocab.txt, which a jieba tokenizer needs."
            )
        self.cache: dict[str, list[str]] = {}  # datasets ignores an attribute of this name when it hashes a tokenizer
        super().__init__(str(vocab_file), **kwargs)
        # Hashes of a tokenizer are based on init_kwargs, so leave out where it was loaded from. Added tokens and maximum length
        # are saved without them.
        origin = ("name_or_path", "is_local", "local_files_only", "tokenizer_file")
        self.init_kwargs = {
            key: str(value) if isinstance(value, AddedToken) else value
            for key, value in self.init_kwargs.items()  # type: ignore[has-type]  # set by transformers
            if key not in (*origin, "added_tokens_decoder", "model_max_length")
        }

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *inputs: Any, **kwargs: Any) -> JiebaTokenizer:
        """Load from a folder or the Hub what ``save_pretrained`` wrote, or a vocab.txt beside any config.

        Raises:
            ConfigError: there is no vocab.txt, or it has none of jieba's words.
        """
        tokenizer = super().from_pretrained(pretrained_model_name_or_path, *inputs, **kwargs)
        check_tokenizer(tokenizer, str(pretrained_model_name_or_path))
        return tokenizer

    def prepare_for_tokenization(self, text: str, is_split_into_words: bool = False, **kwargs: Any) -> tuple[str, dict]:
        """Lower-case the text, except for added and special tokens."""
        if self.do_lower_case:
            added = sorted((token for token in self._added_tokens_encoder if token in text), key=len, reverse=True)
            parts = re.split(f"({'|'.join(map(re.escape, added))})", text) if added else [text]
            parts[::2] = map(lower, parts[::2])
            text = "".join(parts)
        return super().prepare_for_tokenization(text, is_split_into_words=is_split_into_words, **kwargs)

    def tokenize(self, text: str, **kwargs: Any) -> list[str]:
        prepared, _ = self.prepare_for_tokenization(text)
        if any(token in prepared for token in self._added_tokens_encoder):
            return super().tokenize(text, **kwargs)
        return self._tokenize(prepared)  # without a slow search for added tokens in Python

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        vocabulary, cache, tokens = self.vocab, self.cache, []
        for word in segment(text):
            if word in vocabulary:
                tokens.append(word)
            elif word in cache:
                tokens += cache[word]
            else:
                if len(cache) >= MAX_CACHED:
                    cache.clear()
                cache[word] = self._split(word)
                tokens += cache[word]
        return tokens

    def _split(self, word: str) -> list[str]:
        """Split a word that is not in the vocabulary, by the original code or, for most words, by a shortcut to its result."""
        basic = self.basic_tokenizer
        if not basic.never_split:
            if basic.tokenize_chinese_chars and _COMMON_HAN.fullmatch(word):
                return [letter if letter in self.vocab else str(self.unk_token) for letter in word]
            if word.isascii() and word.isalnum():  # nothing to clean, normalize or split at
                return self.wordpiece_tokenizer.tokenize(word.lower() if basic.do_lower_case else word)
        return super()._tokenize(word)

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> int | list[int] | None:
        """Look up ids, first in the vocabulary, which has nearly all tokens."""
        if tokens is None or isinstance(tokens, str):
            return super().convert_tokens_to_ids(tokens)
        ids = [*map(self.vocab.get, tokens)]
        return super().convert_tokens_to_ids(tokens) if None in ids else ids

    def convert_tokens_to_string(self, tokens: Sequence[str]) -> str:
        """Join tokens to a text, with spaces only between Latin words or numbers."""
        text = " ".join(tokens).replace(" ##", "").removeprefix("##")
        return _NEEDLESS_SPACE.sub("", text)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "cache": {}}  # a pickle must not depend on what was tokenized before


class _JiebaTokenizerConfig(PreTrainedConfig):
    """Config class that AutoTokenizer.register requires; no model uses it."""

    model_type = "hftune_jieba_tokenizer"


# AutoTokenizer finds the class by its name in tokenizer_config.json, once this module is imported.
AutoTokenizer.register(_JiebaTokenizerConfig, tokenizer_class=JiebaTokenizer, exist_ok=True)


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, name: str, texts: Iterable[str] = ()) -> None:
    """Check that a tokenizer of any class segments like jieba and that its vocabulary covers the texts.

    Args:
        name: name of the model or folder, for messages.
        texts: the first 100 are checked; without them, the single characters of the vocabulary's words.

    Raises:
        ConfigError: the vocabulary has none of jieba's words, the tokenizer splits them, or more than MAX_UNKNOWN of the tokens
            are [UNK].
    """
    vocabulary = tokenizer.get_vocab()
    candidates = (word for word in sorted(vocabulary, key=vocabulary.get) if _HAN_WORD.fullmatch(word))
    words = list(islice((word for word in candidates if segment(word) == [word]), 200))
    train = "train a vocabulary with `hftune vocab`"
    if not words:
        raise ConfigError(
            f"The vocabulary of {name} has none of jieba's words, so all of them would be split into characters. "
            f"Load it with transformers' BertTokenizer, or {train}."
        )
    whole = set(tokenizer.tokenize("。".join(words)))
    for word in words:
        if word not in whole:
            raise ConfigError(
                f"The tokenizer of {name}, a {type(tokenizer).__name__}, splits {word!r} into "
                f"{' '.join(tokenizer.tokenize(word))!r}, although its vocabulary has the word. Load it with "
                f"hftune.data.jieba_tokenizer.JiebaTokenizer.from_pretrained({name!r})."
            )
    checked = list(islice(texts, 100))
    tokens = [token for text in checked or [" ".join("".join(words))] for token in tokenizer.tokenize(text)]
    unknown = tokens.count(tokenizer.unk_token) / max(1, len(tokens))
    if unknown > MAX_UNKNOWN:
        what = "the tokens of these texts" if checked else "the characters of its own words"
        raise ConfigError(
            f"For the tokenizer of {name}, {unknown:.0%} of {what} are {tokenizer.unk_token} (at most {MAX_UNKNOWN:.0%} is "
            f"accepted). Check that vocab.txt belongs to the model, or {train}."
        )

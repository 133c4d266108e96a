"""A tokenizer of Chinese words for transformers 5. Knows no model and no task."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from transformers import AddedToken, AutoTokenizer, BertTokenizerLegacy, PreTrainedConfig, PreTrainedTokenizerBase

from hftune.errors import ConfigError

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
MOST_UNKNOWN = 0.25
"""Share of [UNK] among a text's tokens above which a vocabulary is refused. A right one is far below, but not near 0: the
first checkpoints of Lowin have no Latin letters at all, so every Latin word of an article is unknown to them."""
MOST_REMEMBERED = 50_000
"""Words outside the vocabulary whose pieces a tokenizer keeps in memory; enough for all of 5,000 articles (42,000)."""

_HAN_WORD = re.compile("[\u3400-\u4dbf\u4e00-\u9fff]{2,}")
_COMMON_HAN = re.compile("[\u4e00-\u9fa5]+")  # assigned since Unicode 1.1, and no normalisation changes them
_NEEDLESS_SPACE = re.compile("(?<![0-9A-Za-z]) | (?![0-9A-Za-z])")
_HALF_CHARACTER = re.compile("[\ud800-\udfff]")


def segment(text: str) -> list[str]:
    """Cut a text into the words of ``jieba.lcut(text, HMM=False)``; nothing is lost, spaces are words, too.

    rjieba cuts 13 times as fast as jieba and alike (compared on 200,000 texts, of all characters of Unicode among them).
    """
    try:
        return _cutter()(text)
    except UnicodeEncodeError:  # Half of a surrogate pair cannot go to Rust; BERT drops it as it drops \0.
        return _cutter()(_HALF_CHARACTER.sub("\0", text))


@functools.cache  # Not at import and not in the tokenizer, so that each process, spawned ones too, loads it when it needs it.
def _cutter() -> Callable[[str], list[str]]:
    try:
        import rjieba
    except ImportError:  # no wheel for this machine
        return _slow_cutter()
    return functools.partial(rjieba.cut, hmm=False)


def _slow_cutter() -> Callable[[str], list[str]]:
    """Return jieba's own cutter, its dictionary read without the cache file.

    jieba keeps that in the folder for temporary files, the same for all users: it believes whatever lies there, and cannot
    replace another user's. Reading the dictionary itself takes a second more.
    """
    import jieba

    cutter = jieba.Tokenizer()
    cutter.FREQ, cutter.total = cutter.gen_pfdict(cutter.get_dict_file())
    cutter.initialized = True
    return functools.partial(cutter.lcut, HMM=False)


def lower(text: str) -> str:
    """Lower each character by itself, as transformers 4 did: str.lower alone writes a Greek sigma otherwise at a word's end."""
    return text.replace("\N{GREEK CAPITAL LETTER SIGMA}", "\N{GREEK SMALL LETTER SIGMA}").lower()


class JiebaTokenizer(BertTokenizerLegacy):
    """Tokenise Chinese by words: jieba's words that are in the vocabulary as they are, WordPiece for all others.

    Gives the ids that the models trained with Lowin's class of this name got under transformers 4. There,
    ``do_lower_case`` (the default) lowered a text before jieba saw it; transformers 5 lowers only the words that are not
    in the vocabulary, and never calls that class's ``_tokenize`` at all.

    It is Python-backed (no offsets), yet faster than the Rust-backed BertTokenizer: what is not in the vocabulary is cut
    once, and remembered.

    Source: github.com/LowinLi/chinese-bigbird, src/pretrain/jieba_tokenizer/jieba_t.py, with transformers 4.6.1.
    """

    model_input_names = ["input_ids", "token_type_ids", "attention_mask"]  # BertTokenizer's; the Python-backed one lost them

    def __init__(self, vocab_file: str | Path | None = None, **kwargs: Any):
        if vocab_file is None:  # what from_pretrained passes where it found none
            raise ConfigError(
                f"{kwargs.get('name_or_path', 'JiebaTokenizer')} has no vocab.txt, where a jieba tokenizer's words are."
            )
        self.cache: dict[str, list[str]] = {}  # the name of what datasets leaves out where it hashes a tokenizer
        super().__init__(str(vocab_file), **kwargs)
        # init_kwargs is what hashes of a tokenizer go by. Where it was loaded from, and whether it was loaded at all, is not
        # what it is; the added tokens and the longest length are saved without it.
        place = ("name_or_path", "is_local", "local_files_only", "tokenizer_file")
        self.init_kwargs = {
            key: str(value) if isinstance(value, AddedToken) else value
            for key, value in self.init_kwargs.items()
            if key not in (*place, "added_tokens_decoder", "model_max_length")
        }

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *inputs: Any, **kwargs: Any) -> JiebaTokenizer:
        """Load from a folder or the Hub: what ``save_pretrained`` wrote, or a vocab.txt beside any config.

        Raises:
            ConfigError: there is no vocab.txt, or it is not one of jieba's words.
        """
        tokenizer = super().from_pretrained(pretrained_model_name_or_path, *inputs, **kwargs)
        check_tokenizer(tokenizer, str(pretrained_model_name_or_path))
        return tokenizer

    def prepare_for_tokenization(self, text: str, is_split_into_words: bool = False, **kwargs: Any) -> tuple[str, dict]:
        """Lower the text, added and special tokens apart."""
        if self.do_lower_case:
            kept = [token for token in self._added_tokens_encoder if token in text]
            if kept:
                pattern = "|".join(map(re.escape, sorted(kept, key=len, reverse=True)))
                parts = re.split(f"({pattern})", text)
                parts[::2] = map(lower, parts[::2])
                text = "".join(parts)
            else:
                text = lower(text)
        return super().prepare_for_tokenization(text, is_split_into_words=is_split_into_words, **kwargs)

    def tokenize(self, text: str, **kwargs: Any) -> list[str]:
        """Cut a text into tokens."""
        prepared, _ = self.prepare_for_tokenization(text)
        if any(token in prepared for token in self._added_tokens_encoder):
            return super().tokenize(text, **kwargs)
        return self._tokenize(prepared)  # without a walk in Python through all characters in search of added tokens

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        vocabulary, remembered, tokens = self.vocab, self.cache, []
        for word in segment(text):
            if word in vocabulary:
                tokens.append(word)
            elif word in remembered:
                tokens += remembered[word]
            else:
                if len(remembered) >= MOST_REMEMBERED:
                    remembered.clear()
                remembered[word] = self._cut(word)
                tokens += remembered[word]
        return tokens

    def _cut(self, word: str) -> list[str]:
        """Cut a word that is not in the vocabulary: by the original code, whose outcome is known beforehand for most words."""
        basic = self.basic_tokenizer
        if not basic.never_split:
            if basic.tokenize_chinese_chars and _COMMON_HAN.fullmatch(word):
                return [letter if letter in self.vocab else str(self.unk_token) for letter in word]
            if word.isascii() and word.isalnum():  # nothing to clean, to normalise or to split at
                return self.wordpiece_tokenizer.tokenize(word.lower() if basic.do_lower_case else word)
        return super()._tokenize(word)

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> int | list[int] | None:
        """Look up ids; the vocabulary first, as nearly all tokens are there."""
        if tokens is None or isinstance(tokens, str):
            return super().convert_tokens_to_ids(tokens)
        ids = [*map(self.vocab.get, tokens)]
        return super().convert_tokens_to_ids(tokens) if None in ids else ids

    def convert_tokens_to_string(self, tokens: Sequence[str]) -> str:
        """Join tokens to a text: a space only between two Latin words or numbers."""
        text = " ".join(tokens).replace(" ##", "").removeprefix("##")
        return _NEEDLESS_SPACE.sub("", text)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "cache": {}}  # or a pickle would tell what was tokenised before


class _JiebaTokenizerConfig(PreTrainedConfig):
    """What AutoTokenizer.register wants to be given; no model has it."""

    model_type = "hftune_jieba_tokenizer"


# So that AutoTokenizer, which goes by the class's name in tokenizer_config.json, finds the class once this module is imported.
AutoTokenizer.register(_JiebaTokenizerConfig, tokenizer_class=JiebaTokenizer, exist_ok=True)


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, name: str, texts: Iterable[str] = ()) -> None:
    """Check that a tokenizer, of any class, keeps jieba's words whole and knows what it is to tokenise.

    Args:
        name: of the model or folder, for the message.
        texts: the first 100 are looked at; without them, the single characters of the vocabulary's words.

    Raises:
        ConfigError: the vocabulary has no words of jieba's, the tokenizer cuts them, or more than MOST_UNKNOWN of the
            tokens are [UNK].
    """
    vocabulary = tokenizer.get_vocab()
    candidates = (word for word in sorted(vocabulary, key=vocabulary.get) if _HAN_WORD.fullmatch(word))
    words = list(islice((word for word in candidates if segment(word) == [word]), 200))
    train = "train a vocabulary with `hftune vocab`"
    if not words:
        raise ConfigError(
            f"The vocabulary of {name} has no word that jieba knows, so that jieba's words would all fall apart into "
            f"characters. Load it with transformers' BertTokenizer, or {train}."
        )
    whole = set(tokenizer.tokenize("。".join(words)))
    for word in words:
        if word not in whole:
            raise ConfigError(
                f"The tokenizer of {name}, a {type(tokenizer).__name__}, cuts {word!r} into "
                f"{' '.join(tokenizer.tokenize(word))!r}, though its vocabulary has the word. Load it with "
                f"hftune.data.jieba_tokenizer.JiebaTokenizer.from_pretrained({name!r})."
            )
    looked_at = list(islice(texts, 100))
    tokens = [token for text in looked_at or [" ".join("".join(words))] for token in tokenizer.tokenize(text)]
    unknown = tokens.count(tokenizer.unk_token) / max(1, len(tokens))
    if unknown > MOST_UNKNOWN:
        what = "the tokens of these texts" if looked_at else "the characters of its own words"
        raise ConfigError(
            f"To the tokenizer of {name}, {unknown:.0%} of {what} are {tokenizer.unk_token} (at most {MOST_UNKNOWN:.0%} are "
            f"sane). Look whether vocab.txt is the one that belongs to the model, or {train}."
        )

"""Token ids of texts, of which each piece is tokenized once and remembered, as far as a tokenizer cuts them at spaces anyway.

Looking a word up takes a small part of the time in which even a fast tokenizer cuts it; see benchmarks/prepare.py.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

_SPACE = re.compile(r" (?=\S)(?<=\S )")
"""A single space between two characters that are none."""
REMEMBERED = 2**20
"""Characters of pieces that are remembered, at most, but for those of one batch: some 30 MB."""
_NORMALIZERS = {"BertNormalizer", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "StripAccents"}
"""To which text on one side of such a space does not matter to the other."""
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PATTERNS = {_WORDS % digits for digits in ("", "{1,3}")}
"""Of Qwen's and of Llama's splits, which do as well: none of their tokens has a space behind a different character."""


class Pieces:
    """Makes the token ids of texts as a tokenizer of transformers would, without its special tokens.

    Args:
        marks_words: give each token that goes on with the word before it as ~id, which is below 0.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, marks_words: bool = False):
        self._tokenizer, self._backend, self._marks_words = tokenizer, tokenizer.backend_tokenizer, marks_words
        self._cut = cutter(self._backend)
        self._known: dict[str, bytes] = {}
        self._size = 0  # in characters

    def ids(self, texts: Sequence[str]) -> list[bytes]:
        """Return the ids of each text, as the bytes of int32."""
        self._backend.no_truncation()  # what the last call of the tokenizer has left behind
        self._backend.no_padding()
        self._backend.encode_special_tokens = self._tokenizer.split_special_tokens
        if self._cut is None:
            return self._encoded(texts)
        cut = [*map(self._cut, texts)]
        known, size = (self._known, self._size) if self._size < REMEMBERED else ({}, 0)  # new: another thread may be reading
        later = [pieces[1:] for pieces in cut]
        new = [piece for piece in dict.fromkeys(chain.from_iterable(later)) if piece not in known]
        known.update(zip(new, self._encoded([f" {piece}" for piece in new]), strict=True))
        self._known, self._size = known, size + sum(map(len, new))
        firsts = self._encoded([pieces[0] for pieces in cut])
        return [b"".join([first, *map(known.__getitem__, rest)]) for first, rest in zip(firsts, later, strict=True)]

    def _encoded(self, texts: Sequence[str]) -> list[bytes]:
        if self._marks_words:  # the fast way knows no words
            return [_marked(found.ids, found.word_ids) for found in self._backend.encode_batch(texts, add_special_tokens=False)]
        found = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        return [array("i", encoding.ids).tobytes() for encoding in found]

    def around(self, text: str) -> tuple[bytes, bytes]:
        """Return the ids of the special tokens before and after a text; of one without tokens, all as those before it."""
        encoding = self._backend.encode(text)
        ids, inside = array("i", encoding.ids), [place for place, part in enumerate(encoding.sequence_ids) if part == 0]
        before, after = (ids[: inside[0]], ids[inside[-1] + 1 :]) if inside else (ids, ids[:0])
        return before.tobytes(), after.tobytes()


def ids_of(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, marks_words: bool = False) -> list[bytes]:
    """Return the ids of each text, without special tokens, as the bytes of int32; ``marks_words`` as ``Pieces`` has it.

    To a slow tokenizer each token is a word.
    """
    if (pieces := pieces_of(tokenizer, marks_words)) is not None:
        return pieces.ids(texts)
    found = tokenizer(list(texts), add_special_tokens=False, verbose=False)
    if marks_words and tokenizer.is_fast:
        return [_marked(ids, found.word_ids(index)) for index, ids in enumerate(found["input_ids"])]
    return [array("i", ids).tobytes() for ids in found["input_ids"]]


def _marked(ids: Sequence[int], words: Sequence[int | None]) -> bytes:
    pairs = zip(ids, words, [None, *words], strict=False)
    return array("i", [~token if word == before is not None else token for token, word, before in pairs]).tobytes()


@lru_cache(maxsize=2)
def pieces_of(tokenizer: PreTrainedTokenizerBase, marks_words: bool = False) -> Pieces | None:
    """Return the pieces of a tokenizer; None if it is slow, or does more to a text than its backend."""
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    kind = type(tokenizer)
    is_plain = tokenizer.is_fast and kind._encode_plus is PreTrainedTokenizerFast._encode_plus
    return Pieces(tokenizer, marks_words) if is_plain and kind.__call__ is PreTrainedTokenizerBase.__call__ else None


def cutter(backend: Any) -> Callable[[str], list[str]] | None:
    """Return what cuts a text at spaces, if its tokens are those of its pieces, each with a space before it; or else None."""
    added = backend.get_added_tokens_decoder().values()
    kinds = [_kind(part) for part in _parts(backend.pre_tokenizer)]
    if (
        getattr(backend.model, "dropout", None)
        or any(token.rstrip or re.search(r"\s", token.content) for token in added)
        or not {part["type"] for part in _parts(backend.normalizer)} <= _NORMALIZERS
        or "unknown" in kinds
    ):
        return None
    if kinds[:1] == ["drops spaces"]:
        return _words
    return _SPACE.split if "cuts at spaces" in kinds else None


def _words(text: str) -> list[str]:
    """Cut a text whose white space leaves no token, and may be any."""
    return text.replace("\n", " ").split(" ")


def _kind(part: dict[str, Any]) -> str:
    if part["type"] in ("BertPreTokenizer", "Whitespace", "WhitespaceSplit"):
        return "drops spaces"
    if part["type"] == "Digits" or part.get("use_regex") is False:
        return "keeps spaces"
    is_known = part["type"] == "Split" and part["pattern"].get("Regex") in _PATTERNS and not part["invert"]
    return "cuts at spaces" if part["type"] == "ByteLevel" or (is_known and part["behavior"] == "Isolated") else "unknown"


def _parts(component: Any) -> list[dict[str, Any]]:
    """Return the settings of a normalizer or pre-tokenizer, of a sequence those of its parts."""
    if component is None:
        return []
    settings = json.loads(component.__getstate__())
    return settings.get("normalizers") or settings.get("pretokenizers") or [settings]

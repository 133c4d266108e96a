"""ROUGE of generated texts in any script, and what else is measured of them. Independent of models and their tokenizers.

``rouge_score``'s own tokenizer keeps only a-z and 0-9: two equal Chinese titles score 0, two different ones that share an
English word score 1. So it is for English only. Tokens of Chinese are characters or jieba's words, as the names of the scores
say: characters score higher than words, and the two are not comparable.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Sequence
from statistics import fmean

from rouge_score.rouge_scorer import RougeScorer
from rouge_score.tokenizers import DefaultTokenizer, Tokenizer

from hftune.data.jieba_words import segment

# Han with its extensions, compatibility forms and iteration mark; kana; Hangul syllables. Not their punctuation, such as the
# dot between the parts of a foreign name.
_SINGLE = "\u3005-\u3007\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_SINGLE += "\u3041-\u3096\u309d-\u309f\u30a1-\u30fa\u30fc-\u30ff\u31f0-\u31ff\uac00-\ud7a3"
_NO_SPACES = (range(0xE00, 0xF00), range(0x1000, 0x10A0), range(0x1780, 0x1800), range(0xA9E0, 0xAA00), range(0xAA60, 0xAA80))
"""Thai and Lao, Burmese, Khmer, and the extensions of Burmese: scripts that put no spaces between words."""
_MARKED = range(0x300, 0x20000)
"""Where the marks of all scripts are, but for the second variation selectors, which change how a Han character is drawn."""


@functools.cache  # not at import, as it looks at a hundred thousand characters
def _token() -> re.Pattern[str]:
    """Return the pattern of a token of CharTokenizer. Marks, such as the vowels of Hindi and Thai, continue a token."""
    single = _SINGLE + "".join(
        chr(code) for codes in _NO_SPACES for code in codes if unicodedata.category(chr(code)).startswith("L")
    )
    marks = "\u200d" + "".join(  # ZERO WIDTH JOINER, within words of Sinhala; without the first variation selectors
        chr(code) for code in _MARKED if unicodedata.category(chr(code)) in ("Mn", "Mc") and not 0xFE00 <= code <= 0xFE0F
    )
    return re.compile(rf"[{single}][{marks}]*|(?:[^\W_{single}]+[{marks}]*)+")


class CharTokenizer(Tokenizer):
    """Split into single Han characters, kana and Hangul syllables, and lower-cased runs of all other letters and digits.

    Letters of Thai, Lao, Khmer and Burmese are single, too. Marks belong to the letter before them. The text is normalised
    first (NFKC), such as full-width forms; punctuation and white space are dropped: "GDP增长6.7%" gives gdp, 增, 长, 6, 7.
    """

    def tokenize(self, text: str) -> list[str]:
        return _token().findall(unicodedata.normalize("NFKC", text).lower())


class WordTokenizer(Tokenizer):
    """Split into jieba's words without new-word detection (HMM).

    The text is normalised (NFKC) and lower-cased first: jieba knows "T恤" but not "t恤", so a model that writes lower case
    would lose words otherwise. Pieces without a letter or digit are dropped.
    """

    def tokenize(self, text: str) -> list[str]:
        words = segment(unicodedata.normalize("NFKC", text).lower())
        return [word for word in words if any(character.isalnum() for character in word)]


def tokenizers(language: str) -> dict[str, Tokenizer]:
    """Return what cuts texts of a language (ISO 639-1) for ROUGE, by the suffix of the scores' names.

    English: rouge_score's own, lower-cased runs of a-z and 0-9, of which those of more than three letters are reduced to
    Porter's stems. Chinese: both characters and words. Others: CharTokenizer, that is, unstemmed words in scripts with spaces,
    and characters in those without, and in Korean's.
    """
    if language == "zh":
        return {"_char": CharTokenizer(), "_word": WordTokenizer()}
    return {"": DefaultTokenizer(use_stemmer=True) if language == "en" else CharTokenizer()}


def rouge(predictions: Sequence[str], references: Sequence[str], language: str) -> dict[str, float]:
    """Return ROUGE-1, ROUGE-2 and ROUGE-L F1 on the tokens that suit a language, means over the pairs, in [0, 1].

    Equal texts score 1. As in rouge_score, a text without tokens scores 0 against any text, even an empty one: an empty
    reference is no title. ROUGE-2 is also 0 if either text has a single token. ROUGE-L is that of whole texts, as its paper
    defines it for one sentence, not rougeLsum, which depends on line breaks.
    Source: Lin 2004, "ROUGE: A Package for Automatic Evaluation of Summaries", sections 2 and 3.1, with beta = 1.
    """
    kinds = {"rouge1": "rouge_1", "rouge2": "rouge_2", "rougeL": "rouge_l"}
    found: dict[str, float] = {}
    for suffix, tokenizer in tokenizers(language).items():
        scorer = RougeScorer([*kinds], tokenizer=tokenizer)
        scores = [scorer.score(target=true, prediction=text) for text, true in zip(predictions, references, strict=True)]
        found |= {f"{name}{suffix}": fmean(score[kind].fmeasure for score in scores) for kind, name in kinds.items()}
    return found


def rouge_l_of_each(predictions: Sequence[str], references: Sequence[str], language: str) -> tuple[str, list[float]]:
    """Return the ROUGE-L F1 of each pair, on a language's first kind of token; before them the name of their mean."""
    suffix, tokenizer = next(iter(tokenizers(language).items()))
    scorer = RougeScorer(["rougeL"], tokenizer=tokenizer)
    pairs = zip(predictions, references, strict=True)
    return f"rouge_l{suffix}", [scorer.score(target=true, prediction=text)["rougeL"].fmeasure for text, true in pairs]


def exact_match(predictions: Sequence[str], references: Sequence[str]) -> float:
    """Return the share of predictions that equal their reference, in [0, 1]; white space around both is ignored.

    An empty prediction equals no reference, as in ``rouge``.
    """
    return fmean(text.strip() == true.strip() != "" for text, true in zip(predictions, references, strict=True))


def folded(text: str) -> str:
    """Return a text without differences of case, white space and full-width forms; punctuation stays.

    A BERT vocabulary lower-cases and puts blanks between tokens, so titles are compared in this form.
    """
    return "".join(unicodedata.normalize("NFKC", text).lower().split())


def lengths(predictions: Sequence[str]) -> dict[str, float]:
    """Return the mean length in characters without surrounding white space, and the share of empty texts, in [0, 1]."""
    sizes = [len(text.strip()) for text in predictions]
    return {"mean_length": fmean(sizes), "empty_share": fmean(size == 0 for size in sizes)}

"""ROUGE of generated texts in any script, and further metrics of titles. Independent of models and their tokenizers.

``rouge_score``'s own tokenizer keeps only a-z and 0-9: two equal Chinese titles score 0, two different ones that share an
English word score 1. So it is for English only. Tokens of Chinese are characters or jieba's words, as the names of the scores
say: characters score higher than words, and the two are not comparable.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any, ClassVar

import datasets
import evaluate
from rouge_score.rouge_scorer import RougeScorer
from rouge_score.tokenizers import DefaultTokenizer

_TEXTS = datasets.Features({"predictions": datasets.Value("string"), "references": datasets.Value("string")})

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


class CharTokenizer:
    """Split into single Han characters, kana and Hangul syllables, and lower-cased runs of all other letters and digits.

    Letters of Thai, Lao, Khmer and Burmese are single, too. Marks belong to the letter before them. The text is normalised
    first (NFKC), such as full-width forms; punctuation and white space are dropped: "GDP增长6.7%" gives gdp, 增, 长, 6, 7.
    """

    def tokenize(self, text: str) -> list[str]:
        return _token().findall(unicodedata.normalize("NFKC", text).lower())


class WordTokenizer:
    """Split into jieba's words without new-word detection (HMM), by rjieba if it is installed, else by jieba: the same words.

    The text is normalised (NFKC) and lower-cased first: jieba knows "T恤" but not "t恤", so a model that writes lower case
    would lose words otherwise. Pieces without a letter or digit are dropped.
    """

    def __init__(self):
        self._cut = _word_cutter()

    def tokenize(self, text: str) -> list[str]:
        words = self._cut(unicodedata.normalize("NFKC", text).lower())
        return [word for word in words if any(character.isalnum() for character in word)]


@functools.cache  # not at import and not in the metric, so that a metric can be pickled
def _word_cutter() -> Callable[[str], list[str]]:
    try:
        import rjieba
    except ImportError:
        return _slow_word_cutter()
    return lambda text: rjieba.cut(text, False)


def _slow_word_cutter() -> Callable[[str], list[str]]:
    try:
        import jieba
    except ImportError:
        raise ModuleNotFoundError("ROUGE on Chinese words needs a package that is not installed: pip install rjieba.") from None
    cutter = jieba.Tokenizer()
    # Read here, because jieba would keep a cache file that all users of the machine share, and print to stderr.
    cutter.FREQ, cutter.total = cutter.gen_pfdict(cutter.get_dict_file())
    cutter.initialized = True
    return lambda text: cutter.lcut(text, HMM=False)


class _TextMetric(evaluate.Metric):
    """A metric of pairs of a generated and a true text."""

    def __init__(self):
        super().__init__(keep_in_memory=True)

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(description=type(self).__doc__, citation="", inputs_description="", features=_TEXTS)


class _Rouge(_TextMetric):
    """Mean F1 over the pairs."""

    suffix: ClassVar[str]
    """End of the names of the scores."""
    tokenizer: ClassVar[Callable[[], Any]]

    def _compute(self, predictions: list[str], references: list[str]) -> dict[str, float]:
        kinds = {"rouge1": "rouge_1", "rouge2": "rouge_2", "rougeL": "rouge_l"}
        scorer = RougeScorer(list(kinds), tokenizer=type(self).tokenizer())
        scores = [scorer.score(target=true, prediction=text) for text, true in zip(predictions, references, strict=True)]
        return {f"{name}{self.suffix}": fmean(score[kind].fmeasure for score in scores) for kind, name in kinds.items()}


class RougeChar(_Rouge):
    """ROUGE-1, ROUGE-2 and ROUGE-L F1 on characters (see CharTokenizer), means over the pairs, in [0, 1].

    Equal texts score 1. As in rouge_score, a text without tokens scores 0 against any text, even an empty one: an empty
    reference is no title. ROUGE-2 is also 0 if either text has a single token.
    Source: Lin 2004, "ROUGE: A Package for Automatic Evaluation of Summaries", sections 2 and 3.1, with beta = 1.
    """

    suffix = "_char"
    tokenizer = CharTokenizer


class RougeWord(_Rouge):
    """ROUGE-1, ROUGE-2 and ROUGE-L F1 on jieba's words without HMM (see WordTokenizer), means over the pairs, in [0, 1].

    Texts with no token or a single one score as in RougeChar. A short title can well be a single token here.
    """

    suffix = "_word"
    tokenizer = WordTokenizer


class EnglishTokenizer(DefaultTokenizer):
    """rouge_score's own: lower-cased runs of a-z and 0-9, those of more than three letters reduced to Porter's stems."""

    def __init__(self):
        super().__init__(use_stemmer=True)


class RougeEnglish(_Rouge):
    """ROUGE-1, ROUGE-2 and ROUGE-L F1 on stemmed English words, means over the pairs, in [0, 1]: rouge_score with a stemmer.

    ROUGE-L is that of whole texts, as its paper defines it for one sentence, not rougeLsum, which depends on line breaks.
    """

    suffix = ""
    tokenizer = EnglishTokenizer


class RougeOther(_Rouge):
    """ROUGE-1, ROUGE-2 and ROUGE-L F1 on the tokens of CharTokenizer, means over the pairs, in [0, 1].

    These are unstemmed words in scripts with spaces, and characters in those without, and in Korean's.
    """

    suffix = ""
    tokenizer = CharTokenizer


def rouge_for(language: str) -> list[type[_Rouge]]:
    """Return the kinds of ROUGE that suit texts in a language (ISO 639-1); the tokenizer of the first one cuts single rows."""
    return {"en": [RougeEnglish], "zh": [RougeChar, RougeWord]}.get(language, [RougeOther])


def rouge_l_of_each(
    predictions: Sequence[str], references: Sequence[str], tokenizer: Callable[[], Any] = CharTokenizer
) -> list[float]:
    """Return the ROUGE-L F1 of each pair; by default on characters, whose mean is ``rouge_l_char``."""
    scorer = RougeScorer(["rougeL"], tokenizer=tokenizer())
    pairs = zip(predictions, references, strict=True)
    return [scorer.score(target=true, prediction=text)["rougeL"].fmeasure for text, true in pairs]


class ExactMatch(_TextMetric):
    """Share of predictions that equal their reference, in [0, 1]; white space around both is ignored.

    An empty prediction equals no reference, as in RougeChar.
    """

    score: ClassVar[str] = "exact_match"

    def plain(self, text: str) -> str:
        """Return what is compared of a text."""
        return text.strip()

    def _compute(self, predictions: list[str], references: list[str]) -> dict[str, float]:
        pairs = [(self.plain(text), self.plain(true)) for text, true in zip(predictions, references, strict=True)]
        return {self.score: fmean(text == true != "" for text, true in pairs)}


class FoldedExactMatch(ExactMatch):
    """The same without regard to case, white space and full-width forms, for titles; punctuation does count.

    A BERT vocabulary lower-cases and puts blanks between tokens.
    """

    score = "exact_match_folded"

    def plain(self, text: str) -> str:
        return "".join(unicodedata.normalize("NFKC", text).lower().split())


class PredictionLength(_TextMetric):
    """Mean length of the predictions in characters without surrounding white space; share of empty ones, in [0, 1]."""

    def _compute(self, predictions: list[str], references: list[str]) -> dict[str, float]:
        lengths = [len(text.strip()) for text in predictions]
        return {"mean_length": fmean(lengths), "empty_share": fmean(length == 0 for length in lengths)}

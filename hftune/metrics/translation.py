"""BLEU and chrF of generated texts, by sacreBLEU, in its scale of 0 to 100. Independent of models and their tokenizers."""

from __future__ import annotations

from collections.abc import Sequence

from sacrebleu.metrics import BLEU, CHRF

CHARACTERS = {"zh": "zh", **dict.fromkeys(("ja", "ko", "th", "lo", "km", "my"), "char")}
"""sacreBLEU's tokenizer for languages that 13a, its default, does not cut into words. Its own for Japanese and Korean need
packages and dictionaries that not every machine has."""


def bleu(predictions: Sequence[str], references: Sequence[str], language: str) -> dict[str, float]:
    """Return the BLEU of a whole split, in [0, 100].

    Args:
        language: of the references (ISO 639-1), which decides on the tokenizer: 13a, unless CHARACTERS says otherwise.

    Source: Post 2018, "A Call for Clarity in Reporting BLEU Scores"; Papineni et al. 2002.
    """
    metric = BLEU(tokenize=CHARACTERS.get(language, "13a"), force=True)  # force: no warning of texts that look tokenized
    return {"bleu": metric.corpus_score(list(predictions), [list(references)]).score}


def chrf(predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Return the chrF2 of a whole split, in [0, 100]: F-score of n-grams of 1 to 6 characters, which suits any language.

    Source: Popović 2015, "chrF: character n-gram F-score for automatic MT evaluation", with beta = 2.
    """
    return {"chrf": CHRF().corpus_score(list(predictions), [list(references)]).score}


def chrf_of_each(predictions: Sequence[str], references: Sequence[str]) -> list[float]:
    """Return the chrF2 of each pair, in [0, 100]. Their mean is not that of the split."""
    metric = CHRF()
    return [metric.sentence_score(text, [true]).score for text, true in zip(predictions, references, strict=True)]

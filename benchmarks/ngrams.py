"""Perplexities of n-gram models, which a language model has to beat. Independent of texts and tokenizers."""

from __future__ import annotations

import numpy as np


def unigram_perplexity(train: np.ndarray, text: np.ndarray, vocab_size: int) -> float:
    """Return the perplexity of a unigram model of ``train`` on ``text``, without its first token.

    Args:
        train, text: streams of token ids. Counts are increased by one, so that no token is impossible.
    """
    return _perplexity(_shares(np.bincount(train, minlength=vocab_size))[text[1:]])


def bigram_perplexity(train: np.ndarray, text: np.ndarray, vocab_size: int) -> float:
    """Return the perplexity of a bigram model of ``train`` on ``text``, without its first token.

    Interpolated Kneser-Ney smoothing; the discount is estimated from ``train``, nothing is tuned.
    Source: Chen and Goodman, An Empirical Study of Smoothing Techniques for Language Modeling, 1998, section 2.7.
    """
    pairs, counts = np.unique(train[:-1].astype(np.int64) * vocab_size + train[1:], return_counts=True)
    once, twice = (counts == 1).sum(), (counts == 2).sum()
    discount = once / (once + 2 * twice) if once else 0.0
    times_V = np.bincount(train[:-1], minlength=vocab_size)
    successors_V = np.bincount(pairs // vocab_size, minlength=vocab_size)
    after_others_V = _shares(np.bincount(pairs % vocab_size, minlength=vocab_size))

    before, after = text[:-1].astype(np.int64), text[1:]
    place = np.searchsorted(pairs, wanted := before * vocab_size + after).clip(max=len(pairs) - 1)
    seen = np.where(pairs[place] == wanted, counts[place] - discount, 0.0)
    times = np.maximum(times_V[before], 1)
    left_over = np.where(times_V[before] > 0, discount * successors_V[before] / times, 1.0)
    return _perplexity(seen / times + left_over * after_others_V[after])


def _shares(counts: np.ndarray) -> np.ndarray:
    return (counts + 1) / (counts.sum() + len(counts))


def _perplexity(probabilities: np.ndarray) -> float:
    return float(np.exp(-np.log(probabilities).mean()))

"""Retrieval metrics: the rank of each anchor's positive among all documents, and correlation with given similarities.

Independent of models. Shape suffixes: N anchors, C documents, D width, R rows of a chunk.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import spearmanr

AT_ONCE = 2**24
"""Similarities that are in memory at once: 64 MiB of float32."""
ROUNDING = 1e-6
"""By how much similarities of equal embeddings may differ. Those of one text differ by 1e-7 with the batch that computed them,
and columns of a matrix product with their places: equality to the bit would make ranks depend on the size of batches."""


@dataclass(frozen=True)
class Ranking:
    """What was found for each anchor."""

    ranks_N: np.ndarray
    """Rank of its positive, from 1."""
    nearest_N: np.ndarray
    """Sample whose positive is the most similar document."""


def rank_positives(
    anchors_ND: np.ndarray, positives_ND: np.ndarray, anchor_texts: Sequence[int], positive_texts: Sequence[int]
) -> Ranking:
    """Rank each anchor's positive among the distinct positives of all anchors, by cosine similarity.

    Other positives of an equal anchor do not count against it. Of documents that are equally similar, but for rounding, the
    positive comes last: a model that gives every text the same embedding finds nothing, nor does one whose embeddings are NaN.

    Args:
        anchors_ND, positives_ND: of length 1, float32.
        anchor_texts, positive_texts: a number for each text, the same for equal texts.
    """
    first = {text: sample for sample, text in reversed([*enumerate(positive_texts)])}
    document_of = {text: document for document, text in enumerate(first)}
    samples_C = np.array([*first.values()])
    documents_CD, own_N = positives_ND[samples_C], np.array([document_of[text] for text in positive_texts])
    documents_of = defaultdict(set)
    for anchor, document in zip(anchor_texts, own_N.tolist(), strict=True):
        documents_of[anchor].add(document)
    ranks, nearest, size = [], [], max(1, AT_ONCE // len(documents_CD))
    for start in range(0, len(own_N), size):
        own_R = own_N[start : start + size]
        similar_RC = anchors_ND[start : start + size] @ documents_CD.T
        nearest.append(similar_RC.argmax(1))
        own_R1 = similar_RC[np.arange(len(own_R)), own_R][:, None]
        for row, anchor in enumerate(anchor_texts[start : start + size]):
            if len(documents_of[anchor]) > 1:
                similar_RC[row, [*documents_of[anchor] - {own_R[row]}]] = -np.inf
        ranks.append((~(similar_RC < own_R1 - ROUNDING)).sum(1))
    return Ranking(np.concatenate(ranks), samples_C[np.concatenate(nearest)])


def recall_at(ranks_N: np.ndarray, k: int) -> float:
    """Return the share of anchors whose positive is among the first k documents, in [0, 1]."""
    return float((ranks_N <= k).mean())


def mrr_at(ranks_N: np.ndarray, k: int) -> float:
    """Return the mean reciprocal rank of the positives, where ranks after k count 0, in [0, 1]."""
    return float(np.where(ranks_N <= k, 1 / ranks_N, 0).mean())


def spearman(similarities_N: np.ndarray, scores_N: np.ndarray) -> float | None:
    """Return Spearman's rank correlation, in [-1, 1]; None if either is the same for all; NaN if a similarity is.

    Similarities that are equal but for rounding, such as those of pairs of equal texts, share a rank.
    """
    similarities_N = np.round(similarities_N / ROUNDING)
    if np.ptp(similarities_N) == 0 or np.ptp(scores_N) == 0:
        return None
    return float(spearmanr(similarities_N, scores_N).statistic)

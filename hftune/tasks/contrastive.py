"""Embeddings of texts from their tokens, and their multiple-negatives ranking loss: InfoNCE over cosine similarities.

Independent of models, micro-batches and processes.

Shape suffixes: B samples, K texts of each (anchor, positive, hard negatives), C documents (positives and negatives of all
samples), D width of the embeddings, R rows of a chunk; N texts, T tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize
from torch.utils.checkpoint import checkpoint

AT_ONCE = 2**24
"""Similarities that are in memory at once: 64 MiB of float32, a few times."""


def ranking_losses(
    vectors_BKD: Tensor, texts_BK: Tensor, scale: float, symmetric: bool = False, mask_duplicates: bool = True
) -> Tensor:
    """Return the loss of each sample (B,): the cross-entropy of finding its positive among the documents of all samples.

    Args:
        vectors_BKD: normalised embeddings of anchor, positive and hard negatives.
        texts_BK: a number for each text, the same for equal texts, (B, K) int64.
        scale: of the similarities: 1 / temperature.
        symmetric: the mean of that loss and the one of finding each positive's anchor among all anchors.
        mask_duplicates: leave out documents that are no negatives: those equal to the sample's positive, and the positives of
            other samples whose anchors are equal to its own.

    Source: Henderson et al., "Efficient Natural Language Response Suggestion for Smart Reply" (2017), section 4.4; Oord et al.,
    "Representation Learning with Contrastive Predictive Coding" (2018).
    """
    anchors_BD, positives_BD = vectors_BKD[:, 0], vectors_BKD[:, 1]
    documents_CD, document_texts_C = _by_column(vectors_BKD[:, 1:]), _by_column(texts_BK[:, 1:])
    count, (anchor_texts_B, positive_texts_B) = len(texts_BK), texts_BK[:, :2].T
    own_B = torch.arange(count, device=texts_BK.device)

    def hidden(start: int, stop: int, columns: int) -> Tensor | None:
        """Return which of the first ``columns`` documents are no negatives of samples ``start`` to ``stop``, bool."""
        if not mask_duplicates:
            return None
        found_RC = document_texts_C[:columns] == positive_texts_B[start:stop, None]
        found_RC[:, :count] |= anchor_texts_B == anchor_texts_B[start:stop, None]
        return found_RC.scatter_(1, own_B[start:stop, None], False)

    def losses(queries_BD: Tensor, candidates_CD: Tensor) -> Tensor:
        def of(start: int, stop: int) -> Tensor:
            scores_RC = scale * (queries_BD[start:stop] @ candidates_CD.T)
            if (hidden_RC := hidden(start, stop, len(candidates_CD))) is not None:
                scores_RC = scores_RC.masked_fill(hidden_RC, -torch.inf)
            return cross_entropy(scores_RC, own_B[start:stop], reduction="none")

        size = max(1, AT_ONCE // len(candidates_CD))
        if count <= size:
            return of(0, count)
        spans = [(start, min(start + size, count)) for start in range(0, count, size)]
        # For the gradient, each chunk is computed again.
        return torch.cat([checkpoint(of, *span, use_reentrant=False) for span in spans])

    if not symmetric:
        return losses(anchors_BD, documents_CD)
    return (losses(anchors_BD, documents_CD) + losses(positives_BD, anchors_BD)) / 2


def _by_column(values_BK: Tensor) -> Tensor:
    """Return all positives, then all first negatives, and so on: (B, K, ...) to (K B, ...)."""
    return values_BK.transpose(0, 1).flatten(0, 1)


def pooled(hidden_NTD: Tensor, mask_NT: Tensor, how: str) -> Tensor:
    """Return a vector of length 1 for each text, (N, D) float32.

    Args:
        mask_NT: not 0 for real tokens, which may be padded on either side.
        how: mean of the tokens, cls for the first one, or last.
    """
    hidden_NTD = hidden_NTD.float()
    if how == "mean":
        weights_NT1 = mask_NT[..., None].to(hidden_NTD.dtype)
        vectors_ND = (hidden_NTD * weights_NT1).sum(1) / weights_NT1.sum(1)
    else:
        places_T = torch.arange(mask_NT.shape[1], device=mask_NT.device)
        real_NT = mask_NT.bool()
        first_N = torch.where(real_NT, places_T, len(places_T)).amin(1)
        last_N = torch.where(real_NT, places_T, -1).amax(1)
        place_N = first_N if how == "cls" else last_N
        vectors_ND = hidden_NTD.take_along_dim(place_N[:, None, None], 1)[:, 0]
    return normalize(vectors_ND, dim=-1)

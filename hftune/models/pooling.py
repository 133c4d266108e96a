"""Pooling: from the hidden states of a text's tokens to one vector. Independent of models and tasks.

Shape suffixes: N texts, T tokens, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize


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

"""Embeds texts on the processes of this job, and finds hard negatives among them, exactly. Independent of the model.

Shape suffixes: N anchors, C documents, D width, R anchors of a block, K documents of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hftune.commands import predict_rows
from hftune.commands.mine import Mining
from hftune.commands.predict_rows import Parts
from hftune.errors import DataError
from hftune.metrics.retrieval import AT_ONCE, ROUNDING
from hftune.tracking.console import short, table

NEVER = torch.iinfo(torch.int64).min
"""Rank of a document that cannot be a negative."""


def compute(job: Mining) -> bool:
    """Embed, mine and write. Collective. Return whether this is the main process.

    Raises:
        ConfigError, DataError, TrainingError: as ``predict_rows.compute``; or there is no row to write.
    """
    return predict_rows.compute(job, Mined)


class Mined(Parts):
    """Keeps the embeddings in memory, and writes anchors and positives with the negatives that are found by them."""

    job: Mining

    def open(self) -> list[range]:
        self.vectors: list[np.ndarray] = []
        return self.all

    def write(self, part: range, gathered: Sequence[tuple[int, Any]]) -> None:
        self.vectors += [row["embedding"] for _, row in sorted(gathered, key=lambda pair: pair[0])]

    def table(self) -> tuple[list[str], Iterator[dict[str, Any]], dict[str, Any]]:
        """Return columns and rows of the output, and print what there was.

        Raises:
            DataError: no anchor has as many negatives.
        """
        job, vectors = self.job, torch.from_numpy(np.stack(self.vectors))
        if not vectors.isfinite().all():
            raise DataError("The model's embeddings are not all finite numbers.")
        anchors_ND, documents_CD = vectors[: len(job.anchors)], vectors[len(job.anchors) :]
        found = mine(job, anchors_ND, documents_CD)
        pairs = list(dict.fromkeys(job.pairs))
        kept = [(anchor, positive) for anchor, positive in pairs if len(found[anchor]) == job.negatives]
        said = {"anchors": f"{len(job.anchors):,}", "texts": f"{len(job.documents):,}", "rows": f"{len(kept):,}"}
        if kept:
            of_positives = [float(anchors_ND[anchor] @ documents_CD[positive]) for anchor, positive in kept]
            of_negatives = [float(anchors_ND[anchor] @ documents_CD[place]) for anchor, _ in kept for place in found[anchor]]
            said |= {"mean similarity of positives": short(float(np.mean(of_positives)))}
            said |= {"mean similarity of negatives": short(float(np.mean(of_negatives)))}
        left_out = f"{len(pairs) - len(kept):,} pairs whose anchor has fewer than {job.negatives} negatives"
        print(table(said | {"left out": left_out}), flush=True)
        if not kept:
            raise DataError(f"There is no row to write: {left_out}. Ask for fewer, or change the ranges, scores and margins.")
        names = [*job.names, *(f"negative_{index + 1}" for index in range(job.negatives))]
        rows = ([job.anchors[a], job.documents[b], *(job.documents[place] for place in found[a])] for a, b in kept)
        return names, (dict(zip(names, row, strict=True)) for row in rows), {}


def mine(job: Mining, anchors_ND: Tensor, documents_CD: Tensor) -> list[list[int]]:
    """Return the negatives of each anchor, the most similar first, as many as there are and at most ``negatives``.

    Similarities are compared as multiples of ROUNDING, and documents that are equally similar by their places: then, what is
    found depends neither on how texts were batched nor on the order in which a matrix product adds.
    """
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    documents_CD, num_documents = documents_CD.to(device), len(documents_CD)
    place_of = {text: place for place, text in enumerate(job.documents)}
    positives: list[set[int]] = [set() for _ in job.anchors]
    for anchor, positive in job.pairs:
        positives[anchor].add(positive)
    found, size = [], max(1, AT_ONCE // (4 * num_documents))  # with some copies, of whole numbers of 64 bits
    for start in range(0, len(anchors_ND), size):
        scores_RC = ((anchors_ND[start : start + size].to(device) @ documents_CD.T) / ROUNDING).round().long()
        places_RC = torch.arange(num_documents, device=device).expand_as(scores_RC)
        ranks_RC = scores_RC * num_documents - places_RC  # of equal scores, too, all are different
        highest_R1 = torch.full((len(scores_RC), 1), round_to(job.max_score, torch.inf), device=device)
        for row, own in enumerate(map(list, positives[start : start + size])):
            least = scores_RC[row, own].min().item() * ROUNDING
            if job.margin is not None:
                highest_R1[row].clamp_(max=round_to(least - job.margin))
            if job.relative_margin is not None:
                highest_R1[row].clamp_(max=round_to(least - abs(least) * job.relative_margin))
            itself = place_of.get(job.anchors[start + row])
            ranks_RC[row, own if itself is None else [*own, itself]] = NEVER
        if job.range_max is not None and job.range_max < num_documents:
            ranks_RC, order_RK = ranks_RC.topk(job.range_max)
            scores_RC, places_RC = scores_RC.gather(1, order_RK), places_RC.gather(1, order_RK)
        ranks_RC[(scores_RC > highest_R1) | (scores_RC < round_to(job.min_score, -torch.inf))] = NEVER
        best_RK, order_RK = ranks_RC.topk(min(job.range_min + job.negatives, ranks_RC.shape[1]))
        chosen = zip(places_RC.gather(1, order_RK).tolist(), (best_RK != NEVER).tolist(), strict=True)
        found += [[place for place, is_one in zip(*row, strict=True) if is_one][job.range_min :] for row in chosen]
    return found


def round_to(score: float | None, default: float = 0.0) -> float:
    """Return a similarity as a multiple of ROUNDING."""
    return default if score is None else round(score / ROUNDING)

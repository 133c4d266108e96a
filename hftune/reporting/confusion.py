"""The confusion matrix: a heat map with counts for a few classes, an image and the worst confusions for many."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence

import numpy as np

from hftune.reporting.blocks import Block, figure, table

MAX_CELLS = 12
"""Classes up to which every count is shown."""
NUM_CONFUSIONS = 20
RIGHT, WRONG = (31, 119, 180), (213, 94, 0)
"""Colours of the image: blue on the diagonal, vermilion beside it, which colour-blind people tell apart."""


def confusion(matrix: list[list[float]], names: Sequence[str]) -> Block:
    """Return a matrix (rows: true classes) with the recall and precision of each class; numbers if the names do not fit."""
    counts = np.array(matrix, dtype=float)
    names = [*names] if len(names) == len(matrix) else [str(index) for index in range(len(matrix))]
    totals = counts.sum(axis=1, keepdims=True)
    shares = np.divide(counts, totals, out=np.zeros_like(counts), where=totals > 0)
    if len(names) > MAX_CELLS:
        return overview(counts, shares, names)
    return {
        "kind": "heat_map",
        "names": names,
        "counts": counts.tolist(),
        "shares": shares.tolist(),
        "recalls": recalls(counts),
        "precisions": recalls(counts.T),
        "accuracy": counts.trace() / counts.sum() if counts.sum() else None,
    }


def recalls(counts: np.ndarray) -> list[float | None]:
    """Return the share of each class's samples that were recognised; None for a class without samples."""
    return [float(counts[index, index] / total) if total > 0 else None for index, total in enumerate(counts.sum(axis=1))]


def overview(counts: np.ndarray, shares: np.ndarray, names: Sequence[str]) -> Block:
    """Return an image of the matrix, a pixel a count, and two tables: the most frequent confusions, the weakest classes."""
    off = counts - np.diag(np.diag(counts))
    order = np.argsort(-off, axis=None, kind="stable")[:NUM_CONFUSIONS]
    pairs = [(*np.unravel_index(index, off.shape), off.flat[index]) for index in order if off.flat[index] > 0]
    confused = [[names[row], names[column], int(count), figure(f"{shares[row, column]:.0%}")] for row, column, count in pairs]
    known = sorted((share, index) for index, share in enumerate(recalls(counts)) if share is not None)[:NUM_CONFUSIONS]
    weakest = [[names[index], figure(f"{share:.0%}"), int(counts[index].sum())] for share, index in known]
    tables = [
        table(["true class", "predicted as", "count", "of its samples"], confused, title="Most frequent confusions"),
        table(["class", "recall", "samples"], weakest, title="Lowest recall"),
    ]
    found = [found for found in tables if found]
    return {"kind": "overview", "uri": matrix_uri(shares), "count": len(names), "tables": found}


def matrix_uri(shares: np.ndarray) -> str:
    """Draw the shares as transparency, so that the image fits a dark and a light page."""
    from PIL import Image

    pixels = np.empty((*shares.shape, 4), np.uint8)
    pixels[..., :3] = WRONG
    pixels[np.arange(len(shares)), np.arange(len(shares)), :3] = RIGHT
    pixels[..., 3] = np.where(shares > 0, 30 + 225 * np.sqrt(shares.clip(0, 1)), 0)  # a single mistake stays visible
    buffer = io.BytesIO()
    Image.fromarray(pixels, "RGBA").save(buffer, "PNG", optimize=True)
    return data_uri("png", buffer.getvalue())


def data_uri(kind: str, data: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"

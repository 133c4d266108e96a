"""The confusion matrix as HTML: a heat map with counts for a few classes, an image and the worst confusions for many."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from hftune.reporting.elements import Figure, Html, cut, data_uri, element, join, table

MOST_CELLS = 12
"""Classes up to which every count is shown."""
NUM_CONFUSIONS = 20
RIGHT, WRONG = (31, 119, 180), (213, 94, 0)
"""Colours of the image: blue on the diagonal, vermilion beside it, which colour-blind people tell apart."""


def names_of(names: Sequence[str], count: int) -> list[str]:
    """Return a name for each class: its number if the names do not fit."""
    return [*names] if len(names) == count else [str(index) for index in range(count)]


def confusion(matrix: list[list[float]], names: Sequence[str]) -> Html:
    """Return a matrix (rows: true classes) with the recall and precision of each class."""
    counts, names = np.array(matrix, dtype=float), names_of(names, len(matrix))
    totals = counts.sum(axis=1, keepdims=True)
    shares = np.divide(counts, totals, out=np.zeros_like(counts), where=totals > 0)
    return heat_map(counts, shares, names) if len(names) <= MOST_CELLS else overview(counts, shares, names)


def recalls(counts: np.ndarray) -> list[float | None]:
    """Return the share of each class's samples that were recognised; None for a class without samples."""
    return [float(counts[index, index] / total) if total > 0 else None for index, total in enumerate(counts.sum(axis=1))]


def percent(share: float | None) -> Figure:
    return Figure("\N{EN DASH}" if share is None else f"{share:.0%}")


def heat_map(counts: np.ndarray, shares: np.ndarray, names: Sequence[str]) -> Html:
    """Return a table of all counts; the colour is the share of the row."""
    head = [element("th", cut(name, 40), scope="col", title=name, dir="auto") for name in names]
    corner = element("td", "true \N{DOWNWARDS ARROW} predicted \N{RIGHTWARDS ARROW}", class_="corner")
    rows = []
    for row, (name, recall) in enumerate(zip(names, recalls(counts), strict=True)):
        cells = [
            element(
                "td",
                f"{counts[row, column]:,.0f}",
                class_="right" if row == column else "wrong",
                style=f"--share:{shares[row, column]:.3f}",
                title=f"{counts[row, column]:,.0f} of {name} predicted as {names[column]}: {shares[row, column]:.1%}",
            )
            for column in range(len(names))
        ]
        title = element("th", cut(name, 40), scope="row", title=name, dir="auto")
        rows.append(element("tr", title, *cells, element("td", percent(recall), class_="sum")))
    last = [element("td", percent(precision), class_="sum") for precision in recalls(counts.T)]
    right = counts.trace() / counts.sum() if counts.sum() else None
    foot = element(
        "tr",
        element("th", "precision", scope="row", class_="sum"),
        *last,
        element("td", percent(right), class_="sum", title="accuracy"),
    )
    top = element("thead", element("tr", corner, *head, element("th", "recall", scope="col", class_="sum")))
    return element("div", element("table", top, element("tbody", *rows, foot), class_="confusion"), class_="wide", tabindex="0")


def overview(counts: np.ndarray, shares: np.ndarray, names: Sequence[str]) -> Html:
    """Return an image of the matrix, a pixel a count, and two tables: the most frequent confusions, the weakest classes."""
    image = element(
        "img", src=matrix_uri(shares), class_="matrix", alt=f"Confusion matrix of {len(names)} classes, rows are true classes"
    )
    legend = element("figcaption", "Row: true class, column: prediction. Blue: recognised, orange: confused.")
    off = counts - np.diag(np.diag(counts))
    order = np.argsort(-off, axis=None, kind="stable")[:NUM_CONFUSIONS]
    pairs = [(*np.unravel_index(index, off.shape), off.flat[index]) for index in order if off.flat[index] > 0]
    confused: list[list[Any]] = [
        [names[row], names[column], int(count), percent(shares[row, column])] for row, column, count in pairs
    ]
    known = [(share, index) for index, share in enumerate(recalls(counts)) if share is not None]
    weakest = [[names[index], percent(share), int(counts[index].sum())] for share, index in sorted(known)[:NUM_CONFUSIONS]]
    parts = [element("figure", image, legend)]
    if confused:
        head = ["true class", "predicted as", "count", "of its samples"]
        parts.append(element("div", element("h3", "Most frequent confusions"), table(head, confused)))
    if weakest:
        parts.append(element("div", element("h3", "Lowest recall"), table(["class", "recall", "samples"], weakest)))
    return element("div", join(parts), class_="overview")


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

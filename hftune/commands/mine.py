"""``hftune mine``: find texts that a finished embedding model takes for the positive of an anchor, and that are not.

Checked here, before torch is imported. ``commands/mine_rows.py`` computes it, on all processes.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hftune.commands.arguments import add_table, add_trust_code, check_at_least_1
from hftune.commands.predict_data import Job, compute, prepare
from hftune.config.recipe import type_name
from hftune.data.columns import is_text
from hftune.data.table import SOURCES, WRITTEN, Table, read_table
from hftune.errors import ConfigError, DataError
from hftune.task import Task

if TYPE_CHECKING:
    from torch import nn


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", help="output folder of a run of embeddings, such as outputs/embeddings, or its address")
    add_table(parser, "table of anchors and their positives", is_required=True)
    parser.add_argument(
        "--corpus", metavar="TABLE", help=f"table of further texts to find negatives among, besides all positives: a {SOURCES}"
    )
    parser.add_argument("--output", type=Path, help=f"file for the rows to train on ({', '.join(WRITTEN)})")
    parser.add_argument("--negatives", type=int, default=3, help="negatives for each anchor (default %(default)s)")
    parser.add_argument(
        "--range-max", type=int, help="only the as many texts that are most similar to an anchor, besides its positives"
    )
    parser.add_argument("--range-min", type=int, default=0, help="of those that are left, skip the as many most similar ones")
    parser.add_argument("--max-score", type=float, help="no text with a greater similarity to the anchor, in [-1, 1]")
    parser.add_argument("--min-score", type=float, help="no text with a smaller similarity")
    parser.add_argument("--margin", type=float, help="no text whose similarity is not as much below that of the positive")
    parser.add_argument("--relative-margin", type=float, help="the same, as a share of the similarity of the positive")
    parser.add_argument(
        "--batch-size", type=int, help="texts in a batch, when they are embedded (default: that of the training's evaluations)"
    )
    add_trust_code(parser)


@dataclass
class Mining(Job):
    """What to mine. The rows of the job's table are the distinct texts to embed, anchors first, each with its prefix."""

    pairs: list[tuple[int, int]]
    """Anchor and positive of each row of the data, as places among anchors and documents."""
    anchors: list[str]
    documents: list[str]
    names: tuple[str, str]
    """Of the columns of anchors and positives."""
    negatives: int
    range_min: int
    range_max: int | None
    max_score: float | None
    min_score: float | None
    margin: float | None
    relative_margin: float | None

    def predict(self, model: nn.Module, numbers: Sequence[int]) -> list[dict[str, Any]]:
        """Return the embeddings (D,) of some texts as arrays, a tenth of what lists of numbers take."""
        import numpy as np

        return [{name: np.array(vector, np.float32) for name, vector in row.items()} for row in super().predict(model, numbers)]


def run(options: argparse.Namespace) -> int:
    """Write the rows, and print what was found. Under a launcher every process calls it."""
    check_at_least_1(options, "negatives", "batch_size", "processes")
    if options.range_min < 0:
        raise ConfigError(f"--range-min {options.range_min} must be 0 or more.")
    if options.range_max is not None and (left := options.range_max - options.range_min) < options.negatives:
        raise ConfigError(
            f"--range-max {options.range_max} leaves {left} ranks after --range-min {options.range_min}, too few for "
            f"--negatives {options.negatives}."
        )
    for name in ("max_score", "min_score", "margin", "relative_margin"):
        if not isfinite(value := getattr(options, name) or 0.0):
            raise ConfigError(f"--{name.replace('_', '-')} {value} must be a finite number.")
        if "margin" in name and value < 0:
            raise ConfigError(f"--{name.replace('_', '-')} {value} must be 0 or more.")
    return compute(job_of(options), options, "hftune.commands.mine_rows")


def job_of(options: argparse.Namespace) -> Mining:
    """Check run, pairs and corpus, and list the texts.

    Raises:
        ConfigError, DataError: there is nothing to mine with, or among.
    """
    import datasets
    import numpy as np

    vars(options).update(probabilities=False, columns=None, empty="refuse")
    job = prepare(options, columns_of)
    task: Any = job.recipe.task
    names = job.columns["anchor"], job.columns["positive"]
    if names[0] == names[1]:
        raise DataError(
            f"--data {job.table.name}: column {names[0]!r} would be both anchor and positive. Name the right ones: --map "
            "anchor=COLUMN --map positive=COLUMN."
        )
    anchors, positives = (list(map(str, job.table.rows[name])) for name in names)
    others = [] if options.corpus is None else [read_table(options.corpus)]
    corpus = [text for table in others for text in texts_of(table, names[1])]
    anchor_places, document_places = places(anchors), places([*positives, *corpus])
    prefixes = [task.prefixes.get("query", ""), task.prefixes.get("document", "")]
    texts = [prefix + text for prefix, own in zip(prefixes, (anchor_places, document_places), strict=True) for text in own]
    pairs = [(anchor_places[a], document_places[b]) for a, b in zip(anchors, positives, strict=True)]
    digest = " ".join(table.digest for table in (job.table, *others))
    job.table = Table(job.table.name, datasets.Dataset.from_dict({"text": texts}), digest)
    job.columns, job.sizes, job.empty = {"anchor": "text"}, np.array(list(map(len, texts))), np.zeros(len(texts), bool)
    given = ("negatives", "range_min", "range_max", "max_score", "min_score", "margin", "relative_margin")
    settings = {name: getattr(options, name) for name in given}
    return Mining(**vars(job), pairs=pairs, anchors=[*anchor_places], documents=[*document_places], names=names, **settings)


def columns_of(task: Task) -> Mapping[str, str | None]:
    """Return the columns of anchors and positives that a recipe names, or raise ConfigError if it is none of embeddings."""
    from hftune.tasks.embeddings import Embeddings

    if not isinstance(task, Embeddings):
        raise ConfigError(f"hftune mine is for runs of the recipe embeddings, not for {type_name(type(task))}.")
    return {"anchor": task.anchor_column, "positive": task.positive_column}


def texts_of(table: Table, positive: str) -> list[str]:
    """Return the texts of a corpus: of the column that is called as that of the positives, or of the only one with texts.

    Raises:
        DataError: there is no such column, or a text is empty.
    """
    found = [name for name in table.columns if is_text(table.rows.features[name])]
    column = positive if positive in found else found[0] if len(found) == 1 else None
    if column is None:
        raise DataError(
            f"--corpus {table.name} has {'several columns' if found else 'no column'} of texts. It has: "
            f"{', '.join(table.columns)}. Call one {positive!r}, as that of the positives."
        )
    texts = list(table.rows[column])
    if (empty := next((row for row, text in enumerate(texts) if not (text or "").strip()), None)) is not None:
        raise DataError(f"--corpus {table.name} has an empty text in column {column!r} at row {empty} (counted from 0).")
    return texts


def places(texts: Sequence[str]) -> dict[str, int]:
    """Number the distinct texts, in the order in which they first come."""
    return {text: place for place, text in enumerate(dict.fromkeys(texts))}

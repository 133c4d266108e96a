"""Scores of tagged words, computed by seqeval and scikit-learn."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from hftune.metrics.classification import per_class

SCORES = ("precision", "recall", "f1")


def tag_metrics(
    references: Sequence[Sequence[str]], predictions: Sequence[Sequence[str]], names: Sequence[str], of_entities: bool
) -> dict[str, Any]:
    """Return the scores of the tags of texts, each in [0, 1].

    Args:
        references, predictions: the tags of the words of each text.
        names: all tags.
        of_entities: whether they say where entities begin and end; see hftune.data.tags.

    Returns:
        precision, recall and f1 of entities, as CoNLL-2003 counts them: an entity is found if its type, first and last word are
        right. If the tags are of other kinds: the means over the tags. accuracy: the share of words whose tag is right.
        per_class: precision, recall, f1 and support of each type of entity, or of each tag.
    """
    words = [tag for tags in references for tag in tags], [tag for tags in predictions for tag in tags]
    accuracy = sum(map(str.__eq__, *words)) / max(1, len(words[0]))
    if of_entities:
        whole, by_name = _entity_scores(references, predictions)
    else:
        # Not scikit-learn's classification_report, whose own entries, such as accuracy, may be the name of a tag.
        by_name = per_class(*words, names, labels=[*names])
        whole = {score: fmean(row[score] for row in by_name.values()) for score in SCORES}
    return {**{score: whole[score] for score in SCORES}, "accuracy": accuracy, "per_class": by_name}


def _entity_scores(
    references: Sequence[Sequence[str]], predictions: Sequence[Sequence[str]]
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    from seqeval.metrics import classification_report

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy's, where there is no entity at all
        report = classification_report([*references], [*predictions], output_dict=True, zero_division=0)
    rows = {
        kind: {
            **{score: float(row["f1-score" if score == "f1" else score]) for score in SCORES},
            "support": int(row["support"]),
        }
        for kind, row in report.items()
    }
    whole = rows.get("micro avg", dict.fromkeys(SCORES, 0.0))
    return whole, {kind: row for kind, row in rows.items() if not kind.endswith(" avg")}

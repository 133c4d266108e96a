"""Scores of tagged words, computed by seqeval and scikit-learn."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from statistics import fmean
from typing import Any

SCORES = ("precision", "recall", "f1-score", "support")
"""Of a tag or a type of entity, as the reports of scikit-learn and seqeval call them."""


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
    if not of_entities:
        from sklearn.metrics import precision_recall_fscore_support

        # Not classification_report, whose own entries, such as accuracy, may be the name of a tag.
        columns = precision_recall_fscore_support(*words, labels=[*names], zero_division=0.0)
        kinds = {name: dict(zip(SCORES, scores, strict=True)) for name, *scores in zip(names, *columns, strict=True)}
        whole = {score: fmean(scores[score] for scores in kinds.values()) for score in SCORES}
    else:
        from seqeval.metrics import classification_report

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numpy's, where there is no entity at all
            report = classification_report([*references], [*predictions], output_dict=True, zero_division=0)
        whole = report.get("micro avg", {})
        kinds = {kind: scores for kind, scores in report.items() if not kind.endswith(" avg")}
    return {
        **{name: float(whole.get(f"{name}-score" if name == "f1" else name, 0.0)) for name in ("precision", "recall", "f1")},
        "accuracy": accuracy,
        "per_class": {
            kind: {
                "precision": float(scores["precision"]),
                "recall": float(scores["recall"]),
                "f1": float(scores["f1-score"]),
                "support": int(scores["support"]),
            }
            for kind, scores in kinds.items()
        },
    }

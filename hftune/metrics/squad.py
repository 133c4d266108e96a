"""Exact match and F1 of answers, by the rules of SQuAD's official script."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

PUNCTUATION = str.maketrans("", "", string.punctuation)


def answer_scores(prediction: str, answers: Sequence[str]) -> dict[str, float]:
    """Return exact_match and f1 of an answer, in [0, 1]: the best over those that are right, without case, punctuation and
    articles. A question without an answer is answered rightly by an empty text.

    Source: evaluate-v2.0.py of SQuAD 2.0. That of torchmetrics takes fifty times as long.
    """
    said, right = _words(prediction), [*map(_words, answers or [""])]
    return {"exact_match": float(said in right), "f1": round(max(_f1(said, words) for words in right), 6)}


def _words(text: str) -> list[str]:
    return re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(PUNCTUATION)).split()


def _f1(said: list[str], right: list[str]) -> float:
    if not (said and right):
        return float(said == right)
    return 2 * sum((Counter(said) & Counter(right)).values()) / (len(said) + len(right))


def split_scores(rows: Sequence[Mapping[str, Any]], unanswerable: bool) -> dict[str, float]:
    """Return the scores of a whole split.

    Args:
        rows: with answers (those that are right), exact_match and f1; and, if questions may have no answer, null_score_diff,
            the lead of the null score over the best span, and span_f1, the f1 of that span.

    Returns:
        exact_match and f1, means over the rows; and, with ``unanswerable``, those of the questions that have an answer, the
        share of the others that is right (0 if there are none), and the best f1 with a threshold for the lead, and it.

    Source: evaluate-v2.0.py of SQuAD 2.0, which multiplies the scores by 100.
    """

    def mean(name: str, some: Sequence[Mapping[str, Any]]) -> float:
        return fmean(row[name] for row in some) if some else 0.0

    found = {name: mean(name, rows) for name in ("exact_match", "f1")}
    if not unanswerable:
        return found
    has, none = [row for row in rows if row["answers"]], [row for row in rows if not row["answers"]]
    found |= {f"has_answer_{name}": mean(name, has) for name in ("exact_match", "f1")}
    found["no_answer_accuracy"] = mean("exact_match", none)
    ranked = sorted(rows, key=lambda row: row["null_score_diff"])
    total = best = float(len(none))  # if no question is answered
    threshold = ranked[0]["null_score_diff"] - 1.0
    for row, after in zip(ranked, [*ranked[1:], None], strict=True):
        total += row["span_f1"] if row["answers"] else -1.0
        is_last_of_equals = after is None or after["null_score_diff"] > row["null_score_diff"]
        if total > best and is_last_of_equals:
            best, threshold = total, row["null_score_diff"]
    return found | {"best_f1": best / len(rows), "best_null_threshold": threshold}

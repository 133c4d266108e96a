"""Ranks of positives among all documents, and what pools tokens."""

import numpy as np
import pytest
import torch

from hftune.errors import TrainingError
from hftune.evaluation import score_of
from hftune.metrics import retrieval
from hftune.metrics.retrieval import mrr_at, rank_positives, recall_at, spearman
from hftune.tasks.contrastive import pooled


def vectors(*angles):
    return np.array([[np.cos(angle), np.sin(angle)] for angle in np.radians(angles)], np.float32)


def test_a_positive_is_ranked_among_the_distinct_documents(monkeypatch):
    anchors, positives = vectors(0, 40, 90, 10), vectors(5, 95, 60, 5)  # the first and last positive are the same text
    for at_once in (2**24, 3):  # all at once, and an anchor at a time
        monkeypatch.setattr(retrieval, "AT_ONCE", at_once)
        found = rank_positives(anchors, positives, [1, 2, 3, 4], [10, 11, 12, 10])
        assert found.ranks_N.tolist() == [1, 3, 2, 1]
        assert found.nearest_N.tolist() == [0, 2, 1, 0]


def test_another_answer_to_the_same_question_does_not_count_against_one():
    anchors, positives = vectors(0, 0, 50), vectors(10, 5, 55)
    assert rank_positives(anchors, positives, [1, 1, 2], [10, 11, 12]).ranks_N.tolist() == [1, 1, 1]
    assert rank_positives(anchors, positives, [1, 3, 2], [10, 11, 12]).ranks_N.tolist() == [2, 1, 1]


def test_a_model_that_embeds_all_texts_alike_finds_nothing():
    ranks = rank_positives(vectors(0, 0, 0), vectors(0, 0, 0), [1, 2, 3], [4, 5, 6]).ranks_N
    assert ranks.tolist() == [3, 3, 3] and recall_at(ranks, 1) == 0


def test_documents_whose_similarities_differ_by_rounding_are_equally_similar():
    text = np.random.RandomState(0).randn(768).astype(np.float32)
    alike = np.tile(text / np.linalg.norm(text), (9, 1))  # a matrix product computes the last column in another way
    assert rank_positives(alike, alike, range(9), range(9, 18)).ranks_N.tolist() == [9] * 9
    nearly = np.array([[1, 0], [1 - 2**-24, 0]], np.float32)  # the same text, computed in two batches
    assert rank_positives(nearly[[0, 0]], nearly, [1, 2], [3, 4]).ranks_N.tolist() == [2, 2]


def test_embeddings_that_are_nan_find_nothing():
    nothing = np.full((3, 2), np.nan, np.float32)
    assert rank_positives(nothing, nothing, [1, 2, 3], [4, 5, 6]).ranks_N.tolist() == [3, 3, 3]
    value = spearman(nothing[:, 0], np.array([1, 2, 3]))
    with pytest.raises(TrainingError, match=r"^After step 2 the evaluation's loss is nan and its spearman nan: training has"):
        score_of({"loss": float("nan"), "spearman": value}, "spearman", 2)
    with pytest.raises(TrainingError, match=r"^After step 2 the evaluation's loss is nan: training has diverged\."):
        score_of({"loss": float("nan"), "spearman": value}, "loss", 2)


def test_recall_and_mrr():
    ranks = np.array([1, 2, 20, 5])
    assert (recall_at(ranks, 1), recall_at(ranks, 5)) == (0.25, 0.75)
    assert mrr_at(ranks, 10) == pytest.approx((1 + 0.5 + 0.2) / 4)


def test_spearman_has_no_value_where_all_are_equal():
    assert spearman(np.array([0.5, 0.5]), np.array([1, 2])) is None
    assert spearman(np.array([0.1, 0.5]), np.array([2, 2])) is None


def test_spearman_counts_order_alone():
    assert spearman(np.array([0.1, 0.2, 0.9]), np.array([1, 2, 3])) == pytest.approx(1)


def test_pairs_of_equal_texts_share_a_rank():
    scores = np.array([1, 2, 3, 0.5])
    exact, rounded = (np.array([1, one, 1, 0.2], np.float32) for one in (1, 1 - 2**-24))
    assert spearman(rounded, scores) == spearman(exact, scores) == pytest.approx(0.774597)


@pytest.mark.parametrize("how", ["mean", "cls", "last"])
def test_pooling_sees_real_tokens_alone_on_either_side(how):
    hidden = torch.randn(2, 4, 3)
    mask = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 1]])
    found = pooled(hidden, mask, how)
    real = [hidden[0, :2], hidden[1, 1:]]
    wanted = [{"mean": rows.mean(0), "cls": rows[0], "last": rows[-1]}[how] for rows in real]
    torch.testing.assert_close(found, torch.nn.functional.normalize(torch.stack(wanted), dim=-1))

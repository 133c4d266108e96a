"""Draws that follow from keys: they have the model's probabilities, and depend on nothing beside them."""

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from transformers import GenerationConfig, LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from hftune.models.generation import KeyedDraws

LOGITS_V = torch.tensor([0.3, -1.0, 2.0, -torch.inf, 0.0, 1.1, -3.0])
N = 8_000


def drawn(keys, logits_BV, place=0, **settings):
    """Return the token of each row that follows ``place`` tokens of an answer to a prompt of five."""
    draws = KeyedDraws(keys, GenerationConfig(max_new_tokens=place + 3, **settings), 5)
    scores_BV = draws(torch.zeros(len(keys), 5 + place, dtype=torch.int64), logits_BV)
    assert (scores_BV > -torch.inf).sum(1).eq(1).all()
    return scores_BV.argmax(1)


@pytest.mark.parametrize(
    ("settings", "warpers"),
    [
        ({}, []),
        ({"temperature": 0.6}, [TemperatureLogitsWarper(0.6)]),
        ({"temperature": 2.0, "top_k": 3}, [TemperatureLogitsWarper(2.0), TopKLogitsWarper(3)]),
        ({"top_p": 0.8, "top_k": 0}, [TopPLogitsWarper(0.8)]),
    ],
)
def test_tokens_are_drawn_with_their_probabilities(settings, warpers):
    keys = [(1, row, draw) for row in range(N // 4) for draw in range(4)]
    counts_V = torch.bincount(drawn(keys, LOGITS_V.expand(N, -1), **settings), minlength=len(LOGITS_V)).numpy()
    shares_V = (
        LogitsProcessorList(warpers)(torch.zeros(1, 5, dtype=torch.int64), LOGITS_V[None]).double().softmax(-1)[0].numpy()
    )
    assert not counts_V[shares_V == 0].any()
    assert chisquare(counts_V[shares_V > 0], N * shares_V[shares_V > 0]).pvalue > 0.01


def test_draws_of_different_seeds_rows_draws_and_places_are_independent():
    def tokens(seed=0, draw=0, place=0):
        return drawn([(seed, row, draw) for row in range(N)], LOGITS_V.expand(N, -1), place).numpy()

    first, shares_V = tokens(), LOGITS_V.double().softmax(0).numpy()
    same = (shares_V**2).sum()
    for other in (tokens(seed=1), tokens(draw=1), tokens(place=1), np.roll(first, 1)):
        assert np.mean(first == other) == pytest.approx(same, abs=4 * (same * (1 - same) / N) ** 0.5)


def test_a_draw_depends_on_its_key_alone():
    keys = [(7, row, draw) for row in range(9) for draw in range(3)]
    logits_BV = torch.randn(len(keys), 50, generator=torch.Generator().manual_seed(0))
    whole = drawn(keys, logits_BV, place=2)
    assert whole.tolist() == [int(drawn([key], row[None], place=2)) for key, row in zip(keys, logits_BV, strict=True)]
    longer = KeyedDraws(keys, GenerationConfig(max_new_tokens=100), 2)  # a shorter prompt and more room
    assert longer(torch.zeros(len(keys), 4, dtype=torch.int64), logits_BV).argmax(1).tolist() == whole.tolist()

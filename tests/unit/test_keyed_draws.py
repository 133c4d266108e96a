"""Draws that follow from keys: they have the model's probabilities, and depend on nothing beside them."""

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from transformers import GenerationConfig, LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from hftune import Recipe, TrainingError
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


@pytest.mark.parametrize("after", [(), (-torch.inf, -torch.inf)])
def test_a_number_that_is_rounded_to_1_draws_the_last_token_that_has_a_probability(after):
    draws = KeyedDraws([(0,)], GenerationConfig(max_new_tokens=1), 5)
    draws.numbers_BT = torch.ones(1, 1)
    scores_BV = draws(torch.zeros(1, 5, dtype=torch.int64), torch.tensor([[*LOGITS_V, *after]]))
    assert scores_BV.argmax() == len(LOGITS_V) - 1


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_scores_that_are_not_finite_are_refused_in_a_sentence(value):
    with pytest.raises(TrainingError, match="no probabilities that are finite numbers: its weights are not, or fp16"):
        drawn([(0,)], torch.tensor([[0.0, value]]))


def test_settings_of_a_model_that_answers_greedily_do_not_keep_it_from_being_drawn_from(recwarn):
    task = Recipe.load("chats_demo", "task.max_train_samples=100", "task.max_eval_samples=9").task
    task.datasets()
    model = task.build_model().eval()
    chat, keys = [{"role": "user", "content": "3 + 4?"}], [[(0, 0, 0), (0, 0, 1)]]
    settings = {"temperature": 0.7, "max_new_tokens": 3}
    expected = task.sample(model, [chat], keys, settings, 2)
    model.generation_config.do_sample, model.generation_config.num_return_sequences = False, 2
    recwarn.clear()
    assert task.sample(model, [chat], keys, settings, 2) == expected
    assert not [str(each.message) for each in recwarn]

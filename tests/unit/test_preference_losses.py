"""The loss of each method against its paper's formula, written down independently, and against TRL where it is installed."""

from types import SimpleNamespace

import pytest
import torch

from hftune.tasks import Preferences
from hftune.tasks.preference_losses import METHODS, Settings

# Log-probabilities of chosen and rejected answers, by the model and by the reference, and the answers' tokens.
W, L = torch.tensor([-12.0, -30.5, -8.25]).double(), torch.tensor([-14.0, -22.0, -8.0]).double()
RW, RL = torch.tensor([-13.0, -29.0, -8.5]).double(), torch.tensor([-13.5, -22.5, -9.0]).double()
NW, NL = torch.tensor([5, 17, 3]), torch.tensor([6, 9, 4])
ODDS = torch.log(torch.exp(W / NW) / (1 - torch.exp(W / NW))) - torch.log(torch.exp(L / NL) / (1 - torch.exp(L / NL)))
SFT = -W / NW


def s(x):
    return 1 / (1 + torch.exp(-x))


RATIO_W, RATIO_L = torch.exp(W - RW), torch.exp(L - RL)
DELTA, MEAN = (W - RW) - (L - RL), (W - RW) / NW - (L - RL) / NL
EXPECTED = {
    "sigmoid": ({}, -torch.log(s(0.1 * DELTA))),
    "cDPO": ({"beta": 0.3, "label_smoothing": 0.2}, -0.8 * torch.log(s(0.3 * DELTA)) - 0.2 * torch.log(s(-0.3 * DELTA))),
    "length-normalised": ({"beta": 5.0, "length_normalized": True}, -torch.log(s(5 * MEAN))),
    "rpo": ({"sft_weight": 0.7}, -torch.log(s(0.1 * DELTA)) + 0.7 * SFT),
    "forward_kl": ({"divergence": "forward_kl"}, -torch.log(s(0.1 * (1 / RATIO_L - 1 / RATIO_W)))),
    "js": (
        {"divergence": "js"},
        -torch.log(s(0.1 * (torch.log(2 * RATIO_W / (1 + RATIO_W)) - torch.log(2 * RATIO_L / (1 + RATIO_L))))),
    ),
    "alpha": (
        {"divergence": "alpha", "alpha": 0.3},
        -torch.log(s(0.1 * ((1 - RATIO_W**-0.3) / 0.3 - (1 - RATIO_L**-0.3) / 0.3))),
    ),
    "robust": (
        {"method": "robust", "label_smoothing": 0.1},
        (-0.9 * torch.log(s(0.1 * DELTA)) + 0.1 * torch.log(s(-0.1 * DELTA))) / 0.8,
    ),
    "hinge": ({"method": "hinge", "beta": 0.9}, torch.clamp(1 - 0.9 * DELTA, min=0)),
    "ipo": ({"method": "ipo", "beta": 0.2}, (MEAN - 2.5) ** 2),
    "apo_zero": ({"method": "apo_zero"}, 1 - s(0.1 * (W - RW)) + s(0.1 * (L - RL))),
    "apo_down": ({"method": "apo_down"}, s(0.1 * (W - RW)) + 1 - s(0.1 * DELTA)),
    "simpo": ({"method": "simpo", "gamma": 1.6}, -torch.log(s(2 * (W / NW - L / NL) - 1.6))),
    "cpo": ({"method": "cpo"}, -torch.log(s(0.1 * (W - L))) + SFT),
    "orpo": ({"method": "orpo", "beta": 0.25}, SFT - 0.25 * torch.log(s(ODDS))),
}


def outputs_of(logps, tokens):
    """Return logits of three words and labels, in which each text has these log-probabilities, spread evenly over its tokens."""
    length = int(tokens.max())
    labels, logits = torch.full((len(tokens), length), -100), torch.zeros(len(tokens), length, 3).double()
    for row, (logp, count) in enumerate(zip(logps, tokens, strict=True)):
        labels[row, :count] = 1
        p = torch.exp(logp / count)
        logits[row] = torch.log(torch.stack([(1 - p) / 2, p, (1 - p) / 2]))
    return SimpleNamespace(logits=logits.requires_grad_()), labels


@pytest.mark.parametrize("name", EXPECTED)
def test_each_loss_is_the_formula_of_its_paper(name):
    words, expected = EXPECTED[name]
    task = Preferences(**words)
    outputs, labels = outputs_of(torch.cat([W, L]), torch.cat([NW, NL]))
    target = {"labels": labels, "reference": torch.stack([RW, RL], 1)}
    losses, _, logps, tokens = task._compared(outputs, target)
    assert torch.allclose(logps, torch.stack([W, L], 1)) and torch.equal(tokens, torch.stack([NW, NL], 1))
    assert torch.allclose(losses, expected, rtol=1e-10)
    loss = task.loss(outputs, target)
    assert torch.allclose(loss, expected.sum(), rtol=1e-10) and task.num_items(target) == 3
    loss.backward()
    assert outputs.logits.grad[labels != -100].abs().sum() > 0 and not outputs.logits.grad[labels == -100].any()


def test_every_method_is_tested_and_those_without_a_reference_ask_for_none():
    assert {words.get("method", "sigmoid") for words, _ in EXPECTED.values()} == METHODS.keys()
    for method in METHODS:
        fields = Preferences(method=method).reference_fields
        assert fields == (() if method in ("simpo", "cpo", "orpo") else ("chosen_logp", "rejected_logp"))


@pytest.mark.parametrize("divergence", ["forward_kl", "alpha"])
def test_answers_that_have_become_most_unlikely_have_a_finite_loss(divergence):
    settings = Settings(beta=0.1, divergence=divergence, alpha=0.9)
    a, b = torch.tensor([-200.0, -200.0, -1.0]), torch.tensor([-210.0, -1.0, -210.0])
    losses = METHODS["sigmoid"].losses(a.requires_grad_(), b.requires_grad_(), settings)
    losses.sum().backward()
    assert all(tensor.isfinite().all() for tensor in (losses, a.grad, b.grad))


def test_a_certain_answer_has_finite_odds():
    a, b = torch.tensor([0.0, 0.0, -1.0]), torch.tensor([-1.0, 0.0, 0.0])
    losses = METHODS["orpo"].losses(a.requires_grad_(), b.requires_grad_(), Settings(beta=0.1))
    losses.sum().backward()
    assert all(tensor.isfinite().all() for tensor in (losses, a.grad, b.grad))

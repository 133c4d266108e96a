"""Dropout of our own: what it draws, and its gradients against autograd's."""

import pytest
import torch
from torch import nn

from hftune.models.dropout import Dropout, attention_with_dropout, draw_mask, replace_dropout, scale_of


def test_masks_drop_the_share_they_say_and_neighbours_are_independent():
    torch.manual_seed(0)
    mask = draw_mask(torch.empty(1000, 1000), 0.1).double()
    assert abs(mask.mean() - 0.9) < 0.002
    assert abs(mask.mean(0).std() - (0.09 / 1000) ** 0.5) < 0.002
    pairs = torch.stack([mask[:, :-1].flatten(), mask[:, 1:].flatten()])
    assert abs(torch.corrcoef(pairs)[0, 1]) < 0.005


def test_a_mask_is_a_pure_function_of_torchs_seed_and_the_same_on_every_machine():
    # Written down once: checkpoints of one machine are resumed on another.
    torch.manual_seed(42)
    assert draw_mask(torch.empty(2, 8), 0.5).tolist() == RECORDED
    torch.manual_seed(42)
    assert draw_mask(torch.empty(16), 0.5).tolist() == [*RECORDED[0], *RECORDED[1]]


def test_a_mask_takes_one_number_from_torchs_generator_whatever_its_size():
    following = []
    for shape in ((3,), (1000, 7)):
        torch.manual_seed(1)
        draw_mask(torch.empty(shape), 0.3)
        following.append(torch.rand(1).item())
    assert following[0] == following[1]


def test_dropout_scales_what_it_keeps_so_that_the_mean_stays():
    layer, x = Dropout(0.3), torch.ones(500, 500, dtype=torch.double, requires_grad=True)
    torch.manual_seed(0)
    y = layer(x)
    assert set(y.detach().unique().tolist()) == {0.0, scale_of(0.3)}
    assert abs(y.mean().item() - 1) < 0.01
    y.backward(torch.full_like(y, 2.0))
    assert torch.equal(x.grad, 2 * y)
    assert torch.equal(layer.eval()(x), x)


@pytest.mark.parametrize("p", [0.0, 1.0, 1e-6])
def test_extreme_probabilities_are_torchs(p):
    assert torch.equal(Dropout(p)(torch.ones(4, 4)), nn.Dropout(p)(torch.ones(4, 4)))


def test_plain_dropout_is_replaced_in_place_and_its_subclasses_are_not():
    class Own(nn.Dropout):
        pass

    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.25, inplace=False), Own(0.5), nn.Dropout2d(0.5))
    layer, names = model[1], list(model.state_dict())
    replace_dropout(model)
    assert [type(module) for module in model] == [nn.Linear, Dropout, Own, nn.Dropout2d]
    assert model[1] is layer and layer.p == 0.25 and list(model.state_dict()) == names


@pytest.mark.parametrize("p", [0.0, 0.25])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("at_once", [1, 2**18])
def test_attention_with_dropout_is_the_formula_gradients_included(causal, at_once, p, monkeypatch):
    monkeypatch.setattr("hftune.models.dropout.AT_ONCE", at_once)
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, 4, 9, 8, dtype=torch.double, requires_grad=True) for _ in range(3))
    bias = torch.randn(1, 4, 9, 9, dtype=torch.double, requires_grad=True)
    hidden = torch.ones(9, 9, dtype=torch.bool).triu(1) if causal else None
    torch.manual_seed(7)
    found = attention_with_dropout(q, k, v, p, 0.3, hidden, None, bias)
    torch.manual_seed(7)
    masks = [draw_mask(torch.empty(4, 9, 9), p) for _ in range(3)] if at_once == 1 else [draw_mask(torch.empty(12, 9, 9), p)]
    scores = q @ k.transpose(-1, -2) * 0.3 + bias
    weights = (scores if hidden is None else scores.masked_fill(hidden, -torch.inf)).softmax(-1)
    expected = (weights * torch.cat(masks).view(3, 4, 9, 9) * scale_of(p)) @ v
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)
    upstream = torch.randn_like(found)
    gradients = (torch.autograd.grad((y * upstream).sum(), (q, k, v, bias)) for y in (found, expected))
    for mine, theirs in zip(*gradients, strict=True):
        assert torch.allclose(mine, theirs, rtol=0, atol=1e-12)


def test_dropout_can_be_differentiated_twice():
    """As a gradient penalty does."""
    torch.manual_seed(0)
    layer, x = Dropout(0.5), torch.randn(6, dtype=torch.double, requires_grad=True)
    (slope,) = torch.autograd.grad((layer(x) ** 3).sum(), x, create_graph=True)
    slope.square().sum().backward()
    kept = slope != 0
    scale = scale_of(0.5)
    expected = torch.where(kept, 2 * (3 * scale**3) ** 2 * 2 * x.detach() ** 3, 0.0)
    assert torch.allclose(x.grad, expected)


def test_gradient_checkpointing_draws_the_same_masks_again():
    torch.manual_seed(0)
    layer, x = nn.Sequential(nn.Linear(8, 8), Dropout(0.5)), torch.randn(4, 8, requires_grad=True)
    gradients = []
    for checkpointed in (False, True):
        torch.manual_seed(5)
        y = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x)
        gradients.append(torch.autograd.grad(y.sum(), x)[0])
    assert torch.equal(*gradients)


RECORDED = [[0, 0, 1, 1, 0, 0, 0, 1], [1, 0, 0, 0, 1, 1, 1, 0]]

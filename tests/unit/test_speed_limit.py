"""How far an optimizer can move a weight, and which segments are drawn. No training."""

import math

import numpy as np
import pytest
import torch

from hftune.optim.lion import Lion
from hftune.replay.distances import SpeedLimit, adam_bound, why_unlimited
from hftune.replay.verification import Segment, draw

STEPS = 60


def moved(optimizer_class, gradients, **options):
    """Train one weight on these gradients; return how far each step moved it, in learning rates, and the limit of the whole."""
    weight = torch.nn.Parameter(torch.tensor([0.5], dtype=torch.float64))
    group = {"params": [weight], "lr": 1e-3, "lr_scale": 1.0}
    optimizer = optimizer_class([group], **options)
    positions = [weight.item()]
    for gradient in gradients:
        weight.grad = torch.tensor([gradient], dtype=torch.float64)
        optimizer.step()
        positions.append(weight.item())
    lines = {step: {"lr": 1e-3, "grad_norm": abs(gradient)} for step, gradient in enumerate(gradients, start=1)}
    limit = SpeedLimit(optimizer, {"weight": weight}, lines, clip=None)
    tensors = [{"weight": torch.tensor([positions[place]])} for place in (0, -1)]
    share, _ = limit.largest_share(Segment(0, len(gradients)), *tensors)
    return np.abs(np.diff(positions)) / 1e-3, share


def test_bound_of_adam_is_reached_by_gradients_that_grow_as_they_must_and_by_none_exceeded():
    bound = adam_bound(np.arange(1, STEPS + 1), (0.9, 0.999))
    assert bound[0] == pytest.approx(1) and (np.diff(bound) > 0).all()
    assert adam_bound(np.array([100_000]), (0.9, 0.999))[0] == pytest.approx(7.27, abs=0.01)
    growing, share = moved(torch.optim.AdamW, [(0.999 / 0.9) ** step for step in range(STEPS)], weight_decay=0.0)
    assert growing == pytest.approx(bound, rel=1e-4)
    assert 0.999 < share <= 1
    for seed in range(20):
        noise = np.random.default_rng(seed).standard_t(2, STEPS)
        found, share = moved(torch.optim.AdamW, noise.tolist(), weight_decay=0.1)
        assert (found <= bound + 0.1).all() and share <= 1


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Lion, {"weight_decay": 0.1}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        (torch.optim.Adam, {"weight_decay": 0.1}),
        (torch.optim.AdamW, {"betas": (0.95, 0.9)}),
    ],
)
def test_no_honest_training_is_too_fast(kind, options):
    _, share = moved(kind, [1.0] * STEPS, **options)
    assert 0.1 < share <= 1
    _, share = moved(kind, np.random.default_rng(0).normal(size=STEPS).tolist(), **options)
    assert share <= 1


def test_frozen_weight_must_not_move_and_unknown_optimizers_have_no_limit():
    weight, frozen = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1), requires_grad=False)
    optimizer = torch.optim.AdamW([{"params": [weight], "lr_scale": 1.0}])
    limit = SpeedLimit(optimizer, {"weight": weight, "frozen": frozen}, {1: {"lr": 1e-3}}, clip=None)
    before, after = (
        {"weight": torch.ones(1), "frozen": torch.ones(1)},
        {"weight": torch.ones(1), "frozen": torch.ones(1) + 1e-6},
    )
    assert limit.largest_share(Segment(0, 1), before, before) == (0.0, "")
    assert limit.largest_share(Segment(0, 1), before, after) == (math.inf, "frozen")
    assert why_unlimited(optimizer) is None
    assert "RMSprop has no bound" in why_unlimited(torch.optim.RMSprop([weight]))
    assert "SGD with weight decay" in why_unlimited(torch.optim.SGD([weight], weight_decay=0.1))


def test_first_and_last_segment_are_always_drawn_and_others_at_random():
    segments = [Segment(start, start + 10) for start in range(0, 200, 10)]
    assert [str(segments[0]), str(segments[-1]), str(Segment(4, 5))] == ["1-10", "191-200", "5"]
    always, drawn, left = found = draw(segments, 5, "a")
    assert always == [segments[0], segments[-1]] and len(drawn) == 3 and len(left) == 15
    assert draw(segments, 5, "a") == found and draw(segments, 5, "b") != found
    assert draw(segments, None, "a") == (always, segments[1:-1], [])
    assert draw([Segment(0, 7)], 2, "a") == ([Segment(0, 7)], [], [])

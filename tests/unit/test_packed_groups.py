"""Attention of a packed row, in groups of texts of similar length: what each text would get alone, gradients included."""

import pytest
import torch

from hftune.models import dropout as own_dropout
from hftune.models.groups import Groups
from hftune.models.packing import Packing, packed_attention

LENGTHS = (5, 9, 1, 0, 5, 12, 9, 3)


def naive(query, key, value, causal, window):
    """Return the attention of each text, one after the other, by the formula."""
    parts, start = [], 0
    for length in LENGTHS:
        q, k, v = (x[0, :, start : start + length] for x in (query, key, value))
        start += length
        index = torch.arange(length)
        distance = index[:, None] - index
        seen = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
        if window is not None:
            seen = seen & (distance.abs() < window)
        weights = (q @ k.transpose(1, 2) * q.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf).softmax(-1)
        parts.append((weights @ v).transpose(0, 1))
    return torch.cat(parts)[None]


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("causal", [True, False])
def test_each_text_gets_what_it_would_alone(causal, window, dropout, monkeypatch):
    """With dropout, texts of several lengths share a group; its masks keep all here, so that the formula still holds."""
    monkeypatch.setattr(own_dropout, "draw_mask", lambda like, *args: torch.ones(like.shape, dtype=torch.uint8))
    monkeypatch.setattr(own_dropout, "scale_of", lambda p: 1.0)
    monkeypatch.setattr(own_dropout, "AT_ONCE", 500)  # a few texts of a group at a time
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(1, sum(LENGTHS), 2, 4, generator=generator, dtype=torch.float64).transpose(1, 2) for _ in range(3)]
    inputs = [row.detach().requires_grad_() for row in rows]
    weight = torch.randn(1, sum(LENGTHS), 2, 4, generator=generator, dtype=torch.float64)
    packing = Packing.at((len(LENGTHS), max(LENGTHS)), torch.arange(sum(LENGTHS)), LENGTHS)
    expected = naive(*inputs, causal, window)
    found, _ = packed_attention(
        torch.nn.Module(), *inputs, None, dropout, is_causal=causal, packing=packing, sliding_window=window
    )
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(output, inputs, weight) for output in (found, expected)]
    torch.testing.assert_close(*gradients)


def test_padding_of_a_group_is_bounded():
    groups = Groups.of(LENGTHS, 150)
    assert groups.shapes == [(4, 5), (3, 12)]  # 24 + 16 scores are padding, then 2 x 63
    assert Groups.of(LENGTHS, 0).shapes == [(1, 1), (1, 3), (2, 5), (2, 9), (1, 12)]


def test_a_row_of_equally_long_texts_is_left_where_it_is():
    groups = Groups.of((4, 4, 4), 0)
    assert groups.shapes == [(3, 4)] and groups.at_P is None
    row = torch.randn(12, 2, 3)
    assert groups.pad(row)[0].data_ptr() == row.data_ptr()

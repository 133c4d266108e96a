"""Attention of a packed row, in groups of texts of similar length: what each text would get alone, gradients included."""

import dataclasses

import pytest
import torch

from hftune.models import dropout as own_dropout
from hftune.models.groups import group_texts
from hftune.models.packing import Packing, _padded, packed_attention

LENGTHS = (5, 9, 1, 0, 5, 12, 9, 3)
SOURCES = (7, 2, 4, 0, 7, 5, 1, 9)


def naive(query, key, value, causal, window, bias=None, sources=LENGTHS):
    """Return the attention of each text, one after the other, by the formula."""
    parts, start, start_of_keys = [], 0, 0
    for length, seen in zip(LENGTHS, sources, strict=True):
        q = query[0, :, start : start + length]
        k, v = (x[0, :, start_of_keys : start_of_keys + seen] for x in (key, value))
        start, start_of_keys = start + length, start_of_keys + seen
        distance = torch.arange(length)[:, None] - torch.arange(seen)
        seen = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
        if window is not None:
            seen = seen & (distance.abs() < window)
        scores = q @ k.transpose(1, 2) * q.shape[-1] ** -0.5
        scores = scores if bias is None else scores + bias[0, :, :length, :length]
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
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


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("kind", ["causal", "both ways", "padded", "padded causal", "cross"])
def test_a_bias_by_distance_and_a_source_are_seen(kind, dropout, monkeypatch):
    """On GPUs, attention with a bias is padded; without dropout, as torch draws its own there."""
    monkeypatch.setattr(own_dropout, "draw_mask", lambda like, *args: torch.ones(like.shape, dtype=torch.uint8))
    monkeypatch.setattr(own_dropout, "scale_of", lambda p: 1.0)
    generator = torch.Generator().manual_seed(0)
    sources, causal = SOURCES if kind == "cross" else LENGTHS, "causal" in kind

    def row(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    inputs = [row(1, 2, sum(lengths), 4) for lengths in (LENGTHS, sources, sources)]
    bias = None if kind == "cross" else row(1, 2, 12, 12)
    packing, source = (
        Packing.at((8, max(lengths)), torch.arange(8 * max(lengths)).view(8, -1)[mask], lengths)
        for lengths in (LENGTHS, sources)
        for mask in [torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]]
    )
    packing = dataclasses.replace(packing, source=source)
    given = {"packing": packing, "is_causal": causal, "position_bias": torch.zeros(1) if bias is None else bias}
    if "padded" in kind:
        found = _padded(*inputs, packing, 0.0, causal, 0.5, bias)
    else:
        found, _ = packed_attention(torch.nn.Module(), *inputs, None, dropout, **given)
    expected = naive(*inputs, causal, None, bias, sources)
    torch.testing.assert_close(found, expected)
    inputs = [x for x in (*inputs, bias) if x is not None]
    weight = row(*expected.shape).detach()
    torch.testing.assert_close(*(torch.autograd.grad(output, inputs, weight) for output in (found, expected)))


def test_padding_of_a_group_is_bounded():
    groups, keys = group_texts(LENGTHS, LENGTHS, 150)
    assert groups.shapes == [(4, 5), (3, 12)] and keys is groups  # 24 + 16 scores are padding, then 2 x 63
    assert group_texts(LENGTHS, LENGTHS, 0)[0].shapes == [(1, 1), (1, 3), (2, 5), (2, 9), (1, 12)]


def test_texts_and_what_they_see_are_in_the_same_groups():
    queries, keys = group_texts(LENGTHS, SOURCES, 60)
    assert [*zip(queries.shapes, keys.shapes, strict=True)] == [((2, 9), (2, 2)), ((2, 12), (2, 5)), ((3, 5), (3, 9))]


def test_a_row_of_equally_long_texts_is_left_where_it_is():
    groups, _ = group_texts((4, 4, 4), (4, 4, 4), 0)
    assert groups.shapes == [(3, 4)] and groups.at_P is None
    row = torch.randn(1, 2, 12, 3)
    assert groups.pad(row)[0].data_ptr() == row.data_ptr()


def test_moving_tokens_into_groups_and_back_is_one_operation_each():
    """Autograd takes as long for an operation as a group of short texts takes to compute."""
    packing = Packing.at((8, 12), torch.arange(sum(LENGTHS)), LENGTHS)
    inputs = [torch.randn(1, 2, sum(LENGTHS), 4, requires_grad=True) for _ in range(3)]
    found, _ = packed_attention(torch.nn.Module(), *inputs, None, 0.5, is_causal=False, packing=packing)
    waiting, nodes = [found.grad_fn], set()
    while waiting:
        if (node := waiting.pop()) is not None and node not in nodes:
            nodes.add(node)
            waiting += [after for after, _ in node.next_functions]
    names = sorted(node.name() for node in nodes if "AccumulateGrad" not in node.name())
    assert names == ["IntoGroupsBackward", "IntoRowBackward", "UnsqueezeBackward0", "_AttentionWithDropoutBackward"]
    found.transpose(1, 2).mul_(2)  # models may change it in place: it is no view that autograd knows from inside an operation

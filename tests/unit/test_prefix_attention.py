"""A prefix LM's attention in two parts against its mask; and kernels that align otherwise are found out."""

import copy

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import BertConfig

from hftune.models.bigbird import PrefixLM, PrefixLMConfig
from hftune.models.kinds import ATTENTION
from hftune.models.packing import attention_calls
from hftune.models.prefix_attention import Prefix, is_right

SIZES = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
KINDS = {  # 0 source, 1 title, 2 padding
    "as collated": torch.tensor([[2] * 4 + [0] * 5 + [1] * 3, [0] * 9 + [1] + [2] * 2, [0] * 9 + [1] * 3, [0] * 9 + [1] * 3]),
    "no source, no title, one token": torch.tensor([[1] * 12, [0] * 12, [2] * 11 + [1], [0] + [2] * 11]),
    "anywhere": torch.randint(0, 3, (4, 12), generator=torch.Generator().manual_seed(0)),
    "without padding": torch.tensor([[0] * 8 + [1] * 4] * 4),
}


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = BertConfig(**SIZES, max_position_embeddings=64, initializer_range=0.2, hidden_dropout_prob=0.0)
    return PrefixLM(PrefixLMConfig.warm_start(config)).double().train()


def inputs_of(kinds_BT):
    ids = torch.randint(3, 61, kinds_BT.shape, generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "token_type_ids": (kinds_BT == 1).long(), "attention_mask": (kinds_BT != 2).long()}


def both_ways(model, kinds_BT, **options):
    """Return the logits of real tokens, and the gradients of all weights."""
    model.zero_grad()
    logits = model(**inputs_of(kinds_BT), **options).logits
    assert logits.isfinite().all()
    logits = logits[kinds_BT != 2]
    (logits * torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).sin().view_as(logits)).sum().backward()
    return [logits, *[parameter.grad.clone() for parameter in model.parameters()]]


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12 * max(1, other.abs().max().item()))


@pytest.mark.parametrize("options", [{}, {"use_cache": True}, {"output_hidden_states": True}], ids=str)
@pytest.mark.parametrize("kinds_BT", KINDS.values(), ids=KINDS)
def test_two_parts_are_the_function_of_the_mask_and_its_gradients_wherever_padding_is(kinds_BT, options, model):
    assert model.config._attn_implementation == ATTENTION
    found = both_ways(model, kinds_BT, **options)
    model.set_attn_implementation("sdpa")
    assert_same(found, both_ways(model, kinds_BT))


def test_layers_compute_real_tokens_only_and_make_no_mask(model):
    seen = []
    for layer in model.bert.encoder.layer:
        layer.register_forward_pre_hook(lambda layer, args, kwargs: seen.append((args[0].shape, args[1])), with_kwargs=True)
    kinds_BT = KINDS["as collated"]
    model(**inputs_of(kinds_BT))
    assert seen == [((1, int((kinds_BT != 2).sum()), 32), None)] * 2
    seen.clear()
    model(**inputs_of(kinds_BT), use_cache=True)
    assert seen == [((4, 12, 32), None)] * 2


def test_cached_keys_are_those_of_padded_rows(model):
    batch = inputs_of(KINDS["as collated"])
    model.eval()
    caches = []
    for attention in (ATTENTION, "sdpa"):
        model.set_attn_implementation(attention)
        caches.append(model(**batch).past_key_values)
    real = batch["attention_mask"].bool()
    for one, other in zip(caches[0].layers, caches[1].layers, strict=True):
        torch.testing.assert_close(one.keys.transpose(1, 2)[real], other.keys.transpose(1, 2)[real], rtol=0, atol=1e-12)


def test_gradient_checkpointing_changes_nothing(model):
    expected = both_ways(model, KINDS["as collated"])
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for one, other in zip(both_ways(model, KINDS["as collated"]), expected, strict=True):
        assert torch.equal(one, other)


def test_attention_dropout_is_drawn_and_is_right_on_average(model):
    for layer in model.bert.encoder.layer:
        layer.attention.self.dropout.p = 0.1
    kinds_BT = KINDS["as collated"]
    torch.manual_seed(0)
    first, second = (model(**inputs_of(kinds_BT)).logits for _ in range(2))
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    assert torch.equal(model(**inputs_of(kinds_BT)).logits, first)


def test_packing_that_the_caller_passes_is_taken_and_its_use_is_noticed(model):
    batch = inputs_of(KINDS["as collated"])
    with attention_calls() as calls:
        expected = model(**batch).logits
        assert not calls
        found = model(**batch, packing=model.find_packing(batch)).logits
        assert len(calls) == 2
    assert torch.equal(found, expected)


def test_copy_computes_the_same_and_packs_by_itself(model):
    batch = inputs_of(KINDS["as collated"])
    twin = copy.deepcopy(model)
    assert torch.equal(twin(**batch).logits, model(**batch).logits)


def unequal(q_NHd, k_NHd, v_NHd, queries, keys, causal, dropout, scale, diagonal=None):
    """What a GPU's kernel for texts of unequal lengths computes; ``diagonal`` instead of the bottom right, if given."""
    context_NHd = torch.empty_like(q_NHd)
    for row, (num_queries, num_keys) in enumerate(zip(queries.lengths, keys.lengths, strict=True)):
        q_at, k_at = (slice(int(texts.starts[row]), int(texts.starts[row + 1])) for texts in (queries, keys))
        seen = torch.ones(num_queries, num_keys, dtype=torch.bool)
        seen = seen.tril(num_keys - num_queries if diagonal is None else diagonal) if causal else seen
        q, k, v = (x.transpose(0, 1)[None] for x in (q_NHd[q_at], k_NHd[k_at], v_NHd[k_at]))
        if num_queries:
            context_NHd[q_at] = scaled_dot_product_attention(q, k, v, seen, scale=scale)[0].transpose(0, 1)
    return context_NHd


def top_left(*args):
    return unequal(*args, diagonal=0)


def missing(*args):
    raise NotImplementedError("Could not run 'aten::_flash_attention_forward' with arguments from the 'CPU' backend.")


@pytest.mark.parametrize("kinds_BT", KINDS.values(), ids=KINDS)
def test_two_calls_of_a_kernel_for_unequal_lengths_are_the_same_as_row_by_row(kinds_BT):
    prefix = Prefix.of(kinds_BT == 1, kinds_BT != 2, packs_layers=True)
    generator = torch.Generator().manual_seed(2)
    size = (3, 1, 4, len(prefix.packing.indices_N), 8)
    q, k, v = torch.randn(size, generator=generator, dtype=torch.double, requires_grad=True)
    weight = torch.randn(1, size[3], 4, 8, generator=generator, dtype=torch.double)
    results = []
    for context in (prefix.attend_in_two(unequal, q, k, v, 0.0, 0.3), prefix.attend_by_rows(q, k, v, 0.0, 0.3)):
        results.append([context, *torch.autograd.grad(context, (q, k, v), weight)])
    assert_same(*results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kernel", "expected"), [(unequal, True), (top_left, False), (missing, False)])
def test_kernel_that_aligns_otherwise_or_is_missing_is_not_used(kernel, expected, dtype):
    with torch.inference_mode():
        assert is_right(kernel, torch.device("cpu"), dtype, 16) is expected

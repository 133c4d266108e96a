"""train.compile: what is compiled, without compiling anything."""

from copy import deepcopy

import pytest
import torch
from torch import nn
from transformers import AttentionInterface, AutoConfig, AutoModelForSequenceClassification

from hftune.models import dropout, packing
from hftune.strategies import compilation
from hftune.strategies.compilation import compile_model, repeated_layers

SIZES = {"num_hidden_layers": 3, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48, "vocab_size": 50}


@pytest.fixture
def calls(monkeypatch):
    """What is compiled, and a stand-in that notes its calls."""
    compiled = []

    def compile_(forward, dynamic):
        assert dynamic

        def noted(*args, **kwargs):
            compiled.append(args[0])
            return forward(*args, **kwargs)

        return noted

    monkeypatch.setattr(torch, "compile", compile_)
    monkeypatch.setattr(dropout, "draw_mask", dropout.draw_mask)
    # A training in the same process may have compiled already.
    known = {**AttentionInterface._global_mapping, packing.ATTENTION: packing.packed_attention}
    monkeypatch.setattr(AttentionInterface, "_global_mapping", known)
    for once in (compilation.keep_masks_out_of_graphs, compilation.keep_packing_out_of_graphs):
        once.cache_clear()
    yield compiled
    for once in (compilation.keep_masks_out_of_graphs, compilation.keep_packing_out_of_graphs):
        once.cache_clear()


def bert():
    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_config(AutoConfig.for_model("bert", **SIZES)).eval()


def test_each_layer_is_compiled_without_its_hooks_and_nothing_else(calls):
    model, ids_NT = bert(), torch.tensor([[1, 2, 3]])
    expected = model(input_ids=ids_NT).logits
    names = [name for name, _ in model.named_parameters()]
    compile_model(model)
    layers, hooked = repeated_layers(model), []
    layers[0].register_forward_hook(lambda *_: hooked.append(len(calls)))
    assert torch.equal(model(input_ids=ids_NT).logits, expected)
    assert calls == layers and len(layers) == 3 and hooked == [1]
    assert [name for name, _ in model.named_parameters()] == names and model._compiled_call_impl is None


def test_a_copy_computes_with_its_own_weights(calls):
    model, ids_NT = bert(), torch.tensor([[1, 2, 3]])
    compile_model(model)
    expected = model(input_ids=ids_NT).logits
    copy = deepcopy(model)
    for parameter in model.parameters():
        parameter.data.zero_()
    assert torch.equal(copy(input_ids=ids_NT).logits, expected)
    assert calls[3:] == repeated_layers(copy)


def test_layers_that_are_given_a_cache_are_not_compiled(calls):
    layer = repeated_layers(bert())[0]
    forward = compilation.compiled_without_cache(lambda self, hidden, past_key_values=None: hidden)
    forward(layer, torch.ones(1))
    assert len(calls) == 1
    forward(layer, torch.ones(1), past_key_values=object())
    assert len(calls) == 1


def test_a_model_without_a_stack_of_layers_is_compiled_as_a_whole(calls):
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    compile_model(model)
    assert repeated_layers(model) == [] and model._compiled_call_impl is not None


def test_masks_and_packed_attention_are_called_from_compiled_code_not_compiled(calls):
    before = AttentionInterface._global_mapping[packing.ATTENTION]
    for _ in range(2):
        compile_model(bert())
    assert dropout.draw_mask._torchdynamo_disable and dropout.draw_mask(torch.empty(2, 2), 0.5).shape == (2, 2)
    assert AttentionInterface._global_mapping[packing.ATTENTION]._torchdynamo_disable and before is packing.packed_attention

"""Pretrained models whose weights stay in their files: what is left out, what is drawn, and what is read of them later."""

from contextlib import nullcontext
from itertools import chain

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, BertConfig, LlamaConfig

from hftune.config.sections import AdapterConfig
from hftune.models import unread
from hftune.models.adapters import add_adapter
from hftune.models.pretrained import load_config, load_model, loading

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 51}
GROUPED = {**SIZES, "num_key_value_heads": 2}
OF_BART = {f"{part}_{what}": 2 for part in ("encoder", "decoder") for what in ("layers", "attention_heads", "ffn_dim")}
THREE = {"id2label": {0: "a", 1: "b", 2: "c"}}
MODELS = {  # as saved, how it is loaded, and changes of the config
    "tied": (LlamaConfig(**GROUPED, tie_word_embeddings=True), "LlamaForCausalLM", AutoModelForCausalLM, {}),
    "another head": (LlamaConfig(**GROUPED), "LlamaForCausalLM", AutoModelForSequenceClassification, THREE),
    "more classes": (BertConfig(**SIZES), "BertForSequenceClassification", AutoModelForSequenceClassification, THREE),
    "no pooler": (BertConfig(**SIZES), "BertForMaskedLM", AutoModelForSequenceClassification, THREE),
    "transposed": (
        transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=51, n_positions=20),
        *("GPT2Model", AutoModelForCausalLM, {}),
    ),
    "experts": (
        transformers.MixtralConfig(**GROUPED, num_local_experts=3),
        *("MixtralForCausalLM", AutoModelForCausalLM, {}),
    ),
    "buffers": (
        transformers.BartConfig(d_model=32, vocab_size=51, **OF_BART),
        *("BartForConditionalGeneration", transformers.AutoModelForSeq2SeqLM, {}),
    ),
    "running statistics": (
        transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1]),
        *("ResNetForImageClassification", transformers.AutoModelForImageClassification, {}),
    ),
}


def loaded(folder, auto, overrides=None, **options):
    """Load a model with a seed; return it, and the number that is drawn next."""
    torch.manual_seed(3)
    with loading(**options) if options else nullcontext():
        model = load_model(auto, str(folder), load_config(str(folder), overrides or {}))
    return model, float(torch.rand(()))


def tensors(model):
    return dict(chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)))


def ties(model):
    named = dict(model.named_parameters(remove_duplicate=False))
    return {name: sorted(other for other in named if named[other] is named[name]) for name in named}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_what_is_read_later_is_what_would_have_been_loaded(tmp_path, name, dtype):
    config, kind, auto, overrides = MODELS[name]
    getattr(transformers, kind)(config).to(dtype).save_pretrained(tmp_path, max_shard_size="20KB")
    (expected, after), (model, after_too) = loaded(tmp_path, auto, overrides), loaded(tmp_path, auto, overrides, unread=True)
    assert after == after_too and set(model.drawn_parameters) == set(expected.drawn_parameters)
    assert type(model) is type(expected) and model.config.to_dict() == expected.config.to_dict()
    assert model.name_or_path == expected.name_or_path and ties(model) == ties(expected)
    found, persistent = tensors(model), expected.state_dict()
    assert found.keys() == tensors(expected).keys()
    for key, value in tensors(expected).items():
        assert found[key].is_meta == (key in persistent and key not in expected.drawn_parameters), key
        assert (found[key].dtype, found[key].requires_grad) == (value.dtype, value.requires_grad)
        if not found[key].is_meta:
            assert torch.equal(found[key], value)
            continue
        assert torch.equal(model.unread[key].read(slice(None)), value)
        if value.ndim:
            assert torch.equal(model.unread[key].read(slice(1, 3)), value[1:3])


def test_of_experts_only_those_asked_for_are_read(tmp_path, monkeypatch):
    config, kind, auto, _ = MODELS["experts"]
    getattr(transformers, kind)(config).save_pretrained(tmp_path)
    read, original = [], unread.read_rows

    def read_rows(value, rows):
        if isinstance(value, torch.Tensor) and not isinstance(value, unread.Unread):
            read.append(tuple(original(value, rows).shape))
        return original(value, rows)

    model, _ = loaded(tmp_path, auto, unread=True)
    monkeypatch.setattr(unread, "read_rows", read_rows)
    part = model.unread["model.layers.1.mlp.experts.gate_up_proj"].read(slice(2, 3))
    assert part.shape == (1, 128, 32) and read == [(64, 32), (64, 32)]


def test_a_weight_that_files_have_twice_is_loaded_as_ever(tmp_path):
    config, kind, auto, _ = MODELS["tied"]
    getattr(transformers, kind)(config).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    save_file({**weights, "lm_head.weight": weights["model.embed_tokens.weight"].clone()}, file, {"format": "pt"})
    model, after = loaded(tmp_path, auto, unread=True)
    assert not any(value.is_meta for value in tensors(model).values())
    assert after == loaded(tmp_path, auto)[1]


@pytest.mark.parametrize("also", [[], ["lm_head"], ["embed_tokens"]])
def test_adapters_are_drawn_as_beside_weights_that_are_there(tmp_path, also):
    config, kind, *_ = MODELS["tied" if also == ["embed_tokens"] else "another head"]
    getattr(transformers, kind)(config).save_pretrained(tmp_path)
    (expected, _), (model, _) = loaded(tmp_path, AutoModelForCausalLM), loaded(tmp_path, AutoModelForCausalLM, unread=True)
    for each in (expected, model):
        torch.manual_seed(4)
        add_adapter(each, AdapterConfig(type="lora", rank=2, train_also=also))
    assert unread.match_unread(model) and ties(model) == ties(expected)
    found, adapters = tensors(model), 0
    for key, value in tensors(expected).items():
        assert (found[key].dtype, found[key].requires_grad) == (value.dtype, value.requires_grad)
        adapters += "lora_" in key
        assert found[key].is_meta == ("lora_" not in key and not key.endswith("inv_freq"))
        assert torch.equal(model.unread[key].read(slice(None)) if found[key].is_meta else found[key], value), key
    assert adapters == 2 * 2 * 7


def test_parts_of_models_that_a_task_puts_together_are_not_known_by_their_names(tmp_path):
    config, kind, auto, _ = MODELS["tied"]
    getattr(transformers, kind)(config).save_pretrained(tmp_path)
    model, _ = loaded(tmp_path, auto, unread=True)
    assert not unread.match_unread(torch.nn.ModuleList([model]))


def test_a_weight_of_the_model_itself_is_read_beside_adapters(tmp_path):
    config = transformers.XLNetConfig(vocab_size=50, d_model=16, n_layer=1, n_head=2, d_inner=16)
    transformers.XLNetModel(config).save_pretrained(tmp_path)
    model, _ = unread.load_unread(transformers.XLNetModel, tmp_path, config, torch.float32)
    add_adapter(model, AdapterConfig(type="lora", rank=2, targets=["ff.layer_1"]))
    assert unread.match_unread(model) and model.mask_emb.is_meta and "mask_emb" in model.unread

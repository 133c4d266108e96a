"""Folders of adapters: they load as they were saved, on their own base only, in hftune, peft and transformers; and they merge."""

import pytest
import torch
import transformers

from hftune.checkpoints.export import export
from hftune.config import AdapterConfig
from hftune.models.adapter_files import answers, merge, plain_model
from hftune.models.adapters import add_adapter, new_modules
from hftune.models.pretrained import load_config, load_model, load_saved, saved_config

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAMA = {"model_type": "llama", "vocab_size": 101, "num_key_value_heads": 2, "tie_word_embeddings": False, **SIZES}
BERT = {"model_type": "bert", "vocab_size": 101, "max_position_embeddings": 64, **SIZES}
VIT = {"model_type": "vit", "image_size": 16, "patch_size": 8, **SIZES}
GPT2 = {"model_type": "gpt2", "vocab_size": 101, "n_embd": 32, "n_layer": 2, "n_head": 2}
T5 = {"model_type": "t5", "vocab_size": 101, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
CLASSES = {"num_labels": 3, "id2label": {0: "a", 1: "b", 2: "c"}}
MODELS = {
    "lora": ("AutoModelForCausalLM", LLAMA, {"targets": "all-linear"}),
    "dora": ("AutoModelForCausalLM", LLAMA, {"type": "dora"}),
    "rslora and a head": ("AutoModelForCausalLM", LLAMA, {"rslora": True, "train_also": ["lm_head"]}),
    "tied embeddings": ("AutoModelForCausalLM", {**LLAMA, "tie_word_embeddings": True}, {"train_also": ["embed_tokens"]}),
    "Conv1D": ("AutoModelForCausalLM", GPT2, {}),
    "classifier": ("AutoModelForSequenceClassification", BERT, {"type": "dora"}),
    "images": ("AutoModelForImageClassification", VIT, {}),
    "encoder and decoder": ("AutoModelForSeq2SeqLM", T5, {"targets": ["q", "v"]}),
}


class Saver:
    """The part of a task that writes a model."""

    def __init__(self, weights=None):
        self.weights = weights

    def save(self, model, directory):
        model.save_pretrained(directory)


def fresh(auto, fields, seed=0):
    """Build a model with these fields."""
    torch.manual_seed(seed)
    return load_model(getattr(transformers, auto), None, load_config(None, fields))


def adapted(auto, base, dtype=torch.float32, **settings):
    """Put adapters on a model in a folder, and change everything that is trained."""
    config = load_config(str(base), CLASSES if "Classification" in auto else {})
    model = load_model(getattr(transformers, auto), str(base), config).to(dtype).eval()
    add_adapter(model, AdapterConfig(**{"type": "lora", "rank": 4, **settings}), new_modules(model))
    change(model)
    return model


def change(model):
    """Change everything that is trained."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.05)


def loaded(auto, folder):
    return load_saved(getattr(transformers, auto), folder, saved_config(folder)).eval()


@pytest.fixture(params=MODELS)
def kind(request):
    return MODELS[request.param]


def test_saved_adapters_load_and_merge_as_they_were(kind, tmp_path):
    auto, fields, settings = kind
    fresh(auto, fields).save_pretrained(tmp_path / "base")
    model = adapted(auto, tmp_path / "base", **settings)
    before = answers(model)
    trained = {name for name, value in model.named_parameters() if value.requires_grad}
    export(Saver(), model, tmp_path / "model")
    assert not (tmp_path / "model" / "config.json").exists()  # transformers would look for whole weights beside it

    again = loaded(auto, tmp_path / "model")
    assert torch.equal(answers(again), before)
    assert {name for name, value in again.named_parameters() if value.requires_grad} == trained
    assert again.config.id2label == model.config.id2label

    from peft import PeftModel

    config = saved_config(tmp_path / "model")
    base = getattr(transformers, auto).from_pretrained(tmp_path / "base", config=config, ignore_mismatched_sizes=True)
    assert torch.equal(answers(PeftModel.from_pretrained(base, tmp_path / "model").eval().base_model.model), before)

    plain = plain_model(model, merged=True)
    assert torch.equal(answers(model), before)  # which training goes on with
    merge(again)
    for merged in (plain, again):
        assert (answers(merged) - before).abs().max() <= 1e-6 * before.abs().max().clamp(min=1)
        assert not any("lora" in name or "base_layer" in name for name in merged.state_dict())
    again.save_pretrained(tmp_path / "merged")
    config = load_config(str(tmp_path / "merged"), {})
    assert torch.equal(answers(load_model(getattr(transformers, auto), str(tmp_path / "merged"), config)), answers(again))

"""Folders of adapters: they load as they were saved, on their own base only, in hftune, peft and transformers; and they merge."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
import transformers

from hftune import ConfigError, Recipe
from hftune.build import build_model
from hftune.checkpoints.export import base_of, export
from hftune.commands.merge import check_output
from hftune.config import AdapterConfig
from hftune.distributed.preflight import check_launcher
from hftune.models.adapter_files import answers, check_widths, is_quantized, merge, plain_model
from hftune.models.adapters import add_adapter, check_installed, new_modules
from hftune.models.kinds import drawn_parameters
from hftune.models.packing import install
from hftune.models.pretrained import load_config, load_model, load_saved, loading, quantization, saved_config
from tests.support.runs import FSDP

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
    with loading(**({"dtype": dtype} if dtype != torch.float32 else {})):
        model = load_model(getattr(transformers, auto), str(base), config).eval()
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


def test_transformers_loads_the_adapters_of_a_classifier_as_the_docs_say(tmp_path):
    fresh("AutoModel", BERT).save_pretrained(tmp_path / "base")  # whose config knows no classes
    model = adapted(auto := "AutoModelForSequenceClassification", tmp_path / "base")
    export(Saver(), model, tmp_path / "model")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "model", subfolder="model_config")
    theirs = getattr(transformers, auto).from_pretrained(tmp_path / "model", config=config).eval()
    assert torch.equal(answers(theirs), answers(model)) and theirs.config.id2label == CLASSES["id2label"]


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
    reloaded = load_model(getattr(transformers, auto), str(tmp_path / "merged"), config)
    assert (answers(reloaded) - answers(again)).abs().max() <= 1e-6  # the same weights, laid out otherwise in memory


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A base, and a folder of adapters that belong to it."""
    folder = tmp_path_factory.mktemp("llama")
    fresh("AutoModelForCausalLM", LLAMA).save_pretrained(folder / "base")
    export(Saver(), adapted("AutoModelForCausalLM", folder / "base"), folder / "model", {"step": 3})
    return folder


def test_transformers_and_auto_peft_load_the_folder(llama):
    from peft import AutoPeftModelForCausalLM

    want = answers(loaded("AutoModelForCausalLM", llama / "model"))
    assert torch.equal(answers(transformers.AutoModelForCausalLM.from_pretrained(llama / "model")), want)
    assert torch.equal(answers(AutoPeftModelForCausalLM.from_pretrained(llama / "model").eval().base_model.model), want)


def test_another_base_and_one_that_is_gone_are_refused(llama, tmp_path):
    for part in ("model", "base"):
        shutil.copytree(llama / part, tmp_path / part)
    path = tmp_path / "model" / "base.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "name": str(tmp_path / "base")}))
    fresh("AutoModelForCausalLM", LLAMA, seed=1).save_pretrained(tmp_path / "base")
    with pytest.raises(ConfigError, match=r"holds adapters of another base model than .*/base is now: its weights have"):
        loaded("AutoModelForCausalLM", tmp_path / "model")
    shutil.rmtree(tmp_path / "base")
    with pytest.raises(ConfigError, match=r"holds adapters of the model in .*/base, where there is none now. Put it back"):
        loaded("AutoModelForCausalLM", tmp_path / "model")


def test_base_without_a_name_goes_along(tmp_path):
    model = fresh("AutoModelForCausalLM", LLAMA).eval()
    add_adapter(model, AdapterConfig(type="dora", rank=4))
    change(model)
    export(Saver(), model, tmp_path / "model")
    assert torch.equal(answers(loaded("AutoModelForCausalLM", tmp_path / "model")), answers(model))
    written = json.loads((tmp_path / "model" / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == str(tmp_path / "model" / "base")


def test_merged_and_both_are_plain_models_with_and_without_the_adapters(llama, tmp_path):
    model = adapted("AutoModelForCausalLM", llama / "base")
    install(model)  # the hooks of a model in training
    for kind in ("merged", "both"):
        export(Saver(), model, tmp_path / kind, kind=kind)
        assert (answers(loaded("AutoModelForCausalLM", tmp_path / kind)) - answers(model)).abs().max() < 1e-6
        assert (tmp_path / kind / "adapter").exists() == (kind == "both")
    assert torch.equal(answers(loaded("AutoModelForCausalLM", tmp_path / "both" / "adapter")), answers(model))


def test_bf16_base_is_merged_in_float32_and_rounded_once(llama, tmp_path):
    model = adapted("AutoModelForCausalLM", llama / "base", torch.bfloat16)
    assert {value.dtype for value in model.parameters() if value.requires_grad} == {torch.float32}
    export(Saver(), model, tmp_path / "model")
    exact = loaded("AutoModelForCausalLM", tmp_path / "model")
    assert exact.dtype == torch.float32
    before, rounded = answers(exact), plain_model(model, merged=True)
    merge(exact)
    assert (answers(exact) - before).abs().max() < 1e-6
    for name, value in rounded.state_dict().items():
        assert torch.equal(value, exact.state_dict()[name].bfloat16()), name


def test_task_that_saves_in_its_own_way_is_told_to_merge(llama, tmp_path):
    task = SimpleNamespace(save=lambda model, directory: None)
    with pytest.raises(ConfigError, match=r"SimpleNamespace.save writes adapters and base together. Set adapter.export=merged"):
        export(task, adapted("AutoModelForCausalLM", llama / "base"), tmp_path / "model")


def test_weights_of_4_bits_train_save_load_and_merge_into_the_unquantised(tmp_path):
    pytest.importorskip("bitsandbytes")
    fields = {**LLAMA, "hidden_size": 64, "intermediate_size": 128}  # its kernel for CPUs wants multiples of 64
    fresh("AutoModelForCausalLM", fields).save_pretrained(tmp_path / "base")
    with loading(**quantization("nf4", torch.float32, ["v_proj"])):
        model = adapted("AutoModelForCausalLM", tmp_path / "base", quantize="nf4", train_also=["v_proj"])
    assert "v_proj" not in {name.rpartition(".")[2] for name, value in model.named_parameters() if value.dtype == torch.uint8}
    assert is_quantized(model) and type(model.model.layers[0].mlp.up_proj.base_layer).__name__ == "Linear4bit"
    loss = model(input_ids=torch.arange(3, 19)[None], labels=torch.arange(3, 19)[None]).loss
    loss.backward()
    assert all(value.grad is not None for value in model.parameters() if value.requires_grad)
    export(Saver(), model, tmp_path / "model")
    again = loaded("AutoModelForCausalLM", tmp_path / "model")
    assert is_quantized(again) and (answers(again) - answers(model)).abs().max() < 5e-3
    with pytest.raises(ConfigError, match=r"cannot be merged into weights of 4 bits"):
        merge(again)
    with loading(quantization_config=None):
        exact = loaded("AutoModelForCausalLM", tmp_path / "model")
    assert not is_quantized(exact) and 0 < (answers(exact) - answers(model)).abs().max() < 0.1


def test_layers_whose_4_bits_a_cpu_cannot_compute_are_refused(tmp_path):
    pytest.importorskip("bitsandbytes")
    for width in (64, 48):
        fields = {**LLAMA, "hidden_size": 64, "intermediate_size": width}
        fresh("AutoModelForCausalLM", fields).save_pretrained(tmp_path / str(width))
    with loading(**quantization("nf4", torch.float32)):
        even, odd = (adapted("AutoModelForCausalLM", tmp_path / name, quantize="nf4") for name in ("64", "48"))
    check_widths(even)
    with pytest.raises(ConfigError, match=r"^adapter\.quantize: .*mlp\.gate_proj.* has 64 inputs and 48 outputs"):
        check_widths(odd)


REVIEWS = ("adapter.type=lora", "adapter.quantize=nf4")
TAGGING = ("replace=[task]", "task.type=tests.support.tasks.Tagging", "adapter.type=lora")
REFUSALS = {
    "adapter.quantize=nf4 quantises weights that are loaded; task.model=null builds new ones. Leave it out.": REVIEWS,
    "adapters merged into 4 bits would be rounded away. Leave adapter.export at adapter": (*REVIEWS, "adapter.export=merged"),
    "adapter.export=both: Tagging has no method save, and the default one writes a": (*TAGGING, "adapter.export=both"),
}


@pytest.mark.parametrize("said", REFUSALS)
def test_what_cannot_be_exported_or_quantised_is_refused_at_once(said):
    with pytest.raises(ConfigError) as caught:
        Recipe.load("yelp_demo", *REFUSALS[said]).validate()
    assert said in str(caught.value)


def test_4_bits_are_refused_without_bitsandbytes_and_under_fsdp(monkeypatch):
    config = AdapterConfig(type="lora", quantize="nf4")
    monkeypatch.setattr("hftune.models.adapters.find_spec", {"peft": object()}.get)
    with pytest.raises(ConfigError, match=r'needs bitsandbytes, which is not installed: pip install "hftune\[qlora\]"'):
        check_installed(config)
    for name, value in FSDP.items():
        monkeypatch.setenv(name, value)
    recipe = Recipe.load("yelp_demo", *REVIEWS, "train.micro_batch_tokens=4096")
    with pytest.raises(ConfigError, match=r"adapter.quantize=nf4 does not work under FSDP, which cannot shard weights of 4"):
        check_launcher(recipe)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_base_that_has_few_bits_in_its_files_is_refused_under_fsdp(tmp_path, monkeypatch, bits):
    """Before a weight is read: the folder has none."""
    quantized = {"quant_method": "bitsandbytes", f"load_in_{bits}bit": True}
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "quantization_config": quantized}))
    recipe = Recipe.load("yelp_demo")
    recipe.task = SimpleNamespace(
        build_model=lambda: load_model(transformers.AutoModelForCausalLM, str(tmp_path), load_config(str(tmp_path), {}))
    )
    for name, value in {**FSDP, "WORLD_SIZE": "2", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        ConfigError, match=r"^task.model=.* has weights of 8 or 4 bits .* FSDP cannot shard. Launch without FSDP"
    ):
        build_model(recipe)


def test_a_base_with_weights_that_its_files_lack_goes_along(tmp_path):
    """Loading it again would draw others."""
    fresh("AutoModelForMaskedLM", BERT).save_pretrained(tmp_path / "base")  # without a pooler
    model = load_model(transformers.AutoModel, str(tmp_path / "base"), load_config(str(tmp_path / "base"), {}))
    model.pooler.requires_grad_(False)
    add_adapter(model, AdapterConfig(type="lora", rank=4), [])
    assert drawn_parameters(model) and base_of(Saver(), model) == (None, None)
    whole = adapted("AutoModelForMaskedLM", tmp_path / "base")
    assert base_of(Saver(), whole) == (str(tmp_path / "base"), None)


def test_merging_never_replaces_the_base(tmp_path):
    fresh("AutoModelForCausalLM", LLAMA).save_pretrained(tmp_path / "base")
    export(Saver(), adapted("AutoModelForCausalLM", tmp_path / "base"), tmp_path / "model")
    with pytest.raises(ConfigError, match=r"is the base of the adapters\. Name a different one"):
        check_output(tmp_path / "base", tmp_path / "model")

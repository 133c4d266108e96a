"""Adapters go into a model in place: what is trained, what is refused, and what the digest of the base looks at."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from hftune import ConfigError, Recipe
from hftune.build import build_model, check_names, check_statistics
from hftune.checkpoints.checkpointer import Checkpoint
from hftune.checkpoints.output_dir import check_base
from hftune.checkpoints.resume import _changes
from hftune.config import AdapterConfig
from hftune.models.adapters import add_adapter, base_digest, base_tensors, new_modules, packed_digest, trained_names
from hftune.models.pretrained import load_config, load_model
from hftune.optim import build_optimizer
from hftune.strategies.arithmetic import Arithmetic
from hftune.strategies.sharding import checkpoint_tensors

TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
IDS = torch.arange(3, 20)[None]


def llama(kind=LlamaForCausalLM, tied=False, **more):
    torch.manual_seed(0)
    return kind(LlamaConfig(vocab_size=101, pad_token_id=0, tie_word_embeddings=tied, **TINY, **more)).eval()


def bert():
    torch.manual_seed(0)
    return BertForSequenceClassification(BertConfig(vocab_size=101, num_labels=3, **TINY)).eval()


def adapted(model, new=None, **options):
    add_adapter(model, AdapterConfig(**{"type": "lora", "rank": 4, **options}), new_modules(model) if new is None else new)
    return model


def whole(model):
    """The names of the modules that are trained beside adapters."""
    return {name.split(".modules_to_save")[0] for name in trained_names(model) if "lora_" not in name}


def refused(model, **options):
    with pytest.raises(ConfigError) as caught:
        adapted(model, **options)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_fresh_adapters_change_nothing_and_only_they_are_trained(kind):
    model = llama()
    before = model(input_ids=IDS).logits
    assert torch.allclose(adapted(model, type=kind, rslora=True).eval()(input_ids=IDS).logits, before, atol=1e-6)
    assert type(model) is LlamaForCausalLM
    assert trained_names(model) and all("lora_" in name for name in trained_names(model))
    assert len(trained_names(model)) == 2 * 7 * (3 if kind == "dora" else 2)  # layers, matrices of each, parameters of each


def test_all_linear_leaves_out_heads_and_works_for_every_kind_of_model():
    gpt2 = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=101))
    t5 = T5ForConditionalGeneration(T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=101))
    vit = ViTForImageClassification(ViTConfig(image_size=32, **TINY))
    llm = llama(LlamaForSequenceClassification)
    heads = {gpt2: set(), t5: set(), vit: {"classifier"}, bert(): {"classifier"}, llm: {"score"}}
    for model, expected in heads.items():
        assert whole(adapted(model)) == expected
        adapters = [name for name in trained_names(model) if "lora_" in name]
        assert adapters and not any("lm_head" in name or "classifier" in name or "score" in name for name in adapters)


def test_what_the_files_lack_is_trained_as_a_whole(tmp_path):
    llama().model.save_pretrained(tmp_path)  # without a head
    model = load_model(LlamaForCausalLM, str(tmp_path), load_config(str(tmp_path), {}))
    assert new_modules(model) == ["lm_head"]
    assert "lm_head.weight of LlamaForCausalLM frozen as it was drawn at random" in refused(model, new=())
    assert whole(adapted(model)) == {"lm_head"}


def test_parameter_that_alone_was_drawn_is_refused_until_its_module_is_named(tmp_path):
    bert().save_pretrained(tmp_path)
    config = load_config(str(tmp_path), {"type_vocab_size": 5})
    with pytest.raises(ConfigError, match="different size"):
        load_model(BertForSequenceClassification, str(tmp_path), config)
    model = bert()
    model.drawn_parameters = ["bert.embeddings.token_type_embeddings.weight", "bert.encoder.layer.0.output.dense.bias"]
    said = refused(model)
    assert said.endswith("task.model lacks it. Set adapter.train_also=[bert.encoder.layer.0.output.dense].")
    assert whole(adapted(model, train_also=["0.output.dense"])) == {
        *("classifier", "bert.embeddings.token_type_embeddings", "bert.encoder.layer.0.output.dense")
    }


def test_ties_are_kept_or_refused():
    for name in ("lm_head", "embed_tokens"):
        said = refused(llama(tied=True), targets=[name])
        assert "shares its weights with" in said and said.endswith("or train the weights: adapter.train_also.")
    assert refused(llama(tied=True), train_also=["lm_head"]).endswith("Name model.embed_tokens instead.")
    gpt2 = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=101))
    assert refused(gpt2, train_also=["wte"]).endswith("Leave it out.")
    model = adapted(llama(tied=True), train_also=["embed_tokens"])
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert len([name for name in trained_names(model) if "lora_" not in name]) == 1  # one matrix for both
    assert len(trained_names(adapted(llama(tied=True)))) == 28
    assert whole(adapted(llama(), train_also=["embed_tokens", "lm_head"])) == {"model.embed_tokens", "lm_head"}


@pytest.mark.parametrize(
    ("is_tied", "whole", "said"),
    [
        (False, "[]", r"in embed_tokens and lm_head at their mean. Set adapter.train_also=\[embed_tokens, lm_head\]."),
        (False, "[embed_tokens]", r"in lm_head at their mean. Set adapter.train_also=\[embed_tokens, lm_head\]."),
        (True, "[]", r"in embed_tokens at their mean. Set adapter.train_also=\[embed_tokens\]."),
        (True, "[embed_tokens]", None),
        (False, "[embed_tokens, lm_head]", None),
    ],
)
def test_new_tokens_are_trained_where_they_are_read_and_where_they_are_written(is_tied, whole, said, monkeypatch):
    words = ("task.new_tokens=[<a>]", "adapter.type=lora", "adapter.export=merged", f"adapter.train_also={whole}")
    recipe = Recipe.load("wikitext2_demo", *words)
    monkeypatch.setattr(type(recipe.task), "build_model", lambda task: llama(tied=is_tied))
    with nullcontext() if said is None else pytest.raises(ConfigError, match=said):
        build_model(recipe)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"targets": ["q_prj"]}, "adapter.targets: 'q_prj' is no module of LlamaForCausalLM. Near it: q_proj,"),
        ({"targets": ["xyz"]}, "adapter.targets: 'xyz' is no module of LlamaForCausalLM. It has "),
        ({"targets": ["self_attn"]}, "'self_attn' is a LlamaAttention of LlamaForCausalLM. Adapters fit linear layers"),
        ({"train_also": ["lm_hed"]}, "adapter.train_also: 'lm_hed' is no module of LlamaForCausalLM. Near it: lm_head."),
        ({"targets": ["q_proj"], "train_also": ["self_attn"]}, "q_proj is trained as a whole, so it needs no adapter."),
    ],
)
def test_names_that_do_not_fit_are_refused(options, said):
    assert said in refused(llama(), **options)


def test_layers_that_peft_takes_for_experts_are_refused():
    """Otherwise dense layers and shared experts would stay frozen, and adapters of the other experts be in no merged model."""

    def mixture():
        sizes = {"moe_intermediate_size": 8, "n_routed_experts": 2, "num_experts_per_tok": 1, "num_key_value_heads": 4}
        return Glm4MoeForCausalLM(Glm4MoeConfig(vocab_size=101, pad_token_id=0, head_dim=8, **TINY, **sizes))

    said = refused(mixture())
    assert said.startswith(
        "adapter.targets: peft would leave out model.layers.0.mlp.down_proj of Glm4MoeForCausalLM, whose name"
    )
    assert said.endswith("Name others: adapter.targets=[k_proj, o_proj, q_proj, v_proj].")
    assert "peft refuses them for Glm4MoeForCausalLM: Cannot convert" in refused(mixture(), targets=["gate_proj"])
    assert trained_names(adapted(mixture(), targets=["q_proj"]))


def test_model_that_is_not_transformers_is_refused():
    said = refused(nn.Sequential(nn.Linear(2, 2)), new=())
    assert said.startswith("adapter.type=lora needs a model of transformers, and Sequential is none. Leave it out")


def test_what_is_trained_is_float32_on_a_bf16_base():
    model = adapted(llama().bfloat16(), train_also=["lm_head"])
    kinds = {parameter.requires_grad: parameter.dtype for parameter in model.parameters()}
    assert kinds == {True: torch.float32, False: torch.bfloat16}


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_what_is_taken_out_of_the_base_does_not_depend_on_threads(init):
    before, found = torch.get_num_threads(), set()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            torch.manual_seed(0)
            model = BertModel(BertConfig(vocab_size=101, **{**TINY, "hidden_size": 256, "num_hidden_layers": 1}))
            found.add(base_digest(adapted(model, init=init, export="merged", rank=8)))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert len(found) == 1


def test_second_matrices_learn_faster_by_the_keys_of_lora_plus_in_the_docs(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "adapters.md").read_text()
    (block,) = [each.partition("```")[0] for each in page.split("```yaml\n")[1:] if "lora_B" in each.partition("```")[0]]
    (tmp_path / "plus.yaml").write_text(f"base: yelp_demo\n{block}")
    recipe, model = Recipe.load(tmp_path / "plus.yaml"), bert()
    add_adapter(model, recipe.adapter, new_modules(model))
    rates = {value: group["lr"] for group in build_optimizer(model, recipe).param_groups for value in group["params"]}
    found = {kind: {rates[value] for name, value in model.named_parameters() if kind in name} for kind in ("lora_A", "lora_B")}
    assert found == {"lora_A": {2e-4}, "lora_B": {3.2e-3}}


def test_digest_sees_names_values_and_types_of_the_base_and_nothing_else():
    plain, same = llama(), adapted(llama(), rank=8, train_also=["lm_head"])
    assert set(base_tensors(same)) == {name for name, _ in plain.named_parameters()} - {"lm_head.weight"}
    expected = base_digest(same)
    with torch.no_grad():
        for value in same.parameters():
            if value.requires_grad:
                value.add_(1)
    del same.known_base_digest
    assert base_digest(same) == expected
    other = llama()
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight[[0, 1]] = other.model.layers[1].mlp.up_proj.weight[[1, 0]]
    for model in (other, llama().bfloat16()):
        assert base_digest(adapted(model, train_also=["lm_head"])) != expected
    with pytest.raises(ConfigError, match="run/step holds adapters of another base model"):
        check_base("run/step", expected, base_digest(other))


def test_checkpoint_holds_what_is_trained():
    model = adapted(bert())
    optimizer = torch.optim.AdamW(value for value in model.parameters() if value.requires_grad)
    assert checkpoint_tensors(model, optimizer)["model"].keys() == trained_names(model)


def test_arithmetic_counts_the_frozen_weights_without_their_gradient():
    full, model = Arithmetic.of(llama()), adapted(llama(), targets=["q_proj"])
    assert Arithmetic.of(model).per_token == full.per_token * 4 // 6 + 6 * 2 * 2 * 4 * 32
    assert Arithmetic.of(model).per_item == 4 * 101 * 32


def recipe(*overrides):
    return Recipe.load("yelp_demo", "task.vocab_size=300", *overrides)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["adapter.type=lra"], "adapter.type='lra' is not one of lora, dora. Did you mean 'lora'?"),
        (["adapter.type=lora", "adapter.rank=0"], "adapter.rank=0 must be at least 1."),
        (["adapter.type=lora", "adapter.dropout=1"], "adapter.dropout=1.0 must be in [0, 1)."),
        (["adapter.type=lora", "adapter.targets=all"], "adapter.targets='all' is neither all-linear nor a list of names"),
        (["adapter.rank=8"], "adapter.rank=8 needs adapter.type=lora or dora."),
        (["adapter.type=lora", "adapter.base_dtype=bf16"], "adapter.base_dtype=bf16 needs train.mixed_precision=bf16, not"),
        (["adapter.type=lora", "parallel.pipeline_stages=2"], "does not work with parallel.pipeline_stages=2"),
        (["adapter.type=dora", "train.freeze=[embeddings]"], "adapter.type=dora freezes all but the adapters"),
    ],
)
def test_recipe_that_cannot_have_adapters_is_refused_before_torch(overrides, said):
    with pytest.raises(ConfigError) as caught:
        recipe(*overrides).validate()
    assert said in str(caught.value)


def test_adapters_of_a_base_recipe_can_be_switched_off():
    recipe("adapter.rank=8", "adapter.type=null").validate()


def test_peft_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr("hftune.models.adapters.find_spec", lambda name: None)
    check_names(recipe())
    with pytest.raises(ConfigError, match=r'needs peft, which is not installed: pip install "hftune\[lora\]"'):
        check_names(recipe("adapter.type=lora"))


def test_running_statistics_are_refused_unless_they_are_frozen():
    model = nn.Sequential(nn.BatchNorm1d(3))
    with pytest.raises(ConfigError, match=r"Set train.batch_norm=frozen\."):
        check_statistics(recipe("adapter.type=lora"), model)
    check_statistics(recipe("adapter.type=lora", "train.batch_norm=frozen"), model)


def test_adapters_cannot_change_on_resume_but_their_export_can(tmp_path):
    def changed(before, *after):
        (tmp_path / "recipe.yaml").write_text(before)
        return [*_changes(Checkpoint(tmp_path, 1, {}, {}), recipe(*after))]

    lora, plain = recipe("adapter.type=lora"), recipe()
    assert changed(lora.to_yaml(), "adapter.type=lora", "adapter.export=both") == ["adapter.export"]
    with pytest.raises(ConfigError, match=r"cannot resume with adapter.rank=8 \(it was 16\)"):
        changed(lora.to_yaml(), "adapter.type=lora", "adapter.rank=8")
    with pytest.raises(ConfigError, match=r"adapter.type=lora \(it was null\)"):
        changed(plain.to_yaml(), "adapter.type=lora")
    older = {key: value for key, value in plain.to_dict().items() if key != "adapter"}
    assert changed(yaml.safe_dump(older)) == []


def test_modules_whose_names_only_end_alike_are_not_trained_without_a_word():
    model = llama().model  # its last norm is called norm; those of its layers input_layernorm
    said = refused(model, train_also=["norm"])
    assert said.startswith(
        "adapter.train_also: peft would train layers.0.input_layernorm, too, whose name ends like one of norm."
    )


def test_weights_in_4_bits_have_a_digest_of_their_bytes_and_scales():
    def model(packed, scale):
        linear = torch.nn.Linear(2, 2)
        linear.weight = torch.nn.Parameter(torch.tensor(packed, dtype=torch.uint8), requires_grad=False)
        linear.weight.quant_state = SimpleNamespace(as_dict=lambda packed: {"absmax": torch.tensor(scale)})
        return linear

    digests = [packed_digest(model(*each)) for each in (([1, 2], 1.0), ([1, 2], 1.0), ([1, 3], 1.0), ([1, 2], 2.0))]
    assert digests[0] == digests[1] and len({*digests}) == 3

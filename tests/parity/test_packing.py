"""Without padding, the layers of a model compute the same function: loss and gradient, family by family."""

import pytest
import torch
import transformers

from hftune.models.packing import NotPackable, Packing, attention_calls, install, stack_of, without_masks

SMALL = {
    **{"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 50},
    **{"max_position_embeddings": 64, "pad_token_id": 0, "num_labels": 5, "num_key_value_heads": 4},
}
GPT = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
TOKENS = {"cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2}
GROUPED = {"num_key_value_heads": 2}
FAMILIES = {
    **{
        name: {}
        for name in ("bert", "roberta", "electra", "camembert", "xlm-roberta", "ernie", "data2vec-text", "esm", "eurobert")
    },
    "distilbert": {"dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 64},
    "modernbert": {"global_attn_every_n_layers": 3, "local_attention": 8, **TOKENS},
    **{"gpt2": GPT, "gpt_neox": {}, "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32}, "biogpt": {}},
    **dict.fromkeys(("llama", "qwen2", "phi3", "starcoder2", "smollm3"), GROUPED),
    "mistral": {**GROUPED, "sliding_window": 4},
    "qwen3": {**GROUPED, "head_dim": 8},
}
DROPOUT = ("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "attention_dropout", "resid_pdrop", "embd_pdrop")
DROPOUT += ("attn_pdrop", "hidden_dropout", "embed_dropout", "activation_dropout", "classifier_dropout", "embedding_dropout")
LENGTHS = [13, 12, 7, 7, 3]


def build(family, fields):
    """Return a small model in float64, without dropout, and whether it is a decoder."""
    config = transformers.AutoConfig.for_model(family, **{**SMALL, **fields})
    for name in DROPOUT:
        if hasattr(config, name):
            setattr(config, name, 0.0)
    is_decoder = type(config) in transformers.AutoModelForCausalLM._model_mapping
    is_decoder &= type(config) not in transformers.AutoModelForMaskedLM._model_mapping
    auto = transformers.AutoModelForCausalLM if is_decoder else transformers.AutoModelForSequenceClassification
    torch.manual_seed(1)
    return auto.from_config(config).double().train(), is_decoder


def batch(side="right"):
    mask_BT = (torch.arange(13) < torch.tensor(LENGTHS)[:, None]).long()
    mask_BT = mask_BT.flip(1) if side == "left" else mask_BT
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, 50, mask_BT.shape, generator=generator) * mask_BT, mask_BT


def losses(family, fields, checkpointing=False, side="right"):
    """Return loss and gradient padded, then packed."""
    ids_BT, mask_BT = batch(side)
    for packed in (False, True):
        model, is_decoder = build(family, fields)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if packed:
            install(model)
            with without_masks(), attention_calls() as calls:
                logits = model(input_ids=ids_BT, attention_mask=mask_BT, packing=Packing.of(mask_BT)).logits
                assert len(calls) == len({*calls}) == 3
        else:
            logits = model(input_ids=ids_BT, attention_mask=mask_BT).logits
        loss = (logits * mask_BT[..., None] if is_decoder else logits).square().sum()
        loss.backward()
        yield loss.item(), torch.cat([value.grad.flatten() for value in model.parameters() if value.grad is not None])


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_is_padded(family):
    (loss, gradient), (packed_loss, packed_gradient) = losses(family, FAMILIES[family])
    assert packed_loss == pytest.approx(loss, rel=1e-10)
    assert (packed_gradient - gradient).norm() <= 1e-8 * gradient.norm()


def test_there_are_twenty_families():
    assert len(FAMILIES) >= 20


@pytest.mark.parametrize(
    ("family", "fields", "options"),
    [
        ("bert", {}, {"checkpointing": True}),
        ("llama", GROUPED, {"checkpointing": True}),
        ("llama", GROUPED, {"side": "left"}),
        ("modernbert", {**FAMILIES["modernbert"], "classifier_pooling": "mean"}, {}),
    ],
)
def test_packed_is_padded_also_with(family, fields, options):
    (loss, gradient), (packed_loss, packed_gradient) = losses(family, fields, **options)
    assert packed_loss == pytest.approx(loss, rel=1e-10)
    assert (packed_gradient - gradient).norm() <= 1e-8 * gradient.norm()


@pytest.mark.parametrize("family", ["mpnet", "deberta-v2", "bloom", "gptj"])
def test_models_whose_attention_is_their_own_are_refused(family):
    model, _ = build(family, GPT if family == "gptj" else {"n_layer": 3, "n_head": 4} if family == "bloom" else {})
    with pytest.raises(NotPackable, match=r"it has no stack|its attention is eager"):
        install(model)


def test_layers_that_also_carry_a_state_along_are_refused_whatever_it_is_worth():
    """Each of Falcon-H1's layers has attention, and beside it a state, which is next to nothing in a new model."""
    sizes = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_chunk_size": 8}
    model, _ = build("falcon_h1", sizes)
    with pytest.raises(NotPackable, match="its layers have convolutions, which would reach from text to text"):
        stack_of(model)


def test_without_packing_the_model_is_what_it_was_and_undoing_leaves_no_trace():
    ids_BT, mask_BT = batch()
    model, _ = build("bert", {})
    before = model.eval()(input_ids=ids_BT, attention_mask=mask_BT).logits
    undo = install(model)
    assert torch.equal(model(input_ids=ids_BT, attention_mask=mask_BT).logits, before)
    undo()
    assert model.config._attn_implementation == "sdpa"
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_texts_do_not_see_each_other():
    ids_BT, mask_BT = batch()
    model, _ = build("bert", {})
    install(model.eval())
    changed_BT = ids_BT.clone()
    changed_BT[1, 4] = (changed_BT[1, 4] + 1) % 40 + 3
    with without_masks():
        one, other = (
            model(input_ids=ids, attention_mask=mask_BT, packing=Packing.of(mask_BT)).logits for ids in (ids_BT, changed_BT)
        )
    assert [torch.equal(*rows) for rows in zip(one, other, strict=True)] == [True, False, True, True, True]

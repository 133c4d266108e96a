"""Without padding, the layers of a model compute the same function: loss and gradient, family by family."""

import pytest
import torch
import transformers

from hftune.models.packing import NotPackable, Packing, attention_calls, find_decoded, install, stacks_of, without_masks

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
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4, "dropout_rate": 0.0}
T5 |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 12, "vocab_size": 50, "initializer_factor": 2.0}
BART = {
    **{"d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4, "decoder_attention_heads": 4},
    **{
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "vocab_size": 50,
        "max_position_embeddings": 64,
        "init_std": 0.3,
        **TOKENS,
    },
    **{"pad_token_id": 0, "decoder_start_token_id": 2, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0},
}
ENCODER_DECODERS = {"t5": T5, "mt5": T5}
ENCODER_DECODERS |= dict.fromkeys(("bart", "mbart", "marian", "pegasus", "m2m_100", "plbart", "blenderbot"), BART)
PAIRS = {
    "as many heads as tokens": (LENGTHS, [4, 2, 1, 3, 4]),
    "as many source tokens as in the longest target": ([2, 3, 1], [6, 1, 4]),
    "targets without padding": ([5, 2, 6], [4, 4, 4]),
    "one": ([5], [7]),
}
"""Tokens of sources and targets, where shapes that mean different things are equal, and where one side has no padding."""


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


def losses_of_pair(family, pair="as many heads as tokens", checkpointing=False):
    """Return loss and gradient of an encoder-decoder padded, then packed."""
    (source_BS, source_mask), (target_BT, target_mask) = (
        (torch.randint(3, 50, mask.shape, generator=torch.Generator().manual_seed(0)) * mask, mask)
        for mask in ((torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long() for lengths in PAIRS[pair])
    )
    labels_BT = target_BT.masked_fill(target_mask == 0, -100)
    inputs = {"input_ids": source_BS, "attention_mask": source_mask, "decoder_input_ids": target_BT.roll(1, 1)}
    for packed in (False, True):
        config = transformers.AutoConfig.for_model(family, **ENCODER_DECODERS[family])
        for name in DROPOUT:
            if hasattr(config, name):
                setattr(config, name, 0.0)
        torch.manual_seed(1)
        model = transformers.AutoModelForSeq2SeqLM.from_config(config).double().train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if packed:
            install(model)
            packing = find_decoded(inputs, labels_BT, Packing.of(source_mask))
            by_source = sorted(zip(*PAIRS[pair], strict=True), key=lambda lengths: lengths[0])
            assert [*zip(packing.source.lengths, packing.lengths, strict=True)] == by_source
            with without_masks(), attention_calls() as calls:
                outputs = model(**inputs, packing=packing, use_cache=False)
            assert len(calls) == len({*calls}) == 2 + 2 * 3
        else:
            outputs = model(**inputs, use_cache=False)
        encoded = outputs.encoder_last_hidden_state * source_mask[..., None]
        loss = (outputs.logits * target_mask[..., None]).square().sum() + encoded.square().sum()
        loss.backward()
        yield loss.item(), torch.cat([value.grad.flatten() for value in model.parameters() if value.requires_grad])


@pytest.mark.parametrize(
    ("family", "options"),
    [
        *((family, {}) for family in ENCODER_DECODERS),
        *(("t5", {"pair": pair}) for pair in PAIRS),
        *(("bart", {"pair": pair}) for pair in PAIRS),
        *((family, {"checkpointing": True}) for family in ("t5", "bart")),
    ],
)
def test_encoder_and_decoder_are_packed_each(family, options):
    (loss, gradient), (packed_loss, packed_gradient) = losses_of_pair(family, **options)
    assert packed_loss == pytest.approx(loss, rel=1e-10)
    assert (packed_gradient - gradient).norm() <= 1e-8 * gradient.norm()


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_a_decoder_that_reads_the_source_again_is_packed_as_its_encoder(family):
    """As in classification, where the model shifts its own inputs."""
    ids_BT, mask_BT = batch()
    ids_BT[:, 0] = 7
    ids_BT[range(len(LENGTHS)), [length - 1 for length in LENGTHS]] = 2  # the hidden state of the end token is classified
    ids_BT[:, 1:-1][ids_BT[:, 1:-1] == 1] = 5
    config = transformers.AutoConfig.for_model(family, **ENCODER_DECODERS[family], num_labels=5)
    config.decoder_start_token_id, config.eos_token_id, config.pad_token_id = 3, 2, 0
    torch.manual_seed(1)
    model = transformers.AutoModelForSequenceClassification.from_config(config).double().eval()
    expected = model(input_ids=ids_BT, attention_mask=mask_BT).logits
    install(model)
    with without_masks(), attention_calls() as calls:
        found = model(input_ids=ids_BT, attention_mask=mask_BT, packing=Packing.of(mask_BT)).logits
    assert len(calls) == 8
    torch.testing.assert_close(found, expected)


def test_a_bias_of_each_layer_is_refused():
    model = transformers.AutoModelForSeq2SeqLM.from_config(transformers.AutoConfig.for_model("umt5", **T5))
    with pytest.raises(NotPackable, match="each of its layers computes a position bias of its own"):
        install(model)


def test_tokens_after_the_last_label_are_left_out():
    labels_BT = torch.tensor([[-100, 4, -100, 5, -100], [-100] * 5])
    source = Packing.of(torch.tensor([[1, 1, 1], [1, 0, 0]]))
    packing = find_decoded({}, labels_BT, source)  # in the order of the sources
    assert packing.lengths == (1, 4) and packing.source is source and packing.indices_N.tolist() == [5, 0, 1, 2, 3]
    assert find_decoded({"decoder_attention_mask": torch.ones(2, 5)}, labels_BT, source).lengths == (5, 5)
    with pytest.raises(NotPackable, match="a source has no tokens"):
        find_decoded({}, labels_BT, Packing.of(torch.tensor([[1, 1, 1], [0, 0, 0]])))


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
        stacks_of(model)


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

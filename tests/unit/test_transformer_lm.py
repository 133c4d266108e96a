"""The language model of our own: causal, loadable, generating, and possible to cut between its layers."""

import copy

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from hftune.models.transformer_lm import TransformerLM, TransformerLMConfig

IDS = torch.randint(0, 50, (3, 9), generator=torch.Generator().manual_seed(0))
SIZES = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}


def build(**fields):
    torch.manual_seed(0)
    return TransformerLM(TransformerLMConfig(**{**SIZES, "max_position_embeddings": 20, **fields})).eval()


def test_article_s_sizes_give_the_article_s_number_of_weights():
    with torch.device("meta"):
        model = TransformerLM(TransformerLMConfig(vocab_size=28783))
    final_norm = 2 * 4096  # of layers that begin with their norms
    assert sum(parameter.numel() for parameter in model.parameters()) == 1_041_453_167 + final_norm
    assert model(IDS.to("meta")).logits.shape == (3, 9, 28783)


@pytest.mark.parametrize("tied", [False, True])
def test_saved_model_is_loaded_by_the_auto_class_and_computes_the_same(tmp_path, tied):
    model = build(tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is TransformerLM
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits, rtol=0, atol=0)


def test_padding_on_the_left_changes_nothing_where_a_mask_tells_of_it():
    model = build()
    padded = torch.cat([torch.zeros(3, 4, dtype=torch.long), IDS], 1)
    mask = torch.cat([torch.zeros(3, 4, dtype=torch.long), torch.ones_like(IDS)], 1)
    torch.testing.assert_close(model(padded, attention_mask=mask).logits[:, 4:], model(IDS).logits)
    assert not torch.allclose(model(padded).logits[:, 4:], model(IDS).logits, atol=1e-3)


def test_generate_takes_the_most_probable_token_each_time():
    model, ids = build(), IDS
    for _ in range(5):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(model.generate(IDS, max_new_tokens=5, do_sample=False), ids)


PADDED = {
    "not padded": torch.ones(3, 9, dtype=torch.long),
    "left": (torch.arange(9) >= torch.tensor([[0], [3], [7]])).long(),
    "right": (torch.arange(9) < torch.tensor([[9], [4], [1]])).long(),
}


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"do_sample": True}], ids=["greedy", "beams", "sampled"])
@pytest.mark.parametrize("side", PADDED)
def test_texts_are_the_same_with_and_without_a_cache_and_a_token_costs_one_token(side, options):
    model, batch, read = build(initializer_range=1.0), {"input_ids": IDS, "attention_mask": PADDED[side]}, []
    model.model.layers[0].register_forward_pre_hook(lambda layer, args: read.append(args[0].shape[1]))
    texts = []
    for use_cache in (False, True):
        torch.manual_seed(1)
        texts.append(model.generate(**batch, max_new_tokens=8, use_cache=use_cache, pad_token_id=0, **options))
    assert torch.equal(*texts) and texts[0].shape == (3, 17) and len({*map(tuple, texts[0][:, 9:].tolist())}) > 1
    assert read == [*range(9, 17), 9, *[1] * 7]


@pytest.mark.parametrize("side", PADDED)
def test_logits_after_a_cache_are_those_of_the_whole_text(side):
    model, mask = build(), PADDED[side]
    whole, first = model(IDS, attention_mask=mask).logits, model(IDS[:, :4], attention_mask=mask[:, :4], use_cache=True)
    rest = model(IDS[:, 4:], attention_mask=mask, past_key_values=first.past_key_values)
    torch.testing.assert_close(torch.cat([first.logits, rest.logits], 1), whole)
    assert rest.past_key_values.get_seq_length() == 9
    torch.testing.assert_close(model(IDS, attention_mask=mask, logits_to_keep=2).logits, whole[:, -2:])
    assert model(IDS).past_key_values is None
    with pytest.raises(ValueError, match=r"^21 tokens exceed the model's 20 positions\.$"):
        model(torch.zeros(3, 12, dtype=torch.long), past_key_values=rest.past_key_values)


def test_hidden_states_go_on_in_a_part_without_what_comes_before_the_layers():
    """As a pipeline cuts it: embeddings and positions stay with the first part, norm and head go with the last."""
    whole = build()
    first, last = copy.deepcopy(whole.model), copy.deepcopy(whole)
    first.layers, first.norm = first.layers[:1], nn.Identity()
    last.model.layers, last.model.embed_tokens, last.model.embed_positions = last.model.layers[1:], None, nn.Identity()
    hidden_BTD = first(input_ids=IDS).last_hidden_state
    torch.testing.assert_close(last(inputs_embeds=hidden_BTD).logits, whole(IDS).logits, rtol=0, atol=0)


def test_embeddings_instead_of_tokens_give_the_same():
    model = build()
    torch.testing.assert_close(model(inputs_embeds=model.model.embed_tokens(IDS)).logits, model(IDS).logits, rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"^Give either input_ids or inputs_embeds\.$"):
        model()


def test_checkpointed_layers_give_the_same_gradient():
    def gradient(checkpointed):
        model = build(dropout=0.0).train()
        if checkpointed:
            model.activation_checkpointing_enable({"use_reentrant": False})
        model(IDS).logits.square().mean().backward()
        return model.model.embed_tokens.weight.grad

    torch.testing.assert_close(gradient(True), gradient(False), rtol=0, atol=0)


def test_dropout_is_on_in_training_alone():
    model = build(dropout=0.5)
    assert torch.equal(model(IDS).logits, model(IDS).logits)
    model.train()
    assert not torch.equal(model(IDS).logits, model(IDS).logits)


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"^hidden_size=30 is not a multiple of 2 \* num_attention_heads=8\.$"):
        build(hidden_size=30)
    with pytest.raises(ValueError, match=r"^21 tokens exceed the model's 20 positions\.$"):
        build()(torch.zeros(1, 21, dtype=torch.long))

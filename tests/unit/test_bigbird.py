"""Models that write titles, and block-sparse attention: against transformers, against themselves, and against leaks."""

import copy
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.torch_version import TorchVersion
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BertConfig,
    BigBirdConfig,
    BigBirdForMaskedLM,
    BigBirdForPreTraining,
    BigBirdModel,
    EncoderDecoderConfig,
    GPT2Config,
    LogitsProcessor,
    LogitsProcessorList,
)
from transformers.activations import ACT2FN
from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention

from hftune.errors import ConfigError
from hftune.models import bigbird_attention
from hftune.models.bigbird import (
    BlockSparseBigBirdConfig,
    BlockSparseBigBirdModel,
    PrefixLM,
    PrefixLMConfig,
    build_encoder_decoder,
    make_config,
)
from tests.support.big_bird import BLOCK, RANDOM, SIZES, load_encoder, right_padded, save_big_bird, words

PAD, START, END = 0, 1, 2
IDS = {"start_token_id": START, "end_token_id": END, "pad_token_id": PAD}
FULL_UP_TO = (5 + RANDOM) * BLOCK  # 28 tokens


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    return save_big_bird(tmp_path_factory.mktemp("big_bird"))


@pytest.fixture
def prefix_lm(pretrained):
    return PrefixLM.from_pretrained(pretrained, config=PrefixLMConfig.warm_start(AutoConfig.from_pretrained(pretrained)))


@pytest.fixture
def encoder_decoder(pretrained):
    torch.manual_seed(1)
    return build_encoder_decoder(pretrained, AutoConfig.from_pretrained(pretrained), **IDS).eval()


def source_and_title(num_source=9, num_title=6, rows=2):
    types = torch.cat([torch.zeros(rows, num_source), torch.ones(rows, num_title)], 1).long()
    return {"input_ids": words(rows, num_source + num_title), "token_type_ids": types}


def prompts(lengths):
    """Sources of these lengths, each with the token that starts its title, padded on the left."""
    width = max(lengths) + 1
    ids, mask, types = (torch.zeros(len(lengths), width, dtype=torch.long) for _ in range(3))
    for row, length in enumerate(lengths):
        ids[row, -length - 1 : -1], ids[row, -1] = words(length, seed=row), START
        mask[row, -length - 1 :], types[row, -1] = 1, 1
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}


# ------------------------------------------------------------------------------------------------------------ one stack


@pytest.mark.parametrize("kind", [BigBirdForMaskedLM, BigBirdForPreTraining])
def test_prefix_lm_takes_all_its_weights_from_a_big_bird_and_reads_a_source_as_it_does(kind, pretrained, tmp_path):
    big_bird = kind.from_pretrained(pretrained, attention_type="original_full")
    big_bird.save_pretrained(tmp_path)
    config = PrefixLMConfig.warm_start(AutoConfig.from_pretrained(tmp_path))
    model, info = PrefixLM.from_pretrained(tmp_path, config=config, output_loading_info=True)
    assert not info["missing_keys"] and not info["mismatched_keys"]
    ids = words(2, 40)
    logits = model(ids, token_type_ids=torch.zeros_like(ids)).logits
    # float32, two layers: only the order of additions differs.
    torch.testing.assert_close(logits, big_bird(ids)[0], rtol=1e-5, atol=1e-5)


def test_no_logits_change_with_a_title_token_that_they_predict_or_that_comes_later(prefix_lm):
    batch = source_and_title()
    logits = prefix_lm(**batch).logits
    for place in range(9, 15):
        changed = copy.deepcopy(batch)
        changed["input_ids"][:, place] = (changed["input_ids"][:, place] - 2) % (SIZES["vocab_size"] - 3) + 3
        difference = (prefix_lm(**changed).logits - logits).abs().amax((0, 2))
        assert (difference[:place] == 0).all()
        assert (difference[place:] > 1e-3).all()


def test_source_and_title_see_the_whole_source(prefix_lm):
    batch = source_and_title()
    logits = prefix_lm(**batch).logits
    for place in (0, 8):
        changed = copy.deepcopy(batch)
        changed["input_ids"][:, place] = (changed["input_ids"][:, place] - 2) % (SIZES["vocab_size"] - 3) + 3
        assert ((prefix_lm(**changed).logits - logits).abs().amax((0, 2)) > 1e-3).all()


@pytest.mark.parametrize("place", ["left", "between", "right"])
@pytest.mark.parametrize("attention", ["hftune_packed", "sdpa", "eager"])
def test_padding_changes_no_logits_wherever_it_is(place, attention, prefix_lm):
    prefix_lm.set_attn_implementation(attention)
    batch = source_and_title()
    cut = {"left": 0, "between": 9, "right": 15}[place]
    real = torch.ones(2, 15, dtype=torch.long)
    padded = {
        name: torch.cat([values[:, :cut], torch.zeros(2, 4, dtype=torch.long), values[:, cut:]], 1)
        for name, values in {**batch, "attention_mask": real}.items()
    }
    found = prefix_lm(**padded).logits
    assert found.isfinite().all()
    found = torch.cat([found[:, :cut], found[:, cut + 4 :]], 1)
    torch.testing.assert_close(found, prefix_lm(**batch).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 4, "length_penalty": 2.0}, {"num_beams": 3, "length_penalty": 0.1, "no_repeat_ngram_size": 2}],
    ids=["greedy", "beams", "beams without repetition"],
)
def test_titles_are_the_same_with_and_without_a_cache_alone_and_in_a_batch(options, prefix_lm):
    lengths = [5, 12, 1]
    batch = prompts(lengths)
    titles = prefix_lm.generate(**batch, max_new_tokens=8, **options)[:, 13:]
    uncached = prefix_lm.generate(**batch, max_new_tokens=8, use_cache=False, **options)[:, 13:]
    assert torch.equal(titles, uncached)
    for row, length in enumerate(lengths):
        alone = {name: values[row : row + 1, -length - 1 :] for name, values in batch.items()}
        title = prefix_lm.generate(**alone, max_new_tokens=8, **options)[0, length + 1 :]
        assert torch.equal(title, titles[row, : len(title)]) and (titles[row, len(title) :] == PAD).all()
    assert len({tuple(title.tolist()) for title in titles}) == 3


def test_greedy_title_is_the_likeliest_next_token_of_a_plain_forward_again_and_again(prefix_lm):
    batch = prompts([7])
    title = prefix_lm.generate(**batch, max_new_tokens=6)[0, 8:]
    del batch["attention_mask"]
    for token in title:
        assert prefix_lm(**batch).logits[0, -1].argmax() == token
        batch = {
            "input_ids": torch.cat([batch["input_ids"], token.view(1, 1)], 1),
            "token_type_ids": torch.cat([batch["token_type_ids"], torch.ones(1, 1, dtype=torch.long)], 1),
        }


class Dictate(LogitsProcessor):
    def __init__(self, tokens, prompt_length):
        self.tokens, self.prompt_length = tokens, prompt_length

    def __call__(self, input_ids, scores):
        scores[:, self.tokens[input_ids.shape[1] - self.prompt_length]] += 1e4
        return scores


@pytest.mark.parametrize("as_config", [False, True])
def test_title_may_repeat_the_words_of_its_source_but_not_its_own(as_config, prefix_lm):
    batch = prompts([7])
    a, b, c = batch["input_ids"][0, :3].tolist()
    dictated = LogitsProcessorList([Dictate([a, b, c, a, b], 8)])
    options = {"max_new_tokens": 5, "no_repeat_ngram_size": 2}
    if as_config:
        options = {"generation_config": type(prefix_lm.generation_config)(**options, pad_token_id=PAD, eos_token_id=END)}
    title = prefix_lm.generate(**batch, logits_processor=dictated, **options)[0, 8:].tolist()
    assert title[:4] == [a, b, c, a] and title[4] != b


def test_saved_prefix_lm_comes_back_as_itself_with_the_same_titles(prefix_lm, tmp_path):
    prefix_lm.generation_config.eos_token_id = 7
    prefix_lm.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is PrefixLM and type(loaded.config) is PrefixLMConfig
    same = PrefixLMConfig.warm_start(loaded.config).to_dict()
    assert all(same[name] == getattr(prefix_lm.config, name) for name in SIZES.keys() & same.keys())
    assert loaded.generation_config.eos_token_id == 7 and loaded.config.attention_probs_dropout_prob == 0
    batch = prompts([4, 9])
    options = {"max_new_tokens": 8, "num_beams": 2}
    assert torch.equal(loaded.generate(**batch, **options), prefix_lm.generate(**batch, **options))


def title_loss(model, batch, num_title=6):
    logits = model(**batch, logits_to_keep=num_title).logits
    return cross_entropy(logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1 - num_title :].flatten(), reduction="sum")


def gradients(model, loss):
    model.zero_grad()
    loss().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_every_parameter_of_a_prefix_lm_gets_a_gradient_and_checkpointing_does_not_change_it(dropout, pretrained):
    config = PrefixLMConfig.warm_start(AutoConfig.from_pretrained(pretrained), hidden_dropout_prob=dropout)
    model = PrefixLM.from_pretrained(pretrained, config=config).train()

    def loss():
        torch.manual_seed(0)
        return title_loss(model, source_and_title())

    plain = gradients(model, loss)
    assert all(gradient.abs().sum() > 0 for gradient in plain.values())
    model.gradient_checkpointing_enable()
    for name, gradient in gradients(model, loss).items():
        torch.testing.assert_close(gradient, plain[name], rtol=1e-5, atol=1e-6, msg=name)


def test_prefix_lm_learns_to_copy_and_then_writes_what_it_was_taught():
    torch.manual_seed(0)
    config = PrefixLMConfig.warm_start(
        BertConfig(**{**SIZES, "initializer_range": 0.05}), eos_token_id=END, hidden_dropout_prob=0.0
    )
    model = AutoModelForCausalLM.from_config(config).train()
    sources = words(8, 5)
    start, end = torch.full((8, 1), START), torch.full((8, 1), END)
    ids = torch.cat([sources, start, sources[:, :3], end], 1)
    types = torch.tensor([[0] * 5 + [1] * 5]).expand(8, -1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(50):
        optimizer.zero_grad()
        title_loss(model, {"input_ids": ids, "token_type_ids": types}, num_title=5).div(32).backward()
        optimizer.step()
    written = model.eval().generate(ids[:, :6], token_type_ids=types[:, :6], max_new_tokens=6, num_beams=2)
    assert torch.equal(written[:, 6:], ids[:, 6:])


def test_attention_dropout_is_zero_unless_asked_for(pretrained):
    config = AutoConfig.from_pretrained(pretrained)
    assert config.attention_probs_dropout_prob == 0.1
    assert PrefixLMConfig.warm_start(config).attention_probs_dropout_prob == 0
    asked = PrefixLMConfig.warm_start(config, attention_probs_dropout_prob=0.2)
    assert asked.attention_probs_dropout_prob == 0.2 and asked.hidden_act == "gelu_pytorch_tanh"


def test_new_models_have_the_cheap_kernel_of_big_birds_activation():
    fresh = make_config(BigBirdConfig, SIZES)
    configs = [fresh, BlockSparseBigBirdConfig(**SIZES), BlockSparseBigBirdConfig.warm_start(BigBirdConfig(**SIZES))]
    configs += [PrefixLMConfig.warm_start(fresh), PrefixLMConfig.warm_start(fresh, hidden_act="gelu_new")]
    assert {config.hidden_act for config in configs} == {"gelu_pytorch_tanh"}
    x = torch.linspace(-5, 5, 101, dtype=torch.double)
    torch.testing.assert_close(ACT2FN["gelu_pytorch_tanh"](x), ACT2FN["gelu_new"](x), rtol=0, atol=1e-14)


def test_prefix_lm_without_token_types_is_refused(prefix_lm):
    with pytest.raises(ValueError, match="PrefixLM needs token_type_ids: 0 for the source, 1 for the title"):
        prefix_lm(words(1, 4))


# ------------------------------------------------------------------------------------------------ block-sparse attention


@pytest.mark.parametrize(("kind", "length"), [("original_full", 64), ("original_full", 31), ("block_sparse", FULL_UP_TO)])
def test_full_attention_equals_that_of_transformers(kind, length, pretrained):
    ids, mask = right_padded([length, length - 7])
    theirs = BigBirdModel.from_pretrained(pretrained, attention_type="original_full")
    expected = theirs(ids, attention_mask=mask).last_hidden_state
    found = load_encoder(pretrained, attention_type=kind)(ids, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("length", [48, 128, 63])
def test_block_sparse_attention_and_its_gradients_equal_those_of_transformers_with_the_same_random_blocks(
    length, pretrained, monkeypatch
):
    ours = load_encoder(pretrained).train()
    theirs = BigBirdModel.from_pretrained(pretrained, hidden_dropout_prob=0.0, add_pooling_layer=False).train()
    ids, mask = right_padded([length, length - 1])  # both rows end in the same block, theirs is the padding's
    num_blocks = -(-length // BLOCK)

    def same_blocks(attention, *args, **kwargs):
        own = ours.encoder.layer[attention.seed].attention.self
        return list(own.random_blocks(torch.tensor([num_blocks - 1]), num_blocks)[0][0].numpy())

    monkeypatch.setattr(BigBirdBlockSparseAttention, "_bigbird_block_rand_mask_with_head", same_blocks)
    weight = torch.randn(2, length, SIZES["hidden_size"]) * mask[..., None]
    results = []
    for model in (ours, theirs):
        hidden = model(ids, attention_mask=mask).last_hidden_state
        results.append((hidden[mask.bool()], gradients(model, lambda hidden=hidden: (hidden * weight).sum())))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-5, atol=1e-5)
    assert results[0][1].keys() == results[1][1].keys()
    for name, gradient in results[0][1].items():
        torch.testing.assert_close(gradient, results[1][1][name], rtol=1e-4, atol=1e-4, msg=name)


def test_gathered_blocks_give_what_a_mask_over_all_tokens_gives_for_rows_of_every_length(pretrained):
    attention = load_encoder(pretrained).encoder.layer[1].attention.self
    lengths = [1, 4, 27, 28, 29, 33, 36, 50, 64]
    hidden = torch.randn(len(lengths), 64, SIZES["hidden_size"], generator=torch.Generator().manual_seed(0))
    valid = right_padded(lengths)[1].bool()
    last = (torch.tensor(lengths) - 1) // BLOCK
    blocks, used = attention.key_blocks(last, 16)
    seen = torch.zeros(len(lengths), 4, 16, 16, dtype=torch.long)
    seen[:, :, 1:-1].scatter_add_(3, blocks, used.long())
    assert seen.max() == 1  # no block counts twice
    seen[:, :, 0] = 1
    for row, block in enumerate(last):
        seen[row, :, block] = 1
    mask = seen.bool().repeat_interleave(BLOCK, 2).repeat_interleave(BLOCK, 3) & valid[:, None, None]
    q, k, v = (
        layer(hidden).unflatten(-1, (4, -1)).transpose(1, 2) for layer in (attention.query, attention.key, attention.value)
    )
    expected = scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)
    found = attention(hidden, valid)[0]
    torch.testing.assert_close(found[valid], expected[valid], rtol=1e-5, atol=1e-5)
    full = scaled_dot_product_attention(q, k, v, valid[:, None, None]).transpose(1, 2).flatten(2)
    torch.testing.assert_close(found[:4][valid[:4]], full[:4][valid[:4]], rtol=1e-5, atol=1e-5)


def test_on_the_cpu_a_kernel_of_its_own_gives_what_other_devices_compute_and_the_same_gradients(pretrained, monkeypatch):
    model = load_encoder(pretrained).train()
    ids, mask = right_padded([64, 29, 50])
    results = []
    monkeypatch.setattr(bigbird_attention, "MAX_GRID", 1)  # one head at a time
    for kernel in (bigbird_attention._attend_middle_on_cpu, bigbird_attention._attend_middle):
        monkeypatch.setattr(bigbird_attention, "_attend_middle_on_cpu", kernel)
        hidden = model(ids, attention_mask=mask).last_hidden_state
        found = gradients(model, lambda hidden=hidden: (hidden * mask[..., None]).square().sum())
        results.append({"hidden": hidden[mask.bool()], **found})
    for name, value in results[0].items():
        torch.testing.assert_close(value, results[1][name], rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("lengths", [[5, 20], [64, 29, 50]])
def test_layers_of_the_encoder_compute_real_tokens_only_and_the_same_as_padded_ones(lengths, pretrained, monkeypatch):
    model = load_encoder(pretrained).double().train()
    ids, mask = right_padded(lengths)
    computed = []
    model.encoder.layer[1].output.dense.register_forward_hook(lambda layer, args, output: computed.append(output.shape[:2]))
    results = []
    for _ in range(2):
        hidden = model(ids, attention_mask=mask).last_hidden_state[mask.bool()]
        results.append([hidden, *gradients(model, lambda hidden=hidden: hidden.square().sum()).values()])
        monkeypatch.setattr("hftune.models.bigbird.FakeTensor", torch.Tensor)  # as if it had no values
    assert computed == [(1, sum(lengths)), (len(lengths), max(lengths))]
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("length", [9, 70])
def test_no_parameter_of_the_encoder_is_left_out_whatever_the_length(length, pretrained):
    model = load_encoder(pretrained).train()  # DistributedDataParallel stops where one has no gradient
    model(words(2, length)).last_hidden_state.square().sum().backward()
    assert not [name for name, parameter in model.named_parameters() if parameter.grad is None]


def test_flex_attention_visits_the_blocks_seen_and_no_others_forward_and_backward(pretrained):
    attention = load_encoder(pretrained).encoder.layer[1].attention.self
    lengths = [1, 4, 28, 29, 33, 50, 127, 128]
    valid = right_padded(lengths)[1].bool()
    block_mask = attention.block_mask(valid, num_empty=3)
    num_blocks = len(lengths) * 32 + 3

    def visited(num, indices):
        dense = torch.zeros(*indices.shape, dtype=torch.bool)
        listed = torch.arange(indices.shape[-1]) < num[..., None]
        return dense.scatter_(-1, indices.long(), listed)

    forward = visited(block_mask.kv_num_blocks, block_mask.kv_indices)
    whole = visited(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    backward = visited(block_mask.q_num_blocks, block_mask.q_indices).transpose(-1, -2)
    whole_backward = visited(block_mask.full_q_num_blocks, block_mask.full_q_indices).transpose(-1, -2)

    assert torch.equal(forward, backward) and torch.equal(whole, whole_backward) and not (forward & whole).any()
    more_than_listed = ((forward | whole).sum(-1) > 5 + RANDOM).nonzero()
    rows = [(query // 32, query % 32) for _, _, query in more_than_listed.tolist()]
    assert rows and all(query in (0, (lengths[row] - 1) // BLOCK) for row, query in rows)
    among_themselves = torch.block_diag(*torch.ones(len(lengths), 32, 32), torch.zeros(3, 3)).bool()
    assert not (forward | whole)[:, :, ~among_themselves].any()
    index = (torch.arange(size) for size in (1, 4, num_blocks * BLOCK, num_blocks * BLOCK))
    tokens = block_mask.mask_mod(*torch.meshgrid(*index, indexing="ij"))
    blocks = tokens.view(1, 4, num_blocks, BLOCK, num_blocks, BLOCK)
    assert torch.equal(blocks.any(5).any(3), forward | whole)
    assert (blocks.all(5).all(3) == whole).all()


def test_flex_attention_is_tried_on_an_example_and_its_backward_pass_is_missed_on_a_cpu():
    assert bigbird_attention.flex_problem(torch.device("cpu"), torch.float32, 8, 24) == "block_size=24 is not a multiple of 16"
    problem = bigbird_attention.flex_problem(torch.device("cpu"), torch.float32, 8, 16)
    assert problem is not None and "\n" not in problem


@pytest.mark.parametrize("wrong", [False, True])
def test_flex_attention_is_found_right_or_wrong_by_its_example(wrong, monkeypatch):
    def dense(q, k, v, block_mask):
        rows, heads, size = (torch.arange(n) for n in (1, *q.shape[1:3]))
        mask = block_mask.mask_mod(*torch.meshgrid(rows, heads, size, size, indexing="ij"))
        return scaled_dot_product_attention(q, k, v, mask.roll(16, -1) if wrong else mask)

    monkeypatch.setattr(bigbird_attention, "run_flex", dense)
    problem = bigbird_attention.flex_problem.__wrapped__(torch.device("cpu"), torch.float32, 8, 16)
    assert problem == ("it computes something else" if wrong else None)


def test_blocks_are_gathered_where_flex_attention_cannot_be_used_and_it_is_said_once(pretrained, monkeypatch):
    model, ids = load_encoder(pretrained), words(1, 64)
    expected = model(ids).last_hidden_state
    tried = []
    monkeypatch.setattr(bigbird_attention, "flex_problem", lambda *args: tried.append(args) or "no compiler")
    flex_is_used = bigbird_attention.BlockSparseSelfAttention._flex_is_used
    on_a_gpu = SimpleNamespace(device=torch.device("cuda", 0), dtype=torch.bfloat16, shape=(1, 4, 64, 8))
    monkeypatch.setattr(
        bigbird_attention.BlockSparseSelfAttention, "_flex_is_used", lambda self, q: flex_is_used(self, on_a_gpu)
    )
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        assert torch.equal(model(ids).last_hidden_state, expected)
    assert tried == [(torch.device("cuda", 0), torch.bfloat16, 8, BLOCK)] * 2
    (warning,) = said
    assert str(warning.message).startswith("FlexAttention cannot be used here (no compiler): ")
    assert str(warning.message).endswith(" To hide this, set task.model_config.block_sparse_kernel=gathered.")


def test_flex_attention_refuses_to_train_on_a_cpu_and_says_where_it_does_not_compile(pretrained, monkeypatch):
    model = load_encoder(pretrained, block_sparse_kernel="flex")
    with pytest.raises(
        ConfigError, match=r"block_sparse_kernel=flex cannot train on a CPU: .* Use block_sparse_kernel=gathered\.$"
    ):
        model(words(1, 64))

    def compiled(device_type):
        def fail(*args, **kwargs):
            raise torch._dynamo.exc.TorchDynamoException("No working C++ compiler found.\nSet TORCH_LOGS.")

        return fail

    monkeypatch.setattr(bigbird_attention, "_compiled_flex", compiled)
    with torch.no_grad(), pytest.raises(ConfigError, match=r"cannot be compiled here \(TorchDynamoException: No working C\+\+"):
        model(words(1, 64))


def test_flex_attention_needs_a_torch_that_compiles_for_more_than_eight_lengths(monkeypatch):
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0+cu130"))
    with pytest.raises(ConfigError, match=r"flex needs torch 2\.12 or newer, not 2\.11\.0\+cu130\. Use .*=gathered\.$"):
        bigbird_attention._compiled_flex.__wrapped__("cpu")


def test_result_of_a_row_depends_neither_on_its_neighbours_nor_on_the_padding(pretrained):
    model = load_encoder(pretrained)
    lengths = [5, 29, 47, 90]
    ids, mask = right_padded(lengths)
    together = model(ids, attention_mask=mask).last_hidden_state
    for row, length in enumerate(lengths):
        alone = model(ids[row : row + 1, :length]).last_hidden_state
        torch.testing.assert_close(together[row, :length], alone[0], rtol=1e-5, atol=1e-5)


def test_training_and_evaluation_compute_the_same_and_a_short_batch_switches_nothing(pretrained):
    model = load_encoder(pretrained).train()
    ids = words(2, 64)
    first = model(ids).last_hidden_state
    model(words(2, 8))
    assert torch.equal(model(ids).last_hidden_state, first)
    assert torch.equal(model.eval()(ids).last_hidden_state, first)
    with torch.no_grad():
        assert torch.equal(model(ids).last_hidden_state, first)
    full = load_encoder(pretrained, attention_type="original_full")(ids).last_hidden_state
    assert (full - first).abs().max() > 1e-2


def test_no_global_generator_is_touched(pretrained):
    model = load_encoder(pretrained).train()
    numpy_before, torch_before = np.random.get_state()[1].copy(), torch.get_rng_state()
    model(words(1, 64)).last_hidden_state.sum().backward()
    assert (np.random.get_state()[1] == numpy_before).all() and torch.equal(torch.get_rng_state(), torch_before)


def test_random_blocks_are_keyed_by_seed_layer_and_head_and_lie_in_the_row_outside_what_is_seen_anyway(pretrained):
    def draw(layer=0, last=(31,), num_blocks=32, **overrides):
        attention = load_encoder(pretrained, **overrides).encoder.layer[layer].attention.self
        blocks, drawn = attention.random_blocks(torch.tensor(last), num_blocks)
        assert drawn.all()
        return blocks

    blocks = draw()
    assert torch.equal(blocks, draw())
    assert torch.equal(draw(last=(20,)), draw(last=(20, 31))[:1])
    heads = [blocks[0, head] for head in range(4)]
    others = [draw(layer=1)[0, 0], draw(random_blocks_seed=1)[0, 0], *heads[1:]]
    assert not any(torch.equal(heads[0], other) for other in others)
    place = torch.arange(1, 31)[:, None]
    assert ((blocks - place).abs() > 1).all() and (blocks > 0).all() and (blocks < 31).all()
    assert (blocks[..., 0] != blocks[..., 1]).all()
    assert draw(last=(10,), num_blocks=32)[:, :, :9].max() < 10


# -------------------------------------------------------------------------------------------------- encoder and decoder


def pairs(num_title=6):
    ids, mask = right_padded([70, 33, 9])
    title = words(3, num_title, seed=5)
    title[:, 0] = START
    return {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": title}


def test_both_halves_start_from_the_same_weights(encoder_decoder, pretrained):
    theirs = BigBirdForPreTraining.from_pretrained(pretrained).state_dict()
    for name, weight in encoder_decoder.encoder.state_dict().items():
        assert torch.equal(weight, theirs[f"bert.{name}"]), name
    fresh = set()
    for name, weight in encoder_decoder.decoder.state_dict().items():
        if name in theirs:
            assert torch.equal(weight, theirs[name]), name
        else:
            fresh.add(name)
    assert fresh and all(".crossattention." in name for name in fresh)


def test_no_logits_of_the_decoder_change_with_a_title_token_that_they_predict_or_that_comes_later(encoder_decoder):
    batch = pairs()
    logits = encoder_decoder(**batch).logits
    for place in range(1, 6):
        changed = copy.deepcopy(batch)
        changed["decoder_input_ids"][:, place] = (changed["decoder_input_ids"][:, place] - 2) % (SIZES["vocab_size"] - 3) + 3
        difference = (encoder_decoder(**changed).logits - logits).abs().amax((0, 2))
        assert (difference[:place] == 0).all() and (difference[place:] > 1e-3).all()


@pytest.mark.parametrize("options", [{}, {"num_beams": 3, "length_penalty": 2.0, "no_repeat_ngram_size": 2}])
def test_encoder_decoder_writes_the_same_with_and_without_cache_alone_in_a_batch_and_after_loading(
    options, encoder_decoder, tmp_path
):
    batch = pairs()
    del batch["decoder_input_ids"]
    titles = encoder_decoder.generate(**batch, max_new_tokens=8, **options)
    assert torch.equal(titles, encoder_decoder.generate(**batch, max_new_tokens=8, use_cache=False, **options))
    for row, length in enumerate([70, 33, 9]):
        title = encoder_decoder.generate(batch["input_ids"][row : row + 1, :length], max_new_tokens=8, **options)[0]
        assert torch.equal(title, titles[row, : len(title)]) and (titles[row, len(title) :] == PAD).all()
    encoder_decoder.save_pretrained(tmp_path)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert type(loaded.encoder) is BlockSparseBigBirdModel
    assert torch.equal(loaded.generate(**batch, max_new_tokens=8, **options), titles)
    again = build_encoder_decoder(str(tmp_path), loaded.config, **IDS)
    assert torch.equal(again.generate(**batch, max_new_tokens=8, **options), titles)


def test_every_parameter_of_an_encoder_decoder_gets_a_gradient_and_checkpointing_does_not_change_it(encoder_decoder):
    model = encoder_decoder.train()
    batch = pairs()

    def loss():
        torch.manual_seed(0)
        logits = model(**batch).logits
        return cross_entropy(logits[:, :-1].flatten(0, 1), batch["decoder_input_ids"][:, 1:].flatten())

    plain = gradients(model, loss)
    assert all(gradient.abs().sum() > 0 for gradient in plain.values())
    model.gradient_checkpointing_enable()
    for name, gradient in gradients(model, loss).items():
        torch.testing.assert_close(gradient, plain[name], rtol=1e-4, atol=1e-6, msg=name)


def test_encoder_decoder_without_pretrained_weights_is_drawn_from_its_config():
    torch.manual_seed(0)
    model = build_encoder_decoder(None, BigBirdConfig(**SIZES), **IDS, random_blocks_seed=3)
    assert type(model.encoder) is BlockSparseBigBirdModel and model.config.encoder.random_blocks_seed == 3
    assert model.generate(words(1, 40), max_new_tokens=3).shape[1] <= 4


def stack(config=None, **overrides):
    return PrefixLMConfig.warm_start(config or BigBirdConfig(**SIZES), **overrides)


def two_stacks(source=None, config=None, **overrides):
    return build_encoder_decoder(source, config or BigBirdConfig(**SIZES), **IDS, **overrides)


BOTH_LOADED = ("folder", EncoderDecoderConfig(encoder=BertConfig().to_dict(), decoder=BertConfig().to_dict()))
REFUSED = [
    (lambda: stack(GPT2Config()), "task.model is a 'gpt2'; architecture=prefix_lm takes the weights of bert or big_bird."),
    (
        lambda: stack(BigBirdConfig(use_bias=False)),
        "use_bias=false or rescale_embeddings=true, which prefix_lm does not support.",
    ),
    (lambda: stack(BertConfig(type_vocab_size=1)), "1 token type; architecture=prefix_lm needs two, for source and title."),
    (lambda: stack(attention_type="block_sparse"), "Use task.architecture=encoder_decoder, whose encoder is block-sparse."),
    (lambda: stack(hidden_sise=8), "hidden_sise is not a key of PrefixLMConfig. Did you mean 'hidden_size'?"),
    (lambda: stack(num_attention_heads=5), "hidden_size=32 is not a multiple of task.model_config.num_attention_heads=5."),
    (lambda: two_stacks(decoder={"attention_type": "block_sparse"}), "a decoder cannot be block-sparse. Leave it out;"),
    (lambda: two_stacks(blok_size=8), "blok_size is not a key of BlockSparseBigBirdConfig. Did you mean 'block_size'?"),
    (
        lambda: two_stacks(decoder={"hidden_sise": 8}),
        "decoder.hidden_sise is not a key of BertConfig. Did you mean 'hidden_size'?",
    ),
    (lambda: two_stacks(block_sparse_kernel="flexx"), "'flexx' is not one of auto, gathered, flex. Did you mean 'flex'?"),
    (
        lambda: two_stacks(attention_type="blocksparse"),
        "is not one of block_sparse, original_full. Did you mean 'block_sparse'?",
    ),
    (lambda: two_stacks(block_size=0), "task.model_config.block_size=0 must be at least 1."),
    (lambda: two_stacks(num_random_blocks=-1), "task.model_config.num_random_blocks=-1 must be at least 0."),
    (lambda: two_stacks(num_hidden_layers=0), "task.model_config.num_hidden_layers=0 must be at least 1."),
    (lambda: two_stacks(block_size="big"), "cannot be used: Field 'block_size' expected int, got str (value: 'big')."),
    (
        lambda: two_stacks(num_attention_heads=5),
        "task.model_config.hidden_size=32 is not a multiple of task.model_config.num_att",
    ),
    (
        lambda: two_stacks(decoder={"num_attention_heads": 5}),
        "is not a multiple of task.model_config.decoder.num_attention_heads=5.",
    ),
    (lambda: two_stacks(hidden_act="gelo"), "hidden_act='gelo' is not known to transformers. Did you mean 'gelu'?"),
    (lambda: two_stacks(*BOTH_LOADED, block_size=8), "is loaded unchanged. Leave task.model_config empty."),
]


@pytest.mark.parametrize(("build", "hint"), REFUSED)
def test_models_and_fields_that_cannot_work_are_refused(build, hint):
    with pytest.raises(ConfigError) as refusal:
        build()
    assert str(refusal.value).startswith("task.model") and hint in str(refusal.value)

"""Titles from the cache of a forward pass: those of plain generation, without reading a source twice."""

import numpy as np
import pytest
import torch
from transformers import BigBirdConfig, GenerationConfig
from transformers.cache_utils import DynamicLayer

from hftune import ConfigError, Recipe
from hftune.build import load_datasets
from hftune.evaluation import plan_evaluation
from hftune.models.bigbird import PrefixLM, PrefixLMConfig, build_encoder_decoder
from hftune.models.generation import ROOM, SourceLayer, changed, continued, tidy
from hftune.tasks import LanguageModeling, TitleGeneration
from hftune.tasks.text import NO_LABEL

PAD, START, END = 0, 1, 2
SIZES = {
    "vocab_size": 90,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "initializer_range": 0.5,
    "pad_token_id": PAD,
}
IDS = {"pad_token_id": PAD, "bos_token_id": START, "eos_token_id": END, "decoder_start_token_id": START}
ARCHITECTURES = ("prefix_lm", "encoder_decoder")
USUAL = {
    "greedy": {},
    "beams": {"num_beams": 4},
    "long titles": {"num_beams": 3, "length_penalty": 2.0, "early_stopping": True, "min_new_tokens": 9},
    "no repetition": {"num_beams": 2, "no_repeat_ngram_size": 2, "repetition_penalty": 1.3},
    "sampled": {"do_sample": True, "top_k": 20, "temperature": 0.8},
    "sampled beams": {"do_sample": True, "num_beams": 3},
}
WITH_A_CACHE_OF_THEIR_OWN = {
    "none": {"use_cache": False},
    "of a kind that is named": {"cache_implementation": "dynamic"},
    "guessed from the source": {"prompt_lookup_num_tokens": 2},
}


def build(architecture):
    torch.manual_seed(7)
    if architecture == "prefix_lm":
        return PrefixLM(PrefixLMConfig(**SIZES)).eval()
    config = BigBirdConfig(**SIZES, block_size=4, num_random_blocks=1)
    special = {"start_token_id": START, "end_token_id": END, "pad_token_id": PAD}
    fields = {**SIZES, "block_size": 4, "num_random_blocks": 1}
    fields.pop("pad_token_id")
    return build_encoder_decoder(None, config, **special, **fields).eval()


class Digits:
    """Stands in for a tokenizer: a token is its number."""

    pad_token_id, cls_token_id, sep_token_id = PAD, START, END

    def batch_decode(self, rows, skip_special_tokens):
        return [" ".join(str(int(token)) for token in row if token > END) for row in rows]


def task_and_batch(architecture, lengths=(40, 3, 55, 17)):
    task = TitleGeneration(architecture=architecture)
    task.text_tokenizer = Digits()
    generator = torch.Generator().manual_seed(0)

    def tokens(count):
        return [START, *torch.randint(3, 90, (count,), generator=generator).tolist(), END]

    titles = (7, 2, 5, 1)
    rows = zip(lengths, titles, strict=True)
    return task, task.collate(
        [{"source": tokens(source), "title": tokens(title), "index": index} for index, (source, title) in enumerate(rows)]
    )


def plain_titles(task, model, batch):
    nothing = torch.zeros(())  # outputs without a cache
    torch.manual_seed(5)
    return task._generate(nothing, model, batch)


@pytest.mark.parametrize("name", [*USUAL, *WITH_A_CACHE_OF_THEIR_OWN])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@torch.no_grad()
def test_titles_from_the_cache_of_the_loss_are_those_of_plain_generation(architecture, name):
    model, (task, batch) = build(architecture), task_and_batch(architecture)
    settings = (USUAL | WITH_A_CACHE_OF_THEIR_OWN)[name]
    model.generation_config = GenerationConfig(**IDS, **{"min_new_tokens": 6, "max_new_tokens": 12, **settings})
    if "prompt_lookup_num_tokens" in settings:
        batch = {key: values[:1] for key, values in batch.items()}  # transformers takes one row at a time
    expected = plain_titles(task, model, batch)
    torch.manual_seed(5)
    assert task._generate(model(**task.evaluation_inputs(batch)), model, batch) == expected
    assert len({*expected}) == len(expected)


@pytest.mark.parametrize("num_beams", [1, 4])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@torch.no_grad()
def test_no_source_is_read_a_second_time(architecture, num_beams):
    model, (task, batch) = build(architecture), task_and_batch(architecture)
    model.generation_config = GenerationConfig(**IDS, max_new_tokens=5, num_beams=num_beams)
    outputs = model(**task.evaluation_inputs(batch))
    body = model.bert if architecture == "prefix_lm" else model.decoder.bert
    read, copied, encoded = [], [], []
    body.embeddings.register_forward_pre_hook(lambda *call: read.append(call[-1]["input_ids"].shape), with_kwargs=True)
    if architecture == "encoder_decoder":
        model.encoder.register_forward_hook(lambda *call: encoded.append(call))
        body.encoder.layer[0].crossattention.self.key.register_forward_hook(lambda *call: copied.append(call))
    task._generate(outputs, model, batch)
    assert {*read} == {(4 * num_beams, 1)} and not encoded and not copied


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_training_pass_keeps_no_cache_and_loses_nothing_to_one(architecture):
    model, (task, batch) = build(architecture).train(), task_and_batch(architecture)
    for layer in model.modules():
        if isinstance(layer, torch.nn.Dropout):
            layer.p = 0.0
    training, evaluation = model(**task.inputs(batch)), model(**task.evaluation_inputs(batch))
    assert training.past_key_values is None and evaluation.past_key_values is not None
    is_real = batch["labels"] != NO_LABEL  # training computes no padding
    assert torch.allclose(training.logits[is_real], evaluation.logits[is_real], rtol=0, atol=1e-5)


@torch.no_grad()
def test_the_cache_is_held_once():
    model, (task, batch) = build("prefix_lm"), task_and_batch("prefix_lm")
    outputs = model(**task.evaluation_inputs(batch))
    config = GenerationConfig(**IDS, num_beams=3)
    cache = continued(outputs, batch["title"].shape[1], config)["past_key_values"]
    assert cache is outputs.past_key_values
    assert cache.layers[0].keys.shape[:3] == (12, 4, batch["source"].shape[1])
    width = batch["source"].shape[1] + ROOM
    assert cache.layers[0].keys.untyped_storage().nbytes() == 12 * 4 * width * 8 * 4  # not a view of something longer


class Articles:
    """A data set of which only the lengths are asked for."""

    def __init__(self, sizes):
        self.sizes = np.array(sizes)

    def __len__(self):
        return len(self.sizes)


@pytest.fixture
def sized(monkeypatch):
    monkeypatch.setattr(TitleGeneration, "sizes", lambda self, dataset: dataset.sizes)
    return lambda **fields: TitleGeneration(**fields)


def test_batches_of_an_evaluation_are_bounded_by_tokens_times_beams(sized):
    rng = np.random.default_rng(0)
    articles = Articles(np.stack([rng.integers(5, 400, 200), rng.integers(2, 20, 200)], 1))
    greedy, beams = sized(), sized(generation={"num_beams": 4})
    plans = {
        "rows": plan_evaluation(beams, articles, 8),
        "greedy": plan_evaluation(greedy, articles, 32, 4000),
        "beams": plan_evaluation(beams, articles, 32, 4000),
    }
    for micro_batches in plans.values():
        samples = [sample for micro_batch in micro_batches for sample in micro_batch.samples.tolist()]
        assert sorted(samples) == [*range(200)]
    assert len(plans["rows"]) == 25 and 8 < max(len(one.samples) for one in plans["greedy"]) <= 32
    for name, num_beams in (("greedy", 1), ("beams", 4)):
        for micro_batch in plans[name]:
            source, title = articles.sizes[micro_batch.samples].max(0)
            assert (source + title) * len(micro_batch.samples) == micro_batch.cost <= 4000 // num_beams
    assert len(plans["greedy"]) < len(plans["beams"])


def test_sample_longer_than_the_bound_is_evaluated_and_others_fill_up_to_it(sized):
    articles = Articles([(300, 10), (100, 10), (100, 10), (90, 10), (20, 10)])
    plan = plan_evaluation(sized(generation={"num_beams": 2}), articles, 32, batch_tokens=50)
    assert [one.samples.tolist() for one in plan] == [[0], [1, 2], [3, 4]]
    assert all(micro_batch.cost <= 310 for micro_batch in plan)


def test_bound_in_tokens_is_refused_for_samples_without_lengths_before_training():
    with pytest.raises(ConfigError) as caught:
        load_datasets(Recipe.load("mnist_demo", "task.dataset=tests.support.tasks:few_digits", "eval.batch_tokens=100"))
    assert str(caught.value) == (
        "eval.batch_tokens needs a task whose samples have lengths; this task's have none. Set eval.batch_size instead."
    )


def test_layer_with_room_holds_what_a_dynamic_layer_does():
    """Over its room, with beams that change places within their source."""
    torch.manual_seed(0)
    source_keys, source_values = torch.randn(2, 3, 2, 5, 4)
    ours, theirs = SourceLayer(source_keys, source_values, num_copies=2, room=1), DynamicLayer()
    theirs.update(source_keys.repeat_interleave(2, 0), source_values.repeat_interleave(2, 0))
    for num_new in (1, 1, 70, 3):
        new = torch.randn(2, 6, 2, num_new, 4)
        found, expected = ours.update(*new), theirs.update(*new)
        assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
        swapped = torch.tensor([1, 0, 2, 2, 5, 4])
        ours.reorder_cache(swapped)
        theirs.reorder_cache(swapped)
        assert torch.equal(ours.keys, theirs.keys) and torch.equal(ours.values, theirs.values)
    ours.crop(-2)
    theirs.crop(-2)
    assert torch.equal(ours.update(*new)[0], theirs.update(*new)[0]) and ours.get_seq_length() == 81


def test_settings_of_a_model_that_have_no_effect_are_unset_and_those_of_the_recipe_refused():
    own = {"temperature": 0.6, "top_k": 20, "num_beams": 4, "length_penalty": 2.0, "early_stopping": True}
    config = changed(tidy(GenerationConfig(**own), {"num_beams": 1}), {"num_beams": 1})
    assert (config.temperature, config.top_k, config.length_penalty, config.early_stopping) == (None,) * 4
    config = changed(tidy(GenerationConfig(**own), {"do_sample": True}), {"do_sample": True})
    assert (config.temperature, config.top_k, config.length_penalty, config.early_stopping) == (0.6, 20, 2.0, True)
    with pytest.raises(ConfigError, match=r"^task.generation={'top_k': 3} cannot be used: `top_k`: `do_sample` is not set"):
        changed(GenerationConfig(), {"top_k": 3})


UNUSABLE = [
    (
        {"num_beam": 4},
        r"task\.generation\.num_beam is not a key of transformers' GenerationConfig\. Did you mean 'num_beams'\?",
    ),
    ({"temperature": 0.5}, "cannot be used: `temperature`: `do_sample` is not set"),  # transformers would not save it
    ({"max_length": 7}, r"task\.generation\.max_length=7 has no effect beside max_new_tokens"),
]


@pytest.mark.parametrize(("settings", "message"), UNUSABLE)
def test_settings_of_titles_and_texts_that_are_ignored_or_not_saved_are_refused_before_training(sized, settings, message):
    with pytest.raises(ConfigError, match=message):
        sized(generation=settings).set_generation(GenerationConfig(**IDS))
    line = {"dataset": "tests.unit.test_generation:line", "tokenizer": "words", "block_length": 2}
    fields = {"model_type": "transformer_lm", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    with pytest.raises(ConfigError, match=message):
        LanguageModeling(model_config=fields, generation=settings, **line).build_model()


def line(split):
    return [{"text": "a few words on one line"}]


def test_settings_of_titles_may_be_those_that_the_task_sets_itself(sized):
    config = sized(generation={"max_new_tokens": 5, "eos_token_id": 3}).set_generation(GenerationConfig(**IDS))
    assert (config.max_new_tokens, config.eos_token_id) == (5, 3)

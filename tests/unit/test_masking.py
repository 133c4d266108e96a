"""Masked language modelling: which tokens are masked, what a sample is, and the loss of transformers' own heads."""

from itertools import chain

import numpy as np
import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    DataCollatorForLanguageModeling,
    PreTrainedTokenizerFast,
)

from hftune import ConfigError, DataError, Recipe
from hftune.build import first_epoch
from hftune.cli import main
from hftune.data.augmentation import augmented
from hftune.data.blocks import END, token_stream
from hftune.data.demo import reviews
from hftune.data.masking import NO_LABEL, Masking, TextBlocks
from hftune.models import scored_head
from hftune.models.pretrained import train_wordpiece, wordpiece_tokenizer
from hftune.tasks import MaskedLanguageModeling
from tests.support.runs import write_jsonl

TEXTS = [row["text"] for row in reviews("train")][:200]
ODD = ["", "unbelievable", "don't   [MASK] stop-", "\U0001f600 \U0001f600", " 12,345 words\n\nand more\n"]


def byte_level():
    """Like RoBERTa's."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    names = ["<s>", "<pad>", "</s>", "<mask>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=names, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", sep_token="</s>", mask_token="<mask>")


def metaspace(split=True):
    """Like XLM-R's."""
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(split=split)
    names = ["<unk>", "<pad>", "</s>", "<mask>"]
    trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=names, unk_token="<unk>", show_progress=False)
    backend.train_from_iterator(TEXTS, trainer)
    made = {"pad_token": "<pad>", "sep_token": "</s>", "mask_token": "<mask>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **made)


TOKENIZERS = {
    "WordPiece": lambda: wordpiece_tokenizer(train_wordpiece(TEXTS, 400)),
    "bytes": byte_level,
    "Metaspace": metaspace,
}


def masking(tokenizer, units="tokens", share=0.15, mask=0.8, random=0.1):
    is_special = np.zeros(len(tokenizer), bool)
    is_special[tokenizer.all_special_ids] = True
    return Masking(units, share, mask, random, tokenizer.mask_token_id, is_special)


@pytest.fixture(scope="module")
def tokenizer():
    return TOKENIZERS["WordPiece"]()


@pytest.fixture(scope="module")
def blocks(tokenizer):
    """Each text, of 10 to 500 tokens, as a sample."""
    stream = token_stream(Dataset.from_dict({"text": TEXTS}), "text", tokenizer, "train", marks_words=True)
    return TextBlocks(stream, 512, ([tokenizer.cls_token_id], [tokenizer.sep_token_id]), None)


@pytest.fixture
def task(tmp_path):
    """Return a function that makes a task on a few texts, trained and evaluated on."""

    def make(*words, texts=TEXTS[:20], evaluated=None):
        files = [
            write_jsonl(tmp_path / f"{name}.jsonl", [{"text": text} for text in own])
            for name, own in (("train", texts), ("eval", evaluated or texts))
        ]
        paths = zip(("train", "eval"), files, strict=True)
        data = [f"task.data_files.{split}={path}" for split, path in paths]
        recipe = Recipe.load("masked_lm_demo", "task.dataset=null", *data, *words)
        recipe.validate()
        return recipe.task

    return make


@pytest.mark.parametrize("name", TOKENIZERS)
def test_stream_has_the_tokens_and_words_of_the_tokenizer(name):
    tokenizer = TOKENIZERS[name]()
    rows = Dataset.from_dict({"text": TEXTS[:50] + ODD})
    stream, place = token_stream(rows, "text", tokenizer, "train", marks_words=True), 0
    for text in rows["text"]:
        encoded = tokenizer(text.rstrip("\r\n"), add_special_tokens=False)
        ids, words = encoded["input_ids"], encoded.word_ids()
        if not ids:
            continue
        found = stream[place : place + len(ids)]
        assert [token if token >= 0 else ~token for token in found.tolist()] == ids
        assert (found >= 0).tolist() == [one is None or one != before for one, before in zip(words, [-1, *words], strict=False)]
        assert stream[place + len(ids)] == END
        place += len(ids) + 1
    assert place == len(stream)


def test_every_token_is_in_a_block_exactly_once(tokenizer):
    stream = token_stream(Dataset.from_dict({"text": TEXTS[:30]}), "text", tokenizer, "train", marks_words=True)
    around, texts = ([101], [7, 8]), [tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS[:30]]
    whole = TextBlocks(stream, 20, around, 9)
    tokens = np.concatenate([whole[index]["input_ids"][1:-2] for index in range(len(whole))]).tolist()
    assert tokens == [token for ids in texts for token in (*ids, 9)][:-1]
    assert [whole[index]["input_ids"][0] for index in (0, 1)] == [101, 101]
    assert whole.lengths.tolist() == [len(whole[index]["input_ids"]) for index in range(len(whole))]
    assert set(whole.lengths[:-1]) == {20} and whole.lengths[-1] <= 20

    single = TextBlocks(stream, 20, around, None)
    assert np.concatenate([single[index]["input_ids"][1:-2] for index in range(len(single))]).tolist() == [
        *chain.from_iterable(texts)
    ]
    of_texts = [-(-len(ids) // 17) for ids in texts]
    for ids, parts in zip(texts, np.split(single.lengths - 3, np.cumsum(of_texts)[:-1]), strict=True):
        assert parts.sum() == len(ids) and parts.max() - parts.min() <= 1 and parts.max() <= 17


def shares(tokenizer, originals, masked, labels):
    """Masked of the tokens that are no special ones; and of these: replaced by the mask, by another token, and kept."""
    chosen, plain = labels != NO_LABEL, ~np.isin(originals, tokenizer.all_special_ids)
    assert not (chosen & ~plain).any() and (labels[chosen] == originals[chosen]).all()
    assert (masked[~chosen] == originals[~chosen]).all()
    is_mask, is_kept = masked == tokenizer.mask_token_id, masked == originals
    return [
        chosen.sum() / plain.sum(),
        *((part & chosen).sum() / chosen.sum() for part in (is_mask, ~is_mask & ~is_kept, is_kept)),
    ]


def test_tokens_are_masked_as_often_as_by_the_collator_of_transformers(tokenizer, blocks):
    make, rng = masking(tokenizer), np.random.RandomState(0)
    samples = [blocks[index % len(blocks)] for index in range(3 * len(blocks))]
    ours = [make(sample, rng) for sample in samples]
    originals = np.concatenate([sample["input_ids"] for sample in samples])
    own = shares(tokenizer, originals, *(np.concatenate([one[name] for one in ours]) for name in ("input_ids", "labels")))
    collator = DataCollatorForLanguageModeling(tokenizer, seed=0)
    padded = collator([{"input_ids": sample["input_ids"]} for sample in samples])
    real = padded["attention_mask"] == 1
    theirs = shares(tokenizer, originals, padded["input_ids"][real].numpy(), padded["labels"][real].numpy())
    assert own == pytest.approx(theirs, abs=0.015)  # of 8,000 masked tokens
    assert own == pytest.approx([0.15, 0.8, 0.1, 0.1], abs=0.01)
    counts = [(one["labels"] != NO_LABEL).sum() for one in ours]  # theirs vary, down to none
    assert all(abs(count - 0.15 * (len(one["labels"]) - 2)) <= 1 for one, count in zip(ours, counts, strict=True))
    short = {"input_ids": np.array([2, 50, 3]), "begins_word": np.ones(3, bool)}
    assert (make(short, rng)["labels"] != NO_LABEL).tolist() == [False, True, False]


def test_words_are_masked_as_a_whole_as_by_the_collator_of_transformers(tokenizer, blocks):
    rng, make = np.random.RandomState(0), masking(tokenizer, "words", mask=1.0, random=0.0)
    ours, theirs, collator = (
        [],
        [],
        DataCollatorForLanguageModeling(
            tokenizer, whole_word_mask=True, mask_replace_prob=1.0, random_replace_prob=0.0, seed=0
        ),
    )
    for index, text in enumerate(TEXTS[: len(blocks)]):
        encoded = tokenizer(text, truncation=True, max_length=512, return_offsets_mapping=True)
        names, labels = ("input_ids", "attention_mask", "offset_mapping"), make(blocks[index], rng)["labels"]
        rows = collator([{name: encoded[name] for name in names}])["labels"][0].numpy()
        words = np.array([-1 if word is None else word for word in encoded.word_ids()])
        for found, all_ in ((labels, ours), (rows, theirs)):
            per_word = [set((found[words == word] != NO_LABEL).tolist()) for word in range(words.max() + 1)]
            assert all(len(masked) == 1 for masked in per_word)
            all_ += [masked == {True} for masked in per_word]
    assert np.mean(ours) == pytest.approx(0.15, abs=0.01) and np.mean(theirs) == pytest.approx(0.15, abs=0.02)


def test_spans_have_the_lengths_of_spanbert_and_every_word_is_as_likely(tokenizer):
    begins = np.array([True, *[True, True, False] * 400])  # [CLS], and words of one and of two tokens
    block = {"input_ids": np.concatenate([[tokenizer.cls_token_id], np.arange(1200) % 50 + 60]), "begins_word": begins}
    make, rng, rounds = masking(tokenizer, "spans", share=0.03), np.random.RandomState(0), 300
    words, lengths, hits, alike = begins.cumsum(), [], np.zeros(begins.sum() + 1), []
    for _ in range(rounds):
        made = make(block, rng)
        chosen = np.flatnonzero(made["labels"] != NO_LABEL)
        masked = np.unique(words[chosen])
        hits[masked] += 1
        lengths += [len(run) for run in np.split(masked, np.flatnonzero(np.diff(masked) > 1) + 1)]
        kinds = np.where(
            made["input_ids"] == block["input_ids"], 1, np.where(made["input_ids"] == tokenizer.mask_token_id, 2, 3)
        )
        for run in np.split(chosen, np.flatnonzero(np.diff(chosen) > 1) + 1):
            assert begins[run[0]] and (run[-1] + 1 == len(begins) or begins[run[-1] + 1])
            alike += (np.diff(kinds[run]) == 0).tolist()
    assert np.mean(alike) > 0.95  # a span is replaced as a whole; those of single tokens would be 0.66
    weights = 0.2 * 0.8 ** np.arange(10)
    expected = (weights * np.arange(1, 11)).sum() / weights.sum()
    assert expected == pytest.approx(3.8, abs=0.01) and np.mean(lengths) == pytest.approx(expected, rel=0.06)
    assert hits[2:].mean() / rounds == pytest.approx(0.03, rel=0.1)
    first, last = hits[2:42].mean(), hits[-40:].mean()
    assert first == pytest.approx(hits[2:].mean(), rel=0.25) and last == pytest.approx(hits[2:].mean(), rel=0.25)


def test_short_text_is_no_single_span(tokenizer):
    block = {"input_ids": np.arange(60, 72), "begins_word": np.ones(12, bool)}
    make, rng = masking(tokenizer, "spans"), np.random.RandomState(0)
    assert max((make(block, rng)["labels"] != NO_LABEL).sum() for _ in range(50)) <= 3


def test_masks_follow_from_seed_epoch_and_sample_and_those_of_evaluations_from_the_sample(task):
    made = task()
    datasets = made.datasets()

    def masks(seed, epoch, indices):
        data = augmented(datasets["train"], made, seed, epoch)
        return {index: data[index]["labels"].tolist() for index in indices}

    forward, backward = masks(1, 0, range(20)), masks(1, 0, reversed(range(20)))
    assert forward == backward
    assert masks(1, 1, range(20)) != forward != masks(2, 0, range(20))
    again = task("seed=7").datasets()["eval"]
    for index in (3, 1):
        one, other = datasets["eval"][index], again[index]
        assert all((one[name] == other[name]).all() for name in ("input_ids", "labels"))
    few = task("task.max_eval_samples=5").datasets()["eval"]
    assert (few[0]["labels"] == datasets["eval"][int(few.indices[0])]["labels"]).all()


@pytest.mark.parametrize("kind", ["bert", "roberta", "modernbert", "distilbert", "electra", "deberta-v2"])
@pytest.mark.parametrize("chunks", [False, True])
def test_loss_and_gradient_are_those_of_the_head_of_transformers(kind, chunks, tokenizer, blocks):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    if kind == "distilbert":
        sizes = {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 24}
    ends = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": None, "eos_token_id": None}
    config = AutoConfig.for_model(kind, vocab_size=len(tokenizer), **sizes, **ends)
    model, make, rng = AutoModelForMaskedLM.from_config(config).eval(), masking(tokenizer), np.random.RandomState(0)
    made = MaskedLanguageModeling(model=None)
    made.text_tokenizer = tokenizer
    batch = made.collate([make(blocks[index], rng) for index in (0, 3, 5)])
    expected = model(**batch).loss
    expected.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    undo = scored_head.install(model, at_once=7 * len(tokenizer)) if chunks else lambda: None
    outputs = model(**made.inputs(batch), **({"targets": made.target(batch)} if chunks else {}))
    assert isinstance(outputs, scored_head.ScoredOutput) == chunks
    loss = made.loss(outputs, made.target(batch)) / made.num_items(made.target(batch))
    loss.backward()
    undo()
    torch.testing.assert_close(loss, expected)
    for name, parameter in model.named_parameters():
        if name in gradients:
            torch.testing.assert_close(parameter.grad, gradients[name], atol=1e-6, rtol=1e-4)
    rows = made.predictions(outputs, model, batch) if not chunks else []
    if rows:
        logits, labels = outputs.logits.detach(), batch["labels"]
        total = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        assert made.metrics(rows)["perplexity"] == pytest.approx(float((total / (labels != NO_LABEL).sum()).exp()), rel=1e-5)


def test_samples_are_shown_as_they_are_read_and_as_often_trained(capsys):
    words = ("task.max_train_samples=20", "task.mask_replace_prob=1", "task.random_replace_prob=0")
    assert main(["show", "recipe=masked_lm_demo", "--samples", "2", *words]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("sample 0 of 20 (") and " trained)\n[CLS] " in shown and "« [MASK]" in shown
    recipe = Recipe.load(
        "masked_lm_demo", "task.max_train_samples=20", "task.mask_replace_prob=1", "task.random_replace_prob=0"
    )
    first = first_epoch(recipe, recipe.task.datasets())[0]
    assert f"({len(first['input_ids'])} tokens, {(first['labels'] != NO_LABEL).sum()} trained)" in shown


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("task.mlm_probability=0", "task.mlm_probability=0.0 must be in (0, 1)."),
        ("task.mlm_probability=1", "task.mlm_probability=1.0 must be in (0, 1)."),
        ("task.masking=word", "task.masking='word' is not one of tokens, words, spans. Did you mean 'words'?"),
        ("task.random_replace_prob=0.3", "task.mask_replace_prob=0.8 and task.random_replace_prob=0.3 are more than 1"),
        ("task.block_length=3", "task.block_length=3 must be at least 4."),
        ("eval.metric=accuracy", "is not computed by MaskedLanguageModeling. It computes: loss, perplexity."),
    ],
)
def test_key_that_cannot_work_is_refused_before_torch(word, message):
    with pytest.raises(ConfigError) as refused:
        Recipe.load("masked_lm_demo", word).validate()
    (problem,) = refused.value.problems
    assert message in problem


def test_texts_with_nothing_to_mask_are_left_out_or_refused(task):
    texts = ["", " \n", *TEXTS[:3], "\x00"]
    assert len(task("task.block_length=512", texts=texts).datasets()["train"]) == 3
    with pytest.raises(DataError, match=r"^The train split has nothing to mask in column 'text': 3 rows without a token"):
        task(texts=["", " ", "\x00"], evaluated=TEXTS[:2]).datasets()
    made = task(texts=[*TEXTS[:9], "好好 好"])  # characters that the vocabulary of the evaluated texts lacks
    made.text_tokenizer = wordpiece_tokenizer(train_wordpiece(TEXTS[:9], 300))
    train = made.datasets()["train"]
    sample = augmented(train, made, 0, 0)[len(train) - 1]
    assert (sample["labels"] == NO_LABEL).all() and (sample["input_ids"][1:-1] == made.text_tokenizer.unk_token_id).all()
    with pytest.raises(DataError, match="The eval split has nothing to mask"):
        other = task(texts=TEXTS[:9], evaluated=["好好 好", "好"])
        other.text_tokenizer = made.text_tokenizer
        other.datasets()


def saved(folder, tokenizer, config):
    tokenizer.save_pretrained(folder)
    config.save_pretrained(folder)
    return f"task.model={folder}"


def test_models_that_fill_no_masks_are_refused_before_they_are_loaded(task, tokenizer, tmp_path):
    def refused(kind, tokenizer, *words, **settings):
        name = saved(tmp_path / kind, tokenizer, AutoConfig.for_model(kind, **settings))
        with pytest.raises(ConfigError) as error:
            task(name, "replace=[task.model_config]", *words).datasets()
        return str(error.value)

    none = PreTrainedTokenizerFast(tokenizer_object=byte_level().backend_tokenizer, pad_token="<pad>")
    said = refused("gpt2", none)
    assert "/gpt2 has a tokenizer without a mask token, and so cannot fill masks. Name an encoder such as" in said
    assert "/bart has an encoder and a decoder. Masked language modelling takes encoders." in refused("bart", tokenizer)
    assert "/bert is a decoder. Masked language modelling takes encoders." in refused("bert", tokenizer, is_decoder=True)
    assert "/llama has no head in transformers that fills masks." in refused("llama", tokenizer)
    said = refused("roberta", metaspace(split=False), "task.masking=spans")
    assert "task.masking=spans: the tokenizer of task.model=" in said and "does not say which word a token belongs to" in said


def test_blocks_of_several_data_sets_share_an_epoch(tmp_path):
    parts = (
        "[{dataset: 'hftune.data.demo:tickets'}, {dataset: 'hftune.data.demo:replies', columns: {text: reply}, weight: 0.5}]"
    )
    words = ("task.dataset=null", f"task.datasets={parts}", "task.eval_share=0.1", "task.join_texts=true")
    made = Recipe.load("masked_lm_demo", *words).task
    train = made.datasets()["train"]
    (count, weight), (other, half) = made.mixture(train)
    assert (count + other, weight, half) == (len(train), 1, 0.5) and min(count, other) > 100
    tokens, names = made.text_tokenizer, ("input_ids", "labels")
    first, last = (augmented(train, made, 0, 0)[index] for index in (0, len(train) - 1))
    assert all([*sample] == [*names] and sample["input_ids"][0] == tokens.cls_token_id for sample in (first, last))


def test_more_tokens_than_positions_are_refused(task):
    made = task("task.block_length=600")
    made.datasets()
    with pytest.raises(ConfigError, match=r"^task.block_length=600 exceeds the model's 512 positions. Lower it.$"):
        made.build_model()

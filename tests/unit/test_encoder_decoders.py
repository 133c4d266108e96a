"""Encoder-decoders of transformers: their own loss and shift, texts from the loss's cache, and what is refused by name."""

import csv
import json
import re

import numpy as np
import pytest
import torch
from rouge_score.rouge_scorer import RougeScorer
from sacrebleu import corpus_bleu, corpus_chrf
from transformers import AutoConfig, AutoModelForSeq2SeqLM, GenerationConfig, MBart50Tokenizer, MBartTokenizer

from hftune import ConfigError, DataError
from hftune.config.recipe import Recipe
from hftune.data.byte_tokenizer import byte_tokenizer, train_bytes
from hftune.data.demo import spoken
from hftune.tasks import Seq2Seq

T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
BART = {
    **{"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4},
    **{"encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "init_std": 0.3},
}
MODELS = dict.fromkeys(("t5", "mt5", "longt5"), T5)
MODELS |= dict.fromkeys(("bart", "mbart", "marian", "pegasus", "m2m_100", "blenderbot"), BART)
"""Relative positions, learned ones and sinusoids; start tokens, and mBART's last token first; with and without a method to shift."""
GENERATIONS = {"greedy": {}, "beams": {"num_beams": 3, "length_penalty": 2.0, "no_repeat_ngram_size": 2}}
FEW = "tests.unit.test_encoder_decoders:few"
ROWS = [{"source": row["source"], "target": row["target"]} for row in spoken("train")[:8]]


def few(split):
    return ROWS


def task_of(kind, **fields):
    given = {"dataset": FEW, "max_source_length": 64, "max_target_length": 64, "vocab_size": 320}
    return Seq2Seq(model=None, model_config={"model_type": kind, **MODELS[kind]}, **{**given, **fields})


@pytest.fixture(scope="module", params=MODELS)
def built(request):
    """A task, its model, and a batch of sources and targets of unequal lengths."""
    task = task_of(request.param)
    samples = task.datasets()["train"]
    torch.manual_seed(0)
    return task, task.build_model().eval(), task.collate([samples[index] for index in range(5)])


@torch.no_grad()
def test_loss_is_that_of_the_model_itself_times_its_items(built):
    task, model, batch = built
    ours = task.loss(model(**task.inputs(batch)), task.target(batch))
    theirs = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=batch["labels"]).loss
    num_items = task.num_items(task.target(batch))
    assert num_items == sum(len(task.text_tokenizer(row["target"])["input_ids"]) for row in ROWS[:5])
    assert float(ours) == pytest.approx(float(theirs) * num_items, rel=1e-6)


@pytest.mark.parametrize("name", GENERATIONS)
@torch.no_grad()
def test_texts_from_the_cache_of_the_loss_are_those_of_plain_generation(built, name):
    task, model, batch = built
    settings = {"min_new_tokens": 6, "max_new_tokens": 12, **GENERATIONS[name]}
    plain = GenerationConfig(
        **settings, **{key: getattr(model.config, key) for key in ("pad_token_id", "eos_token_id", "decoder_start_token_id")}
    )
    model.generation_config = plain
    ids = model.generate(batch["input_ids"], attention_mask=batch["attention_mask"])
    expected = task.text_tokenizer.batch_decode(ids, skip_special_tokens=True)
    outputs, encoded = model(**task.evaluation_inputs(batch)), []
    handle = model.get_encoder().register_forward_hook(lambda *call: encoded.append(call))
    assert task._generate(outputs, model, batch) == expected and not encoded
    handle.remove()


def test_micro_batches_are_bounded_by_sources_and_targets_together():
    task = task_of("t5")
    samples = task.datasets()["train"]
    assert task.lengths(samples).tolist() == [len(row["source"]) + len(row["target"]) for row in samples]
    batch = task.collate([samples[index] for index in range(8)])
    padded = batch["input_ids"].shape[1] + batch["labels"].shape[1]
    assert task.padded_length(task.sizes(samples).max(0)) == padded
    assert batch["index"].tolist() == [*range(8)]


def test_export_is_loaded_and_generates_the_same_texts(tmp_path):
    fields = {"max_target_length": 16, "generation": {"num_beams": 2, "min_new_tokens": 5}}
    task = task_of("t5", **fields)
    task.datasets()
    torch.manual_seed(0)
    model = task.build_model().eval()
    task.save(model, tmp_path)
    given = [row["source"] for row in ROWS]
    with torch.no_grad():
        expected = [row["generated"] for row in task.predict(model, given)]
        fresh = task_of("t5", **fields)
        assert [row["generated"] for row in fresh.predict(fresh.load(tmp_path).eval(), given)] == expected
        theirs, tokens = AutoModelForSeq2SeqLM.from_pretrained(tmp_path).eval(), task.text_tokenizer
        ids = [theirs.generate(**tokens(text, return_tensors="pt"))[0] for text in given]
    assert tokens.batch_decode(ids, skip_special_tokens=True) == expected and len({*expected}) > 1


def test_tokenizer_of_a_new_model_gives_texts_back_as_they_were():
    tokens = byte_tokenizer(train_bytes([row["target"] for row in ROWS], 300))
    for text in ("Ünïcode  ok\n东京", " don't , you .", "1984"):
        assert tokens.decode(tokens(text)["input_ids"], skip_special_tokens=True) == text
    assert tokens("1984")["input_ids"][-1] == tokens.eos_token_id and len(tokens("1984")["input_ids"]) == 5


# Languages


def multilingual(folder, kind):
    """Write a tiny mBART of its first (the code ends a target) or later version (the code begins it), with its tokenizer."""
    codes = ["en_XX", "ro_RO"]
    words = sorted({letter for row in ROWS for text in row.values() for letter in text if letter != " "})
    vocab = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), *((word, -3.0) for word in words)]
    tokens = kind(vocab=[*vocab, *((code, 0.0) for code in codes), ("<mask>", 0.0)])
    tokens.save_pretrained(folder)
    config = AutoConfig.for_model("mbart", **BART, vocab_size=len(tokens) + 1)
    AutoModelForSeq2SeqLM.from_config(config).save_pretrained(folder)
    if kind is MBart50Tokenizer:
        GenerationConfig(decoder_start_token_id=2, eos_token_id=2, pad_token_id=1, bos_token_id=0).save_pretrained(folder)
    given = {"model": str(folder), "dataset": FEW, "max_source_length": 120, "max_target_length": 120}
    return lambda **more: Seq2Seq(**given, **more)


@pytest.mark.parametrize("kind", [MBartTokenizer, MBart50Tokenizer])
def test_generated_text_starts_with_the_target_language(tmp_path, kind):
    task = multilingual(tmp_path, kind)(source_language="en_XX", target_language="ro_RO")
    code, end = task.text_tokenizer.convert_tokens_to_ids("ro_RO"), task.text_tokenizer.eos_token_id
    samples, model = task.datasets()["train"], task.build_model().eval()
    batch = task.collate([samples[0], samples[3]])
    if kind is MBartTokenizer:
        assert model.generation_config.decoder_start_token_id == code
        assert batch["decoder_input_ids"][:, 0].tolist() == [code, code]
    else:
        assert model.generation_config.forced_bos_token_id == code
        assert batch["decoder_input_ids"][:, :2].tolist() == [[end, code]] * 2
    assert task.text_tokenizer.convert_tokens_to_ids("en_XX") in batch["input_ids"][0]
    theirs = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=batch["labels"]).loss.detach()
    ours = task.loss(model(**task.inputs(batch)), task.target(batch)) / task.num_items(task.target(batch))
    assert float(ours.detach()) == pytest.approx(float(theirs), rel=1e-6)


def test_languages_that_are_missing_unknown_or_of_no_use_are_refused_by_name(tmp_path):
    task = multilingual(tmp_path, MBartTokenizer)
    with pytest.raises(
        ConfigError, match=r"several languages: set task.source_language and task.target_language to two of its"
    ):
        task().datasets()
    with pytest.raises(ConfigError, match=r"^task.target_language=ro_RQ is not a language code .* Did you mean 'ro_RO'\?$"):
        task(source_language="en_XX", target_language="ro_RQ").datasets()
    with pytest.raises(ConfigError, match=r"^task.source_language=en_XX: task.model=None has no language codes. Leave both"):
        task_of("t5", source_language="en_XX", target_language="ro_RO").datasets()
    assert task(source_language="en_XX").validate() == ["task.target_language is missing: set both languages or none."]


# Bad input


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_model_without_encoder_and_decoder_is_refused_by_its_config_alone(tmp_path, kind):
    AutoConfig.for_model(kind).save_pretrained(tmp_path)  # no weights, no tokenizer, no data
    with pytest.raises(
        ConfigError, match=f"is a model of type {kind}, which has no encoder and decoder: Seq2Seq needs both, as"
    ):
        Seq2Seq(model=str(tmp_path), dataset="tests.unit.test_encoder_decoders:nothing").datasets()


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("task.scores=[rouge, blue]", "task.scores='blue' is not one of rouge, bleu, chrf. Did you mean 'bleu'?"),
        ("task.scores=[bleu]", "eval.metric='rouge_l' is not computed by Seq2Seq"),
        ("task.language=english", "task.language=english is not a code of ISO 639-1, such as en, de or zh."),
        ("task.max_target_length=1", "task.max_target_length=1 must be at least 2."),
        ("task.generation={num_beams: 2, num_return_sequences: 2}", "task.generation.num_return_sequences=2 must be 1: each"),
    ],
)
def test_recipe_that_cannot_work_is_refused_before_torch(word, sentence):
    with pytest.raises(ConfigError, match=f"^{re.escape(sentence)}"):
        Recipe.load("seq2seq", "task.dataset=a/b", "task.model=a/b", word).validate()


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"generation": {"num_beam": 2}}, "is not a key of transformers' GenerationConfig. Did you mean 'num_beams'?"),
        ({"max_source_length": 600}, "task.max_source_length=600 exceeds the model's 512 positions. Lower it."),
    ],
)
def test_settings_that_the_model_cannot_have_are_refused(fields, sentence):
    task = task_of("pegasus", **fields)
    task.model_config["max_position_embeddings"] = 512
    task.datasets()
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        task.build_model()


def test_targets_in_a_script_that_english_rouge_does_not_see_are_refused(tmp_path):
    files = write(tmp_path, [{"source": "tokyo", "target": "东京"}] * 2)
    with pytest.raises(DataError, match=r"^task.language=en, but the targets have few letters from a to z, .* such as zh"):
        task_of("t5", dataset="csv", data_files=files).datasets()
    assert len(task_of("t5", dataset="csv", data_files=files, language="zh").datasets()["train"]) == 2


@pytest.mark.parametrize(
    ("score", "language", "targets", "is_refused"),
    [
        ("rouge", "en", ["今天天气很好", "中国经济增长 2018", "GDP 放缓"], True),
        ("bleu", "en", ["今天天气很好", "中国经济增长 2018", "GDP 放缓"], True),
        ("bleu", "zh", ["今天天气很好"], False),
        ("rouge", "en", ["A café in Zürich", "42"], False),
        ("bleu", "de", ["Ein Zug aus 北京"], False),
    ],
)
def test_language_is_compared_with_most_of_the_letters(tmp_path, score, language, targets, is_refused):
    files = write(tmp_path, [{"source": "x", "target": target} for target in targets])
    task = task_of("t5", dataset=None, data_files=files, scores=[score], language=language)
    if not is_refused:
        task._check_language()
        return
    with pytest.raises(DataError, match=rf"^task.language={language}, but the targets have .*: '今天天气很好'\. Set task.lang"):
        task._check_language()


# Columns


def write(folder, rows):
    with (folder / "rows.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    return {"train": f"{folder}/rows.csv", "eval": f"{folder}/rows.csv"}


@pytest.mark.parametrize(
    ("columns", "fields", "expected"),
    [
        (("id", "article", "highlights"), {}, ["article", "highlights"]),
        (("en", "de"), {"source_column": "de"}, ["de", "en"]),
        (("en", "de"), {"target_column": "de"}, ["en", "de"]),
    ],
)
def test_columns_are_chosen_where_there_is_one_way_and_said(tmp_path, columns, fields, expected):
    files = write(tmp_path, [dict.fromkeys(columns, "some words")] * 3)
    task = task_of("t5", dataset=None, data_files=files, **fields)
    datasets = task.datasets()
    assert [*task.read_columns.values()] == expected
    said = task.notices(datasets, task.build_model())
    assert sum("chosen from the columns" in sentence for sentence in said) == 2 - len(fields)


def test_texts_of_a_translation_column_have_names_of_their_own(tmp_path):
    rows = [{"translation": {"en": "a train", "fr": "un train"}}, {"translation": {"en": "a bus", "fr": "un bus"}}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = dict.fromkeys(("train", "eval"), f"{tmp_path}/rows.jsonl")
    columns = {"source_column": "translation.en", "target_column": "translation.fr"}
    task = task_of("t5", dataset=None, data_files=files, **columns)
    assert task.datasets() and task.example_inputs() == ["a train", "a bus"]
    with pytest.raises(DataError, match=r"task.source_column is not set, and several columns would do: translation.en, trans"):
        task_of("t5", dataset=None, data_files=files).datasets()


# Scores


def scored(**fields):
    pairs = [("the trains are leaving", "The train leaves."), ("a bus to york", "A bus to York."), ("", "Nothing.")]
    rows = [{"generated": text, "target": target, "source": "x"} for text, target in pairs]
    task = Seq2Seq(dataset="a/b", **fields)
    return task, rows, task.metrics(rows)


def test_english_rouge_is_that_of_rouge_score_with_its_stemmer():
    task, rows, found = scored()
    scorer = RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True)
    scores = [scorer.score(row["target"], row["generated"]) for row in rows]
    for ours, theirs in {"rouge_1": "rouge1", "rouge_2": "rouge2", "rouge_l": "rougeL"}.items():
        assert found[ours] == pytest.approx(np.mean([score[theirs].fmeasure for score in scores]))
    described = task.describe(rows)
    assert [row["error"] for row in described] == [round(1 - score["rougeL"].fmeasure, 6) for score in scores]
    assert found["rouge_l"] > scored(language="de")[2]["rouge_l"]  # trains is not train there


def test_translations_are_scored_by_sacrebleu():
    task, rows, found = scored(scores=["bleu", "chrf"])
    texts, targets = [row["generated"] for row in rows], [[row["target"] for row in rows]]
    assert found["bleu"] == corpus_bleu(texts, targets).score and found["chrf"] == corpus_chrf(texts, targets).score
    assert task.describe(rows)[2]["error"] == 1


@pytest.mark.parametrize(
    "fields", [{}, {"language": "zh", "scores": ["rouge", "chrf"]}, {"scores": ["bleu"]}, {"language": "de"}]
)
def test_names_of_the_metrics_are_known_in_advance(fields):
    task, _, found = scored(**fields)
    assert found.keys() == task.metric_directions.keys()

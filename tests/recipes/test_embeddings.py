"""Embeddings beside sentence-transformers: the same loss, gradient and vectors; and what a user can get wrong."""

import json
import re

import pytest
import torch
from accelerate import Accelerator
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import (
    CachedMultipleNegativesRankingLoss,
    CachedMultipleNegativesSymmetricRankingLoss,
    MatryoshkaLoss,
)

import hftune
from hftune import ConfigError, DataError, Recipe, train
from hftune.build import build_model, load_datasets, plan_batches
from hftune.cli import main
from hftune.strategies.data_parallel import DataParallel
from tests.support.runs import NO_DROPOUT, TINY
from tests.support.tasks import few_questions

QUICK = (
    *(word for word in TINY if "max_length" not in word),
    *("task.dataset=tests.support.tasks:few_questions", "task.vocab_size=300", "train.batch_size=16"),
    *("train.epochs=1", "train.micro_batch_tokens=null", "train.micro_batch_size=4", "train.packing=off"),
)
PREFIXES = "task.prefixes={query: 'ask ', document: 'tell '}"
TEXTS = ["who fed the dog ?", "a grower fattened a puppy by starlight .", "tea"]


def quick(*overrides):
    recipe = Recipe.load("embeddings_demo", *QUICK, *overrides)
    recipe.validate()
    return recipe


@pytest.mark.parametrize(("symmetric", "dims"), [(False, []), (True, []), (False, [32, 12, 5])])
def test_loss_and_gradient_are_those_of_sentence_transformers(tmp_path, symmetric, dims):
    recipe = quick(*NO_DROPOUT, "task.negative_columns=[negative]", PREFIXES, f"task.symmetric={symmetric}", "task.scale=15")
    recipe.task.mask_duplicates, recipe.task.matryoshka_dims = False, dims  # it has no such mask
    task, datasets = recipe.task, load_datasets(recipe)
    model = build_model(recipe)
    task.save(model, tmp_path)
    strategy = DataParallel(Accelerator(cpu=True), task)
    strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = next(strategy.batches(datasets["train"], plan_batches(recipe, datasets["train"]).epoch(0), num_workers=0))
    strategy.forward_backward(batch, seed=0, step=0)
    report = strategy.report(strategy.clip_grad_norm(None))

    theirs = SentenceTransformer(str(tmp_path), device="cpu").train()
    rows = [few_questions("train")[sample] for micro_batch in batch.plan for sample in micro_batch.samples]
    columns = [("ask ", "query"), ("tell ", "answer"), ("tell ", "negative")]
    features = [theirs.preprocess([prefix + row[name] for row in rows]) for prefix, name in columns]
    kind = CachedMultipleNegativesSymmetricRankingLoss if symmetric else CachedMultipleNegativesRankingLoss
    compare = kind(theirs, scale=15.0, mini_batch_size=4)
    loss = (MatryoshkaLoss(theirs, compare, dims) if dims else compare)(features, None)
    loss.backward()
    assert len(batch.plan) == 4
    assert report.loss == pytest.approx(loss.item(), rel=1e-6)
    wanted = dict(theirs[0].auto_model.named_parameters())
    trained = {name: value.grad for name, value in model.named_parameters() if value.requires_grad}
    assert len(wanted) - len(trained) == 2  # the pooler, which is frozen
    for name, gradient in trained.items():
        torch.testing.assert_close(gradient, wanted[name].grad, rtol=1e-4, atol=5e-6 if dims else 1e-7, msg=name)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "out"
    overrides = (PREFIXES, "task.score_column=score", "eval.metric=spearman", "task.pooling=cls", "train.packing=auto")
    return train(quick(*overrides, f"output_dir={folder}"))


def test_the_export_loads_in_sentence_transformers(trained):
    ours = [row["embedding"] for row in hftune.load_model(trained.output_dir, trust_code=True).predict(TEXTS)]
    theirs = SentenceTransformer(str(trained.model_dir), device="cpu")
    torch.testing.assert_close(torch.tensor(ours), theirs.encode(TEXTS, convert_to_tensor=True), rtol=0, atol=1e-6)
    asked = hftune.load_model(trained.output_dir, trust_code=True).predict([f"ask {TEXTS[0]}"])[0]["embedding"]
    torch.testing.assert_close(torch.tensor(asked), torch.tensor(theirs.encode_query(TEXTS[0])), rtol=0, atol=1e-6)


def test_a_decoder_takes_the_last_token_computes_no_padding_and_loads_there_too(tmp_path, capsys):
    recipe = quick(f"output_dir={tmp_path / 'out'}", "task.pooling=last", "train.packing=auto", "train.max_steps=2")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    recipe.task.model_config = {"model_type": "qwen2", "num_key_value_heads": 2, **sizes}
    result = train(recipe)
    assert ", without padding" in capsys.readouterr().out
    ours = [row["embedding"] for row in hftune.load_model(result.output_dir, trust_code=True).predict(TEXTS)]
    theirs = SentenceTransformer(str(result.model_dir), device="cpu").encode(TEXTS, convert_to_tensor=True)
    torch.testing.assert_close(torch.tensor(ours), theirs, rtol=0, atol=1e-6)


def test_predict_prints_embeddings(trained, capsys):
    assert main(["predict", str(trained.output_dir), "--text", "tea", "--json", "--trust-code"]) == 0
    vector = json.loads(capsys.readouterr().out)["embedding"]
    assert len(vector) == 32 and sum(number**2 for number in vector) == pytest.approx(1, abs=1e-5)


def test_with_scores_it_reports_spearman_instead_of_recall(trained):
    assert {*trained.metrics} == {"loss", "spearman"} and -1 <= trained.metrics["spearman"] <= 1
    row = json.loads((trained.output_dir / "predictions.jsonl").read_text().splitlines()[3])
    assert row["score"] == 3 and row["anchor"] == few_questions("eval")[3]["query"]


def test_embeddings_that_were_trained_to_be_cut_are_scored_cut(tmp_path):
    dims, name = "task.matryoshka_dims=[32,8]", "recall_at_1_dim_8"
    result = train(quick(dims, f"eval.metric={name}", "task.pooling=cls", f"output_dir={tmp_path / 'out'}"))
    assert {f"recall_at_1{cut}" for cut in ("", "_dim_32", "_dim_8")} < {*result.metrics} and result.best["metric"] == name
    assert result.metrics["mrr_at_10"] == result.metrics["mrr_at_10_dim_32"]  # that is the model's width
    theirs = SentenceTransformer(str(tmp_path / "out" / "model"), device="cpu", truncate_dim=8)
    rows = few_questions("eval")
    queries, answers = (
        theirs.encode([row[column] for row in rows], normalize_embeddings=True) for column in ("query", "answer")
    )
    first = (queries @ answers.T).argmax(1)
    hits = [rows[place]["answer"] == row["answer"] for place, row in zip(first, rows, strict=True)]
    assert result.metrics[name] == pytest.approx(sum(hits) / len(hits), abs=1e-6)
    with pytest.raises(ConfigError, match=r"^task.matryoshka_dims: 33 is more than the model's width, 32"):
        build_model(quick("task.matryoshka_dims=[33]"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("task.pooling=max", "task.pooling='max' is not one of mean, cls, last."),
        ("task.scale=0", "task.scale=0.0 must be above 0."),
        ("task.prefixes.querry=x", "task.prefixes.querry is not one of query, document. Did you mean 'query'?"),
        ("task.negative_columns=[answer,answer]", "Column 'answer' is named twice by task.anchor_column"),
        ("task.score_column=score", "eval.metric='recall_at_1' is not computed by Embeddings. It computes: loss, spearman."),
    ],
)
def test_bad_keys_are_refused_in_a_sentence(override, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        quick(override)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("task.positive_column=reply", "task.positive_column=reply is not a column of the train split. It has: query, answer"),
        ("task.negative_columns=[hard]", "task.negative_columns[0]=hard is not a column of the train split."),
        ("task.negative_columns=[score]", "Column 'score' of the train split holds int64, not text."),
        ("task.score_column=answer eval.metric=spearman", "task.score_column=answer of the eval split holds string"),
        ("task.dataset=hftune.data.demo:reviews", "task.positive_column is not set, and no column of the train split would"),
    ],
)
def test_bad_data_are_refused_before_a_model_is_built(words, message):
    with pytest.raises(DataError, match=re.escape(message)):
        load_datasets(quick(*words.split()))


def test_an_encoder_decoder_is_refused():
    recipe = quick()
    recipe.task.model_config = {"model_type": "t5", "d_model": 32, "d_ff": 64, "num_layers": 1, "num_heads": 2, "d_kv": 16}
    with pytest.raises(ConfigError, match="has an encoder and a decoder"):
        build_model(recipe)

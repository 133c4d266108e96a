"""Masked language modelling as a recipe: on shards and with adapters, what the model fills in, and what is trained from it."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForMaskedLM, pipeline

import hftune
from hftune import DataError, Recipe, train
from hftune.cli import main
from hftune.models import scored_head
from hftune.reevaluation import evaluate
from hftune.replay.inspection import row_in_data
from tests.parity.test_fully_sharded import same
from tests.support.runs import NO_DROPOUT, TINY, Run, train_on

QUICK = (
    *(word for word in TINY if "max_length" not in word),
    *("task.max_train_samples=90", "task.max_eval_samples=21", "task.block_length=32", "train.epochs=2", "train.batch_size=12"),
    *("train.micro_batch_tokens=null", "train.micro_batch_size=4", "train.log_every=1", "train.lr=1e-2", "train.clip_norm=0.5"),
)
SAID = ["the [MASK] is late.", "please send me a [MASK] [MASK] today."]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def runs(folder):
    words = ("recipe=masked_lm_demo", *QUICK, *NO_DROPOUT, "train.epochs=1")
    lora = (*words, "adapter.type=lora", "adapter.rank=4")
    jobs = {f"micro {size}": (*words, f"train.micro_batch_size={size}") for size in (1, 5)}
    jobs |= {"joined": (*words, "task.join_texts=true", "train.packing=off"), "lora": lora}
    one = train_on(
        1, {"whole": ("recipe=masked_lm_demo", *QUICK), "micro 12": (*words, "train.micro_batch_size=12"), **jobs}, folder
    )
    two = train_on(
        2, {"sharded": jobs["micro 5"], "joined on 2": jobs["joined"], "lora on 2": lora}, folder, sharded=["sharded"]
    )
    return one | two


def test_losses_depend_on_neither_micro_batches_nor_shards(runs):
    for name in ("micro 1", "micro 5", "sharded"):
        same(runs[name], runs["micro 12"])


@pytest.mark.parametrize("name", ["joined", "lora"])
def test_so_are_those_of_joined_texts_and_adapters_on_two_processes(runs, name):
    same(runs[f"{name} on 2"], runs[name])


def test_head_sees_masked_tokens_alone_if_there_would_be_many_logits(runs, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setattr(scored_head, "AT_ONCE", 1000)
    words = (*QUICK, *NO_DROPOUT, "train.epochs=1", "train.micro_batch_size=12", f"output_dir={tmp_path}/out")
    same(Run(train(Recipe.load("masked_lm_demo", *words)).output_dir), runs["micro 12"])
    assert "The logits of a micro-batch are computed all at once" not in capfd.readouterr().out


def test_chunked_loss_of_an_evaluation_takes_its_blocks_as_they_are_masked(runs, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setattr(scored_head, "AT_ONCE", 1000)
    run = runs["micro 12"]
    score = evaluate(Recipe.load(run.folder / "recipe.yaml"), run.folder / "model")
    assert score.metrics["loss"] == pytest.approx(run.result["metrics"]["loss"], rel=1e-5)
    assert not [said for said in score.notices if "all at once" in said]


def test_samples_of_a_replay_are_no_rows(runs):
    task = Recipe.load(runs["whole"].folder / "recipe.yaml").task
    assert row_in_data(task, task.datasets()["train"], 3) is None


def test_masks_of_evaluations_are_those_of_any_run(runs):
    """Whatever is trained: as many tokens in each sample; and the loss is the mean over them, its exponential the perplexity."""
    one, other = runs["whole"].predictions, runs["micro 1"].predictions
    assert [row["tokens"] for row in one] == [row["tokens"] for row in other] and [*map(len, (one, other))] == [21, 21]
    metrics = runs["whole"].result["metrics"]
    mean = sum(row["loss"] for row in one) / sum(row["tokens"] for row in one)
    assert metrics["loss"] == pytest.approx(mean, rel=1e-5)
    assert metrics["perplexity"] == pytest.approx(2.718281828**mean, rel=1e-4)


def test_model_fills_masks_as_the_pipeline_of_transformers_does(runs, capsys):
    model = runs["whole"].folder / "model"
    theirs = pipeline("fill-mask", model=str(model), device="cpu")
    ours = hftune.load_model(runs["whole"].folder, device="cpu").predict(SAID)
    for text, row in zip(SAID, ours, strict=True):
        answers = theirs(text)
        answers = [answers] if isinstance(answers[0], dict) else answers
        assert len(row["tokens"]) == len(answers) == text.count("[MASK]")
        for found, expected in zip(row["tokens"], answers, strict=True):
            assert [one["token"] for one in found] == [one["token_str"] for one in expected]
            assert [one["probability"] for one in found] == pytest.approx([one["score"] for one in expected], abs=2e-6)
    assert ours[0]["filled"] == SAID[0].replace("[MASK]", ours[0]["tokens"][0][0]["token"])
    assert main(["predict", str(runs["whole"].folder), "--text", SAID[0], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["filled"] == ours[0]["filled"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no gap.", r"Input 0 has no \[MASK\]. Write it where a token is to be filled in."),
        ("the [MASK] " * 40, "tokens; the model was trained on 32 at most .task.block_length.. Shorten it."),
    ],
)
def test_text_that_cannot_be_filled_is_refused(runs, text, message):
    with pytest.raises(DataError, match=message):
        hftune.load_model(runs["whole"].folder, device="cpu").predict([text])


def test_a_classifier_begins_with_the_weights_that_were_adapted(runs, folder):
    """Stage two: the encoder is that of stage one to the bit, the head is new, and the tokens are the same."""
    adapted = runs["whole"].folder / "model"
    words = (f"task.model={adapted}", "task.max_length=32", "task.max_train_samples=40", "task.max_eval_samples=20")
    words = ("replace=[task.model_config]", *words)
    recipe = Recipe.load("text_classification_demo", *words)
    recipe.validate()
    recipe.task.datasets()
    torch.manual_seed(0)
    model, weights = recipe.task.build_model(), load_file(adapted / "model.safetensors")
    own = {name: value for name, value in model.state_dict().items() if name in weights}
    assert all(torch.equal(value, weights[name]) for name, value in own.items())
    new = {name for name, _ in model.named_parameters()} - weights.keys()
    assert len(own) > 30 and {name.partition(".")[0] for name in new} == {"classifier", "bert"}
    assert {name for name in new if name.startswith("bert")} == {"bert.pooler.dense.weight", "bert.pooler.dense.bias"}
    first = Recipe.load("masked_lm_demo", *QUICK).task.text_tokenizer
    assert recipe.task.text_tokenizer.get_vocab() == first.get_vocab()
    assert type(AutoModelForMaskedLM.from_pretrained(adapted)).__name__ == "BertForMaskedLM"
    found = train_on(1, {"classified": ("recipe=text_classification_demo", *words, "train.epochs=1")}, folder)["classified"]
    assert found.result["metrics"]["accuracy"] > 0


def test_card_names_the_task(runs):
    card = (runs["whole"].folder / "model" / "README.md").read_text()
    assert "pipeline_tag: fill-mask" in card and 'pipeline("fill-mask"' in card

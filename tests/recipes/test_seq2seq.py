"""Sequence to sequence from the command line to a model that writes the same texts again."""

import json

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, Seq2SeqTrainer, Seq2SeqTrainingArguments

from hftune import Recipe, cli
from hftune.build import load_datasets
from tests.support.runs import train_on
from tests.support.trainer import losses_of_trainer, planned_batches

SIZES = "d_model: 32, d_kv: 8, d_ff: 48, num_layers: 2, num_heads: 4"
T5 = f"task.model_config={{model_type: t5, {SIZES}, dropout_rate: 0.1}}"
BART = (
    "task.model_config={model_type: bart, d_model: 32, encoder_layers: 2, decoder_layers: 2, encoder_attention_heads: 4, "
    "decoder_attention_heads: 4, encoder_ffn_dim: 48, decoder_ffn_dim: 48, dropout: 0.1, attention_dropout: 0.1, init_std: 0.2}"
)
SMALL = (
    *("task.model=null", "task.dataset=hftune.data.demo:spoken", "task.vocab_size=400", "task.max_train_samples=80"),
    *("task.max_eval_samples=13", "task.scores=[rouge, bleu, chrf]", "task.max_source_length=64", "task.max_target_length=24"),
    *("task.generation={num_beams: 2, min_new_tokens: 8}", "train.batch_size=16", "train.micro_batch_tokens=300"),
    *("train.log_every=1", "train.epochs=2", "train.lr=5e-3", "train.warmup_ratio=0", "eval.every=epoch"),
)
JOBS = {"t5": (*SMALL, T5), "bart": (*SMALL, BART)}
ALONE = ("train.epochs=4", "train.micro_batch_tokens=null", "train.micro_batch_size=16", "eval.every=never")
TRAINER = (*SMALL, T5.replace("0.1", "0.0"), *ALONE)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return train_on(1, {**JOBS, "trainer": TRAINER}, tmp_path_factory.mktemp("runs"), "seq2seq")


def test_twenty_steps_equal_those_of_seq2seq_trainer(runs, tmp_path):
    ours = runs["trainer"].logged("train/loss")
    recipe = Recipe.load("seq2seq", *TRAINER)

    def labels_alone(rows):
        """The model makes decoder inputs and loss itself."""
        return {name: recipe.task.collate(rows)[name] for name in ("input_ids", "attention_mask", "labels")}

    batches = planned_batches(recipe, load_datasets(recipe)["train"], labels_alone)
    theirs = losses_of_trainer(recipe, tmp_path, batches, Seq2SeqTrainer, Seq2SeqTrainingArguments)
    assert len(ours) == 20 and torch.tensor(ours).std() > 0.05
    assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.parametrize("name", JOBS)
def test_export_writes_the_same_texts_again(runs, name):
    run = runs[name]
    texts = [row["source"] for row in run.predictions]
    expected = [row["generated"] for row in run.predictions]
    tokens, model = (kind.from_pretrained(run.folder / "model_last") for kind in (AutoTokenizer, AutoModelForSeq2SeqLM))
    said = [model.eval().generate(**tokens(text, return_tensors="pt", truncation=True, max_length=64))[0] for text in texts]
    assert tokens.batch_decode(said, skip_special_tokens=True) == expected


def test_command_and_card_show_the_texts(runs, capsys):
    run = runs["t5"]
    text = run.predictions[0]["source"]
    assert cli.main(["predict", str(run.folder), "--text", text, "--json"]) == 0
    assert [*json.loads(capsys.readouterr().out)] == ["generated"]
    assert "that writes a text for a text" in (run.folder / "model" / "README.md").read_text()
    assert {"source", "target", "generated", "rouge_l", "error"} <= run.predictions[0].keys()

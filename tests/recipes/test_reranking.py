"""Rerankers and reward models: the losses of sentence-transformers and of the papers, on any number of processes."""

import json
import re

import pytest
import torch
from sentence_transformers import CrossEncoder
from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss
from torch.nn.functional import cross_entropy, logsigmoid
from transformers.modeling_outputs import SequenceClassifierOutput

import hftune
from hftune import ConfigError, DataError, Recipe, train
from hftune.cli import main
from tests.parity.test_fully_sharded import same
from tests.support.runs import NO_DROPOUT, TINY, train_on

QUICK = (
    *(word for word in TINY if "max_length" not in word),
    *("task.vocab_size=300", "task.max_train_samples=60", "task.max_eval_samples=21", "train.batch_size=12"),
    *(
        "train.epochs=2",
        "train.micro_batch_tokens=null",
        "train.micro_batch_size=4",
        "train.log_every=1",
        "train.clip_norm=0.5",
    ),
)
RANKINGS = ("listwise", "pairwise", "pointwise")
PAIRS = [["i cannot log in.", "please choose a new password."], ["where is the lamp?", "we send you a new one."]]


def quick(*overrides):
    return Recipe.load("reranking_demo", *QUICK, *overrides)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def runs(folder):
    jobs = {name: ("recipe=reranking_demo", *QUICK, f"task.ranking={name}", "task.center=0.01") for name in RANKINGS}
    again = (*jobs["listwise"], f"output_dir={folder / 'again'}")
    others = {
        "begins": again,
        "goes on": again,
        "sharded": jobs["listwise"],
        "spread": (*jobs["listwise"], "parallel.context=2"),
    }
    return (
        {f"{name} on 1": run for name, run in train_on(1, jobs, folder).items()}
        | {f"{name} on 4": run for name, run in train_on(4, jobs, folder).items()}
        | train_on(2, {**jobs, **others}, folder, stops={"begins": (3, 1)}, sharded=["sharded"])
    )


@pytest.mark.parametrize("name", RANKINGS)
def test_losses_and_gradient_norms_are_those_of_one_process(runs, name):
    for run in (runs[name], runs[f"{name} on 4"]):
        same(run, runs[f"{name} on 1"])


@pytest.mark.parametrize("name", ["sharded", "spread"])
def test_so_are_those_of_sharded_weights_and_tokens(runs, name):
    same(runs[name], runs["listwise on 1"])


def test_without_dropout_losses_do_not_depend_on_micro_batches(folder):
    words = ("recipe=reranking_demo", *QUICK, *NO_DROPOUT)
    jobs = {f"micro {size}": (*words, f"train.micro_batch_size={size}") for size in (1, 5, 12)}
    found = train_on(1, jobs, folder)
    for name in ("micro 1", "micro 5"):
        same(found[name], found["micro 12"])


def test_a_resumed_run_is_the_same_to_the_bit(runs):
    assert runs["goes on"].logged("train/loss") == runs["listwise"].logged("train/loss")
    assert runs["goes on"].predictions == runs["listwise"].predictions


def test_losses_are_those_of_the_papers():
    scores, rows = torch.randn(6), torch.tensor([[4, 0, 2], [1, 5, 3]])  # of two samples with three candidates each
    (a, b, c), (d, e, f) = ([scores[index] for index in row] for row in rows.tolist())
    expected = {
        "listwise": cross_entropy(torch.stack([torch.stack([a, b, c]), torch.stack([d, e, f])]), torch.zeros(2).long()) * 2,
        "pairwise": -(logsigmoid(a - b) + logsigmoid(a - c) + logsigmoid(d - e) + logsigmoid(d - f)) / 2,
        "pointwise": -sum(map(logsigmoid, (a, -b, -c, d, -e, -f))) / 3,
    }
    for name, loss in expected.items():
        task = quick(f"task.ranking={name}").task
        output = SequenceClassifierOutput(logits=scores[:, None])
        torch.testing.assert_close(task.loss(output, rows), loss)
        task.center = 0.5
        torch.testing.assert_close(task.loss(output, rows), loss + 0.5 * ((a + b + c) ** 2 + (d + e + f) ** 2))


def test_scores_and_the_pointwise_loss_are_those_of_sentence_transformers(runs):
    run, rows = runs["pointwise"], quick().task.rows["eval"]
    theirs = CrossEncoder(str(run.folder / "model_last"), device="cpu", activation_fn=torch.nn.Identity())
    ours = [row["score"] for row in hftune.load_model(run.folder / "model_last").predict(PAIRS)]
    assert ours == pytest.approx(theirs.predict(PAIRS).tolist(), abs=1e-5)
    negatives = [[row["negative"], row["other_negative"]] for row in rows]
    replies = [[row["reply"], *others] for row, others in zip(rows, negatives, strict=True)]
    labels = torch.tensor([[1.0, 0.0, 0.0]] * len(rows))
    flat = [[row["ticket"] for row in rows for _ in range(3)], [text for texts in replies for text in texts]]
    with torch.no_grad():
        pointwise = float(BinaryCrossEntropyLoss(theirs)(flat, labels.flatten()))
    scores = torch.tensor([row["scores"] for row in run.predictions])
    task, places = quick("task.ranking=pointwise").task, torch.arange(3 * len(rows)).view(-1, 3)
    found = float(task.loss(SequenceClassifierOutput(logits=scores.reshape(-1, 1)), places)) / len(rows)
    assert found == pytest.approx(pointwise, rel=1e-4)


def test_each_sample_is_ranked_once(runs):
    (result,) = [json.loads((runs["listwise"].folder / "result.json").read_text())]
    rows = runs["listwise"].predictions
    assert len(rows) == 21 and all(row["margin"] == pytest.approx(row["scores"][0] - max(row["scores"][1:])) for row in rows)
    ranks = [1 + sum(score >= row["scores"][0] for score in row["scores"][1:]) for row in rows]
    assert ranks == [row["rank"] for row in rows]
    assert result["metrics"]["accuracy"] == pytest.approx(ranks.count(1) / 21)


def test_predict_prints_scores(runs, capsys):
    assert main(["predict", str(runs["listwise"].folder), "--text", "\t".join(PAIRS[0]), "--json"]) == 0
    assert [*json.loads(capsys.readouterr().out)] == ["score"]
    with pytest.raises(DataError, match="Input 0 is not a pair of texts, anchor and candidate"):
        hftune.load_model(runs["listwise"].folder).predict(["no pair"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("task.negative_columns=[]", "task.negative_columns=[] must name a column at least"),
        ("task.negative_columns=[reply]", "Column 'reply' is named twice"),
        ("task.ranking=best", "task.ranking='best' is not one of listwise, pairwise, pointwise."),
        ("task.center=-1", "task.center=-1.0 must be at least 0."),
    ],
)
def test_bad_keys_are_refused_in_a_sentence(override, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        quick(override).validate()


def test_a_negative_that_is_missing_is_refused_before_a_model_is_built(tmp_path):
    with pytest.raises(DataError, match=r"task.negative_columns\[0\]=worse is not a column of the train split"):
        train(quick("task.negative_columns=[worse]", f"output_dir={tmp_path}"))

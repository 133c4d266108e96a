"""Process reward models on 1, 2 and 4 processes, stopped and resumed; their tokens, loss and scores against TRL's, written out."""

import ast
import json
import math
import re
from functools import partial

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForTokenClassification, AutoTokenizer

import hftune
from hftune import ConfigError, DataError, Recipe, cli
from hftune.build import load_datasets
from hftune.data.demo import solutions
from tests.support.runs import NO_DROPOUT, TINY, recipe_for_rows, train_on

SMALL = (
    *("task.max_train_samples=60", "task.max_eval_samples=13", "train.batch_size=12", "train.log_every=1"),
    *(
        "train.micro_batch_tokens=null",
        "train.micro_batch_size=4",
        "eval.every=epoch",
        "eval.batch_size=5",
        "task.max_length=40",
    ),
)
WHOLE = ("replace=[task.model_config]", *TINY, *SMALL)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder, name = tmp_path_factory.mktemp("runs"), "process_reward_demo"
    again = (*WHOLE, "checkpoint.every=2", f"output_dir={folder}/resumed")
    alone = {"whole": WHOLE, **{f"micro {size}": (*WHOLE, *NO_DROPOUT, f"train.micro_batch_size={size}") for size in (5, 12)}}
    found = {(job, 1): run for job, run in train_on(1, alone, folder, name).items()}
    two = {"whole": WHOLE, "stopped": again, "resumed": again}
    found |= {(job, 2): run for job, run in train_on(2, two, folder, name, stops={"stopped": (5, 0)}).items()}
    return found | {("whole", 4): train_on(4, {"whole": WHOLE}, folder, name)["whole"]}


@pytest.mark.parametrize("size", (2, 4))
def test_losses_and_metrics_do_not_depend_on_processes_with_dropout(runs, size):
    one, many = runs["whole", 1], runs["whole", size]
    expected = one.logged("train/loss")
    assert len(expected) == 10
    assert many.logged("train/loss") == pytest.approx(expected, rel=1e-5)
    metrics, of_one = (
        {name: run.result["metrics"][name] for name in ("loss", "accuracy", "first_error_accuracy")} for run in (many, one)
    )
    assert metrics == pytest.approx(of_one, rel=1e-4)


def test_losses_do_not_depend_on_micro_batches(runs):
    assert runs["micro 5", 1].logged("train/loss") == pytest.approx(runs["micro 12", 1].logged("train/loss"), rel=1e-5)


def test_a_run_that_was_stopped_and_resumed_is_the_one_that_was_not(runs):
    assert runs["resumed", 2].logged("train/loss") == runs["whole", 2].logged("train/loss")
    assert runs["resumed", 2].result["metrics"] == runs["whole", 2].result["metrics"]


def test_loss_and_scores_are_those_of_trls_layout(runs):
    """As TRL's PRMTrainer: each step and the separator tokenized alone, and labelled at the last token."""
    folder = runs["whole", 4].folder
    model = AutoModelForTokenClassification.from_pretrained(folder / "model_last").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "model_last")
    assert model.config.id2label == {0: "wrong", 1: "right"}
    rows, losses, right = Recipe.load("process_reward_demo", *WHOLE).task.rows["eval"], [], []
    predicted = hftune.load_model(folder / "model_last").predict([[row["prompt"], row["completions"]] for row in rows])
    for row, ours in zip(rows, predicted, strict=True):
        ids = tokenizer(row["prompt"], add_special_tokens=False)["input_ids"]
        labels = [-100] * len(ids)
        for step, label in zip(row["completions"], row["labels"], strict=True):
            tokens = [
                *tokenizer(step, add_special_tokens=False)["input_ids"],
                *tokenizer("\n", add_special_tokens=False)["input_ids"],
            ]
            ids += tokens
            labels += [*[-100] * (len(tokens) - 1), int(label)]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids])).logits[0]
        kept = torch.tensor(labels) >= 0
        scores = logits.softmax(-1)[kept, 1].tolist()
        assert ours["scores"] == pytest.approx(scores, abs=1e-5) and ours["score"] == min(ours["scores"])
        losses += cross_entropy(logits[kept], torch.tensor(labels)[kept], reduction="none").tolist()
        right.append([(score > 0.5) == label for score, label in zip(scores, row["labels"], strict=True)])
    loss, accuracy = (runs["whole", 4].logged(f"eval/{name}")[-1] for name in ("loss", "accuracy"))
    assert loss == pytest.approx(math.fsum(losses) / len(losses), rel=1e-5)
    assert accuracy == pytest.approx(sum(map(sum, right)) / len(losses))


def test_the_first_error_counts_once_for_each_solution():
    task = Recipe.load("process_reward_demo").task
    rows = [
        {"label": [1, 1, 0, 0], "score": [0.9, 0.8, 0.1, 0.9]},  # found, whatever is said of what follows
        {"label": [1, 0, 1], "score": [0.2, 0.1, 0.9]},  # too early
        {"label": [1, 1], "score": [0.9, 0.8]},
        {"label": [1, 1], "score": [0.9, 0.4]},
    ]
    found = task.metrics([{**row, "steps": len(row["label"])} for row in rows])
    assert found["first_error_accuracy"] == 0.5 and found["accuracy"] == pytest.approx(8 / 11)
    assert found["per_class"]["wrong"] == {"precision": 0.5, "recall": 2 / 3, "f1": pytest.approx(4 / 7), "support": 3}


def test_a_solution_counts_if_its_first_error_is_not_cut():
    rows = [
        {"label": [1, 0], "score": [0.9, 0.1], "steps": 3},  # found
        {"label": [1, 1], "score": [0.9, 0.9], "steps": 3},  # what is cut may be wrong
        {"label": [], "score": [], "steps": 2},
    ]
    task = Recipe.load("process_reward_demo").task
    assert task.metrics(rows)["first_error_accuracy"] == 1
    assert task.metrics([{**rows[0], "score": [0.1, 0.1]}, *rows[1:]])["first_error_accuracy"] == 0


def test_steps_need_something_between_them():
    with pytest.raises(ConfigError, match=r"task\.step_separator is empty"):
        Recipe.load("process_reward_demo", "task.step_separator=''").validate()


@pytest.fixture
def own(tmp_path):
    """Return a function that makes a recipe for rows of one's own."""
    return partial(recipe_for_rows, "process_reward_demo", tmp_path)


GOOD = {"prompt": "1+1+1?", "completions": ["1+1=2", "2+1=4"], "labels": [True, False]}


def test_steps_beyond_the_longest_text_are_neither_trained_nor_scored(own):
    task = own(GOOD).task
    (sample,) = task.datasets()["train"]
    assert sample["labels"][sample["labels"] >= 0].tolist() == [1, 0] and sample["labels"][-1] == 0
    first = sample["labels"].tolist().index(1) + 1
    task = own(GOOD, words=(f"task.max_length={first}",)).task
    (sample,) = task.datasets()["train"]
    assert sample["labels"].tolist() == [-100] * (first - 1) + [1] and sample["cut"] and sample["steps"] == 2
    long = {**GOOD, "prompt": "1+1+1? " * 9}
    recipe = own(GOOD, long, words=(f"task.max_length={first}",))
    datasets = load_datasets(recipe)
    notices = recipe.task.notices(datasets, None)
    assert notices[-1] == f"Solutions that task.max_length={first} leaves no step: 1 of train."


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"completions": []}, "Row 1 of the train split has no steps, or an empty one."),
        ({"completions": ["1+1=2", " "]}, "Row 1 of the train split has no steps, or an empty one."),
        ({"labels": [True]}, "Row 1 of the train split has 2 steps, and not as many labels that are true or false."),
        ({"labels": [True, None]}, "Row 1 of the train split has 2 steps, and not as many labels that are true or false."),
    ],
)
def test_rows_that_cannot_be_trained_on_are_named(own, row, message):
    with pytest.raises(DataError) as refused:
        load_datasets(own(GOOD, {**GOOD, **row}))
    assert str(refused.value) == message


@pytest.mark.parametrize("value", ["1+1?", ["1+1?", []], ["1+1?", ["2", ""]], ["1+1?"], 3])
def test_what_has_no_steps_is_not_scored(runs, value):
    with pytest.raises(DataError, match="Input 0 is no problem with its steps: give a pair of them, or write a tab"):
        hftune.load_model(runs["whole", 1].folder).predict([value])


def test_the_card_shows_how_steps_are_scored(runs):
    model = runs["whole", 1].folder / "model"
    (line,) = re.findall(r"^trained\.predict\((.*)\)$", (model / "README.md").read_text(), re.MULTILINE)
    (row,) = hftune.load_model(model).predict(ast.literal_eval(line))
    assert len(row["scores"]) == 2


def test_steps_in_a_table_and_in_a_text_are_scored(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    row, output = {name: solutions("eval")[0][name] for name in ("prompt", "completions")}, tmp_path / "scores.jsonl"
    (tmp_path / "new.jsonl").write_text(json.dumps(row) + "\n")
    folder = str(runs["whole", 1].folder)
    assert cli.main(["predict", folder, "--data", f"{tmp_path}/new.jsonl", "--output", str(output)]) == 0
    of_table = json.loads(output.read_text())
    capsys.readouterr()
    text = f"{row['prompt']}\t" + "\n\n".join(row["completions"]) + "\n"
    assert cli.main(["predict", folder, "--text", text, "--json"]) == 0
    of_text = json.loads(capsys.readouterr().out)
    assert of_table["scores"] == pytest.approx(of_text["scores"], abs=1e-6) and len(of_text["scores"]) == len(
        row["completions"]
    )

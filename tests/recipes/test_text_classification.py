"""Text classification on files of one's own: columns that are found, exports that transformers loads, and bad input."""

import csv
import json
import re
import sys

import pytest
from transformers import pipeline

import hftune
from hftune import ConfigError, DataError, EvalConfig, Recipe, TrainConfig, train
from hftune.data.demo import replies, tickets
from tests.support.pages import PAGES, blocks
from tests.support.runs import NO_DROPOUT, SMALL, TINY, Run

FEW = (*SMALL, *NO_DROPOUT, "train.micro_batch_size=16", "train.max_steps=4", "train.lr=1e-3")


def trained(folder, recipe, *words):
    return Run(train(Recipe.load(recipe, *FEW, f"output_dir={folder}", *words)).output_dir)


def test_export_of_several_labels_is_loaded_as_such(tmp_path):
    run = trained(tmp_path / "out", "multi_label_demo")
    text = run.predictions[0]["text"]
    own = hftune.load_model(run.folder, device="cpu").predict([text])[0]
    config = json.loads((run.folder / "model" / "config.json").read_text())
    assert config["problem_type"] == "multi_label_classification"
    assert own["probabilities"] == pytest.approx(run.predictions[0]["probabilities"], abs=2e-6)
    classify = pipeline("text-classification", model=str(run.folder / "model"), device="cpu", top_k=None)
    theirs = {answer["label"]: answer["score"] for answer in classify([text])[0]}
    assert own["probabilities"] == pytest.approx(theirs, abs=2e-6)
    assert own["labels"] == [name for name, value in own["probabilities"].items() if value >= 0.5]
    assert set(run.result["metrics"]["per_class"]) == set(theirs) == {"damage", "delivery", "invoice", "login", "refund"}
    assert "AUROC" in (run.folder / "report.html").read_text()


def test_export_of_numbers_is_loaded_as_such(tmp_path):
    run = trained(tmp_path / "out", "regression_demo")
    texts = [row["text"] for row in run.predictions[:5]]
    said = [answer["value"] for answer in hftune.load_model(run.folder, device="cpu").predict(texts)]
    assert said == pytest.approx([row["prediction"] for row in run.predictions[:5]], rel=1e-4)
    score = pipeline("text-classification", model=str(run.folder / "model"), device="cpu")
    assert said == pytest.approx([answer["score"] for answer in score(texts)], rel=1e-4)


def test_pairs_of_a_csv_are_read_together(tmp_path):
    for split in ("train", "eval"):
        with (tmp_path / f"{split}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, ["ticket", "reply", "label"])
            writer.writeheader()
            writer.writerows(replies(split)[:40])
    files = f"task.data_files={{train: {tmp_path}/train.csv, eval: {tmp_path}/eval.csv}}"
    run = trained(tmp_path / "out", "pairs_demo", files, "task.dataset=null", "task.class_weights=balanced")
    first = run.predictions[0]
    model = hftune.load_model(run.folder, device="cpu")
    pair = [first["text"], first["text_pair"]]
    said = model.predict([pair, "\t".join(pair)])
    assert said[0] == said[1] and said[0]["label"] == first["prediction"]
    classify = pipeline("text-classification", model=str(run.folder / "model"), device="cpu")
    answer = classify({"text": pair[0], "text_pair": pair[1]})
    assert (answer["label"], answer["score"]) == (said[0]["label"], pytest.approx(said[0]["probability"], abs=2e-6))
    with pytest.raises(DataError, match="Input 0 is not a pair of texts, ticket and reply: give a list of two texts"):
        model.predict(["a single text"])


ROWS = [{"review": f"text {number}", "stars": number % 3, "id": f"row{number}"} for number in range(12)]


def own(tmp_path, rows, *words, evaluation=None):
    """A recipe on files of one's own."""
    for split, own_rows in (("train", rows), ("eval", evaluation or rows)):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own_rows))
    files = f"task.data_files={{train: {tmp_path}/train.jsonl, eval: {tmp_path}/eval.jsonl}}"
    return Recipe.load("text_classification", *SMALL, "task.model=null", files, *words).task


def notices(task):
    return [line for line in task.notices(task.datasets(), None) if line.startswith("task.")]


def test_columns_and_problem_type_are_found_and_said(tmp_path):
    rows = [{"text": row["review"], "stars": row["stars"]} for row in ROWS]
    task = own(tmp_path, rows)
    assert notices(task) == [
        "task.text_column=text, chosen from the columns text, stars.",
        "task.label_column=stars, chosen from the columns text, stars.",
        "task.problem_type=single_label_classification: column 'stars' holds whole numbers.",
    ]
    halves = [{"review": row["review"], "stars": row["stars"] / 2} for row in ROWS]
    task = own(tmp_path, halves)
    assert notices(task)[-1] == "task.problem_type=regression: column 'stars' holds decimal numbers."
    assert task.datasets()["train"].column("label").tolist() == [row["stars"] for row in halves]
    lists = [{"review": row["review"], "tags": [["a"], [], ["b", "a"]][row["stars"]]} for row in ROWS]
    task = own(tmp_path, lists)
    assert notices(task)[-1] == "task.problem_type=multi_label_classification: column 'tags' holds lists."
    assert task.datasets()["train"].column("label")[:3].tolist() == [[1, 0], [0, 0], [1, 1]]


def test_columns_of_0_and_1_are_labels(tmp_path):
    rows = [{"text": row["review"], "new": row["stars"] == 0, "old": int(row["stars"] == 1)} for row in ROWS]
    task = own(tmp_path, rows, "task.label_columns=[new, old]")
    train_rows = task.datasets()["train"]
    assert task.labels == ["new", "old"] and task.class_counts(train_rows) == {"new": 4, "old": 4}
    assert train_rows.column("label")[:3].tolist() == [[1, 0], [0, 1], [0, 0]]


def test_weights_are_balanced_by_the_training_split(tmp_path):
    rows = [{"text": row["review"], "label": "ab"[row["stars"] == 0]} for row in ROWS]
    task = own(tmp_path, rows, "task.class_weights=balanced")
    task.datasets()
    assert task._problem.weights == [12 / (2 * 8), 12 / (2 * 4)]
    task = own(tmp_path, rows, "task.class_weights={b: 5}")
    assert task._problem.weights == [1.0, 5.0]


NUMBERS = ("task.text_column=review", "task.label_column=stars", "task.problem_type=regression")


@pytest.mark.parametrize(
    ("changed", "words", "said"),
    [
        (
            {},
            (),
            "task.label_column is not set, and several columns would do: stars, id. Set it to one of the columns: review, stars, id.",
        ),
        (
            {"stars": "many"},
            NUMBERS,
            "Row 5 of the train split has 'many' in column 'stars', which is not a number. Correct it",
        ),
        ({"stars": None}, NUMBERS, "Row 5 of the train split has no label in column 'stars'. Fill it in, or remove the row."),
        ({}, (NUMBERS[0], "task.label_columns=[stars, stars]"), "has 2 in column 'stars', which is neither 0 nor 1."),
        (
            {},
            (NUMBERS[0], "task.label_column=id", "task.class_weights={row99: 2}"),
            "task.class_weights.row99 names no class. Classes: row0, row1, row10,",
        ),
        ({}, (NUMBERS[0], "task.label_column=id", "task.class_weights={row99: 2}"), "Did you mean 'row9'?"),
        (
            {},
            (*NUMBERS[:2], "task.problem_type=multi_label_classification"),
            "Column 'stars' of the train split holds int64, not",
        ),
    ],
)
def test_data_that_do_not_fit_are_refused_in_a_sentence(tmp_path, changed, words, said):
    rows = [dict(row) for row in ROWS]
    rows[5].update(changed)
    if changed.get("stars") == "many":  # one type in a column of JSON
        rows = [{**row, "stars": str(row["stars"])} for row in rows]
    task = own(tmp_path, rows, *words)
    with pytest.raises(DataError, match=re.escape(said)):
        task.datasets()
        task._problem  # noqa: B018 - weights are looked up with the first loss


def test_a_label_that_the_training_split_lacks_is_refused(tmp_path):
    rows = [{"text": row["review"], "labels": ["ab"[row["stars"] > 0]]} for row in ROWS]
    task = own(tmp_path, rows, evaluation=[{"text": "new", "labels": ["a", "z"]}])
    with pytest.raises(DataError, match=r"Row 0 of the eval split has the label 'z'; there are 2 labels \(a, b\)\."):
        task.datasets()
    task = own(tmp_path, [{"text": "new", "labels": ["a", "a"]}, *rows])
    with pytest.raises(DataError, match="Row 0 of the train split lists a label twice in column 'labels'"):
        task.datasets()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("task.class_weights=even", "'even' is neither balanced nor a mapping from class names to weights"),
        ("task.class_weights={a: 0}", "task.class_weights.a=0 must be a number above 0."),
        ("task.label_smoothing=1.0", "task.label_smoothing=1.0 must be in [0, 1)."),
        ("task.focal_gamma=-1", "task.focal_gamma=-1.0 must be at least 0"),
        ("task.focal_gamma=2; task.label_smoothing=0.1", "task.label_smoothing and task.focal_gamma contradict each other."),
        ("task.text_columns=[a]", "task.text_columns=['a'] must be the two columns of a pair"),
        ("task.text_columns=[a, b]; task.text_column=a", "task.text_column=a and task.text_columns are both set."),
        ("task.label_columns=[a, b]; task.label_column=a", "task.label_column='a' has no place beside task.label_columns."),
        ("task.problem_type=regression; task.class_weights=balanced", "task.class_weights='balanced' is for classes, not for"),
        ("task.problem_type=regression; task.ordinal=true", "task.ordinal=true is for classes, not for"),
    ],
)
def test_keys_that_contradict_each_other_are_refused_before_anything_is_loaded(words, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        Recipe.load("text_classification", "task.dataset=hftune.data.demo:tickets", *words.split("; ")).validate()


def test_the_recipe_asks_for_data():
    with pytest.raises(ConfigError, match=r"Name your data: task.data_files.train=\.\.\."):
        Recipe.load("text_classification").validate()


def test_text_task_of_the_documentation_trains(tmp_path, monkeypatch):
    page = PAGES["docs/own-task.md"]
    (code,) = [block for block in blocks(page, "python") if block.startswith("# votes.py")]
    (recipe,) = [block for block in blocks(page, "yaml") if block.startswith("# votes.yaml")]
    assert len([line for line in code.splitlines() if line.strip() and not line.startswith("#")]) <= 30
    (tmp_path / "votes.py").write_text(code)
    (tmp_path / "votes.yaml").write_text(recipe)
    for split in ("train", "eval"):
        rows = [{"text": row["text"], "yes": len(row["topics"]), "readers": 5} for row in tickets(split)[:37]]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "votes", None)  # restored at the end, so that no other test finds this one
    del sys.modules["votes"]
    words = [*TINY, "task.model=null", "train.epochs=1", "train.batch_size=16", "output_dir=out"]
    result = train(Recipe.load("votes.yaml", *words))
    assert result.steps == 3 and 0 < result.metrics["mean_error"] < 1
    assert json.loads((tmp_path / "out/model/config.json").read_text())["model_type"] == "bert"


def test_yelp_is_what_it_was_before_it_built_on_text_classification():
    recipe = Recipe.load("yelp")
    task = {name: value for name, value in vars(recipe.task).items() if value not in (None, {}, 0.0)}
    names = ["1 star", "2 stars", "3 stars", "4 stars", "5 stars"]
    assert task == {
        **{"model": "google-bert/bert-base-cased", "dataset": "Yelp/yelp_review_full"},
        **{"train_split": "train", "eval_split": "test"},
        **{"max_train_samples": 5000, "max_eval_samples": 5000, "vocab_size": 4096, "max_length": 512},
        **{"problem_type": "single_label_classification", "text_column": "text", "label_column": "label"},
        **{"label_names": names, "ordinal": True, "prepare": "auto", "bad_rows": "stop", "cache_gib": 20.0},
    }
    changed = {name: value for name, value in vars(recipe.train).items() if value != getattr(TrainConfig(), name)}
    assert changed == {
        **{"batch_size": 128, "micro_batch_size": 32, "micro_batch_tokens": 4096, "clip_norm": None, "weight_decay": 0.01},
        "mixed_precision": "auto",
    }
    assert recipe.eval == EvalConfig(every="epoch", batch_size=32, metric="accuracy")

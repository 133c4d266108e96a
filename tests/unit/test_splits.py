"""Rows held out for evaluation: a share of one file, or folds. The same for every process and run, of each class its share."""

import json
from collections import Counter

import datasets
import numpy as np
import pytest

from hftune import ConfigError, DataError
from hftune.commands import folds
from hftune.commands.evaluate import with_evaluation
from hftune.config import Recipe
from hftune.data import notices
from hftune.data.rows import row_numbers
from hftune.data.splits import Split, split_fold, split_off
from hftune.tasks import ImageClassification, ImageRestoration, LanguageModeling, SequenceClassification

CONFIG = {"model_type": "bert", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
LABELS = [*"a" * 50, *"b" * 30, *"c" * 17, *"d" * 3]


def task(**fields):
    return SequenceClassification(model=None, model_config=CONFIG, vocab_size=100, **fields)


def one_file(tmp_path, labels=LABELS):
    path = tmp_path / "all.jsonl"
    rows = [{"text": f"text number {index} of class {label}", "label": label} for index, label in enumerate(labels)]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def test_a_share_of_each_class_is_held_out_and_every_row_is_in_one_part():
    train, held_out = (rows.tolist() for rows in split_off(100, 0.1, LABELS))
    assert sorted([*train, *held_out]) == list(range(100)) and train == sorted(train) and held_out == sorted(held_out)
    assert Counter(LABELS[index] for index in held_out) == {"a": 5, "b": 3, "c": 2, "d": 1}  # rounded, at least one
    assert held_out == split_off(100, 0.1, LABELS)[1].tolist() != split_off(100, 0.1, LABELS, seed=1)[1].tolist()
    for num_rows, share, count in [(2, 0.01, 1), (2, 0.99, 1), (10, 0.25, 3), (3, 0.5, 2)]:
        assert len(split_off(num_rows, share)[1]) == len(split_off(num_rows, share, in_order=True)[1]) == count


@pytest.mark.parametrize("labels", [None, LABELS])
def test_each_row_is_in_one_fold_and_folds_and_their_classes_differ_by_one_row_at_most(labels):
    folds = [split_fold(100, fold, 7, labels) for fold in range(7)]
    assert sorted(np.concatenate([held_out for _, held_out in folds])) == list(range(100))
    assert {len(held_out) for _, held_out in folds} == {14, 15}
    for train, held_out in folds:
        assert sorted([*train, *held_out]) == list(range(100))
        if labels:
            counts = Counter(labels[index] for index in held_out)
            assert counts["a"] in (7, 8) and counts["b"] in (4, 5) and counts["c"] in (2, 3) and counts["d"] in (0, 1)
    assert [split_fold(10, fold, 3, in_order=True)[1].tolist() for fold in range(3)] == [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]]


def test_a_class_with_a_single_row_is_refused_by_its_name_and_its_row(tmp_path):
    file = one_file(tmp_path, [*"aabb", "rare", *"ab", "odd"])
    with pytest.raises(
        DataError,
        match=r"The class 'rare' has a single row in the train split, row 4\. 1 more class has a single row, too\. To",
    ):
        task(data_files={"train": file}, eval_share=0.3).datasets()


def test_too_few_rows_are_refused():
    with pytest.raises(DataError, match=r"The train split has 1 row, too few to hold some out: 2 are needed\."):
        split_off(1, 0.5)
    with pytest.raises(DataError, match=r"The train split has 4 rows, too few to hold some out: 5 are needed\."):
        split_fold(4, 0, 5)


def test_a_share_is_held_out_before_rows_are_counted_and_folds_are_those_of_the_rows_counted():
    part = {"eval_share": 0.2, "eval_fold": None, "data_files": {"train": "f"}}
    few, all_rows = (
        Split.of(task(**part, max_train_samples=count), "eval", {"train": count, "eval": None}).indices(50)
        for count in (10, None)
    )
    assert few.tolist() == all_rows.tolist()
    folded = [task(eval_fold=[fold, 4], max_train_samples=20) for fold in range(4)]
    parts = [Split.of(one, "eval", {"train": 20, "eval": 3}).indices(100) for one in folded]
    assert sorted(np.concatenate(parts)) == Split("train", 20).indices(100).tolist()
    assert not {*parts[0]} & {*Split.of(folded[0], "train", {"train": 20}).indices(100)}


def test_one_file_is_split_into_train_and_eval_and_its_rows_keep_their_numbers(tmp_path):
    loaded = task(data_files={"train": one_file(tmp_path)}, eval_share=0.1)
    assert loaded.validate() == []
    assert {split: len(rows) for split, rows in loaded.datasets().items()} == {"train": 89, "eval": 11}
    rows = loaded.rows["eval"]
    assert rows["text"] == [f"text number {row} of class {LABELS[row]}" for row in row_numbers(rows, range(11))]
    said = notices.held_out(loaded, 100)
    assert said == [
        "task.eval_share=0.1: a share of the 100 rows of the train split is held out for evaluation, the same in every run."
    ]
    assert not any("max_train_samples" in notice for notice in loaded.row_notices())


def test_consecutive_rows_keep_their_numbers_too(tmp_path):
    file = one_file(tmp_path, [*"ababab"])
    for fold in range(6):  # leave one out: a single row is consecutive, and so is the rest of the first and the last
        loaded = task(data_files={"train": file}, eval_fold=[fold, 6])
        assert [row["text"][12] for row in loaded.rows["eval"]] == [str(row) for row in loaded.fold_rows]
        numbers = row_numbers(loaded.rows["train"], range(5))
        assert sorted([*numbers, *loaded.fold_rows]) == [*range(6)]
        assert notices.num_rows(loaded.rows["train"]) == (5, 6)


def test_folds_of_different_data_are_not_joined(tmp_path):
    def digests(labels):
        file = one_file(tmp_path, [*labels])
        return {task(data_files={"train": file}, eval_fold=[fold, 3]).fold_data for fold in range(3)}

    (one,), (other,) = digests("ababab"), digests("ababba")
    assert one != other and task(data_files={"train": one_file(tmp_path)}, eval_share=0.1).fold_data is None
    for name, digest, row in (("fold_0", one, 0), ("fold_1", other, 0)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(json.dumps({"fold_data": digest}))
        (tmp_path / name / "out_of_fold.jsonl").write_text(json.dumps({"row": row, "index": 0}) + "\n")
    folders = [tmp_path / "fold_0", tmp_path / "fold_1"]
    with pytest.raises(ConfigError, match=r"The data have changed between .*fold_0 and .*fold_1, so the folds are not of"):
        folds.check_same_data(folders)
    with pytest.raises(ConfigError, match=r"Row 0 is in two folds, so the folds are not of the same data\. Train all of"):
        folds.joined_rows(folders)


def test_a_task_without_a_default_share_is_not_evaluated_on_its_training_rows():
    (said,) = task(dataset="me/reviews", eval_split=None).validate()
    assert said.startswith("task.eval_split=null names no evaluation data.") and "task.eval_share=0.1" in said
    assert task(dataset="me/reviews", eval_split=None, eval_share=0.1).validate() == []


def test_a_test_file_may_be_given_besides(tmp_path):
    test = tmp_path / "test.jsonl"
    test.write_text('{"text": "text of the test", "label": "a"}\n' * 4)
    loaded = task(data_files={"train": one_file(tmp_path), "test": str(test)}, eval_share=0.1)
    assert loaded.validate() == [] and [*loaded.datasets()] == ["train", "eval", "test"] and len(loaded.datasets()["test"]) == 4


def test_of_a_running_text_the_end_is_held_out(tmp_path):
    path = tmp_path / "all.txt"
    path.write_text("".join(f"line {number} of the text\n" for number in range(20)))
    loaded = LanguageModeling(
        model_config={"model_type": "gpt2"}, tokenizer="words", data_files={"train": str(path)}, eval_share=0.2
    )
    assert loaded.validate() == []
    assert loaded.rows["eval"]["text"] == [f"line {number} of the text" for number in range(16, 20)]


def test_images_are_held_out_by_class(tmp_path):
    pixels = {"image": [np.full((28, 28), row, np.uint8) for row in range(20)], "label": [row % 2 for row in range(20)]}
    kinds = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    datasets.Dataset.from_dict(pixels, features=kinds).to_parquet(path := str(tmp_path / "all.parquet"))
    loaded = ImageClassification(data_files={"train": path}, eval_share=0.2)
    assert loaded.validate() == []
    found = loaded.datasets()
    assert sorted(found["eval"].labels) == [0, 0, 1, 1] and len(found["train"]) == 16
    seen = [int(images.pixels[row, 0, 0, 0]) for images in found.values() for row in range(len(images))]
    assert sorted(seen) == list(range(20))
    folds = [ImageClassification(data_files={"train": path}, eval_fold=[fold, 2]) for fold in range(2)]
    assert len({fold.fold_data for fold in folds}) == 1 and sorted(folds[0].fold_rows + folds[1].fold_rows) == [*range(20)]
    pictures = ImageRestoration(data_files={"train": path}, eval_share=0.2, crop=None)
    assert pictures.validate() == [] and {split: len(own) for split, own in pictures.datasets().items()} == {
        "train": 16,
        "eval": 4,
    }


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ((), "task.data_files.eval is missing. Name evaluation data (task.data_files.eval=...), hold out a share "),
        (("task.eval_share=0.1",), None),
        (("task.eval_fold=[0,5]",), None),
        (("eval.every=never",), None),
        (("task.eval_share=0.1", "eval.every=never"), None),
        (("task.eval_share=1.0",), "task.eval_share=1.0 must be between 0 and 1: "),
        (("task.eval_fold=[5,5]",), "task.eval_fold=[5, 5] must be the number of a fold, from 0, "),
        (("task.eval_share=0.1", "task.data_files.eval={file}"), "task.eval_share=0.1 takes the evaluation rows from the "),
        (("task.eval_share=0.1", "task.eval_fold=[0,5]"), "task.eval_share=0.1 and task.eval_fold=[0, 5] both hold out "),
    ],
)
def test_evaluation_data_are_named_held_out_or_switched_off(tmp_path, words, problem):
    file = one_file(tmp_path)
    recipe = Recipe.load("yelp_demo", f"task.data_files.train={file}", *(word.format(file=file) for word in words))
    if problem is None:
        recipe.validate()
        return
    with pytest.raises(ConfigError) as refused:
        recipe.validate()
    (said,) = refused.value.problems
    assert said.startswith(problem)


@pytest.mark.parametrize("key", ["task.eval_share=0.5", "task.eval_fold=[0, 2]"])
def test_rows_held_out_though_nothing_evaluates_on_them_are_a_notice_and_can_be_evaluated_on_later(tmp_path, key):
    words = [f"task.data_files.train={one_file(tmp_path, [*'ababab'])}", "eval.every=never", key]
    recipe = Recipe.load("yelp_demo", "replace=[task.data_files]", *words)
    assert recipe.task.rows.keys() == {"train"} and len(recipe.task.rows["train"]) < 6
    (notice,) = notices.held_out(recipe.task, 6)
    assert notice.startswith(f"{key}: a part of the 6 rows") and notice.endswith(f"set {key.partition('=')[0]}=null.")
    assert with_evaluation(recipe).task.evaluates


def test_a_data_set_without_the_eval_split_says_what_else_can_be_done(tmp_path):
    one_file(tmp_path)  # of a folder, which has a single split
    with pytest.raises(
        DataError, match=r"Unknown split .*Set task\.eval_split to one of them, hold out a share of the training"
    ):
        task(dataset=str(tmp_path), eval_split="validation").datasets()
    assert len(task(dataset=str(tmp_path), eval_share=0.1).datasets()["eval"]) == 11


def test_without_evaluation_no_eval_split_is_loaded(tmp_path):
    words = ("task.label_names=null", "task.ordinal=false", "eval.every=never")
    recipe = Recipe.load("yelp_demo", f"task.data_files.train={one_file(tmp_path)}", *words)
    assert recipe.task.evaluates is False and [*recipe.task.datasets()] == ["train"]
    assert not recipe.eval.falls_on(10, 10, 5)


def test_a_recipe_without_data_is_told_so_even_if_it_names_no_eval_split():
    problems = SequenceClassification(eval_split=None).validate()
    assert any(problem.startswith("Name your data: ") for problem in problems)


def test_a_mixture_has_no_test_split_of_its_own():
    mixed = LanguageModeling(datasets_=[{"dataset": "hftune.data.demo:paragraphs"}], eval_share=0.1, tokenizer="words")
    assert mixed.source_splits == {"train": "train", "eval": "train"}

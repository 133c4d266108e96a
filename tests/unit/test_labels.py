"""Labels keep their meaning, whatever numbers the files of a data set give them, and whatever order they come in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from PIL import Image

from hftune import ConfigError, DataError, Recipe
from hftune.build import build
from hftune.data.labels import Classes
from hftune.distributed.progress import Progress
from hftune.tasks import ImageClassification, SequenceClassification, TokenClassification

CONFIG = {"model_type": "bert", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


NEW = {"model": None, "model_config": CONFIG, "vocab_size": 100}


def parquet(path: Path, labels: list[Any], names: list[str] | None = None, is_image: bool = False) -> str:
    """Write one row for each label, by its name where there are ``names``, whose numbers then stand in the file."""
    kind = datasets.ClassLabel(names=names) if names else None
    values = [names.index(label) for label in labels] if names else labels
    inputs = [Image.fromarray(np.full((28, 28), place, np.uint8)) for place in range(len(labels))] if is_image else None
    column = {"image": inputs} if is_image else {"text": [f"the food was {place}" for place in range(len(labels))]}
    rows = datasets.Dataset.from_dict({**column, "label": values})
    if kind is not None:
        rows = rows.cast_column("label", kind)
    if is_image:
        rows = rows.cast_column("image", datasets.Image())
    rows.to_parquet(str(path))
    return str(path)


def task(kind: str, tmp_path: Path, train: tuple, evaluation: tuple, **fields: Any) -> Any:
    is_image = kind == "images"
    files = {
        part: parquet(tmp_path / f"{part}.parquet", *given, is_image=is_image)
        for part, given in (("train", train), ("eval", evaluation))
    }
    if is_image:
        return ImageClassification(dataset="parquet", data_files=files, **fields)
    return SequenceClassification(**NEW, dataset="parquet", data_files=files, **fields)


def scored_as(task: Any, part: str) -> list[str]:
    """The names under which the samples of a part are scored."""
    dataset = task.datasets()[part]
    return [task.labels[int(dataset[place]["label"])] for place in range(len(dataset))]


def refused(task: Any) -> str:
    with pytest.raises(DataError) as caught:
        task.datasets()
    return str(caught.value)


BOTH = pytest.mark.parametrize("kind", ["texts", "images"])


@BOTH
def test_an_eval_part_that_numbers_its_classes_differently_is_read_by_name(tmp_path, kind):
    train, evaluation = ["bad", "fair", "good"], ["good", "bad", "good"]
    found = task(kind, tmp_path, (train, ["bad", "fair", "good"]), (evaluation, ["bad", "good"]))
    assert scored_as(found, "train") == train
    assert scored_as(found, "eval") == evaluation


@BOTH
def test_a_class_that_the_train_part_lacks_is_refused_by_name(tmp_path, kind):
    found = task(kind, tmp_path, (["bad", "good"], ["bad", "good"]), (["good", "awful"], ["awful", "good"]))
    said = refused(found)
    assert said.startswith("Row 1 of the eval split has the label 'awful'; there are 2 labels, 0 to 1 (bad, good). ")
    assert said.endswith("Correct the row, or set task.label_names; null uses the names of the data.")


@BOTH
def test_label_names_in_a_different_order_than_the_data_keep_their_meaning(tmp_path, kind):
    train = ["bad", "fair", "good"]
    found = task(kind, tmp_path, (train, train), (["good", "bad"], ["good", "bad"]), label_names=["good", "fair", "bad"])
    assert found.labels == ["good", "fair", "bad"]
    assert scored_as(found, "train") == train and scored_as(found, "eval") == ["good", "bad"]


@BOTH
def test_label_names_may_rename_the_classes_in_their_order(tmp_path, kind):
    own = ["1 star", "2 star"]  # as the Hub's yelp_review_full has it
    found = task(kind, tmp_path, (own, own), (["2 star"], ["2 star"]), label_names=["1 star", "2 stars"])
    assert scored_as(found, "train") == ["1 star", "2 stars"] and scored_as(found, "eval") == ["2 stars"]


@pytest.mark.parametrize("names", [["good", "poor"], ["good", "fair", "poor"], ["x", "y", "z"]])
def test_label_names_that_could_mean_anything_are_refused(tmp_path, names):
    found = task("texts", tmp_path, (["bad", "good"], ["bad", "good"]), (["bad"], ["bad", "good"]), label_names=names)
    said = refused(found)
    assert said.startswith(
        f"task.label_names=[{', '.join(names)}] does not match the class names of the train split: bad, good."
    )


def test_numbers_without_names_are_refused_where_label_names_reorders_the_named_ones(tmp_path):
    found = task("texts", tmp_path, (["bad", "good"], ["bad", "good"]), ([0, 1],), label_names=["good", "bad"])
    said = refused(found)
    assert said.startswith("The labels of the eval split are numbers without") and said.endswith("Set task.label_names=null.")


def test_grades_that_are_numbers_written_as_texts_are_sorted_as_numbers(tmp_path):
    grades = [str(grade) for grade in range(1, 11)]
    found = task("texts", tmp_path, (grades,), (["9"],), ordinal=True)
    assert found.labels == grades
    nine, ten = found.labels.index("9"), found.labels.index("10")
    assert found.metrics([{"label": nine, "prediction": ten}])["mae"] == 1


def test_grades_that_are_words_need_label_names(tmp_path):
    grades = ["good", "bad", "fair"]
    said = refused(task("texts", tmp_path, (grades,), (grades,), ordinal=True))
    assert said.startswith("task.ordinal=true: the labels are texts (bad, fair, good), whose order is unknown. Set task.label_")
    found = task("texts", tmp_path, (grades,), (grades,), ordinal=True, label_names=["bad", "fair", "good"])
    assert scored_as(found, "train") == grades


def test_the_order_of_grades_is_said_where_the_data_set_gives_it(tmp_path):
    names = ["awful", "good", "fair"]
    found = task("texts", tmp_path, (names, names), (names, names), ordinal=True)
    said = found.notices(found.datasets(), None)
    assert "task.ordinal=true: the grades from lowest to highest are awful, good, fair." in said


@BOTH
def test_numbers_that_do_not_count_from_0_are_the_classes_themselves(tmp_path, kind):
    found = task(kind, tmp_path, ([1, 2, 3, 5],), ([5, 1],))
    assert found.labels == ["1", "2", "3", "5"] and scored_as(found, "train") == found.labels
    assert scored_as(found, "eval") == ["5", "1"]
    (said,) = (said for said in found.notices(found.datasets(), None) if "classes" in said)
    assert said == "The 4 classes are the numbers among the labels: 1, 2, 3, 5. task.label_names would name them."


def test_a_number_that_only_the_eval_split_has_is_a_class_if_larger_ones_are(tmp_path):
    assert "there are 3 labels (1, 2, 5). " in refused(task("texts", tmp_path, ([1, 2, 5],), ([6],)))
    assert task("texts", tmp_path, ([0, 2],), ([0, 1, 2],)).labels == ["0", "1", "2"]
    assert "there are 2 labels (0, 1)" in refused(task("texts", tmp_path, ([0, 1],), ([0, 2],)))


@BOTH
def test_a_number_among_names_is_the_class_that_it_names_and_never_its_place(tmp_path, kind):
    found = task(kind, tmp_path, (["1", "02", "3", "other"],), ([1, 2, 3],))
    assert scored_as(found, "eval") == ["1", "02", "3"]  # as a csv file has them, if all of its labels are numbers
    said = refused(task(kind, tmp_path, (["ham", "spam"],), ([0, 1],)))
    assert said.startswith("Row 0 of the eval split has the label 0; there are 2 labels (ham, spam). ")


def test_a_month_is_no_number(tmp_path):
    found = task("texts", tmp_path, (["1.5", "2024_05"],), (["1"],), problem_type="regression")
    assert refused(found).startswith("Row 1 of the train split has '2024_05' in column 'label', which is not a number.")


def test_metrics_count_only_classes_that_occur(tmp_path):
    found = task("texts", tmp_path, ([1, 2, 3, 4, 5],), ([1, 2],))
    right = [{"label": number, "prediction": number} for number in found.datasets()["train"].column("label").tolist()]
    assert found.metrics(right)["macro_f1"] == 1


@pytest.mark.parametrize("labels", [[*range(1000, 1200)], [f"id {number}" for number in range(200)]])
def test_a_column_of_ids_is_refused_as_labels(tmp_path, labels):
    said = refused(task("texts", tmp_path, (labels,), (labels[:2],)))
    assert said.startswith("The train split has 200 different labels in 200 rows, as a column of ids has. Name the column")


def test_classes_without_texts_cannot_be_balanced(tmp_path):
    found = task("texts", tmp_path, (["bad", "good"], ["bad", "good", "new"]), (["bad"], ["bad"]), class_weights="balanced")
    with pytest.raises(DataError, match=r"^task.class_weights=balanced: no text of the train split has the label 'new'\."):
        _ = found._weights


def test_lists_of_labels_are_asked_for_all_of_them_in_the_card(tmp_path, write_rows):
    path = str(write_rows("rows.jsonl", [{"text": f"text {i}", "labels": ["a", "b"][: 1 + i % 2]} for i in range(8)]))
    found = SequenceClassification(**NEW, data_files={"train": path, "eval": path})
    assert found.transformers_pipeline()["top_k"] is None


def of_csv(tmp_path: Path, text: str, **fields: Any) -> SequenceClassification:
    (tmp_path / "rows.csv").write_text(text, encoding="utf-8")
    files = dict.fromkeys(("train", "eval"), str(tmp_path / "rows.csv"))
    return SequenceClassification(**NEW, dataset="csv", data_files=files, **fields)


@pytest.mark.parametrize("word", ["NA", "null", "None", "nan", "N/A"])
def test_a_csv_may_have_a_class_and_a_text_that_pandas_takes_for_missing(tmp_path, word):
    found = of_csv(tmp_path, f"text,label\ngood thing,yes\n{word},{word}\n")
    assert found.labels == sorted(["yes", word])
    assert scored_as(found, "train") == ["yes", word]
    assert list(found.rows["train"]["text"]) == ["good thing", word]


@pytest.mark.parametrize("labels", ["yes,no,,no", "1,0,,0", "yes,no, ,no"])
def test_an_empty_label_of_a_csv_names_its_row(tmp_path, labels):
    rows = "".join(f"text {place},{label}\n" for place, label in enumerate(labels.split(",")))
    said = refused(of_csv(tmp_path, f"text,label\n{rows}"))
    assert said == "Row 2 of the train split has no label in column 'label'. Fill it in, or remove the row."


def test_an_na_among_numbers_is_refused_and_not_made_a_class(tmp_path):
    said = refused(of_csv(tmp_path, "text,label\na,1\nb,0\nc,NA\nd,1\n"))
    assert said.startswith("Row 2 of the train split has the label 'NA', but other rows have numbers. Correct the row, or list")
    said = refused(of_csv(tmp_path, "text,label\na,1\nb,0\nc,NA\nd,1\n", label_names=["no", "yes"]))
    assert said.startswith("Row 2 of the train split has the label 'NA'; there are 2 labels, 0 to 1 (no, yes). ")


def test_an_empty_text_of_a_csv_names_its_row(tmp_path):
    said = refused(of_csv(tmp_path, "text,label\na,1\n,0\n"))
    assert said.startswith("The train split has an empty text in column 'text' at row 1. Remove these rows,")


@BOTH
def test_true_and_false_are_two_classes(tmp_path, kind):
    found = task(kind, tmp_path, ([True, False, False],), ([False, True],))
    assert scored_as(found, "train") == ["true", "false", "false"] and scored_as(found, "eval") == ["false", "true"]
    renamed = task("texts", tmp_path, ([True, False],), ([False],), label_names=["ham", "spam"])
    assert scored_as(renamed, "train") == ["spam", "ham"]


@pytest.mark.parametrize("kind", [SequenceClassification, TokenClassification, ImageClassification])
def test_a_class_name_listed_twice_is_refused(kind):
    problems = kind(label_names=["spam", "ham", "ham"]).validate()
    assert sum(problem.startswith("task.label_names lists 'ham' 2 times. ") for problem in problems) == 1


def test_classes_that_differ_only_in_case_or_white_space_get_a_notice():
    (said,) = Classes(["Ham", "ham ", "spam"], None, are_labels=True).notices()
    assert said.startswith("The classes 'Ham' and 'ham ' differ only in case or white space.")
    assert Classes(["ham", "spam"], None, are_labels=True).notices() == []


@pytest.mark.parametrize(
    ("metric", "labels", "computed"),
    [("accuracy", [0.5, 1.0, 2.5], "rmse, mae, pearson, spearman"), ("rmse", ["a", "b", "c"], "accuracy, macro_f1, mcc")],
)
def test_a_metric_that_these_labels_do_not_have_is_refused_before_a_model_is_built(tmp_path, metric, labels, computed):
    files = {f"task.data_files.{part}": parquet(tmp_path / f"{part}.parquet", labels) for part in ("train", "eval")}
    fields = {"task.model": None, "task.model_config": CONFIG, "task.vocab_size": 100, "eval.metric": metric}
    recipe = Recipe.load("text_classification", {**files, **fields})
    recipe.validate()  # without the data, either may be right
    with pytest.raises(ConfigError, match=rf"eval\.metric='{metric}' is not computed .* It computes: loss, {computed}\."):
        build(recipe, Progress())

"""Token classification end to end: own files, what is exported, and what a user gets for mistakes."""

import json
from pathlib import Path

import pytest
from transformers import pipeline

from hftune import ConfigError, DataError, Recipe, load_model, train
from hftune.build import load_datasets
from hftune.data.demo import entities

TAGS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC", "B-ORG", "I-ORG"]
TEXT = "maria rossi thanked bank of lima ."


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"{path}"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    return {split: write(folder / f"{split}.jsonl", entities(split)[:200]) for split in ("train", "eval")}


@pytest.fixture(scope="module")
def done(files, tmp_path_factory):
    """A run on own files whose columns and tags nobody has named, long enough to find some names."""
    recipe = Recipe.load(
        "token_classification_demo",
        *(f"task.data_files.{split}={path}" for split, path in files.items()),
        f"output_dir={tmp_path_factory.mktemp('out')}",
        "train.epochs=8",
    )
    return train(recipe)


def test_own_files_need_no_names_of_columns_or_tags(done):
    said = json.loads((done.output_dir / "run.json").read_text())["notices"]
    assert "task.tags_column=ner_tags, chosen from the columns tokens, ner_tags." in said
    assert done.metrics["f1"] > 0.3 and set(done.metrics["per_class"]) == {"PER", "LOC", "ORG"}
    first, *_ = map(json.loads, (done.output_dir / "predictions.jsonl").read_text().splitlines())
    assert {"text", "tagged", "predicted", "error"} <= set(first)


def test_pipeline_of_transformers_finds_the_same_entities(done):
    (ours,) = load_model(done.output_dir, "cpu").predict([TEXT])
    theirs = pipeline(model=str(done.model_dir), **Recipe.load("token_classification_demo").task.transformers_pipeline())(TEXT)
    assert [(found["entity_group"], found["start"], found["end"]) for found in theirs] == [
        (found["type"], found["start"], found["end"]) for found in ours["entities"]
    ]
    assert ours["entities"]


def test_words_may_come_as_a_list(done):
    model = load_model(done.output_dir, "cpu")
    of_text, of_words = (model.predict([value])[0]["entities"] for value in (TEXT, TEXT.split()))
    assert of_text == of_words


def test_tags_in_another_order_are_trained_as_the_same_tags(files, tmp_path):
    words = [f"task.data_files.{split}={path}" for split, path in files.items()]
    found = []
    for names in (TAGS, TAGS[::-1]):
        recipe = Recipe.load("token_classification_demo", *words, f"task.label_names=[{','.join(names)}]")
        sample = load_datasets(recipe)["train"][3]
        found.append([None if number < 0 else names[number] for number in sample["labels"].tolist()])
    assert found[0] == found[1] and len(set(found[0])) > 2


@pytest.mark.parametrize(
    ("split", "row", "words", "message"),
    [
        ("eval", {"tokens": ["a"], "ner_tags": ["B-GPE"]}, [], "Row 0 of the eval split has the label 'B-GPE'; there are 7"),
        ("train", {"tokens": ["a"], "ner_tags": ["O"]}, ["task.tags_column=tags"], "task.tags_column=tags is not a column"),
    ],
)
def test_mistakes_in_the_data_are_named(files, tmp_path, split, row, words, message):
    good = map(json.loads, Path(files[split]).read_text().splitlines())
    path = write(tmp_path / "bad.jsonl", [row, *good])
    given = [f"task.data_files.{name}={path if name == split else files[name]}" for name in files]
    with pytest.raises((DataError, ConfigError), match=message):
        load_datasets(Recipe.load("token_classification_demo", *given, *words))

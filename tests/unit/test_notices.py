"""What is said of the data before training, and counted for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hftune import Recipe
from hftune.data import notices

REVIEWS = [{"text": f"the food was {word} on day {day}", "label": day % 2} for day in range(40) for word in ("good", "bad")]
TINY_BERT = (
    "task.model_config={model_type: bert, hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 16}"
)


@pytest.fixture
def texts(tmp_path):
    """Return a function that gives what is said of these rows: of reviews, articles, or lines, by the recipe's name."""

    def said(recipe: str, train: list[Any], evaluation: list[Any], *words: str) -> list[str]:
        for part, rows in (("train", train), ("eval", evaluation)):
            (tmp_path / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        files = f"task.data_files={{train: {tmp_path}/train.jsonl, eval: {tmp_path}/eval.jsonl}}"
        task = Recipe.load(recipe, "task.dataset=json", files, *words).task
        return task.notices(task.datasets(), None)

    return said


def of_reviews(texts, train, evaluation, *words):
    return texts("yelp_demo", train, evaluation, TINY_BERT, "task.vocab_size=100", *words)


def test_reviews_of_both_parts_are_counted_whatever_their_labels(texts):
    evaluation = [*REVIEWS[:3], {**REVIEWS[4], "label": 1}, {"text": "quite new", "label": 0}]
    assert of_reviews(texts, REVIEWS, evaluation) == [
        "4 of the 5 rows in the eval split are also in the train split: scores will look better than they are."
    ]
    assert of_reviews(texts, REVIEWS, evaluation[-1:]) == []


def test_only_rows_that_are_trained_on_count_as_shared(texts):
    said = of_reviews(texts, REVIEWS, REVIEWS, "task.max_train_samples=20", "task.max_eval_samples=30")
    assert said[:2] == [
        "Training on 20 of 80 rows: task.max_train_samples=20; null takes all.",
        "Evaluating on 30 of 80 rows: task.max_eval_samples=30; null takes all.",
    ]
    # Both are the beginning of the same shuffle.
    assert said[2:] == [
        "20 of the 30 rows in the eval split are also in the train split: scores will look better than they are."
    ]


def test_a_split_that_files_do_not_have_is_said_to_be_unused(texts):
    said = of_reviews(texts, REVIEWS[:40], REVIEWS[40:], "task.eval_split=validation", "task.train_split=train")
    assert said == ["No effect: task.eval_split=validation. The splits come from task.data_files."]


def test_a_split_that_a_function_does_not_have_is_said_to_be_unused():
    task = Recipe.load("mnist_demo", "task.train_split=training", "task.dataset=tests.support.tasks:few_digits").task
    said = task.notices(task.datasets(), None)
    assert said[0] == (
        "No effect: task.train_split=training. The splits come from task.dataset=tests.support.tasks:few_digits."
    )


def test_blocks_of_both_parts_are_counted(texts):
    lines = [{"text": " ".join(f"w{(line * 7 + place) % 50}" for place in range(12))} for line in range(30)]
    words = ("task.block_length=10", "task.max_eval_samples=5")
    said = texts("wikitext2_demo", lines, lines, *words)
    assert said[1:2] == [
        "5 of the 5 blocks in the eval split are also in the train split: scores will look better than they are."
    ]
    assert said[0].startswith("Evaluating on 5 of ") and said[0].endswith(" blocks: task.max_eval_samples=5; null takes all.")


def test_arrays_are_the_same_to_the_last_byte():
    arrays = np.random.RandomState(0).randint(0, 9, (6, 4, 4, 1)).astype(np.uint8)
    other = arrays[:3].copy()
    other[2, 3, 3, 0] += 1
    assert [said[:31] for said in notices.shared({"train": arrays, "eval": other, "test": arrays[:1]}, "images")] == [
        "2 of the 3 images in the eval s",
        "1 of the 1 images in the test s",
    ]


def write_pictures(folder: Path, seeds: dict[str, list[int]]) -> None:
    for split, some in seeds.items():
        (folder / split).mkdir()
        for place, seed in enumerate(some):
            pixels = np.random.RandomState(seed).randint(0, 256, (16, 16, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(folder / split / f"{place}.bmp")  # all of one size


def test_pictures_of_both_parts_are_counted_whatever_their_names(tmp_path):
    write_pictures(tmp_path, {"train": [0, 1, 2, 3], "test": [3, 9, 0]})
    task = Recipe.load(
        "restoration_demo", "task.dataset=imagefolder", f"task.data_dir={tmp_path}", "task.crop=16", "task.eval_split=test"
    ).task
    said = task.notices(task.datasets(), task.build_model())
    assert "2 of the 3 images in the eval split are also in the train split: scores will look better than they are." in said


def test_images_that_no_other_has_the_size_of_are_in_one_split_only():
    files = {
        split: [{"bytes": content, "path": None} for content in own]
        for split, own in (("train", [b"a", b"bbb", b"cccc"]), ("eval", [b"a", b"dddddd", b"eeeeeee"]))
    }
    assert notices.shared_files(files) == [
        "1 of the 3 images in the eval split are also in the train split: scores will look better than they are."
    ]


def test_many_rows_to_compare_with_each_other_are_said_to_take_long(texts, monkeypatch):
    rows = [{"anchor": f"a text {number}", "positive": f"the text {number}"} for number in range(6)]
    words = ("task.model=null", TINY_BERT, "task.max_length=32")
    assert not any("Each evaluation compares" in sentence for sentence in texts("embeddings", rows, rows, *words))
    monkeypatch.setattr("hftune.tasks.embeddings.MANY", 5)
    said = "Each evaluation compares 6 anchors with 6 documents, on the main process. If that is slow, lower "
    assert any(sentence.startswith(said) for sentence in texts("embeddings", rows, rows, *words))

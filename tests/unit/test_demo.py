"""The demo data: rows in files that nobody changes by accident, and images that are drawn the same each time."""

import hashlib
import json

import pytest

from hftune.data import demo
from hftune.data.rows import load_split
from hftune.data.sources import Source
from hftune.errors import DataError

FILES = {
    ("articles", "train"): (3000, "dee8489cba837e70"),
    ("articles", "eval"): (300, "8a7b8ada81917c6e"),
    ("chats", "train"): (9600, "ad87b8659213cc6c"),
    ("chats", "eval"): (96, "9a5cf9f522edd562"),
    ("entities", "train"): (2500, "ddddf0a9cde425e0"),
    ("entities", "eval"): (500, "91e30f6f65e876f5"),
    ("facts", "train"): (2000, "95f30db6552b8ce8"),
    ("facts", "eval"): (300, "2d9043c634a5dc3a"),
    ("json_chats", "train"): (6400, "4029aa9bd9315b21"),
    ("json_chats", "eval"): (96, "e342b90b059d6366"),
    ("paragraphs", "train"): (4500, "ea79df7eef7a7f87"),
    ("paragraphs", "eval"): (450, "e9135a19d6a3b48e"),
    ("paragraphs", "test"): (450, "92b215f6e306a0b3"),
    ("questions", "train"): (4000, "d9709f778e7a3b11"),
    ("questions", "eval"): (500, "7b3bcc27c3b07cfe"),
    ("quizzes", "train"): (1917, "cc73c405362931a3"),
    ("quizzes", "eval"): (285, "bbf2815714d616a4"),
    ("replies", "train"): (4000, "cf8114327e92d04b"),
    ("replies", "eval"): (600, "c9432dc7c1a6bf3a"),
    ("reviews", "train"): (4000, "18c1e327dec3e40d"),
    ("reviews", "eval"): (800, "5977c51d29f125e5"),
    ("rivals", "train"): (1917, "9b2e4539c9b4d74b"),
    ("rivals", "eval"): (285, "fa6ca03db217852c"),
    ("solutions", "train"): (1600, "599ab3f89bb3cb0e"),
    ("solutions", "eval"): (200, "95b891cc19e20fe9"),
    ("spoken", "train"): (4000, "0cc96b624e660f19"),
    ("spoken", "eval"): (400, "a7e5431aea5e9e6a"),
    ("tickets", "train"): (3000, "94d91dd31c88baf6"),
    ("tickets", "eval"): (600, "2d18fd2cfb2424bd"),
}


@pytest.mark.parametrize(("name", "split"), FILES)
def test_the_rows_of_a_file_are_those_of_all_figures_in_the_docs(name, split):
    rows = getattr(demo, name)(split)
    assert (len(rows), hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]) == FILES[name, split]


@pytest.mark.parametrize("name", sorted({name for name, _ in FILES} - {"solutions"}))  # of which few are possible
def test_no_row_is_in_two_splits(name):
    splits = [{json.dumps(row) for row in getattr(demo, name)(split)} for known, split in FILES if known == name]
    headings = {json.dumps(row) for row in demo.paragraphs("eval") if len(row["text"]) < 20}
    assert not set.intersection(*splits) - headings


@pytest.mark.parametrize("name", ["digits", "pictures", "shapes"])
def test_images_are_drawn_the_same_each_time_and_differ_between_the_splits(name):
    first, again, others = (
        [row["image"].tobytes() for row in getattr(demo, name)(split, 6)] for split in ("train", "train", "eval")
    )
    assert first == again and not {*first} & {*others}


@pytest.mark.parametrize("name", ["reviews", "digits"])
def test_a_split_that_a_demo_does_not_have_is_refused_in_words(name):
    with pytest.raises(DataError, match=r"This demo has no test split\. Set task\.test_split to null\."):
        load_split(Source(f"hftune.data.demo:{name}"), "test")

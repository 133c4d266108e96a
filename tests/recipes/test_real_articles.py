"""The jieba tokenizer on real articles: as jieba cuts them, and with the ids of Lowin's class under transformers 4."""

import json
import os
from functools import cache
from pathlib import Path

import jieba
import pytest

from hftune.data.jieba_words import segment
from hftune.data.vocabulary import train_vocabulary
from tests.support.lowin import assert_same_ids, prepare_jieba, write


@pytest.fixture(scope="module", autouse=True)
def reference():
    prepare_jieba()


@cache
def shared_texts():
    folder = Path(os.environ.get("HFTUNE_TEST_DATA", Path(__file__).parents[3] / "shared" / "data")) / "chinese_title"
    if not folder.is_dir():
        pytest.skip(
            "the Chinese articles are not on this machine (set HFTUNE_TEST_DATA to the folder that holds chinese_title/)"
        )
    articles, abstracts = (
        [json.loads(line)["content"] for line in (folder / name).read_text(encoding="utf-8").splitlines()]
        for name in ("lctt_test.jsonl", "csl_dev.jsonl")
    )
    return folder, articles[:300] + abstracts[:1000]


@pytest.mark.parametrize("whose", ["trained", "characters"])
def test_ids_are_those_of_the_authors_class_on_real_articles(tmp_path, whose):
    folder, texts = shared_texts()
    vocab_file = folder / "vocab.txt" if whose == "characters" else write(train_vocabulary(texts, 20_000), tmp_path)
    assert_same_ids(vocab_file, texts)


def test_words_are_those_of_jieba_on_real_articles():
    _, texts = shared_texts()
    assert [text for text in texts if segment(text) != jieba.lcut(text, HMM=False)] == []

# ruff: noqa: RUF001 - Chinese punctuation and look-alikes are what is tested
"""The jieba tokenizer gives the ids of Lowin's class under transformers 4, everywhere, and refuses to be another tokenizer."""

import json
import pickle
import random
import re
from functools import cache

import datasets
import jieba
import pytest
from datasets.fingerprint import Hasher
from transformers import AutoTokenizer, BertTokenizer

from hftune import ConfigError
from hftune.data import jieba_tokenizer
from hftune.data.jieba_tokenizer import SPECIAL_TOKENS, JiebaTokenizer, check_tokenizer
from hftune.data.jieba_words import segment
from hftune.data.tokenized import tokenizer_key
from hftune.data.vocabulary import train_vocabulary
from tests.support.lowin import assert_same_ids, prepare_jieba, write

SUBJECTS = ["我们", "研究人员", "北京大学", "Linux 内核", "GitHub 的开发者", "這個公司", "卡拉OK 厅", "iPhone4 用户", "他"]
VERBS = ["发布了", "讨论", "使用", "安装并测试", "不喜欢", "分析", "發現", "upgraded to"]
OBJECTS = [
    "新的操作系统",
    "3.14 版本",
    "文件系统 ext4",
    "天安门广场",
    "T恤",
    "機器學習模型",
    "AppImage",
    "2024年第1季度的GDP数据",
    "ΣΑΣ",
]
ENDS = ["。", "，", "！\r\n", "……\n", "；", ". ", " 😀 ", "（100%）", "、"]
ODD = [
    *[
        "[MASK]",
        "[SEP]",
        "[UNK]",
        "[mask]",
        "##ing",
        "C++",
        "C#",
        "étude",
        "Étude",
        "İstanbul",
        "ΟΔΥΣΣΕΥΣ",
        "ﬁn",
        "ß",
        "한국어",
        "ひらがな",
        "カタカナ",
        "привет",
        "①",
    ],
    *["\t", "\x0b", "\x1c", "\u3000", "\u200b", "\x00", "�", "�", "𠀀", "豈", " ", "  ", "\n", "\r\n"],
    *("𠮷野家", "👩‍💻", "AT&T", "x86_64", "foo-bar.baz", "5%", "A" * 101, "１２３", "ＯＫ"),
]
ADDED_BY_HAND = ["T恤", "t恤", "卡拉OK", "卡拉ok", "OK", "Linux", "##OK", "##Hub", "É", "σ", "ς", "ﬁ", "i\u0307", "\uf900"]


@pytest.fixture(scope="module", autouse=True)
def reference():
    prepare_jieba()


def sentences(count, seed=0):
    draw = random.Random(seed)
    return ["".join(draw.choice(part) for _ in range(3) for part in (SUBJECTS, VERBS, OBJECTS, ENDS)) for _ in range(count)]


def mixed_texts(count):
    """Texts with everything in them that jieba, WordPiece or transformers treat in a way of their own."""
    draw = random.Random(1)
    words = sorted(word for word, count in jieba.dt.FREQ.items() if count)
    sources = [words, ODD, OBJECTS, SUBJECTS, ENDS]
    return ["".join(draw.choice(draw.choice(sources)) for _ in range(draw.randrange(40))) for _ in range(count)]


@cache
def vocabulary():
    return train_vocabulary(sentences(200), 500)


@pytest.fixture
def tokenizer(tmp_path):
    return JiebaTokenizer(write(vocabulary(), tmp_path / "trained"))


@pytest.mark.parametrize("do_lower_case", [True, False])
def test_ids_are_those_of_the_authors_class_on_mixed_texts(tmp_path, do_lower_case):
    vocab_file = write(dict.fromkeys([*vocabulary(), *ADDED_BY_HAND]), tmp_path)
    assert_same_ids(vocab_file, ["", *sentences(200, seed=2), *mixed_texts(1500)], do_lower_case=do_lower_case)


def test_words_are_those_of_jieba_on_mixed_texts():
    texts = [text.replace("\ud83d", "") for text in mixed_texts(3000)]
    assert [text for text in texts if segment(text) != jieba.lcut(text, HMM=False)] == []


def test_batches_pairs_padding_truncation_and_tensors(tokenizer):
    short, long = "我们讨论T恤。", "研究人员分析機器學習模型，北京大学发布了3.14 版本"
    first, second = tokenizer.encode(short, add_special_tokens=False), tokenizer.encode(long, add_special_tokens=False)
    cls, sep, pad = tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.pad_token_id
    batch = tokenizer([short, long], padding=True, return_tensors="pt")
    assert batch["input_ids"].tolist() == [[cls, *first, sep, *[pad] * (len(second) - len(first))], [cls, *second, sep]]
    assert batch["attention_mask"].sum(1).tolist() == [len(first) + 2, len(second) + 2]
    pair = tokenizer(short, long, truncation="only_second", max_length=len(first) + 6)
    assert pair["input_ids"] == [cls, *first, sep, *second[:3], sep]
    assert pair["token_type_ids"] == [0] * (len(first) + 2) + [1] * 4
    assert tokenizer([(short, long)])["input_ids"] == tokenizer([short], [long])["input_ids"]
    assert tokenizer(["", short])["input_ids"] == [[cls, sep], [cls, *first, sep]]
    assert tokenizer([short, long], truncation=True, max_length=4)["input_ids"] == [
        [cls, *ids[:2], sep] for ids in (first, second)
    ]
    assert tokenizer([["我们", "讨论"]], is_split_into_words=True)["input_ids"] == [tokenizer.encode("我们讨论")]


def test_added_tokens_are_found_in_any_text(tokenizer):
    tokenizer.add_tokens(["<标题>"])
    tokenizer.add_special_tokens({"extra_special_tokens": ["<S>"]})
    tokens = tokenizer.tokenize("我们<标题>讨论<S>Linux[SEP]<s>")
    assert tokens[:5] == ["我们", "<标题>", "讨论", "<S>", "linux"] and tokens[5] == "[SEP]" and "<S>" not in tokens[6:]
    assert tokenizer.convert_tokens_to_ids(["<标题>", "<S>", "we-know-not"]) == [
        len(vocabulary()),
        len(vocabulary()) + 1,
        tokenizer.unk_token_id,
    ]


@pytest.mark.parametrize(
    "written, read",
    [
        ("我们 讨论 T恤。", "我们讨论t恤。"),
        ("在 Linux Mint 上安装 3.14 版本，GDP 100%", "在linux mint上安装3.14版本，gdp 100%"),
        ("升级 x86_64 内核 AppImage", "升级x86_64内核appimage"),
    ],
)
def test_decoded_text_has_spaces_only_between_latin_words_and_numbers(tmp_path, written, read):
    tokenizer = JiebaTokenizer(write(train_vocabulary([written, *sentences(100)], 500), tmp_path))
    ids = tokenizer(written)["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == read
    assert tokenizer.decode(ids) == f"[CLS]{read}[SEP]"
    assert tokenizer.batch_decode([ids, ids], skip_special_tokens=True) == [read, read]
    assert tokenizer.convert_tokens_to_string(["##ing", "北京", "##s", "2", "3"]) == "ing北京s 2 3"


def test_saved_and_loaded_again_it_is_the_same(tokenizer, tmp_path):
    tokenizer.add_tokens(["<标题>"])
    tokenizer.model_max_length = 4096
    tokenizer.save_pretrained(tmp_path / "saved")
    texts = ["我们<标题>讨论", *sentences(50)]
    for loaded in (AutoTokenizer.from_pretrained(tmp_path / "saved"), JiebaTokenizer.from_pretrained(tmp_path / "saved")):
        assert type(loaded) is JiebaTokenizer
        assert loaded(texts) == tokenizer(texts)
        assert loaded.model_max_length == 4096
        assert tokenizer_key(loaded) == tokenizer_key(tokenizer)
    (tmp_path / "saved").rename(tmp_path / "moved")
    moved = AutoTokenizer.from_pretrained(tmp_path / "moved")
    assert tokenizer_key(moved) == tokenizer_key(tokenizer)
    moved.save_pretrained(tmp_path / "again")
    saved, again = ((tmp_path / name / "tokenizer_config.json").read_text() for name in ("moved", "again"))
    assert saved == again


def test_tokenizer_that_does_not_segment_is_refused(tokenizer, tmp_path):
    """Lowin's checkpoints have a vocab.txt, and a config that names another class."""
    write(vocabulary(), tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "big_bird", "tokenizer_class": "BertTokenizer"}))
    assert JiebaTokenizer.from_pretrained(tmp_path)(sentences(20)) == tokenizer(sentences(20))
    word = next(word for word in vocabulary() if re.fullmatch("[\u4e00-\u9fff]{2,}", word))
    for silent in (AutoTokenizer.from_pretrained(tmp_path), BertTokenizer.from_pretrained(tmp_path)):
        with pytest.raises(ConfigError, match=f"of models/title, a BertTokenizer, splits '{word}' into .*Load it with hftune"):
            check_tokenizer(silent, "models/title")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("我们讨论北京", "has none of jieba's words.* train a vocabulary with `hftune vocab`"),
        (
            ["北京", "讨论", "我们", *"北京讨"],
            r"50% of the characters of its own words are \[UNK\] \(at most 25% is accepted\)",
        ),
        (None, "has no vocab.txt, which a jieba tokenizer needs"),
    ],
)
def test_folder_without_a_vocabulary_of_words_and_their_characters_is_refused(tmp_path, words, said):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "big_bird"}))
    if words:
        write([*SPECIAL_TOKENS, *words], tmp_path)
    with pytest.raises(ConfigError, match=said):
        JiebaTokenizer.from_pretrained(tmp_path)


def test_vocabulary_that_does_not_know_the_texts_is_refused(tokenizer):
    check_tokenizer(tokenizer, "models/title", sentences(20, seed=3))
    with pytest.raises(ConfigError, match=r"tokenizer of models/title, 100% of the tokens of these texts are \[UNK\]"):
        check_tokenizer(tokenizer, "models/title", ["鳳凰涅槃浴火"])


def test_use_changes_neither_its_pickle_nor_its_hash(tokenizer):
    before = pickle.dumps(tokenizer), Hasher.hash(tokenizer), tokenizer_key(tokenizer)
    ids = tokenizer(sentences(50), truncation=True, max_length=20, padding=True)
    assert tokenizer.cache
    assert (pickle.dumps(tokenizer), Hasher.hash(tokenizer), tokenizer_key(tokenizer)) == before
    assert pickle.loads(before[0])(sentences(50), truncation=True, max_length=20, padding=True) == ids


def test_two_processes_of_a_map_give_the_same_ids(tokenizer):
    rows = datasets.Dataset.from_dict({"text": sentences(100)})
    settings = {"truncation": True, "max_length": 64}
    mapped = rows.map(lambda batch: dict(tokenizer(batch["text"], **settings)), batched=True, batch_size=10, num_proc=2)
    assert mapped["input_ids"][:] == tokenizer(sentences(100), truncation=True, max_length=64)["input_ids"]


def test_pieces_in_memory_have_a_bound(tokenizer, monkeypatch):
    monkeypatch.setattr(jieba_tokenizer, "MAX_CACHED", 10)
    expected = [tokenizer.tokenize(f"word{number}") for number in range(100)]
    assert len(tokenizer.cache) <= 10
    assert [tokenizer.tokenize(f"word{number}") for number in range(100)] == expected


def test_vocabulary_begins_with_special_tokens_and_leaves_nothing_seen_unknown(tmp_path):
    texts = sentences(200)
    tokens = vocabulary()
    assert tuple(tokens[:5]) == SPECIAL_TOKENS
    assert len(tokens) == len(set(tokens)) <= 500
    assert {"北京大学", "操作系统", "linux", "##a", "a", "。"} <= set(tokens)
    tokenizer = JiebaTokenizer(write(tokens, tmp_path))
    assert not any(tokenizer.unk_token_id in ids for ids in tokenizer(texts)["input_ids"])


def test_vocabulary_keeps_the_most_frequent_words_and_ties_go_by_text():
    texts = ["北京", "北京", "北京", "上海", "上海", "南京", "广州", "天津", "重庆"]
    tokens = train_vocabulary(texts, 23)
    assert tokens[5:14] == ["京", "北", "上", "海", "南", "天", "州", "广", "庆"]  # at most half of the places
    assert tokens[14:] == ["北京", "上海", "南京", "天津", "广州", "重庆"]
    with pytest.raises(ConfigError, match="A vocabulary of 12 tokens has no room for words"):
        train_vocabulary(["北京"], 12)

"""The tokens of a language model's texts: those of its tokenizer, wherever the rows are, made once and a few at a time."""

import random
import threading
from collections import Counter

import datasets
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from hftune import DataError
from hftune.config import addresses
from hftune.data import blocks, cache, in_place
from hftune.data.blocks import token_stream
from hftune.data.byte_tokenizer import byte_tokenizer, train_bytes
from hftune.data.demo import reviews
from hftune.data.fetching import Blocks
from hftune.data.in_place import RowsInPlace, open_in_place
from hftune.data.jieba_tokenizer import SPECIAL_TOKENS, JiebaTokenizer
from hftune.data.pieces import pieces_of
from hftune.data.word_tokenizer import train_words, word_tokenizer
from hftune.models.pretrained import train_wordpiece, wordpiece_tokenizer
from hftune.tasks import LanguageModeling, text
from tests.support.runs import write_jsonl
from tests.support.servers import Web

RANDOM = random.Random(0)
PARTS = [*"aAé.,'1 \t\xa0\u3000好", "\n", "\n    ", " the", "  ", "<unk>", "[SEP]", "</s>", "'ll", "e\u0301"]
TEXTS = [row["text"] for row in reviews("train")][:60]
TEXTS += ["", "\n", " \r\n", "ends \n\n", *("".join(RANDOM.choices(PARTS, k=RANDOM.randint(0, 40))) for _ in range(240))]


def gpt2():
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")


def unigram():
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False)
    backend.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")


TOKENIZERS = {
    "GPT-2's bytes": gpt2,
    "hftune's bytes": lambda: byte_tokenizer(train_bytes(TEXTS, 500)),
    "WordPiece": lambda: wordpiece_tokenizer(train_wordpiece(TEXTS, 500)),
    "Unigram": unigram,
    "words": lambda: word_tokenizer(train_words(TEXTS, "words", 200), "words"),
    "basic_english": lambda: word_tokenizer(train_words(TEXTS, "basic_english", 200), "basic_english"),
}
WHOLE = {"Unigram", "basic_english"}
KINDS = ("jsonl", "parquet")


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
    for name, value in {"PIECE": 2**10, "REMOTE_PIECE": 2**11, "LOOKED_AT": 2**13, "AT_ONCE": 2**12}.items():
        monkeypatch.setattr(in_place, name, value)
    monkeypatch.setattr(blocks, "AT_ONCE", 70)
    monkeypatch.setattr(addresses, "FIRST_WAIT_S", 0.001)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def rows_of(texts):
    return [{"number": number, "text": one} for number, one in enumerate(texts)]


def written(folder, kind, texts=TEXTS):
    folder.mkdir(exist_ok=True)
    if kind == "jsonl":
        return write_jsonl(folder / "rows.jsonl", rows_of(texts))
    parquet.write_table(pa.Table.from_pylist(rows_of(texts)), folder / "rows.parquet", row_group_size=40)
    return folder / "rows.parquet"


def expected(tokenizer, is_words):
    lines = [one.rstrip("\r\n") + ("" if is_words else "\n") for one in TEXTS]
    ids = tokenizer(lines, add_special_tokens=False)["input_ids"]
    return [token for row in ids for token in (*row, *([tokenizer.eos_token_id] if is_words else []))]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokens_are_those_that_the_tokenizer_makes_wherever_the_rows_are(name, tmp_path):
    tokenizer = TOKENIZERS[name]()
    assert (pieces_of(tokenizer)._cut is None) == (name in WHOLE)
    tokens = expected(tokenizer, name in ("words", "basic_english"))
    found = {"converted": datasets.Dataset.from_list(rows_of(TEXTS))}
    for kind, format in zip(KINDS, ("json", "parquet"), strict=True):
        found[kind] = open_in_place(format, [str(written(tmp_path, kind))], {}, 0, Blocks(1e9))
    for rows in found.values():
        stream = token_stream(rows, "text", tokenizer, "train")
        assert stream.dtype == np.int32 and stream.tolist() == tokens


def test_tokens_of_a_slow_tokenizer_are_its_own(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIAL_TOKENS, "the", "好", *"aé.,'1"]))
    tokenizer = JiebaTokenizer(tmp_path / "vocab.txt")
    assert pieces_of(tokenizer) is None
    stream = token_stream(datasets.Dataset.from_list(rows_of(TEXTS)), "text", tokenizer, "train")
    assert stream.tolist() == expected(tokenizer, False)


def task(*paths, **fields):
    files = {"train": [*map(str, paths)]}
    default = {"data_files": files, "tokenizer": "words", "block_length": 16, "model_config": {"model_type": "gpt2"}}
    made = LanguageModeling(test_split=None, **{**default, **fields})
    made.evaluates = False
    return made


def streams(made):
    return {split: own.stream.tolist() for split, own in made.datasets().items()}


@pytest.mark.parametrize("kind", KINDS)
def test_large_files_are_read_in_place_to_the_same_tokens_and_once(tmp_path, monkeypatch, kind):
    path = written(tmp_path, kind)
    converted = task(path, eval_share=0.1)
    tokens = streams(converted)
    monkeypatch.setattr(text, "LARGE_BYTES", 0)
    large = task(path, eval_share=0.1)
    assert streams(large) == tokens and large.example_inputs() == converted.example_inputs()
    assert isinstance(converted.rows["train"], datasets.Dataset) and isinstance(large.rows["train"], RowsInPlace)
    assert isinstance(task(path, prepare="all").rows["train"], datasets.Dataset)
    monkeypatch.setattr(blocks, "ids_of", None)
    assert streams(task(path, eval_share=0.1)) == tokens


@pytest.mark.parametrize("kind", KINDS)
def test_rows_elsewhere_give_the_same_tokens_and_large_files_are_not_downloaded_as_a_whole(tmp_path, monkeypatch, capsys, kind):
    path = written(tmp_path, kind)
    tokens = streams(task(path))
    with Web({path.name: path.read_bytes()}) as web:
        web.cut_every = 5
        assert streams(task(f"{web.address}/{path.name}")) == tokens
        said = f"Downloading {web.address}/{path.name}, 0.0 MB ..."
        assert capsys.readouterr().out.splitlines() == [said]
        web.change(path.name, web.files[path.name])
        monkeypatch.setattr(text, "LARGE_BYTES", 0)
        large = task(f"{web.address}/{path.name}")
        assert streams(large) == tokens and isinstance(large.rows["train"], RowsInPlace)
        assert "Downloading" not in capsys.readouterr().out
        asked = len(web.asked)
        assert streams(task(f"{web.address}/{path.name}")) == tokens
        assert not any(body for *_, body in web.asked[asked:])  # nothing is fetched again
        web.has_ranges = False
        web.change(path.name, web.files[path.name])
        with pytest.raises(DataError, match=r"is sent as a whole each time\. task\.prepare=all downloads it once\.$"):
            task(f"{web.address}/{path.name}").datasets()
        assert streams(task(f"{web.address}/{path.name}", prepare="all")) == tokens
        assert said in capsys.readouterr().out


def test_parts_are_fetched_ahead_and_once_though_few_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "LARGE_BYTES", 0)
    path = written(tmp_path, "parquet", ["".join(RANDOM.choices("abcdefgh ", k=50)) for _ in range(1600)])
    gpt2().save_pretrained(tmp_path / "tokenizer")
    fields, threads, write = {"tokenizer": str(tmp_path / "tokenizer")}, set(), Blocks._write
    monkeypatch.setattr(Blocks, "_write", lambda *args: threads.add(threading.current_thread().name) or write(*args))
    with Web({path.name: path.read_bytes()}) as web:
        made = task(f"{web.address}/{path.name}", cache_gib=24_000 / 2**30, **fields)
        tokens = streams(made)
        groups = Counter(part for part in web.asked if part[3])
        kept = sum(file.stat().st_size for file in made.rows["train"].blocks.folder.glob("*.block"))
    assert tokens == streams(task(path, **fields))
    assert "fetch blocks" in threads and len(groups) >= 40 and max(groups.values()) == 1 and 0 < kept <= 24_000


def test_row_without_a_text_is_named_in_place_too(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "LARGE_BYTES", 0)
    rows = rows_of(TEXTS)
    good, rows[171]["text"] = write_jsonl(tmp_path / "good.jsonl", rows), None
    bad = write_jsonl(tmp_path / "bad.jsonl", rows)
    for fields in ({}, {"eval_share": 0.1}):
        with pytest.raises(DataError, match=r"^The train split has no text in column 'text' at row 171\. Remove these rows"):
            task(bad, **fields).datasets()
    entries = [{"data_files": str(good)}, {"data_files": str(bad)}]
    with pytest.raises(
        DataError, match=r"^The train \(bad\.jsonl\) split has no text in column 'text' at row 171 of bad\.jsonl\."
    ):
        task(data_files={}, datasets_=entries).datasets()
    with pytest.raises(DataError, match=r"^Column 'number' of the train split holds int64, not text\.$"):
        task(good, text_column="number").datasets()


def test_long_texts_are_tokenized_a_few_at_a_time(tmp_path, monkeypatch):
    sizes, real = [], blocks.ids_of
    monkeypatch.setattr(blocks, "AT_ONCE_BYTES", 5000)
    monkeypatch.setattr(blocks, "ids_of", lambda texts, tokenizer: sizes.append(sum(map(len, texts))) or real(texts, tokenizer))
    monkeypatch.setattr(text, "LARGE_BYTES", 0)
    texts = ["".join(RANDOM.choices("abcdefgh ", k=100)) * 10 for _ in range(50)]  # a parquet file compresses them
    for kind in KINDS:
        for prepare in ("auto", "all"):
            sizes.clear()
            task(written(tmp_path, kind, texts), prepare=prepare).datasets()
            assert len(sizes) >= 5 and max(sizes) <= 10_000


def test_progress_is_said_of_all_rows(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cache, "SAY_S", -1.0)
    monkeypatch.setattr(datasets, "are_progress_bars_disabled", lambda: True)
    token_stream(datasets.Dataset.from_list(rows_of(TEXTS)[:150]), "text", TOKENIZERS["words"](), "train")
    assert capsys.readouterr().out.splitlines() == [f"Tokenizing train: {done} of 150 rows" for done in (70, 140, 150)]

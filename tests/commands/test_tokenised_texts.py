"""Tokenisers and tokenised texts, shared by processes that know nothing of each other."""

import json
import multiprocessing
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from hftune.data.demo import articles
from hftune.data.jieba_tokenizer import JiebaTokenizer
from hftune.data.vocabulary import train_vocabulary
from tests.support.runs import environment

TITLES = [row["title"] for row in articles("train")[:200]]
PREPARE = """
import json, multiprocessing, sys
import numpy as np
import hftune.models.pretrained  # all that is heavy, before there are two
from hftune.data import tokenized
from hftune.data.cache import one_at_a_time
from hftune.tasks import SequenceClassification

calls, to_ids = [], tokenized.to_ids
def counting(*args, **kwargs):
    calls.append(1)
    return to_ids(*args, **kwargs)
tokenized.to_ids = counting

def prepare(results, together, dataset, data_files):
    task = SequenceClassification(model=None, vocab_size=200, max_train_samples=300, dataset=dataset, data_files=data_files)
    together.wait()
    with one_at_a_time(["test", dataset]):
        train = task.datasets()["train"]
    results.put([len(calls), isinstance(train.column("input_ids").flat, np.memmap), train[0]["input_ids"].tolist()])

fork = multiprocessing.get_context("fork")
results, together = fork.Queue(), fork.Barrier(2)
for kind, source in json.loads(sys.argv[1]).items():
    pair = [fork.Process(target=prepare, args=(results, together, *source)) for _ in range(2)]
    for process in pair:
        process.start()
    print(json.dumps([kind, [results.get(timeout=60) for _ in pair]]), flush=True)
    for process in pair:
        process.join()
"""
"""Prints what two processes that start together have done, for each source of texts. They are forks of an interpreter that has
imported everything, to save time; they share nothing that is made later."""


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    rows = [
        {"text": f"the food was {word} on day {day}", "label": label} for day in range(8) for label, word in enumerate("abc")
    ]
    files = {part: str(folder / f"{part}.json") for part in ("train", "eval")}
    for path in files.values():
        Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    sources = {"json": ("json", files), "function": ("hftune.data.demo:reviews", None)}
    env = environment(HF_DATASETS_CACHE=str(folder / "cache"))
    command = [sys.executable, "-c", PREPARE, json.dumps(sources)]
    output = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, timeout=240, check=True).stdout
    return dict(json.loads(line) for line in output.splitlines() if line.startswith('["'))


@pytest.mark.parametrize("kind", ["json", "function"])
def test_two_processes_that_start_together_tokenise_once(pairs, kind):
    pair = pairs[kind]
    assert sorted(calls for calls, _, _ in pair) == [0, 2]  # one process tokenised both parts, the other none
    assert all(is_mapped for _, is_mapped, _ in pair)
    assert pair[0][2] == pair[1][2]


@pytest.fixture
def tokenizer(tmp_path: Path) -> JiebaTokenizer:
    (tmp_path / "trained").mkdir()
    path = tmp_path / "trained" / "vocab.txt"
    path.write_text("".join(f"{token}\n" for token in train_vocabulary(TITLES, 500)), encoding="utf-8")
    return JiebaTokenizer(path)


REFUSED = """
import sys
from transformers import AutoTokenizer
for folder in sys.argv[1:]:
    try:
        print("not refused:", type(AutoTokenizer.from_pretrained(folder)))
    except ValueError as error:
        print(str(error).splitlines()[0])
"""


def test_without_this_module_transformers_refuses_a_saved_tokenizer(tokenizer, tmp_path):
    for kind in ("alone", "bert", "big_bird"):
        tokenizer.save_pretrained(tmp_path / kind)
        if kind != "alone":
            (tmp_path / kind / "config.json").write_text(json.dumps({"model_type": kind}))
    command = [sys.executable, "-c", REFUSED, *(str(tmp_path / kind) for kind in ("alone", "bert", "big_bird"))]
    said = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True).stdout.splitlines()
    assert said == ["Couldn't instantiate the backend tokenizer from one of: "] * 3


def test_a_spawned_process_gives_the_same_ids(tokenizer):
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        assert list(pool.map(tokenizer.encode, TITLES[:4], chunksize=2)) == [tokenizer.encode(text) for text in TITLES[:4]]

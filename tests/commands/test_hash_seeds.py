"""What is generated or trained is the same in processes that hash texts differently: sets have another order in each of them."""

import json
import subprocess
import sys

import pytest

from tests.support.runs import environment

DIGESTS = """
import hashlib, json
from hftune.data.demo import articles, reviews
from hftune.data.vocabulary import train_vocabulary
from hftune.tasks import SequenceClassification

def digest(value):
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()

task = SequenceClassification(model=None, dataset="hftune.data.demo:reviews", max_train_samples=500, vocab_size=400)
print(json.dumps({
    "reviews": digest([reviews(part)[:300] for part in ("train", "eval")]),
    "articles": digest([articles(part)[:60] for part in ("train", "eval")]),
    "vocabulary of words": digest(train_vocabulary([row["title"] for row in articles("train")[:500]], 500)),
    "tokenizer": digest(sorted(task.text_tokenizer.get_vocab().items())),
    "order of a set": digest(list({f"word {number}" for number in range(100)})),
}))
"""


@pytest.fixture(scope="module")
def digests() -> list[dict[str, str]]:
    """The digests in a process of each of two hash seeds."""
    command = [sys.executable, "-c", DIGESTS]
    processes = [
        subprocess.Popen(command, env=environment(PYTHONHASHSEED=seed), stdout=subprocess.PIPE, text=True) for seed in "12"
    ]
    return [json.loads(process.communicate(timeout=120)[0].splitlines()[-1]) for process in processes]


@pytest.mark.parametrize("what", ["reviews", "articles", "vocabulary of words", "tokenizer"])
def test_other_hash_seeds_change_nothing(digests, what):
    assert len({found[what] for found in digests}) == 1


def test_the_seeds_do_change_the_order_of_a_set(digests):
    assert len({found["order of a set"] for found in digests}) == 2

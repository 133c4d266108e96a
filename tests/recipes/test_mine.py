"""hftune mine: the negatives that sentence-transformers finds, on any processes and in any batches, and rows to train on."""

import json
import subprocess

import pytest
from datasets import Dataset
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import mine_hard_negatives

from hftune import Recipe, cli, train
from hftune.build import load_datasets
from hftune.commands import predict_rows
from hftune.data.demo import questions
from tests.support.predictions import untrained
from tests.support.runs import TINY, environment, warm_python
from tests.support.tasks import few_questions

WORDS = (
    *(word for word in TINY if "max_length" not in word),
    *("task.dataset=null", "eval.every=never", "task.vocab_size=300", "train.batch_size=25", "train.epochs=15", "seed=4"),
    *("task.prefixes={query: 'ask ', document: 'tell '}", "track.with=[]"),
)
CORPUS = [row["answer"] for row in questions("train")[200:260]]


def write(path, rows):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small trained model, pairs of which an anchor has two, and a corpus with texts of the pairs in it."""
    folder = tmp_path_factory.mktemp("mine")
    pairs = [{"query": row["query"], "answer": row["answer"]} for row in few_questions("train")]
    write(folder / "pairs.jsonl", pairs)
    train(Recipe.load("embeddings_demo", *WORDS, f"task.data_files.train={folder}/pairs.jsonl", f"output_dir={folder}/run"))
    own = [pair["answer"] for pair in pairs[:20]] + [pair["query"] for pair in pairs[:20]]
    write(folder / "corpus.jsonl", [{"passage": text, "id": index} for index, text in enumerate([*CORPUS, *own])])
    return folder


@pytest.fixture
def mine(folder, monkeypatch, capsys):
    """Returns a function that mines, and returns exit code, rows and what was said."""
    monkeypatch.chdir(folder)

    def run(*words, of="run", data="pairs.jsonl"):
        (folder / "out.jsonl").unlink(missing_ok=True)
        code = cli.main(["mine", of, "--data", data, "--output", "out.jsonl", *map(str, words)])
        said, path = capsys.readouterr(), folder / "out.jsonl"
        return code, list(map(json.loads, path.read_text().splitlines())) if path.is_file() else [], said.out + said.err

    return run


@pytest.mark.parametrize(
    ("words", "theirs"),
    [
        ((), {}),
        (("--negatives", 2, "--range-min", 3), {"num_negatives": 2, "range_min": 3}),
        (("--negatives", 4, "--range-max", 6), {"num_negatives": 4, "range_max": 6}),
        (("--max-score", 0.93, "--min-score", 0.9), {"max_score": 0.93, "min_score": 0.9, "range_max": 99}),
        (("--margin", 0.04, "--negatives", 1), {"absolute_margin": 0.04, "num_negatives": 1, "range_max": 99}),
        (("--relative-margin", 0.03, "--negatives", 1), {"relative_margin": 0.03, "num_negatives": 1, "range_max": 99}),
    ],
)
def test_negatives_are_those_of_sentence_transformers(mine, folder, words, theirs):
    code, rows, said = mine(*words)
    pairs = Dataset.from_json(str(folder / "pairs.jsonl"))
    model = SentenceTransformer(str(folder / "run" / "model"), device="cpu")
    expected = list(mine_hard_negatives(pairs, model, output_format="n-tuple", verbose=False, **theirs))
    assert code == 0 and 5 < len(rows) <= 100
    assert sorted(map(list, map(dict.values, rows))) == sorted(map(list, map(dict.values, expected)))
    assert f"{100 - len(rows)} pairs whose anchor has fewer than" in said


def test_rows_are_the_same_in_batches_of_any_size_and_on_two_processes(mine, folder):
    _, rows, _ = mine("--corpus", "corpus.jsonl")
    assert mine("--corpus", "corpus.jsonl", "--batch-size", 3)[1] == rows
    words = ["mine", "run", "--data", "pairs.jsonl", "--corpus", "corpus.jsonl", "--output", "two.jsonl", "--processes", "2"]
    done = subprocess.run(
        [warm_python(), "-m", "hftune.cli", *words], cwd=folder, env=environment(), capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert list(map(json.loads, (folder / "two.jsonl").read_text().splitlines())) == rows


def test_a_corpus_gives_negatives_and_no_text_of_an_anchors_own_is_one(mine, folder):
    _, rows, _ = mine("--corpus", "corpus.jsonl", "--negatives", 5)
    found = {row[f"negative_{index}"] for row in rows for index in range(1, 6)}
    assert found & {*CORPUS}
    positives = {}
    for pair in few_questions("train"):
        positives.setdefault(pair["query"], set()).add(pair["answer"])
    assert any(len(own) == 2 for own in positives.values())
    for row in rows:
        negatives = [row[f"negative_{index}"] for index in range(1, 6)]
        assert len({*negatives}) == 5 and not {row["query"], *positives[row["query"]]} & {*negatives}


@pytest.mark.parametrize("recipe", ["embeddings", "reranking"])
def test_rows_are_read_by_the_recipes_that_take_negatives(mine, folder, recipe):
    _, rows, _ = mine("--negatives", 2)
    files = (
        "task.dataset=null",
        f"task.data_files.train={folder}/out.jsonl",
        "eval.every=never",
        f"task.model={folder}/run/model",
    )
    asked = Recipe.load(recipe, *files, "task.negative_columns=[negative_1,negative_2]")
    assert len(load_datasets(asked)["train"]) == len(rows)


def test_the_corpus_is_compared_between_processes(mine, monkeypatch):
    found = []
    monkeypatch.setattr(predict_rows, "check_same", lambda group, own: found.append(own["data"]["--data pairs.jsonl"]))
    mine()
    mine("--corpus", "corpus.jsonl")
    assert len({*found}) == 2


def test_what_cannot_be_mined_is_refused(mine, folder):
    untrained("reranking_demo", folder / "reranking")
    write(folder / "blank.jsonl", [{"passage": "a"}, {"passage": " "}])
    write(folder / "numbers.jsonl", [{"id": 1}])
    assert "hftune mine is for runs of the recipe embeddings, not for Reranking." in mine(of="reranking")[2]
    assert "--corpus blank.jsonl has an empty text in column 'passage' at row 1" in mine("--corpus", "blank.jsonl")[2]
    assert "--corpus numbers.jsonl has no column of texts. It has: id." in mine("--corpus", "numbers.jsonl")[2]
    for option in ("--margin", "--relative-margin", "--max-score", "--min-score"):
        assert f"{option} nan must be a finite number." in mine(option, "nan")[2]
    assert "--margin inf must be a finite number." in mine("--margin", "inf")[2]
    said = mine("--map", "positive=query")[2]
    assert "--data pairs.jsonl: column 'query' would be both anchor and positive. Name the right ones: --map" in said
    code, rows, said = mine("--max-score", -0.9)
    assert (code, rows) == (2, []) and "There is no row to write: 100 pairs whose anchor has fewer than 3 negatives." in said

"""Samples made when their step comes: the same training, to the last bit, as when all are made first."""

import json
import pickle
import sqlite3

import datasets
import numpy as np
import pytest

from hftune import ConfigError, DataError, Recipe, batch_plan, cli
from hftune.batch_plan import spread
from hftune.data import as_needed
from hftune.data.as_needed import TextsAsNeeded
from hftune.data.demo import chats, entities, reviews
from hftune.data.digest import content_digest, row_hashes
from hftune.evaluation import plan_evaluation
from hftune.planning import plan
from hftune.planning.plan import make_plan
from hftune.replay.audit import audit
from hftune.replay.engine import Replayer
from hftune.replay.history import History
from hftune.replay.tolerance import difference
from hftune.tasks import text
from tests.support.runs import SMALL, Group, three_files, train_on, write_jsonl

OWN = (
    *SMALL,
    "task.dataset=null",
    "task.max_train_samples=null",
    "task.max_eval_samples=null",
    "train.epochs=2",
    "task.eval_share=0.2",
)


OTHERS = ("token_classification_demo", "seq2seq_demo", "bigbird_demo", "embeddings_demo", "chats_demo")


STOPS = {"stopped": (5, 0), "skipping, stopped": (4, 0)}
SHARDED = ("fsdp all", "fsdp as_needed", "fsdp skipping")
BAD = [7, 20, 21, 98]


def with_bad_rows(rows):
    wrong = [{"text": "  "}, {"label": 9}, {"text": None}, {"label": -1}]
    changes = dict(zip(BAD, wrong, strict=True))
    return [{**row, **changes.get(index, {})} for index, row in enumerate(rows)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    rows = reviews("train")[:100]
    whole, many, few = three_files(folder, rows)
    mixture = f"task.datasets=[{{data_files: {many}, weight: 0.5}}, {{data_files: {few}, weight: 2}}]"
    files = f"task.data_files.train={whole}"
    bad = write_jsonl(folder / "bad.jsonl", with_bad_rows(rows))
    skipping = (*OWN, f"task.data_files={{train: {bad}, eval: {few}}}", "task.eval_share=null", "task.bad_rows=skip")
    wide = {"files as_needed": (*OWN, files, "task.prepare=as_needed"), "skipping": skipping}
    found = {(name, 4): run for name, run in train_on(4, wide, folder).items()}
    for size in (1, 2):
        jobs = {
            f"{data} {when}": (*OWN, words, f"task.prepare={when}")
            for data, words in {"files": files, "mixture": mixture}.items()
            for when in ("all", "as_needed")
        }
        short = ("train.max_steps=2", "task.max_eval_samples=8", "train.log_every=1", "task.max_train_samples=200")
        for demo in OTHERS if size == 2 else ():
            for when in ("all", "as_needed"):
                jobs[f"{demo} {when}"] = (f"recipe={demo}", *short, f"task.prepare={when}")
        jobs["skipping"] = skipping
        if size == 2:
            jobs |= {f"fsdp {when}": (*OWN, files, f"task.prepare={when}") for when in ("all", "as_needed")}
            jobs["fsdp skipping"] = skipping
        jobs["skipping, stopped"] = skipping
        jobs["skipping, resumed"] = (*skipping, f"output_dir={folder / f'skipping, stopped-on-{size}'}")
        jobs["stopped"] = (*OWN, files, "task.prepare=as_needed")
        jobs["resumed"] = (*jobs["stopped"], f"output_dir={folder / f'stopped-on-{size}'}")
        found |= {(name, size): run for name, run in train_on(size, jobs, folder, stops=STOPS, sharded=SHARDED).items()}
    return found


def outcome(run):
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    logged = [{name: value for name, value in line.items() if not name.startswith("perf/")} for line in lines]
    return logged, (run.folder / "model_last" / "model.safetensors").read_bytes(), run.predictions


@pytest.mark.parametrize(
    ("data", "size"),
    [("files", 1), ("files", 2), ("fsdp", 2), ("mixture", 1), ("mixture", 2), *((demo, 2) for demo in OTHERS)],
)
def test_losses_weights_and_predictions_are_those_of_samples_made_first(runs, data, size):
    assert outcome(runs[f"{data} as_needed", size]) == outcome(runs[f"{data} all", size])


@pytest.mark.parametrize("size", [1, 2])
def test_interrupted_run_goes_on_bit_equal(runs, size):
    assert outcome(runs["resumed", size]) == outcome(runs["files as_needed", size])


def test_losses_do_not_depend_on_processes(runs):
    others = [("files as_needed", 4), ("fsdp as_needed", 2), ("skipping", 4), ("fsdp skipping", 2)]
    for name, size in [*((name, 2) for name in ("files as_needed", "mixture as_needed", "skipping")), *others]:
        alone = runs[name.replace("fsdp as", "files as").removeprefix("fsdp "), 1]
        assert runs[name, size].logged("train/loss") == pytest.approx(alone.logged("train/loss"), rel=1e-5)


@pytest.mark.parametrize(("way", "size"), [("", 1), ("", 2), ("", 4), ("fsdp ", 2)])
def test_bad_rows_that_are_skipped_are_left_out_of_their_steps_and_of_nothing_else(runs, way, size):
    run = runs[f"{way}skipping", size]
    lines = [json.loads(line) for line in (run.folder / "ledger.jsonl").read_text().splitlines()]
    left_out = [line["left_out"] for line in lines if "left_out" in line]
    assert sorted(number for numbers in left_out for number in numbers) == sorted(2 * BAD)  # of two epochs
    assert sum(line["num_samples"] for line in lines if "digest" in line) == 2 * (100 - len(BAD))
    found = audit(run.folder)
    assert not found.problems and (found.whole_epochs, found.left_out) == (2, 2 * len(BAD))
    if not way and size < 4:
        assert outcome(runs["skipping, resumed", size]) == outcome(run)


def test_step_with_a_row_left_out_is_replayed(runs):
    history = History.open(runs["skipping", 1].folder)
    step = next(number for number, line in history.ledger.steps.items() if "left_out" in line)
    with Replayer(history, step) as replayer:
        *_, last = replayer.advance(step)
    found = difference(last, history.ledger.steps[step])
    assert last.step == step and found.same_samples and found.loss == found.grad_norm == 0


@pytest.mark.parametrize("size", [1, 2])
def test_bad_row_is_named_in_one_sentence(tmp_path, size):
    rows = reviews("train")[:100]
    rows[70]["text"] = "  "
    words = (*OWN, f"task.data_files.train={write_jsonl(tmp_path / 'rows.jsonl', rows)}", f"output_dir={tmp_path / 'run'}")
    group = Group(size, [["yelp_demo", [*words, "task.prepare=as_needed"], None, {}]], tmp_path / "log", as_typed=True)
    assert 2 in (codes := set(group.wait())) and codes <= {2, -9}  # a launcher ends the other one
    said = (tmp_path / "log").read_text()
    assert said.count("has an empty text in column 'text' at row 70") == 1 and "Traceback" not in said


def test_nothing_is_made_before_it_is_used_and_nothing_twice(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", reviews("train")[:100])
    words = (*OWN, f"task.data_files.train={path}", "task.prepare=as_needed", f"output_dir={tmp_path / 'run'}")
    task = Recipe.load("yelp_demo", *words).task
    made, texts = [], task.datasets()["train"]
    real = texts._make
    texts._make = lambda indices: made.extend(indices) or real(indices)
    texts.path.unlink(missing_ok=True)
    assert isinstance(texts, TextsAsNeeded) and len(texts) == len(task.rows["train"])
    lengths = task.lengths(texts)[np.array([7, 3])]
    assert lengths.tolist() == [len(texts[7]["input_ids"]), len(texts[3]["input_ids"])] and sorted(made) == [3, 7]
    other = Recipe.load("yelp_demo", *words).task.datasets()["train"]  # another process
    other._make = None
    other = pickle.loads(pickle.dumps(other))  # as the workers of a loader get it
    assert other[7]["input_ids"].tolist() == texts[7]["input_ids"].tolist()


def test_plan_tokenizes_some_rows_only_and_says_so(tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "rows.jsonl", reviews("train")[:100])
    words = (*OWN, f"task.data_files.train={path}", "task.model_config.num_hidden_layers=1", f"output_dir={tmp_path / 'run'}")
    first = make_plan(Recipe.load("yelp_demo", *words, "task.prepare=all"))
    same = make_plan(Recipe.load("yelp_demo", *words, "task.prepare=as_needed"))  # of which all rows are looked at
    assert (same.data, same.work, same.memory) == (first.data, first.work, first.memory)
    monkeypatch.setattr(plan, "known_lengths", lambda lengths: batch_plan.known_lengths(lengths, 10))
    made, real = set(), TextsAsNeeded.__getitems__
    monkeypatch.setattr(TextsAsNeeded, "__getitems__", lambda self, indices: made.update(indices) or real(self, indices))
    few = make_plan(Recipe.load("yelp_demo", *words, "task.prepare=as_needed"))
    assert made <= {*spread(81, 10).tolist()} and few.work.micro_batches == first.work.micro_batches
    assert few.data.tokens == pytest.approx(first.data.tokens, rel=0.2)
    (said,) = [notice for notice in few.notices if "estimates" in notice]
    assert said.startswith("Tokens, micro-batches and memory are estimates from 10 of the 81 training rows. ")


def test_second_evaluation_reads_no_sample_to_know_its_length(tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "rows.jsonl", reviews("train")[:40])
    words = (*OWN, f"task.data_files={{train: {path}, eval: {path}}}", "task.eval_share=null", f"output_dir={tmp_path / 'run'}")
    task = Recipe.load("yelp_demo", *words, "task.prepare=as_needed").task
    data = task.datasets()["eval"]
    first = plan_evaluation(task, data, 8)
    monkeypatch.setattr(TextsAsNeeded, "__getitems__", None)
    assert [part.samples.tolist() for part in plan_evaluation(task, data, 8)] == [part.samples.tolist() for part in first]


def test_other_tasks_refuse_it_in_a_sentence(capsys):
    assert cli.main(["train", "recipe=language_modeling_demo", "task.prepare=as_needed"]) == 2
    assert "task.prepare=as_needed is not for LanguageModeling, whose samples are no single rows." in capsys.readouterr().err


def test_bad_rows_of_other_tasks_are_named_and_skipped(tmp_path, capsys):
    rows = entities("train")[:30]
    rows[20] = {**rows[20], "ner_tags": ["B-XXX" for _ in rows[20]["ner_tags"]]}
    rows[21] = {**rows[21], "ner_tags": rows[21]["ner_tags"][:-1]}
    few = write_jsonl(tmp_path / "eval.jsonl", entities("eval")[:5])
    words = ("task.dataset=null", f"task.data_files={{train: {write_jsonl(tmp_path / 'rows.jsonl', rows)}, eval: {few}}}")
    words = (
        *words,
        f"output_dir={tmp_path / 'run'}",
        f"task.label_names={sorted({tag for row in rows[:20] for tag in row['ner_tags']})}",
    )
    lengths = {}
    for bad in ("skip", "stop"):  # what the first has kept of bad rows is not for the other one
        task = Recipe.load("token_classification_demo", *words, f"task.bad_rows={bad}", "task.prepare=as_needed").task
        lengths[bad] = task.lengths(task.datasets()["train"])
    assert np.flatnonzero(lengths["skip"][np.arange(30)] < 0).tolist() == [20, 21]
    assert capsys.readouterr().out.count("note: A row is left out (task.bad_rows=skip): ") == 2
    with pytest.raises(DataError, match="Row 20 of the train split has the label 'B-XXX'"):
        lengths["stop"][np.array([3, 20])]


def test_chats_that_are_no_single_samples_are_refused_by_their_rows_or_skipped(tmp_path, capsys):
    rows = [*chats("train")][:12]
    rows[3] = {"messages": [{**message, "content": message["content"] * 9} for message in rows[3]["messages"]]}
    rows[7] = {"messages": [{**message, "content": "<|im_end|>"} for message in rows[7]["messages"]]}
    few = write_jsonl(tmp_path / "eval.jsonl", rows[:3])
    words = (f"task.data_files={{train: {write_jsonl(tmp_path / 'rows.jsonl', rows)}, eval: {few}}}", "task.dataset=null")
    words = (*words, f"output_dir={tmp_path / 'run'}")
    task = Recipe.load("chats_demo", *words, "task.prepare=as_needed").task
    data = task.datasets()["train"]
    with pytest.raises(DataError, match=r"train split cannot be trained on, at row 3: It is longer than task\.max_length=96\."):
        data[3]
    with pytest.raises(DataError, match=r"train split cannot be trained on, at row 7: .*special token"):
        data[7]
    skipping = Recipe.load("chats_demo", *words, "task.bad_rows=skip").task
    lengths = skipping.lengths(skipping.datasets()["train"])
    assert np.flatnonzero(lengths[np.arange(12)] < 0).tolist() == [3, 7]
    assert cli.main(["train", "recipe=chats_demo", *words, "task.prepare=as_needed", "task.too_long=drop"]) == 2
    assert "task.too_long=drop looks at all chats at the start, unlike task.prepare=as_needed." in capsys.readouterr().err


def test_rows_of_a_mixture_are_named_by_their_data_set(tmp_path):
    rows = reviews("train")[:40]
    rows[33]["text"] = " "
    files = [write_jsonl(tmp_path / name, own) for name, own in {"a.jsonl": rows[:30], "b.jsonl": rows[30:]}.items()]
    words = (*OWN, f"task.datasets=[{{data_files: {files[0]}}}, {{data_files: {files[1]}}}]", f"output_dir={tmp_path / 'run'}")
    for when in ("all", "as_needed"):
        with pytest.raises(DataError, match=r"b\.jsonl.*row 3\b|row 3\b.*b\.jsonl"):
            task = Recipe.load("yelp_demo", *words, f"task.prepare={when}").task
            data = task.datasets()["train"]
            task.lengths(data)[np.arange(len(data))]


def test_large_splits_are_prepared_as_needed_by_themselves_and_the_largest_are_not_hashed(tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "rows.jsonl", reviews("train")[:100])
    words = (*OWN, f"task.data_files.train={path}", f"output_dir={tmp_path / 'run'}")
    assert not Recipe.load("yelp_demo", *words).task.later
    monkeypatch.setattr(text, "LARGE_BYTES", 100)
    data = Recipe.load("yelp_demo", *words).task.datasets()["train"]
    assert isinstance(data, TextsAsNeeded) and [*data.contents()] == ["rows"] and row_hashes(data).shape == (len(data), 16)
    monkeypatch.setattr(as_needed, "HASHED_BYTES", 100)
    assert [*data.contents()] == ["some rows", "files"] and row_hashes(data) is None
    assert content_digest(data) == content_digest(data)


def test_store_without_locks_is_said_in_a_sentence(tmp_path, monkeypatch):
    data = TextsAsNeeded("any", [0], 8, list, dict)
    monkeypatch.setattr(data, "_connect", lambda: sqlite3.connect(tmp_path))  # which SQLite can use as little
    with pytest.raises(ConfigError, match=r"which some network disks lack: use a disk of this machine, or task\.prepare=all"):
        data[0]


def test_store_that_cannot_be_used_is_said_in_a_sentence(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", reviews("train")[:20])
    words = (*OWN, f"task.data_files.train={path}", "task.prepare=as_needed", f"output_dir={tmp_path / 'run'}")
    data = Recipe.load("yelp_demo", *words).task.datasets()["train"]
    data.path.write_text("no database")
    with pytest.raises(ConfigError, match=r"\.sqlite, in the cache of prepared data, cannot be used: .* Remove it"):
        data[0]
    data.path.unlink()


def test_samples_that_were_made_first_make_room_and_are_made_again(tmp_path):
    rows = datasets.Dataset.from_dict({"text": [str(number) for number in range(400)]})
    made = []

    def make(indices):
        made.extend(indices)
        return [{"input_ids": [number] * 200} for number in indices]

    texts = TextsAsNeeded(["room", str(tmp_path)], rows, 200, make, dict, most_bytes=2**17)
    for start in range(0, 400, 20):
        assert [sample["input_ids"][0] for sample in texts.__getitems__([*range(start, start + 20)])] == [
            *range(start, start + 20)
        ]
    texts._recent = {}
    kept = len(texts._kept([*range(400)]))
    assert 50 < kept < 250 and texts._kept([*range(380, 400)]) and texts[0]["input_ids"][0] == 0 and made[-1] == 0

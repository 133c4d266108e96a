"""Rows in a bucket or on a web server: the same training as with files on disk, also after a kill, and on any number of processes."""

import json
import time

import datasets
import pytest

from hftune import Recipe
from hftune.data.cache import cache_dir
from hftune.data.demo import reviews
from hftune.data.in_place import RowsInPlace
from hftune.replay.audit import audit
from hftune.tasks import text
from tests.support.runs import TINY, Command, train_on, write_jsonl
from tests.support.servers import Web, object_server

ROWS, GROUP = 240, 24
WINDOW = (f"task.shuffle_window={2 * GROUP}", "task.cache_gib=0.00006")
MOST_BYTES = 0.00006 * 2**30
SIZES = (1, 2, 4)


@pytest.fixture(scope="module")
def bucket():
    with object_server() as variables, pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        import s3fs

        fs = s3fs.S3FileSystem()
        fs.mkdir("data")
        yield fs


@pytest.fixture(scope="module")
def words(tmp_path_factory, bucket):
    """The keys of a recipe, by where its data are."""
    folder = tmp_path_factory.mktemp("data")
    rows, evaluated = (
        datasets.Dataset.from_list(list(reviews("train")[:ROWS])),
        write_jsonl(folder / "e.jsonl", reviews("eval")[:20]),
    )
    for number, part in enumerate((rows.select(range(150)), rows.select(range(150, ROWS)))):
        part.to_parquet(folder / f"{number}.parquet", batch_size=GROUP)
        bucket.put(str(folder / f"{number}.parquet"), f"data/{number}.parquet")
    lines = write_jsonl(folder / "rows.jsonl", reviews("train")[:ROWS])
    own = (
        *TINY,
        "task.dataset=null",
        "task.max_train_samples=null",
        f"task.data_files.eval={evaluated}",
        "train.batch_size=16",
    )
    own += (
        "train.log_every=1",
        "train.lr=5e-5",
        "train.parts=4",
        "train.epochs=2",
        "task.prepare=as_needed",
        "checkpoint.every=5",
    )
    model = ("recipe=language_modeling_demo", "task.dataset=null", f"task.data_files.eval={evaluated}")
    model += ("train.max_steps=4", "train.log_every=1")
    return {
        "model on disk": (*model, f"task.data_files.train={folder}/?.parquet"),
        "model in a bucket": (*model, "task.data_files.train=s3://data/*.parquet"),
        "disk": (*own, f"task.data_files.train={folder}/?.parquet", *WINDOW),
        "bucket": (*own, "task.data_files.train=s3://data/*.parquet", *WINDOW),
        "lines": (*own, f"task.data_files.train={lines}"),
        "web": own,
    }


@pytest.fixture(scope="module")
def runs(words, bucket, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    found = {}
    with Web({"rows.jsonl": write_jsonl(folder / "rows.jsonl", reviews("train")[:ROWS]).read_bytes()}) as web:
        web.cut_every, web.wait_s = 5, 0.02
        for size in SIZES:
            jobs = {name: words[name] for name in ("disk", "lines", "model on disk", "model in a bucket")}
            jobs["web"] = (*words["web"], f"task.data_files.train={web.address}/rows.jsonl")
            jobs["bucket"] = words["bucket"]
            found |= {(name, size): run for name, run in train_on(size, jobs, folder).items()}
            found["kept", size] = sum(path.stat().st_size for path in (cache_dir() / "blocks").glob("*.block"))
    return found


def outcome(run):
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    logged = [{name: value for name, value in line.items() if not name.startswith("perf/")} for line in lines]
    return logged, (run.folder / "model_last" / "model.safetensors").read_bytes(), run.predictions


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("elsewhere", "here"), [("bucket", "disk"), ("web", "lines"), ("model in a bucket", "model on disk")])
def test_where_the_rows_are_changes_no_bit(runs, size, elsewhere, here):
    assert outcome(runs[elsewhere, size]) == outcome(runs[here, size])


@pytest.mark.parametrize(("name", "steps"), [("bucket", 2 * ROWS // 16), ("web", 2 * ROWS // 16), ("model in a bucket", 4)])
def test_losses_do_not_depend_on_processes(runs, name, steps):
    expected = runs[name, 1].logged("train/loss")
    assert len(expected) == steps
    for size in SIZES[1:]:
        assert runs[name, size].logged("train/loss") == pytest.approx(expected, rel=1e-5)


def test_every_row_is_used_once_an_epoch_and_a_window_at_a_time(runs):
    found = audit(runs["bucket", 2].folder)
    assert not found.problems and found.whole_epochs == 2
    plan = found.starts[0]["plan"]
    assert plan["window"] == 2 * GROUP and sum(plan["groups"]) == ROWS
    assert 0 < max(runs["kept", size] for size in SIZES) <= MOST_BYTES


def test_language_model_reads_large_files_of_a_bucket_in_place(words, bucket, monkeypatch, tmp_path):
    streams = {}
    for name in ("model on disk", "model in a bucket"):
        monkeypatch.setattr(text, "LARGE_BYTES", 0 if "bucket" in name else 2**27)
        task = Recipe.load("language_modeling_demo", *words[name][1:], f"output_dir={tmp_path}").task
        streams[name] = task.datasets()["train"].stream.tolist()
        assert isinstance(task.rows["train"], RowsInPlace) == ("bucket" in name)
    assert streams["model on disk"] == streams["model in a bucket"]


@pytest.mark.parametrize("size", [2, 1])
def test_killed_run_goes_on_with_the_very_next_row(runs, words, tmp_path, size):
    folder = tmp_path / "run"
    command = Command(2, "recipe=yelp_demo", *words["bucket"], f"output_dir={folder}")
    steps, until = folder / "ledger.jsonl", time.monotonic() + 120
    while not (steps.is_file() and steps.read_text().count('"digest"') > 11) and time.monotonic() < until:
        time.sleep(0.01)
    command.kill()
    assert set(command.poll()) == {-9} and not (folder / "result.json").exists()
    run = train_on(size, {"again": (*words["bucket"], f"output_dir={folder}")}, tmp_path)["again"]
    assert len(audit(folder).starts) == 2 and not audit(folder).problems
    if size == 2:
        assert outcome(run)[1:] == outcome(runs["bucket", 2])[1:]
    losses = {
        line["step"]: line["train/loss"] for line in map(json.loads, (folder / "metrics.jsonl").open()) if "train/loss" in line
    }
    assert [losses[step] for step in sorted(losses)] == pytest.approx(runs["bucket", 2].logged("train/loss"), rel=1e-5)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ("s3://nobody/rows.parquet", "s3://nobody/rows.parquet: there is no such file or bucket."),
        ("s3://data/none-*.parquet", "s3://data/none-*.parquet: there is no such file."),
        ("gopher://data/rows.jsonl", "gopher://data/rows.jsonl cannot be reached: ValueError: Protocol not known: gopher."),
    ],
)
def test_address_of_nothing_is_one_sentence_before_a_model_is_loaded(words, tmp_path, files, said):
    folder = tmp_path / "run"
    command = Command(2, "recipe=yelp_demo", *words["web"], f"task.data_files.train={files}", f"output_dir={folder}")
    out, err = command.communicate()
    assert command.returncode == 2 and (out + err).count(said) == 1 and "Traceback" not in out + err


def test_file_that_changes_stops_the_training_and_is_named(words, tmp_path):
    rows = [{**row, "text": f"{number} {row['text']}"} for number in range(3) for row in reviews("train")]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)  # more than are looked at before the first step
    folder = tmp_path / "run"
    command = Command(2, "recipe=yelp_demo", *words["web"], f"task.data_files.train={path}", f"output_dir={folder}")
    until = time.monotonic() + 120
    while not (folder / "ledger.jsonl").is_file() and time.monotonic() < until:
        time.sleep(0.01)
    write_jsonl(path, rows[1:])
    out, err = command.communicate()
    assert command.returncode not in (0, -9)
    assert f"{path} has changed since its rows were counted." in out + err

"""W&B: what a run contains, offline and at a server on loopback that is late, dies, refuses, and is come back to."""

import json
import shlex
import subprocess
import sys
import time
from contextlib import suppress

import numpy as np
import pytest
import wandb

from hftune import ConfigError, Recipe
from hftune.callbacks import Failure
from hftune.tracking.backend import EarlierRun
from hftune.tracking.tracker import Tracker
from hftune.tracking.wandb_tracker import WandbRun
from tests.support.fake_wandb import FakeWandb
from tests.support.runs import SMALL, Command, environment
from tests.support.wandb_read import read

FACTS = {"num_steps": 100, "steps_per_epoch": 10, "parameters": 1000, "processes": 2}


@pytest.fixture
def server(monkeypatch, tmp_path):
    with FakeWandb() as server:
        for name, value in in_process(variables(tmp_path, server)).items():
            monkeypatch.setenv(name, value)
        yield server
    assert server.unknown == []


@pytest.fixture
def offline(monkeypatch, tmp_path):
    for name, value in in_process(variables(tmp_path)).items():
        monkeypatch.setenv(name, value)


def in_process(variables):
    """Let a run that is killed within this process leave nothing behind that listens to its output."""
    return {**variables, "WANDB_CONSOLE": "off"}


def variables(tmp_path, server=None):
    """The environment of a run, online if there is a server."""
    home = {"HOME": str(tmp_path / "home")}
    if server is None:
        return {**home, "WANDB_MODE": "offline"}
    return {**home, "WANDB_MODE": "online", "WANDB_BASE_URL": server.url, "WANDB_API_KEY": FakeWandb.KEY}


def opened(tmp_path, *overrides, earlier=None):
    """Begin a run, or continue one, as the loop does."""
    recipe = Recipe.load("yelp_demo", "track.with=[wandb]", "eval.every=50", f"output_dir={tmp_path}/out", *overrides)
    (tmp_path / "out").mkdir(exist_ok=True)
    WandbRun.check(recipe)
    run = WandbRun(recipe)
    run.start({**recipe.to_dict(), "run": FACTS}, earlier or EarlierRun())
    return run


def lines(first, last, attempt):
    """The lines of metrics.jsonl of some steps, with values that differ between attempts."""
    return [{"step": step, "epoch": step / 10, "train/loss": step + attempt / 10} for step in range(first, last + 1)]


def log(run, some):
    for line in some:
        run.log(line["step"], {name: value for name, value in line.items() if name != "step"})


def rows(history):
    return [{"step": row["_step"], "epoch": row["epoch"], "train/loss": row["train/loss"]} for row in history]


def killed(run):
    """Let wandb write its file, which it does once a second, and kill it."""
    time.sleep(2)
    run.leave()


def close(run, status="finished"):
    """End a run as the tracker does, in whose thread an upload that fails is no more than a warning."""
    if status == "finished":
        with suppress(FileNotFoundError):  # most of these runs have no result.json
            run.upload()
    run.finish(status)


def by_step(path):
    """Merge the lines of metrics.jsonl of each step, with the numbers only; not the last while it is being written."""
    found = {}
    for line in map(json.loads, path.read_text().rpartition("\n")[0].splitlines()):
        values = {name: value for name, value in line.items() if isinstance(value, (int, float))}
        found.setdefault(values.pop("step"), {}).update(values)
    return found


def numbers(history):
    """The rows of a history by step, without W&B's own values and what is no number."""
    return {
        row["_step"]: {
            name: value for name, value in row.items() if isinstance(value, (int, float)) and not name.startswith("_")
        }
        for row in history
    }


def files_of(folder):
    wandb.teardown()  # it still writes for a moment when a run has finished
    return sorted(path for path in (folder / "wandb").glob("*run-*/*.wandb") if "latest" not in str(path))


def test_offline_run_holds_all_that_is_shown(offline, tmp_path, capsys):
    run = opened(
        tmp_path, "track.run_name=mine", "track.tags=[a,b]", "track.notes=why", "track.upload=best", "track.register=reviews"
    )
    folder = tmp_path / "out"
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    (folder / "recipe.yaml").write_text("recipe: yelp_demo\n")
    (folder / "result.json").write_text('{"steps": 9, "best": {"metric": "accuracy", "value": 0.5, "step": 7}}')
    run.log(7, {"epoch": 0.5, "train/loss": 2.5})
    run.log(7, {"epoch": 0.5, "eval/loss": 1.5, "eval/accuracy": 0.5})
    run.log_table(
        7, "eval/predictions", [{"index": 3, "text": "sehr gut", "error": 0.9}, {"index": 1, "text": None, "error": 1}]
    )
    run.log_confusion_matrix(7, "eval/confusion", [[5, 1], [2, 7]], ["no", "yes"])
    run.log_images(7, "eval/images", [np.zeros((8, 6, 3), np.uint8)] * 2, ["psnr 20", "psnr 30"])
    run.log_best(7, "accuracy", 0.5)
    run.log(9, {"epoch": 0.7, "train/loss": 2.0})
    run.alert("Checkpoint failed", "The disk is full.", "warning")
    close(run)

    (path,) = files_of(folder)
    found = read(path)
    about = {name: found["run"][name] for name in ("project", "name", "group", "job_type", "tags", "notes")}
    assert about == {
        "project": "hftune",
        "name": "mine",
        "group": "out",
        "job_type": "train",
        "tags": ["a", "b"],
        "notes": "why",
    }
    assert found["config"]["run"] == FACTS and found["config"]["train"]["batch_size"] == run.recipe.train.batch_size
    assert numbers(found["history"]) == {
        7: {"epoch": 0.5, "train/loss": 2.5, "eval/loss": 1.5, "eval/accuracy": 0.5},
        9: {"epoch": 0.7, "train/loss": 2.0},
    }
    assert {name: found["summary"][f"best/{name}"] for name in ("metric", "value", "step")} == {
        "metric": "accuracy",
        "value": 0.5,
        "step": 7,
    }
    row = found["history"][0]
    assert row["eval/images"]["captions"] == ["psnr 20", "psnr 30"] and row["eval/images"]["count"] == 2
    table, matrix = (
        json.loads((path.parent / "files" / row[name]["path"]).read_text())
        for name in ("eval/predictions", "eval/confusion_table")
    )
    assert table["columns"] == ["index", "text", "error"] and table["data"] == [[3, "sehr gut", 0.9], [1, None, 1]]
    assert matrix["data"] == [["no", "no", 5], ["no", "yes", 1], ["yes", "no", 2], ["yes", "yes", 7]]
    assert found["config"]["_wandb"]["visualize"]["eval/confusion"]["panel_config"]["panelDefId"] == "wandb/confusion_matrix/v1"
    assert found["metrics"]["epoch"]["hidden"] and found["alerts"] == [("Checkpoint failed", "The disk is full.", "WARN")]
    assert found["exit_code"] == 0 and not found["preempting"]
    files, model = (item for item in found["artifacts"] if item["type"] != "run_table")
    assert (files["name"], files["type"], sorted(files["files"])) == ("mine-files", "run-files", ["recipe.yaml", "result.json"])
    assert (model["name"], sorted(model["aliases"]), model["files"]) == (
        "mine-model",
        ["best", "latest", "step_7"],
        {"config.json": 2},
    )
    assert model["metadata"] == {"recipe": "yelp_demo", "step": 7, "metric": "accuracy", "value": 0.5}
    assert not (tmp_path / "home" / ".local").exists()  # copies lie beside the run
    assert capsys.readouterr().out.splitlines() == [
        "track.register=reviews: W&B's registry cannot be reached offline. Link the model once it is uploaded.",
        f"W&B: `wandb sync {path.parent}` uploads this run.",
    ]


def test_variables_of_wandb_count_where_the_recipe_says_nothing(offline, tmp_path, monkeypatch):
    for name, value in {"RUN_GROUP": "ours", "TAGS": "x,y", "JOB_TYPE": "debug", "PROJECT": "theirs", "NOTES": "n"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    close(opened(tmp_path, "track.notes=mine"))
    (path,) = files_of(tmp_path / "out")
    about = read(path)["run"]
    assert (about["group"], about["tags"], about["job_type"], about["project"]) == ("ours", ["x", "y"], "debug", "theirs")
    assert about["notes"] == "mine" and about["name"] == "yelp_demo"


@pytest.mark.parametrize("status", ["interrupted", "paused"])
def test_interrupted_run_is_marked_as_preempted_unless_it_goes_on_at_once(offline, tmp_path, status):
    run = opened(tmp_path)
    run.log(1, {"train/loss": 2.0})
    run.finish(status)
    found = read(files_of(tmp_path / "out")[0])
    assert (found["preempting"], found["exit_code"]) == {"interrupted": (True, 1), "paused": (False, 0)}[status]
    assert [row["_step"] for row in found["history"]] == [1]


def test_server_that_hangs_holds_up_neither_a_step_nor_an_interruption(server, tmp_path):
    recipe = Recipe.load("yelp_demo", "track.with=[wandb]", f"output_dir={tmp_path}/out")
    (tmp_path / "out").mkdir()
    tracker = Tracker(recipe)
    tracker.start(0, FACTS)
    server.late_s = 30.0
    began = time.monotonic()
    tracker.log(1, None, {"train/loss": 2.0})
    tracker.show(1, "eval/", rows=[{"error": 1.0}])
    assert time.monotonic() - began < 10
    tracker.log(2, None, {"train/loss": 1.0})
    tracker.on_failure(Failure(reason="SIGTERM", is_interruption=True))
    assert time.monotonic() - began < 25  # 4.5 on an idle machine
    found = read(files_of(tmp_path / "out")[0])
    assert [row["_step"] for row in found["history"]] == [1, 2] and found["preempting"]
    server.late_s = 0.0


@pytest.mark.parametrize("was_uploaded", [False, True])
def test_offline_run_is_written_anew_when_it_is_resumed(offline, tmp_path, was_uploaded):
    first = opened(tmp_path)
    log(first, lines(1, 12, attempt=1))
    killed(first)
    (old,) = files_of(tmp_path / "out")
    assert [row["_step"] for row in read(old)["history"]] == [*range(1, 12)]  # wandb holds the last one back
    if was_uploaded:
        old.with_name(f"{old.name}.synced").touch()
    second = opened(tmp_path, earlier=EarlierRun(6, first.run_id, lines(1, 6, attempt=1)))
    log(second, lines(7, 9, attempt=2))
    close(second)
    files = files_of(tmp_path / "out")
    assert (old in files) == was_uploaded and len(files) == 1 + was_uploaded
    assert (second.run_id == first.run_id) == (not was_uploaded)
    (new,) = set(files) - {old}
    assert rows(read(new)["history"]) == lines(1, 6, attempt=1) + lines(7, 9, attempt=2)
    assert read(new)["run"]["group"] == "out"


@pytest.mark.parametrize("what", ["dead rows", "missing rows", "the same rows", "cannot rewind", "unknown"])
def test_online_run_has_each_step_once_after_it_was_resumed(server, tmp_path, what):
    server.rewinds = what != "cannot rewind"
    first = opened(tmp_path)
    log(first, lines(1, {"missing rows": 4, "the same rows": 6}.get(what, 12), attempt=1))
    first.finish("failed")
    if what == "unknown":
        server.runs.clear()
    earlier = EarlierRun(6, first.run_id, lines(1, 6, attempt=1))
    second = opened(tmp_path, earlier=earlier)
    log(second, lines(7, 9, attempt=2))
    close(second)
    goes_on = what not in ("cannot rewind", "unknown")
    assert (second.run_id == first.run_id) == goes_on and server.runs[second.run_id].exit_code == 0
    assert rows(server.runs[second.run_id].history) == lines(1, 6, attempt=1) + lines(7, 9, attempt=2)
    assert {run.told("groupName") for run in server.runs.values()} == {"out"}
    assert bool(server.operations["RewindRun"]) == (what in ("dead rows", "cannot rewind"))
    if not goes_on:
        assert server.runs[second.run_id].told("notes") == f"Continues run {first.run_id} from step 6."


def test_evaluation_that_an_interruption_left_out_joins_the_row_of_its_step(server, tmp_path):
    first = opened(tmp_path, "eval.every=6")
    log(first, lines(1, 6, attempt=1))
    first.finish("interrupted")
    assert server.runs[first.run_id].preempting and server.runs[first.run_id].exit_code == 1
    second = opened(tmp_path, earlier=EarlierRun(6, first.run_id, lines(1, 6, attempt=1), awaits_evaluation=True))
    second.log(6, {"eval/loss": 3.0})
    second.log(7, {"train/loss": 4.0})
    close(second)
    assert numbers(server.runs[first.run_id].history)[6] == {"epoch": 0.6, "train/loss": 6.1, "eval/loss": 3.0}


def test_refused_key_is_said_before_training(server, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "local-" + "1" * 40)
    with pytest.raises(ConfigError) as caught:
        opened(tmp_path)
    assert str(caught.value).startswith("track.with=wandb: ") and "or set WANDB_MODE=offline" in str(caught.value)


def test_late_server_gets_an_online_run_of_two_processes_with_everything(server, tmp_path):
    server.late_s = 0.1
    folder = tmp_path / "out"
    words = [*SMALL, "recipe=yelp_demo", "track.with=[wandb]", "track.upload=all", "train.max_steps=8", "eval.every=4"]
    done = Command(2, *words, f"output_dir={folder}", **variables(tmp_path, server))
    said, errors = done.communicate()
    assert done.returncode == 0, errors
    (run,) = server.runs.values()
    assert numbers(run.history) == by_step(folder / "metrics.jsonl") and run.exit_code == 0
    result = json.loads((folder / "result.json").read_text())
    assert (run.summary["best/value"], run.summary["best/step"]) == (result["best"]["value"], result["best"]["step"])
    assert run.config["run"]["processes"] == 2 and run.config["run"]["data"]["train"]["samples"] == 100
    assert run.config["train"]["batch_size"] == 16
    kept = {tuple(sorted(item["aliases"])): item for item in server.artifacts if item["type"] != "run_table"}
    best, last = (f"step_{step}" for step in (result["best"]["step"], result["steps"]))
    assert {("latest",), ("best", "latest", best), ("last", "latest", last)} == set(kept)
    names = ["ledger.jsonl", "metrics.jsonl", "predictions.jsonl", "recipe.yaml", "result.json", "run.json"]
    assert sorted(kept["latest",]["files"]) == names and all(item["committed"] for item in server.artifacts)
    weights = kept["best", "latest", best]["files"]["model.safetensors"]
    assert weights == (folder / "model" / "model.safetensors").read_bytes()
    table = json.loads(next(data for name, data in run.files.items() if "predictions_8" in name))
    errors_first = [row[table["columns"].index("error")] for row in table["data"]]
    assert len(errors_first) == 37 and errors_first == sorted(errors_first, reverse=True)
    assert [alert["title"] for alert in server.alerts] == ["yelp_demo finished"]
    ours = [line for line in said.splitlines() if "wandb" in line.lower() or "W&B" in line]
    assert ours == [f"W&B shows this run at {server.url}/tester/hftune/runs/{run.id}"]
    assert not (folder / "wandb" / "artifacts").exists()  # the copies have been uploaded

    server.late_s = 0.0
    texts = ["--text", "Great soup.", "--text", "Cold and late."]
    again = ["predict", str(folder), "--track", "--text", "Fine."]
    for words in (["evaluate", str(folder), "--track"], ["predict", str(folder), "--track", *texts], again):
        done = Command(1, *words, module="hftune.cli", **variables(tmp_path, server))
        assert done.returncode == 0, done.communicate()
    training, evaluation, prediction, second = server.runs.values()
    assert [one.told("jobType") for one in server.runs.values()] == ["train", "evaluate", "predict", "predict"]
    assert [one.told("displayName") for one in (prediction, second)] == ["yelp_demo predict", "yelp_demo predict-2"]
    kept_rows = {name: (folder / name / "predictions.jsonl").read_text() for name in ("predict", "predict-2")}
    assert "Great soup." in kept_rows["predict"] and "Fine." in kept_rows["predict-2"]
    assert {one.told("groupName") for one in server.runs.values()} == {"out"} and training is run
    (row,) = evaluation.history
    assert (row["_step"], row["eval/accuracy"]) == (result["best"]["step"], result["best"]["value"])
    assert row["eval/predictions"]["nrows"] == 37
    assert prediction.history[0]["predictions"]["nrows"] == 2 and prediction.exit_code == 0
    assert len(kept) == len([item for item in server.artifacts if item["type"] == "model"]) + 1  # models once


def test_server_that_dies_does_not_keep_the_processes(server, tmp_path):
    server.dies_at = "CreateArtifact"  # of the first table
    words = [*SMALL, "recipe=yelp_demo", "track.with=[wandb]", "track.upload=best", "train.max_steps=8", "eval.every=4"]
    began = time.monotonic()
    done = Command(2, *words, f"output_dir={tmp_path}/out", **variables(tmp_path, server))
    said, errors = done.communicate()
    assert done.returncode == 0, errors
    assert time.monotonic() - began < 150
    (run_id,) = server.runs
    last = said.splitlines()[-1]
    assert last.startswith("warning: track.with=wandb does not answer") and f"--id {run_id}-complete " in last
    assert (tmp_path / "out" / "result.json").is_file()

    server.down, server.dies_at = False, None
    _, *words = shlex.split(last.split("`")[1])
    subprocess.run(
        [sys.executable, "-m", "wandb", *words], env=environment(**variables(tmp_path, server)), cwd=tmp_path, check=True
    )
    *_, uploaded = server.runs.values()
    logged = by_step(tmp_path / "out" / "metrics.jsonl")
    assert numbers(uploaded.history) == logged and len(uploaded.history) == len(logged) and uploaded.exit_code == 0


@pytest.mark.parametrize("is_online", [False, True])
def test_killed_and_resumed_training_shows_each_step_once(server, tmp_path, is_online):
    folder = tmp_path / "out"
    words = [*SMALL, "recipe=yelp_demo", "track.with=[wandb]", "train.epochs=3", "checkpoint.every=5", f"output_dir={folder}"]
    given = variables(tmp_path, server if is_online else None)
    first = Command(1, *words, "train.max_steps=100000", "train.epochs=10000", **given)
    while (
        not (folder / "checkpoints" / "step_00000010" / "manifest.json").is_file()
        or len(by_step(folder / "metrics.jsonl")) < 13
    ):
        assert first.poll() is None, first.communicate()
        time.sleep(0.01)
    first.send_signal(9)
    assert first.returncode
    reached = max(by_step(folder / "metrics.jsonl"))
    second = Command(1, *words, f"train.max_steps={reached + 5}", "train.epochs=10000", **given)
    assert second.returncode == 0, second.communicate()
    history = read(files_of(folder)[-1])["history"] if not is_online else list(server.runs.values())[-1].history
    assert numbers(history) == by_step(folder / "metrics.jsonl") and len(server.runs) == is_online
    assert len(files_of(folder)) == 1 + is_online

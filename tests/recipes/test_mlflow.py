"""What MLflow holds of a run: read back through its own client, from a database and from a server."""

import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hftune import ConfigError, Recipe, TrainingError, load_model, train
from hftune.callbacks import CheckpointDone
from hftune.checkpoints.output_dir import TrainResult
from hftune.config.recipe import flat
from hftune.errors import Interrupted
from hftune.tracking.console import short
from hftune.tracking.lane import answers
from hftune.tracking.tracker import Tracker
from tests.support.events import evaluated
from tests.support.runs import DATA, TINY, Run, train_on
from tests.support.tasks import Signs, Trapped

mlflow = pytest.importorskip("mlflow", reason="needs mlflow: pip install hftune[mlflow]")

from hftune.tracking.mlflow_model import Source, register  # noqa: E402 - it imports mlflow

SUPPORT = Path(__file__).parents[1] / "support"
ON = "track.with=[mlflow]"
URI = "sqlite:///outputs/mlflow.db"


@pytest.fixture(scope="module", autouse=True)
def somewhere_else(tmp_path_factory):
    """A folder of its own to start from: that is where the default store is, which takes seconds to be made."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("mlflow"))
        patch.setenv("ACCELERATE_USE_CPU", "true")
        patch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.5")
        # MLflow imports pyspark, which takes a main module without a file, such as that of xdist's workers, for a doctest,
        # and calls sys.exit (check_dependencies in pyspark/sql/connect/utils.py, 4.3).
        patch.setattr(sys.modules["__main__"], "__file__", __file__, raising=False)
        yield


@pytest.fixture(scope="module")
def yelp(somewhere_else):
    """A run that all three dashboards follow, with the run that MLflow has of it."""
    dashboards = "track.with=[wandb,mlflow,tensorboard]"
    overrides = ("task.dataset=tests.support.tasks:few_reviews", "train.max_steps=5", "train.log_every=2", "eval.every=3")
    shown = ("track.run_name=mine", "track.group=first ones", "track.tags=[small,by hand]", "track.notes=A *try*.")
    models = ("track.upload=all", "track.register=stars")
    recipe = Recipe.load("yelp_demo", *TINY, *DATA, *overrides, dashboards, *shown, *models)
    with redirect_stdout(StringIO()) as said:
        train(recipe)
    assert "The model is version 1 of stars" in said.getvalue(), said.getvalue()
    return recipe, only_run()


def only_run(uri=URI, experiment="hftune"):
    """The only run that an experiment has."""
    client = mlflow.MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    return run


def history(run, name, uri=URI):
    """All (step, value) of a metric, in the order of the steps."""
    return sorted((metric.step, metric.value) for metric in mlflow.MlflowClient(uri).get_metric_history(run.info.run_id, name))


def logged(run, name):
    """The same, from metrics.jsonl."""
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line[name]) for line in lines if name in line]


def test_parameters_are_the_resolved_recipe_and_tags_say_where_a_run_comes_from(yelp):
    recipe, run = yelp
    facts = json.loads((Path(recipe.output_dir) / "run.json").read_text())
    about = {"run.processes": "1", "run.device": "cpu", "run.data.train.digest": facts["data"]["train"]["digest"]}
    assert ({key: str(value) for key, value in flat(recipe.to_dict()).items()} | about).items() <= run.data.params.items()
    asked = {"group": "first ones", "small": "true", "by hand": "true", "mlflow.note.content": "A *try*."}
    assert (asked | {"mlflow.runName": "mine"}).items() <= run.data.tags.items() and run.info.status == "FINISHED"


def test_best_value_its_step_and_the_end_are_there_at_a_glance(yelp):
    recipe, run = yelp
    best = TrainResult.read(Path(recipe.output_dir)).best
    assert (run.data.metrics["best/value"], run.data.metrics["best/step"]) == (best["value"], best["step"])
    value = short(best["value"])
    assert run.data.tags["alert.info"] == f"mine finished: 5 steps, accuracy {value} at step {best['step']}."
    steps = [step for step, _ in history(run, "best/value")]
    assert steps == sorted(set(steps)) and set(steps) <= {3, 5}


def test_tables_hold_the_worst_predictions_and_the_confusion_matrix(yelp):
    recipe, run = yelp
    made = Run(Path(recipe.output_dir))
    worst = table(run, "eval/predictions/step_00000005.json")
    kept = sorted(made.predictions, key=lambda row: -row["error"])
    assert [row["index"] for row in worst] == [row["index"] for row in kept]
    assert [row["text"] for row in worst] == [row["text"] for row in kept] and worst[0]["label"] in recipe.task.labels
    matrix = table(run, "eval/confusion/step_00000005.json")
    assert [row.pop("true class") for row in matrix] == recipe.task.labels
    assert list(matrix[0]) == [f"as {label}" for label in recipe.task.labels]
    assert [list(row.values()) for row in matrix] == made.result["metrics"]["confusion_matrix"]


def table(run, path):
    """The rows of a table that MLflow has."""
    held = json.loads(mlflow.artifacts.load_text(f"{run.info.artifact_uri}/{path}"))
    return [dict(zip(held["columns"], row, strict=True)) for row in held["data"]]


def test_best_model_is_a_version_in_the_registry(yelp, monkeypatch):
    recipe, run = yelp
    best = TrainResult.read(Path(recipe.output_dir)).best
    client = mlflow.MlflowClient(URI)
    version = client.get_model_version_by_alias("stars", "best")
    assert (str(version.version), version.run_id) == ("1", run.info.run_id)
    assert version.tags == {name: str(best[name]) for name in ("metric", "value", "step")}
    monkeypatch.setenv("MLFLOW_TRACKING_URI", URI)
    texts = ["Wonderful food, we will come back."]
    said = mlflow.pyfunc.load_model("models:/stars@best").predict(texts)
    assert list(said["label"]) == [row["label"] for row in load_model(recipe.output_dir, trust_code=True).predict(texts)]


def test_last_model_is_beside_the_best_one(yelp):
    _, run = yelp
    client = mlflow.MlflowClient(URI)
    models = client.search_logged_models([run.info.experiment_id], filter_string=f"source_run_id = '{run.info.run_id}'")
    assert sorted(model.name for model in models) == ["model", "model_last"]


def test_metrics_come_with_their_steps(yelp):
    recipe, run = yelp
    made = Run(Path(recipe.output_dir))
    assert [step for step, _ in history(run, "train/loss")] == [1, 2, 4, 5]
    assert [step for step, _ in history(run, "eval/accuracy")] == [3, 5]
    for name in ("train/loss", "train/lr", "eval/accuracy", "perf/tokens_per_s"):
        assert history(run, name) == logged(made, name)
    assert history(run, "system/cpu_utilization_percentage") and history(run, "system/system_memory_usage_megabytes")


def test_files_lie_beside_the_database(yelp):
    recipe, run = yelp
    assert run.info.artifact_uri.startswith(f"file://{Path('outputs/mlflow-artifacts').resolve()}/")
    folder = Path(run.info.artifact_uri.removeprefix("file://"))
    names = ["metrics.jsonl", "predictions.jsonl", "recipe.yaml", "result.json", "run.json"]
    assert sorted(path.name for path in folder.iterdir() if path.is_file() and path.name != "report.html") == names
    for name in names:
        assert (folder / name).read_bytes() == (Path(recipe.output_dir) / name).read_bytes()


def open_model(run, monkeypatch):
    """Load a run's model as somebody would who knows only MLflow."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", URI)
    return mlflow.pyfunc.load_model(f"runs:/{run.info.run_id}/model")


def test_model_of_texts_is_a_transformers_pipeline_that_gives_labels(yelp, monkeypatch):
    recipe, run = yelp
    model = open_model(run, monkeypatch)
    assert {"transformers", "python_function"} == set(model.metadata.flavors)
    assert str(model.metadata.signature.inputs) == "[string (required)]"
    texts = ["Wonderful food, we will come back.", "terrible " * 300]  # the second is cut, as in training
    answers = load_model(recipe.output_dir, trust_code=True).predict(texts)
    said = model.predict(texts)
    assert list(said["label"]) == [row["label"] for row in answers]
    assert list(said["score"]) == pytest.approx([row["probability"] for row in answers], abs=2e-6)
    assert len(model.input_example) == 2


def points(*overrides, task="Signs"):
    return Recipe.load(SUPPORT / "trapped.yaml", f"task.type=tests.support.tasks.{task}", ON, *overrides)


def test_model_of_an_own_task_answers_as_load_model_does(monkeypatch):
    train(points("track.project=points", "track.with=[mlflow,tensorboard]"))
    run = only_run(experiment="points")
    draw = np.random.RandomState(1).randn(20, 4)
    answers = [row["label"] for row in load_model("outputs/trapped", trust_code=True).predict(list(draw))]
    assert set(answers) == {"negative", "positive"}
    model = open_model(run, monkeypatch)
    assert list(model.predict(draw)["label"]) == answers
    files = [file.path for file in mlflow.MlflowClient(URI).list_artifacts(run.info.run_id, "eval/samples")]
    assert files == ["eval/samples/step_00000004.json", "eval/samples/step_00000008.json"]
    rows = table(run, files[0])
    assert len(rows) == 3 and all(list(row) == ["given"] for row in rows)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator("outputs/trapped/tensorboard/points").Reload()
    assert [event.step for event in events.Tensors("eval/samples/text_summary")] == [4, 8]


def test_task_without_answers_has_its_model_as_files_also_in_the_registry():
    train(points("track.project=files", "output_dir=outputs/files", "track.register=files", task="Trapped"))
    run, client = only_run(experiment="files"), mlflow.MlflowClient(URI)
    names = ["README.md", "hftune.json", "model.safetensors"]
    assert [file.path for file in client.list_artifacts(run.info.run_id, "model")] == [f"model/{name}" for name in names]
    with closing(sqlite3.connect("outputs/mlflow.db")) as database:
        assert database.execute("SELECT source FROM model_versions WHERE name = 'files'").fetchall() == [
            (f"{run.info.artifact_uri}/model",)
        ]


def test_alias_stays_with_a_better_version(monkeypatch):
    recipe, client = points("eval.metric=loss", "track.register=loss"), mlflow.MlflowClient(URI)
    run = client.create_run(client.create_experiment("registry", "file:///nowhere"))
    for number, (loss, holder) in enumerate([(0.5, 1), (0.7, 1), (0.5, 3), (0.2, 4)], start=1):
        best = {"metric": "loss", "value": loss, "step": 8}
        source = Source(f"{run.info.artifact_uri}/model")
        assert register(recipe, run.info.run_id, URI, source, best) == str(number)
        assert str(client.get_model_version_by_alias("loss", "best").version) == str(holder)


def test_name_that_the_registry_cannot_have_is_refused_before_training():
    with pytest.raises(ConfigError) as caught:
        train(points("track.register=me/stars", "output_dir=outputs/refused"))
    assert str(caught.value) == "track.register=me/stars: MLflow does not allow / in a model's name. Use - or _."


@dataclass
class Pictured(Trapped):
    """Points that are shown as images of two sizes."""

    def sample_images(self, outputs, model, batch, indices):
        return [np.full((2 + index, 4 - index, 3), 100 * index, np.uint8) for index in indices]

    def caption(self, row):
        return f"drawn {row['draw'] >= 0}"


def test_images_are_kept_by_step_with_captions_and_no_model_if_none_is_asked_for(capsys):
    words = ("track.project=pictures", "output_dir=outputs/pictures", "track.upload=none", "eval.show_samples=2")
    recipe = points(*words, task="Trapped")
    recipe.task = Pictured()
    train(recipe)
    run, client = only_run(experiment="pictures"), mlflow.MlflowClient(URI)
    names = [file.path for file in client.list_artifacts(run.info.run_id, "images") if file.path.endswith(".png")]
    keys = sorted(tuple(Path(name).name.split("+")[:3]) for name in names)
    assert keys == [(f"eval~images~{index}", "step", str(step)) for index in (0, 1) for step in (4, 8)]
    shown = Image.open(client.download_artifacts(run.info.run_id, next(name for name in names if "images~1" in name)))
    assert shown.size == (3, 3) and shown.getpixel((0, 0)) == (100, 100, 100)
    assert table(run, "eval/images/step_00000004.json")[1] == {"image": "eval/images/1", "caption": "drawn True"}
    assert not client.list_artifacts(run.info.run_id, "model")
    assert not client.search_logged_models([run.info.experiment_id])
    uri = f"sqlite:///{Path('outputs/mlflow.db').resolve()}"
    told = f"note: MLflow has recorded this run as {run.info.run_id}. View it with `mlflow ui --backend-store-uri {uri}`."
    assert told in capsys.readouterr().out.splitlines()


def test_resumed_run_goes_on_as_the_same_one_and_gets_what_it_lacked():
    words = ("track.project=resumed", "output_dir=outputs/resumed", "train.log_every=1")
    train(points(*words, "train.max_steps=3"))
    first = only_run(experiment="resumed")
    with closing(sqlite3.connect("outputs/mlflow.db")) as database, database:  # as if the server had been away for a step
        database.execute("DELETE FROM metrics WHERE step = 2 AND run_uuid = ?", [first.info.run_id])
    train(points(*words, "train.max_steps=6"))
    run, made = only_run(experiment="resumed"), Run(Path("outputs/resumed"))
    assert run.info.run_id == first.info.run_id and run.info.status == "FINISHED"
    assert history(run, "train/loss") == logged(made, "train/loss") and len(made.logged("train/loss")) == 6
    assert (run.data.params["train.max_steps"], run.data.tags["train.max_steps"]) == ("3", "6")  # parameters cannot change


def test_resumed_run_whose_earlier_part_was_deleted_begins_a_new_one_with_the_whole_history():
    words = ("track.project=deleted", "output_dir=outputs/deleted", "train.log_every=1")
    train(points(*words, "train.max_steps=2"))
    first, client = only_run(experiment="deleted"), mlflow.MlflowClient(URI)
    client.delete_run(first.info.run_id)
    train(points(*words, "train.max_steps=3"))
    assert [step for step, _ in history(only_run(experiment="deleted"), "train/loss")] == [1, 2, 3]


def test_run_that_was_killed_after_its_checkpoint_goes_on_as_one_that_has_each_step_once(capsys):
    words = ("track.project=killed", "output_dir=outputs/killed", "train.log_every=1", "eval.every=2")
    train(points(*words, "train.max_steps=5", "checkpoint.every=3", "checkpoint.keep=9"))
    client = mlflow.MlflowClient(URI)
    dead = only_run(experiment="killed")
    client.update_run(dead.info.run_id, status="RUNNING")  # as a killed process leaves it
    for step in (4, 5):
        shutil.rmtree(f"outputs/killed/checkpoints/step_0000000{step}")
    Path("outputs/killed/result.json").unlink()
    train(points(*words, "train.max_steps=6"))

    (dead_again,) = [run for run in runs("killed") if run.info.run_id == dead.info.run_id]
    (run,) = [run for run in runs("killed") if run.info.run_id != dead.info.run_id]
    assert (dead_again.info.status, dead_again.data.tags["mlflow.parentRunId"]) == ("KILLED", run.info.run_id)
    told = (
        f"note: MLflow run {dead.info.run_id} has values from after step 3, from which this run resumes. It continues "
        f"as run {run.info.run_id}, which has only the values up to that step."
    )
    assert told in capsys.readouterr().out.splitlines()
    made = Run(Path("outputs/killed"))
    assert [step for step, _ in history(run, "train/loss")] == [1, 2, 3, 4, 5, 6]
    assert [step for step, _ in history(run, "eval/loss")] == [2, 4, 6]
    for name in run.data.metrics:
        if not name.startswith(("system/", "best/", "epoch")):
            assert history(run, name) == logged(made, name), name
    best = made.result["best"]
    assert (run.data.metrics["best/value"], run.data.metrics["best/step"]) == (best["value"], best["step"])


def runs(experiment):
    client = mlflow.MlflowClient(URI)
    return client.search_runs([client.get_experiment_by_name(experiment).experiment_id])


def test_run_that_a_signal_stopped_is_marked_as_killed_and_goes_on_as_the_same_one():
    recipe = points("track.project=stopped", "output_dir=outputs/stopped", "train.log_every=1")
    recipe.task = Stopped()
    with pytest.raises(Interrupted):
        train(recipe)
    first = only_run(experiment="stopped")
    assert first.info.status == "KILLED" and 0 < len(history(first, "train/loss")) < 8
    assert not [thread for thread in threading.enumerate() if thread.name == "SystemMetricsMonitor"]
    recipe = points("track.project=stopped", "output_dir=outputs/stopped", "train.log_every=1")
    recipe.task = Stopped()
    train(recipe)
    run, made = only_run(experiment="stopped"), Run(Path("outputs/stopped"))
    assert (run.info.run_id, run.info.status) == (first.info.run_id, "FINISHED")
    assert history(run, "train/loss") == logged(made, "train/loss") and len(made.logged("train/loss")) == 8


def test_failed_run_is_marked_as_failed():
    with pytest.raises(TrainingError):
        train(
            points("track.project=failed", "output_dir=outputs/failed", "eval.metric=nothing", "eval.greater_is_better=false")
        )
    run = only_run(experiment="failed")
    assert run.info.status == "FAILED" and history(run, "train/loss")
    assert run.data.tags["alert.error"].startswith("trapped failed: After step 4 the evaluation's loss is ")
    assert not [thread for thread in threading.enumerate() if thread.name == "SystemMetricsMonitor"]


@dataclass
class WithoutExamples(Signs):
    """Points that somebody has made a mistake with."""

    def example_inputs(self):
        raise LookupError("no examples. None at all")


def test_model_that_cannot_be_logged_is_told_and_the_run_is_finished(capsys):
    recipe = points("track.project=speechless", "output_dir=outputs/speechless")
    recipe.task = WithoutExamples()
    assert train(recipe).steps == 8
    run = only_run(experiment="speechless")
    assert run.info.status == "FINISHED" and history(run, "train/loss")
    told = f"warning: The model of run {run.info.run_id} was not logged to MLflow: LookupError: no examples. None at all. "
    assert f"{told}The model itself is intact, in outputs/speechless/model." in capsys.readouterr().out.splitlines()


def test_server_that_does_not_answer_is_refused_before_anything_is_loaded(monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://me:secret@127.0.0.1:{port}")
    with pytest.raises(ConfigError) as caught:
        train(points("task.trap=no such trap", "output_dir=outputs/refused"))
    assert str(caught.value).startswith(f"track.with=mlflow: http://me:...@127.0.0.1:{port} cannot be used: ConnectionRefused")
    assert not Path("outputs/refused/recipe.yaml").exists()


@pytest.fixture
def address(tmp_path):
    """That of a tracking server on this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    store = ["--backend-store-uri", f"sqlite:///{tmp_path}/server.db", "--artifacts-destination", str(tmp_path / "files")]
    command = [sys.executable, "-m", "mlflow", "server", *store, "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    env = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # its workers load every core, and do nothing here
    with (tmp_path / "server.log").open("w") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
        address = f"http://127.0.0.1:{port}"
        try:
            until = time.monotonic() + 240
            while not answers(f"{address}/health"):
                assert process.poll() is None and time.monotonic() < until, (tmp_path / "server.log").read_text()
                time.sleep(0.2)
            yield address
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # with its workers
                process.wait()


@dataclass
class Stopped(Signs):
    """Points whose training is stopped in its first step, as a preempted machine stops it."""

    def loss(self, outputs, target):
        self._calls = getattr(self, "_calls", 0) + outputs.requires_grad
        if self._calls == 3 and not Path("outputs/stopped/checkpoints").exists():
            os.kill(os.getpid(), signal.SIGTERM)
        return super().loss(outputs, target)


def test_server_gets_one_run_of_two_processes(address, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    words = ("task.type=tests.support.tasks.Signs", ON, "train.log_every=1", "track.register=signs")
    made = train_on(2, {"points": words}, tmp_path, recipe=str(SUPPORT / "trapped.yaml"))["points"]
    run = only_run(address)
    assert history(run, "train/loss", address) == logged(made, "train/loss") and len(made.logged("train/loss")) == 8
    text = mlflow.artifacts.load_text(f"{run.info.artifact_uri}/result.json")
    assert json.loads(text)["world_size"] == 2
    label = mlflow.pyfunc.load_model("models:/signs@best").predict(np.ones((1, 4)))["label"]
    assert list(label) == [row["label"] for row in load_model(made.folder, trust_code=True).predict([np.ones(4)])]


@pytest.mark.parametrize("hangs_at", ["numbers", "models"])
def test_a_server_that_hangs_holds_up_neither_a_step_nor_the_end(hangs_at, tmp_path, monkeypatch, capsys):
    """It accepts requests and never answers, as one that has run out of memory does."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")  # a request fails once the server is gone, below
    (tmp_path / "hung").mkdir()
    recipe = points(f"output_dir={tmp_path}/hung", f"track.project=hung with {hangs_at}")
    tracker = Tracker(recipe)
    tracker.start(0, {})
    (lane,) = tracker._lanes
    answering = lane.backend.client
    if hangs_at == "models":
        (tmp_path / "hung" / "model").mkdir()
        result = {"metrics": {}, "best": {"step": 3}, "steps": 3, "seconds": 1, "world_size": 1, "versions": {}}
        (tmp_path / "hung" / "result.json").write_text(json.dumps(result))
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        address = f"http://127.0.0.1:{hanging.getsockname()[1]}"
        if hangs_at == "numbers":
            lane.backend.client = mlflow.MlflowClient(address)
        else:
            lane.backend.uri = address
        lane.backend.url, lane._is_watched = f"{address}/health", True
        began = time.monotonic()
        for step in range(1, 4):
            tracker.log(step, None, {"train/loss": 1 / step})
            black = {"images": [np.zeros((2, 2, 3), np.uint8)], "captions": ["black"]}
            tracker.show(step, "eval/", samples=[{"text": "one"}], **black)
            tracker.on_checkpoint(CheckpointDone(step=step, path=tmp_path, failure="very late"))
            tracker.on_evaluation(evaluated(step, 0.5, {}, best=0.5, best_step=step))
        assert time.monotonic() - began < 1
        tracker.close("3 steps")
        assert time.monotonic() - began < 50
    until = time.monotonic() + 60
    while mlflow.is_tracking_uri_set():  # the call that hung: as long as it lives, all that this process starts has its store
        assert time.monotonic() < until
        time.sleep(0.1)
    assert f"track.with=mlflow does not answer: its run is incomplete. {tmp_path}/hung" in capsys.readouterr().out
    if hangs_at == "models":
        run = only_run(experiment="hung with models")
        assert history(run, "train/loss") == [(1, 1.0), (2, 0.5), (3, 1 / 3)] and history(run, "best/step")
    lane.backend._monitor.finish()
    answering.set_terminated(lane.backend.run_id)

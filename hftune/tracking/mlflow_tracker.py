"""One run at MLflow: parameters, metrics, tables, images, files, models. Independent of training.

Not Accelerate's MLflowTracker: it drops long parameters, raises in the middle of training if the server is gone, and cannot
continue a run whose recipe has changed.
"""

from __future__ import annotations

import logging
import math
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hftune.checkpoints.output_dir import TrainResult
from hftune.config import Recipe
from hftune.config.recipe import flat
from hftune.errors import ConfigError, cut, is_number
from hftune.secrecy import without_secrets
from hftune.tracking.backend import EarlierRun, Status, TrackerBackend
from hftune.tracking.console import note, warning
from hftune.tracking.lane import reason

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric
    from mlflow.entities import Run as MlflowRecord
    from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

STORE = Path("outputs/mlflow.db")
"""The default store; the files of the runs are next to it, in mlflow-artifacts."""
FILES = ("recipe.yaml", "run.json", "metrics.jsonl", "result.json", "predictions.jsonl", "report.html")
MODELS = {None: ("model",), "best": ("model",), "all": ("model", "model_last"), "none": ()}
"""The folders that a finished run sends, by ``track.upload``."""
NOT_IN_FILE = ("system/", "best/", "test/")
"""First words of metrics that a run at MLflow may have without metrics.jsonl, which a resumed run begins without its test."""
STATUS = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED", "paused": "KILLED"}
SEND_S = 1.0  # a request takes 25 ms, a step may take less: what one second brought is sent together
PATIENCE = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "4", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}  # seconds, and the number of retries
MAX_METRICS, MAX_BATCH, MAX_VALUE = 1000, 100, 6000  # metrics, parameters in a request; characters of one: MLflow's bounds


def prepare_mlflow() -> None:
    """Set what MLflow reads on import: no telemetry, only errors are logged, and ``finish`` says once where the run is."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)  # it warns about each attempt


def tracking_uri() -> str:
    """Return the store: that of MLFLOW_TRACKING_URI or ``mlflow.set_tracking_uri``, else a database in the folder outputs."""
    import mlflow

    return mlflow.get_tracking_uri() if mlflow.is_tracking_uri_set() else f"sqlite:///{STORE.resolve()}"


def _connect(uri: str) -> MlflowClient:
    from mlflow import MlflowClient

    if uri == f"sqlite:///{STORE.resolve()}":
        STORE.parent.mkdir(parents=True, exist_ok=True)
    return MlflowClient(uri)


@contextmanager
def named_where_it_refuses(uri: str) -> Iterator[None]:
    """Wait for the store ten seconds at most, while a run waits to begin, and say what to do if it fails.

    The user's own settings win. Later MLflow tries for minutes, as it should: it has a thread of its own then.

    Raises:
        ConfigError: the block could not reach the store, or was refused.
    """
    from mlflow.exceptions import MlflowException

    ours = {name: value for name, value in PATIENCE.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    except (MlflowException, OSError) as error:
        raise ConfigError(
            f"track.with=mlflow: {without_secrets(uri)} cannot be used: {reason(error)}. Start that server, or set "
            f"MLFLOW_TRACKING_URI to a different one; without it, runs are kept in {STORE}."
        ) from error
    finally:
        for name in ours:
            del os.environ[name]


class MlflowRun(TrackerBackend):
    """A run at MLflow. It has every line of metrics.jsonl, even if the server was down for a while."""

    run_id: str | None = None  # until start has found or created the run

    def __init__(self, recipe: Recipe):
        super().__init__(recipe)
        self.uri, self._folder = tracking_uri(), recipe.folder
        self.client = _connect(self.uri)
        self._params: Mapping[str, str] = {}  # that the run has, and cannot change
        self._known: set[tuple[str, int]] = set()  # names and steps of metrics that it had before, and of best/
        self._unsent: dict[tuple[str, int], Metric] = {}
        self._send_at = math.inf  # until start has sent what the run lacks
        self._monitor: SystemMetricsMonitor | None = None  # until start has made it

    @classmethod
    def check(cls, recipe: Recipe) -> None:
        """Find out whether the store answers, and whether its registry can have the name of ``track.register``.

        Raises:
            ConfigError: one of them is not so.
        """
        name = recipe.track.register or ""
        if wrong := re.search("[/:]", name):
            raise ConfigError(f"track.register={name}: MLflow does not allow {wrong[0]} in a model's name. Use - or _.")
        prepare_mlflow()
        with named_where_it_refuses(tracking_uri()):
            _connect(tracking_uri()).search_experiments(max_results=1)

    def start(self, config: Mapping[str, Any], earlier: EarlierRun) -> None:
        """Create the run, or reopen the earlier one if the store has it; send the lines of metrics.jsonl that it lacks.

        Raises:
            ConfigError: the store does not answer any more, or refuses.
        """
        from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor
        from mlflow.tracking.context.registry import resolve_tags

        with named_where_it_refuses(self.uri):
            is_new = not self._reopen(earlier)
            if is_new:
                name = self.recipe.track.run_name or self.recipe.recipe
                self.run_id = self.client.create_run(self._experiment_id(), tags=resolve_tags(), run_name=name).info.run_id
            for line in earlier.lines:
                self.log(line["step"], line)
            self._send()
            self._log_config({name: str(value) for name, value in flat(config).items()})
            if is_new and earlier.run_id:
                self._put_below(earlier)
        self.url = f"{self.uri.rstrip('/')}/health" if self.uri.startswith("http") else None
        self._monitor = SystemMetricsMonitor(self.run_id, resume_logging=not is_new, tracking_uri=self.uri)
        self._monitor.start()

    def _reopen(self, earlier: EarlierRun) -> bool:
        """Reopen the earlier run; return whether the store has it, and nothing of it that was lost when it was killed.

        MLflow keeps every value that it got. A run that was killed after its last checkpoint would have two for some steps.
        """
        if (run := self._find(earlier.run_id)) is None:
            return False
        names = [name for name in run.data.metrics if not name.startswith("system/")]
        histories = [self.client.get_metric_history(run.info.run_id, name) for name in names]
        known = {(metric.key, metric.step) for history in histories for metric in history}
        counted = {(_clean(name), line["step"]) for line in earlier.lines for name in line}
        if any(not name.startswith(NOT_IN_FILE) for name, _ in known - counted):
            return False
        self.run_id, self._known, self._params = run.info.run_id, known, run.data.params
        self.client.update_run(self.run_id, status="RUNNING")
        return True

    def _find(self, run_id: str | None) -> MlflowRecord | None:
        """Return what the store has of a run, if it has it and nobody has deleted it."""
        from mlflow.exceptions import MlflowException

        try:
            run = self.client.get_run(run_id) if run_id else None
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None
        return run if run is not None and run.info.lifecycle_stage == "active" else None

    def _put_below(self, earlier: EarlierRun) -> None:
        """Show the killed run as a child of this one, which has its values up to the step that counts."""
        if (run := self._find(earlier.run_id)) is None:
            return
        self.client.set_tag(run.info.run_id, "mlflow.parentRunId", self.run_id)
        if run.info.status == "RUNNING":
            self.client.set_terminated(run.info.run_id, "KILLED")
        what = (
            f"MLflow run {run.info.run_id} has values from after step {earlier.step}, from which this run resumes. "
            f"It continues as run {self.run_id}, which has only the values up to that step."
        )
        print(note(what), flush=True)

    def _experiment_id(self) -> str:
        """Find or create the experiment: ``track.project``, unless MLflow's own environment variables name one."""
        from mlflow.exceptions import MlflowException

        if experiment_id := os.environ.get("MLFLOW_EXPERIMENT_ID"):
            return experiment_id
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or self.recipe.track.project
        if (found := self.client.get_experiment_by_name(name)) is not None:
            return found.experiment_id
        location = None  # a server knows where its artifacts go
        if self.uri.startswith("sqlite:///"):  # MLflow would put them into the folder that this process was started in
            database = Path(self.uri.removeprefix("sqlite:///")).resolve()
            location = database.with_name(f"{database.stem}-artifacts").as_uri()
        try:
            return self.client.create_experiment(name, location)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            return self.client.get_experiment_by_name(name).experiment_id  # another run has just made it

    def _log_config(self, values: Mapping[str, str]) -> None:
        """Record recipe and facts as parameters; one that has changed since the run began, as a tag of that name."""
        from mlflow.entities import Param, RunTag

        track, values = self.recipe.track, {_clean(name): cut(value, MAX_VALUE) for name, value in values.items()}
        new = [Param(name, value) for name, value in values.items() if name not in self._params]
        tags = {name: value for name, value in values.items() if self._params.get(name, value) != value}
        tags |= {_clean(name): "true" for name in track.tags}  # MLflow's are names with values
        known = {"group": track.group, "mlflow.note.content": track.notes}
        tags |= {name: cut(value, MAX_VALUE) for name, value in known.items() if value}
        listed = [RunTag(name, value) for name, value in tags.items()]
        for start in range(0, max(len(new), len(listed)), MAX_BATCH):
            batch = slice(start, start + MAX_BATCH)
            self.client.log_batch(self.run_id, params=new[batch], tags=listed[batch])
        self._send_files("recipe.yaml", "run.json")

    def _send_files(self, *names: str) -> None:
        for path in filter(Path.is_file, map(self._folder.joinpath, names)):
            self.client.log_artifact(self.run_id, str(path))

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Record numbers of one step; they are sent once a second."""
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        numbers = {_clean(name): float(value) for name, value in values.items() if name != "step" and is_number(value)}
        new = {name: value for name, value in numbers.items() if (name, step) not in self._known}
        self._unsent |= {(name, step): Metric(name, value, now_ms, step) for name, value in new.items()}
        if time.monotonic() >= self._send_at:
            self._send()

    def log_best(self, step: int, metric: str, value: float) -> None:
        super().log_best(step, metric, value)
        self._known |= {("best/value", step), ("best/step", step)}

    def log_table(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        columns = {column: [row[column] for row in rows] for column in rows[0]}
        self._send()  # before the table: a resumed run knows by its metrics what it has
        self.client.log_table(self.run_id, columns, f"{name}/step_{step:08d}.json")

    def log_images(self, step: int, name: str, images: Sequence[np.ndarray], captions: Sequence[str]) -> None:
        """Record each image under a name of its own, so that one sees a sample change over the steps; captions as a table."""
        names = [f"{name}/{index}" for index in range(len(images))]
        for key, image_HWC in zip(names, images, strict=True):
            self.client.log_image(self.run_id, image_HWC, key=key, step=step)
        self.log_table(step, name, [{"image": key, "caption": text} for key, text in zip(names, captions, strict=True)])

    def alert(self, title: str, text: str, level: str) -> None:
        """Set a tag for the last event of a level; MLflow itself sends no messages."""
        self.client.set_tag(self.run_id, f"alert.{level}", cut(f"{title}: {text}", MAX_VALUE))

    def upload(self) -> None:
        """Send the best value, which a run that goes on for a killed one may lack, files, and models."""
        from hftune.tracking.mlflow_model import log_model, register

        best: Mapping[str, Any] = {}
        if (self._folder / "result.json").is_file():  # not of an evaluation
            best = TrainResult.read(self._folder).best
        if "metric" in best:
            self.log_best(best["step"], best["metric"], best["value"])
        self._send_files(*FILES)
        sources = {}
        for name in MODELS[self.recipe.track.upload]:
            if (self._folder / name).is_dir():  # there is no model_last if the last one is the best
                with self._reported(f"The {name} of run {self.run_id} was not logged to MLflow"):
                    sources[name] = log_model(self.recipe, self.run_id, self.uri, name)
        if (name := self.recipe.track.register) and "model" in sources:
            with self._reported(f"The model was not registered at MLflow as {name}"):
                number = register(self.recipe, self.run_id, self.uri, sources["model"], best)
                print(note(f"The model is version {number} of {name} in MLflow's registry."), flush=True)

    @contextmanager
    def _reported(self, what: str) -> Iterator[None]:
        """Report whatever is wrong with MLflow's copy of a model: training is done and saved by now."""
        try:
            yield
        except Exception as error:  # of transformers, of MLflow, or of the task's own examples and answers
            print(warning(f"{what}: {reason(error)}. The model itself is intact, in {self._folder / 'model'}."), flush=True)

    def finish(self, status: Status) -> None:
        """Send what is left, close the run, and say where a finished one can be seen."""
        self._send()
        if self._monitor is not None:
            self._monitor.finish()
        self.client.set_terminated(self.run_id, STATUS[status])
        if status != "finished":
            return
        where = ""
        if self.uri.startswith("sqlite"):
            where = f" View it with `mlflow ui --backend-store-uri {self.uri}`."
        elif self.uri.startswith("http"):
            experiment = self.client.get_run(self.run_id).info.experiment_id
            where = f" View it at {without_secrets(self.uri).rstrip('/')}/#/experiments/{experiment}/runs/{self.run_id}."
        print(note(f"MLflow has recorded this run as {self.run_id}.{where}"), flush=True)

    def _send(self) -> None:
        self._send_at = time.monotonic() + SEND_S
        while batch := dict(islice(self._unsent.items(), MAX_METRICS)):
            self.client.log_batch(self.run_id, metrics=[*batch.values()])
            for key in batch:
                del self._unsent[key]


def _clean(name: str) -> str:
    return re.sub(r"[^\w.\-/ :]", "_", name)  # MLflow refuses the others

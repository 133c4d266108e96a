"""One run at MLflow: parameters, metrics, files and the model. Independent of training, which continues if the server dies.

Not Accelerate's MLflowTracker: it drops long parameters, raises in the middle of training if the server is gone, and cannot
continue a run whose recipe has changed.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

import numpy as np

from hftune.config import Recipe
from hftune.config.recipe import flat
from hftune.errors import ConfigError
from hftune.tracking.backend import EarlierRun, TrackerBackend
from hftune.tracking.console import is_number

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

STORE = Path("outputs/mlflow.db")
"""The default store; the files of the runs are next to it, in mlflow-artifacts."""
FILES = ("recipe.yaml", "metrics.jsonl", "result.json", "predictions.jsonl")
SEND_S = 1.0  # a request takes 25 ms, a step may take less: what one second brought is sent together
RETRY_S = 60.0  # between two attempts to reach a server that does not answer
PATIENCE = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "4", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}  # seconds, and the number of retries
MAX_METRICS, MAX_PARAMS, MAX_VALUE = 1000, 100, 6000  # in one request, and characters of a parameter: MLflow's own bounds


def prepare_mlflow() -> None:
    """Set what MLflow reads on import: no telemetry, and only errors are logged."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)  # it warns about each attempt; see _forgiven


def tracking_uri() -> str:
    """Return the store: that of MLFLOW_TRACKING_URI or ``mlflow.set_tracking_uri``, else a database in the folder outputs."""
    import mlflow

    return mlflow.get_tracking_uri() if mlflow.is_tracking_uri_set() else f"sqlite:///{STORE.resolve()}"


def check_mlflow() -> None:
    """Check that the store answers.

    Raises:
        ConfigError: it does not answer within ten seconds, or refuses.
    """
    prepare_mlflow()
    with named_where_it_refuses(tracking_uri()):
        _connect(tracking_uri()).search_experiments(max_results=1)


def _connect(uri: str) -> MlflowClient:
    from mlflow import MlflowClient

    if uri == f"sqlite:///{STORE.resolve()}":
        STORE.parent.mkdir(parents=True, exist_ok=True)
    return MlflowClient(uri)


@contextmanager
def named_where_it_refuses(uri: str) -> Iterator[None]:
    """Wait for the store only briefly, and say what to do if it fails.

    Raises:
        ConfigError: the block could not reach the store, or was refused.
    """
    from mlflow.exceptions import MlflowException

    try:
        with briefly():
            yield
    except (MlflowException, OSError) as error:
        raise ConfigError(
            f"track.with=mlflow: {_without_password(uri)} cannot be used: {_reason(error)}. Start that server, or set "
            f"MLFLOW_TRACKING_URI to another; without it, runs are kept in {STORE}."
        ) from error


@contextmanager
def briefly() -> Iterator[None]:
    """Let requests fail within ten seconds unless the user has set this; MLflow would retry for many minutes."""
    ours = {name: value for name, value in PATIENCE.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            del os.environ[name]


class MlflowRun(TrackerBackend):
    """A run at MLflow. At its end it has every line of metrics.jsonl, even if the server was down for a while."""

    run_id: str | None = None

    def __init__(self, recipe: Recipe):
        super().__init__(recipe)
        self.uri = tracking_uri()
        self.client = _connect(self.uri)
        self._params: Mapping[str, str] = {}  # that the run has, and cannot change
        self._known: set[tuple[str, int, float]] = set()  # metrics that it had before
        self._unsent: list[Any] = []
        self._send_at = 0.0
        self._is_lost = False
        self._monitor: SystemMetricsMonitor | None = None  # until start has made it

    @classmethod
    def check(cls, recipe: Recipe) -> None:
        check_mlflow()

    def start(self, config: Mapping[str, Any], earlier: EarlierRun) -> None:
        """Create the run, or reopen the earlier one if the store has it; send the lines of metrics.jsonl that it lacks.

        Raises:
            ConfigError: the store does not answer any more, or refuses.
        """
        from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

        self.run_id = earlier.run_id
        with named_where_it_refuses(self.uri):
            is_new = not self._reopen()
            if is_new:
                self._create()
            for line in earlier.lines:
                self.log(line["step"], line)
            self._send()
        self._monitor = SystemMetricsMonitor(self.run_id, resume_logging=not is_new, tracking_uri=self.uri)
        self._monitor.start()
        self._log_params({name: str(value) for name, value in flat(config).items()})

    def _reopen(self) -> bool:
        """Reopen the earlier run with what it has; return whether the store has it."""
        from mlflow.exceptions import MlflowException

        try:
            run = self.client.get_run(self.run_id) if self.run_id else None
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            run = None
        if run is None or run.info.lifecycle_stage != "active":
            return False
        self.client.update_run(self.run_id, status="RUNNING")
        self._params = run.data.params
        names = [name for name in run.data.metrics if not name.startswith("system/")]
        histories = [self.client.get_metric_history(self.run_id, name) for name in names]
        self._known = {(metric.key, metric.step, metric.value) for history in histories for metric in history}
        return True

    def _create(self) -> None:
        from mlflow.tracking.context.registry import resolve_tags

        name = self.recipe.track.run_name or self.recipe.recipe
        self.run_id = self.client.create_run(self._experiment_id(), tags=resolve_tags(), run_name=name).info.run_id

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

    def _log_params(self, values: Mapping[str, str]) -> None:
        """Record the recipe's keys as parameters; a key that has changed since the run began, as a tag of that name."""
        from mlflow.entities import Param, RunTag

        values = {_clean(name): _cut(value) for name, value in values.items()}
        new = [Param(name, value) for name, value in values.items() if name not in self._params]
        changed = [RunTag(name, value) for name, value in values.items() if self._params.get(name, value) != value]
        with named_where_it_refuses(self.uri):
            for start in range(0, max(len(new), len(changed)), MAX_PARAMS):
                batch = slice(start, start + MAX_PARAMS)
                self.client.log_batch(self.run_id, params=new[batch], tags=changed[batch])
            self.client.log_artifact(self.run_id, str(self._path("recipe.yaml")))

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Record numbers of one step; they are sent once a second."""
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        numbers = {_clean(name): float(value) for name, value in values.items() if name != "step" and is_number(value)}
        new = {name: value for name, value in numbers.items() if (name, step, value) not in self._known}
        self._unsent += [Metric(name, value, now_ms, step) for name, value in new.items()]
        if time.monotonic() >= self._send_at:
            self._send()

    def log_table(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        data = {name: [row[name] for row in rows] for name in rows[0]}
        if not self._is_lost:
            with self._forgiven():
                self.client.log_table(self.run_id, data, f"{name}/step_{step:08d}.json")

    def log_images(self, step: int, name: str, images: Sequence[np.ndarray], captions: Sequence[str]) -> None:
        if not self._is_lost:
            with self._forgiven():
                for index, image_HWC in enumerate(images):
                    self.client.log_image(self.run_id, image_HWC, f"{name}/step_{step:08d}/{index}.png")

    def close(self) -> None:
        """Send the files and the model, and close the run. If the server is gone, say what it lacks."""
        self._send()
        if not self._is_lost:
            with self._forgiven():
                self._monitor.finish()
                for name in FILES:
                    if (path := self._path(name)).is_file():
                        self.client.log_artifact(self.run_id, str(path))
        if not self._is_lost:
            self._log_model()
        if not self._is_lost:
            with self._forgiven():
                self.client.set_terminated(self.run_id, "FINISHED")
                shown_by = f" `mlflow ui --backend-store-uri {self.uri}` shows it." if self.uri.startswith("sqlite") else ""
                print(f"MLflow has it as run {self.run_id}.{shown_by}", flush=True)
        if self._is_lost:
            print(
                f"MLflow lacks {len(self._unsent)} values of run {self.run_id} and perhaps files; all of them are in "
                f"{self.recipe.output_dir}.",
                flush=True,
            )

    def _log_model(self) -> None:
        """Send the model. Training is done and saved by now, so whatever is wrong with this copy is only reported."""
        from hftune.tracking.mlflow_model import log_model

        try:
            with self._forgiven(is_brief=False):  # a model takes its time
                log_model(self.recipe, self.run_id, self.uri)
        except Exception as error:  # of transformers, of MLflow's flavors, or of the task's own examples and answers
            reason = f"{type(error).__name__}: {error}".partition("\n")[0].rstrip(".")
            where = self._path("model")
            print(f"MLflow gets no model of run {self.run_id}: {reason}. The model itself is whole, in {where}.", flush=True)

    def abandon(self) -> None:
        """Close a run that failed."""
        self._send()
        if not self._is_lost:
            with self._forgiven():
                if self._monitor is not None:
                    self._monitor.finish()
                self.client.set_terminated(self.run_id, "FAILED")

    def _send(self) -> None:
        was_lost, self._is_lost = self._is_lost, False
        with self._forgiven(is_known=was_lost):
            while self._unsent:
                self.client.log_batch(self.run_id, metrics=self._unsent[:MAX_METRICS])
                del self._unsent[:MAX_METRICS]
            if was_lost:
                print("MLflow answers again, and has got what it missed.", flush=True)
        self._send_at = time.monotonic() + (RETRY_S if self._is_lost else SEND_S)

    @contextmanager
    def _forgiven(self, is_known: bool = False, is_brief: bool = True) -> Iterator[None]:
        """Continue if the server fails, and say so unless it is known."""
        from mlflow.exceptions import MlflowException

        try:
            if is_brief:
                with briefly():
                    yield
            else:
                yield
        except (MlflowException, OSError) as error:
            self._is_lost = True
            if not is_known:
                where = f"MLflow at {_without_password(self.uri)} does not take what is logged: {_reason(error)}."
                print(f"{where} Training goes on, and tries again.", flush=True)

    def _path(self, name: str) -> Path:
        return Path(self.recipe.output_dir) / name


def _clean(name: str) -> str:
    return re.sub(r"[^\w.\-/ :]", "_", name)  # MLflow refuses the others


def _cut(value: str) -> str:
    return value if len(value) <= MAX_VALUE else f"{value[: MAX_VALUE - 1]}…"


def _without_password(uri: str) -> str:
    """Return an address without its possible secrets: user and password, and the values of a query.

    A password should spell / and @ as %2F and %40, but does not always: everything up to the last @ goes.
    """
    scheme, separator, rest = uri.partition("://")
    if not separator:
        return uri
    address, mark, query = rest.rpartition("@")[2].partition("?")
    names = [f"{name}=..." for name, value in parse_qsl(query, keep_blank_values=True) if value]
    return f"{scheme}{separator}{address}{mark}{'&'.join(names) or '...' * bool(query)}"


def _reason(error: BaseException) -> str:
    """Return the root cause: requests, urllib3 and MLflow each wrap it in a paragraph of their own."""
    root = error
    while (cause := root.__cause__ or root.__context__) is not None:
        root = cause
    if isinstance(root, OSError):
        return root.strerror or str(root)
    return str(error).strip().partition("\n")[0].partition(". ")[0].rstrip(".")

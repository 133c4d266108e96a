"""metrics.jsonl always, and the trackers of ``track.with``. Main process only; independent of model and data."""

from __future__ import annotations

import heapq
import importlib.util
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hftune.atomic import GrowingFile, explain_write_errors, write_lines
from hftune.callbacks import Begin, Callback, CheckpointDone, End, EvaluationDone, Failure, Log
from hftune.config.importing import import_named
from hftune.config.keys import is_dotted
from hftune.config.recipe import Recipe
from hftune.distributed.rounds import agents_word
from hftune.errors import ConfigError
from hftune.tracking.backend import EarlierRun, Status, TrackerBackend
from hftune.tracking.console import is_number, warning
from hftune.tracking.jsonl import finite, read_lines, strict_json
from hftune.tracking.lane import Lane
from hftune.tracking.summary import describe_best

TRACKERS = {
    "wandb": "hftune.tracking.wandb_tracker.WandbRun",
    "mlflow": "hftune.tracking.mlflow_tracker.MlflowRun",
    "tensorboard": "hftune.tracking.accelerate_tracker.TensorBoardRun",
}
"""The classes of the trackers with a bare name, imported when a recipe names them; the others are Accelerate's.

hftune.config.sections lists all names. A name is also that of the package that the tracker needs.
"""
EXTRAS = ("mlflow", "tensorboard")
"""The trackers whose package is an extra of hftune in pyproject.toml."""
MAX_CLASSES = 100
"""Of a confusion matrix that trackers show; larger ones take them seconds, and nobody can read them."""
MAX_ROWS = 200
"""Rows of a table of predictions; predictions.jsonl has all of them."""
END_S = 300.0
"""For trackers to take what is left at the end of a run, without models."""
MIN_UPLOAD_BYTES_PER_S = 1e6
"""A model may be uploaded this slowly."""
HURRY_S, FLUSH_S = 3.0, 1.5
"""For the end of a run that failed or is interrupted, and for what is left then, such as wandb's file, written once a second.

The watchdog ends the process after 5 s.
"""


def check_trackers(recipe: Recipe) -> None:
    """Find out, before anything is loaded, whether each tracker can be used.

    Raises:
        ConfigError: a package is not installed, W&B has no key, MLflow's store does not answer, or a class is no tracker.
    """
    for name in recipe.track.with_:
        tracker_class(name).check(recipe)


def tracker_class(name: str) -> type[TrackerBackend]:
    """Return the class that a name in ``track.with`` stands for.

    Raises:
        ConfigError: its package is not installed, it cannot be imported, or it is not a TrackerBackend.
    """
    if not is_dotted(name):
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # no origin: just a folder of that name, such as the logs of earlier runs
            package = f'"hftune[{name}]"' if name in EXTRAS else name.replace("_", "-")
            raise ConfigError(f"track.with={name} needs a package that is not installed: pip install {package}.")
        if name not in TRACKERS:
            from hftune.tracking.accelerate_tracker import AccelerateRun

            return type(f"AccelerateRun_{name}", (AccelerateRun,), {"kind": name})
    module, _, attribute = TRACKERS.get(name, name).rpartition(".")
    found = import_named("track.with", name, module, attribute)
    if not (isinstance(found, type) and issubclass(found, TrackerBackend)):
        raise ConfigError(f"track.with={name} is not a subclass of hftune.TrackerBackend.")
    return found


class Tracker(Callback):
    """Appends to metrics.jsonl and passes numbers on to the trackers, which take them in threads of their own.

    Args:
        run_ids: of the trackers' runs that are continued; see ``run_ids``.
        awaits_evaluation: says whether the step to resume from is evaluated again, so that what was logged of that is dropped.
        must_start: an error if a tracker does not start. Else a warning: an elastic job that trains goes on without it.
        later: takes what may last for hours, such as an upload, or fail: closing the trackers, once everything is saved.
    """

    must_not_fail = True

    def __init__(
        self,
        recipe: Recipe,
        run_ids: Mapping[str, str] | None = None,
        awaits_evaluation: Callable[[], bool] = lambda: False,
        must_start: bool = True,
        later: Callable[[Callable[[], None]], None] = lambda close: close(),
    ):
        self.path = recipe.folder / "metrics.jsonl"
        self.recipe, self.name = recipe, recipe.track.run_name or recipe.recipe
        self._earlier, self._must_start, self._later = run_ids or {}, must_start, later
        self._awaits_evaluation = awaits_evaluation
        self._lanes: list[Lane] = []
        self._best: tuple[Any, ...] | None = None

    def on_begin(self, begin: Begin) -> None:
        self.start(begin.step, begin.facts)

    def on_log(self, log: Log) -> None:
        self.log(log.step, log.epoch, log.values)

    def on_evaluation(self, evaluation: EvaluationDone) -> None:
        if evaluation.split == "test":
            return
        self.show(
            evaluation.step,
            f"{evaluation.split}/",
            rows=evaluation.rows,
            samples=evaluation.samples,
            counts=evaluation.metrics.get("confusion_matrix", ()),
            labels=() if evaluation.labels is None else evaluation.labels,
            images=evaluation.images,
            captions=evaluation.captions,
        )
        best = evaluation.best_step, self.recipe.eval.metric, evaluation.best
        if evaluation.best is not None and best != self._best:
            self._best = best
            self._do("log_best", *best)

    def on_checkpoint(self, checkpoint: CheckpointDone) -> None:
        if checkpoint.failure is not None:
            self._do("alert", "Checkpoint failed", checkpoint.failure, "warning")

    def on_end(self, end: End) -> None:
        self.file.close()
        self._later(lambda: self.close(f"{end.result.steps} steps, {describe_best(end.result.best)}."))

    def on_failure(self, failure: Failure) -> None:
        """End a run that failed, after an alert with the reason, or that is to be resumed."""
        if failure.is_interruption:
            goes_on = agents_word() is not None  # the next round, in other processes
            self._finish("paused" if goes_on else "interrupted", HURRY_S)
        else:
            self._do("alert", f"{self.name} failed", failure.reason, "error")
            self._finish("failed", HURRY_S)

    def start(self, step: int, facts: Mapping[str, Any]) -> None:
        """Open metrics.jsonl and the trackers.

        Args:
            step: after which training resumes; lines of later steps are dropped, and those of a test, which the end makes.
            facts: of run.json, which join the recipe in the trackers' configuration.

        Raises:
            ConfigError: a tracker does not start.
        """
        lines, awaits_evaluation = read_lines(self.path) if step else [], step > 0 and self._awaits_evaluation()
        last = {False: step, True: step - awaits_evaluation}  # by whether a line is of an evaluation
        lines = [line for line in lines if line["step"] <= last["eval/loss" in line] and "test/loss" not in line]
        with explain_write_errors(self.path):
            write_lines(self.path, (f"{strict_json(line)}\n" for line in lines))
            self.file = GrowingFile(self.path)
        config = {**self.recipe.to_dict(), "run": dict(facts)}
        for name in self.recipe.track.with_:
            try:
                lane = Lane(name, tracker_class(name)(self.recipe), self.path.parent)
                lane.start(config, EarlierRun(step, self._earlier.get(name), lines, awaits_evaluation))
                self._lanes.append(lane)
            except ConfigError as error:
                if self._must_start:
                    raise
                print(warning(f"{error} It gets nothing more; {self.path} has everything."), flush=True)

    def log(self, step: int, epoch: float | None, values: Mapping[str, Any]) -> None:
        """Record values of one step. What is not finite becomes null.

        Args:
            epoch: number of finished passes, with a fraction; None if it is not known.
        """
        if epoch is not None:  # rounded as in the file, from which a resumed run sends the trackers what they lack
            values = {"epoch": round(epoch, 6), **values}
        values = finite(values)
        self.file.append(f"{strict_json({'step': step, **values})}\n".encode())
        self._do("log", step, {name: value for name, value in values.items() if is_number(value)})

    def show(
        self,
        step: int,
        prefix: str,
        *,
        rows: Sequence[Mapping[str, Any]] = (),
        samples: Sequence[Mapping[str, Any]] = (),
        counts: Sequence[Sequence[int]] = (),
        labels: Sequence[str] = (),
        images: Sequence[np.ndarray] = (),
        captions: Sequence[str] = (),
    ) -> None:
        """Show what an evaluation or a prediction has made, as far as there is any of it.

        Args:
            prefix: of the names at the trackers, such as "eval/".
            rows: as ``Task.describe`` returns them: a table of those with the greatest errors, or of the first.
            samples: a table of samples, all with the same fields.
            counts: how often each class was taken for each; rows are true classes. Of many, the most frequent mistakes.
            images: of samples, each (H, W, 3) uint8, with a caption each.
        """
        if samples and samples[0]:
            self._do("log_table", step, f"{prefix}samples", samples)
        if any(rows):
            worst = [{"index": index, **row} for index, row in enumerate(rows)]
            if all(is_number(row.get("error")) for row in worst):
                worst.sort(key=lambda row: -row["error"] if math.isfinite(row["error"]) else math.inf)
            del worst[MAX_ROWS:]
            fields = dict.fromkeys(field for row in worst for field in row)
            self._do("log_table", step, f"{prefix}predictions", [{field: row.get(field) for field in fields} for row in worst])
        if 0 < len(labels) == len(counts) > MAX_CLASSES:
            cells = ((count, i, j) for i, row in enumerate(counts) for j, count in enumerate(row) if i != j and count)
            mistakes = [
                {"true class": labels[i], "prediction": labels[j], "count": count}
                for count, i, j in heapq.nlargest(MAX_ROWS, cells)
            ]
            self._do("log_table", step, f"{prefix}confusion", mistakes)
        elif 0 < len(labels) == len(counts):
            self._do("log_confusion_matrix", step, f"{prefix}confusion", counts, labels)
        if len(images):
            self._do("log_images", step, f"{prefix}images", images, captions)

    def run_ids(self) -> dict[str, str]:
        """Return what finds the trackers' runs again; of trackers that did not start, what found those of before."""
        found = {**self._earlier, **{lane.name: lane.backend.run_id for lane in self._lanes}}
        return {name: run_id for name, run_id in found.items() if run_id is not None}

    def close(self, text: str) -> None:
        """Send files and models of a run that is finished, and end it at the trackers, after an alert with its result."""
        self._do("alert", f"{self.name} finished", text, "info")
        self._do("upload")
        folders = (path for name in ("model", "model_last") for path in (self.path.parent / name).rglob("*"))
        num_bytes = sum(path.stat().st_size for path in folders if path.is_file())
        self._finish("finished", END_S + num_bytes / MIN_UPLOAD_BYTES_PER_S)

    def _finish(self, status: Status, limit_s: float) -> None:
        until = time.monotonic() + limit_s
        self._do("finish", status)
        try:
            for lane in self._lanes:
                lane.wait(until)
        finally:  # also if Ctrl-C ends an upload
            stuck = [lane for lane in self._lanes if not lane.done.is_set()]
            for lane in stuck:
                lane.hurry()
            if stuck:
                time.sleep(FLUSH_S)
            for lane in stuck:
                lane.leave()

    def _do(self, method: str, *args: Any) -> None:
        for lane in self._lanes:
            lane.do(method, *args)

"""One run at Weights & Biases. Independent of training, which no server can slow down or end.

Not through Accelerate's WandBTracker, which has no captions, artifacts, alerts, summary and exit code. All calls are made in
another thread: one with a table asks the server first, and takes 20 s if the server is down.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hftune.config import Recipe, TrackConfig
from hftune.errors import ConfigError
from hftune.tracking.backend import EarlierRun, TrackerBackend
from hftune.tracking.background import Background
from hftune.tracking.console import is_number, warning
from hftune.tracking.wandb_artifacts import artifacts, registry_path
from hftune.tracking.wandb_resume import Continuation, continue_offline, continue_online, repeat_all
from hftune.tracking.wandb_server import answers, leave, wait_while_it_answers

ALERT_LEVELS = {"info": "INFO", "warning": "WARN", "error": "ERROR"}
HURRY_S = 3.0
"""For the end of a run that failed or is interrupted: the watchdog ends the process two seconds later."""
FLUSH_S = 1.5
"""For wandb to write its file, which it does once a second."""
FINISH_S = 300
"""For a server that answers to take what is left at the end, without models."""
SLOWEST = 1_000_000
"""Bytes a second at which a model may be uploaded."""


def settings(finish_s: float = FINISH_S) -> dict[str, Any]:
    """Return our settings of wandb; a variable of the environment wins, such as WANDB_SILENT=false for all that wandb says."""
    ours = {
        "silent": True,
        "save_code": False,
        "x_transaction_log_flush_interval": 1,  # seconds; with wandb's 15, a kill leaves an empty file
        "finish_timeout": finish_s,  # by default it waits forever
        "finish_timeout_raises": True,
    }
    return {name: value for name, value in ours.items() if f"WANDB_{name.upper()}" not in os.environ}


def mode() -> str:
    """Return online, offline or disabled, as the environment or ``wandb offline`` says."""
    import wandb

    return wandb.setup(wandb.Settings(**settings())).settings.mode


class WandbRun(TrackerBackend):
    """A run at W&B. After an interruption it continues, with each step once; see wandb_resume."""

    def __init__(self, recipe: Recipe):
        super().__init__(recipe)
        self._run: Any = None  # until start has made it
        self._folder = Path(recipe.output_dir) / "wandb"
        self._lost: set[str] = set()  # kinds of calls that have failed, to say so once
        self._owns_data_dir = "WANDB_DATA_DIR" not in os.environ

    @classmethod
    def check(cls, recipe: Recipe) -> None:
        """Log in, unless nothing is uploaded.

        Raises:
            ConfigError: no key is known, or the server does not accept it.
        """
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # of wandb itself: it would delay the end without a server
        import wandb

        if mode() != "online":
            return
        way_out = "or set WANDB_MODE=offline and upload later with `wandb sync`"
        try:
            has_key = wandb.login(prompt=False)  # asks the server whether it knows the key
        except wandb.errors.AuthenticationError as error:
            raise ConfigError(f"track.with=wandb: {error} Check key and network, {way_out}.") from error
        if not has_key:
            raise ConfigError(f"track.with=wandb: no W&B key is known. Run `wandb login`, set WANDB_API_KEY, {way_out}.")

    def start(self, config: Mapping[str, Any], earlier: EarlierRun) -> None:
        self._mode = mode()
        if self._owns_data_dir:
            os.environ["WANDB_DATA_DIR"] = str(self._folder.resolve())  # where wandb copies what it uploads; by default, home
        self._background = Background("wandb", self._say_lost)
        self._continuation = self._init(config, earlier)
        self._is_watched = self._mode == "online" and answers(self._run.settings.base_url)
        self._background.do("definitions", partial(self._run.define_metric, "epoch", hidden=True))
        for line in self._continuation.lines:
            self.log(line["step"], {name: value for name, value in line.items() if name != "step" and is_number(value)})
        if self._run.url:
            print(f"W&B shows this run at {self._run.url}", flush=True)

    def _init(self, config: Mapping[str, Any], earlier: EarlierRun) -> Continuation:
        """Begin the run, or continue the earlier one if that is possible, else in a new one of the same group."""
        import wandb

        if earlier.step and self._mode == "online":
            found = continue_online(self._project_path(), earlier, self._awaits_evaluation(config, earlier))
            if found is not None:
                try:
                    self._run = wandb.init(**self._options(config, **found.options))
                    return found
                except wandb.errors.Error:  # W&B's self-managed servers cannot rewind, and a deleted run is gone
                    pass
        found = continue_offline(self._folder, earlier) if self._mode == "offline" else repeat_all(earlier)
        if earlier.run_id and "id" not in found.options:
            found.options["notes"] = "\n\n".join(
                filter(None, [self.recipe.track.notes, f"Continues run {earlier.run_id} from step {earlier.step}."])
            )
        self._run = wandb.init(**self._options(config, **found.options))
        return found

    def _options(self, config: Mapping[str, Any], **more: Any) -> dict[str, Any]:
        """Collect the arguments of wandb.init. What the recipe leaves at its default, W&B's variables decide."""
        import wandb

        track, default = self.recipe.track, TrackConfig()
        chosen = {
            "project": (track.project, default.project, "WANDB_PROJECT"),
            "name": (track.run_name or self.recipe.recipe, self.recipe.recipe, "WANDB_NAME"),
            "entity": (track.entity, None, "WANDB_ENTITY"),
            "group": (track.group or group(self.recipe), group(self.recipe), "WANDB_RUN_GROUP"),
            "tags": (track.tags or None, None, "WANDB_TAGS"),
            "notes": (track.notes, None, "WANDB_NOTES"),
            "job_type": (track.job_type, default.job_type, "WANDB_JOB_TYPE"),
        }
        options = {
            name: value
            for name, (value, usual, variable) in chosen.items()
            if value != usual or (value is not None and variable not in os.environ)
        }
        sends_models = track.register or track.upload in ("best", "all")
        num_bytes = 8 * config.get("run", {}).get("parameters", 0) if sends_models else 0  # of two models in float32
        limits = wandb.Settings(**settings(FINISH_S + num_bytes / SLOWEST))
        return {**options, "dir": self.recipe.output_dir, "config": dict(config), "settings": limits, **more}

    def _project_path(self) -> str:
        options = self._options({})
        entity = options.get("entity") or os.environ.get("WANDB_ENTITY")
        project = options.get("project") or os.environ["WANDB_PROJECT"]
        return f"{entity}/{project}" if entity else project

    def _awaits_evaluation(self, config: Mapping[str, Any], earlier: EarlierRun) -> bool:
        """Say whether the step to resume from is evaluated first, as an interruption left it."""
        run, step = config["run"], earlier.step
        is_due = self.recipe.eval.falls_on(step, run["num_steps"], run["steps_per_epoch"])
        return is_due and not any(line["step"] == step and "eval/loss" in line for line in earlier.lines)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._log(step, "numbers", lambda: dict(values))

    def log_table(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        import wandb

        def table() -> dict[str, Any]:
            data = [[*row.values()] for row in rows]
            return {name: wandb.Table(columns=[*rows[0]], data=data, allow_mixed_types=True)}

        self._log(step, name, table, may_wait=True)

    def log_confusion_matrix(self, step: int, name: str, counts: Sequence[Sequence[int]], labels: Sequence[str]) -> None:
        """Record it as W&B's own panel, which wandb.plot.confusion_matrix would count from every sample."""
        import wandb

        def panel() -> dict[str, Any]:
            cells = [[labels[i], labels[j], count] for i, row in enumerate(counts) for j, count in enumerate(row)]
            columns = ["Actual", "Predicted", "nPredictions"]
            table = wandb.Table(columns=columns, data=cells)
            fields = {column: column for column in columns}
            return {name: wandb.plot_table("wandb/confusion_matrix/v1", table, fields, {"title": name})}

        self._log(step, name, panel, may_wait=True)

    def log_images(self, step: int, name: str, images: Sequence[np.ndarray], captions: Sequence[str]) -> None:
        import wandb

        def pictures() -> dict[str, Any]:
            pairs = zip(images, captions, strict=True)
            return {name: [wandb.Image(image_HWC, caption=caption) for image_HWC, caption in pairs]}

        self._log(step, name, pictures)

    def _log(self, step: int, name: str, make: Callable[[], dict[str, Any]], may_wait: bool = False) -> None:
        """Log values to the row of a step; to the summary if the server has that row from before an interruption."""

        def call() -> None:
            if step <= self._continuation.last_step:
                self._run.summary.update(make())
            else:
                self._run.log(make(), step=step)

        self._background.do(name, call, may_wait)

    def log_best(self, step: int, metric: str, value: float) -> None:
        """Write the summary by hand: define_metric would replace a metric's last value, and forget the best one in a resume."""
        best = {"best/value": value, "best/step": step, "best/metric": metric}
        self._background.do("best", lambda: self._run.summary.update(best))

    def alert(self, title: str, text: str, level: str) -> None:
        if self._run is not None:
            self._background.do("alerts", partial(self._run.alert, title, text, level=ALERT_LEVELS[level]))

    @property
    def run_id(self) -> str | None:
        return self._run.id

    def close(self) -> None:
        """Send files and models, finish the run, and say where it is."""
        self._background.do("files", self._log_artifacts, may_wait=True)
        folder, run_id = self._run.settings.sync_dir, self._run.id
        if not self._finish(0):
            # Under the same id, sync would append all rows to those that the server has.
            sync = f"wandb sync --include-online --id {run_id}-complete {folder}"
            what = f"W&B does not answer: run {run_id} is incomplete there. Run `{sync}` later to upload all of it."
            print(warning(what), flush=True)
        elif self._mode == "offline":
            print(f"W&B: `wandb sync {folder}` uploads this run.", flush=True)
        elif self._mode == "online" and self._owns_data_dir and not self._lost:
            shutil.rmtree(self._folder / "artifacts", ignore_errors=True)  # copies of what has been uploaded

    def interrupt(self) -> None:
        """Mark the run as preempted, which lets a sweep start it again, and end it with a failure, as the mark demands."""
        if self._run is not None:
            self._background.do("preemption", self._run.mark_preempting)
        self.abandon()

    def pause(self) -> None:
        """End the run without the mark, for which a sweep would start it a second time."""
        if self._run is not None:
            self._finish(0, HURRY_S)

    def abandon(self) -> None:
        if self._run is not None:
            self._finish(1, HURRY_S)

    def _log_artifacts(self) -> None:
        register = self.recipe.track.register
        for artifact, aliases in artifacts(self.recipe):
            self._run.log_artifact(artifact, aliases=aliases)
            if register is not None and "best" in aliases:
                self._register(artifact, register)

    def _register(self, artifact: Any, name: str) -> None:
        if self._mode != "online":
            print(f"track.register={name}: W&B's registry cannot be reached offline. Link the model once it is uploaded.")
            return
        try:
            self._run.link_artifact(artifact.wait(), registry_path(name))
        except Exception as error:  # the run itself ends well without
            self._say_lost(f"track.register={name}", error)

    def _finish(self, exit_code: int, limit_s: float | None = None) -> bool:
        """Finish the run in this time, or while the server answers, and leave if it takes longer. Return whether it did."""
        done, succeeded = threading.Event(), threading.Event()

        def finish() -> None:
            try:
                self._run.finish(exit_code=exit_code)
                succeeded.set()
            finally:  # it fails if the process is ending, where wandb itself waits
                done.set()

        self._background.do("the end", finish)
        url = self._run.settings.base_url
        is_alive = partial(answers, url) if self._is_watched else lambda: True
        is_done = False
        try:
            is_in_time = wait_while_it_answers(done, is_alive) if limit_s is None else done.wait(limit_s)
            is_done = is_in_time and succeeded.is_set()
        finally:  # also if Ctrl-C ends an upload
            if not is_done:
                self._background.hurry()
                done.wait(FLUSH_S)
                leave()
            if self._owns_data_dir:
                os.environ.pop("WANDB_DATA_DIR", None)
        return is_done

    def _say_lost(self, name: str, error: BaseException) -> None:
        """Say once for each kind of call that it failed; others, and later ones, may succeed."""
        if name not in self._lost:
            self._lost.add(name)
            reason = f"{type(error).__name__}: {error}".partition("\n")[0].rstrip(".")
            print(warning(f"W&B did not accept {name}: {reason}. {self.recipe.output_dir} has everything."), flush=True)


def group(recipe: Recipe) -> str:
    """Return the default group: the output folder's name, which a run shares with its continuations and evaluations."""
    return Path(recipe.output_dir).resolve().name

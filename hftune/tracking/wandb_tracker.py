"""One run at Weights & Biases. Independent of training.

Not through Accelerate's WandBTracker, which has no captions, artifacts, alerts, summary and exit code.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from hftune.config import Recipe, TrackConfig
from hftune.errors import ConfigError
from hftune.tracking.backend import EarlierRun, Status, TrackerBackend
from hftune.tracking.console import is_number, warning
from hftune.tracking.lane import reason
from hftune.tracking.wandb_artifacts import artifacts, registry_path
from hftune.tracking.wandb_resume import Continuation, continue_offline, continue_online, repeat_all

ALERT_LEVELS = {"info": "INFO", "warning": "WARN", "error": "ERROR"}


def settings() -> dict[str, Any]:
    """Return our settings of wandb; a variable of the environment wins, such as WANDB_SILENT=false for all that wandb says."""
    ours = {
        "silent": True,
        "save_code": False,
        "x_transaction_log_flush_interval": 1,  # seconds; with wandb's 15, a kill leaves an empty file
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
        self._is_uploaded = False
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
        self._continuation = self._init(config, earlier)
        self.url = self._run.settings.base_url if self._mode == "online" else None
        self._run.define_metric("epoch", hidden=True)
        for line in self._continuation.lines:
            self.log(line["step"], {name: value for name, value in line.items() if name != "step" and is_number(value)})
        if self._run.url:
            print(f"W&B shows this run at {self._run.url}", flush=True)

    def _init(self, config: Mapping[str, Any], earlier: EarlierRun) -> Continuation:
        """Begin the run, or continue the earlier one if that is possible, else in a new one of the same group."""
        import wandb

        if earlier.step and self._mode == "online":
            found = continue_online(self._project_path(), earlier)
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
        own = {"dir": self.recipe.output_dir, "config": dict(config), "settings": wandb.Settings(**settings())}
        return {**options, **own, **more}

    def _project_path(self) -> str:
        options = self._options({})
        entity = options.get("entity") or os.environ.get("WANDB_ENTITY")
        project = options.get("project") or os.environ["WANDB_PROJECT"]
        return f"{entity}/{project}" if entity else project

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Log values to the row of a step; to the summary if the server has that row from before an interruption."""
        if step <= self._continuation.last_step:
            self._run.summary.update(dict(values))
        else:
            self._run.log(dict(values), step=step)

    def log_table(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        import wandb

        data = [[*row.values()] for row in rows]
        self.log(step, {name: wandb.Table(columns=[*rows[0]], data=data, allow_mixed_types=True)})

    def log_confusion_matrix(self, step: int, name: str, counts: Sequence[Sequence[int]], labels: Sequence[str]) -> None:
        """Record it as W&B's own panel, which wandb.plot.confusion_matrix would count from every sample."""
        import wandb

        cells = [[labels[i], labels[j], count] for i, row in enumerate(counts) for j, count in enumerate(row)]
        columns = ["Actual", "Predicted", "nPredictions"]
        table = wandb.Table(columns=columns, data=cells)
        fields = {column: column for column in columns}
        self.log(step, {name: wandb.plot_table("wandb/confusion_matrix/v1", table, fields, {"title": name})})

    def log_images(self, step: int, name: str, images: Sequence[np.ndarray], captions: Sequence[str]) -> None:
        import wandb

        pairs = zip(images, captions, strict=True)
        self.log(step, {name: [wandb.Image(image_HWC, caption=caption) for image_HWC, caption in pairs]})

    def log_best(self, step: int, metric: str, value: float) -> None:
        """Write the summary by hand: define_metric would replace a metric's last value, and forget the best one in a resume."""
        self._run.summary.update({"best/value": value, "best/step": step, "best/metric": metric})

    def alert(self, title: str, text: str, level: str) -> None:
        self._run.alert(title, text, level=ALERT_LEVELS[level])

    @property
    def run_id(self) -> str | None:
        return self._run.id

    def upload(self) -> None:
        """Send files and models, and link the best model to the registry."""
        register = self.recipe.track.register
        for artifact, aliases in artifacts(self.recipe):
            self._run.log_artifact(artifact, aliases=aliases)
            if register is not None and "best" in aliases:
                self._register(artifact, register)
        self._is_uploaded = True

    def _register(self, artifact: Any, name: str) -> None:
        if self._mode != "online":
            print(f"track.register={name}: W&B's registry cannot be reached offline. Link the model once it is uploaded.")
            return
        try:
            self._run.link_artifact(artifact.wait(), registry_path(name))
        except Exception as error:  # the run itself ends well without
            print(warning(f"W&B did not accept track.register={name}: {reason(error)}."), flush=True)

    def finish(self, status: Status) -> None:
        """Finish the run, and say where an offline one is. An interrupted one is marked, so that a sweep starts it again.

        The mark demands an exit code that is not 0. A paused run has none, or a sweep would start it a second time.
        """
        if status == "interrupted":
            self._run.mark_preempting()
        self._run.finish(exit_code=0 if status in ("finished", "paused") else 1)
        self._restore_environment()
        if self._mode == "offline" and status == "finished":
            print(f"W&B: `wandb sync {self._run.settings.sync_dir}` uploads this run.", flush=True)
        elif self._mode == "online" and self._owns_data_dir and self._is_uploaded:
            shutil.rmtree(self._folder / "artifacts", ignore_errors=True)  # copies of what has been uploaded

    def leave(self) -> str:
        """End wandb's own process, which sends to the server, and would be waited for. Its file has everything by now."""
        import psutil
        import wandb

        for child in psutil.Process().children():
            with suppress(psutil.Error):
                if child.name() == "wandb-core":
                    child.kill()
        # The connection to that process is broken; without this, the end of the interpreter would say so at length.
        with suppress(Exception, SystemExit):
            wandb.teardown()
        self._restore_environment()
        # Under the same id, sync would append all rows to those that the server has.
        sync = f"wandb sync --include-online --id {self._run.id}-complete {self._run.settings.sync_dir}"
        return f"Run `{sync}` later to upload all of it."

    def _restore_environment(self) -> None:
        if self._owns_data_dir:
            os.environ.pop("WANDB_DATA_DIR", None)


def group(recipe: Recipe) -> str:
    """Return the default group: the output folder's name, which a run shares with its continuations and evaluations."""
    return Path(recipe.output_dir).resolve().name

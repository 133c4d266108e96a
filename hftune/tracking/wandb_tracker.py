"""One run at Weights & Biases. Independent of training.

Not through Accelerate's WandBTracker, which has no captions, artifacts, alerts, summary and exit code.

A run continues after an interruption, so that it shows each step once, with the values that count. W&B numbers its rows by step
and takes none that comes after a later one. A killed run has sent steps that its checkpoint does not have and that are computed
again, and may lack the newest ones before. So a server is asked what it has, and is made to forget the steps that are repeated.
Files of an offline run that nobody has uploaded are replaced.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hftune.config import Recipe, TrackConfig
from hftune.errors import ConfigError
from hftune.tracking.backend import EarlierRun, Status, TrackerBackend
from hftune.tracking.console import is_number, warning
from hftune.tracking.lane import reason

FILES = ("recipe.yaml", "run.json", "result.json", "metrics.jsonl", "predictions.jsonl", "ledger.jsonl")
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


@dataclass
class Continuation:
    """What to give to wandb.init, and what to log again."""

    options: dict[str, Any] = field(default_factory=dict)
    last_step: int = -1
    """Of the rows that the run has, and keeps; -1 without any."""
    lines: Sequence[Mapping[str, Any]] = ()
    """Lines of metrics.jsonl that it lacks."""


class WandbRun(TrackerBackend):
    """A run at W&B."""

    def __init__(self, recipe: Recipe):
        super().__init__(recipe)
        self._run: Any = None  # until start has made it
        self._folder = recipe.folder / "wandb"
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
            found = self._continue_online(earlier)
            if found is not None:
                try:
                    self._run = wandb.init(**self._options(config, **found.options))
                    return found
                except wandb.errors.Error:  # W&B's self-managed servers cannot rewind, and a deleted run is gone
                    pass
        found = self._continue_offline(earlier) if self._mode == "offline" else Continuation(lines=earlier.lines)
        if earlier.run_id and "id" not in found.options:
            found.options["notes"] = "\n\n".join(
                filter(None, [self.recipe.track.notes, f"Continues run {earlier.run_id} from step {earlier.step}."])
            )
        self._run = wandb.init(**self._options(config, **found.options))
        return found

    def _options(self, config: Mapping[str, Any], **more: Any) -> dict[str, Any]:
        """Collect the arguments of wandb.init. What the recipe leaves at its default, W&B's variables decide."""
        import wandb

        track, default, folder = self.recipe.track, TrackConfig(), self.recipe.folder.resolve().name
        chosen = {
            "project": (track.project, default.project, "WANDB_PROJECT"),
            "name": (track.run_name or self.recipe.recipe, self.recipe.recipe, "WANDB_NAME"),
            "entity": (track.entity, None, "WANDB_ENTITY"),
            "group": (track.group or folder, folder, "WANDB_RUN_GROUP"),  # shared with its continuations and evaluations
            "tags": (track.tags or None, None, "WANDB_TAGS"),
            "notes": (track.notes, None, "WANDB_NOTES"),
            "job_type": (track.job_type, default.job_type, "WANDB_JOB_TYPE"),
        }
        options = {
            name: value
            for name, (value, usual, variable) in chosen.items()
            if value != usual or (value is not None and variable not in os.environ)
        }
        own = {"dir": str(self.recipe.folder), "config": dict(config), "settings": wandb.Settings(**settings())}
        return {**options, **own, **more}

    def _continue_offline(self, earlier: EarlierRun) -> Continuation:
        """Begin the files of a run anew: under the same id instead of the old ones, unless those have been uploaded.

        Two files of one run would be uploaded one after the other, each row with a number of its own.
        """
        folders = self._folder.glob(f"*run-*-{earlier.run_id}") if earlier.run_id else ()
        old = [path for path in folders if not path.is_symlink()]
        if not old or any(not path.name.startswith("offline-") or [*path.glob("*.synced")] for path in old):
            return Continuation(lines=earlier.lines)
        for path in old:
            shutil.rmtree(path, ignore_errors=True)
        return Continuation({"id": earlier.run_id}, lines=earlier.lines)

    def _continue_online(self, earlier: EarlierRun) -> Continuation | None:
        """Let the server keep the rows that still count; None if it does not know the run."""
        import wandb

        options = self._options({})
        entity = options.get("entity") or os.environ.get("WANDB_ENTITY")
        project = options.get("project") or os.environ["WANDB_PROJECT"]
        if earlier.run_id is None:
            return None
        try:
            run = wandb.Api(timeout=20).run("/".join(filter(None, (entity, project, earlier.run_id))))
            last = int(run.lastHistoryStep)  # -1 if it has no row
        except (wandb.errors.CommError, ValueError):
            return None
        settled = [line["step"] for line in earlier.lines if line["step"] < earlier.step + (not earlier.awaits_evaluation)]
        kept = max((step for step in settled if step <= last), default=-1)
        again = [line for line in earlier.lines if line["step"] > kept]
        if last <= max(settled, default=-1):  # nothing that is repeated
            again = [line for line in again if line["step"] > last]
            return Continuation({"id": earlier.run_id, "resume": "must"}, last, again)
        return None if kept < 0 else Continuation({"resume_from": f"{earlier.run_id}?_step={kept}"}, kept, again)

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
            if register is None or "best" not in aliases:
                continue
            if self._mode != "online":
                print(
                    f"track.register={register}: W&B's registry cannot be reached offline. Link the model once it is uploaded."
                )
                continue
            try:
                self._run.link_artifact(artifact.wait(), register if "/" in register else f"wandb-registry-model/{register}")
            except Exception as error:  # the run itself ends well without
                print(warning(f"W&B did not accept track.register={register}: {reason(error)}."), flush=True)
        self._is_uploaded = True

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


def artifacts(recipe: Recipe) -> Iterator[tuple[Any, list[str]]]:
    """Make the artifacts of a finished run, each with its aliases: the files, then models, the best one last.

    W&B calls the last one of a name "latest". All files are copied, to WANDB_DATA_DIR.
    """
    import wandb

    folder, name = recipe.folder, recipe.track.run_name or recipe.recipe

    def made(what: str, kind: str, about: Mapping[str, Any]) -> Any:
        fitting = re.sub(r"[^\w.-]", "_", f"{name}-{what}", flags=re.ASCII)[-128:]  # characters and length that W&B takes
        return wandb.Artifact(fitting, kind, metadata={"recipe": recipe.recipe, **about})

    artifact = made("files", "run-files", {})
    for path in filter(Path.is_file, (folder / file for file in FILES)):
        artifact.add_file(str(path), path.name, skip_cache=True)
    yield artifact, []
    upload = recipe.track.upload or ("best" if recipe.track.register else "none")
    if upload == "none":
        return
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    about_best = {key: result["best"][key] for key in ("step", "metric", "value") if key in result["best"]}
    models = {"model": ("best", about_best)}
    if upload == "all" and (folder / "model_last").is_dir():  # otherwise the last one is the best
        models = {"model_last": ("last", {"step": result["steps"]}), **models}
    for exported, (alias, about) in models.items():
        artifact = made("model", "model", about)
        artifact.add_dir(str(folder / exported), skip_cache=True)
        yield artifact, [alias, f"step_{about['step']}"]

"""metrics.jsonl always, dashboards through Accelerate where wanted. Main process only; knows no model and no data."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import Accelerator

from hftune.config.recipe import Recipe, flat
from hftune.errors import ConfigError
from hftune.tracking.console import is_number
from hftune.tracking.jsonl import LineFile, finite, read_lines
from hftune.tracking.mlflow_tracker import MlflowRun, check_mlflow


def check_trackers(recipe: Recipe) -> None:
    """Look, before anything is loaded, whether each dashboard can be reached.

    Raises:
        ConfigError: a package is not installed, W&B has no key, or MLflow's store does not answer.
    """
    for name in recipe.track.with_:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # no origin: just a folder of that name, such as the logs of earlier runs
            package = "wandb" if name == "wandb" else f'"hftune[{name}]"'
            raise ConfigError(f"track.with={name} needs a package that is not installed: pip install {package}.")
    if "wandb" in recipe.track.with_ and os.environ.get("WANDB_MODE", "online") == "online":
        _log_in_to_wandb()
    if "mlflow" in recipe.track.with_:
        check_mlflow()


def _log_in_to_wandb() -> None:
    import wandb

    way_out = "or set WANDB_MODE=offline and upload later with `wandb sync`"
    try:
        has_key = wandb.login(prompt=False)  # asks the server whether it knows the key
    except wandb.errors.AuthenticationError as error:
        raise ConfigError(f"track.with=wandb: {error} Check key and network, {way_out}.") from error
    if not has_key:
        raise ConfigError(f"track.with=wandb: no W&B key is known. Run `wandb login`, set WANDB_API_KEY, {way_out}.")


class Tracker:
    """Appends to metrics.jsonl and passes numbers on to the dashboards. Its methods are called on the main process only."""

    def __init__(self, accelerator: Accelerator, recipe: Recipe):
        self.accelerator = accelerator
        self.path = Path(recipe.output_dir) / "metrics.jsonl"

    def start(
        self, recipe: Recipe, step: int, is_evaluated: bool, run_ids: Mapping[str, str], commits: Mapping[str, str]
    ) -> None:
        """Open metrics.jsonl and the dashboards.

        Args:
            step: after which training goes on; what was logged of later ones is dropped, and of a test, which the end makes.
            is_evaluated: whether that step's evaluation was made; if not, one that was logged is dropped, too.
            run_ids: of the dashboards' runs that go on; see ``run_ids``.
            commits: of what was loaded from the Hub; they join the recipe in the dashboards' configuration.
        """
        lines = read_lines(self.path) if step else []
        last = {False: step, True: step if is_evaluated else step - 1}  # by whether a line is of an evaluation
        lines = [line for line in lines if line["step"] <= last["eval/loss" in line] and "test/loss" not in line]
        self._file = LineFile(self.path, lines)
        wandb = {"name": recipe.track.run_name or recipe.recipe, "dir": recipe.output_dir, "save_code": False}
        if run_id := run_ids.get("wandb"):
            wandb |= {"id": run_id, "resume": "allow"}
        tensorboard = {"purge_step": step + 1} if step else {}
        if "mlflow" in recipe.track.with_:
            self.accelerator.log_with.append(MlflowRun(recipe, run_ids.get("mlflow"), lines))
        self.accelerator.init_trackers(recipe.track.project, init_kwargs={"wandb": wandb, "tensorboard": tensorboard})
        for tracker in self.accelerator.trackers:
            # TensorBoard and MLflow take numbers and texts only; W&B shows a nested config as it is.
            config = {**recipe.to_dict(), "commits": dict(commits)}
            if tracker.name != "wandb":
                config = {name: str(value) for name, value in flat(config).items()}
            tracker.store_init_configuration(config)

    def log(self, step: int, epoch: float, values: Mapping[str, Any]) -> None:
        """Record values of one step; ``epoch`` counts finished passes, with a fraction. What is not finite becomes null."""
        epoch = round(epoch, 6)  # here as in the file, from which a run that goes on tells the dashboards again
        values = finite(values)
        self._file.append({"step": step, "epoch": epoch, **values})
        numbers = {name: value for name, value in values.items() if is_number(value)}
        for tracker in self.accelerator.trackers:
            tracker.log({"epoch": epoch, **numbers}, step=step)

    def log_samples(self, step: int, samples: list[dict[str, Any]]) -> None:
        """Show samples, all with the same fields, as a table at the dashboards that can."""
        if not samples or not samples[0]:
            return
        columns = list(samples[0])
        for tracker in self.accelerator.trackers:
            if tracker.name == "wandb":
                tracker.log_table("eval/samples", columns=columns, data=[[*row.values()] for row in samples], step=step)
            elif tracker.name == "mlflow":
                tracker.log_table(step, samples)
            elif tracker.name == "tensorboard":  # which reads Markdown
                lines = [columns, ["---"] * len(columns), *([cell(value) for value in row.values()] for row in samples)]
                text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
                tracker.log({"eval/samples": text}, step=step)

    def log_picture(self, step: int, pixels_HWC: np.ndarray) -> None:
        """Show a picture, uint8, at the dashboards."""
        for tracker in self.accelerator.trackers:
            layout = {"dataformats": "NHWC"} if tracker.name == "tensorboard" else {}
            tracker.log_images({"eval/pictures": pixels_HWC[None]}, step=step, **layout)

    def run_ids(self) -> dict[str, str]:
        """Return what finds the dashboards' runs again."""
        ids = {"wandb": lambda tracker: tracker.run.id, "mlflow": lambda tracker: tracker.run_id}
        return {tracker.name: ids[tracker.name](tracker) for tracker in self.accelerator.trackers if tracker.name in ids}

    def close(self) -> None:
        """Close the dashboards."""
        for tracker in self.accelerator.trackers:
            tracker.finish()

    def abandon(self) -> None:
        """Close the dashboards of a run that failed."""
        for tracker in self.accelerator.trackers:
            if tracker.name == "wandb":
                tracker.tracker.finish(exit_code=1)
            elif tracker.name == "mlflow":
                tracker.abandon()
            else:
                tracker.finish()


def cell(value: Any) -> str:
    """Spell a value so that it stays within its cell of a Markdown table."""
    return " ".join(str(value).replace("|", "\\|").split())

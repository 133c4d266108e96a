"""One run at Weights & Biases, through Accelerate's tracker."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from accelerate.tracking import WandBTracker

from hftune.config import Recipe
from hftune.errors import ConfigError
from hftune.tracking.backend import EarlierRun, TrackerBackend


class WandbRun(TrackerBackend):
    """A run at W&B, which is resumed under its id."""

    @classmethod
    def check(cls, recipe: Recipe) -> None:
        """Log in, unless WANDB_MODE says that nothing is uploaded.

        Raises:
            ConfigError: no key is known, or the server does not accept it.
        """
        if os.environ.get("WANDB_MODE", "online") != "online":
            return
        import wandb

        way_out = "or set WANDB_MODE=offline and upload later with `wandb sync`"
        try:
            has_key = wandb.login(prompt=False)  # asks the server whether it knows the key
        except wandb.errors.AuthenticationError as error:
            raise ConfigError(f"track.with=wandb: {error} Check key and network, {way_out}.") from error
        if not has_key:
            raise ConfigError(f"track.with=wandb: no W&B key is known. Run `wandb login`, set WANDB_API_KEY, {way_out}.")

    def start(self, config: Mapping[str, Any], earlier: EarlierRun) -> None:
        track = self.recipe.track
        options = {"name": track.run_name or self.recipe.recipe, "dir": self.recipe.output_dir, "save_code": False}
        if earlier.run_id:
            options |= {"id": earlier.run_id, "resume": "allow"}
        self._tracker = WandBTracker(track.project, **options)
        self._tracker.start()
        self._tracker.store_init_configuration(dict(config))  # nested, which W&B shows as it is

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._tracker.log(dict(values), step=step)

    def log_table(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        self._tracker.log_table(name, columns=list(rows[0]), data=[[*row.values()] for row in rows], step=step)

    def log_images(self, step: int, name: str, images: Sequence[np.ndarray], captions: Sequence[str]) -> None:
        self._tracker.log_images({name: list(images)}, step=step)

    @property
    def run_id(self) -> str | None:
        return self._tracker.run.id

    def close(self) -> None:
        self._tracker.finish()

    def abandon(self) -> None:
        self._tracker.tracker.finish(exit_code=1)

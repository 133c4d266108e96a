"""A search with Optuna: each trial is a process with an output folder of its own, scored by the best value of eval.metric.

    pip install optuna
    python examples/sweep/optuna_sweep.py yelp_demo 20 train.epochs=1

Start it again to continue the study, which is kept in a database. Finished trials count; an interrupted one counts as failed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import optuna

BAD_RECIPE, STOPPED = 2, 75
"""Exit codes of ``hftune train``: the recipe or the data cannot be trained on; a signal stopped training."""


def objective(trial: optuna.Trial, recipe: str, words: list[str]) -> float:
    """Train once and return the best value of ``eval.metric``."""
    folder = Path(f"outputs/optuna_{Path(recipe).stem}/trial_{trial.number:04d}")  # never shared: results would be mixed up
    keys = {
        "train.lr": trial.suggest_float("train.lr", 1e-5, 1e-2, log=True),
        "train.weight_decay": trial.suggest_float("train.weight_decay", 0.0, 0.1),
    }
    # In a process of its own, so that memory is freed and a crash ends only this trial.
    # For several GPUs: hftune train --processes N, or accelerate launch -m hftune.run, whose exit code is 1 for every failure.
    command = [sys.executable, "-m", "hftune.run", f"recipe={recipe}", f"output_dir={folder}"]
    code = subprocess.run([*command, *(f"{key}={value}" for key, value in keys.items()), *words]).returncode
    if code == BAD_RECIPE:  # every trial would fail in the same way
        sys.exit(f"The recipe {recipe} cannot be trained on; see the message above.")
    if code == STOPPED:
        raise KeyboardInterrupt
    if code != 0:  # out of memory, or a loss that is not finite: a bad point, and the next one may be good
        raise optuna.TrialPruned(f"exit code {code}")
    best = json.loads((folder / "result.json").read_text(encoding="utf-8"))["best"]
    trial.set_user_attr("best_step", best["step"])
    return best["value"]


def main() -> None:
    recipe, num_trials, *words = sys.argv[1:]
    name = Path(recipe).stem
    study = optuna.create_study(
        study_name=name,
        storage=f"sqlite:///optuna_{name}.db",
        load_if_exists=True,
        direction="maximize",  # accuracy; "minimize" for a recipe whose eval.metric is a loss
    )
    study.optimize(lambda trial: objective(trial, recipe, words), n_trials=int(num_trials))
    print(f"best {study.best_value:.4f} with {study.best_params}")


if __name__ == "__main__":
    main()

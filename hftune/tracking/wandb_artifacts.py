"""The files that a run at W&B keeps for others: its records, and its models. Independent of training."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hftune.config import Recipe

FILES = ("recipe.yaml", "run.json", "result.json", "metrics.jsonl", "predictions.jsonl", "ledger.jsonl")


def artifacts(recipe: Recipe) -> Iterator[tuple[Any, list[str]]]:
    """Make the artifacts of a finished run, each with its aliases: the files, then models, the best one last.

    W&B calls the last one of a name "latest". All files are copied, to WANDB_DATA_DIR.
    """
    folder = Path(recipe.output_dir)
    yield files_artifact(recipe), []
    upload = recipe.track.upload or ("best" if recipe.track.register else "none")
    if upload == "none":
        return
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    best = result["best"]
    about_last = {"step": result["steps"]}
    about_best = {name: best[name] for name in ("step", "metric", "value") if name in best}
    if upload == "all" and (folder / "model_last").is_dir():  # otherwise the last one is the best
        yield model_artifact(recipe, folder / "model_last", about_last), ["last", f"step_{about_last['step']}"]
    yield model_artifact(recipe, folder / "model", about_best), ["best", f"step_{about_best['step']}"]


def files_artifact(recipe: Recipe) -> Any:
    """Collect the files that say what was trained and what came out."""
    import wandb

    artifact = wandb.Artifact(clean(f"{run_name(recipe)}-files"), "run-files", metadata={"recipe": recipe.recipe})
    for name in FILES:
        if (path := Path(recipe.output_dir) / name).is_file():
            artifact.add_file(str(path), name, skip_cache=True)
    return artifact


def model_artifact(recipe: Recipe, folder: Path, about: dict[str, Any]) -> Any:
    """Collect the files of an exported model."""
    import wandb

    artifact = wandb.Artifact(clean(f"{run_name(recipe)}-model"), "model", metadata={"recipe": recipe.recipe, **about})
    artifact.add_dir(str(folder), skip_cache=True)
    return artifact


def registry_path(name: str) -> str:
    """Return the collection of W&B's registry that ``track.register`` names: of the registry "model" if it names none."""
    return name if "/" in name else f"wandb-registry-model/{name}"


def run_name(recipe: Recipe) -> str:
    return recipe.track.run_name or recipe.recipe


def clean(name: str) -> str:
    """Replace the characters that an artifact's name cannot have, and shorten it."""
    return re.sub(r"[^\w.-]", "_", name, flags=re.ASCII)[-128:]

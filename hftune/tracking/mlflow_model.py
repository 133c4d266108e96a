"""A finished run as an MLflow model, which answers raw inputs through ``mlflow.pyfunc``, and as a version in MLflow's registry.

Needs mlflow, not training. Not the flavor mlflow.pytorch: it takes the tensors of a batch and returns logits, where
``hftune.load_model`` takes images and returns labels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd
from mlflow.exceptions import MlflowException
from mlflow.models import infer_signature
from mlflow.models.model import ModelInfo

from hftune import __version__
from hftune.config import Recipe
from hftune.inference import load_model
from hftune.task import Task

BEST = "best"
"""Alias of a registered model's version, as in models:/NAME@best."""


@dataclass(frozen=True)
class Source:
    """Where MLflow has a model."""

    uri: str
    model_id: str | None = None
    """None if MLflow has it as plain files."""


def log_model(recipe: Recipe, run_id: str, uri: str, name: str) -> Source:
    """Log a model of a finished run.

    As a transformers pipeline, which loads without hftune, if the task has one; otherwise as a model that predicts as
    ``hftune.load_model`` does; as plain files if the task cannot predict from raw inputs or has no example inputs.

    Args:
        uri: of the store.
        name: of the model at MLflow and of its folder in the output folder, such as model_last.
    """
    # Absolute: MLflow asks the Hub about a relative path, outputs/model, as if that were a repository.
    task, folder = recipe.task, (recipe.folder / name).resolve()
    examples = task.example_inputs()
    if type(task).predict is Task.predict or not examples:
        client = mlflow.MlflowClient(uri)
        client.log_artifacts(run_id, str(folder), name)
        return Source(f"{client.get_run(run_id).info.artifact_uri}/{name}")
    with store(uri), mlflow.start_run(run_id=run_id, nested=True):
        options = task.transformers_pipeline()
        found = _log_answers(recipe, folder, examples) if options is None else _log_pipeline(folder, options, examples)
    return Source(found.model_uri, found.model_id)


def register(recipe: Recipe, run_id: str, uri: str, source: Source, best: Mapping[str, Any]) -> str:
    """Register the best model of a run as a new version of ``track.register``; return the version.

    The alias "best" moves to it unless the version that has it is better by the same metric.

    Args:
        best: its metric, value and step, which become tags of the version.
    """
    name = recipe.track.register
    with store(uri):
        client = mlflow.MlflowClient()
        try:
            client.create_registered_model(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        tags = {key: str(best[key]) for key in ("metric", "value", "step") if key in best}
        made = client.create_model_version(name, source.uri, run_id, tags=tags, model_id=source.model_id)
        aliased = client.get_registered_model(name).aliases.get(BEST)
        held = {} if aliased is None else client.get_model_version(name, aliased).tags
        is_worse = False
        if "metric" in tags and tags["metric"] == held.get("metric"):
            new, old = float(tags["value"]), float(held["value"])
            is_worse = new < old if recipe.greater_is_better else new > old
        if not is_worse:
            client.set_registered_model_alias(name, BEST, made.version)
    return str(made.version)


def _log_pipeline(folder: Path, options: dict[str, Any], examples: list) -> ModelInfo:
    from transformers import pipeline

    kind, options = options["task"], {key: value for key, value in options.items() if key != "task"}
    trained = pipeline(kind, model=str(folder), device="cpu")
    return mlflow.transformers.log_model(
        trained,
        name=folder.name,
        task=kind,
        model_config=options,
        signature=infer_signature(examples, pd.DataFrame(trained(examples, **options))),
        input_example=examples,
        pip_requirements=_requirements("torch", "transformers"),  # found out by MLflow, they would take half a minute
    )


def _log_answers(recipe: Recipe, folder: Path, examples: list) -> ModelInfo:
    rows = load_model(folder, device="cpu", trust_code=True).predict(examples)
    given = np.stack(examples) if isinstance(examples[0], np.ndarray) else examples
    return mlflow.pyfunc.log_model(
        name=folder.name,
        python_model=Answers(),
        artifacts={"model": str(folder), "recipe": str(folder.with_name("recipe.yaml"))},
        signature=infer_signature(given, pd.DataFrame(rows)),
        input_example=given,
        pip_requirements=[f"hftune=={__version__}", *_requirements("torch", "transformers")],
    )


class Answers(mlflow.pyfunc.PythonModel):
    """What ``hftune.load_model`` loads, behind MLflow's interface."""

    def load_context(self, context: Any) -> None:
        # MLflow itself has run code of the model by now: this class.
        self.trained = load_model(context.artifacts["model"], trust_code=True)

    def predict(self, context: Any, model_input: pd.DataFrame, params: dict[str, Any] | None = None) -> pd.DataFrame:
        """Return one row for each raw input: in a data frame's first column, or in an array, for which MLflow has no hint."""
        inputs = model_input.iloc[:, 0] if isinstance(model_input, pd.DataFrame) else model_input
        return pd.DataFrame(self.trained.predict(list(inputs)))


@contextmanager
def store(uri: str) -> Iterator[None]:
    """Make a store the one that MLflow's functions use; restore what the user had set at the end."""
    was_set = mlflow.is_tracking_uri_set()
    mlflow.set_tracking_uri(uri)
    try:
        yield
    finally:
        if not was_set:
            mlflow.set_tracking_uri(None)


def _requirements(*packages: str) -> list[str]:
    return [f"{name}=={version(name).partition('+')[0]}" for name in packages]  # "+cpu" is on no index

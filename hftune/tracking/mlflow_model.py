"""A finished run as an MLflow model, which answers raw inputs through ``mlflow.pyfunc``. Needs mlflow, not training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd
from mlflow.models import infer_signature

from hftune import __version__
from hftune.config import Recipe
from hftune.inference import load_model
from hftune.task import Task

NAME = "model"


def log_model(recipe: Recipe, run_id: str, uri: str) -> None:
    """Log the best model of a finished run.

    As a transformers pipeline, which loads without hftune, if the task has one; otherwise as a model that predicts as
    ``hftune.load_model`` does; as plain files if the task cannot predict from raw inputs or has no example inputs.
    """
    task, folder = recipe.task, Path(recipe.output_dir) / "model"
    examples = task.example_inputs()
    if type(task).predict is Task.predict or not examples:
        mlflow.MlflowClient(uri).log_artifacts(run_id, str(folder), NAME)
        return
    with active(run_id, uri):
        if (options := task.transformers_pipeline()) is not None:
            _log_pipeline(folder, options, examples)
        else:
            _log_answers(recipe, folder, examples)


def _log_pipeline(folder: Path, options: dict[str, Any], examples: list) -> None:
    from transformers import pipeline

    kind, options = options["task"], {key: value for key, value in options.items() if key != "task"}
    trained = pipeline(kind, model=str(folder), device="cpu")
    mlflow.transformers.log_model(
        trained,
        name=NAME,
        task=kind,
        model_config=options,
        signature=infer_signature(examples, pd.DataFrame(trained(examples, **options))),
        input_example=examples,
        pip_requirements=_requirements("torch", "transformers"),  # found out by MLflow, they would take half a minute
    )


def _log_answers(recipe: Recipe, folder: Path, examples: list) -> None:
    rows = load_model(folder, device="cpu", trust_code=True).predict(examples)
    given = np.stack(examples) if isinstance(examples[0], np.ndarray) else examples
    mlflow.pyfunc.log_model(
        name=NAME,
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
def active(run_id: str, uri: str) -> Iterator[None]:
    """Make a run the one that MLflow's functions log to; restore what the user had set at the end."""
    was_set = mlflow.is_tracking_uri_set()
    mlflow.set_tracking_uri(uri)
    try:
        with mlflow.start_run(run_id=run_id, nested=True):
            yield
    finally:
        if not was_set:
            mlflow.set_tracking_uri(None)


def _requirements(*packages: str) -> list[str]:
    return [f"{name}=={version(name).partition('+')[0]}" for name in packages]  # "+cpu" is on no index

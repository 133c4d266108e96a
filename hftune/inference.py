"""A finished model that answers: titles for texts, labels for reviews. Loads an export with its recipe; knows no training."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from hftune.checkpoints.export import read
from hftune.checkpoints.run_folder import check_answers, open_run
from hftune.config.recipe import Recipe, type_name
from hftune.errors import ConfigError, DataError
from hftune.task import Task


@dataclass
class TrainedModel:
    """A model in evaluation mode with the recipe that it came from."""

    recipe: Recipe
    model: nn.Module

    def predict(self, inputs: Sequence[Any], batch_size: int = 8) -> list[dict[str, Any]]:
        """Answer raw inputs in their order: one row each, with the fields that ``Task.predict`` says.

        Texts are strings; images are paths, Pillow images or arrays of uint8; what is to be restored are pairs of image and
        mask. ``generated`` comes from titles, ``label`` and ``probability`` from classes, ``image`` from restoring.

        Raises:
            DataError: an input that cannot be answered, such as an empty text or a file that is no image.
            ConfigError: the task has no method ``answer``.
        """
        return list(self.answers(inputs, batch_size))

    def answers(self, inputs: Sequence[Any], batch_size: int = 8) -> Iterator[dict[str, Any]]:
        """Yield what ``predict`` returns, row by row: pictures of a large folder need not all be in memory."""
        check_answers(self.recipe.task)
        for start in range(0, len(inputs), batch_size):
            try:
                with torch.no_grad():
                    rows = self.recipe.task.predict(self.model, list(inputs[start : start + batch_size]))
            except DataError as error:  # which counts from the beginning of the batch
                raise DataError(count_from(start, str(error))) from error
            yield from rows


def count_from(start: int, message: str) -> str:
    """Let the number of an input in a message count from the first of all inputs."""
    return re.sub(r"^Input (\d+)", lambda place: f"Input {start + int(place[1])}", message)


def load_model(directory: str | Path, device: str | torch.device | None = None, *, trust_code: bool = False) -> TrainedModel:
    """Load the best model of a run.

    Args:
        directory: a run's output folder; or one of its models, such as outputs/bigbird/model_last.
        device: such as "cpu" or "cuda:1". None: the first GPU, or the CPU where there is none.

    Raises:
        ConfigError: the folder holds no finished model or no recipe, or its task does not answer inputs.
    """
    recipe, folder = open_run(directory, trust_code)
    model = load_export(recipe.task, folder)
    if device is None:
        device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    return TrainedModel(recipe, model.to(device).eval())


def load_export(task: Task, folder: Path) -> nn.Module:
    """Load a finished model on the CPU, or raise ConfigError where the folder holds none."""
    try:
        return read(folder, task.load)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{folder} holds no model that can be loaded: {str(error).splitlines()[0]}") from error
    except Exception as error:
        if type(task).load is not Task.load:
            raise
        said = f"{type(error).__name__}: {error}".splitlines()[0].rstrip(".")
        raise ConfigError(
            f"{folder} cannot be loaded by {type_name(type(task))}: {said}. Its model is built without the data here: if "
            "build_model needs more than the task's fields, give the task methods save and load that keep it."
        ) from error

"""Inference with a finished model: loads an export with its recipe. Independent of training."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from hftune.build import can_be_read, is_sharded, may_leave_weights
from hftune.checkpoints.export import read, readable
from hftune.checkpoints.run_folder import check_answers, open_run
from hftune.config.recipe import Recipe, type_name
from hftune.errors import ConfigError, DataError, first_line, message_of
from hftune.task import Task


@dataclass
class TrainedModel:
    """A model in evaluation mode, with the recipe that it was trained with."""

    recipe: Recipe
    model: nn.Module

    def predict(self, inputs: Sequence[Any], batch_size: int = 8, *, probabilities: bool = False) -> list[dict[str, Any]]:
        """Return a row for each raw input, in order, with the fields of the task's ``predict``.

        ``probabilities`` adds those of all classes, by name, for a task that classifies.

        Texts are strings. Images are paths, Pillow images or uint8 arrays; for restoration, pairs of image and mask. Rows have

        - ``generated``: sequence to sequence, titles, language models (with ``perplexity``)
        - ``label`` and ``probability``: classification; ``labels`` and ``probabilities`` if a text can have several
        - ``value``: regression
        - ``entities``, or ``words`` and ``tags``: token classification
        - ``filled`` and ``tokens``: masked language models
        - ``answer``, with its place and probability: question answering, multiple choice
        - ``embedding``: embeddings
        - ``image``: restoration

        Raises:
            DataError: an input cannot be used, such as an empty text or a file that is not an image.
            ConfigError: the task has no method ``predict``.
        """
        return list(self.answers(inputs, batch_size, probabilities=probabilities))

    def answers(self, inputs: Sequence[Any], batch_size: int = 8, *, probabilities: bool = False) -> Iterator[dict[str, Any]]:
        """Yield the rows of ``predict`` one by one, so that the images of a large folder need not fit in memory."""
        check_answers(self.recipe.task)
        if isinstance(inputs, (str, Path)):  # a text is a sequence, too: each of its letters would be answered
            raise DataError(f"The inputs are a single {type(inputs).__name__}. Put it in a list: predict([...]).")
        options = {"probabilities": True} if probabilities else {}
        for start in range(0, len(inputs), batch_size):
            try:
                with torch.no_grad():
                    rows = self.recipe.task.predict(self.model, list(inputs[start : start + batch_size]), **options)
            except DataError as error:  # whose index counts from the start of the batch
                found = re.match(r"Input (\d+)", text := str(error))
                raise DataError(f"Input {start + int(found[1])}{text[found.end() :]}" if found else text) from error
            yield from rows


def load_model(directory: str | Path, device: str | torch.device | None = None, *, trust_code: bool = False) -> TrainedModel:
    """Load the best model of a run.

    Args:
        directory: output folder of a run, or one of its models, such as outputs/bigbird/model_last.
        device: such as "cpu" or "cuda:1". None: the first GPU, or the CPU if there is none.
        trust_code: import the code that the recipe names, such as a task or network of your own. False: refuse such recipes.

    Raises:
        ConfigError: the folder has no finished model or no recipe, or names code that is not trusted.
    """
    recipe, folder = open_run(directory, trust_code)
    model = load_export(recipe.task, folder)
    if device is None:
        device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    return TrainedModel(recipe, model.to(device).eval())


def load_export(task: Task, folder: Path) -> nn.Module:
    """Load a finished model on the CPU, or raise ConfigError if the folder has none."""
    try:
        return read(folder, task.load)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{folder} has no model that can be loaded: {message_of(error)}.") from error
    except Exception as error:
        if type(task).load is not Task.load:
            raise
        raise ConfigError(
            f"{folder} cannot be loaded by {type_name(type(task))}: {first_line(error)}. The model is built without the data "
            "here. If build_model needs more than the task's fields, write save and load methods that keep it."
        ) from error


def load_for_all(recipe: Recipe, folder: Path) -> nn.Module:
    """Load a finished model on each process of a job: if they share out its weights, without these where that is possible.

    They are then in the files, see ``hftune.models.unread``.

    Raises:
        ConfigError: as ``load_export``; or the weights cannot be shared out.
    """
    if not is_sharded():
        return load_export(recipe.task, folder)
    from hftune.models.adapter_files import is_adapter
    from hftune.models.pretrained import loading

    leaves_weights = may_leave_weights(recipe) and not is_adapter(readable(folder))  # whose base is compared by its weights
    with loading(sharded=True, unread=leaves_weights):
        model = load_export(recipe.task, folder)
    if leaves_weights and not can_be_read(model):
        with loading(sharded=True):
            model = load_export(recipe.task, folder)
    return model

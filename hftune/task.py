"""What is learned. A Task knows data, model, loss and metrics; it knows no rank, no device and no launcher."""

from __future__ import annotations

import inspect
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:  # a recipe must be readable, and refusable, before torch is imported
    import numpy as np
    from torch import Tensor, nn

    Batch = dict[str, Tensor]

Direction = Literal["max", "min"]

RENAMED = {
    "answer": "predict",
    "pictures": "sample_images",
    "pipeline": "transformers_pipeline",
    "problems": "validate",
    "remarks": "notices",
}
"""Methods of a Task by the names that they had before version 0.3."""

FOUND = "task.json"
"""File beside the weights with what ``datasets`` has set on the task."""


@dataclass
class Task(ABC):
    """Subclass it as a dataclass: its fields are the recipe's ``task:`` section.

    ``datasets``, ``build_model`` and ``loss`` must be written; everything else has a default that fits models called by keyword
    and batches that hold their ``labels``. Import torch inside the methods if mistyped recipes are to be refused fast.
    """

    metric_directions: ClassVar[Mapping[str, Direction | None] | None] = None
    """Names that ``metrics`` returns, each with "max" if more of it is better, "min" if less is, None if neither (a length).
    Lets ``eval.metric`` be checked before training and ``eval.greater_is_better`` be left out. None: not known beforehand."""
    sample_fields: ClassVar[Sequence[str]] = ()
    """Fields of ``predictions``'s rows that are shown for a few samples after each evaluation, in terminal and dashboards."""
    code_fields: ClassVar[Sequence[str]] = ("dataset", "network")
    """Fields that may name code to import, package.module.Class or module:function."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Refuse methods under the names that they had before hftune 0.3: they would silently be called for something else.

        Raises:
            TypeError: naming the method and its new name.
        """
        super().__init_subclass__(**options)
        own = {name: value for name, value in vars(cls).items() if inspect.isfunction(value)}
        if "predict" in own and list(inspect.signature(own["predict"]).parameters)[1:2] == ["outputs"]:
            raise TypeError(f"{cls.__name__}.predict(outputs, model, batch) is called predictions(outputs, model, batch) now")
        if old := [name for name in own if name in RENAMED]:
            raise TypeError(f"{cls.__name__}.{old[0]} is called {RENAMED[old[0]]} now")

    def validate(self) -> list[str]:
        """Say what is wrong with the fields or the files they name, one sentence each; called before torch is imported."""
        return []

    @abstractmethod
    def datasets(self) -> Mapping[str, Any]:
        """Return ``{"train": dataset, "eval": dataset}``, all with a length and integer indexing.

        Where there is a third part, "test", the best model is scored on it, once, after the last step.
        Called on every process, one process of a machine after the other, so that a cache filled by the first serves all.

        Raises:
            DataError: naming split, row and column.
        """

    @abstractmethod
    def build_model(self) -> nn.Module:
        """Return a fresh model on the CPU. Called after ``datasets`` and after seeding, on every process.

        For pipelines it is a transformers decoder, or has a method ``stage(index, count)``, which
        hftune.strategies.pipeline_stages describes.
        """

    def lengths(self, dataset: Any) -> np.ndarray | None:
        """Return one positive length a sample (int; tokens, say), or None where all samples cost the same."""
        return None

    def sizes(self, dataset: Any) -> np.ndarray | None:
        """Return what of a sample is padded by itself: (N, K) int, such as lengths of source and title, or height and width.

        A micro-batch is padded to the largest of each. None, the default: to the largest of ``lengths``.
        """
        return None

    def padded_length(self, sizes: Sequence[int]) -> int:
        """Return what one row costs that is padded to these K sizes, in the units of ``lengths``: their sum by default.

        It must not fall where a size grows.
        """
        return sum(sizes)

    @property
    def augments(self) -> bool:
        """Whether training samples go through ``augment``: where it is written, unless this says otherwise."""
        return type(self).augment is not Task.augment

    def augment(self, example: Any, rng: np.random.RandomState) -> Any:
        """Return a training sample with what is random in it drawn anew, such as a shift, a crop or some damage.

        Called for each sample in each epoch, before ``collate``; never for evaluation. ``rng`` is seeded by (seed, epoch,
        sample): take every random number from it, and the samples do not depend on who loads them. Do not change ``example``
        in place, which is the data set's own, nor its length.
        """
        return example

    def collate(self, examples: list) -> Batch:
        """Stack the samples of one micro-batch into tensors (CPU), first dimension = samples.

        Draw nothing at random here or in the data set: only ``augment`` and the model's forward are keyed.
        """
        from torch.utils.data import default_collate

        return default_collate(examples)

    def inputs(self, batch: Batch) -> dict[str, Tensor]:
        """Return the model's keyword arguments: all of the batch but its labels."""
        return {name: value for name, value in batch.items() if name != "labels"}

    def target(self, batch: Batch) -> Tensor:
        """Return what ``loss`` compares the outputs with."""
        return batch["labels"]

    @abstractmethod
    def loss(self, outputs: Any, target: Tensor) -> Tensor:
        """Return the SUM of the item losses, a float32 scalar. The loop divides by the items of the global batch."""

    def num_items(self, target: Tensor) -> int:
        """Count the items that ``loss`` sums over: samples by default; label tokens or pixels where those are the items."""
        return len(target)

    def predictions(self, outputs: Any, model: nn.Module, batch: Batch) -> list[dict[str, Any]]:
        """Return one JSON-able row a sample, with all that ``metrics`` needs (its reference, too).

        ``outputs`` is what the model returned for this batch, no gradient; a task that generates calls ``model`` instead.
        The rows become predictions.jsonl.
        """
        return [{} for _ in range(len(self.target(batch)))]

    def sample_images(self, outputs: Any, model: nn.Module, batch: Batch, places: Sequence[int]) -> list[np.ndarray]:
        """Return a picture (H, W, 3) uint8 of each sample at these places of the batch; none where there is nothing to see.

        Arguments as for ``predictions``. Those of the first ``eval.show_samples`` samples are kept after each evaluation.
        """
        return []

    def metrics(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the metrics of a whole split from its rows, one a sample, in dataset order. Main process only."""
        return {}

    def commits(self) -> dict[str, str]:
        """Return the commits (SHA-1) that were loaded from the Hub, by the key that named the repository: {"task.model": ...}.

        Called after ``datasets`` and ``build_model``. Runs are resumed with the same ones only.
        """
        return {}

    def notices(self, datasets: Mapping[str, Any], model: nn.Module) -> list[str]:
        """Return what a user should know before training, such as how many texts are cut; one sentence each, said once."""
        return []

    def save(self, model: nn.Module, directory: Path) -> None:
        """Write the finished, unwrapped model into an empty directory. Main process only.

        Beside the weights it writes what ``datasets`` has set on the task, such as a number of classes, so far as JSON can
        hold it: ``build_model`` may need it when the model is loaded. Write ``save`` and ``load`` if that is not enough.
        """
        from safetensors.torch import save_model

        save_model(model, str(directory / "model.safetensors"))
        names = {item.name for item in fields(self)}
        derived = {
            name for kind in type(self).__mro__ for name, item in vars(kind).items() if isinstance(item, cached_property)
        }
        found = {name: value for name, value in vars(self).items() if name not in names | derived and _survives_json(value)}
        if found:
            (directory / FOUND).write_text(json.dumps(found), encoding="utf-8")

    def load(self, directory: Path) -> nn.Module:
        """Return the model that ``save`` wrote, on the CPU, and take from there what ``predict`` needs beside it."""
        from safetensors.torch import load_model

        if (directory / FOUND).is_file():
            found, names = json.loads((directory / FOUND).read_text(encoding="utf-8")), {item.name for item in fields(self)}
            vars(self).update({name: value for name, value in found.items() if name not in names})
        model = self.build_model()
        load_model(model, str(directory / "model.safetensors"))
        return model

    def transformers_pipeline(self) -> dict[str, Any] | None:
        """Return the arguments of the transformers pipeline that loads what ``save`` wrote, or None."""
        return None

    def example_inputs(self) -> list:
        """Return a few raw inputs as ``predict`` takes them, after ``datasets``; MLflow shows them with the model."""
        return []

    def predict(self, model: nn.Module, inputs: list) -> list[dict[str, Any]]:
        """Return one row for each raw input, such as a text; no gradient. For ``hftune.load_model``.

        Its values are JSON-able, or Pillow images, which ``hftune predict`` writes into its --output folder.

        Raises:
            DataError: an input that cannot be answered, named by its place.
        """
        raise NotImplementedError


def _survives_json(value: Any) -> bool:
    """Say whether JSON gives a value back as it is: not a tuple, nor a mapping whose keys are numbers."""
    try:
        again = json.loads(json.dumps(value))
    except (TypeError, ValueError):
        return False
    return type(again) is type(value) and again == value

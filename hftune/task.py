"""The Task: data, model, loss and metrics of a training. Independent of ranks, devices and launchers."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from hftune.errors import ConfigError, first_line

if TYPE_CHECKING:  # recipes are read and validated before torch is imported
    import numpy as np
    from torch import Tensor, nn

    Batch = dict[str, Tensor]

Direction = Literal["max", "min"]

DERIVED = "task.json"
"""File beside the weights with the attributes that ``datasets`` set on the task."""


@dataclass
class Task(ABC):
    """Base class of all tasks. Subclasses are dataclasses whose fields are the recipe's ``task:`` section.

    ``datasets``, ``build_model`` and ``loss`` are required. The other methods have defaults that fit models called with keyword
    arguments and batches with ``labels``. Import torch inside the methods, so that mistyped recipes are refused at once.
    A task may define any of hftune.hooks, too.
    """

    metric_directions: ClassVar[Mapping[str, Direction | None] | None] = None
    """Names of the metrics that ``metrics`` returns, each with "max" if greater is better, "min" if smaller is better, or None
    if neither is (such as a length). With it, ``eval.metric`` is checked before training and ``eval.greater_is_better`` can be
    left out. None: the names are not known in advance."""
    labels: ClassVar[Sequence[str] | None] = None
    """Class names in the order of the class numbers, for tasks that classify: a property there, known after ``datasets``."""
    evaluates = True
    """Whether the recipe evaluates while it trains: false with eval.every=never. Then ``datasets`` need not return "eval"."""

    def validate(self) -> list[str]:
        """Return the problems of the fields and of the files they name, one sentence each. Called before torch is imported."""
        return []

    @abstractmethod
    def datasets(self) -> Mapping[str, Any]:
        """Return ``{"train": dataset, "eval": dataset}``; each data set has a length and is indexed by integers.

        With ``evaluates`` false, "eval" may be missing. If there is a third split, "test", the best model is evaluated on it
        once, after the last step.
        Called on every process. The first time, the processes of a machine take turns, so that all of them use the cache that
        the first fills; once that has worked, they all call it at once.

        Raises:
            DataError: the data cannot be used; the message names split, row and column.
        """

    @abstractmethod
    def build_model(self) -> nn.Module:
        """Return a new model on the CPU. Called on every process, after ``datasets`` and after seeding.

        For pipeline parallelism it must be a transformers decoder or have a method ``stage(index, count)``; see
        hftune.strategies.pipeline_stages.
        """

    def parameter_groups(self, model: nn.Module, config: Any) -> list[dict[str, Any]]:
        """Return the optimizer's parameter groups, as torch.optim takes them: every trainable parameter in exactly one.

        By default matrices and embeddings have ``config.weight_decay``, biases and norm parameters (under 2 dimensions) none.
        Override it to give each layer its own learning rate: ``{"params": [...], "lr": 0.1 * config.lr}``. The schedule
        scales all learning rates alike. Keys that a group lacks are taken from the recipe.

        Args:
            config: the recipe's ``train`` section, a TrainConfig.
        """
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return [
            {"params": [parameter for parameter in trainable if parameter.ndim >= 2], "weight_decay": config.weight_decay},
            {"params": [parameter for parameter in trainable if parameter.ndim < 2], "weight_decay": 0.0},
        ]

    def lengths(self, dataset: Any) -> np.ndarray | None:
        """Return a positive integer length per sample, such as its tokens, or None if all samples cost the same."""
        return None

    def augment(self, example: Any, rng: np.random.RandomState) -> Any:
        """Return a randomly varied copy of a training sample, such as a shifted or cropped image.

        Called for each sample in each epoch, before ``collate``; never in evaluation. ``rng`` is seeded by (seed, epoch,
        sample). Take all random numbers from it, so that samples do not depend on the process that loads them. Do not modify
        ``example`` in place, as it belongs to the data set, and keep its length.
        """
        return example

    def collate(self, examples: list) -> Batch:
        """Stack the samples of a micro-batch into CPU tensors whose first dimension is the samples.

        Use no random numbers here or in the data set: only ``augment`` and the model's forward pass are seeded per sample and
        step.
        """
        from torch.utils.data import default_collate

        return default_collate(examples)

    def inputs(self, batch: Batch) -> dict[str, Tensor]:
        """Return the model's keyword arguments: by default the batch without ``labels``."""
        return {name: value for name, value in batch.items() if name != "labels"}

    def target(self, batch: Batch) -> Tensor:
        """Return what ``loss`` compares the outputs with: by default ``labels``."""
        return batch["labels"]

    @abstractmethod
    def loss(self, outputs: Any, target: Tensor) -> Tensor:
        """Return the SUM of the item losses, a float32 scalar. The training loop divides by the items of the global batch."""

    def num_items(self, target: Tensor) -> float:
        """Return the number of items that ``loss`` sums over: by default samples; for others, label tokens or pixels.

        If items have weights in the loss, return the sum of the weights. It must add up over samples: padding is no item.

        Raises:
            ConfigError: ``target`` is no tensor, whose length would be its number of samples.
        """
        from torch import Tensor

        if not isinstance(target, Tensor):
            raise ConfigError(
                f"{type(self).__name__} has no num_items of its own, and its target is a {type(target).__name__}, which does "
                "not tell how many items loss sums over. Define it: def num_items(self, target): return ..., such as "
                'len(target["labels"]) for samples or int((target["labels"] != -100).sum()) for labels.'
            )
        return len(target)

    def predictions(self, outputs: Any, model: nn.Module, batch: Batch) -> list[dict[str, Any]]:
        """Return a JSON-serializable row for each sample, with everything that ``metrics`` needs, including the reference.

        ``outputs`` is what the model returned for this batch, without gradients. Tasks that generate text call ``model``
        instead. ``describe`` makes them readable.
        """
        return [{} for _ in range(len(self.target(batch)))]

    def describe(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the rows of the eval split as a person reads them: class names instead of numbers, the text itself.

        They are written to predictions.jsonl and shown in reports and trackers, which sort by the number "error", if there
        is one: the greatest is the worst. By default the rows of ``predictions`` themselves. Called after ``metrics``, on the
        main process only, with all rows in data set order.
        """
        return rows

    def metrics(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the metrics of a whole split from its rows, one per sample, in data set order. Main process only."""
        return {}

    def save(self, model: nn.Module, directory: Path) -> None:
        """Write the finished, unwrapped model into an empty directory. Main process only.

        Also writes the attributes that ``datasets`` set on the task, such as a number of classes, if JSON can represent them:
        ``build_model`` may need them when the model is loaded. Override ``save`` and ``load`` if that is not enough.
        """
        from safetensors.torch import save_model

        save_model(model, str(directory / "model.safetensors"))
        names = {item.name for item in fields(self)} | {"evaluates", "eval_sets", "described"}
        cached = {name for kind in type(self).__mro__ for name, item in vars(kind).items() if isinstance(item, cached_property)}
        derived = {name: value for name, value in vars(self).items() if name not in names | cached and _survives_json(value)}
        if derived:
            (directory / DERIVED).write_text(json.dumps(derived), encoding="utf-8")

    def load(self, directory: Path) -> nn.Module:
        """Return the model that ``save`` wrote, on the CPU, and restore whatever else ``predict`` needs."""
        from safetensors.torch import load_model

        if (path := directory / DERIVED).is_file():
            derived, names = json.loads(path.read_text(encoding="utf-8")), {item.name for item in fields(self)}
            vars(self).update({name: value for name, value in derived.items() if name not in names})
        model = self.build_model()
        load_model(model, str(directory / "model.safetensors"))
        return model

    def predict(self, model: nn.Module, inputs: list) -> list[dict[str, Any]]:
        """Return a row for each raw input, such as a text, without gradients. Used by ``hftune.load_model``.

        Values are JSON-serializable or Pillow images, which ``hftune predict`` writes into its --output folder. A task that
        classifies takes ``probabilities=True`` besides, and then adds ``probabilities``: those of all classes, by name. One
        that ranks may add its best answers.

        Raises:
            DataError: an input cannot be used; the message begins with "Input" and its index.
        """
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        """Return the default of a hook that the task does not define."""
        if hasattr(type(self), name):  # a property of the task that raised AttributeError: let the user see why
            return object.__getattribute__(self, name)
        from hftune.hooks import Hooks

        if name.startswith("_") or name not in vars(Hooks):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        default = vars(Hooks)[name]
        return default.__get__(self) if hasattr(default, "__get__") else default


class BatchLossTask(Task):
    """A task whose loss compares the samples of a step with each other, as contrastive losses do with in-batch negatives.

    It is no sum over micro-batches. Strategies compute the embeddings of the whole global batch first, then the loss and its
    gradient, then each micro-batch again: see hftune/strategies/two_pass.py. So the loss depends on ``train.batch_size``, and
    neither on micro-batches nor on processes. The last step of an epoch may have fewer samples to compare.

    ``loss`` sees a single micro-batch; it serves trials before training. In an evaluation it would depend on
    ``eval.batch_size``, so ``metrics`` has to return "loss" as well, computed from its rows.
    """

    @abstractmethod
    def embed(self, outputs: Any, target: Any) -> Tensor:
        """Return what the loss compares: a row for each sample of a micro-batch, (B, ...) float32."""

    def batch_labels(self, target: Any) -> Tensor:
        """Return what else the loss needs of each sample of a micro-batch, (B, ...), by default the target."""
        return target

    @abstractmethod
    def batch_losses(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each sample among all samples of a step, (B,) float32.

        It must be a pure function of ``embeddings`` and ``labels``, the rows of ``embed`` and ``batch_labels``: every process
        computes it.
        """

    def loss(self, outputs: Any, target: Any) -> Tensor:
        return self.batch_losses(self.embed(outputs, target), self.batch_labels(target)).sum()


def ask(task: Task, name: str, default: Any, *arguments: Any) -> Any:
    """Return what a task shows: the result of its method ``name``, or the attribute ``name`` if there are no arguments.

    If that fails, warn once and return the default: a mistake in what is only shown must not end a training.
    """
    try:
        found = getattr(task, name)
        return found(*arguments) if arguments else found
    except Exception as error:  # whatever the task's author has overlooked
        if (type(task), name) not in _FAILED:
            _FAILED.add((type(task), name))
            print(f"warning: {type(task).__name__}.{name} failed: {first_line(error)}. Training does not need it.", flush=True)
        return default


_FAILED: set[tuple[type, str]] = set()
"""What ``ask`` has warned of."""


def _survives_json(value: Any) -> bool:
    """Return whether JSON restores a value unchanged; it does not for tuples or for mappings with numeric keys."""
    try:
        restored = json.loads(json.dumps(value))
    except (TypeError, ValueError):
        return False
    return type(restored) is type(value) and restored == value

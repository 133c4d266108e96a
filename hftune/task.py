"""The Task: data, model, loss and metrics of a training. Independent of ranks, devices and launchers."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from hftune.errors import ConfigError

if TYPE_CHECKING:  # recipes are read and validated before torch is imported
    import numpy as np
    import torch
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
    A task may define any of the ``Hooks``, too.
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
        names = {item.name for item in fields(self)} | {"evaluates"}
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
        classifies takes ``probabilities=True`` besides, and then adds ``probabilities``: those of all classes, by name.

        Raises:
            DataError: an input cannot be used; the message begins with "Input" and its index.
        """
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        """Return the default of a hook that the task does not define."""
        if hasattr(type(self), name):  # a property of the task that raised AttributeError: let the user see why
            return object.__getattribute__(self, name)
        if name.startswith("_") or name not in vars(Hooks):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        default = vars(Hooks)[name]
        return default.__get__(self) if hasattr(default, "__get__") else default


class Hooks:
    """What else a task may define, in the order of their readers, with what holds for a task that does not.

    No task inherits them: ``Task`` looks here for those that it lacks, so that it is itself what must be known to write one.
    """

    # hftune/config and hftune/launchers, before torch is imported
    code_fields: ClassVar[Sequence[str]] = ("dataset", "network")
    """Fields that may name code to import: package.module.Class or module:function."""
    libraries: ClassVar[Sequence[str]] = ()
    """Modules that its methods import. `hftune train --processes` imports them once for all processes of the machine."""

    # hftune/build.py and hftune/evaluation.py: what is computed together
    scored_head: ClassVar[bool] = False
    """Whether ``loss`` and ``predictions`` take a ``ScoredOutput`` (hftune.models.scored_head) as well as logits. Then a
    transformers model computes the cross-entropy of ``target`` together with its head if there would be too many logits."""

    def mixture(self: Any, dataset: Any) -> Sequence[tuple[int, float]] | None:
        """Return number of samples and weight of each data set that the training data consist of, in their order.

        None, the default: an epoch has each sample once. See ``BatchPlan.mixture`` for what a weight means.
        """
        return None

    def optimizer(self: Any, model: nn.Module, config: Any) -> torch.optim.Optimizer | None:
        """Return an optimizer of your own for the model's trainable parameters; None, the default: ``train.optimizer``.

        It is built on the CPU, before the model is moved and wrapped. The learning rates of its groups are their peaks: the
        schedule scales them alike. ``config``: the recipe's ``train`` section, a TrainConfig.
        """
        return None

    @property
    def augments(self: Any) -> bool:
        """Whether training samples pass through ``augment``: by default, if the task defines it."""
        return type(self).augment is not Task.augment

    def sizes(self: Any, dataset: Any) -> np.ndarray | None:
        """Return the K sizes of each sample that are padded independently, (N, K) int, such as height and width of an image.

        A micro-batch is padded to the maximum of each size. None, the default: to the maximum of ``lengths``.
        """
        return None

    def padded_length(self: Any, sizes: Sequence[int]) -> int:
        """Return the cost of a sample padded to these K sizes, in units of ``lengths``: by default their sum.

        The cost must not decrease when a size increases.
        """
        return sum(sizes)

    @property
    def rows_per_sample(self: Any) -> int:
        """Rows that ``predictions`` computes for each sample: by default 1; for texts generated by beam search, its beams.

        ``eval.batch_tokens`` counts the tokens of a sample that many times.
        """
        return 1

    def evaluation_inputs(self: Any, batch: Batch) -> dict[str, Any]:
        """Return the model's keyword arguments in an evaluation: by default ``inputs``.

        Define it if ``predictions`` needs outputs that the loss does not, such as the cache from which a text is generated. In
        a pipeline, the stages get ``inputs``.
        """
        return self.inputs(batch)

    # hftune/training.py and hftune/checkpoints: what is said before training, and what a resumed run must have
    settled_fields: ClassVar[Sequence[str]] = ()
    """Fields that are null in a recipe until ``datasets`` sets them, once: a resumed run takes them from recipe.yaml."""

    def class_counts(self: Any, dataset: Any) -> Mapping[str, int]:
        """Return the number of training samples of each class by its name, in the order of the classes; main process only."""
        return {}

    def notices(self: Any, datasets: Mapping[str, Any], model: nn.Module) -> list[str]:
        """Return what a user should know before training, such as how many texts are truncated, one sentence each."""
        return []

    def commits(self: Any) -> dict[str, str]:
        """Return the commit (SHA-1) of each repository loaded from the Hub, by the key that named it: {"task.model": ...}.

        Called after ``datasets`` and ``build_model``. A run is resumed only with the same commits.
        """
        return {}

    # Trackers and reports: what is shown of an evaluation
    sample_fields: ClassVar[Sequence[str]] = ()
    """Fields of the rows of ``describe`` to show for a few samples after each evaluation, in terminal and trackers."""

    def sample_images(self: Any, outputs: Any, model: nn.Module, batch: Batch, indices: Sequence[int]) -> list[np.ndarray]:
        """Return an image (H, W, 3) uint8 of the samples at these indices of the batch; an empty list if there are no images.

        The other arguments are those of ``predictions``. Each evaluation logs the first ``eval.show_samples`` images.
        """
        return []

    def caption(self: Any, row: Mapping[str, Any]) -> str:
        """Return the caption of a sample's image, from its row of ``describe``; by default its ``sample_fields``."""
        return ", ".join(f"{name} {row[name]}" for name in self.sample_fields)

    # hftune show and hftune replay
    def marked(self: Any, example: Any) -> list[tuple[str, bool]]:
        """Return a sample as the model reads it, in pieces of text, each with whether the model learns to write it."""
        return []

    # hftune folds
    fold_rows: ClassVar[Sequence[int] | None] = None
    """If the eval split is one of several folds of the data: the number of each of its rows in the data; else None."""
    fold_data: ClassVar[str | None] = None
    """A digest of all rows that the folds are made of, by which folds of different data are told apart; None: not known."""

    # hftune predict --data
    read_columns: ClassVar[Mapping[str, str]] = {}
    """Columns that were read of the data, by the fields that name them, such as {"text_column": "review"}: a property, known
    after ``datasets``. Exports keep it: `hftune predict --data` prefers the same columns."""

    columns: ClassVar[Mapping[str, Any]] = {}
    """What it reads columns for, by the names of ``input_columns``: each a ``hftune.data.columns.Role``, with usual names."""

    def input_columns(self: Any) -> dict[str, str | None]:
        """Return the columns of a table that make a raw input of ``predict``, each by the name that ``--map`` gives it.

        None stands for a column that the recipe does not name; `hftune predict --data` then takes it if there is only one way.
        By default those of its fields text_column, words_column, source_column, anchor_column and image_column:
        ``{"text": "review"}`` for text_column: review.
        """
        given = {item.name: getattr(self, item.name) for item in fields(self)}
        names = [name for name in ("text", "words", "source", "anchor", "image") if f"{name}_column" in given]
        return {name: given[f"{name}_column"] for name in names}

    def raw_inputs(self: Any, rows: Mapping[str, list]) -> list:
        """Return the raw inputs of ``predict`` that some rows of a table hold: the values of each of the ``input_columns``.

        By default the values of the only column, or tuples of the values of several, in the order of ``input_columns``.
        """
        columns = list(rows.values())
        return list(columns[0]) if len(columns) == 1 else list(zip(*columns, strict=True))

    def input_lengths(self: Any, inputs: list) -> list[int] | None:
        """Return the length of each raw input, such as its tokens, to sort by it; None, the default: by characters."""
        return None

    # Model cards and MLflow
    def transformers_pipeline(self: Any) -> dict[str, Any] | None:
        """Return the arguments of a ``transformers.pipeline`` that loads what ``save`` wrote; None if there is none."""
        return None

    def example_inputs(self: Any) -> list:
        """Return a few raw inputs for ``predict``; MLflow logs them with the model. Called after ``datasets``."""
        return []


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
            reason = f"{type(error).__name__}: {error}".partition("\n")[0].rstrip(".")
            print(f"warning: {type(task).__name__}.{name} failed: {reason}. Training does not need it.", flush=True)
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

"""A teacher: a frozen model whose probabilities the student learns besides the labels. Knows neither steps nor processes.

It sees the micro-batches that the student sees, in evaluation mode, so that nothing depends on how a step is cut or spread.

Source: Hinton et al., "Distilling the Knowledge in a Neural Network" (2015), section 2.
"""

# Shapes: I items of a loss, such as labels; C classes, or words of a tokenizer.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.nn.functional import kl_div

from hftune.config import TrainConfig
from hftune.config.shipped_files import recipe_names
from hftune.data.files import commit_of, is_folder
from hftune.errors import ConfigError, DataError, first_line
from hftune.models.kinds import drawn_parameters
from hftune.models.weights import weights_digest
from hftune.strategies.packing import PACKING, compute
from hftune.strategies.trial import autocast
from hftune.task import Task


@dataclass
class Teacher:
    """A frozen model, and how its student learns from it: ``train.teacher`` and the keys beside it."""

    task: Task
    """The student's."""
    config: TrainConfig
    model: nn.Module
    digest: str = ""
    """The SHA-256 of its weights."""
    commits: Mapping[str, str] = field(default_factory=dict)
    """On the Hub."""
    half: torch.dtype | None = None
    """Of autocast, if it is on."""
    packs: bool = False
    """Whether the model takes batches without padding; otherwise it computes the padding of the student's batches."""
    total: Tensor = field(default_factory=lambda: torch.zeros(()))
    """The divergence of the step so far, summed over the items of this process."""

    def item_logits(self, arguments: Mapping[str, Any], target: Any) -> Tensor | None:
        """Return what the teacher says to the items of a micro-batch, (I, C); None: the task has no such logits."""
        if not self.packs:
            arguments = {name: value for name, value in arguments.items() if name != PACKING}
        with torch.no_grad(), autocast(next(self.model.parameters()).device, self.half):
            return self.task.item_logits(compute(self.model, **arguments), target)

    def check(self, dataset: Any, samples: Sequence[int]) -> None:
        """Compute a few samples.

        Raises:
            ConfigError: the teacher cannot compute them, or the task has no logits for it to compare.
        """
        try:
            device = next(self.model.parameters()).device
            batch = send_to_device(self.task.collate([dataset[sample] for sample in samples]), device)
            logits = self.item_logits(self.task.inputs(batch), self.task.target(batch))
        except (ConfigError, DataError):
            raise
        except Exception as error:  # whatever a model of others raises
            raise self.refusal(f"it cannot compute the samples of this task ({first_line(error)}).") from error
        if logits is None:
            raise self.refusal(
                f"{type(self.task).__name__} cannot learn from a teacher as it is set here: it predicts numbers, or its items "
                "have weights (task.class_weights)."
            )

    def mixed(self, loss: Tensor, outputs: Any, target: Any, arguments: Mapping[str, Any], weight: float = 1.0) -> Tensor:
        """Return (1 - w) loss + w T^2 KL(teacher || student), where T is the temperature and w ``train.teacher_weight``.

        Args:
            loss: of the labels, the sum over the items of a micro-batch.
            outputs: the student's, for these ``arguments``.
            weight: of the micro-batch; 0 for a dummy, whose divergence does not count.

        Raises:
            ConfigError: the teacher has other classes, or another number of them.
        """
        theirs, own = self.item_logits(arguments, target), self.task.item_logits(outputs, target)
        if own.shape != theirs.shape:
            raise self.refusal(f"it has {theirs.shape[-1]:,} classes or words, and {own.shape[-1]:,} are learned.")
        temperature, share = self.config.teacher_temperature, self.config.teacher_weight
        found = divergence(own, theirs, temperature)
        self.total = self.total + weight * found.detach()
        taught = share * temperature**2 * found
        return taught if share == 1 else (1 - share) * loss + taught  # a label that the teacher rules out may lose infinity

    def refusal(self, reason: str) -> ConfigError:
        return ConfigError(f"train.teacher={self.config.teacher}: {reason}")


def divergence(student_IC: Tensor, teacher_IC: Tensor, temperature: float) -> Tensor:
    """Return the sum over items of KL(teacher || student), of the softmax of logits / temperature: float32 or float64."""
    own, theirs = (
        (logits if logits.dtype == torch.float64 else logits.float()).div(temperature).log_softmax(-1)
        for logits in (student_IC, teacher_IC)
    )
    terms_IC = kl_div(own, theirs, reduction="none", log_target=True)
    return terms_IC.masked_fill(theirs == -torch.inf, 0).sum()  # p log p is 0 there


def named_folder(key: str, name: str) -> Path | None:
    """Return the folder of the model that ``train.teacher`` or ``train.reference`` names, on this machine; None: on the Hub.

    Raises:
        ConfigError: there is no such folder, or no model in it.
    """
    if not is_folder(name) and Path(name).parts[0] != "outputs":
        return None
    run = Path(name).expanduser()
    folder = run / "model" if (run / "model").is_dir() else run
    if not folder.is_dir() or (folder / "metrics.jsonl").is_file():  # of a run that has no model yet
        what = "holds no model" if folder.is_dir() else "there is no such folder"
        hint = f" Recipe {run.name} trains one: hftune train recipe={run.name}" if run.name in recipe_names() else ""
        raise ConfigError(f"{key}={name}: {what}. Name a run's output folder, or one of save_pretrained.{hint}")
    return folder


def load_teacher(task: Task, config: TrainConfig) -> Teacher:
    """Load the teacher that ``train.teacher`` names, see ``load_named``.

    Raises:
        ConfigError: as ``load_named``; or it has other classes.
    """
    model, commits = load_named(task, "train.teacher", config.teacher or "", config.teacher_revision)
    if (own := getattr(task, "text_tokenizer", None)) is not None and hasattr(model, "config"):
        # A decoder that classifies reads the last token that is no padding, as the student's batches have it.
        model.config.get_text_config().pad_token_id = own.pad_token_id
    digest = weights_digest(model.state_dict().items())  # buffers beside it may differ in rounding between machines
    return Teacher(task, config, model.eval().requires_grad_(False), digest, commits)


def load_named(task: Task, key: str, name: str, revision: str | None) -> tuple[nn.Module, dict[str, str]]:
    """Load the model that a key names beside ``task.model``, on the CPU, as the task loads its own exports.

    Args:
        task: after ``datasets``; it stays as it is.

    Returns:
        The model, and its commit on the Hub by the key, if it is there.

    Raises:
        ConfigError: there is no such model; it was not trained for such a task; or it has another tokenizer or other classes.
    """
    commits, folder = {}, named_folder(key, name)
    if folder is None:
        from hftune.models.pretrained import CONFIG, PICKLED, TOKENIZER, WEIGHTS, folder_of

        commits = {key: (commit := commit_of("model", name, revision, key))}
        folder = folder_of(name, commit, (*CONFIG, *TOKENIZER, *WEIGHTS), key)
        if not any(folder.glob("model*.safetensors")):
            folder = folder_of(name, commit, PICKLED, key)
    loaded = copy(task)  # whose tokenizer will be that of the model
    try:
        with torch.random.fork_rng(devices=[]):  # so that the first weights of training do not depend on it
            model = loaded.load(folder)
    except Exception as error:  # whatever a task of others raises
        raise ConfigError(f"{key}={name} is no model that {type(task).__name__} can load: {first_line(error)}") from error
    if (reason := _foreign(task, loaded, model, folder)) is not None:
        raise ConfigError(f"{key}={name}: {reason}")
    return model, commits


def _foreign(task: Any, taught: Any, model: nn.Module, folder: Path) -> str | None:
    """Say why a model cannot stand beside a task's: it reads or predicts something else. ``taught``: has loaded it."""
    is_adapted = (folder / "adapter_config.json").is_file()  # whose head is in the files of the adapters
    if (drawn := drawn_parameters(model)) and not is_adapted:
        return f"it has no {min(drawn)}, so it was not trained for what {type(task).__name__} learns."
    own, theirs = (getattr(each, "text_tokenizer", None) for each in (task, taught))
    if own is not None and own.get_vocab() != theirs.get_vocab():
        return (
            f"its tokenizer has another vocabulary than that of task.model ({len(theirs):,} and {len(own):,} tokens), so they "
            "do not read the same. Choose two models of one family."
        )
    config, kind = getattr(model, "config", None), getattr(task, "kind", None)
    if kind is not None and len(getattr(task, "text_columns_read", ())) > 1:  # not a source and its target
        own_types, their_types = task.has_types(task.named_config), taught.has_types(config)
        if own_types != their_types:
            one, other = ("teacher", "student") if their_types else ("student", "teacher")
            return f"the {one} tells the two texts of a pair apart by token types, and the {other} has none."
    if None not in (kind, found := getattr(config, "problem_type", None)) and found != kind:
        return f"it was trained for problem_type={found}, and the student learns {kind}."
    labels, names = task.labels, getattr(config, "id2label", None)
    if labels is None or names is None or [*labels] == (found := [names[number] for number in sorted(names)]):
        return None
    return (
        f"its classes are {', '.join(map(str, found[:10]))}, and those of the data {', '.join(map(str, labels[:10]))}. Names "
        "and order must be the same; task.label_names sets them."
    )

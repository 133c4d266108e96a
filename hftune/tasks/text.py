"""What the text tasks share: keys for data set and model, loading and saving, and the loss on token labels.

torch, transformers and datasets are imported inside the methods, so that mistyped recipes are refused without waiting for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hftune.task import Task

if TYPE_CHECKING:
    import datasets
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

NO_LABEL = -100
"""Label of positions that do not count in the loss, such as padding."""
SHOWN = 500
"""Characters of a text in predictions.jsonl."""


@dataclass
class TextTask(Task):
    """A task on the texts of a data set, with a transformers model and its tokenizer.

    Subclasses set the defaults of ``model``, ``dataset`` and ``eval_split``, and provide ``text_tokenizer``.
    """

    model: str | None = None
    """Model name on the Hub (owner/name) or local folder. null: a new model built from model_config."""
    model_revision: str | None = None
    """Commit, tag or branch of the model on the Hub. null: the newest commit."""
    model_config: dict[str, Any] = field(default_factory=dict)
    """Fields of the model's config to override, such as hidden_dropout_prob; if model is null, the whole config."""
    dataset: str = ""
    """Data set name on the Hub (owner/name), or module:function that returns rows."""
    dataset_revision: str | None = None
    """Commit, tag or branch of the data set on the Hub, such as refs/convert/parquet. null: the newest commit."""
    dataset_config: str | None = None
    """Configuration (subset) of the data set on the Hub, if it has several. null: the only one."""
    data_dir: str | None = None
    """Folder of the Hub repository to read instead of the whole repository, if its README does not list its files."""
    data_files: dict[str, Any] | None = None
    """Your own files: data_files.train, data_files.eval and, optionally, data_files.test, each a path, a glob or a list of
    them. Used instead of dataset. Without eval, set eval_share, or eval.every=never."""
    train_split: str = "train"
    """Split of the data set on the Hub to train on."""
    eval_split: str = "validation"
    """Split of the data set on the Hub to evaluate on."""
    eval_share: float | None = None
    """Share of the training rows to hold out and evaluate on, such as 0.1, if there are no evaluation data: random rows, the
    same in every run, of each class its share. null: the evaluation data are files or a split of their own."""
    eval_fold: list[int] | None = None
    """Instead of eval_share, one of several folds: its number, from 0, and the number of folds, such as [0, 5].
    max_train_samples are then the rows of all folds together. `hftune folds` sets it."""
    max_train_samples: int | None = None
    """Number of training rows to use, a random subset that is the same in every run. null: all."""
    max_eval_samples: int | None = None
    """Number of evaluation rows to use, a random subset that is the same in every run. null: all."""

    texts_run_on: ClassVar[bool] = False
    """Whether the rows are pieces of a running text, of which consecutive ones are held out, not random ones."""
    libraries: ClassVar[Sequence[str]] = ("hftune.data.text", "hftune.data.notices", "hftune.models.pretrained")

    @cached_property
    def text_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the model, or one made from the training texts."""
        raise NotImplementedError

    @cached_property
    def dataset_commit(self) -> str | None:
        """Commit of the data set that is loaded from the Hub; None for files, folders and functions."""
        from hftune.data.files import dataset_commit
        from hftune.data.text import INSTEAD

        return dataset_commit(self.dataset, self.data_files, self.dataset_revision, INSTEAD)

    @cached_property
    def model_commit(self) -> str | None:
        """Commit of the model that is loaded from the Hub; None for folders and new models."""
        from hftune.data.files import model_commit

        return model_commit(self.model, self.model_revision)

    def commits(self) -> dict[str, str]:
        from hftune.data.hub import known

        return known({"task.model": self.model_commit, "task.dataset": self.dataset_commit})

    @property
    def _source_splits(self) -> dict[str, str]:
        """Names of the splits in the data set, by split; without effect if files or a function provide the splits."""
        splits = {"train": self.train_split, **({"eval": self.eval_split} if self.evaluates else {})}
        return {**splits, "test": ""} if "test" in (self.data_files or {}) else splits

    @property
    def _counts(self) -> dict[str, int | None]:
        """Number of rows to use, by split; None for all."""
        return {"train": self.max_train_samples, "eval": self.max_eval_samples, "test": None}

    def _split_problems(self, optional: tuple[str, ...] = ("test",)) -> Iterator[str]:
        """Yield what is wrong with the keys that say where the rows come from, and which of them are evaluated on.

        Args:
            optional: splits besides "train" and "eval" that files may be given for.
        """
        from hftune.data.files import data_file_problems, held_out_key, held_out_problems

        yield from held_out_problems(self)
        yield from data_file_problems(
            self.dataset, self.data_files, optional, needs_eval=self.evaluates and held_out_key(self) is None
        )

    def _load_rows(
        self, columns: Mapping[str, str], texts: Sequence[str], may_be_empty: bool = False, stratify_by: str | None = None
    ) -> dict[str, datasets.Dataset]:
        """Load the rows of each split; arguments as for ``load_splits``."""
        from hftune.data.splits import Part
        from hftune.data.text import load_splits

        parts = {split: Part.of(self, split, self._counts[split], self.texts_run_on) for split in self._source_splits}

        return load_splits(
            self.dataset,
            self.data_files,
            source_splits=self._source_splits,
            parts=parts,
            columns=columns,
            texts=texts,
            config=self.dataset_config,
            data_dir=self.data_dir,
            commit=self.dataset_commit,
            may_be_empty=may_be_empty,
            stratify_by=stratify_by,
        )

    def _row_notices(self, rows: Mapping[str, datasets.Dataset], text_column: str) -> list[str]:
        """Return notices of keys without effect, of rows left out, and of rows that are in two splits."""
        from hftune.data import notices

        return [
            *notices.ignored_splits(self),
            *notices.held_out(self, notices.num_rows(rows["train"])[1]),
            *notices.left_out(self._kept(rows)),
            *notices.shared(notices.shared_texts(rows, text_column)),
        ]

    def _kept(self, rows: Mapping[str, datasets.Dataset]) -> dict[str, tuple[int, int]]:
        """Return, for each split that a limit applies to, the number of rows used and of all rows."""
        from hftune.data import notices

        limited = {split: split_rows for split, split_rows in rows.items() if self._counts[split] is not None}
        return {} if self.eval_fold else {split: notices.num_rows(split_rows) for split, split_rows in limited.items()}

    def save(self, model: PreTrainedModel, directory: Path) -> None:
        """Write model and tokenizer for ``from_pretrained``."""
        model.save_pretrained(directory)
        self.text_tokenizer.save_pretrained(directory)

    def _load_saved(self, auto_class: Any, directory: Path) -> PreTrainedModel:
        """Load the model that ``save`` wrote."""
        from hftune.models.pretrained import load_config, load_model

        return load_model(auto_class, str(directory), load_config(str(directory), {}))


def beginning(text: str) -> str:
    """Return the first SHOWN characters of a text, with an ellipsis if there are more."""
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}\N{HORIZONTAL ELLIPSIS}"


def token_loss(logits_NTV: Tensor, labels_NT: Tensor, reduction: str = "sum") -> Tensor:
    """Return the sum of the cross-entropies of all labels but NO_LABEL, float32; with reduction "none", each one, flat."""
    from torch.nn.functional import cross_entropy

    return cross_entropy(logits_NTV.float().flatten(0, 1), labels_NT.flatten(), ignore_index=NO_LABEL, reduction=reduction)


def count_labels(labels: Tensor) -> int:
    """Count the labels that are not NO_LABEL."""
    return int((labels != NO_LABEL).sum())

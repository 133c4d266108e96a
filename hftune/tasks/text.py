"""The base of text tasks: keys for data set and model, tokenizing, padding, loading and saving; and the loss on token labels.

torch, transformers and datasets are imported inside the methods, so that mistyped recipes are refused without waiting for them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hftune.config.keys import key
from hftune.config.own_code import hashes_of
from hftune.data.files import held_out_key
from hftune.errors import ConfigError
from hftune.task import Task
from hftune.tasks.validation import bound_problems, name_problems

if TYPE_CHECKING:
    import numpy as np
    from datasets import Dataset
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from hftune.data.mixture import Mixture
    from hftune.task import Batch

NO_LABEL = -100
"""Label of positions that do not count in the loss, such as padding."""
SHOWN = 500
"""Characters of a text in predictions.jsonl."""


@dataclass
class TextTask(Task):
    """Base of tasks on texts, with a model of transformers and its tokenizer.

    A subclass says what is learned: ``auto_class``, ``encode`` and ``loss``, and its columns as fields whose names end in
    ``_column``. It usually has a field ``max_length``. The base loads and checks the rows, tokenizes them once per machine,
    pads them, and loads and saves the model. docs/own-task.md has an example.
    """

    model: str | None = key(None, changes="model")
    """Model name on the Hub (owner/name) or local folder. null: a new model built from model_config."""
    model_revision: str | None = key(None, changes="model")
    """Commit, tag or branch of the model on the Hub. null: the newest commit."""
    model_config: dict[str, Any] = key(dict, changes="model")
    """Fields of the model's config to override, such as hidden_dropout_prob; if model is null, the whole config."""
    weights: str | None = key(None, changes="model", resume="harmless")
    """Weights of your own to start from, after those of model: a safetensors or PyTorch file, or a folder with one, copied by
    name. null: none."""
    dataset: str | None = key(None, changes="data")
    """Data set name on the Hub (owner/name), or module:function that returns rows. With data_files: their format (json, csv,
    parquet, arrow or text), only needed if their suffixes do not show it."""
    dataset_revision: str | None = key(None, changes="data")
    """Commit, tag or branch of the data set on the Hub, such as refs/convert/parquet. null: the newest commit."""
    dataset_config: str | None = key(None, changes="data")
    """Configuration (subset) of the data set on the Hub, if it has several. null: the only one."""
    data_dir: str | None = key(None, changes="data")
    """Folder of the Hub repository to read instead of the whole repository, if its README does not list its files."""
    data_files: dict[str, Any] | None = key(None, changes="data", inside={"eval": "output", "test": "output"})
    """Your own files: data_files.train, data_files.eval and, optionally, data_files.test, each a path, a glob or a list of
    them. Used instead of dataset. Without eval, set eval_share, or eval.every=never."""
    datasets_: list[dict[str, Any]] | None = key(None, changes="data")
    """Several data sets to train on, instead of dataset and data_files.train: a list of {data_files} or {dataset}, each with a
    weight (how often an epoch uses each of its rows, such as 0.5 or 3; 1 if it is left out) and, if its columns have other
    names, columns: {text: review}. See docs/own-data.md."""
    train_split: str = key("train", changes="data")
    """Split of the data set on the Hub to train on."""
    eval_split: str = key("validation", changes="output")
    """Split of the data set on the Hub to evaluate on."""
    eval_share: float | None = key(None, changes="data")
    """Share of the training rows to hold out and evaluate on, such as 0.1, if there are no evaluation data: random rows, the
    same in every run, of each class its share. null: the evaluation data are files or a split of their own."""
    eval_fold: list[int] | None = key(None, changes="data")
    """Instead of eval_share, one of several folds: its number, from 0, and the number of folds, such as [0, 5].
    max_train_samples are then the rows of all folds together. `hftune folds` sets it; it takes no language models."""
    max_train_samples: int | None = key(None, changes="data")
    """Number of training rows to use, a random subset that is the same in every run. null: all."""
    max_eval_samples: int | None = key(None, changes="output")
    """Number of evaluation rows to use, a random subset that is the same in every run. null: all."""
    vocab_size: int = 4096
    """Vocabulary size of the tokenizer that is trained on the texts if model is null."""

    auto_class: ClassVar[str] = ""
    """Class of transformers that loads the model, such as AutoModelForTokenClassification."""
    text_keys: ClassVar[Sequence[str]] = ("text_column",)
    """Those of the fields for columns whose columns must hold texts."""
    length_keys: ClassVar[Sequence[str]] = ("max_length",)
    """Fields with a maximum number of tokens, which must not exceed the model's positions."""
    padding: ClassVar[Mapping[str, int]] = {"token_type_ids": 0, "labels": NO_LABEL}
    """Columns of one number per token, besides input_ids, each with the value of padding."""
    texts_run_on: ClassVar[bool] = False
    """Whether the rows are pieces of a running text, of which consecutive ones are held out, not random ones."""
    libraries: ClassVar[Sequence[str]] = ("hftune.data.rows", "hftune.data.notices", "hftune.models.pretrained")

    def validate(self) -> list[str]:
        from hftune.data.files import model_folder_problems

        lengths = {key: 3 for key in self.length_keys if hasattr(self, key)}
        return [
            *self._split_problems(),
            *model_folder_problems(self.model, self.model_config),
            *name_problems(self),
            *bound_problems(self, {**lengths, "vocab_size": 100, "max_train_samples": 1, "max_eval_samples": 1}),
        ]

    @cached_property
    def dataset_commit(self) -> str | None:
        """Commit of the data set that is loaded from the Hub; None for files, folders and functions."""
        from hftune.data.files import dataset_commit
        from hftune.data.rows import INSTEAD

        return None if self.datasets_ else dataset_commit(self.dataset or "", self.data_files, self.dataset_revision, INSTEAD)

    @cached_property
    def _mixed_commits(self) -> list[str | None]:
        """Commit of each of ``datasets_`` that is loaded from the Hub; None for the others."""
        from hftune.data.files import dataset_commit
        from hftune.data.rows import INSTEAD

        return [
            dataset_commit(str(entry.get("dataset", "")), entry.get("data_files"), entry.get("dataset_revision"), INSTEAD)
            for entry in self.datasets_ or ()
        ]

    @cached_property
    def model_commit(self) -> str | None:
        """Commit of the model that is loaded from the Hub; None for folders and new models."""
        from hftune.data.files import model_commit

        return model_commit(self.model, self.model_revision)

    def commits(self) -> dict[str, str]:
        from hftune.data.hub import known

        mixed = {f"task.datasets.{index}.dataset": commit for index, commit in enumerate(self._mixed_commits)}
        return known({"task.model": self.model_commit, "task.dataset": self.dataset_commit, **mixed})

    @property
    def _source_splits(self) -> dict[str, str]:
        """Names of the splits in the data set, by split; without effect if files or a function provide the splits."""
        splits = {"train": self.train_split, **({"eval": self.eval_split} if self.evaluates else {})}
        return {**splits, "test": ""} if "test" in (self.data_files or {}) else splits

    @property
    def held_out_share(self) -> float | None:
        """Share of the training rows to evaluate on."""
        return self.eval_share

    @property
    def _counts(self) -> dict[str, int | None]:
        """Number of rows to use, by split; None for all."""
        return {"train": self.max_train_samples, "eval": self.max_eval_samples, "test": None}

    def _split_problems(self, optional: tuple[str, ...] = ("test",)) -> Iterator[str]:
        """Yield what is wrong with the keys that say where the rows come from, and which of them are evaluated on.

        Args:
            optional: splits besides "train" and "eval" that files may be given for.
        """
        from hftune.data.files import data_file_problems, held_out_problems, mixture_problems

        yield from held_out_problems(self)
        if self.datasets_ is not None:
            yield from mixture_problems(self)
            return
        needs_eval = self.evaluates and held_out_key(self) is None
        yield from data_file_problems(self.dataset, self.data_files, optional, needs_eval=needs_eval)

    def _load_rows(self, columns: Mapping[str, str], texts: Sequence[str], may_be_empty: bool = False) -> dict[str, Dataset]:
        """Load the rows of each split; arguments as for ``load_splits``."""
        from hftune.data.rows import load_splits
        from hftune.data.splits import Part

        parts = {split: Part.of(self, split, self._counts, self.texts_run_on) for split in self._source_splits}
        return load_splits(
            self.dataset or "",
            self.data_files,
            source_splits=self._source_splits,
            parts=parts,
            columns=columns,
            texts=texts,
            config=self.dataset_config,
            data_dir=self.data_dir,
            commit=self.dataset_commit,
            may_be_empty=may_be_empty,
            stratify_by=self.stratify_by,
            mixed=None if self._mixed is None else self._mixed.sources,
        )

    @cached_property
    def _mixed(self) -> Mixture | None:
        """What ``datasets_`` names."""
        from hftune.data.mixture import load_mixture

        return load_mixture(self.datasets_, self._mixed_commits.__getitem__) if self.datasets_ else None

    def mixture(self, dataset: Any) -> list[tuple[int, float]] | None:
        if self._mixed is None:
            return None
        rows = self._rows["train"]
        if len(dataset) != len(rows):
            raise ConfigError(
                f"task.datasets needs a task whose samples are the rows of its data, unlike {type(self).__name__}."
            )
        return [*zip(self._mixed.sizes(rows), self._mixed.weights, strict=True)]

    @property
    def fold_rows(self) -> list[int] | None:
        """Row in the data of each sample of the eval split, if that is a fold."""
        from hftune.data.rows import row_numbers

        rows = self._rows["eval"] if self.eval_fold else None
        return None if rows is None else row_numbers(rows, range(len(rows)))

    @property
    def fold_data(self) -> str | None:
        from hftune.data.rows import digest_of_all

        return digest_of_all(self._rows["eval"]) if self.eval_fold else None

    def row_of(self, split: str) -> Callable[[int], Any]:
        """Return a function that translates an index of a split to the row of the data, for messages."""
        from hftune.data.rows import row_numbers

        def name(index: int) -> Any:
            (row,) = row_numbers(self._rows[split], [index])
            is_trained_on = split == "train" or (split == "eval" and held_out_key(self) is not None)
            is_mixed = self._mixed is not None and is_trained_on
            return self._mixed.row_name(row) if is_mixed and self._mixed else row

        return name

    def columns(self, rows: Dataset) -> dict[str, str]:
        """Return the columns that the task reads, by their fields: by default the values of all fields ``*_column``.

        Args:
            rows: the training split. hftune.data.columns chooses a column that the recipe does not name.

        Raises:
            DataError: a column cannot be chosen.
        """
        names = [item.name for item in fields(self) if item.name.endswith("_column")]
        return {name: column for name in names if (column := getattr(self, name)) is not None}

    def stratify_by(self, rows: Dataset) -> str | None:
        """Return the column of the classes, of each of which ``eval_share`` is held out; None, the default: of any rows.

        Args:
            rows: the training split.
        """
        return None

    @cached_property
    def _unchecked(self) -> dict[str, Dataset]:
        return self._load_rows({}, [])

    @cached_property
    def _columns(self) -> dict[str, str]:
        return self.columns(self._unchecked["train"])

    @property
    def read_columns(self) -> dict[str, str]:
        return self._columns

    @property
    def _text_columns(self) -> list[str]:
        return [self._columns[key] for key in self.text_keys if key in self._columns]

    @cached_property
    def _rows(self) -> dict[str, Dataset]:
        """The rows of each split, whose columns have been checked."""
        from hftune.data.rows import check_column, check_texts

        for name, rows in zip(self._mixed.names, self._mixed.sources, strict=True) if self._mixed else ():
            for column in self._text_columns:  # so that messages name the data set and its row
                check_texts(rows, column, f"train ({name})")
        for split, rows in self._unchecked.items():
            for name, column in self._columns.items():
                check_column(rows, f"task.{name}", column, split)
            for column in self._text_columns:
                check_texts(rows, column, split)
        return self._unchecked

    @cached_property
    def text_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the model, or, for a new model, a WordPiece tokenizer trained on the training texts."""
        from hftune.data.cache import cached_value
        from hftune.models.pretrained import load_tokenizer, train_wordpiece, wordpiece_tokenizer

        if self.model is not None:
            return load_tokenizer(self.model, commit=self.model_commit)
        key = ["wordpiece", self._rows["train"]._fingerprint, self._columns, self.vocab_size, version("tokenizers")]
        key += _code(type(self))
        return wordpiece_tokenizer(cached_value(key, lambda: train_wordpiece(self.training_texts(), self.vocab_size)))

    def training_texts(self) -> Iterable[str]:
        """Yield the texts that the tokenizer of a new model is trained on: by default those of all text columns."""
        return (text for column in self._text_columns for text in self._rows["train"][column])

    def encode(self, rows: dict[str, list]) -> dict[str, list]:
        """Tokenize some rows, given as lists of the values of each column.

        Returns:
            lists of one row each: ``input_ids``, other columns of numbers (see ``padding``), and single numbers. Flags ``cut``
            say which texts were truncated; ``notices`` counts them.
        """
        raise NotImplementedError

    def encoder(self, split: str) -> Callable[[dict[str, list]], dict[str, list]]:
        """Return ``encode`` for the rows of a split."""
        return self.encode

    def encoded_by(self) -> Any:
        """Return what ``encode`` and ``targets`` depend on besides rows, split, tokenizer and code: by default its own fields.

        Samples are tokenized again if it changes.
        """
        return {item.name: getattr(self, item.name) for item in fields(self) if item.name not in _SHARED}

    def targets(self, split: str) -> Mapping[str, np.ndarray]:
        """Return columns to add to those of ``encode``, such as ``label``: by name, an array with a value per row."""
        return {}

    def datasets(self) -> Mapping[str, Any]:
        """Return the tokenized splits, with the columns of ``encode`` and ``targets``."""
        return {split: self._tokenized(split) for split in self._rows}

    def _tokenized(self, split: str) -> Any:
        from hftune.data.cache import mapped
        from hftune.data.tokenized import cached_texts, flat_arrays, tokenizer_key

        rows, tokenizer = self._rows[split], self.text_tokenizer

        def make() -> dict[str, Any]:
            targets = self.targets(split)
            return {**flat_arrays(mapped(rows, self.encoder(split), f"Tokenizing {split}")), **targets}

        # The split, too: the same rows are for training in one fold and evaluated in another.
        key = [type(self).__qualname__, split, rows._fingerprint, tokenizer_key(tokenizer), self._columns, self.encoded_by()]
        return cached_texts(key + _code(type(self)), make)

    def build_model(self) -> PreTrainedModel:
        """Load the model, or build a new one for the tokenizer."""
        import transformers

        from hftune.models.pretrained import load_config, load_model

        overrides = {**self.model_config, **self.config_overrides()}
        config = load_config(self.model, overrides, self.model_commit)
        model = load_model(getattr(transformers, self.auto_class), self.model, config, self.model_commit)
        self._check_positions(model)
        return model

    def config_overrides(self) -> dict[str, Any]:
        """Return what the task sets in the model's config: the tokenizer's padding, and the class names, if there are any."""
        overrides: dict[str, Any] = {"pad_token_id": self.text_tokenizer.pad_token_id}
        if self.labels is not None:
            names = dict(enumerate(self.labels))
            overrides |= {"id2label": names, "label2id": {name: number for number, name in names.items()}}
        return overrides if self.model is not None else {**overrides, "vocab_size": len(self.text_tokenizer)}

    def _check_positions(self, model: PreTrainedModel) -> None:
        from hftune.models.pretrained import max_positions

        positions = max_positions(model)
        for name in self.length_keys:
            length = getattr(self, name, None)
            if positions is not None and length is not None and positions < length:
                raise ConfigError(f"task.{name}={length} exceeds the model's {positions} positions. Lower it.")

    def lengths(self, dataset: Any) -> np.ndarray | None:
        from hftune.data.tokenized import lengths_of

        return lengths_of(dataset, "input_ids")

    def collate(self, examples: Sequence[dict[str, Any]]) -> Batch:
        """Pad to the longest text: input_ids, attention_mask and the columns of ``padding``, (N, T) int64.

        ``label``, a value or an array per sample, becomes labels (N,) or (N, K).
        """
        from hftune.data.tokenized import ragged, values

        names = examples[0].keys()
        ids_NT, mask_NT = ragged(examples, "input_ids").padded(self.text_tokenizer.pad_token_id)
        batch = {"input_ids": ids_NT, "attention_mask": mask_NT}
        batch |= {name: ragged(examples, name).padded(value)[0] for name, value in self.padding.items() if name in names}
        return batch | ({"labels": values(examples, "label")} if "label" in names else {})

    def notices(self, datasets: Mapping[str, Any], model: PreTrainedModel) -> list[str]:
        from hftune.data.columns import chosen
        from hftune.data.tokenized import cut_notices

        all_columns = self._rows["train"].column_names
        messages = []
        for name, column in self._columns.items():
            messages += chosen(f"task.{name}", getattr(self, name, column), column, all_columns)
        messages += self._row_notices(self._rows, self._text_columns)
        lengths = " and ".join(f"task.{key}={getattr(self, key)}" for key in self.length_keys if hasattr(self, key))
        has_flags = "cut" in datasets["train"][0]
        return messages + (cut_notices(datasets, "cut", f"Texts longer than {lengths} tokens") if has_flags else [])

    def _row_notices(self, rows: Mapping[str, Dataset], text_columns: Sequence[str] = ()) -> list[str]:
        """Return notices of keys without effect, of rows left out, and of rows whose texts are in two splits."""
        from hftune.data import notices

        return [
            *notices.ignored_splits(self),
            *notices.held_out(self, notices.num_rows(rows["train"])[1]),
            *(notices.mixed(self._mixed, self._mixed.sizes(rows["train"])) if self._mixed else []),
            *notices.left_out(self._kept(rows)),
            *(notices.shared({split: own.select_columns(text_columns) for split, own in rows.items()}) if text_columns else []),
        ]

    def _kept(self, rows: Mapping[str, Dataset]) -> dict[str, tuple[int, int]]:
        """Return, for each split that a limit applies to, the number of rows used and of all rows."""
        from hftune.data import notices

        limited = {split: split_rows for split, split_rows in rows.items() if self._counts[split] is not None}
        return {} if self.eval_fold else {split: notices.num_rows(split_rows) for split, split_rows in limited.items()}

    def input_lengths(self, inputs: list) -> list[int] | None:
        """Return the tokens of each text, those beyond the maximum not counted; None for inputs that are not single texts."""
        if not all(isinstance(text, str) for text in inputs):
            return None
        most = max((getattr(self, key) for key in self.length_keys if hasattr(self, key)), default=None)
        encoded = self.text_tokenizer(inputs, truncation=most is not None, max_length=most, verbose=False)
        return list(map(len, encoded["input_ids"]))

    def save(self, model: PreTrainedModel, directory: Path) -> None:
        """Write model and tokenizer for ``from_pretrained``."""
        model.save_pretrained(directory)
        self.text_tokenizer.save_pretrained(directory)

    def load(self, directory: Path) -> PreTrainedModel:
        import transformers

        from hftune.models.pretrained import load_tokenizer

        self.text_tokenizer = load_tokenizer(str(directory))
        return self._load_saved(getattr(transformers, self.auto_class), directory)

    def _load_saved(self, auto_class: Any, directory: Path) -> PreTrainedModel:
        """Load the model that ``save`` wrote."""
        from hftune.models.pretrained import load_saved, saved_config

        return load_saved(auto_class, directory, saved_config(directory))


_SHARED = frozenset(item.name for item in fields(TextTask))
"""Fields on which tokens depend only through rows and tokenizer."""


def _code(task: type[TextTask]) -> list[Any]:
    """Return the user's code on which tokens may depend: the files of a task, and the functions of one in a notebook."""
    kinds = [kind for kind in task.__mro__ if issubclass(kind, TextTask) and not kind.__module__.startswith("hftune.")]
    files = hashes_of(kind.__module__ for kind in kinds)
    alone = [kind for kind in kinds if not hashes_of([kind.__module__])]
    return [files, *(function for kind in alone for function in vars(kind).values() if inspect.isfunction(function))]


def beginning(text: str) -> str:
    """Return the first SHOWN characters of a text, with an ellipsis if there are more."""
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}\N{HORIZONTAL ELLIPSIS}"


def pieces(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], trained: Sequence[bool]) -> list[tuple[str, bool]]:
    """Return the text of tokens, special ones included, cut where training begins or ends, each piece with whether it is."""
    groups = groupby(zip(ids, trained, strict=True), key=lambda pair: pair[1])
    return [(tokenizer.decode([token for token, _ in group]), bool(is_trained)) for is_trained, group in groups]


def token_loss(logits_NTV: Tensor, labels_NT: Tensor, reduction: str = "sum") -> Tensor:
    """Return the sum of the cross-entropies of all labels but NO_LABEL, float32 or float64; with "none", each of them, flat."""
    import torch
    from torch.nn.functional import cross_entropy

    logits_NTV = logits_NTV if logits_NTV.dtype == torch.float64 else logits_NTV.float()
    return cross_entropy(logits_NTV.flatten(0, 1), labels_NT.flatten(), ignore_index=NO_LABEL, reduction=reduction)


def head_loss(outputs: Any, labels_NT: Tensor) -> Tensor:
    """Return ``token_loss`` of a model's logits, or of what it computed together with its head: ``Task.scored_head``."""
    loss_sum = getattr(outputs, "loss_sum", None)
    return token_loss(outputs.logits, labels_NT) if loss_sum is None else loss_sum


def head_losses(outputs: Any, labels_NT: Tensor) -> Tensor:
    """Return each token's cross-entropy (N, T), 0 where the label is NO_LABEL, likewise; in evaluations."""
    losses_NT = getattr(outputs, "losses", None)
    return token_loss(outputs.logits, labels_NT, "none").view_as(labels_NT) if losses_NT is None else losses_NT


def count_labels(labels: Tensor) -> int:
    """Count the labels that are not NO_LABEL."""
    return int((labels != NO_LABEL).sum())

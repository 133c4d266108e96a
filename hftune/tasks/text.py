"""The base of text tasks: keys for the model, tokenizing, padding, loading and saving; and the loss on token labels.

torch, transformers and datasets are imported inside the methods, so that mistyped recipes are refused without waiting for them.
"""

from __future__ import annotations

import inspect
import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from importlib.metadata import version
from itertools import chain, groupby
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from hftune.config.keys import key
from hftune.config.own_code import hashes_of
from hftune.data.columns import TEXTS, Role
from hftune.data.files import model_folder_problems
from hftune.data.hub import known
from hftune.data.sources import Source, held_out_problems, mixture_problems, mixture_source
from hftune.errors import ConfigError, DataError, cut, format_value
from hftune.metrics.records import rouge_names
from hftune.tasks.dataset import DatasetTask

if TYPE_CHECKING:
    import numpy as np
    from datasets import Dataset
    from torch import Tensor
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from hftune.data.fetching import Blocks
    from hftune.data.in_place import RowsInPlace
    from hftune.data.mixture import Mixture
    from hftune.task import Batch

NO_LABEL = -100
"""Label of positions that do not count in the loss, such as padding."""
SPLITS = ("train", "eval", "test")
LARGE_BYTES = 2**27
"""Of a split that ``task.prepare=auto`` prepares as it is needed."""
MAX_SHOWN = 500
"""Characters of a text in predictions.jsonl."""
beginning = partial(cut, length=MAX_SHOWN)
"""Returns what is shown of a text there."""


@dataclass
class TextTask(DatasetTask):
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
    datasets_: list[dict[str, Any]] | None = key(None, changes="data")
    """Several data sets to train on, instead of dataset and data_files.train: a list of {data_files} or {dataset}, each with a
    weight (how often an epoch uses each of its rows, such as 0.5 or 3; 1 if it is left out) or a share of the epoch, and, if
    its columns have other names, columns: {text: review}. See docs/own-data.md."""
    mixing: dict[str, Any] = key(dict, changes="data")
    """How the data sets share an epoch that is as long as all of them together, instead of by weights: {by: rows or tokens, the
    unit of sizes and shares; temperature: 1 is in proportion to size, more takes more of the small ones; max_repeats: the most
    that an epoch uses a row}. {}: by their shares or weights. See docs/own-data.md."""
    prepare: Literal["auto", "all", "as_needed"] = key("auto", changes="nothing", resume="fixed")
    """When rows are checked and tokenized. all: before training. as_needed: when their step comes, and then kept, so that the
    first step does not wait for the last row; the same samples, steps and losses. auto: as_needed for splits of more than
    128 MiB, but all for chats, of which as_needed needs each to be one sample, and for language models, whose samples are made
    of several rows; these then read large jsonl and parquet files without converting them."""
    bad_rows: Literal["stop", "skip"] = key("stop", changes="data")
    """What happens to training rows that cannot be trained on, such as an empty text or an unknown label. stop: the first ends
    the training. skip: each is left out of its step, in every epoch and on any number of processes; ledger.jsonl names it, and
    a note when it is first met. Training rows are then prepared as they are needed, and the classes must be named, by the data
    or by label_names. Rows that are evaluated on must be good in any case."""
    shuffle_window: int | None = key(None, ge=1, changes="samples")
    """Rows among which the rows of an epoch are shuffled, of parts of files that are shuffled as wholes: as many rows as their
    parts need for reading each part once an epoch, of data in a bucket that do not fit into cache_gib. null: all rows."""
    cache_gib: float = key(20.0, gt=0, changes="nothing", resume="harmless")
    """Most GiB of the disk for parts of data_files that are elsewhere, or compressed as parquet is, and read as they are
    needed, and again as many for the tokenized rows of each split; what is needed last is removed, and made again."""
    new_tokens: list[str] | None = key(None, changes="model")
    """Tokens to add to the tokenizer, such as [<tool>, </tool>]. Their embeddings begin as the mean of the others, and exports
    hold them. With adapters, name the embeddings in adapter.train_also, and set adapter.export=merged. null: none."""
    deduplicate: bool = key(False, changes="data")
    """Whether to leave out training rows that are equal to an earlier one in all columns that are read."""
    vocab_size: int = key(4096, ge=100)
    """Vocabulary size of the tokenizer that is trained on the texts if model is null."""

    auto_class: ClassVar[str] = ""
    """Class of transformers that loads the model, such as AutoModelForTokenClassification."""
    columns: ClassVar[Mapping[str, Role]] = {"text": Role("text", TEXTS)}
    length_keys: ClassVar[Sequence[str]] = ("max_length",)
    """Fields with a maximum number of tokens, which must not exceed the model's positions."""
    padding: ClassVar[Mapping[str, int]] = {"token_type_ids": 0, "labels": NO_LABEL}
    """Columns of one number per token, besides input_ids, each with the value of padding."""
    texts_may_be_empty: ClassVar[bool] = False
    samples_are: ClassVar[str] = "rows"
    """What notices call the samples."""
    encodes_in_python: ClassVar[bool] = False
    """Whether ``encoder`` is slow and can be given to other processes, so that all cores tokenize."""
    prepares_as_needed: ClassVar[bool] = False
    """Whether samples can be made one by one, in any order, by ``encode`` and ``targets`` alone."""
    libraries: ClassVar[Sequence[str]] = ("hftune.data.rows", "hftune.data.notices", "hftune.models.pretrained")

    @property
    def needs_whole(self) -> str | None:
        """New tokens begin with the mean of the embeddings."""
        return "to build" if self.new_tokens else None

    def field_problems(self) -> Iterator[str]:
        yield from super().field_problems()
        yield from self.model_problems()
        if repeated := [token for token, count in Counter(self.new_tokens or ()).items() if count > 1 or not token.strip()]:
            yield f"task.new_tokens={format_value(self.new_tokens)}: {repeated[0]!r} is empty, or there twice."
        if self.deduplicate and self.texts_run_on:
            yield f"task.deduplicate=true is not for {type(self).__name__}, whose rows are pieces of a running text."
        if self.bad_rows == "skip" and (not self.prepares_as_needed or self.prepare == "all"):
            why = f"unlike task.prepare={self.prepare}" if self.prepares_as_needed else f"which {type(self).__name__} cannot"
            yield f"task.bad_rows=skip prepares rows as they are needed, {why}."
        if not self.prepares_as_needed:
            whose = f"is not for {type(self).__name__}, whose samples are no single rows"
            if self.prepare == "as_needed":
                yield f"task.prepare=as_needed {whose}. Use all or auto."
            if self.shuffle_window is not None:
                yield f"task.shuffle_window={self.shuffle_window} {whose}. Set it to null."

    def model_problems(self) -> Iterator[str]:
        """Yield what is wrong with the keys that name the model."""
        yield from model_folder_problems(self.model, self.model_config)

    # Several data sets

    def data_problems(self) -> Iterator[str]:
        if self.datasets_ is None:
            yield from super().data_problems()
            if self.mixing:
                yield f"task.mixing={format_value(self.mixing)} has an effect only with task.datasets. Leave it out."
        else:
            yield from held_out_problems(self)
            yield from mixture_problems(self)

    @cached_property
    def _mixed_sources(self) -> list[Source]:
        """Where the rows of each of ``datasets_`` come from."""
        others = self.instead_of_hub, self.storage_options
        return [mixture_source(entry, index, *others) for index, entry in enumerate(self.datasets_ or ())]

    def commits(self) -> dict[str, str]:
        mixed = {f"task.datasets.{index}.dataset": source.commit for index, source in enumerate(self._mixed_sources)}
        return super().commits() | known(mixed)

    @cached_property
    def mixed(self) -> Mixture | None:
        """What ``datasets_`` names."""
        from hftune.data.mixture import load_mixture

        if self.datasets_ is None:
            return None
        mixed = load_mixture(self.datasets_, self._mixed_sources, self._in_place, self.mixing)
        return replace(mixed, sources=[*map(self.flat, mixed.sources)])

    def flat(self, rows: Dataset) -> Dataset:
        """Return the rows of a data set with a column for each value that the task reads: by default as they are."""
        return rows

    def load_source(self, split: str, source_split: str) -> Dataset:
        if split == "train" and self.mixed is not None:
            from hftune.data.in_place import joined

            rows = joined(self.mixed.sources)
        else:
            rows = self.flat(self._in_place(self.source_of(split), split) or super().load_source(split, source_split))
        if split != "train" or not self.deduplicate:
            return rows
        from hftune.data.rows import distinct, select

        indices = distinct(rows, [*self.find_columns(rows).values()])
        self.num_repeated = len(rows) - len(indices)
        return select(rows, indices) if self.num_repeated else rows

    def _in_place(self, source: Source, split: str) -> RowsInPlace | None:
        """Return the rows of large files that need not be read before they are needed; None for others."""
        least = self._least_in_place
        if source.kind != "files" or least == math.inf or self.eval_fold is not None:
            return None
        from hftune.data.in_place import open_in_place

        return open_in_place(source.format_of(split), source.paths(split), source.options, least, self._blocks_kept)

    @cached_property
    def _blocks_kept(self) -> Blocks:
        from hftune.data.fetching import Blocks

        return Blocks(self.cache_gib * 2**30)

    def mixture(self, dataset: Any) -> list[tuple[int, float]] | None:
        return None if self.mixed is None else self.mixed.plan(self.samples_of_each(dataset), self.lengths(dataset))

    def samples_of_each(self, dataset: Any) -> list[int]:
        """Return how many training samples come from each of ``datasets_``, in their order."""
        rows = self.rows["train"]
        if len(dataset) != len(rows):
            raise ConfigError(
                f"task.datasets needs a task whose samples are the rows of its data, unlike {type(self).__name__}."
            )
        return self.mixed.sizes(rows)

    def mixture_notices(self, dataset: Any) -> list[str]:
        """Return a notice of what an epoch takes of each of ``datasets_``."""
        from hftune.data import notices

        if self.mixed is None:
            return []
        return notices.mixed(self.mixed.use(self.mixture(dataset), self.lengths(dataset)), self.samples_are)

    def windows(self, dataset: Any) -> Mapping[str, Any]:
        if self.shuffle_window is None:
            return {}
        if not getattr(dataset, "is_in_place", False):
            raise ConfigError(
                f"task.shuffle_window={self.shuffle_window} is for rows of jsonl and parquet files that are read when they are "
                "needed. Set it to null, or set task.prepare=as_needed."
            )
        return {"window": self.shuffle_window, "groups": dataset.rows.groups(self.shuffle_window // 64)}

    # Tokens

    @property
    def _least_later(self) -> float:
        """Bytes from which on the rows of a split are prepared as they are needed."""
        return self._least_in_place if self.prepares_as_needed else math.inf

    @property
    def _least_in_place(self) -> float:
        """Bytes from which on the rows of files are read where they are."""
        if self.prepare == "as_needed":
            return 0
        is_ours = type(self).__module__.startswith("hftune.")  # methods of others may look at all rows
        return LARGE_BYTES if self.prepare == "auto" and is_ours else math.inf

    @cached_property
    def later(self) -> frozenset[str]:
        """The splits whose rows are checked and tokenized as they are needed."""
        from hftune.data.in_place import RowsInPlace

        are_later = {
            split: isinstance(rows, RowsInPlace) or rows.data.nbytes >= self._least_later
            for split, rows in self.unchecked_rows.items()
        }
        skipping = {"train"} if self.bad_rows == "skip" else set()
        return frozenset({split for split, is_later in are_later.items() if is_later} | skipping)

    @property
    def compared_columns(self) -> list[str]:
        """The columns by which a row is known to be in two splits."""
        return self.text_columns_read

    def check_rows(self, rows: Mapping[str, Dataset]) -> None:
        from hftune.data.rows import check_kind, check_texts

        now = {split: own for split, own in rows.items() if split not in self.later}
        for column in self.text_columns_read:
            for split in self.later:
                check_kind(rows[split], column, split)
            for name, own in zip(self.mixed.names, self.mixed.sources, strict=True) if self.mixed and "train" in now else ():
                check_texts(own, column, f"train ({name})", self.texts_may_be_empty)  # so that messages name the data set
            for split, own in now.items():
                check_texts(own, column, split, self.texts_may_be_empty)

    @cached_property
    def text_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the model, or, for a new model, one trained on the training texts."""
        from hftune.data.cache import cached_value
        from hftune.models.pretrained import with_tokens

        if self.model is not None:
            return with_tokens(self.named_tokenizer(), self.new_tokens)
        depends_on = [type(self).__name__, self.rows["train"]._fingerprint, self.read_columns, self.vocab_size]
        depends_on += [version("tokenizers"), *_code(type(self))]
        return with_tokens(self.new_tokenizer(lambda train: cached_value(depends_on, train)), self.new_tokens)

    def named_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer of the model that the recipe names."""
        from hftune.models.pretrained import load_tokenizer

        return load_tokenizer(str(self.model), commit=self.model_commit)

    def new_tokenizer(self, cached: Callable[[Callable[[], Any]], Any]) -> PreTrainedTokenizerBase:
        """Return the tokenizer of a new model: by default WordPiece, trained on ``training_texts``.

        Args:
            cached: calls a function that takes long, unless its value is in the cache.
        """
        from hftune.models.pretrained import train_wordpiece, wordpiece_tokenizer

        return wordpiece_tokenizer(cached(lambda: train_wordpiece(self.training_texts(), self.vocab_size)))

    def training_texts(self) -> Iterable[str]:
        """Yield the texts that the tokenizer of a new model is trained on: by default those of all text columns.

        Of ``rows_to_learn``: more take minutes and make hardly another vocabulary.
        """
        return (text for column in self.text_columns_read for text in self.rows_to_learn(column)[column][:] if text)

    def rows_to_learn(self, column: str) -> Dataset:
        """Return training rows whose column has some 2^24 characters together: evenly spread ones, or all if it has less."""
        from hftune.batch_plan import spread

        rows = self.rows["train"]
        mean = fmean(len(str(value)) for value in rows.select(spread(len(rows), 1000))[column][:])
        return rows.select(spread(len(rows), max(1000, round(2**24 / max(mean, 1.0)))))

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

    def places_of(self, split: str) -> dict[str, np.ndarray]:
        """Return what ``targets`` gives samples so that ``predictions`` finds their rows: index, and the split's number."""
        import numpy as np

        count = len(self.rows[split])
        return {"index": np.arange(count), "split": np.full(count, number_of(split))}

    def rows_of(self, batch: Batch) -> dict[str, list]:
        """Return the rows that the samples of a batch are, as lists by column; see ``places_of``."""
        return self.rows[split_of(self.rows, batch)][batch["index"].tolist()]

    def datasets(self) -> Mapping[str, Any]:
        """Return the tokenized splits, with the columns of ``encode`` and ``targets``."""
        return {split: self.tokenized(split) for split in self.rows}

    def tokenized(self, split: str) -> Any:
        """Return a tokenized split."""
        from hftune.data.as_needed import TextsAsNeeded
        from hftune.data.cache import idle_cores, mapped
        from hftune.data.tokenized import cached_texts, flat_arrays, tokenizer_key

        rows, tokenizer = self.rows[split], self.text_tokenizer
        # The split, too: the same rows are for training in one fold and evaluated in another.
        key = [type(self).__qualname__, split, rows._fingerprint, tokenizer_key(tokenizer), self.read_columns]
        key += [self.encoded_by(), *_code(type(self))]
        if split in self.later:
            longest = max(getattr(self, name) for name in self.length_keys)
            read = rows.select_columns([*dict.fromkeys(self.read_columns.values())])
            key += [self.bad_rows]
            most = self.cache_gib * 2**30
            return TextsAsNeeded(key, read, longest, partial(self._samples, split), partial(self.targets, split), most)

        def make() -> dict[str, Any]:
            targets, cores = self.targets(split), idle_cores(len(rows)) if self.encodes_in_python else 1
            return {**flat_arrays(mapped(rows, self.encoder(split), f"Tokenizing {split}", cores)), **targets}

        return cached_texts(key, make)

    def _samples(self, split: str, indices: list[int]) -> list[dict[str, Any] | None]:
        """Check and tokenize some rows of a split. None for one that ``bad_rows`` leaves out."""
        from hftune.data.fetching import SourceError

        try:
            return self._checked(split, indices)
        except DataError as error:
            if self.bad_rows == "stop" or split != "train" or isinstance(error, SourceError):
                raise
            if len(indices) > 1:
                return [sample for index in indices for sample in self._samples(split, [index])]
            print(f"note: A row is left out (task.bad_rows=skip): {error}", flush=True)
            return [None]

    def _checked(self, split: str, indices: list[int]) -> list[dict[str, Any] | None]:
        from hftune.data.in_place import RowsInPlace
        from hftune.data.rows import check_texts, select

        part, rows = copy(self), select(self.rows[split], indices)
        if isinstance(rows, RowsInPlace):
            rows = rows.select_columns([*dict.fromkeys(self.read_columns.values())]).read()
        part.rows = {**self.rows, split: rows}
        for column in self.text_columns_read:
            check_texts(rows, column, split, self.texts_may_be_empty, part.row_of(split))
        targets = part.targets(split)
        columns = {**part.encoder(split)(rows[:]), **targets}
        columns |= {name: indices for name in ("index", "row") if name in columns}
        return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]

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

    def has_types(self, config: PreTrainedConfig | None) -> bool:
        """Return whether a model with this config is told the two texts of a pair apart by token types."""
        # Not every model whose tokenizer knows token types has embeddings for them.
        knows_types = "token_type_ids" in self.text_tokenizer.model_input_names
        return knows_types and (getattr(config, "type_vocab_size", 0) or 0) > 1

    def sides(self, pairs: list[Any], what: str) -> list[list[str]]:
        """Return the first and the second texts of raw inputs that are pairs: lists of two, or texts with a tab between them.

        Raises:
            DataError: one is no pair; the message says ``what`` it must be.
        """
        pairs = [pair.split("\t") if isinstance(pair, str) else pair for pair in pairs]
        for index, pair in enumerate(pairs):
            if not (isinstance(pair, (list, tuple)) and len(pair) == 2 and all(isinstance(text, str) for text in pair)):
                raise DataError(
                    f"Input {index} is not a pair of texts, {what}: give a list of two texts, or one text with a tab between "
                    "them."
                )
        return [[pair[side] for pair in pairs] for side in (0, 1)]

    def notices(self, datasets: Mapping[str, Any], model: PreTrainedModel) -> list[str]:
        from hftune.data import notices
        from hftune.data.tokenized import cut_notices

        messages, texts = [*self.row_notices(), *self.mixture_notices(datasets["train"])], self.compared_columns
        if self.deduplicate:
            messages.append(
                f"task.deduplicate=true: {self.num_repeated:,} rows of the train split equal an earlier one, and are left out."
            )
        if self.later:
            splits = " and ".join(sorted(self.later))
            messages.append(
                f"Rows of {splits} are checked and tokenized when their step comes (task.prepare, task.bad_rows): bad, long "
                "and repeated ones are not known yet."
            )
        elif texts:
            messages += notices.shared({split: own.select_columns(texts) for split, own in self.rows.items()})
        lengths = " and ".join(f"task.{name}={getattr(self, name)}" for name in self.length_keys if hasattr(self, name))
        has_flags = "train" not in self.later and "cut" in datasets["train"][0]
        return messages + (cut_notices(datasets, "cut", f"Texts longer than {lengths} tokens") if has_flags else [])

    # The model

    @cached_property
    def named_config(self) -> PreTrainedConfig:
        """The config of the model that the recipe names, or of the new model, without the tokenizer's tokens."""
        from hftune.models.pretrained import load_config

        return load_config(self.model, self.model_config, self.model_commit)

    @cached_property
    def own_generation(self) -> GenerationConfig:
        """The generation settings that come with the model; those of a new one say where its texts end."""
        from transformers import GenerationConfig

        from hftune.models.pretrained import CONFIG, folder_of

        if self.model is None:
            tokens = self.text_tokenizer
            return GenerationConfig(pad_token_id=tokens.pad_token_id, eos_token_id=tokens.eos_token_id)
        folder = folder_of(self.model, self.model_commit, CONFIG)
        if (folder / "generation_config.json").is_file():
            return GenerationConfig.from_pretrained(folder)
        return GenerationConfig.from_model_config(self.named_config)

    def build_model(self) -> PreTrainedModel:
        """Load the model, or build a new one for the tokenizer."""
        from hftune.models.pretrained import load_config

        return self.load_model(load_config(self.model, {**self.model_config, **self.config_overrides()}, self.model_commit))

    def load_model(self, config: PreTrainedConfig) -> PreTrainedModel:
        """Load the model with a config, or build a new one.

        Raises:
            ConfigError: it has fewer positions than the texts may have tokens.
        """
        import transformers

        from hftune.models.pretrained import add_rows, load_model, max_positions

        model = load_model(getattr(transformers, self.auto_class), self.model, config, self.model_commit)
        if not model.can_generate() and getattr(model.config, "use_cache", False):
            model.config.use_cache = False  # a decoder would keep keys and values of all layers, for tokens that never come
        if self.new_tokens and self.model is not None:
            add_rows(model, self.text_tokenizer, self.new_tokens)
        positions = max_positions(model)
        for name in self.length_keys:
            length = getattr(self, name, None)
            if positions is not None and length is not None and positions < length:
                raise ConfigError(f"task.{name}={length} exceeds the model's {positions} positions. Lower it.")
        return model

    def config_overrides(self) -> dict[str, Any]:
        """Return what the task sets in the model's config: the tokenizer's padding, and the class names, if there are any."""
        overrides: dict[str, Any] = {"pad_token_id": self.text_tokenizer.pad_token_id}
        if self.labels is not None:
            names = dict(enumerate(self.labels))
            overrides |= {"id2label": names, "label2id": {name: number for number, name in names.items()}}
        return overrides if self.model is not None else {**overrides, "vocab_size": len(self.text_tokenizer)}

    def input_lengths(self, inputs: list) -> list[int] | None:
        """Return the tokens of each text, those beyond the maximum not counted; None for inputs that are not single texts."""
        if not all(isinstance(text, str) for text in inputs):
            return None
        longest = max((getattr(self, name) for name in self.length_keys if hasattr(self, name)), default=None)
        encoded = self.text_tokenizer(inputs, truncation=longest is not None, max_length=longest, verbose=False)
        return list(map(len, encoded["input_ids"]))

    def save(self, model: PreTrainedModel, directory: Path) -> None:
        """Write model and tokenizer for ``from_pretrained``."""
        from hftune.models.kinds import FILE_SIZE

        model.save_pretrained(directory, max_shard_size=FILE_SIZE)
        self.text_tokenizer.save_pretrained(directory)

    def load(self, directory: Path) -> PreTrainedModel:
        from hftune.models.pretrained import load_tokenizer

        self.text_tokenizer = load_tokenizer(str(directory))
        return self.load_saved(directory)

    def load_saved(self, directory: Path) -> PreTrainedModel:
        """Load the model that ``save`` wrote."""
        import transformers

        from hftune.models.pretrained import load_saved, saved_config

        return load_saved(getattr(transformers, self.auto_class), directory, saved_config(directory))


@dataclass
class TokenTask(TextTask):
    """Base of tasks that predict tokens. The loss is cross-entropy; an item is a label other than NO_LABEL.

    A subclass whose ``predictions`` do without logits, too, says ``scored_head = True``.
    """

    def loss(self, outputs: Any, target: Tensor) -> Tensor:
        return head_loss(outputs, target)

    def item_logits(self, outputs: Any, target: Tensor) -> Tensor:
        """Return the logits of the labels; of words only those that the tokenizer has, as models may be padded with others."""
        places_I = (target != NO_LABEL).flatten().nonzero().flatten()  # a mask as an index: a GPU waits once more, both ways
        logits_IC = outputs.logits.flatten(0, 1).index_select(0, places_I)
        return logits_IC if self.labels is not None else logits_IC[:, : len(self.text_tokenizer)]

    def num_items(self, target: Tensor) -> int:
        return int((target != NO_LABEL).sum())


@dataclass
class SeveralTexts(TextTask):
    """Base of tasks whose samples are several texts each, padded to the longest of them."""

    @property
    def token_columns(self) -> Sequence[str]:
        """Names of the columns with the tokens of a sample's texts."""
        raise NotImplementedError

    def lengths(self, dataset: Any) -> np.ndarray:
        return self.sizes(dataset).sum(1)

    def sizes(self, dataset: Any) -> np.ndarray:
        from hftune.data.tokenized import sizes_of

        return sizes_of(dataset, self.token_columns)

    def padded_length(self, sizes: Sequence[int]) -> int:
        return len(sizes) * max(sizes)


@dataclass
class ManyTexts(TextTask):
    """Base of tasks whose samples are any number of texts each, such as windows, or choices.

    ``encode`` returns their tokens one after the other, in input_ids and the columns of ``padding``, and the number of tokens
    of each in ``texts``.
    """

    of_each_text: ClassVar[Sequence[str]] = ()
    """Columns with a number for each text."""
    _least_in_place = math.inf  # no sample that is made as needed may be longer than a text

    def sizes(self, dataset: Any) -> np.ndarray:
        """Return the number of texts of each sample, and the tokens of its longest one, (N, 2)."""
        import numpy as np

        texts = dataset.column("texts")
        return np.stack([texts.lengths, np.maximum.reduceat(texts.flat, texts.offsets[:-1])], axis=1)

    def padded_length(self, sizes: Sequence[int]) -> int:
        count, longest = sizes
        return count * longest

    def collate(self, examples: Sequence[dict[str, Any]]) -> Batch:
        """Pad the texts of all samples to the longest one.

        Returns:
            input_ids, attention_mask and the columns of ``padding``, (N, T) int64, of N texts; those of ``of_each_text``, (N,);
            and of each sample texts, their number, labels, if it has a label, index and split, (B,).
        """
        import numpy as np
        import torch

        from hftune.data.tokenized import Ragged, ragged, values

        names, texts = examples[0].keys(), ragged(examples, "texts")
        offsets = np.concatenate([[0], np.cumsum(texts.flat)])
        batch: Batch = {"texts": torch.from_numpy(texts.lengths).long()}
        paddings = {**self.padding, "input_ids": self.text_tokenizer.pad_token_id}
        for name in filter(names.__contains__, paddings):
            batch[name], batch["attention_mask"] = Ragged(ragged(examples, name).flat, offsets).padded(paddings[name])
        for name in filter(names.__contains__, self.of_each_text):
            batch[name] = torch.from_numpy(ragged(examples, name).flat).long()
        batch |= {name: values(examples, name) for name in ("index", "split") if name in names}
        return batch | ({"labels": values(examples, "label")} if "label" in names else {})

    def inputs(self, batch: Batch) -> dict[str, Tensor]:
        return {name: batch[name] for name in ("input_ids", "attention_mask", "token_type_ids") if name in batch}


_SHARED = frozenset(item.name for item in fields(TextTask))
"""Fields on which tokens depend only through rows and tokenizer."""


def _code(task: type[TextTask]) -> list[Any]:
    """Return the user's code on which tokens may depend: the files of a task, and the functions of one in a notebook."""
    kinds = [kind for kind in task.__mro__ if issubclass(kind, TextTask) and not kind.__module__.startswith("hftune.")]
    files = hashes_of(kind.__module__ for kind in kinds)
    alone = [kind for kind in kinds if not hashes_of([kind.__module__])]
    return [files, *(function for kind in alone for function in vars(kind).values() if inspect.isfunction(function))]


def split_of(splits: Iterable[str], batch: Batch) -> str:
    """Return which of some splits the samples of a batch are of: by its ``split``, their ``number_of``; eval if it has none."""
    return {number_of(name): name for name in splits}[int(batch["split"][0])] if "split" in batch else "eval"


def number_of(split: str) -> int:
    """Return a number for a split, whichever others there are."""
    return SPLITS.index(split) if split in SPLITS else zlib.crc32(split.encode())


def with_places(tokenizer: PreTrainedTokenizerBase, model: str | None, what: str) -> PreTrainedTokenizerBase:
    """Return a tokenizer, or raise ConfigError if it does not say where in a text its tokens are."""
    if not tokenizer.is_fast:
        raise ConfigError(
            f"task.model={model} has a tokenizer that does not say {what} ({type(tokenizer).__name__}). Choose a model with a "
            "fast tokenizer."
        )
    return tokenizer


def check_inputs(texts: Sequence[Any]) -> None:
    """Raise DataError if an input of a model is empty or not a text."""
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            what = f"the file {text}; texts come from --text and --text-file" if isinstance(text, Path) else type(text).__name__
            raise DataError(f"Input {index} is {what}. This model takes texts.")
        if not text.strip():
            raise DataError(f"Input {index} is an empty text.")


def pieces(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], trained: Sequence[bool]) -> list[tuple[str, bool]]:
    """Return the text of tokens, special ones included, cut where training begins or ends, each piece with whether it is."""
    found, read, text = [], list[int](), ""
    for is_trained, group in groupby(zip(ids, trained, strict=True), key=lambda pair: pair[1]):
        read += [token for token, _ in group]
        before, text = text, tokenizer.decode(read, clean_up_tokenization_spaces=False)  # with the space before a word
        found.append((text[len(before) :], bool(is_trained)))
    return found


def token_loss(logits_NTV: Tensor, labels_NT: Tensor, reduction: str = "sum") -> Tensor:
    """Return the sum of the cross-entropies of all labels but NO_LABEL, float32 or float64; with "none", each of them, flat."""
    import torch
    from torch.nn.functional import cross_entropy

    logits_NTV = logits_NTV if logits_NTV.dtype == torch.float64 else logits_NTV.float()
    return cross_entropy(logits_NTV.flatten(0, 1), labels_NT.flatten(), ignore_index=NO_LABEL, reduction=reduction)


def head_loss(outputs: Any, labels_NT: Tensor) -> Tensor:
    """Return ``token_loss`` of a model's logits, or of what it computed together with its head: ``Hooks.scored_head``."""
    loss_sum = getattr(outputs, "loss_sum", None)
    return token_loss(outputs.logits, labels_NT) if loss_sum is None else loss_sum


def head_losses(outputs: Any, labels_NT: Tensor) -> Tensor:
    """Return each token's cross-entropy (N, T), 0 where the label is NO_LABEL, likewise; in evaluations."""
    losses_NT = getattr(outputs, "losses", None)
    return token_loss(outputs.logits, labels_NT, "none").view_as(labels_NT) if losses_NT is None else losses_NT


def score_names(scores: Sequence[str], known: Sequence[str], language: str) -> list[str]:
    """Return the names of the metrics that ``text_scores`` returns; of scores that a recipe may not name, none."""
    names = [rouge_names(language) if score == "rouge" else [score] for score in scores if score in known]
    return [*chain.from_iterable(names), "mean_length", "empty_share"]


def text_scores(scores: Sequence[str], texts: Sequence[str], references: Sequence[str], language: str) -> dict[str, Any]:
    """Return metrics of generated texts: rouge, bleu, chrf, exact_match; and their mean length and share of empty ones."""
    from hftune.metrics.rouge import exact_match, lengths, rouge

    found: dict[str, Any] = rouge(texts, references, language) if "rouge" in scores else {}
    found |= {"exact_match": exact_match(texts, references)} if "exact_match" in scores else {}
    found |= lengths(texts)
    if "bleu" in scores:
        from hftune.metrics.translation import bleu

        found |= bleu(texts, references, language)
    if "chrf" in scores:
        from hftune.metrics.translation import chrf

        found |= chrf(texts, references)
    return found

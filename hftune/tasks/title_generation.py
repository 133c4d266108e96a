"""Generation of titles for long Chinese texts, from the weights of BERT or BigBird, or from scratch.

torch, transformers and datasets are imported inside the methods, so that mistyped recipes are refused without waiting for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hftune.config.keys import key
from hftune.errors import ConfigError
from hftune.metrics.records import directions, rouge_names
from hftune.tasks.source_to_target import SourceToTarget
from hftune.tasks.text import NO_LABEL
from hftune.tasks.validation import bound_problems

if TYPE_CHECKING:
    import numpy as np
    from datasets import Dataset
    from torch import Tensor
    from transformers import PreTrainedModel

    from hftune.data.jieba_tokenizer import JiebaTokenizer
    from hftune.data.tokenized import Texts
    from hftune.task import Batch


@dataclass
class TitleGeneration(SourceToTarget):
    """Generate titles. The loss is cross-entropy; an item is a token of the title, its end token included."""

    model: str | None = key("Lowin/chinese-bigbird-base-4096", changes="model")
    """BERT, BigBird or a model trained with this task: name on the Hub or local folder. null: new, from model_config."""
    model_config: dict[str, Any] = key(dict, changes="model")
    """Fields of the model's config to override; if model is null, those that differ from the defaults of BERT."""
    dataset: str = key("csebuetnlp/xlsum", changes="data")
    """Data set name on the Hub (owner/name), or module:function that returns rows. With data_files: their format (json, csv,
    parquet or arrow), only needed if their suffixes do not show it."""
    data_dir: str | None = key(None, changes="data")
    """Folder of the Hub repository to read instead of the whole repository, such as XL-Sum's chinese_simplified."""
    architecture: Literal["prefix_lm", "encoder_decoder"] = "prefix_lm"
    """prefix_lm: one stack of layers, with full attention to the source, generates the title. encoder_decoder: a block-sparse
    BigBird encoder, whose cost is linear in the source length, and a BERT decoder, both initialized from model; it needs
    less memory."""
    vocabulary: str | None = None
    """Folder written by `hftune vocab`, for a new model (model: null). null: a vocabulary is trained on the texts."""
    vocab_size: int = 8000
    """Size of the vocabulary that is trained on the texts, if model and vocabulary are null."""
    source_column: str | None = None
    """Column of the source texts. null: whichever of content, text and article the data set has."""
    target_column: str = "title"
    """Column of the titles."""
    max_source_length: int = 4096
    """Maximum length of a source in tokens; longer sources are truncated at the end."""
    max_target_length: int = 64
    """Maximum length of a title in tokens, for references and generated titles."""

    target_name = "title"
    source_shown = 60
    libraries = (*SourceToTarget.libraries, "hftune.models.bigbird")
    metric_directions = directions(*rouge_names("zh"), "exact_match_folded", "mean_length", "empty_share")
    sample_fields = ("source", "title", "generated")

    def validate(self) -> list[str]:
        from hftune.data.files import model_folder_problems, vocabulary_problems

        minimum = {"max_source_length": 3, "max_target_length": 2, "vocab_size": 100}
        minimum |= {"max_train_samples": 1, "max_eval_samples": 1}
        return [
            *self._split_problems(optional=()),
            *model_folder_problems(self.model, {"model_type": "is given by the architecture"}),
            *vocabulary_problems(self.vocabulary, self.model),
            *bound_problems(self, minimum),
            *self._generation_problems(),
        ]

    def columns(self, rows: Dataset) -> dict[str, str]:
        from hftune.data.rows import find_column

        source = self.source_column or find_column(rows, "task.source_column", SOURCES)
        return {"source_column": source, "target_column": self.target_column}

    @cached_property
    def text_tokenizer(self) -> JiebaTokenizer:
        """The jieba tokenizer of the model or the vocabulary, checked on the texts; or one trained on them."""
        from hftune.data.cache import cached_value
        from hftune.data.jieba_tokenizer import JiebaTokenizer, check_tokenizer
        from hftune.data.vocabulary import save_tokenizer, train_vocabulary
        from hftune.models.pretrained import TOKENIZER, folder_of

        train, folder = self._rows["train"], self.model or self.vocabulary
        if folder is None:
            columns = (self._source, self.target_column)
            key = ["jieba", train._fingerprint, columns, self.vocab_size, version("jieba"), version("tokenizers")]
            texts = (text for column in columns for text in train[column])
            return save_tokenizer(cached_value(key, lambda: train_vocabulary(texts, self.vocab_size)))
        tokenizer = JiebaTokenizer.from_pretrained(folder_of(folder, self.model_commit, TOKENIZER))
        check_tokenizer(tokenizer, folder, train[:100][self._source])
        return tokenizer

    def datasets(self) -> dict[str, Texts]:
        """Return the tokenized splits: source, title (tokens), source_cut, title_cut (bool), and index (of the row)."""
        return {split: self._tokenized(split) for split in self._rows}

    def _tokenized(self, split: str) -> Texts:
        import numpy as np

        from hftune.data.cache import idle_cores, mapped
        from hftune.data.tokenized import cached_texts, flat_arrays, tokenizer_key

        rows, tokenizer = self._rows[split], self.text_tokenizer

        def make() -> dict[str, Any]:
            settings = {"tokenizer": tokenizer, **self._encoded_by}
            encoded = mapped(rows, encode, f"Tokenizing {split}", idle_cores(len(rows)), **settings)
            return {**flat_arrays(encoded), "index": np.arange(len(rows))}

        return cached_texts([rows._fingerprint, tokenizer_key(tokenizer), self._encoded_by], make)

    @property
    def _encoded_by(self) -> dict[str, Any]:
        """Keyword arguments of ``encode``."""
        columns = {"source_column": self._source, "target_column": self.target_column}
        return {**columns, "max_source_length": self.max_source_length, "max_target_length": self.max_target_length}

    def _base_config(self) -> Any:
        """Return the config of the BERT or BigBird that the model is built from, or of an export of this task."""
        from transformers import BigBirdConfig

        from hftune.models.bigbird import make_config
        from hftune.models.pretrained import load_config

        if self.model is not None:
            return load_config(self.model, {}, self.model_commit)
        return make_config(BigBirdConfig, self._overrides())

    def _overrides(self) -> dict[str, Any]:
        return {**self.model_config, **self._ids, **({"vocab_size": len(self.text_tokenizer)} if self.model is None else {})}

    @property
    def _ids(self) -> dict[str, int]:
        tokens = self.text_tokenizer
        return {"pad_token_id": tokens.pad_token_id, "bos_token_id": tokens.cls_token_id, "eos_token_id": tokens.sep_token_id}

    @cached_property
    def _padded_source(self) -> Callable[[int], int]:
        """Function from the length of a source to its padded length: a block-sparse encoder pads to whole blocks."""
        from hftune.models.bigbird import BlockSparseBigBirdConfig

        if self.architecture == "prefix_lm":
            return int
        base = self._base_config()
        overrides = {name: value for name, value in self.model_config.items() if name != "decoder"}
        encoder = getattr(base, "encoder", None) or BlockSparseBigBirdConfig.warm_start(base, **overrides)
        return getattr(encoder, "padded_length", int)

    def build_model(self) -> PreTrainedModel:
        """Load the model, or build a new one, and set its generation config."""
        import torch
        from transformers import GenerationConfig

        from hftune.models.bigbird import PrefixLM, PrefixLMConfig, build_encoder_decoder
        from hftune.models.bigbird_attention import NO_FLEX_ON_CPU
        from hftune.models.pretrained import load_model

        ids, overrides, base = self._ids, self._overrides(), self._base_config()
        self._check_positions(getattr(base, "encoder", base))
        if self.architecture == "prefix_lm":
            config = PrefixLMConfig.warm_start(base, **overrides)
            model = load_model(PrefixLM, self.model, config, self.model_commit)
        else:
            special: dict[str, Any] = {"start_token_id": ids["bos_token_id"], "end_token_id": ids["eos_token_id"]}
            special |= {"pad_token_id": ids["pad_token_id"], "commit": self.model_commit}
            model = build_encoder_decoder(self.model, base, **special, **self.model_config)
            if getattr(model.config.encoder, "block_sparse_kernel", None) == "flex" and not torch.accelerator.is_available():
                raise ConfigError(NO_FLEX_ON_CPU)  # rather than in the first step
        own = GenerationConfig(**ids, decoder_start_token_id=ids["bos_token_id"])
        model.generation_config = self._set_generation(own)
        return model

    def _check_positions(self, config: Any) -> None:
        longest = {
            "prefix_lm": self.max_source_length + self.max_target_length,
            "encoder_decoder": max(self.max_source_length, self.max_target_length),
        }[self.architecture]
        if longest > config.max_position_embeddings:
            raise ConfigError(
                f"task.max_source_length={self.max_source_length} and task.max_target_length={self.max_target_length} need "
                f"{longest} positions with architecture={self.architecture}; the model has {config.max_position_embeddings}. "
                "Lower one of them."
            )

    def notices(self, datasets: Mapping[str, Any], model: PreTrainedModel) -> list[str]:
        messages = [] if self.source_column else [f"task.source_column is not set: using column {self._source!r}."]
        messages += self._row_notices(self._rows, [self._source]) + self._cut_notices(datasets, "Titles")
        if self.architecture == "encoder_decoder":
            padded, block = model.config.encoder.padded_length(self.max_source_length), model.config.encoder.block_size
            if padded > self.max_source_length:
                messages.append(
                    f"task.max_source_length={self.max_source_length} is not a multiple of the encoder's block size {block}: "
                    f"the longest sources are padded to {padded} tokens."
                )
        return messages

    def sizes(self, dataset: Any) -> np.ndarray:
        """Return the tokens of source and title, which ``collate`` pads independently, without the title's last token."""
        import numpy as np

        return super().sizes(dataset) - np.array([0, 1], np.int32)

    def padded_length(self, sizes: Sequence[int]) -> int:
        source, title = sizes
        return self._padded_source(source) + title

    def collate(self, examples: Sequence[dict[str, Any]]) -> Batch:
        """Lay out source and title as two blocks of columns, S and T wide, the title padded on the right.

        For prefix_lm the source is padded on the left, so that it ends where its title begins, both in training and in
        generation.

        Returns:
            source and source_mask (N, S), title (N, T): int64. labels (N, T): the token after each token of the title, NO_LABEL
            after the last. index (N,): row of the data.
        """
        from hftune.data.tokenized import ragged, values

        pad, side = self.text_tokenizer.pad_token_id, "left" if self.architecture == "prefix_lm" else "right"
        source_NS, source_mask_NS = ragged(examples, "source").padded(pad, side)
        titles = ragged(examples, "title")
        return {
            "source": source_NS,
            "source_mask": source_mask_NS,
            "title": titles.without_last().padded(pad)[0],
            "labels": titles.without_first().padded(NO_LABEL)[0],
            "index": values(examples, "index"),
        }

    def inputs(self, batch: Batch) -> dict[str, Any]:
        source, title = batch["source"], batch["title"]
        if self.architecture == "encoder_decoder":
            tokens = {"input_ids": source, "attention_mask": batch["source_mask"], "decoder_input_ids": title}
            return {**tokens, "use_cache": False}
        # Logits of the title only: those of a source of 4,096 tokens would take 650 MB per row.
        return {**_joined(batch, title, batch["labels"] != NO_LABEL), "logits_to_keep": title.shape[1], "use_cache": False}

    def prompt(self, batch: Batch) -> dict[str, Tensor]:
        start = batch["title"][:, :1]
        if self.architecture == "encoder_decoder":
            return {"input_ids": batch["source"], "attention_mask": batch["source_mask"]}
        return _joined(batch, start, start == start)

    def empty_target(self) -> dict[str, Any]:
        return {"title": [self.text_tokenizer.cls_token_id, self.text_tokenizer.sep_token_id]}

    def describe(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the rows with each title's ROUGE-L on characters, and what it lacks to 1 as the error."""
        from hftune.metrics.rouge import rouge_l_of_each

        name, scores = rouge_l_of_each([row["generated"] for row in rows], [row["title"] for row in rows], "zh")
        return [{**row, name: round(score, 6), "error": round(1 - score, 6)} for row, score in zip(rows, scores, strict=True)]

    def metrics(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        from hftune.metrics.rouge import exact_match, folded, lengths, rouge

        texts, titles = [row["generated"] for row in rows], [row["title"] for row in rows]
        matched = exact_match([*map(folded, texts)], [*map(folded, titles)])
        return {**rouge(texts, titles, "zh"), "exact_match_folded": matched, **lengths(texts)}

    def load(self, directory: Path) -> PreTrainedModel:
        from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

        import hftune.models.bigbird  # noqa: F401 - registers the classes
        from hftune.data.jieba_tokenizer import JiebaTokenizer

        self.text_tokenizer = JiebaTokenizer.from_pretrained(directory)
        auto = AutoModelForCausalLM if self.architecture == "prefix_lm" else AutoModelForSeq2SeqLM
        model = self._load_saved(auto, directory)
        model.generation_config = self._set_generation(model.generation_config)  # the recipe's may have changed since
        return model


def _joined(batch: Batch, title: Tensor, is_title: Tensor) -> dict[str, Tensor]:
    """Concatenate source and title: input_ids, attention_mask, token_type_ids (0 source, 1 title)."""
    import torch

    types = [torch.zeros_like(batch["source"]), torch.ones_like(title)]
    return {
        "input_ids": torch.cat([batch["source"], title], 1),
        "attention_mask": torch.cat([batch["source_mask"], is_title.long()], 1),
        "token_type_ids": torch.cat(types, 1),
    }


SOURCES = ("content", "text", "article")
"""Columns that may hold the source texts, if ``source_column`` is not set."""


def encode(
    batch: dict[str, list],
    tokenizer: JiebaTokenizer,
    source_column: str,
    target_column: str,
    max_source_length: int,
    max_target_length: int,
) -> dict[str, list]:
    """Tokenize: source [CLS] ... [SEP], title [CLS] ... [SEP]; in generation, [CLS] starts the title and [SEP] ends it."""
    from hftune.data.tokenized import to_ids

    sources, source_cut = to_ids(batch[source_column], tokenizer, max_source_length)
    titles, title_cut = to_ids(batch[target_column], tokenizer, max_target_length)
    return {"source": sources, "title": titles, "source_cut": source_cut, "title_cut": title_cut}

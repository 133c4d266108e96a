"""Generation of titles for long Chinese texts, from the weights of BERT or BigBird, or from scratch.

torch, transformers and datasets are imported inside the methods, so that mistyped recipes are refused without waiting for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from hftune.config.keys import key
from hftune.data.columns import TEXTS, Role
from hftune.data.files import model_folder_problems, vocabulary_problems
from hftune.errors import ConfigError, format_value
from hftune.metrics.records import directions, rouge_names
from hftune.tasks.seq2seq import SourceToTarget
from hftune.tasks.text import NO_LABEL

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor
    from transformers import PreTrainedModel

    from hftune.data.jieba_tokenizer import JiebaTokenizer
    from hftune.task import Batch


@dataclass
class TitleGeneration(SourceToTarget):
    """Generate titles. The loss is cross-entropy; an item is a token of the title, its end token included."""

    model: str | None = key("Lowin/chinese-bigbird-base-4096", changes="model")
    """BERT, BigBird or a model trained with this task: name on the Hub or local folder. null: new, from model_config."""
    model_config: dict[str, Any] = key(dict, changes="model")
    """Fields of the model's config to override; if model is null, those that differ from the defaults of BERT."""
    dataset: str | None = key("csebuetnlp/xlsum", changes="data")
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
    vocab_size: int = key(8000, ge=100)
    """Size of the vocabulary that is trained on the texts, if model and vocabulary are null."""
    source_column: str | None = None
    """Column of the source texts. null: whichever of content, text and article the data set has."""
    target_column: str = "title"
    """Column of the titles."""
    max_source_length: int = key(4096, ge=3)
    """Maximum length of a source in tokens; longer sources are truncated at the end."""
    max_target_length: int = key(64, ge=2)
    """Maximum length of a title in tokens, for references and generated titles."""

    columns: ClassVar[Mapping[str, Role]] = {
        "source": Role("text", ("content", "text", "article"), usual_inputs=TEXTS),
        "target": Role("text", optional_in={"predict"}),
    }
    encodes_in_python = True
    target_name = "title"
    source_shown = 60
    libraries = (*SourceToTarget.libraries, "hftune.models.bigbird")
    metric_directions = directions(*rouge_names("zh"), "exact_match_folded", "mean_length", "empty_share")
    sample_fields = ("source", "title", "generated")

    def model_problems(self) -> Iterator[str]:
        yield from model_folder_problems(self.model, {"model_type": "is given by the architecture"})
        yield from vocabulary_problems(self.vocabulary, self.model)
        if self.new_tokens:
            yield f"task.new_tokens={format_value(self.new_tokens)} is not for a vocabulary of jieba's words. Add them to that."

    @cached_property
    def text_tokenizer(self) -> JiebaTokenizer:
        """The jieba tokenizer of the model or the vocabulary, checked on the texts; or one trained on them."""
        from hftune.data.cache import cached_value
        from hftune.data.jieba_tokenizer import JiebaTokenizer, check_tokenizer
        from hftune.data.vocabulary import save_tokenizer, train_vocabulary
        from hftune.models.pretrained import TOKENIZER, folder_of

        train, folder = self.rows["train"], self.model or self.vocabulary
        if folder is None:
            versions = (version("rjieba"), version("tokenizers"))
            depends_on = ["jieba", train._fingerprint, self.text_columns_read, self.vocab_size, *versions]
            return save_tokenizer(cached_value(depends_on, lambda: train_vocabulary(self.training_texts(), self.vocab_size)))
        tokenizer = JiebaTokenizer.from_pretrained(folder_of(folder, self.model_commit, TOKENIZER))
        check_tokenizer(tokenizer, folder, train[:100][self.read_columns["source_column"]])
        return tokenizer

    def encoder(self, split: str) -> Callable[[dict[str, list]], dict[str, list]]:
        source, target = (self.read_columns[f"{name}_column"] for name in ("source", "target"))
        return partial(encode, self.text_tokenizer, source, target, self.max_source_length, self.max_target_length)

    def encoded_by(self) -> Any:
        return [self.max_source_length, self.max_target_length]

    def targets(self, split: str) -> Mapping[str, np.ndarray]:
        targets = super().targets(split)
        return {"index": targets["index"]} if split in ("train", "eval") else targets

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
        longest = {
            "prefix_lm": self.max_source_length + self.max_target_length,
            "encoder_decoder": max(self.max_source_length, self.max_target_length),
        }[self.architecture]
        if longest > (positions := getattr(base, "encoder", base).max_position_embeddings):
            raise ConfigError(
                f"task.max_source_length={self.max_source_length} and task.max_target_length={self.max_target_length} need "
                f"{longest} positions with architecture={self.architecture}; the model has {positions}. Lower one of them."
            )
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
        model.generation_config = self.set_generation(own)
        return model

    def notices(self, datasets: Mapping[str, Any], model: PreTrainedModel) -> list[str]:
        messages = super().notices(datasets, model)
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
        from hftune.data.tokenized import sizes_of

        return sizes_of(dataset, ["source", self.target_name], less=[0, 1])

    def padded_length(self, sizes: Sequence[int]) -> int:
        source, title = sizes
        return self._padded_source(source) + title

    def collate(self, examples: Sequence[dict[str, Any]]) -> Batch:
        """Lay out source and title as two blocks of columns, S and T wide, the title padded on the right.

        For prefix_lm the source is padded on the left, so that it ends where its title begins, both in training and in
        generation.

        Returns:
            source and source_mask (N, S), title (N, T): int64. labels (N, T): the token after each token of the title, NO_LABEL
            after the last. index (N,): row of the split.
        """
        from hftune.data.tokenized import ragged, values

        pad, side = self.text_tokenizer.pad_token_id, "left" if self.architecture == "prefix_lm" else "right"
        source_NS, source_mask_NS = ragged(examples, "source").padded(pad, side)
        titles, numbers = ragged(examples, "title"), [name for name in ("index", "split") if name in examples[0]]
        return {
            "source": source_NS,
            "source_mask": source_mask_NS,
            "title": titles.without_last().padded(pad)[0],
            "labels": titles.without_first().padded(NO_LABEL)[0],
            **{name: values(examples, name) for name in numbers},
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
        import hftune.models.bigbird  # noqa: F401 - registers the classes
        from hftune.data.jieba_tokenizer import JiebaTokenizer

        self.text_tokenizer = JiebaTokenizer.from_pretrained(directory)
        model = self.load_saved(directory)
        model.generation_config = self.set_generation(model.generation_config)  # the recipe's may have changed since
        return model

    @property
    def auto_class(self) -> str:  # type: ignore[override]  # depends on the architecture
        return "AutoModelForCausalLM" if self.architecture == "prefix_lm" else "AutoModelForSeq2SeqLM"


def _joined(batch: Batch, title: Tensor, is_title: Tensor) -> dict[str, Tensor]:
    """Concatenate source and title: input_ids, attention_mask, token_type_ids (0 source, 1 title)."""
    import torch

    types = [torch.zeros_like(batch["source"]), torch.ones_like(title)]
    return {
        "input_ids": torch.cat([batch["source"], title], 1),
        "attention_mask": torch.cat([batch["source_mask"], is_title.long()], 1),
        "token_type_ids": torch.cat(types, 1),
    }


def encode(
    tokenizer: JiebaTokenizer,
    source_column: str,
    target_column: str,
    max_source_length: int,
    max_target_length: int,
    rows: dict[str, list],
) -> dict[str, list]:
    """Tokenize: source [CLS] ... [SEP], title [CLS] ... [SEP]; in generation, [CLS] starts the title and [SEP] ends it.

    A function, which several processes can be given without the task and its rows.
    """
    from hftune.data.tokenized import to_ids

    sources, source_cut = to_ids(rows[source_column], tokenizer, max_source_length)
    titles, title_cut = to_ids(rows[target_column], tokenizer, max_target_length)
    return {"source": sources, "title": titles, "source_cut": source_cut, "title_cut": title_cut}

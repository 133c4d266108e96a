"""Text in, the same text out, each token predicted from those before it: WikiText-2, or any text of your own.

torch, transformers and datasets are imported inside the methods, so that a mistyped recipe is refused before they load.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hftune.errors import ConfigError
from hftune.tasks.text import NO_LABEL, TextTask, count_labels, token_loss
from hftune.tasks.validation import bound_problems

if TYPE_CHECKING:
    import datasets
    import numpy as np
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from hftune.data.blocks import Blocks
    from hftune.task import Batch

TRAINED = ("words", "basic_english")
"""Tokenizers that are made from the training text."""


@dataclass
class LanguageModeling(TextTask):
    """Predict the next token. The loss is cross-entropy, an item is a token. All rows of a split are one stream of tokens, cut
    into blocks: a sample is a block, and every token but the first is predicted exactly once."""

    model: str | None = None
    """A causal language model: name on the Hub (owner/name) or local folder. null: a fresh model from model_config."""
    model_config: dict[str, Any] = field(default_factory=dict)
    """Fields of the model's config to override; all of them, with model_type (transformer_lm, gpt2, llama, ...), where model is
    null."""
    dataset: str = "Salesforce/wikitext"
    """Name on the Hub (owner/name); or module:function that returns rows. With data_files, their format (text, json, csv,
    parquet or arrow), if their names do not tell."""
    dataset_config: str | None = "wikitext-2-v1"
    """Which of the Hub's data sets of that name. null: the only one."""
    data_files: dict[str, Any] | None = None
    """Files (or lists, or globs) of the splits: data_files.train, data_files.eval and, if you like, data_files.test. They win
    over dataset."""
    test_split: str | None = "test"
    """Split of the Hub's data set on which the best model is scored at the end. null: none."""
    max_train_samples: int | None = None
    """Train on this many blocks, drawn at random once. null: all."""
    max_eval_samples: int | None = None
    """Evaluate on this many blocks, drawn at random once. null: all."""
    max_test_samples: int | None = None
    """Score the best model on this many blocks of the test split, drawn at random once. null: all."""
    tokenizer: str | None = None
    """words: split at white space, nothing changed. basic_english: lower-cased, punctuation apart. Both are made from the
    training text, for fresh models. Or a name on the Hub or a local folder. null: the model's own."""
    tokenizer_revision: str | None = None
    """Commit, tag or branch of the tokenizer on the Hub. null: the newest commit."""
    vocab_size: int | None = None
    """Most tokens of words and basic_english; rarer words are <unk>. null: all words."""
    text_column: str = "text"
    """Column of the texts; empty ones are empty lines."""
    block_length: int = 35
    """Tokens in a sample, the article's bptt. A model sees no further back."""
    generation: dict[str, Any] = field(default_factory=dict)
    """How texts are continued, such as max_new_tokens, do_sample, temperature: fields of GenerationConfig."""

    metric_directions = {"perplexity": "min"}
    sample_fields = ("text", "perplexity")

    def validate(self) -> list[str]:
        from hftune.data.files import data_file_problems, model_folder_problems

        minimum = {"block_length": 1, "vocab_size": 3, "max_train_samples": 1, "max_eval_samples": 1, "max_test_samples": 1}
        return [
            *data_file_problems(self.dataset, self.data_files, optional=("test",)),
            *model_folder_problems(self.model, self.model_config, example="gpt2"),
            *self._tokenizer_problems(),
            *bound_problems(self, minimum),
        ]

    def _tokenizer_problems(self) -> list[str]:
        from hftune.data.files import is_folder
        from hftune.data.hub import name_problems

        kinds = " or ".join(TRAINED)
        if self.tokenizer is None:
            if self.model is None:
                return [f"task.model=null builds a fresh model: set task.tokenizer to {kinds}, or to a name or a folder."]
        elif self.tokenizer in TRAINED:
            if self.model is not None:
                return [
                    f"task.tokenizer={self.tokenizer} makes a vocabulary that task.model={self.model} does not know. "
                    "Set task.tokenizer=null, which takes the model's own."
                ]
        elif is_folder(self.tokenizer) and not Path(self.tokenizer).expanduser().is_dir():
            return [f"task.tokenizer={self.tokenizer}: there is no such folder."]
        elif not is_folder(self.tokenizer) and "/" not in self.tokenizer:
            return [*name_problems("task.tokenizer", self.tokenizer, "model", TRAINED)]
        if self.vocab_size is not None and self.tokenizer not in TRAINED:
            return [f"task.vocab_size={self.vocab_size} bounds what is made from the text: task.tokenizer={kinds}."]
        return []

    @property
    def _source_splits(self) -> dict[str, str]:
        """Name in the data set of each split that there is; files and functions may leave test out."""
        has_test = "test" in self.data_files if self.data_files else self.test_split is not None
        return {"train": self.train_split, "eval": self.eval_split, **({"test": self.test_split or ""} if has_test else {})}

    @property
    def _counts(self) -> dict[str, int | None]:
        return dict.fromkeys(self._source_splits)  # max_*_samples count blocks, not rows

    @cached_property
    def tokenizer_commit(self) -> str | None:
        """What is loaded of a tokenizer with a name of its own on the Hub."""
        from hftune.data.files import model_commit

        named = None if self.tokenizer in TRAINED else self.tokenizer
        return model_commit(named, self.tokenizer_revision, "task.tokenizer")

    def commits(self) -> dict[str, str]:
        from hftune.data.hub import known

        return super().commits() | known({"task.tokenizer": self.tokenizer_commit})

    @cached_property
    def _rows(self) -> dict[str, datasets.Dataset]:
        return self._load_rows({"task.text_column": self.text_column}, texts=[self.text_column], may_be_empty=True)

    @cached_property
    def text_tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's own tokenizer, the one that was named, or one made from the training text."""
        from hftune.data.word_tokenizer import train_word_tokenizer
        from hftune.models.pretrained import load_tokenizer

        if self.tokenizer in TRAINED:
            return train_word_tokenizer(self._rows["train"][self.text_column], self.tokenizer, self.vocab_size)
        if self.tokenizer is not None:
            return load_tokenizer(self.tokenizer, "task.tokenizer", self.tokenizer_commit)
        return load_tokenizer(self.model, commit=self.model_commit)

    def datasets(self) -> dict[str, Blocks]:
        """Return the splits as blocks: input_ids and labels, int64."""
        from hftune.data.blocks import Blocks, check_stream, token_stream

        counts = {"train": self.max_train_samples, "eval": self.max_eval_samples, "test": self.max_test_samples}
        blocks = {}
        for split, rows in self._rows.items():
            stream = token_stream(rows, self.text_column, self.text_tokenizer, split)
            check_stream(stream, self.block_length, split)
            blocks[split] = Blocks(stream, self.block_length, counts[split])
        return blocks

    def build_model(self) -> PreTrainedModel:
        """Load or draw the model, and settle how it generates."""
        from transformers import AutoModelForCausalLM, GenerationConfig

        import hftune.models.transformer_lm  # noqa: F401 - registers the classes
        from hftune.models.pretrained import load_config, load_model

        tokens = self.text_tokenizer
        begin = tokens.eos_token_id if tokens.bos_token_id is None else tokens.bos_token_id
        ends = {"bos_token_id": begin, "eos_token_id": tokens.eos_token_id}
        # No pad_token_id: where the end pads, as here, some models would keep its embedding at 0.
        fresh = {"vocab_size": len(tokens), **ends} if self.model is None else {}
        config = load_config(self.model, {**self.model_config, **fresh}, self.model_commit)
        self._check_config(config)
        model = load_model(AutoModelForCausalLM, self.model, config, self.model_commit)
        model.generation_config = GenerationConfig(**ends, pad_token_id=tokens.pad_token_id, **self.generation)
        return model

    def _check_config(self, config: Any) -> None:
        config = config.get_text_config()
        positions = getattr(config, "max_position_embeddings", None)
        if positions is not None and positions < self.block_length:
            raise ConfigError(f"task.block_length={self.block_length} is more than the {positions} positions of the model.")
        if config.vocab_size < len(self.text_tokenizer):
            raise ConfigError(
                f"The tokenizer knows {len(self.text_tokenizer)} tokens, task.model={self.model} only {config.vocab_size}. "
                "Set task.tokenizer=null, which takes the model's own."
            )

    def notices(self, datasets: Mapping[str, Blocks], model: PreTrainedModel) -> list[str]:
        from hftune.data import notices

        said = notices.ignored_splits(self)
        said += notices.left_out({split: (len(blocks), blocks.total) for split, blocks in datasets.items()}, "blocks")
        inputs = {split: (block["input_ids"] for block in blocks) for split, blocks in datasets.items()}
        return [*said, *notices.shared(notices.shared_arrays(inputs), "blocks"), *self._unknown_words(datasets)]

    def _unknown_words(self, datasets: Mapping[str, Blocks]) -> list[str]:
        unknown = self.text_tokenizer.unk_token_id
        if unknown is None or self.text_tokenizer.unk_token_id == self.text_tokenizer.eos_token_id:
            return []
        shares = {split: float((blocks.stream == unknown).mean()) for split, blocks in datasets.items()}
        said = ", ".join(f"{share:.1%} of {split}" for split, share in shares.items() if share)
        return [f"{self.text_tokenizer.unk_token} stands for {said}."] if said else []

    def lengths(self, dataset: Blocks) -> np.ndarray:
        return dataset.lengths

    def collate(self, examples: list[dict[str, Any]]) -> Batch:
        """Pad on the right: input_ids, labels (N, T) int64, labels NO_LABEL on padding.

        There is no attention mask: no token sees what comes after it, and without one attention takes its fastest kernel.
        """
        import torch
        from torch.nn.utils.rnn import pad_sequence

        padding = {"input_ids": self.text_tokenizer.pad_token_id, "labels": NO_LABEL}
        return {
            name: pad_sequence([torch.as_tensor(example[name]) for example in examples], batch_first=True, padding_value=value)
            for name, value in padding.items()
        }

    def inputs(self, batch: Batch) -> dict[str, Any]:
        return {"input_ids": batch["input_ids"], "use_cache": False}

    def loss(self, outputs: Any, target: Tensor) -> Tensor:
        return token_loss(outputs.logits, target)

    def num_items(self, target: Tensor) -> int:
        return count_labels(target)

    def predictions(self, outputs: Any, model: PreTrainedModel, batch: Batch) -> list[dict[str, Any]]:
        """Rows of text (a block's first words), tokens (that were predicted), loss (their sum) and perplexity (a token's)."""
        labels_NT = batch["labels"]
        losses_N = token_losses(outputs.logits, labels_NT).sum(1).tolist()
        counts_N = (labels_NT != NO_LABEL).sum(1).tolist()
        texts = self.text_tokenizer.batch_decode(batch["input_ids"][:, :12])
        return [
            {"text": text, "tokens": count, "loss": loss, "perplexity": perplexity(loss, count)}
            for text, count, loss in zip(texts, counts_N, losses_N, strict=True)
        ]

    def metrics(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        total = math.fsum(row["loss"] for row in rows)
        return {"perplexity": perplexity(total, sum(row["tokens"] for row in rows))}

    def load(self, directory: Path) -> PreTrainedModel:
        from transformers import AutoModelForCausalLM

        import hftune.models.transformer_lm  # noqa: F401 - registers the classes
        from hftune.models.pretrained import load_tokenizer

        self.text_tokenizer = load_tokenizer(str(directory))
        model = self._load_saved(AutoModelForCausalLM, directory)
        model.generation_config.update(**self.generation)  # a recipe may continue otherwise
        return model

    def example_inputs(self) -> list[str]:
        texts = (text.strip() for text in self._rows["eval"][self.text_column])
        return [" ".join(text.split()[:8]) for text in texts if len(text.split()) > 8][:2]

    def predict(self, model: PreTrainedModel, inputs: list[str]) -> list[dict[str, Any]]:
        """Continue each text, as ``generated``; ``perplexity`` is the text's own, null for one of a single token."""
        from hftune.data.text import check_inputs

        check_inputs(inputs)
        return [self._continue(model, text) for text in inputs]

    def _continue(self, model: PreTrainedModel, text: str) -> dict[str, Any]:
        """Continue one text; one by one, since not every tokenizer can pad on the left."""
        import torch

        tokens = self.text_tokenizer
        ids = torch.tensor(tokens(text, add_special_tokens=False, verbose=False)["input_ids"], device=model.device)
        positions = getattr(model.config, "max_position_embeddings", None) or len(ids)
        losses = [
            token_losses(model(input_ids=block[None, :-1], use_cache=False).logits, block[None, 1:])
            for start in range(0, len(ids) - 1, positions)
            if len(block := ids[start : start + positions + 1]) > 1
        ]
        room = positions - (model.generation_config.max_new_tokens or 20)  # generate's own default
        prompt = ids[-room:] if 0 < room < len(ids) else ids
        written = model.generate(prompt[None], attention_mask=torch.ones_like(prompt[None]))[0, len(prompt) :]
        total = math.fsum(float(loss_1T.sum()) for loss_1T in losses)
        return {
            "generated": tokens.decode(written, skip_special_tokens=True),
            "perplexity": round(perplexity(total, len(ids) - 1), 2) if losses else None,
        }


def token_losses(logits_NTV: Tensor, labels_NT: Tensor) -> Tensor:
    """Return each token's cross-entropy (N, T) float32, 0 where the label is NO_LABEL."""
    return token_loss(logits_NTV, labels_NT, reduction="none").view_as(labels_NT)


def perplexity(total_loss: float, num_tokens: int) -> float:
    """Return exp(mean loss): weighted by tokens, hence the same however the text was cut into batches."""
    mean = total_loss / num_tokens
    return math.exp(mean) if mean < 700 else math.inf

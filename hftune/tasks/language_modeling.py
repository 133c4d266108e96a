"""Language modeling: each token of a text predicted from those before it, on WikiText-2 or any text of your own.

torch, transformers and datasets are imported inside the methods, so that mistyped recipes are refused without waiting for them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hftune.config.keys import key
from hftune.data.files import is_folder, model_commit, model_folder_problems
from hftune.data.hub import known, name_problems
from hftune.errors import ConfigError
from hftune.metrics.records import directions
from hftune.tasks.text import NO_LABEL, TextTask, TokenTask, check_inputs, head_losses, pieces

if TYPE_CHECKING:
    import numpy as np
    from datasets import Dataset
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from hftune.data.blocks import Blocks, JoinedBlocks
    from hftune.task import Batch

TRAINED = ("words", "basic_english")
"""Tokenizers that are built from the training text."""


@dataclass
class LanguageModeling(TokenTask):
    """Predict the next token. The loss is cross-entropy; an item is a token. The rows of a split are concatenated and cut into
    blocks of block_length tokens. A sample is a block, and every token but the first is predicted exactly once."""

    model: str | None = key(None, changes="model")
    """Causal language model: name on the Hub (owner/name) or local folder. null: a new model built from model_config."""
    model_config: dict[str, Any] = key(dict, changes="model")
    """Fields of the model's config to override; if model is null, the whole config, with its model_type (transformer_lm, gpt2,
    llama, ...)."""
    test_split: str | None = key("test", changes="output")
    """Split of the data set on the Hub on which the best model is evaluated once, after training. null: none."""
    max_train_samples: int | None = key(None, ge=1, changes="data")
    """Number of training blocks to use, a random subset that is the same in every run. null: all."""
    max_eval_samples: int | None = key(None, ge=1, changes="output")
    """Number of evaluation blocks to use, a random subset that is the same in every run. null: all."""
    max_test_samples: int | None = key(None, ge=1, changes="output")
    """Number of test blocks to use, a random subset that is the same in every run. null: all."""
    tokenizer: str | None = key(None, changes="model")
    """Tokenizer name on the Hub or local folder; or, for new models, one built from the training text: words (split at white
    space) or basic_english (lower-cased, punctuation split off). null: the tokenizer of the model."""
    tokenizer_revision: str | None = key(None, changes="model")
    """Commit, tag or branch of the tokenizer on the Hub. null: the newest commit."""
    vocab_size: int | None = key(None, ge=3)
    """Maximum vocabulary size of words and basic_english; rarer words become <unk>. null: all words."""
    text_column: str = "text"
    """Column of the texts. Empty texts are kept as empty lines."""
    block_length: int = key(35, ge=1)
    """Tokens in a block, also known as bptt. The model sees no further back than the start of a block."""
    generation: dict[str, Any] = key(dict, changes="output")
    """Generation settings, such as max_new_tokens or temperature: fields of transformers' GenerationConfig."""

    texts_run_on = True
    texts_may_be_empty = True
    samples_are = "blocks"
    fold_rows = None  # the samples are blocks
    auto_class = "AutoModelForCausalLM"
    length_keys = ("block_length",)
    libraries = (*TextTask.libraries, "hftune.data.blocks", "hftune.models.generation", "hftune.models.transformer_lm")
    metric_directions = directions("perplexity")
    scored_head = True
    sample_fields = ("text", "perplexity")

    def model_problems(self) -> Iterator[str]:
        yield from model_folder_problems(self.model, self.model_config, example="gpt2")
        if self.datasets_ and self.max_train_samples is not None:
            yield f"task.max_train_samples={self.max_train_samples} and task.datasets: give the data sets smaller weights."
        kinds = " or ".join(TRAINED)
        if self.tokenizer is None:
            if self.model is None:
                yield f"task.model=null builds a new model: set task.tokenizer to {kinds}, or to a name or a folder."
        elif self.tokenizer in TRAINED:
            if self.model is not None:
                yield (
                    f"task.tokenizer={self.tokenizer} builds a vocabulary that does not fit task.model={self.model}. "
                    "Set task.tokenizer=null to use the model's own tokenizer."
                )
        elif is_folder(self.tokenizer) and not Path(self.tokenizer).expanduser().is_dir():
            yield f"task.tokenizer={self.tokenizer}: there is no such folder."
        elif not is_folder(self.tokenizer) and "/" not in self.tokenizer:
            yield from name_problems("task.tokenizer", self.tokenizer, "model", TRAINED)
        if self.vocab_size is not None and self.tokenizer not in TRAINED:
            yield f"task.vocab_size={self.vocab_size} has an effect only with task.tokenizer={kinds}."

    @property
    def row_counts(self) -> dict[str, int | None]:
        return dict.fromkeys(self.source_splits)  # max_*_samples count blocks, not rows

    @cached_property
    def tokenizer_commit(self) -> str | None:
        """Commit of the tokenizer that is loaded from the Hub, if the recipe names one."""
        name = None if self.tokenizer in TRAINED else self.tokenizer
        return model_commit(name, self.tokenizer_revision, "task.tokenizer")

    def commits(self) -> dict[str, str]:
        return super().commits() | known({"task.tokenizer": self.tokenizer_commit})

    @cached_property
    def text_tokenizer(self) -> PreTrainedTokenizerBase:
        from hftune.data.cache import cached_value
        from hftune.data.word_tokenizer import train_words, word_tokenizer
        from hftune.models.pretrained import load_tokenizer

        if self.tokenizer in TRAINED:
            rows, column = self.rows["train"], self.text_column
            depends_on = ["words", rows._fingerprint, column, self.tokenizer, self.vocab_size, version("tokenizers")]
            words = cached_value(depends_on, lambda: train_words(filter(None, rows[column]), self.tokenizer, self.vocab_size))
            return word_tokenizer(words, self.tokenizer)
        if self.tokenizer is not None:
            return load_tokenizer(self.tokenizer, "task.tokenizer", self.tokenizer_commit)
        return load_tokenizer(self.model, commit=self.model_commit)

    def datasets(self) -> dict[str, Blocks | JoinedBlocks]:
        """Return the splits as blocks of input_ids and labels, int64."""
        from hftune.data.blocks import JoinedBlocks

        if self.mixed is None:
            return {split: self._blocks(rows, split) for split, rows in self.rows.items()}
        parts = zip(self.mixed.parts(self.rows["train"]), self.mixed.names, strict=True)
        train = JoinedBlocks([self._blocks(rows, "train", f"train ({name})") for rows, name in parts])
        return {"train": train, **{split: self._blocks(rows, split) for split, rows in self.rows.items() if split != "train"}}

    def _blocks(self, rows: Dataset, split: str, name: str | None = None) -> Blocks:
        from hftune.data.blocks import Blocks, check_stream, token_stream

        counts = {"train": self.max_train_samples, "eval": self.max_eval_samples, "test": self.max_test_samples}
        row_of = int if name is None else self.mixed.row_name
        stream = token_stream(rows, self.text_column, self.text_tokenizer, name or split, row_of)
        check_stream(stream, self.block_length, name or split)
        return Blocks(stream, self.block_length, counts[split])

    def samples_of_each(self, dataset: JoinedBlocks) -> list[int]:
        return [*map(len, dataset.datasets)]

    def build_model(self) -> PreTrainedModel:
        from transformers import GenerationConfig

        import hftune.models.transformer_lm  # noqa: F401 - registers the classes
        from hftune.models.generation import changed
        from hftune.models.pretrained import load_config

        tokens = self.text_tokenizer
        begin = tokens.eos_token_id if tokens.bos_token_id is None else tokens.bos_token_id
        ends = {"bos_token_id": begin, "eos_token_id": tokens.eos_token_id}
        # No pad_token_id: here it is the end token, whose embedding some models would then keep at 0.
        fresh = {"vocab_size": len(tokens), **ends} if self.model is None else {}
        config = load_config(self.model, {**self.model_config, **fresh}, self.model_commit)
        if config.get_text_config().vocab_size < len(tokens):
            raise ConfigError(
                f"The tokenizer has {len(tokens)} tokens, but task.model={self.model} has only "
                f"{config.get_text_config().vocab_size}. Set task.tokenizer=null to use the model's own tokenizer."
            )
        model = self.load_model(config)
        model.generation_config = changed(GenerationConfig(**ends, pad_token_id=tokens.pad_token_id), self.generation)
        return model

    def notices(self, datasets: Mapping[str, Any], model: PreTrainedModel) -> list[str]:
        from hftune.data import notices
        from hftune.data.digest import cached_row_hashes, content_digest

        messages = [*notices.ignored_splits(self), *notices.held_out(self, notices.num_rows(self.rows["train"])[1])]
        messages += self.mixture_notices(datasets["train"])
        messages += notices.left_out({split: (len(blocks), blocks.total) for split, blocks in datasets.items()}, "blocks")
        hashes = {split: cached_row_hashes(blocks, content_digest(blocks)) for split, blocks in datasets.items()}
        messages += notices.shared(hashes, "blocks")
        tokens = self.text_tokenizer
        if tokens.unk_token_id not in (None, tokens.eos_token_id):
            shares = {split: blocks.share_of(tokens.unk_token_id) for split, blocks in datasets.items()}
            if said := ", ".join(f"{share:.1%} of {split}" for split, share in shares.items() if share):
                messages.append(f"Tokens that are {tokens.unk_token}: {said}.")
        return messages

    def lengths(self, dataset: Blocks) -> np.ndarray:
        return dataset.lengths

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """Return no mask: no token sees the padding on its right, and without one attention uses its fastest kernel."""
        return {"input_ids": batch["input_ids"], "use_cache": False}

    def marked(self, example: Mapping[str, Any]) -> list[tuple[str, bool]]:
        ids = [*map(int, example["input_ids"]), int(example["labels"][-1])]
        return pieces(self.text_tokenizer, ids, [False, *[True] * (len(ids) - 1)])

    def predictions(self, outputs: Any, model: PreTrainedModel, batch: Batch) -> list[dict[str, Any]]:
        """Return rows of text (first words of the block), tokens (number predicted), loss (sum over them) and perplexity."""
        texts = self.text_tokenizer.batch_decode(batch["input_ids"][:, :12])
        return [{"text": text, **row} for text, row in zip(texts, token_rows(outputs, batch["labels"]), strict=True)]

    def describe(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the rows with the mean loss of each block's tokens as its error."""
        return [{**row, "error": round(row["loss"] / row["tokens"], 6) if row["tokens"] else 0.0} for row in rows]

    def metrics(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        return {"perplexity": perplexity(math.fsum(row["loss"] for row in rows), sum(row["tokens"] for row in rows))}

    def load(self, directory: Path) -> PreTrainedModel:
        import hftune.models.transformer_lm  # noqa: F401 - registers the classes
        from hftune.models.generation import changed, tidy

        model = super().load(directory)
        changed(tidy(model.generation_config, self.generation), self.generation)  # the recipe's may have changed since
        return model

    def example_inputs(self) -> list[str]:
        texts = (text.split() for text in self.rows.get("eval", self.rows["train"])[self.text_column])
        return [" ".join(words[:8]) for words in islice((words for words in texts if len(words) > 8), 2)]

    def predict(self, model: PreTrainedModel, inputs: list[str]) -> list[dict[str, Any]]:
        """Return each text's continuation (``generated``), and its own ``perplexity``, None for a text of a single token."""
        import torch

        from hftune.models.pretrained import max_positions

        check_inputs(inputs)
        tokens, maximum, rows = self.text_tokenizer, max_positions(model), []
        for text in inputs:  # one by one, because not every tokenizer can pad on the left
            ids = torch.tensor(tokens(text, add_special_tokens=False, verbose=False)["input_ids"], device=model.device)
            positions = maximum or len(ids)
            losses = [
                head_losses(model(input_ids=block[None, :-1], use_cache=False), block[None, 1:])
                for start in range(0, len(ids) - 1, positions)
                if len(block := ids[start : start + positions + 1]) > 1
            ]
            total = math.fsum(float(loss_1T.sum()) for loss_1T in losses)
            new = model.generation_config.max_new_tokens or 20  # the default of generate
            prompt = ids
            if maximum is not None:
                prompt = ids[-max(1, maximum - new) :]  # as much of the end as leaves room, or one token
                new = min(new, maximum - len(prompt))
            mask = torch.ones_like(prompt[None])
            generated = model.generate(prompt[None], attention_mask=mask, max_new_tokens=new)[0, len(prompt) :]
            said = tokens.decode(generated, skip_special_tokens=True)
            rows.append({"generated": said, "perplexity": round(perplexity(total, len(ids) - 1), 2) if losses else None})
        return rows


def token_rows(outputs: Any, labels_NT: Tensor) -> list[dict[str, Any]]:
    """Return rows of tokens (number of labels), loss (sum over them) and perplexity."""
    losses_N = head_losses(outputs, labels_NT).sum(1).tolist()
    counts_N = (labels_NT != NO_LABEL).sum(1).tolist()
    columns = zip(counts_N, losses_N, strict=True)
    return [{"tokens": count, "loss": loss, "perplexity": perplexity(loss, count)} for count, loss in columns]


def perplexity(total_loss: float, num_tokens: int) -> float:
    """Return exp(mean loss per token), which does not depend on how the text was cut into batches."""
    mean = total_loss / num_tokens
    return math.exp(mean) if mean < 700 else math.inf

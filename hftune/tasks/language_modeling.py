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
from hftune.tasks.blocks import BlockTask, perplexity
from hftune.tasks.text import check_inputs, head_losses, pieces

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from hftune.data.blocks import Blocks
    from hftune.task import Batch

TRAINED = ("words", "basic_english")
"""Tokenizers that are built from the training text."""


@dataclass
class LanguageModeling(BlockTask):
    """Predict the next token. The loss is cross-entropy; an item is a token. The rows of a split are concatenated and cut into
    blocks of block_length tokens. A sample is a block, and every token but the first is predicted exactly once."""

    model: str | None = key(None, changes="model")
    """Causal language model: name on the Hub (owner/name) or local folder. null: a new model built from model_config."""
    model_config: dict[str, Any] = key(dict, changes="model")
    """Fields of the model's config to override; if model is null, the whole config, with its model_type (transformer_lm, gpt2,
    llama, ...)."""
    test_split: str | None = key("test", changes="output")
    """Split of the data set on the Hub on which the best model is evaluated once, after training. null: none."""
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

    auto_class = "AutoModelForCausalLM"
    libraries = (*BlockTask.libraries, "hftune.models.generation", "hftune.models.transformer_lm")

    def model_problems(self) -> Iterator[str]:
        yield from model_folder_problems(self.model, self.model_config, example="gpt2")
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
        from hftune.models.pretrained import load_tokenizer, with_tokens

        if self.tokenizer in TRAINED:
            rows, column = self.rows["train"], self.text_column
            depends_on = ["words", rows._fingerprint, column, self.tokenizer, self.vocab_size, version("tokenizers")]
            words = cached_value(depends_on, lambda: train_words(filter(None, rows[column]), self.tokenizer, self.vocab_size))
            found = word_tokenizer(words, self.tokenizer)
        elif self.tokenizer is not None:
            found = load_tokenizer(self.tokenizer, "task.tokenizer", self.tokenizer_commit)
        else:
            found = load_tokenizer(self.model, commit=self.model_commit)
        return with_tokens(found, self.new_tokens)

    def new_blocks(self, rows: Dataset, split: str, name: str, count: int | None) -> Blocks:
        """Return blocks of input_ids and labels, int64."""
        from hftune.data.blocks import Blocks, check_stream, token_stream

        row_of = int if name == split else self.mixed.row_name
        stream = token_stream(rows, self.read_columns["text_column"], self.text_tokenizer, name, row_of)
        check_stream(stream, self.block_length, name)
        return Blocks(stream, self.block_length, count)

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
        if config.get_text_config().vocab_size + len(self.new_tokens or ()) < len(tokens):
            raise ConfigError(
                f"The tokenizer has {len(tokens)} tokens, but task.model={self.model} has only "
                f"{config.get_text_config().vocab_size}. Set task.tokenizer=null to use the model's own tokenizer."
            )
        model = self.load_model(config)
        model.generation_config = changed(GenerationConfig(**ends, pad_token_id=tokens.pad_token_id), self.generation)
        return model

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """Return no mask: no token sees the padding on its right, and without one attention uses its fastest kernel."""
        return {"input_ids": batch["input_ids"], "use_cache": False}

    def marked(self, example: Mapping[str, Any]) -> list[tuple[str, bool]]:
        ids = [*map(int, example["input_ids"]), int(example["labels"][-1])]
        return pieces(self.text_tokenizer, ids, [False, *[True] * (len(ids) - 1)])

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

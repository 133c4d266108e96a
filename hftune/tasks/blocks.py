"""The base of tasks on running text: the rows of a split become one stream of tokens, which is cut into blocks.

torch, transformers and datasets are imported inside the methods, so that mistyped recipes are refused without waiting for them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hftune.config.keys import key
from hftune.metrics.records import directions
from hftune.tasks.late_rows import late_rows, late_rows_each
from hftune.tasks.text import NO_LABEL, TokenTask, head_losses

if TYPE_CHECKING:
    import numpy as np
    from datasets import Dataset
    from torch import Tensor
    from transformers import PreTrainedModel

    from hftune.data.blocks import Blocks, JoinedBlocks


@dataclass
class BlockTask(TokenTask):
    """Base of tasks that predict tokens of blocks. A subclass says what a block is: ``block_length`` and ``new_blocks``."""

    max_train_samples: int | None = key(None, ge=1, changes="data")
    """Number of training blocks to use, a random subset that is the same in every run. null: all."""
    max_eval_samples: int | None = key(None, ge=1, changes="output")
    """Number of evaluation blocks to use, a random subset that is the same in every run. null: all."""
    max_test_samples: int | None = key(None, ge=1, changes="output")
    """Number of test blocks to use, a random subset that is the same in every run. null: all."""

    texts_run_on = True
    texts_may_be_empty = True
    samples_are = "blocks"
    fold_rows = None  # the samples are blocks
    length_keys = ("block_length",)
    libraries = (*TokenTask.libraries, "hftune.data.blocks")
    metric_directions = directions("perplexity")
    scored_head = True
    sample_fields = ("text", "perplexity")

    def new_blocks(self, rows: Dataset, split: str, name: str, count: int | None) -> Blocks:
        """Return ``count`` blocks of some rows, or all.

        Args:
            split: "train", "eval" or "test".
            name: what messages call the rows.

        Raises:
            DataError: there is too little text.
        """
        raise NotImplementedError

    def data_problems(self) -> Iterator[str]:
        yield from super().data_problems()
        if self.datasets_ and self.max_train_samples is not None:
            yield f"task.max_train_samples={self.max_train_samples} and task.datasets: give the data sets smaller weights."

    @property
    def row_counts(self) -> dict[str, int | None]:
        return dict.fromkeys(self.source_splits)  # max_*_samples count blocks, not rows

    def datasets(self) -> dict[str, Blocks | JoinedBlocks]:
        """Return the splits as blocks."""
        from hftune.data.blocks import JoinedBlocks

        counts = {"train": self.max_train_samples, "test": self.max_test_samples}
        blocks: dict[str, Any] = {
            split: self.new_blocks(rows, split, split, counts.get(split, self.max_eval_samples))
            for split, rows in self.rows.items()
            if split != "train" or self.mixed is None
        }
        if self.mixed is None:
            return blocks
        parts = zip(self.mixed.parts(self.rows["train"]), self.mixed.names, strict=True)
        train = JoinedBlocks([self.new_blocks(rows, "train", f"train ({name})", None) for rows, name in parts])
        return {"train": train, **blocks}

    def samples_of_each(self, dataset: JoinedBlocks) -> list[int]:
        return [*map(len, dataset.datasets)]

    def notices(self, datasets: Mapping[str, Any], model: PreTrainedModel) -> list[str]:
        from hftune.data import notices
        from hftune.data.digest import cached_row_hashes, content_digest

        messages, used = [*self.row_notices(), *self.mixture_notices(datasets["train"])], datasets.items()
        messages += notices.left_out({split: (len(blocks), blocks.total) for split, blocks in used}, self.samples_are)
        hashes = {split: cached_row_hashes(blocks, content_digest(blocks)) for split, blocks in used}
        messages += notices.shared(hashes, self.samples_are)
        tokens = self.text_tokenizer
        if tokens.unk_token_id not in (None, tokens.eos_token_id):
            shares = {split: blocks.share_of(tokens.unk_token_id) for split, blocks in used}
            if said := ", ".join(f"{share:.1%} of {split}" for split, share in shares.items() if share):
                messages.append(f"Tokens that are {tokens.unk_token}: {said}.")
        return messages

    def lengths(self, dataset: Blocks) -> np.ndarray:
        return dataset.lengths

    def predictions(self, outputs: Any, model: PreTrainedModel, batch: Mapping[str, Tensor]) -> list[dict[str, Any]]:
        """Return rows of text (first words of the block), tokens (number predicted), loss (sum over them) and perplexity."""
        rows, decode = token_rows(outputs, batch["labels"]), self.text_tokenizer.decode
        return late_rows(
            lambda ids_NT: [{"text": decode(ids_T), **row} for ids_T, row in zip(ids_NT, rows, strict=True)],
            batch["input_ids"][:, :12],
        )

    def describe(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the rows with the mean loss of each block's tokens as its error."""
        return [{**row, "error": round(row["loss"] / row["tokens"], 6) if row["tokens"] else 0.0} for row in rows]

    def metrics(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        return {"perplexity": perplexity(math.fsum(row["loss"] for row in rows), sum(row["tokens"] for row in rows))}


def token_rows(outputs: Any, labels_NT: Tensor) -> list[dict[str, Any]]:
    """Return rows of tokens (number of labels), loss (sum over them) and perplexity."""
    return late_rows_each(
        lambda count, loss: {"tokens": count, "loss": loss, "perplexity": perplexity(loss, count)},
        *((labels_NT != NO_LABEL).sum(1), head_losses(outputs, labels_NT).sum(1)),
    )


def perplexity(total_loss: float, num_tokens: int) -> float:
    """Return exp(mean loss per token), which does not depend on how the text was cut into batches; 1 without tokens."""
    mean = total_loss / max(1, num_tokens)
    return math.exp(mean) if mean < 700 else math.inf
